"""QK-norm, RoPE and the cache append behind a QKV projection."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, jit, reference, tiles
from cufuse.checks import Bound
from cufuse.device import Array
from cufuse.ops import _cache
from cufuse.ops._stream import on_stream
from cufuse.ops.rmsnorm import ROUNDINGS
from cufuse.ops.rope import check_pairs, head_width, pairing

_THREADS = {"none": 128, "head": 128, "full": 256}  # of a CTA
_HEADS = {"none": (1, 2, 4), "head": (1, 2), "full": (1, 2, 4)}  # of a thread
_BUSY_THREADS_PER_SM = 1024  # with fewer, more threads do better than more work for each


def check_projection(
    bound: Bound, projection: str, n_heads: int, qk_rounding: str
) -> tuple[int, str]:
    """Check how heads, tables and norms fit together; raises ValueError.

    Returns how many pairs of a head are rotated and what the norms take their mean over: "none",
    "head" or "full".
    """
    op, n = bound.op, bound.sizes["n"]
    n_kv_heads, head_dim = bound.sizes["n_kv_heads"], bound.sizes["head_dim"]
    checks.option(op, "qk_rounding", qk_rounding, ROUNDINGS)
    checks.number(op, "n_heads", n_heads, 1, whole=True)
    wanted = (n_heads + 2 * n_kv_heads) * head_dim
    if n != wanted:
        raise ValueError(
            f"{op}: {projection} has n = {n}, wanted (n_heads + 2 n_kv_heads) head_dim = "
            f"({n_heads} + 2 x {n_kv_heads}) x {head_dim} = {wanted}"
        )
    if (bound["cos"] is None) != (bound["sin"] is None):
        raise ValueError(f"{op}: cos and sin come together; one of them is missing")
    n_pairs = 0 if bound["cos"] is None else check_pairs(op, bound["cos"], head_dim)
    return n_pairs, _qk_norm(bound, n_heads)


def _qk_norm(bound: Bound, n_heads: int) -> str:
    n_kv_heads, head_dim = bound.sizes["n_kv_heads"], bound.sizes["head_dim"]
    spans = set()
    for name, heads in (("q_norm", n_heads), ("k_norm", n_kv_heads)):
        if bound[name] is None:
            continue
        size = bound.sizes[name]
        if size not in (head_dim, heads * head_dim):
            raise ValueError(
                f"{bound.op}: {name} is [{size}], wanted [head_dim] = [{head_dim}] or the full "
                f"projection, [{heads * head_dim}]"
            )
        if heads > 1:
            spans.add("head" if size == head_dim else "full")
    if len(spans) > 1:
        raise ValueError(
            f"{bound.op}: one of q_norm, k_norm is over a head and one is not; use one kind"
        )
    if spans:
        return spans.pop()
    return "none" if bound["q_norm"] is None and bound["k_norm"] is None else "head"


def _lanes(head_dim: int, vec: int) -> int:
    """Return the lanes that take a head, two vectors each: a power of two, at most a warp."""
    slots = -(-head_dim // (2 * vec))
    return min(32, 1 << (slots - 1).bit_length())


def _cut(
    rows: int, all_heads: int, lanes: int, norm: str, sm_count: int
) -> tuple[int, tuple[int, ...]]:
    """Return the heads of a thread and the grid."""

    def threads(heads: int) -> int:  # of a row
        return -(-all_heads // heads) * lanes

    choices, cta = _HEADS[norm], _THREADS[norm]
    if norm == "full":  # a CTA sums a row: as few CTAs a row as can be
        heads = next((h for h in choices if threads(h) <= cta), choices[-1])
        return heads, (rows, -(-threads(heads) // cta))
    busy = sm_count * _BUSY_THREADS_PER_SM
    heads = max((h for h in choices if rows * threads(h) >= busy), default=1)
    return heads, (-(-rows * threads(heads) // cta),)


@on_stream
def rope_append(
    qkv: Array,
    *,
    start: Array,
    k_cache: Array,
    v_cache: Array,
    n_heads: int,
    cos: Array | None = None,
    sin: Array | None = None,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    qk_eps: float = 1e-5,
    qk_rounding: str = "cast_first",
    interleaved: bool = False,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Split a QKV projection, normalise and rotate queries and keys, append keys and values to the
    cache, all in one launch.

    qkv: [batch, q_len, (n_heads + 2 n_kv_heads) head_dim], rows of q, then k, then v
    start: [batch] int32, tokens each sequence has in the cache; token i gets position start + i
    k_cache, v_cache: [batch, n_kv_heads, capacity, head_dim], written in place; views with a
        contiguous last dimension are fine; a token beyond the capacity is dropped
    cos, sin: [max_pos, n_pairs] float32; without them nothing is rotated, beyond them lies NaN
    q_norm, k_norm: RMSNorm weights, [head_dim] or over the full projection
        ([n_heads head_dim], [n_kv_heads head_dim]); qk_eps and qk_rounding as in `rmsnorm`
    interleaved: pair t is values 2t and 2t + 1 (Cohere, DeepSeek), else t and t + n_pairs (Llama)
    out: [batch, q_len, n_heads, head_dim]

    Returns the queries, [batch, q_len, n_heads, head_dim] in qkv's dtype. Raises ValueError for
    sizes and TypeError for dtypes or mixed libraries.
    """
    op = "rope_append"
    bound = checks.bind(
        op,
        strided=("k_cache", "v_cache"),
        optional=("cos", "sin", "q_norm", "k_norm"),
        qkv=(qkv, "batch q_len n"),
        start=(start, "batch", np.int32),
        k_cache=(k_cache, "batch n_kv_heads capacity head_dim"),
        v_cache=(v_cache, "batch n_kv_heads capacity head_dim"),
        cos=(cos, "max_pos n_pairs", np.float32),
        sin=(sin, "max_pos n_pairs", np.float32),
        q_norm=(q_norm, "q_norm"),
        k_norm=(k_norm, "k_norm"),
    )
    keys, values = _cache.writable(bound, k_cache, v_cache)
    batch, n_kv_heads, capacity, head_dim = keys.shape
    q_len = bound.sizes["q_len"]
    n_pairs, norm = check_projection(bound, "qkv", n_heads, qk_rounding)
    q = bound.output("out", out, (batch, q_len, n_heads, head_dim))
    if bound["qkv"].size == 0:
        return q
    if bound.kind == "numpy":
        q[...] = reference.rope_append(
            bound["qkv"],
            start=bound["start"],
            k_cache=keys,
            v_cache=values,
            n_heads=n_heads,
            cos=bound["cos"],
            sin=bound["sin"],
            q_norm=bound["q_norm"],
            k_norm=bound["k_norm"],
            qk_eps=qk_eps,
            qk_rounding=qk_rounding,
            interleaved=interleaved,
        )
        return q
    vec = _cache.strided_width(head_dim, bound["qkv"].reshape(-1, head_dim), q, keys, values)
    if vec > 1:
        given = (bound[name] for name in ("cos", "sin", "q_norm", "k_norm"))
        vec = head_width(head_dim, n_pairs, interleaved, bound["qkv"], *given)
    rows = batch * q_len
    all_heads = n_heads + 2 * n_kv_heads
    lanes = _lanes(head_dim, vec)
    heads, grid = _cut(rows, all_heads, lanes, norm, tiles.target_of(q).sm_count)
    kernel = jit.kernel(
        "fused/rope_append.cu",
        "rope_append",
        bound.dtype,
        pairing(interleaved),
        f"QkNorm::{norm}",
        f"Rounding::{qk_rounding if norm != 'none' else 'cast_first'}",
        vec,
        lanes,
        heads,
    )
    max_pos = 0 if cos is None else bound.sizes["max_pos"]
    norms = sum(w.nbytes for w in (bound["q_norm"], bound["k_norm"]) if w is not None)
    kernel.launch(
        grid,
        _THREADS[norm],
        {
            "qkv": bound["qkv"],
            "cos": bound["cos"],
            "sin": bound["sin"],
            "start": bound["start"],
            "q_weight": bound["q_norm"],
            "k_weight": bound["k_norm"],
            "q": q,
            "k_cache": keys,
            "v_cache": values,
            **_cache.strides(keys, "k_batch_stride", "k_head_stride", "k_pos_stride"),
            **_cache.strides(values, "v_batch_stride", "v_head_stride", "v_pos_stride"),
            "rows": rows,
            "q_len": q_len,
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "n_pairs": n_pairs,
            "max_pos": max_pos,
            "capacity": capacity,
            "qk_eps": qk_eps,
        },
        like=q,
        stream=stream,
        size_bytes=2 * bound["qkv"].nbytes
        + bound["start"].nbytes
        + norms
        + 2 * min(rows, max_pos) * n_pairs * 4,
    )
    return q
