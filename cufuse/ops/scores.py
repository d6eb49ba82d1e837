"""The logits of attention, as an elementary step."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops import _cache
from cufuse.ops._stream import on_stream
from cufuse.ops.attention import (
    MAX_HEAD_DIM,
    PREFILL_QUERIES,
    check_heads,
    check_mask,
    check_softcap,
)

_THREADS = 128
_KEYS_PER_CTA = 64
_QUERIES_PER_TILE = 64


@on_stream
def scores(
    q: Array,
    k: Array,
    start: Array | None = None,
    *,
    lengths: Array | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Multiply queries by keys: scale q k^T, soft-capped, in one launch.

    q: [batch, q_len, n_heads, head_dim]
    k: [batch, kv_len, n_kv_heads, head_dim], may be a view with a contiguous last dimension
    start, lengths, causal, window, scale, softcap: as in `attention`
    out: [batch, n_heads, q_len, kv_len]

    Returns [batch, n_heads, q_len, kv_len] in q's dtype; a key that a query does not see is -inf
    and is not read. Sums in float32. Raises as `attention` does.
    """
    op = "scores"
    bound = checks.bind(
        op,
        strided=("k",),
        optional=("start", "lengths"),
        q=(q, "batch q_len n_heads head_dim"),
        k=(k, "batch kv_len n_kv_heads head_dim"),
        start=(start, "batch", np.int32),
        lengths=(lengths, "batch", np.int32),
    )
    sizes = bound.sizes
    batch, q_len, n_heads, head_dim = bound["q"].shape
    kv_len = sizes["kv_len"]
    check_heads(op, n_heads, sizes["n_kv_heads"])
    check_mask(op, causal, window)
    check_softcap(op, softcap)
    s = bound.output("out", out, (batch, n_heads, q_len, kv_len))
    if s.size == 0:
        return s
    if bound.kind == "numpy":
        s[...] = reference.scores(
            bound["q"],
            bound["k"],
            bound["start"],
            lengths=bound["lengths"],
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
        )
        return s
    args = {
        **{name: bound[name] for name in ("q", "k", "start", "lengths")},
        "s": s,
        **_cache.strides(bound["k"], "k_batch_stride", "k_pos_stride", "k_head_stride"),
        **{n: sizes[n] for n in ("q_len", "kv_len", "n_heads", "n_kv_heads", "head_dim")},
        "default_start": kv_len - q_len if causal else 0,
        "window": window or 0,
        "causal": causal,
        "scale": head_dim**-0.5 if scale is None else scale,
        "softcap": softcap or 0.0,
        "inv_softcap": 1.0 / softcap if softcap else 0.0,
    }
    vec = _cache.strided_width(head_dim, bound["q"], bound["k"])
    if q_len >= PREFILL_QUERIES and bound.dtype.itemsize == 2 and head_dim <= MAX_HEAD_DIM:
        padded = -(-head_dim // 16) * 16
        keys = 64 if padded <= 128 else 32
        kernel = jit.kernel("unfused/scores.cu", "scores_tile", bound.dtype, head_dim, vec)
        grid = (batch * -(-q_len // _QUERIES_PER_TILE) * -(-kv_len // keys), n_heads)
        shared_bytes = (_QUERIES_PER_TILE + keys) * (padded + 8) * 2
    else:
        kernel = jit.kernel("unfused/scores.cu", "scores_rows", bound.dtype, vec)
        grid = (batch * n_heads * q_len * -(-kv_len // _KEYS_PER_CTA), 1)
        shared_bytes = 0
    kernel.launch(grid, _THREADS, args, like=s, shared_bytes=shared_bytes, stream=stream)
    return s
