"""Attention against float64: every head ratio, length, mask and layout, decode and prefill."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import device, jit, ops, reference
from cufuse.device import Unsupported

# The name in `ops` is the function.
attention_op = importlib.import_module("cufuse.ops.attention")
FP32, FP16, BF16 = DTYPES.values()


def make(rng, dtype, batch, q_len, kv_len, n_heads, n_kv_heads, head_dim):
    q = rng.standard_normal((batch, q_len, n_heads, head_dim)).astype(dtype)
    k, v = (
        rng.standard_normal((batch, kv_len, n_kv_heads, head_dim)).astype(dtype) for _ in range(2)
    )
    return q, k, v


def exact(q, k, v, **options):
    """The float64 oracle."""
    options = {
        name: value.astype(np.float64) if name == "sinks" else value
        for name, value in options.items()
    }
    return reference.attention(*(x.astype(np.float64) for x in (q, k, v)), **options)


def run(to, q, k, v, **options):
    moved = {n: to(o) if isinstance(o, np.ndarray) else o for n, o in options.items()}
    out = poisoned(q.shape, q.dtype, to)
    got = ops.attention(to(q), to(k), to(v), **moved, out=out)
    assert got is out
    return got


def check(to, q, k, v, factor=1.0, **options):
    got = run(to, q, k, v, **options)
    assert_close(got, exact(q, k, v, **options), q.dtype, factor)
    return got


def naive(q, k, v, seen, scale, softcap, sinks):
    """One query, one head, one key at a time."""
    out = np.zeros(q.shape)
    batch, q_len, n_heads, _ = q.shape
    for b, i, h in np.ndindex(batch, q_len, n_heads):
        kv = h // (n_heads // k.shape[2])
        keys = [j for j in range(k.shape[1]) if seen(b, i, j)]
        if not keys:
            continue
        logits = [scale * float(q[b, i, h] @ k[b, j, kv]) for j in keys]
        if softcap:
            logits = [softcap * np.tanh(s / softcap) for s in logits]
        weights = np.exp(logits)
        total = weights.sum() + (np.exp(sinks[h]) if sinks is not None else 0.0)
        out[b, i, h] = sum(w * v[b, j, kv] for w, j in zip(weights, keys, strict=True)) / total
    return out


def test_float64_reference_matches_naive_loops(rng):
    q, k, v = make(rng, np.float64, 2, 3, 7, 4, 2, 5)
    start, lengths = np.array([1, 4]), np.array([3, 9])
    sinks = rng.standard_normal(4)
    for causal, window in ((True, None), (True, 2), (False, None)):
        options = {"start": start, "lengths": lengths, "causal": causal, "window": window}
        got = reference.attention(q, k, v, **options, scale=0.3, softcap=2.0, sinks=sinks)

        def seen(b, i, j, causal=causal, window=window):
            p = start[b] + i
            return j < lengths[b] and (not causal or j <= p) and (window is None or p - window < j)

        np.testing.assert_allclose(got, naive(q, k, v, seen, 0.3, 2.0, sinks))


def test_defaults_place_the_queries(rng):
    q, k, v = make(rng, np.float64, 1, 2, 5, 1, 1, 4)
    last = reference.attention(q, k, v, start=np.array([3]), lengths=np.array([5]))
    np.testing.assert_array_equal(reference.attention(q, k, v), last)
    every = reference.attention(q, k, v, causal=False)
    np.testing.assert_allclose(every, naive(q, k, v, lambda b, i, j: True, 0.5, None, None))


@pytest.mark.parametrize("ratio", [1, 3, 5, 6, 7, 9, 16])
@pytest.mark.parametrize("q_len", [1, 17], ids=["decode", "prefill"])
def test_any_group_size(to, rng, ratio, q_len):
    check(to, *make(rng, BF16, 1, q_len, 20, 2 * ratio, 2, 32))


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [*((BF16, n) for n in (32, 33, 56, 64, 80, 96, 128, 256)), (FP16, 80), (FP32, 33), (FP32, 256)],
)
def test_any_head_dim_decode(to, rng, dtype, head_dim):
    check(to, *make(rng, dtype, 2, 1, 37, 2, 1, head_dim))


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(FP16, 33), (FP16, 56), *((BF16, n) for n in (56, 80, 96, 128, 256))]
)
def test_any_head_dim_prefill(to, rng, dtype, head_dim):
    check(to, *make(rng, dtype, 1, 19, 70, 1, 1, head_dim))


def test_float32_prompts_take_the_decode_kernel(to, rng):
    check(to, *make(rng, FP32, 1, 18, 70, 2, 1, 32))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_lengths_across_split_boundaries(to, rng, length):
    q, k, v = make(rng, BF16, 1, 1, 200, 4, 2, 32)
    check(to, q, k, v, start=np.array([length - 1], np.int32))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "length", [255, 256, 257, 1000, 2047, 2048, 2049, 8191, 8192, 8193, 32767, 32768, 32769, 70000]
)
def test_long_lengths_across_split_boundaries(rng, length):
    import cupy

    q, k, v = make(rng, BF16, 1, 1, length + 3, 8, 2, 64)
    check(cupy.asarray, q, k, v, start=np.array([length - 1], np.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_long_prompts(rng, head_dim):
    import cupy

    q, k, v = make(rng, BF16, 2, 1000, 1000, 4, 2, head_dim)
    check(cupy.asarray, q, k, v)
    check(cupy.asarray, q, k, v, window=130)
    check(cupy.asarray, q, k, v, causal=False, lengths=np.array([1000, 77], np.int32))


@pytest.mark.parametrize("window", [1, 2, 64, 65])
def test_window_counts_the_query_itself(to, rng, window):
    # At W - 1, W and W + 1 tokens: the window opens, is full, and drops the first key.
    for n in (window - 1, window, window + 1):
        if n > 0:
            q, k, v = make(rng, FP32, 1, 1, n, 2, 1, 32)
            check(to, q, k, v, window=window)


def test_window_of_a_prompt(to, rng):
    q, k, v = make(rng, BF16, 2, 70, 150, 1, 1, 32)
    start = np.array([0, 80], np.int32)
    for window in (1, 63, 64, 65):
        check(to, q, k, v, start=start, window=window)


@pytest.mark.parametrize("q_len", [2, 20], ids=["decode", "prefill"])
def test_batch_of_different_starts(to, rng, q_len):
    q, k, v = make(rng, BF16, 3, q_len, 150, 2, 1, 32)
    check(to, q, k, v, start=np.array([0, 130, 62], np.int32))


@pytest.mark.parametrize("q_len", [3, 40], ids=["decode", "prefill"])
def test_bidirectional_with_padding(to, rng, q_len):
    q, k, v = make(rng, BF16, 3, q_len, 70, 2, 2, 32)
    check(to, q, k, v, causal=False)
    lengths = np.array([70, 1, 33], np.int32)
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = np.nan
    check(to, q, k, v, causal=False, lengths=lengths)


@pytest.mark.parametrize("q_len", [1, 20], ids=["decode", "prefill"])
def test_scale_softcap_and_sinks(to, rng, q_len):
    q, k, v = make(rng, BF16, 2, q_len, 80, 3, 1, 32)
    sinks = rng.standard_normal(3).astype(BF16) * BF16(3)
    for options in ({"scale": 0.7}, {"softcap": 2.0}, {"sinks": sinks}):
        check(to, q, k, v, **options)
    check(to, q, k, v, scale=0.7, softcap=2.0, sinks=sinks, window=66)


@pytest.mark.parametrize("q_len", [1, 20], ids=["decode", "prefill"])
def test_huge_logits_and_sinks_stay_finite(to, rng, q_len):
    q, k, v = make(rng, FP16, 1, q_len, 70, 2, 1, 32)
    sinks = np.array([-60000.0, 60000.0], FP16)
    got = to_numpy(run(to, q, k, v, scale=1000.0, sinks=sinks)).astype(np.float32)
    assert np.isfinite(got).all()
    assert (got[:, :, 1] == 0).all()


@pytest.mark.parametrize("q_len", [1, 20], ids=["decode", "prefill"])
def test_what_nobody_sees_is_not_read(to, rng, q_len):
    q, k, v = make(rng, BF16, 2, q_len, 150, 2, 1, 32)
    start = np.array([66, 100], np.int32)
    wanted = exact(q, k, v, start=start, window=50)
    for b, first in enumerate(start):
        for x in (k, v):
            x[b, first + q_len :] = np.nan
            x[b, : first - 49] = np.nan
    assert_close(run(to, q, k, v, start=start, window=50), wanted, BF16)


@pytest.mark.parametrize("q_len", [2, 20], ids=["decode", "prefill"])
def test_windows_that_begin_behind_the_length(to, rng, q_len):
    q, k, v = make(rng, BF16, 1, q_len, 60, 2, 1, 32)
    options = {"start": np.array([20], np.int32), "lengths": np.array([22], np.int32), "window": 4}
    wanted = exact(q, k, v, **options)
    k[:, 22:] = v[:, 22:] = np.nan
    assert_close(run(to, q, k, v, **options), wanted, BF16)


def test_reference_ignores_what_nobody_sees(rng):
    q, k, v = make(rng, FP32, 1, 2, 9, 2, 1, 8)
    wanted = reference.attention(q, k[:, :5], v[:, :5])
    k[:, 5:] = v[:, 5:] = np.nan
    got = reference.attention(q, k, v, start=np.array([3]))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("q_len", [2, 20], ids=["decode", "prefill"])
def test_a_query_that_sees_nothing_gets_zeros(to, rng, q_len):
    q, k, v = make(rng, BF16, 2, q_len, 70, 2, 1, 32)
    lengths = np.array([0, 5], np.int32)
    sinks = np.zeros(2, BF16)
    for options in ({"causal": False}, {"causal": False, "sinks": sinks}):
        got = to_numpy(check(to, q, k, v, lengths=lengths, **options))
        assert (got[0] == 0).all()
        assert (got[1] != 0).any()


@pytest.mark.parametrize("q_len", [1, 20], ids=["decode", "prefill"])
def test_strided_caches(to, rng, q_len):
    q, k, v = make(rng, BF16, 2, q_len, 70, 4, 2, 32)
    caches = [to(x.transpose(0, 2, 1, 3).copy()) for x in (k, v)]
    views = [cache.transpose(0, 2, 1, 3)[:, :66] for cache in caches]
    got = ops.attention(to(q), *views)
    assert_close(got, exact(q, k[:, :66], v[:, :66]), BF16)


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("q_len", [1, 20], ids=["decode", "prefill"])
def test_offsets_in_a_cache_go_beyond_32_bits(rng, q_len):
    # 4 GiB between two sequences and nothing there, so no memory is taken.
    step = 2**31 + 64
    q, k, v = make(rng, BF16, 2, q_len, q_len, 2, 1, 32)
    memory = np.zeros(step + 2 * 64 * 32, np.uint16).view(BF16)
    strides = [2 * n for n in (step, 64 * 32, 32, 1)]
    caches = [
        device.twin(np.lib.stride_tricks.as_strided(part, (2, 1, 64, 32), strides))
        for part in (memory, memory[64 * 32 :])
    ]
    start = device.twin(np.zeros(2, np.int32))
    ops.append(device.twin(k), device.twin(v), start, *caches)
    views = [cache.transpose(0, 2, 1, 3) for cache in caches]
    got = ops.attention(device.twin(q), *views, start=start)
    assert_close(got, exact(q, k, v), BF16)
    scored = ops.scores(device.twin(q), views[0], start)
    values = ops.values(ops.softmax(scored, start=start), views[1], start=start)
    assert_close(values, exact(q, k, v), BF16, 3)


def test_other_layouts_and_unaligned_arrays(to, rng):
    q, k, v = make(rng, FP32, 1, 1, 20, 2, 1, 37)
    wanted = exact(q[..., 1:33], k[:, ::-1, :, 1:33], v[:, ::-1, :, 1:33])
    got = ops.attention(to(q)[..., 1:33], to(k)[:, ::-1, :, 1:33], to(v)[:, ::-1, :, 1:33])
    assert_close(got, wanted, FP32)
    same = np.broadcast_to(k[:, :1], k.shape)
    assert_close(ops.attention(to(q), to(same), to(v)), exact(q, same, v), FP32)


def test_a_decoded_row_does_not_depend_on_its_batch(to_kernels, rng):
    to = to_kernels
    q, k, v = make(rng, BF16, 3, 2, 200, 4, 2, 32)
    start = np.array([150, 3, 77], np.int32)
    together = to_numpy(run(to, q, k, v, start=start))
    for b in range(3):
        one = slice(b, b + 1)
        alone = run(to, q[one], k[one], v[one], start=start[one])
        np.testing.assert_array_equal(to_numpy(alone), together[one])
        # Nor on the capacity, nor on the queries beside it.
        end = int(start[b]) + 1
        short = run(to, q[one, :1], k[one, :end], v[one, :end])
        np.testing.assert_array_equal(to_numpy(short), together[one, :1])


def test_bits_repeat_whatever_the_order_of_ctas(rng):
    q, k, v = make(rng, FP32, 1, 1, 300, 2, 1, 32)
    results = []
    for seed in range(3):
        with jit.twin_seed(seed):
            results.append(to_numpy(run(device.twin, q, k, v)))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_decode_agrees_with_prefill(to_kernels, rng):
    to = to_kernels
    q, k, v = make(rng, BF16, 1, 20, 70, 2, 1, 32)
    prompt = to_numpy(run(to, q, k, v)).astype(np.float64)
    for i in (0, 7, 19):
        end = 50 + i + 1
        decoded = run(to, q[:, i : i + 1], k[:, :end], v[:, :end])
        assert_close(decoded, prompt[:, i : i + 1], BF16, factor=2**0.5)  # both are rounded


def test_rows_over_several_launches(to_kernels, rng, monkeypatch):
    q, k, v = make(rng, FP32, 3, 2, 130, 2, 1, 32)
    wanted = to_numpy(run(to_kernels, q, k, v))
    monkeypatch.setattr(attention_op, "_SCRATCH_BYTES", 2 * 2 * 3 * 34 * 4)
    with jit.record() as record:
        got = run(to_kernels, q, k, v)
    assert len(record.launches) == 3
    np.testing.assert_array_equal(to_numpy(got), wanted)


@pytest.mark.parametrize("q_len", [1, 40])
def test_attention_is_one_launch(to_kernels, rng, q_len):
    q, k, v = make(rng, BF16, 2, q_len, 40, 2, 1, 32)
    with jit.record() as record:
        run(to_kernels, q, k, v)
    assert len(record.launches) == 1


@pytest.mark.parametrize("q_len", [1, 20], ids=["decode", "prefill"])
def test_attention_counts_the_keys_that_can_be_seen(to_kernels, rng, q_len):
    # Of the cache's capacity, or of the window: how many tokens there are, the device alone knows.
    q, k, v = (to_kernels(x) for x in make(rng, BF16, 2, q_len, 100, 4, 2, 32))
    start = to_kernels(np.zeros(2, np.int32))
    for window, keys in ((None, 100), (10, 9 + q_len)):
        with jit.record(dry=True) as record:
            ops.attention(q, k, v, start=start, window=window)
        assert record.size_bytes == 2 * q.nbytes + 2 * (2 * keys * 2 * 32) * 2


def test_split_counts():
    for n in (1, 64, 65, 2048, 2049, 8192, 8193, 32768, 32769, 131072):
        keys = attention_op.keys_per_split(n)
        assert -(-n // keys) <= attention_op.max_splits(n)
    for capacity in (1, 63, 2049, 5000, 32769):
        wanted = max(-(-n // attention_op.keys_per_split(n)) for n in range(1, capacity + 1))
        assert attention_op.max_splits(capacity) == wanted


def test_nothing_to_attend(to):
    q = np.zeros((2, 0, 2, 32), np.float32)
    k = np.zeros((2, 3, 1, 32), np.float32)
    assert ops.attention(to(q), to(k), to(k)).shape == (2, 0, 2, 32)
    q = np.ones((1, 1, 2, 32), np.float32)
    k = np.zeros((1, 0, 1, 32), np.float32)
    got = ops.attention(to(q), to(k), to(k), causal=False)
    assert (to_numpy(got) == 0).all()


def test_attention_rejects_wrong_arrays():
    q, k = np.zeros((1, 1, 4, 32), np.float32), np.zeros((1, 5, 3, 32), np.float32)
    with pytest.raises(ValueError, match="q has 4 heads, wanted a multiple of the 3 heads"):
        ops.attention(q, k, k)
    k = k[:, :, :2]
    with pytest.raises(ValueError, match=r"v is .* = \[1, 4, 2, 32\] but k has kv_len = 5"):
        ops.attention(q, k, k[:, :4])
    with pytest.raises(TypeError, match="k has dtype float16 and q has float32"):
        ops.attention(q, k.astype(np.float16), k)
    with pytest.raises(TypeError, match="start has dtype int64"):
        ops.attention(q, k, k, start=np.zeros(1, np.int64))
    with pytest.raises(TypeError, match="twin array and the others are numpy"):
        ops.attention(q, device.twin(k), k)
    with pytest.raises(ValueError, match="window is 0"):
        ops.attention(q, k, k, window=0)
    with pytest.raises(Unsupported, match="window of a bidirectional"):
        ops.attention(q, k, k, window=4, causal=False)
    with pytest.raises(ValueError, match="softcap is -1"):
        ops.attention(q, k, k, softcap=-1)
    with pytest.raises(ValueError, match="out shares memory with q"):
        ops.attention(q, k, k, out=q)
    wide = np.zeros((1, 1, 1, 257), np.float32)
    with pytest.raises(Unsupported, match="head_dim is 257, supported are 1 to 256"):
        ops.attention(wide, wide, wide)
