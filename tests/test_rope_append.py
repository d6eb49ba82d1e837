"""QK-norm, RoPE and append against the elementary steps, and the append alone."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from conftest import DTYPES, TOLERANCE, assert_close, poisoned, relative_error, to_numpy

from cufuse import jit, ops, reference

CAPACITY = 9


def make(rng, dtype, *, batch, q_len, n_heads, n_kv_heads, head_dim, n_pairs, norm):
    qkv = rng.standard_normal((batch, q_len, (n_heads + 2 * n_kv_heads) * head_dim)).astype(dtype)
    angles = rng.uniform(-3, 3, (CAPACITY, n_pairs))
    spans = {"none": (None, None), "head": (1, 1), "full": (n_heads, n_kv_heads)}[norm]
    weights = [
        None if span is None else rng.uniform(0.5, 1.5, span * head_dim).astype(dtype)
        for span in spans
    ]
    cos = np.cos(angles).astype(np.float32) if n_pairs else None
    sin = np.sin(angles).astype(np.float32) if n_pairs else None
    start = rng.integers(0, CAPACITY - q_len + 1, batch).astype(np.int32)
    return qkv, cos, sin, start, *weights


def caches(batch, n_kv_heads, head_dim, dtype):
    return [np.full((batch, n_kv_heads, CAPACITY, head_dim), 7.0, dtype) for _ in range(2)]


def moved(to, x):
    return None if x is None else to(x)


def naive(qkv, cos, sin, start, q_norm, k_norm, *, n_heads, n_kv_heads, head_dim, options):
    """Row by row, head by head."""
    batch, q_len, _ = qkv.shape
    k_cache, v_cache = caches(batch, n_kv_heads, head_dim, np.float64)
    q = np.zeros((batch, q_len, n_heads, head_dim))
    for b in range(batch):
        for i in range(q_len):
            parts = qkv[b, i].reshape(-1, head_dim)
            position = int(start[b]) + i
            for heads, weight, is_key in (
                (parts[:n_heads], q_norm, False),
                (parts[n_heads : n_heads + n_kv_heads], k_norm, True),
            ):
                rows = heads
                if weight is not None:
                    rows = heads.reshape(-1, len(weight))
                    rms = np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5)
                    one = 1.0 if options["qk_rounding"] == "one_plus" else 0.0
                    rows = (rows / rms * (one + weight)).reshape(heads.shape)
                if cos is not None:
                    rows = reference.rope(
                        rows[None], cos, sin, [position], interleaved=options["interleaved"]
                    )[0]
                if is_key:
                    k_cache[b, :, position] = rows
                else:
                    q[b, i] = rows
            v_cache[b, :, position] = parts[n_heads + n_kv_heads :]
    return q, k_cache, v_cache


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("sizes", "norm", "rounding", "interleaved"),
    [
        ((2, 1, 4, 2, 32, 16), "head", "cast_first", False),
        ((1, 3, 16, 16, 32, 8), "full", "scale_first", True),
        ((2, 2, 9, 3, 56, 28), "none", "cast_first", False),
        ((1, 1, 3, 1, 33, 0), "head", "one_plus", False),
        ((1, 2, 2, 1, 33, 7), "full", "one_plus", True),
    ],
)
def test_rope_append_matches_float64(to, rng, dtype, sizes, norm, rounding, interleaved):
    names = ("batch", "q_len", "n_heads", "n_kv_heads", "head_dim", "n_pairs")
    s = dict(zip(names, sizes, strict=True))
    arrays = make(rng, dtype, **s, norm=norm)
    qkv, cos, sin, start, q_norm, k_norm = arrays
    options = {"qk_rounding": rounding, "interleaved": interleaved}
    exact = [None if a is None or a is start else np.asarray(a, np.float64) for a in arrays]
    exact[3] = start
    head_sizes = {name: s[name] for name in ("n_heads", "n_kv_heads", "head_dim")}
    wanted = naive(*exact, **head_sizes, options=options)
    k_cache, v_cache = map(to, caches(s["batch"], s["n_kv_heads"], s["head_dim"], dtype))
    out = poisoned(wanted[0].shape, dtype, to)
    got = ops.rope_append(
        to(qkv),
        cos=moved(to, cos),
        sin=moved(to, sin),
        start=to(start),
        k_cache=k_cache,
        v_cache=v_cache,
        n_heads=s["n_heads"],
        q_norm=moved(to, q_norm),
        k_norm=moved(to, k_norm),
        out=out,
        **options,
    )
    assert got is out
    assert_close(got, wanted[0], dtype)
    assert_close(k_cache, wanted[1], dtype)
    assert relative_error(v_cache, wanted[2]) <= TOLERANCE[np.dtype(dtype).name]


def test_float64_reference_matches_naive_steps(rng):
    s = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 10}
    arrays = make(rng, np.float64, batch=2, q_len=3, n_pairs=4, norm="full", **s)
    qkv, cos, sin, start, q_norm, k_norm = arrays
    options = {"qk_rounding": "scale_first", "interleaved": True}
    wanted = naive(*arrays, **s, options=options)
    k_cache, v_cache = caches(2, 2, 10, np.float64)
    q = reference.rope_append(
        qkv,
        start=start,
        k_cache=k_cache,
        v_cache=v_cache,
        n_heads=6,
        cos=cos,
        sin=sin,
        q_norm=q_norm,
        k_norm=k_norm,
        **options,
    )
    for got, want in zip((q, k_cache, v_cache), wanted, strict=True):
        np.testing.assert_allclose(got, want)


def test_rope_append_equals_elementary_steps_to_the_bit(to_kernels, rng):
    to, dtype = to_kernels, np.float32
    s = {"batch": 1, "q_len": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "n_pairs": 16}
    qkv, cos, sin, start, _, _ = make(rng, dtype, **s, norm="none")
    fused = [to(x) for x in caches(1, 2, 32, dtype)]
    plain = [to(x) for x in caches(1, 2, 32, dtype)]
    q = ops.rope_append(
        to(qkv),
        cos=to(cos),
        sin=to(sin),
        start=to(start),
        k_cache=fused[0],
        v_cache=fused[1],
        n_heads=4,
    )
    positions = to((start[0] + np.arange(2)).astype(np.int32))
    heads = qkv.reshape(2, 8, 32)
    rotated = ops.rope(to(heads[:, :6].copy()), to(cos), to(sin), positions)
    k = to(to_numpy(rotated)[None, :, 4:].copy())
    ops.append(k, to(heads[None, :, 6:].copy()), to(start), *plain)
    np.testing.assert_array_equal(to_numpy(q)[0], to_numpy(rotated)[:, :4])
    for a, b in zip(fused, plain, strict=True):
        np.testing.assert_array_equal(to_numpy(a), to_numpy(b))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_append_writes_rows_and_leaves_the_rest(to, rng, dtype):
    k, v = (rng.standard_normal((3, 2, 2, 32)).astype(dtype) for _ in range(2))
    start = np.array([0, 7, 4], np.int32)
    wanted = caches(3, 2, 32, dtype)
    for b in range(3):
        for i in range(2):
            wanted[0][b, :, start[b] + i] = k[b, i]
            wanted[1][b, :, start[b] + i] = v[b, i]
    got = [to(x) for x in caches(3, 2, 32, dtype)]
    assert ops.append(to(k), to(v), to(start), *got) is None
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(to_numpy(g).view(np.uint8), w.view(np.uint8))


@pytest.mark.parametrize(
    ("name", "sizes", "norm", "rounding", "interleaved"),
    [
        ("bf16", (2, 3, 5, 1, 64, 32), "none", "cast_first", False),
        ("bf16", (1, 5, 3, 2, 128, 64), "head", "cast_first", False),
        ("fp16", (3, 2, 6, 3, 40, 8), "head", "one_plus", False),
        ("fp16", (1, 3, 9, 1, 72, 36), "full", "scale_first", True),
        ("fp32", (2, 2, 5, 3, 36, 10), "head", "cast_first", True),
        ("bf16", (1, 2, 2, 1, 536, 256), "head", "cast_first", False),
        ("bf16", (1, 2, 2, 1, 536, 200), "none", "cast_first", True),
        ("fp16", (2, 1, 2, 3, 69, 31), "head", "scale_first", True),
        ("fp32", (1, 3, 7, 1, 70, 35), "full", "cast_first", False),
        ("bf16", (4, 2, 3, 1, 8, 0), "none", "cast_first", False),
    ],
)
def test_the_heads_of_a_thread_do_not_change_the_bits(
    to_kernels, rng, monkeypatch, name, sizes, norm, rounding, interleaved
):
    dtype = DTYPES[name]
    names = ("batch", "q_len", "n_heads", "n_kv_heads", "head_dim", "n_pairs")
    s = dict(zip(names, sizes, strict=True))
    arrays = make(rng, dtype, **s, norm=norm)
    start = arrays[3]
    start[-1] = CAPACITY - 1  # a second token is beyond the capacity and the table
    options = {"qk_rounding": rounding, "interleaved": interleaved}
    cut_of = importlib.import_module("cufuse.ops.rope_append")
    monkeypatch.setattr(cut_of, "_BUSY_THREADS_PER_SM", 0)
    results = []
    for heads in (1, 2, 4):
        monkeypatch.setattr(cut_of, "_HEADS", {norm: (heads,)})
        k_cache, v_cache = map(
            to_kernels, caches(s["batch"], s["n_kv_heads"], s["head_dim"], dtype)
        )
        qkv, cos, sin, start, q_norm, k_norm = (moved(to_kernels, x) for x in arrays)
        q = ops.rope_append(
            qkv,
            cos=cos,
            sin=sin,
            start=start,
            k_cache=k_cache,
            v_cache=v_cache,
            n_heads=s["n_heads"],
            q_norm=q_norm,
            k_norm=k_norm,
            out=poisoned((s["batch"], s["q_len"], s["n_heads"], s["head_dim"]), dtype, to_kernels),
            **options,
        )
        results.append([to_numpy(x) for x in (q, k_cache, v_cache)])
    for other in results[1:]:
        for got, wanted in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))

    qkv, cos, sin, start, q_norm, k_norm = (
        x if x is None or x.dtype == np.int32 else x.astype(np.float64) for x in arrays
    )
    k_cache, v_cache = caches(s["batch"], s["n_kv_heads"], s["head_dim"], np.float64)
    q = reference.rope_append(
        qkv,
        cos=cos,
        sin=sin,
        start=start,
        k_cache=k_cache,
        v_cache=v_cache,
        n_heads=s["n_heads"],
        q_norm=q_norm,
        k_norm=k_norm,
        **options,
    )
    for got, wanted in zip(results[0], (q, k_cache, v_cache), strict=True):
        outside = np.isnan(wanted)  # of the table
        got[outside] = wanted[outside] = 0
        assert_close(got, wanted, dtype)


def test_append_beyond_the_capacity_is_dropped(to):
    k = np.ones((3, 2, 1, 5), np.float32)
    got = [to(x) for x in caches(3, 1, 5, np.float32)]
    ops.append(to(k), to(k), to(np.array([CAPACITY - 1, -1, 2**31 - 1], np.int32)), *got)
    for g in got:
        written = to_numpy(g)[:, 0, :, 0] == 1
        assert written.sum() == 2
        assert written[0, CAPACITY - 1]
        assert written[1, 0]


def test_rope_append_beyond_table_and_capacity(to):
    qkv = np.ones((1, 3, 3 * 32), np.float32)
    angles = np.ones((CAPACITY - 1, 16), np.float32)
    k_cache, v_cache = (to(x) for x in caches(1, 1, 32, np.float32))
    q = ops.rope_append(
        to(qkv),
        cos=to(angles),
        sin=to(angles),
        start=to(np.array([CAPACITY - 2], np.int32)),
        k_cache=k_cache,
        v_cache=v_cache,
        n_heads=1,
    )
    finite = np.isfinite(to_numpy(q)).all((0, 2, 3))
    assert finite.tolist() == [True, False, False]
    assert np.isfinite(to_numpy(k_cache)[0, 0, :-1]).all()
    assert np.isnan(to_numpy(k_cache)[0, 0, -1]).all()
    assert (to_numpy(v_cache)[0, 0, -2:] == 1).all()


def test_caches_may_be_views(to, rng):
    k = rng.standard_normal((2, 1, 2, 16)).astype(np.float32)
    store = to(np.zeros((CAPACITY, 2, 2, 3, 16), np.float32))  # [capacity, batch, kv, heads, dim]
    views = [store[:, :, part, :2].transpose(1, 2, 0, 3) for part in range(2)]
    ops.append(to(k), to(-k), to(np.array([3, 5], np.int32)), *views)
    wanted = np.zeros(store.shape, np.float32)
    wanted[3, 0, 0, :2], wanted[3, 0, 1, :2] = k[0, 0], -k[0, 0]
    wanted[5, 1, 0, :2], wanted[5, 1, 1, :2] = k[1, 0], -k[1, 0]
    np.testing.assert_array_equal(to_numpy(store), wanted)


def test_inputs_may_be_views(to, rng):
    wide = rng.standard_normal((1, 2, 300)).astype(np.float32)
    reversed_qkv = wide[:, ::-1, 3 : 3 + 96]
    start = np.zeros(1, np.int32)
    got, plain = ([to(x) for x in caches(1, 1, 32, np.float32)] for _ in range(2))
    q = ops.rope_append(
        to(wide)[:, ::-1, 3:99], start=to(start), k_cache=got[0], v_cache=got[1], n_heads=1
    )
    copied = ops.rope_append(
        to(reversed_qkv.copy()), start=to(start), k_cache=plain[0], v_cache=plain[1], n_heads=1
    )
    np.testing.assert_array_equal(to_numpy(q), to_numpy(copied))
    np.testing.assert_array_equal(to_numpy(got[0]), to_numpy(plain[0]))


def test_nothing_to_append_launches_nothing(to):
    got = [to(x) for x in caches(2, 1, 32, np.float32)]
    empty = np.zeros((2, 0, 1, 32), np.float32)
    ops.append(to(empty), to(empty), to(np.zeros(2, np.int32)), *got)
    q = ops.rope_append(
        to(np.zeros((2, 0, 96), np.float32)),
        start=to(np.zeros(2, np.int32)),
        k_cache=got[0],
        v_cache=got[1],
        n_heads=1,
    )
    assert q.shape == (2, 0, 1, 32)


def test_rope_append_rejects_wrong_arrays():
    k_cache, v_cache = caches(1, 2, 32, np.float32)
    start = np.zeros(1, np.int32)
    given = {"start": start, "k_cache": k_cache, "v_cache": v_cache}
    qkv = np.zeros((1, 1, 8 * 32), np.float32)
    with pytest.raises(ValueError, match=r"qkv has n = 256, wanted .* = 288"):
        ops.rope_append(qkv, **given, n_heads=5)
    with pytest.raises(ValueError, match=r"q_norm is \[33\], wanted \[head_dim\] = \[32\]"):
        ops.rope_append(qkv, **given, n_heads=4, q_norm=np.zeros(33, np.float32))
    with pytest.raises(ValueError, match="use one kind"):
        ops.rope_append(
            qkv,
            **given,
            n_heads=4,
            q_norm=np.zeros(32, np.float32),
            k_norm=np.zeros(64, np.float32),
        )
    with pytest.raises(ValueError, match="cos and sin come together"):
        ops.rope_append(qkv, **given, n_heads=4, cos=np.zeros((4, 16), np.float32))
    with pytest.raises(TypeError, match="start has dtype int64, wanted int32"):
        ops.rope_append(qkv, **{**given, "start": start.astype(np.int64)}, n_heads=4)
    with pytest.raises(ValueError, match="k_cache is written in place"):
        ops.rope_append(qkv, **{**given, "k_cache": k_cache[:, ::-1]}, n_heads=4)
    frozen = k_cache.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="k_cache is written in place"):
        ops.rope_append(qkv, **{**given, "k_cache": frozen}, n_heads=4)


def test_an_append_counts_its_tokens_and_not_the_cache(to_kernels, rng):
    qkv, cos, sin, start, q_norm, k_norm = (
        moved(to_kernels, x)
        for x in make(
            rng,
            np.float32,
            batch=2,
            q_len=3,
            n_heads=4,
            n_kv_heads=2,
            head_dim=8,
            n_pairs=4,
            norm="head",
        )
    )
    k_cache, v_cache = (to_kernels(cache) for cache in caches(2, 2, 8, np.float32))
    k = to_kernels(np.ones((2, 3, 2, 8), np.float32))
    options = {"start": start, "k_cache": k_cache, "v_cache": v_cache}
    with jit.record(dry=True) as record:
        ops.append(k, k, **options)
        ops.rope_append(qkv, **options, n_heads=4, cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm)
    tokens = 2 * 3
    angles = 2 * tokens * 4
    assert [launch.size_bytes for launch in record.launches] == [
        4 * (2 * 2 * tokens * 2 * 8 + 2),
        4 * (2 * tokens * 8 * 8 + 2 + 2 * 8 + angles),
    ]
