"""Attention over keys and values, in one launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, device, jit, reference
from cufuse.checks import Bound
from cufuse.device import Array, Unsupported
from cufuse.ops import _attention_sm90, _cache
from cufuse.ops._stream import on_stream

MAX_HEAD_DIM = 256

# From this many queries a sequence on, 16-bit attention runs on tensor cores. Below, a tile of 64
# queries is mostly empty, and the decode kernel gives a row the same bits at any q_len.
PREFILL_QUERIES = 16

_THREADS = 128
_QUERIES_PER_TILE = 64
_HEAD_TILES = (1, 2, 4, 8)  # query heads that share one read of K and V
_SCRATCH_BYTES = 256 << 20  # partial results of one launch; more rows take more launches


def keys_per_split(n_keys: int) -> int:
    """Return how many keys one split of a decode reads; device/attention.cuh has its twin."""
    for limit, keys in ((2048, 64), (8192, 128), (32768, 256)):
        if n_keys <= limit:
            return keys
    return 512


def max_splits(capacity: int) -> int:
    """Return the most splits that any number of visible keys up to a capacity is cut into."""
    counts = (min(capacity, n) for n in (2048, 8192, 32768, capacity))
    return max(1, *(-(-n // keys_per_split(n)) for n in counts))


def check_heads(op: str, n_heads: int, n_kv_heads: int) -> None:
    """Raise ValueError unless the query heads divide evenly over the KV heads."""
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ValueError(
            f"{op}: q has {n_heads} heads, wanted a multiple of the {n_kv_heads} heads of k and v"
        )


def check_mask(op: str, causal: bool, window: int | None) -> None:
    """Raise for a window that is not positive, or without a direction."""
    if window is None:
        return
    if not causal:
        raise Unsupported(f"{op}: a window of a bidirectional attention is not supported")
    if not isinstance(window, int | np.integer):
        raise TypeError(f"{op}: window is {window!r}, wanted an integer or None")
    if window < 1:
        raise ValueError(f"{op}: window is {window}, wanted at least 1: the query's own position")


def check_softcap(op: str, softcap: float | None) -> None:
    """Raise ValueError unless the soft cap is positive."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}: softcap is {softcap}, wanted a positive number or None")


@on_stream
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    start: Array | None = None,
    lengths: Array | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Return softmax(scale q k^T) v, each query over the keys it sees, in one launch.

    q: [batch, q_len, n_heads, head_dim]
    k, v: [batch, kv_len, n_kv_heads, head_dim], may be views with a contiguous last dimension, such
        as a cache [batch, n_kv_heads, capacity, head_dim] transposed
    start: [batch] int32, the position of each sequence's first query; left out, the queries are the
        last ones (kv_len - q_len) if causal, the first ones if not
    lengths: [batch] int32, the keys each sequence has; left out, start + q_len if causal, else
        kv_len. Query i sees key j if j < length and, if causal, j <= start + i
    window: keys a query sees at most, its own included (causal only)
    scale: head_dim ** -0.5 when left out
    softcap: logits become softcap * tanh(logits / softcap)
    sinks: [n_heads], a logit for each head that takes part in the softmax and adds no value
    out: [batch, q_len, n_heads, head_dim]

    Scaled dot-product attention (Vaswani et al. 2017). Keys that nobody sees are not read. A query
    that sees no key gets zeros. The softmax and all sums are in float32. Below 16 queries a row's
    bits depend neither on the batch nor on kv_len. From 16 on they may, by the tile that is chosen
    for all; 16-bit products then run on tensor cores with the probabilities rounded to the inputs'
    dtype, and a value that is not finite may reach all of up to 192 neighbouring queries of which
    one sees it. Partial results beyond 256 MiB take more launches.

    Returns [batch, q_len, n_heads, head_dim] in q's dtype. Raises ValueError for sizes, TypeError
    for dtypes or mixed libraries and Unsupported for head_dim over 256.
    """
    op = "attention"
    bound = checks.bind(
        op,
        strided=("k", "v"),
        optional=("start", "lengths", "sinks"),
        q=(q, "batch q_len n_heads head_dim"),
        k=(k, "batch kv_len n_kv_heads head_dim"),
        v=(v, "batch kv_len n_kv_heads head_dim"),
        start=(start, "batch", np.int32),
        lengths=(lengths, "batch", np.int32),
        sinks=(sinks, "n_heads"),
    )
    check_heads(op, bound.sizes["n_heads"], bound.sizes["n_kv_heads"])
    check_mask(op, causal, window)
    check_softcap(op, softcap)
    head_dim = bound.sizes["head_dim"]
    if head_dim > MAX_HEAD_DIM:
        raise Unsupported(f"{op}: head_dim is {head_dim}, supported are 1 to {MAX_HEAD_DIM}")
    y = bound.output("out", out, bound["q"].shape)
    if y.size == 0:
        return y
    if bound.kind == "numpy":
        y[...] = reference.attention(
            bound["q"],
            bound["k"],
            bound["v"],
            start=bound["start"],
            lengths=bound["lengths"],
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            sinks=bound["sinks"],
        )
        return y
    args = {
        **{name: bound[name] for name in ("q", "k", "v", "start", "lengths", "sinks")},
        "out": y,
        "partial": None,
        "stats": None,
        "arrived": None,
        **_cache.strides(bound["k"], "k_batch_stride", "k_pos_stride", "k_head_stride"),
        **_cache.strides(bound["v"], "v_batch_stride", "v_pos_stride", "v_head_stride"),
        "first_row": 0,
        **{name: bound.sizes[name] for name in ("q_len", "kv_len", "n_heads", "n_kv_heads")},
        "default_start": bound.sizes["kv_len"] - bound.sizes["q_len"] if causal else 0,
        "max_splits": 1,
        "window": window or 0,
        "causal": causal,
        "scale": head_dim**-0.5 if scale is None else scale,
        "softcap": softcap or 0.0,
        "inv_softcap": 1.0 / softcap if softcap else 0.0,
    }
    if bound.sizes["q_len"] >= PREFILL_QUERIES and bound.dtype.itemsize == 2:
        _prefill(bound, args, stream)
    else:
        _decode(bound, args, stream)
    return y


def _prefill(bound: Bound, args: dict[str, Any], stream: Any) -> None:
    if _attention_sm90.attend(bound, args, stream, _size_bytes(bound, args)):
        return
    head_dim, q_len = bound.sizes["head_dim"], bound.sizes["q_len"]
    vec = _cache.strided_width(head_dim, bound["q"], bound["k"], bound["v"], args["out"])
    padded = -(-head_dim // 16) * 16
    keys = 64 if padded <= 128 else 32
    jit.kernel("fused/attention.cu", "attention_prefill", bound.dtype, head_dim, vec).launch(
        (bound.sizes["batch"] * -(-q_len // _QUERIES_PER_TILE), bound.sizes["n_heads"]),
        _THREADS,
        args,
        like=args["out"],
        shared_bytes=(_QUERIES_PER_TILE + 2 * keys) * (padded + 8) * bound.dtype.itemsize,
        stream=stream,
        size_bytes=_size_bytes(bound, args),
    )


def _decode(bound: Bound, args: dict[str, Any], stream: Any) -> None:
    """Split the keys over CTAs, as many as the capacity can need."""
    sizes = bound.sizes
    head_dim, n_heads, n_kv_heads = sizes["head_dim"], sizes["n_heads"], sizes["n_kv_heads"]
    q_len, rows = sizes["q_len"], sizes["batch"] * sizes["q_len"]
    group = n_heads // n_kv_heads
    tiles = -(-group // _HEAD_TILES[-1])
    heads = next(n for n in _HEAD_TILES if n * tiles >= group)
    vec = _cache.strided_width(head_dim, bound["k"], bound["v"])
    # A prompt has rows enough to fill the GPU; nothing is gained by splitting its keys.
    splits = max_splits(_keys_bound(bound, args)) if q_len < PREFILL_QUERIES else 1
    columns = _columns(head_dim, bound.dtype.itemsize)
    row_bytes = n_heads * splits * (columns + 2) * 4
    step = rows if splits == 1 else max(1, min(rows, _SCRATCH_BYTES // row_bytes))
    if splits > 1:
        like = args["out"]
        partial = device.SCRATCH.get("attention_partial", step * row_bytes, like, stream)
        stats_at = step * n_heads * splits * columns * 4
        args["partial"] = partial[:stats_at]
        args["stats"] = partial[stats_at:]
        arrived = step * n_kv_heads * tiles * 4
        args["arrived"] = device.SCRATCH.get("attention_arrived", arrived, like, stream)
    kernel = jit.kernel("fused/attention.cu", "attention_decode", bound.dtype, head_dim, heads, vec)
    for first_row in range(0, rows, step):
        n_rows = min(step, rows - first_row)
        kernel.launch(
            (n_rows * splits, n_kv_heads * tiles),
            _THREADS,
            {**args, "first_row": first_row, "max_splits": splits},
            like=args["out"],
            shared_bytes=_decode_shared_bytes(head_dim, heads, bound.dtype.itemsize),
            stream=stream,
            size_bytes=_size_bytes(bound, args) * n_rows // rows,
        )


def _columns(head_dim: int, itemsize: int) -> int:
    return -(-head_dim // (16 // itemsize)) * (16 // itemsize)


def _decode_shared_bytes(head_dim: int, heads: int, itemsize: int) -> int:
    """Size DecodeTile of device/attention_decode.cuh."""
    vec, columns = 16 // itemsize, _columns(head_dim, itemsize)
    fit = 16384 // (columns * itemsize)
    keys = 64 if fit >= 64 else 32 if fit >= 32 else 16
    tile = 2 * keys * (columns // vec | 1) * 16
    sums = heads * (_THREADS // (columns // vec)) * columns * 4
    return max(tile, sums) + (heads * columns + heads * keys + 3 * heads + 1) * 4


def _keys_bound(bound: Bound, args: dict[str, Any]) -> int:
    """Return the most keys that one query can see, as far as the host knows."""
    return min(bound.sizes["kv_len"], args["window"] or bound.sizes["kv_len"])


def _size_bytes(bound: Bound, args: dict[str, Any]) -> int:
    """Count q and out once, and of K and V what the sequences can see."""
    q_len, kv_len = bound.sizes["q_len"], bound.sizes["kv_len"]
    seen = min(kv_len, args["window"] + q_len - 1) if args["window"] else kv_len
    rows = (bound["k"].size + bound["v"].size) // max(kv_len, 1) * seen
    return 2 * args["out"].nbytes + rows * bound.dtype.itemsize
