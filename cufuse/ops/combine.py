"""Mixture of experts: the weighted sum of a token's experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width


@on_stream
def combine(
    y: Array,
    ids: Array,
    weights: Array,
    residual: Array | None = None,
    *,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Add the experts' outputs of each token, weighted, in ascending expert id.

    y: [m, k, n]
    ids: int32 [m, k]
    weights: float32 [m, k]
    residual: [m, n], added at the end
    out: [m, n], may be residual

    Returns [m, n] in y's dtype; summed in float32 and rounded once. Raises ValueError for sizes and
    TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind(
        "combine",
        optional=("residual",),
        y=(y, "m k n"),
        ids=(ids, "m k", np.int32),
        weights=(weights, "m k", np.float32),
        residual=(residual, "m n"),
    )
    m, k, n = (bound.sizes[name] for name in ("m", "k", "n"))
    total = bound.output("out", out, (m, n), may_alias=("residual",))
    if total.size == 0:
        return total
    if bound.kind == "numpy":
        total[...] = reference.combine(
            *(bound[name] for name in ("y", "ids", "weights", "residual"))
        )
        return total
    wide = {"y": bound["y"], "residual": bound["residual"], "out": total}
    kernel = jit.kernel(
        "unfused/combine.cu", "combine", bound.dtype, bound.dtype, width(n, *wide.values())
    )
    kernel.launch(
        m,
        256,
        {
            **wide,
            "ids": bound["ids"],
            "weights": bound["weights"],
            "k": k,
            "n": n,
            "n_experts": 2**31 - 1,  # how many there are is not known here
        },
        like=total,
        shared_bytes=4 * k,
        stream=stream,
    )
    return total
