"""The QKV projection with RoPE and the cache append behind it."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, device, jit, reference, tiles
from cufuse.checks import Bound
from cufuse.device import Array
from cufuse.ops import _cache, _matmul
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width
from cufuse.ops.linear import linear
from cufuse.ops.rmsnorm import Norm
from cufuse.ops.rope import pairing
from cufuse.ops.rope_append import check_projection, rope_append
from cufuse.pack import Packed

_OP = "qkv_rope_append"


@on_stream
def qkv_rope_append(
    x: Array,
    w: Array | Packed,
    b: Array | None = None,
    *,
    start: Array,
    k_cache: Array,
    v_cache: Array,
    n_heads: int,
    cos: Array | None = None,
    sin: Array | None = None,
    norm: Norm | None = None,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    qk_eps: float = 1e-5,
    qk_rounding: str = "cast_first",
    interleaved: bool = False,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Project queries, keys and values, rotate queries and keys and append keys and values to the
    cache; in one launch for up to tiles.MAX_ROWS rows without QK-norm and row-major weights, else
    `linear` and then `rope_append`.

    x: [batch, q_len, dim]
    w: [(n_heads + 2 n_kv_heads) head_dim, dim], rows of q, then k, then v; or that packed
    b: [(n_heads + 2 n_kv_heads) head_dim]
    start: [batch] int32, tokens each sequence has in the cache; token i gets position start + i
    k_cache, v_cache: [batch, n_kv_heads, capacity, head_dim], written in place; views with a
        contiguous last dimension are fine; a token beyond the capacity is dropped
    cos, sin: [max_pos, n_pairs] float32; without them nothing is rotated, beyond them lies NaN
    norm: an RMSNorm of x on the way in
    q_norm, k_norm: RMSNorm weights, [head_dim] or over the full projection
        ([n_heads head_dim], [n_kv_heads head_dim]); qk_eps and qk_rounding as in `rmsnorm`
    interleaved: pair t is values 2t and 2t + 1 (Cohere, DeepSeek), else t and t + n_pairs (Llama)
    out: [batch, q_len, n_heads, head_dim]

    Returns the queries, [batch, q_len, n_heads, head_dim] in x's dtype. In the one launch the
    projection stays in float32 until it is rotated. Raises ValueError for sizes and TypeError for
    dtypes or mixed libraries.
    """
    bound = checks.bind(
        _OP,
        strided=("k_cache", "v_cache"),
        optional=("b", "norm", "cos", "sin", "q_norm", "k_norm"),
        may_be_packed=("w",),
        x=(x, "batch q_len dim"),
        w=(w, "n dim"),
        b=(b, "n"),
        norm=(_matmul.norm_weight(_OP, norm), "dim"),
        start=(start, "batch", np.int32),
        k_cache=(k_cache, "batch n_kv_heads capacity head_dim"),
        v_cache=(v_cache, "batch n_kv_heads capacity head_dim"),
        cos=(cos, "max_pos n_pairs", np.float32),
        sin=(sin, "max_pos n_pairs", np.float32),
        q_norm=(q_norm, "q_norm"),
        k_norm=(k_norm, "k_norm"),
    )
    _matmul.check_plain(_OP, w)
    keys, values = _cache.writable(bound, k_cache, v_cache)
    batch, q_len, n, head_dim = (bound.sizes[name] for name in ("batch", "q_len", "n", "head_dim"))
    _, qk_norm = check_projection(bound, "w", n_heads, qk_rounding)
    q = bound.output("out", out, (batch, q_len, n_heads, head_dim))
    if batch * q_len * n == 0:
        return q
    target = tiles.target_of(q)
    tile = tiles.choose(_OP, target, batch * q_len, n, bound.sizes["dim"], bound.dtype)
    if (
        isinstance(tile, tiles.RowsTile)
        and qk_norm == "none"
        and head_dim % 2 == 0
        and bound.kind != "numpy"
        and not isinstance(w, Packed)
    ):
        _few_rows(bound, tile, target, q, keys, values, n_heads, norm, interleaved, stream)
        return q
    options = {
        "start": bound["start"],
        "k_cache": keys,
        "v_cache": values,
        "n_heads": n_heads,
        "cos": bound["cos"],
        "sin": bound["sin"],
        "q_norm": bound["q_norm"],
        "k_norm": bound["k_norm"],
        "qk_eps": qk_eps,
        "qk_rounding": qk_rounding,
        "interleaved": interleaved,
    }
    if bound.kind == "numpy":
        rows = _matmul.rows_of(bound, "w", w)
        qkv = reference.linear(bound["x"], rows, bound["b"], norm=_matmul.norm_tuple(bound, norm))
        return rope_append(qkv, **options, out=q)
    size = batch * q_len * n
    scratch = device.SCRATCH.get(f"{_OP} qkv", size * bound.dtype.itemsize, q, stream)
    qkv = scratch[: size * bound.dtype.itemsize].view(bound.dtype).reshape(batch, q_len, n)
    linear(
        bound["x"],
        w if isinstance(w, Packed) else bound["w"],
        bound["b"],
        norm=None if norm is None else norm._replace(weight=bound["norm"]),
        out=qkv,
        stream=stream,
    )
    return rope_append(qkv, **options, out=q, stream=stream)


def _few_rows(
    bound: Bound,
    tile: tiles.RowsTile,
    target: tiles.Target,
    q: Array,
    keys: Array,
    values: Array,
    n_heads: int,
    norm: Norm | None,
    interleaved: bool,
    stream: Any,
) -> None:
    """Do everything in one launch."""
    batch, n_kv_heads, capacity, head_dim = keys.shape
    q_len, dim, n = (bound.sizes[name] for name in ("q_len", "dim", "n"))
    rows = batch * q_len
    n_pairs = bound.sizes.get("n_pairs", 0)
    max_pos = bound.sizes.get("max_pos", 0)
    shape = tile.launch_shape(target, rows, n, bound.dtype.itemsize)
    arrays = {"x": bound["x"], "w": bound["w"], "b": bound["b"], "norm_weight": bound["norm"]}
    kernel = jit.kernel(
        "fused/qkv_rope_append.cu",
        "qkv_rows",
        bound.dtype,
        pairing(interleaved),
        _matmul.rounding(norm),
        *tile.template,
        width(dim, bound["x"], bound["w"], bound["norm"]),
    )
    kernel.launch(
        shape.grid,
        shape.threads,
        {
            **arrays,
            "cos": bound["cos"],
            "sin": bound["sin"],
            "start": bound["start"],
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
            "dim": dim,
            "n_pairs": n_pairs,
            "max_pos": max_pos,
            "capacity": capacity,
            "eps": 0.0 if norm is None else norm.eps,
        },
        like=q,
        shared_bytes=shape.shared_bytes,
        stream=stream,
        size_bytes=sum(a.nbytes for a in arrays.values() if a is not None)
        + bound["start"].nbytes
        + rows * n * bound.dtype.itemsize
        + 2 * min(rows, max_pos) * n_pairs * 4,
    )
