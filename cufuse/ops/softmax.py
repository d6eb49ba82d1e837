"""Softmax of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width


@on_stream
def softmax(
    x: Array,
    *,
    sinks: Array | None = None,
    start: Array | None = None,
    lengths: Array | None = None,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Return exp(x) / sum(exp(x)) of each row, in one launch.

    x: [..., n]; with any of the options [batch, heads, q_len, n], as `scores` makes it
    sinks: [heads], a logit for each head that joins the sum and is dropped
    start: [batch] int32; entries from start + q_len on are not read and become zeros
    lengths: [batch] int32; entries from lengths on are not read and become zeros
    out: [..., n], may be x

    Returns [..., n] in x's dtype; sums in float32. A row of -inf alone becomes zeros. Raises
    ValueError for sizes and TypeError for dtypes or mixed libraries.
    """
    scored = sinks is not None or start is not None or lengths is not None
    bound = checks.bind(
        "softmax",
        optional=("sinks", "start", "lengths"),
        x=(x, "batch heads q_len n" if scored else "... n"),
        sinks=(sinks, "heads"),
        start=(start, "batch", np.int32),
        lengths=(lengths, "batch", np.int32),
    )
    y = bound.output("out", out, bound["x"].shape, may_alias=("x",))
    if y.size == 0:
        return y
    arrays = {name: bound[name] for name in ("x", "sinks", "start", "lengths")}
    if bound.kind == "numpy":
        y[...] = reference.softmax(**arrays)
        return y
    n = bound.sizes["n"]
    rows = y.size // n
    jit.kernel("unfused/softmax.cu", "softmax", bound.dtype, width(n, bound["x"], y)).launch(
        rows,
        256,
        {
            **arrays,
            "y": y,
            "rows": rows,
            "heads": bound.sizes.get("heads", 1),
            "q_len": bound.sizes.get("q_len", 1),
            "n": n,
        },
        like=y,
        stream=stream,
    )
    return y
