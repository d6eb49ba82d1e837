"""Token ids to vectors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width


@on_stream
def embed(
    ids: Array,
    table: Array,
    *,
    scale: float = 1.0,
    start: Array | None = None,
    position_table: Array | None = None,
    token_type: Array | None = None,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Look up table rows, scale them and add position and token-type vectors, in one launch.

    ids: [...] int32; [batch, q_len] when `start` is given
    table: [vocab, dim]
    start: [batch] int32, the position of each sequence's first id; zeros when left out
    position_table: [max_pos, dim]; the position of ids[..., i] is i, plus start[b] when given
    token_type: [dim]
    out: [..., dim]

    Returns [..., dim] in the table's dtype: table[ids] * scale + position + token_type, summed in
    float32. An id or a position that is no row raises ValueError for NumPy arrays; kernels cannot
    raise and make that row NaN. Raises ValueError for sizes and TypeError for dtypes or mixed
    libraries.
    """
    bound = checks.bind(
        "embed",
        optional=("start", "position_table", "token_type"),
        ids=(ids, "..." if start is None else "batch q_len", np.int32),
        table=(table, "vocab dim"),
        start=(start, "batch", np.int32),
        position_table=(position_table, "max_pos dim"),
        token_type=(token_type, "dim"),
    )
    shape, dim = tuple(bound["ids"].shape), bound.sizes["dim"]
    if start is not None and position_table is None:
        raise ValueError("embed: start is given without a position_table; give both or neither")
    y = bound.output("out", out, (*shape, dim))
    if y.size == 0:
        return y
    q_len = shape[-1] if shape else 1
    if bound.kind == "numpy":
        _check_rows(bound, q_len)
        y[...] = reference.embed(
            bound["ids"],
            bound["table"],
            scale=scale,
            start=bound["start"],
            position_table=bound["position_table"],
            token_type=bound["token_type"],
        )
        return y
    vectors = {name: bound[name] for name in ("table", "position_table", "token_type")}
    per_access = width(dim, *vectors.values(), y)
    ctas_per_row = -(-dim // (128 * per_access))
    rows = math.prod(shape)
    vectors_read = rows * (1 if position_table is None else 2) + (token_type is not None)
    kernel = jit.kernel("unfused/embed.cu", "embed", bound.dtype, per_access)
    kernel.launch(
        rows * ctas_per_row,
        128,
        {
            **bound.arrays,
            "y": y,
            "q_len": q_len,
            "dim": dim,
            "vocab": bound.sizes["vocab"],
            "max_pos": bound.sizes.get("max_pos", 0),
            "ctas_per_row": ctas_per_row,
            "scale": scale,
        },
        like=y,
        stream=stream,
        size_bytes=y.nbytes + vectors_read * dim * y.itemsize + bound["ids"].nbytes,
    )
    return y


def _check_rows(bound: checks.Bound, q_len: int) -> None:
    ids = bound["ids"]
    wrong = ids[(ids < 0) | (ids >= bound.sizes["vocab"])]
    if wrong.size:
        raise ValueError(
            f"embed: ids holds {wrong[0]} but table has vocab = {bound.sizes['vocab']} rows"
        )
    if bound["position_table"] is None:
        return
    starts = np.zeros(1, np.int64) if bound["start"] is None else bound["start"].astype(np.int64)
    last = starts.max() + q_len - 1
    if starts.min() < 0 or last >= bound.sizes["max_pos"]:
        raise ValueError(
            f"embed: positions go from {starts.min()} to {last} but position_table has max_pos = "
            f"{bound.sizes['max_pos']} rows"
        )
