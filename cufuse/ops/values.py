"""The weighted values of attention, as an elementary step."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, device, jit, reference
from cufuse.checks import Bound
from cufuse.device import Array
from cufuse.ops import _cache
from cufuse.ops._stream import on_stream
from cufuse.ops.attention import MAX_HEAD_DIM, PREFILL_QUERIES, check_heads, max_splits

_THREADS = 128
_QUERIES_PER_TILE = 64
_SCRATCH_BYTES = 256 << 20


@on_stream
def values(
    p: Array,
    v: Array,
    *,
    start: Array | None = None,
    lengths: Array | None = None,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Weight values by probabilities: p v, in one launch.

    p: [batch, n_heads, q_len, kv_len]
    v: [batch, kv_len, n_kv_heads, head_dim], may be a view with a contiguous last dimension
    start: [batch] int32; keys from start + q_len on are not looked at
    lengths: [batch] int32; keys from lengths on are not looked at
    out: [batch, q_len, n_heads, head_dim]

    A key that has no weight adds nothing whatever its value is; with 16 queries or more, where
    16-bit products run on tensor cores, that holds for keys that are not looked at.

    Returns [batch, q_len, n_heads, head_dim] in p's dtype; sums in float32. Raises ValueError for
    sizes and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind(
        "values",
        strided=("v",),
        optional=("start", "lengths"),
        p=(p, "batch n_heads q_len kv_len"),
        v=(v, "batch kv_len n_kv_heads head_dim"),
        start=(start, "batch", np.int32),
        lengths=(lengths, "batch", np.int32),
    )
    batch, n_heads, q_len, _ = bound["p"].shape
    head_dim = bound.sizes["head_dim"]
    check_heads("values", n_heads, bound.sizes["n_kv_heads"])
    y = bound.output("out", out, (batch, q_len, n_heads, head_dim))
    if y.size == 0:
        return y
    if bound.kind == "numpy":
        y[...] = reference.values(
            bound["p"], bound["v"], start=bound["start"], lengths=bound["lengths"]
        )
        return y
    sizes = ("q_len", "kv_len", "n_heads", "n_kv_heads", "head_dim")
    args = {
        **{name: bound[name] for name in ("p", "v", "start", "lengths")},
        "out": y,
        "partial": None,
        "arrived": None,
        **_cache.strides(bound["v"], "v_batch_stride", "v_pos_stride", "v_head_stride"),
        "first_row": 0,
        **{name: bound.sizes[name] for name in sizes},
        "max_splits": 1,
    }
    if q_len >= PREFILL_QUERIES and bound.dtype.itemsize == 2 and head_dim <= MAX_HEAD_DIM:
        vec = _cache.strided_width(head_dim, bound["v"])
        padded = -(-head_dim // 16) * 16
        keys = 64 if padded <= 128 else 32
        jit.kernel("unfused/values.cu", "values_tile", bound.dtype, head_dim, vec).launch(
            (batch * -(-q_len // _QUERIES_PER_TILE), n_heads),
            _THREADS,
            args,
            like=y,
            shared_bytes=(_QUERIES_PER_TILE * (keys + 8) + keys * (padded + 8)) * 2,
            stream=stream,
            size_bytes=bound["p"].nbytes + bound["v"].nbytes + y.nbytes,
        )
    else:
        _rows(bound, args, stream)
    return y


def _rows(bound: Bound, args: dict[str, Any], stream: Any) -> None:
    """Split the keys over CTAs as `attention` does, one query head a CTA."""
    y, head_dim = args["out"], bound.sizes["head_dim"]
    rows = y.size // head_dim
    few = bound.sizes["q_len"] < PREFILL_QUERIES
    splits = max_splits(bound.sizes["kv_len"]) if few else 1
    row_bytes = splits * head_dim * 4
    step = rows if splits == 1 else max(1, min(rows, _SCRATCH_BYTES // row_bytes))
    if splits > 1:
        args["partial"] = device.SCRATCH.get("values_partial", step * row_bytes, y, stream)
        args["arrived"] = device.SCRATCH.get("values_arrived", step * 4, y, stream)
    vec = _cache.strided_width(head_dim, bound["v"])
    kernel = jit.kernel("unfused/values.cu", "values_rows", bound.dtype, vec)
    size_bytes = bound["p"].nbytes + bound["v"].nbytes + y.nbytes
    for first_row in range(0, rows, step):
        n_rows = min(step, rows - first_row)
        kernel.launch(
            n_rows * splits,
            _THREADS,
            {**args, "first_row": first_row, "max_splits": splits},
            like=y,
            stream=stream,
            size_bytes=size_bytes * n_rows // rows,
        )
