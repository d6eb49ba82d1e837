"""Attention in one step and in elementary steps, and what fills the KV cache."""

from __future__ import annotations

import numpy as np

from cufuse.reference._dtype import narrow, wide
from cufuse.reference.norm import rmsnorm
from cufuse.reference.rope import rope


def append(
    k: np.ndarray, v: np.ndarray, start: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray
) -> None:
    """Write k, v [batch, q_len, n_kv_heads, head_dim] into the caches at positions start + i.

    k_cache, v_cache: [batch, n_kv_heads, capacity, head_dim]; what does not fit is dropped.
    """
    for b, first in enumerate(np.asarray(start, np.int64)):
        positions = first + np.arange(k.shape[1])
        fits = (positions >= 0) & (positions < k_cache.shape[2])
        k_cache[b][:, positions[fits]] = k[b, fits].swapaxes(0, 1)
        v_cache[b][:, positions[fits]] = v[b, fits].swapaxes(0, 1)


def rope_append(
    qkv: np.ndarray,
    *,
    start: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    n_heads: int,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
    q_norm: np.ndarray | None = None,
    k_norm: np.ndarray | None = None,
    qk_eps: float = 1e-5,
    qk_rounding: str = "cast_first",
    interleaved: bool = False,
) -> np.ndarray:
    """Split qkv, normalise and rotate q and k, append k and v; returns q.

    qkv: [batch, q_len, (n_heads + 2 n_kv_heads) head_dim]; q: [batch, q_len, n_heads, head_dim]
    """
    batch, q_len, _ = qkv.shape
    n_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    q_dim, kv_dim = n_heads * head_dim, n_kv_heads * head_dim
    q, k, v = np.split(qkv, (q_dim, q_dim + kv_dim), axis=-1)
    positions = (np.asarray(start, np.int64)[:, None] + np.arange(q_len)).reshape(-1)

    def prepared(x: np.ndarray, heads: int, weight: np.ndarray | None) -> np.ndarray:
        if weight is not None:
            rows = x.reshape(batch * q_len, -1, np.shape(weight)[0])
            x, _ = rmsnorm(rows, weight, eps=qk_eps, rounding=qk_rounding)
        x = x.reshape(batch * q_len, heads, head_dim)
        if cos is not None and sin is not None:
            x = rope(x, cos, sin, positions, interleaved=interleaved)
        return x.reshape(batch, q_len, heads, head_dim)

    append(
        prepared(k, n_kv_heads, k_norm),
        v.reshape(batch, q_len, n_kv_heads, head_dim),
        start,
        k_cache,
        v_cache,
    )
    return prepared(q, n_heads, q_norm)


def visible(
    batch: int,
    q_len: int,
    kv_len: int,
    *,
    start: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    causal: bool = True,
    window: int | None = None,
) -> np.ndarray:
    """Tell which keys each query sees: bool [batch, q_len, kv_len].

    Query i of sequence b stands at p = start[b] + i and sees key j when j < lengths[b], and, if
    causal, j <= p, and, with a window, p - window < j: a window counts the query's own position.
    """
    if start is None:
        start = np.full(batch, kv_len - q_len if causal else 0)
    start = np.asarray(start, np.int64)
    if lengths is None:
        lengths = start + q_len if causal else np.full(batch, kv_len)
    p = start[:, None, None] + np.arange(q_len)[:, None]
    j = np.arange(kv_len)
    seen = j < np.minimum(np.asarray(lengths, np.int64), kv_len)[:, None, None]
    seen = np.broadcast_to(seen, (batch, q_len, kv_len))
    if causal:
        seen = seen & (j <= p)
    if window is not None:
        seen = seen & (j > p - window)
    return seen


def scores(
    q: np.ndarray,
    k: np.ndarray,
    start: np.ndarray | None = None,
    *,
    lengths: np.ndarray | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    """Return scale * q k^T, soft-capped, invisible keys at -inf: [batch, n_heads, q_len, kv_len].

    q: [batch, q_len, n_heads, head_dim]; k: [batch, kv_len, n_kv_heads, head_dim]
    """
    return narrow(
        _scores(q, k, start, lengths, causal, window, scale, softcap),
        q,
    )


def _scores(
    q: np.ndarray,
    k: np.ndarray,
    start: np.ndarray | None,
    lengths: np.ndarray | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> np.ndarray:
    batch, q_len, n_heads, head_dim = q.shape
    kv_len, n_kv_heads = k.shape[1:3]
    seen = visible(batch, q_len, kv_len, start=start, lengths=lengths, causal=causal, window=window)
    seen = seen[:, None]
    # A key nobody sees may hold anything; it must not meet a product.
    used = np.asarray(seen.any(axis=(1, 2)))[..., None, None]
    keys = np.where(used, wide(k), 0).repeat(n_heads // n_kv_heads, axis=2)
    s = np.einsum("bihd,bjhd->bhij", wide(q), keys) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    return np.where(seen, s, s.dtype.type(-np.inf))


def softmax(
    x: np.ndarray,
    *,
    sinks: np.ndarray | None = None,
    start: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
) -> np.ndarray:
    """Return exp(x) / sum(exp(x)) of each row; a row of -inf alone becomes zeros.

    sinks: [heads], a logit that joins the sum of x [batch, heads, q_len, n] and is dropped after
    start, lengths: [batch], of x [batch, heads, q_len, n]; entries from lengths[b], or from
        start[b] + q_len, on are not looked at and become zeros
    """
    v = wide(x)
    live = live_keys(x.shape, start, lengths) if x.ndim == 4 else None
    if live is not None:
        v = np.where(np.arange(x.shape[-1]) < live[:, None, None, None], v, -np.inf)
    return narrow(_softmax(v, sinks), x)


def _softmax(v: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    if v.shape[-1] == 0:
        return v
    top = v.max(-1, keepdims=True)
    extra: np.ndarray | None = None
    if sinks is not None:
        extra = wide(sinks).astype(v.dtype)[:, None, None]
        top = np.maximum(top, extra)
    top = np.where(top == -np.inf, 0, top)
    e = np.exp(v - top)
    total = e.sum(-1, keepdims=True)
    if extra is not None:
        total = total + np.exp(extra - top)
    return np.where(total == 0, 0, e / np.where(total == 0, 1, total))


def live_keys(
    shape: tuple[int, ...], start: np.ndarray | None, lengths: np.ndarray | None
) -> np.ndarray | None:
    """Return how many keys of each sequence are looked at in scores [batch, heads, q_len, n]."""
    if lengths is None and start is None:
        return None
    if lengths is None:
        lengths = np.asarray(start, np.int64) + shape[2]
    return np.clip(np.asarray(lengths, np.int64), 0, shape[3])


def values(
    p: np.ndarray,
    v: np.ndarray,
    *,
    start: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
) -> np.ndarray:
    """Return p v: [batch, q_len, n_heads, head_dim]; a key whose weight is 0 adds nothing.

    p: [batch, n_heads, q_len, kv_len]; v: [batch, kv_len, n_kv_heads, head_dim]
    start, lengths: as in `softmax`
    """
    live = live_keys(p.shape, start, lengths)
    weights = wide(p)
    if live is not None:
        weights = np.where(np.arange(p.shape[3]) < live[:, None, None, None], weights, 0)
    return narrow(_values(weights, v), p)


def _values(weights: np.ndarray, v: np.ndarray) -> np.ndarray:
    repeat = weights.shape[1] // v.shape[2]
    # Whatever a key holds that has weight nowhere, NaN even, must not meet a product.
    used = (weights != 0).any(2)  # [batch, n_heads, kv_len]
    rows = wide(v).repeat(repeat, axis=2)
    rows = np.where(used.swapaxes(1, 2)[..., None], rows, 0).astype(weights.dtype)
    return np.einsum("bhij,bjhd->bihd", weights, rows)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    start: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Return softmax(q k^T) v in one rounding: [batch, q_len, n_heads, head_dim].

    q: [batch, q_len, n_heads, head_dim]; k, v: [batch, kv_len, n_kv_heads, head_dim]; who sees
    what: `visible`. A query that sees no key gets zeros.
    """
    s = _scores(q, k, start, lengths, causal, window, scale, softcap)
    return narrow(_values(_softmax(s, sinks), v), q)
