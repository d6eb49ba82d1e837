"""The QKV projection with RoPE and append against its parts in float64."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
from conftest import DTYPES, TOLERANCE, assert_close, poisoned, relative_error, to_numpy

from cufuse import device, jit, ops, reference, tiles
from cufuse.ops.rmsnorm import Norm
from cufuse.pack import pack

bfloat16 = ml_dtypes.bfloat16
CAPACITY = 9
MAX_POS = 12


def make(rng, dtype, *, batch, q_len, dim, n_heads, n_kv_heads, head_dim, n_pairs):
    n = (n_heads + 2 * n_kv_heads) * head_dim
    angles = rng.uniform(-3, 3, (MAX_POS, n_pairs))
    return {
        "x": rng.standard_normal((batch, q_len, dim)).astype(dtype),
        "w": (rng.standard_normal((n, dim)) / math.sqrt(dim)).astype(dtype),
        "b": rng.standard_normal(n).astype(dtype),
        "cos": np.cos(angles).astype(np.float32) if n_pairs else None,
        "sin": np.sin(angles).astype(np.float32) if n_pairs else None,
        "start": rng.integers(0, CAPACITY - q_len + 1, batch).astype(np.int32),
    }


def caches(batch, n_kv_heads, head_dim, dtype, fill=7.0):
    return [np.full((batch, n_kv_heads, CAPACITY, head_dim), fill, dtype) for _ in range(2)]


def moved(to, arrays):
    return {name: None if a is None else to(a) for name, a in arrays.items()}


def oracle(arrays, shape, n_heads, *, norm=None, **options):
    """linear, then rope_append, in float64."""
    exact = {
        name: a if a is None or name == "start" else np.asarray(a, np.float64)
        for name, a in arrays.items()
    }
    keys, values = caches(*shape, np.float64)
    x = exact.pop("x")
    if norm is not None:
        x, _ = reference.rmsnorm(arrays["x"], *norm[:1], eps=norm[1], rounding=norm[2])
        x = x.astype(np.float64)
    qkv = reference.linear(x, exact.pop("w"), exact.pop("b"))
    q = reference.rope_append(
        qkv, k_cache=keys, v_cache=values, n_heads=n_heads, **exact, **options
    )
    return q, keys, values


SIZES = {
    "decode": dict(batch=3, q_len=1, dim=40, n_heads=4, n_kv_heads=2, head_dim=16, n_pairs=8),
    "chunk": dict(batch=1, q_len=3, dim=33, n_heads=3, n_kv_heads=1, head_dim=10, n_pairs=3),
    "many": dict(batch=3, q_len=4, dim=40, n_heads=4, n_kv_heads=2, head_dim=16, n_pairs=8),
    "odd": dict(batch=1, q_len=2, dim=24, n_heads=2, n_kv_heads=1, head_dim=7, n_pairs=3),
    "unrotated": dict(batch=2, q_len=1, dim=24, n_heads=2, n_kv_heads=2, head_dim=8, n_pairs=0),
}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half_split", "interleaved"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_matches_float64(to, rng, dtype, interleaved, sizes):
    if interleaved and dtype != bfloat16:
        dtype = np.float32
    arrays = make(rng, dtype, **sizes)
    shape = (sizes["batch"], sizes["n_kv_heads"], sizes["head_dim"])
    q, k, v = oracle(arrays, shape, sizes["n_heads"], interleaved=interleaved)
    keys, values = map(to, caches(*shape, dtype))
    out = poisoned(q.shape, dtype, to)
    got = ops.qkv_rope_append(
        **moved(to, arrays),
        k_cache=keys,
        v_cache=values,
        n_heads=sizes["n_heads"],
        interleaved=interleaved,
        out=out,
    )
    assert got is out
    # Beyond the one launch the projection is rounded before it is rotated.
    assert_close(got, q, dtype, 1.5)
    assert_close(keys, k, dtype, 1.5)
    assert relative_error(values, v) <= TOLERANCE[np.dtype(dtype).name]


@pytest.mark.parametrize("qk", ["none", "head", "full"])
def test_with_norms(to, rng, qk):
    sizes = SIZES["decode"]
    arrays = make(rng, np.float32, **sizes)
    weight = rng.uniform(0.5, 1.5, sizes["dim"]).astype(np.float32)
    spans = {"none": None, "head": (1, 1), "full": (sizes["n_heads"], sizes["n_kv_heads"])}[qk]
    norms = {}
    if spans:
        for name, span in zip(("q_norm", "k_norm"), spans, strict=True):
            norms[name] = rng.uniform(0.5, 1.5, span * sizes["head_dim"]).astype(np.float32)
    shape = (sizes["batch"], sizes["n_kv_heads"], sizes["head_dim"])
    q, k, v = oracle({**arrays, **norms}, shape, 4, norm=(weight, 1e-6, "one_plus"), qk_eps=1e-6)
    keys, values = map(to, caches(*shape, np.float32))
    with jit.record() as record:
        got = ops.qkv_rope_append(
            **moved(to, arrays),
            **moved(to, norms),
            k_cache=keys,
            v_cache=values,
            n_heads=4,
            norm=Norm(to(weight), 1e-6, "one_plus"),
            qk_eps=1e-6,
        )
    for mine, wanted in ((got, q), (keys, k), (values, v)):
        assert_close(mine, wanted, np.float32)
    if type(got) is not np.ndarray:
        wanted = ["linear_rows", "rope_append"] if spans else ["qkv_rows"]
        assert [launch.kernel for launch in record.launches] == wanted


PACKED_SIZES = {
    "narrow heads": SIZES["decode"],
    "odd heads": SIZES["chunk"],
    "decode": dict(batch=3, q_len=1, dim=40, n_heads=3, n_kv_heads=1, head_dim=32, n_pairs=16),
    "chunk": dict(batch=1, q_len=7, dim=67, n_heads=2, n_kv_heads=2, head_dim=64, n_pairs=32),
    "partly": dict(batch=2, q_len=2, dim=130, n_heads=4, n_kv_heads=2, head_dim=96, n_pairs=16),
    "some pairs": dict(batch=2, q_len=1, dim=8, n_heads=1, n_kv_heads=1, head_dim=32, n_pairs=6),
    "unrotated": dict(batch=8, q_len=1, dim=24, n_heads=2, n_kv_heads=1, head_dim=32, n_pairs=0),
    "many": dict(batch=3, q_len=4, dim=40, n_heads=3, n_kv_heads=1, head_dim=32, n_pairs=16),
}


@pytest.mark.parametrize("sizes", PACKED_SIZES.values(), ids=PACKED_SIZES)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half_split", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_packed_weights(to, rng, dtype, interleaved, sizes):
    arrays = make(rng, dtype, **sizes)
    shape = (sizes["batch"], sizes["n_kv_heads"], sizes["head_dim"])
    weight = rng.uniform(0.5, 1.5, sizes["dim"]).astype(dtype)
    norm = (weight, 1e-6, "scale_first")
    q, k, v = oracle(arrays, shape, sizes["n_heads"], norm=norm, interleaved=interleaved)
    keys, values = map(to, caches(*shape, dtype))
    there = moved(to, arrays)
    there["w"] = pack(there["w"])
    out = poisoned(q.shape, dtype, to)
    with jit.record() as record:
        got = ops.qkv_rope_append(
            **there,
            k_cache=keys,
            v_cache=values,
            n_heads=sizes["n_heads"],
            norm=Norm(to(weight), 1e-6, "scale_first"),
            interleaved=interleaved,
            out=out,
        )
    assert got is out
    for mine, wanted in ((got, q), (keys, k), (values, v)):
        assert_close(mine, wanted, dtype, 1.5)
    if type(got) is not np.ndarray:
        names = [launch.kernel for launch in record.launches]
        few = sizes["batch"] * sizes["q_len"] <= tiles.MAX_ROWS
        if few and sizes["head_dim"] % 32 == 0 and (interleaved or sizes["n_pairs"] % 16 == 0):
            assert names == ["packed_qkv_rows"]
        elif few:
            assert names == ["packed_linear_rows", "rope_append"]
        else:
            hopper = tiles.target_of(got).arch == "90a" and sizes["dim"] % 8 == 0
            by_warpgroups = hopper and dtype != np.float32
            product = "linear_warpgroups" if by_warpgroups else "packed_linear_tiles"
            assert names == ["rmsnorm", product, "rope_append"]


def test_packed_tokens_beyond_the_cache_and_the_table(to, rng):
    arrays = make(rng, np.float32, **PACKED_SIZES["chunk"])
    arrays["start"][:] = CAPACITY - 5  # the last two of seven tokens have no place
    for name in ("cos", "sin"):
        arrays[name] = arrays[name][: CAPACITY - 1]  # and the last three no angles
    guarded = np.full((3, 2, CAPACITY, 64), 7.0, np.float32)
    keys, values = to(guarded.copy()), to(guarded.copy())
    there = moved(to, arrays)
    there["w"] = pack(there["w"])
    got = ops.qkv_rope_append(**there, k_cache=keys[1:2], v_cache=values[1:2], n_heads=2)
    q, k, v = oracle(arrays, (1, 2, 64), 2)
    q, k = np.asarray(q), np.asarray(k)
    assert np.isnan(to_numpy(got)[:, 4:]).all() and np.isnan(to_numpy(keys)[1, :, -1]).all()
    assert_close(got[:, :4], q[:, :4], np.float32)
    assert_close(keys[1:2, :, :-1], k[:, :, :-1], np.float32)
    assert_close(values[1:2], v, np.float32)
    assert all((to_numpy(cache)[[0, 2]] == 7.0).all() for cache in (keys, values))


def test_packed_bits_of_a_sequence_do_not_depend_on_the_batch(to_kernels, rng):
    sizes = {**PACKED_SIZES["decode"], "batch": tiles.MAX_ROWS, "dim": 1160}
    arrays = make(rng, bfloat16, **sizes)
    shape = (tiles.MAX_ROWS, sizes["n_kv_heads"], sizes["head_dim"])
    keys, values = map(to_kernels, caches(*shape, bfloat16))
    there = moved(to_kernels, arrays)
    there["w"] = pack(there["w"])
    q = ops.qkv_rope_append(**there, k_cache=keys, v_cache=values, n_heads=3)
    for i in (0, 5):
        one = {**there, "x": there["x"][i : i + 1], "start": there["start"][i : i + 1]}
        k, v = map(to_kernels, caches(1, *shape[1:], bfloat16))
        alone = ops.qkv_rope_append(**one, k_cache=k, v_cache=v, n_heads=3)
        for batched, single in ((q, alone), (keys, k), (values, v)):
            np.testing.assert_array_equal(to_numpy(batched)[i], to_numpy(single)[0])


@pytest.mark.cpu_kernels
def test_packed_bits_do_not_depend_on_the_number_of_sms(rng, monkeypatch):
    arrays = make(rng, np.float16, **PACKED_SIZES["chunk"])
    there = moved(device.twin, arrays)
    there["w"] = pack(there["w"])
    results = set()
    for sm_count in (1, 2, 5, 78):
        monkeypatch.setattr(tiles, "TWIN", dataclasses.replace(tiles.TWIN, sm_count=sm_count))
        keys, values = map(device.twin, caches(1, 2, 64, np.float16))
        q = ops.qkv_rope_append(**there, k_cache=keys, v_cache=values, n_heads=2)
        results.add(q.tobytes() + keys.tobytes() + values.tobytes())
    assert len(results) == 1


def test_tokens_beyond_the_cache_are_dropped(to, rng):
    sizes = SIZES["chunk"]
    arrays = make(rng, np.float32, **sizes)
    arrays["start"][:] = CAPACITY - 2  # the third token has no place
    shape = (1, sizes["n_kv_heads"], sizes["head_dim"])
    guarded = np.full((3, *shape[1:2], CAPACITY, shape[2]), 7.0, np.float32)
    keys, values = to(guarded.copy()), to(guarded.copy())
    got = ops.qkv_rope_append(
        **moved(to, arrays), k_cache=keys[1:2], v_cache=values[1:2], n_heads=3
    )
    q, k, v = oracle(arrays, shape, 3)
    assert_close(got, q, np.float32)
    for cache, wanted in ((keys, k), (values, v)):
        assert_close(cache[1:2], wanted, np.float32)
        assert (to_numpy(cache)[[0, 2]] == 7.0).all()


def test_positions_beyond_the_table_are_nan(to, rng):
    sizes = {**SIZES["unrotated"], "n_pairs": 4, "batch": 1}
    arrays = make(rng, np.float32, **sizes)
    arrays["cos"], arrays["sin"] = arrays["cos"][:3], arrays["sin"][:3]
    arrays["start"][:] = 3
    keys, values = map(to, caches(1, 2, 8, np.float32))
    q = ops.qkv_rope_append(**moved(to, arrays), k_cache=keys, v_cache=values, n_heads=2)
    assert np.isnan(to_numpy(q)).all()
    assert np.isfinite(to_numpy(values)).all()


def test_cache_may_be_a_view(to, rng):
    sizes = SIZES["decode"]
    arrays = make(rng, np.float32, **sizes)
    shape = (sizes["batch"], sizes["n_kv_heads"], sizes["head_dim"])
    both = to(np.full((shape[0], 2, shape[1], CAPACITY, shape[2]), 7.0, np.float32))
    ops.qkv_rope_append(**moved(to, arrays), k_cache=both[:, 0], v_cache=both[:, 1], n_heads=4)
    _, k, v = oracle(arrays, shape, 4)
    assert_close(both[:, 0], k, np.float32)
    assert_close(both[:, 1], v, np.float32)


def test_bits_of_a_sequence_do_not_depend_on_the_batch(to_kernels, rng):
    sizes = {**SIZES["decode"], "batch": tiles.MAX_ROWS}
    arrays = make(rng, bfloat16, **sizes)
    shape = (tiles.MAX_ROWS, sizes["n_kv_heads"], sizes["head_dim"])
    keys, values = map(to_kernels, caches(*shape, bfloat16))
    q = ops.qkv_rope_append(**moved(to_kernels, arrays), k_cache=keys, v_cache=values, n_heads=4)
    for i in (0, 5):
        one = {**arrays, "x": arrays["x"][i : i + 1], "start": arrays["start"][i : i + 1]}
        k, v = map(to_kernels, caches(1, *shape[1:], bfloat16))
        alone = ops.qkv_rope_append(**moved(to_kernels, one), k_cache=k, v_cache=v, n_heads=4)
        for batched, single in ((q, alone), (keys, k), (values, v)):
            np.testing.assert_array_equal(to_numpy(batched)[i], to_numpy(single)[0])


def test_one_launch_of_its_bytes(to_kernels, rng):
    sizes = SIZES["decode"]
    arrays = make(rng, bfloat16, **sizes)
    keys, values = map(to_kernels, caches(3, 2, 16, bfloat16))
    with jit.record(dry=True) as record:
        ops.qkv_rope_append(**moved(to_kernels, arrays), k_cache=keys, v_cache=values, n_heads=4)
    (launch,) = record.launches
    read = sum(arrays[name].nbytes for name in ("x", "w", "b", "start"))
    assert launch.size_bytes == read + 3 * 128 * 2 + 2 * 3 * 8 * 4


def test_nothing_launches_nothing(to, rng):
    sizes = {**SIZES["decode"], "batch": 0}
    arrays = make(rng, np.float32, **sizes)
    keys, values = map(to, caches(0, 2, 16, np.float32))
    with jit.record(dry=True) as record:
        q = ops.qkv_rope_append(**moved(to, arrays), k_cache=keys, v_cache=values, n_heads=4)
    assert q.shape == (0, 1, 4, 16)
    assert record.launches == []


def test_what_is_wrong_is_said(rng):
    arrays = make(rng, np.float32, **SIZES["decode"])
    keys, values = caches(3, 2, 16, np.float32)
    given = {**arrays, "k_cache": keys, "v_cache": values, "n_heads": 4}
    with pytest.raises(ValueError, match=r"qkv_rope_append: w has n = 128, wanted .* = 144"):
        ops.qkv_rope_append(**{**given, "n_heads": 5})
    with pytest.raises(ValueError, match="qkv_rope_append: w is a gate and its up packed togeth"):
        ops.qkv_rope_append(**{**given, "w": pack(arrays["w"], up=arrays["w"])})
    with pytest.raises(ValueError, match="cos and sin come together"):
        ops.qkv_rope_append(**{**given, "sin": None})
    with pytest.raises(TypeError, match="start has dtype int64, wanted int32"):
        ops.qkv_rope_append(**{**given, "start": arrays["start"].astype(np.int64)})
    with pytest.raises(ValueError, match="k_cache is written in place"):
        ops.qkv_rope_append(**{**given, "k_cache": keys[..., ::-1]})
    with pytest.raises(ValueError, match=r"x is \[batch q_len dim\].*|w is"):
        ops.qkv_rope_append(**{**given, "w": arrays["w"][:, :-1]})


@pytest.mark.gpu
@pytest.mark.parametrize("batch, q_len", [(1, 1), (5, 1), (2, 300)])
@pytest.mark.parametrize("head_dim, n_heads, n_kv_heads", [(128, 32, 8), (80, 14, 2), (96, 9, 3)])
def test_large(rng, batch, q_len, head_dim, n_heads, n_kv_heads):
    import cupy

    n = (n_heads + 2 * n_kv_heads) * head_dim
    capacity = q_len + 5
    angles = rng.uniform(-3, 3, (capacity, head_dim // 2))
    arrays = {
        "x": rng.standard_normal((batch, q_len, 2048)).astype(bfloat16),
        "w": (rng.standard_normal((n, 2048)) / 45).astype(bfloat16),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "start": rng.integers(0, 5, batch).astype(np.int32),
    }
    empty = np.zeros((batch, n_kv_heads, capacity, head_dim))
    keys, values = (cupy.asarray(empty.astype(bfloat16)) for _ in range(2))
    got = ops.qkv_rope_append(
        **moved(cupy.asarray, arrays), k_cache=keys, v_cache=values, n_heads=n_heads
    )
    exact = {name: np.asarray(a, np.float64) for name, a in arrays.items() if name != "start"}
    k, v = empty.copy(), empty.copy()
    q = reference.rope_append(
        reference.linear(exact["x"], exact["w"]),
        start=arrays["start"],
        k_cache=k,
        v_cache=v,
        n_heads=n_heads,
        cos=exact["cos"],
        sin=exact["sin"],
    )
    for mine, wanted in ((got, q), (keys, k), (values, v)):
        assert_close(mine, wanted, bfloat16, 1.5)
