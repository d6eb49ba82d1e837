"""Append keys and values to a cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops import _cache
from cufuse.ops._stream import on_stream

_THREADS = 256


@on_stream
def append(
    k: Array,
    v: Array,
    start: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    stream: Any = None,
) -> None:
    """Write the keys and values of new tokens into the caches, in place and in one launch.

    k, v: [batch, q_len, n_kv_heads, head_dim]
    start: [batch] int32, tokens each sequence has in the cache; token i goes to start + i
    k_cache, v_cache: [batch, n_kv_heads, capacity, head_dim], views with a contiguous last
        dimension are fine; a token beyond the capacity is dropped

    Raises ValueError for sizes and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind(
        "append",
        strided=("k_cache", "v_cache"),
        k=(k, "batch q_len n_kv_heads head_dim"),
        v=(v, "batch q_len n_kv_heads head_dim"),
        start=(start, "batch", np.int32),
        k_cache=(k_cache, "batch n_kv_heads capacity head_dim"),
        v_cache=(v_cache, "batch n_kv_heads capacity head_dim"),
    )
    keys, values = _cache.writable(bound, k_cache, v_cache)
    if bound["k"].size == 0 or keys.size == 0:
        return
    if bound.kind == "numpy":
        reference.append(bound["k"], bound["v"], bound["start"], keys, values)
        return
    batch, q_len, n_kv_heads, head_dim = bound["k"].shape
    vec = _cache.strided_width(head_dim, bound["k"], bound["v"], keys, values)
    n = n_kv_heads * head_dim
    jit.kernel("unfused/append.cu", "append", bound.dtype, vec).launch(
        (batch * q_len, min(-(-n // (vec * _THREADS)), 65535)),
        _THREADS,
        {
            "k": bound["k"],
            "v": bound["v"],
            "start": bound["start"],
            "k_cache": keys,
            "v_cache": values,
            **_cache.strides(keys, "k_batch_stride", "k_head_stride", "k_pos_stride"),
            **_cache.strides(values, "v_batch_stride", "v_head_stride", "v_pos_stride"),
            "q_len": q_len,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "capacity": bound.sizes["capacity"],
        },
        like=bound["k"],
        stream=stream,
        size_bytes=2 * (bound["k"].nbytes + bound["v"].nbytes) + bound["start"].nbytes,
    )
