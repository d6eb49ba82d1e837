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
    cache; in one launch for up to tiles.MAX_ROWS rows without QK-norm, else `linear` and then
    `rope_append`. With packed weights the one launch takes a head_dim that is a multiple of 32,
    and a number of half-split pairs that is one of 16.

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
    if bound.kind != "numpy" and qk_norm == "none":
        tile = _rows_tile(bound, q, w, batch * q_len, head_dim, interleaved)
        if tile is not None:
            _few_rows(bound, tile, q, keys, values, n_heads, norm, interleaved, stream)
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


def _rows_tile(
    bound: Bound, q: Array, w: Array | Packed, rows: int, head_dim: int, interleaved: bool
) -> tiles.RowsTile | tiles.PackedRowsTile | None:
    """Choose the tile of the one launch; None where it does not take the rows or the heads."""
    target, n, dim = tiles.target_of(q), bound.sizes["n"], bound.sizes["dim"]
    tile: Any
    if not isinstance(w, Packed):
        tile = tiles.choose(_OP, target, rows, n, dim, bound.dtype)
        return tile if isinstance(tile, tiles.RowsTile) and head_dim % 2 == 0 else None
    tile = tiles.choose_packed(_OP, target, rows, n, dim, bound.dtype)
    in_panels = head_dim % 32 == 0 and (interleaved or bound.sizes.get("n_pairs", 0) % 16 == 0)
    return tile if isinstance(tile, tiles.PackedRowsTile) and in_panels else None


def _few_rows(
    bound: Bound,
    tile: tiles.RowsTile | tiles.PackedRowsTile,
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
    packed = isinstance(tile, tiles.PackedRowsTile)
    # A CTA takes two panels at a time.
    weight_rows = n // 2 if packed else n
    shape = tile.launch_shape(tiles.target_of(q), rows, weight_rows, bound.dtype.itemsize)
    arrays = {"x": bound["x"], "w": bound["w"], "b": bound["b"], "norm_weight": bound["norm"]}
    kernel = jit.kernel(
        f"fused/{'packed_' * packed}qkv_rope_append.cu",
        f"{'packed_' * packed}qkv_rows",
        bound.dtype,
        pairing(interleaved),
        _matmul.rounding(norm),
        *tile.template,
        width(dim, bound["x"], None if packed else bound["w"], bound["norm"]),
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
