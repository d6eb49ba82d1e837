"""Logits and weighted values against float64, and the three elementary steps against attention."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import ops, reference

FP32, FP16, BF16 = DTYPES.values()


def assert_scores(got, wanted, dtype):
    """The same keys at -inf, and the others close."""
    hidden = np.isneginf(wanted)
    plain = to_numpy(got).astype(np.float64)
    np.testing.assert_array_equal(np.isneginf(plain), hidden)
    finite = np.where(hidden, 0, plain).astype(dtype)
    assert got.dtype == np.dtype(dtype)
    assert_close(finite, np.where(hidden, 0, wanted), dtype)


def make(rng, dtype, batch, q_len, kv_len, n_heads, n_kv_heads, head_dim):
    q = rng.standard_normal((batch, q_len, n_heads, head_dim)).astype(dtype)
    k, v = (
        rng.standard_normal((batch, kv_len, n_kv_heads, head_dim)).astype(dtype) for _ in range(2)
    )
    return q, k, v


def wide(*arrays):
    return (x.astype(np.float64) for x in arrays)


CASES = [
    # dtype, q_len, kv_len, n_heads, n_kv_heads, head_dim
    (BF16, 1, 1, 1, 1, 32),
    (BF16, 1, 130, 6, 2, 80),
    (BF16, 3, 65, 5, 1, 33),
    (BF16, 20, 70, 3, 1, 56),
    (FP16, 70, 150, 2, 2, 33),
    (BF16, 17, 33, 1, 1, 256),
    (FP32, 2, 67, 4, 2, 32),
    (FP32, 18, 67, 2, 1, 32),
]


@pytest.mark.parametrize(("dtype", "q_len", "kv_len", "n_heads", "n_kv", "head_dim"), CASES)
def test_scores_and_values_match_float64(to, rng, dtype, q_len, kv_len, n_heads, n_kv, head_dim):
    q, k, v = make(rng, dtype, 2, q_len, kv_len, n_heads, n_kv, head_dim)
    out = poisoned((2, n_heads, q_len, kv_len), dtype, to)
    got = ops.scores(to(q), to(k), out=out)
    assert got is out
    assert_scores(got, reference.scores(*wide(q, k)), dtype)
    p = reference.softmax(reference.scores(q, k))
    out = poisoned(q.shape, dtype, to)
    got = ops.values(to(p), to(v), out=out)
    assert got is out
    assert_close(got, reference.values(*wide(p, v)), dtype)


@pytest.mark.parametrize("q_len", [2, 70])
def test_scores_masks(to, rng, q_len):
    q, k, _ = make(rng, BF16, 2, q_len, 150, 2, 1, 32)
    start = np.array([0, 75], np.int32)
    lengths = np.array([150, 40], np.int32)
    for options in (
        {"start": start},
        {"start": start, "window": 64},
        {"start": start, "window": 65, "softcap": 1.5, "scale": 0.5},
        {"start": start, "lengths": lengths},
        {"causal": False},
        {"causal": False, "lengths": lengths},
    ):
        moved = {n: to(o) if isinstance(o, np.ndarray) else o for n, o in options.items()}
        got = ops.scores(to(q), to(k), **moved)
        assert_scores(got, reference.scores(*wide(q, k), **options), BF16)


@pytest.mark.parametrize("q_len", [1, 20])
def test_elementary_steps_equal_attention(to, rng, q_len):
    q, k, v = make(rng, BF16, 2, q_len, 150, 4, 2, 32)
    sinks = rng.standard_normal(4).astype(BF16)
    start = np.array([100, 3], np.int32)
    options = {"start": start, "window": 70, "softcap": 3.0}
    wanted = reference.attention(*wide(q, k, v), **options, sinks=sinks.astype(np.float64))
    for b, first in enumerate(start):
        k[b, first + q_len :] = v[b, first + q_len :] = np.nan
    moved = {n: to(o) if isinstance(o, np.ndarray) else o for n, o in options.items()}
    s = ops.scores(to(q), to(k), **moved)
    ops.softmax(s, sinks=to(sinks), start=to(start), out=s)
    got = ops.values(s, to(v), start=to(start))
    # Logits and probabilities are rounded to bfloat16 on the way.
    assert_close(got, wanted, BF16, factor=3)


def test_values_of_few_queries_leave_out_keys_without_weight(to, rng):
    p = np.zeros((1, 2, 1, 90), np.float32)
    p[..., :3] = 0.25
    v = np.full((1, 90, 1, 32), np.nan, np.float32)
    v[:, :3] = 2.0
    np.testing.assert_array_equal(to_numpy(ops.values(to(p), to(v))), 1.5)


@pytest.mark.parametrize("q_len", [1, 20])
def test_values_look_at_live_keys_only(to, rng, q_len):
    _, _, v = make(rng, BF16, 2, q_len, 150, 2, 1, 32)
    p = rng.uniform(0, 1, (2, 2, q_len, 150)).astype(BF16)
    lengths = np.array([0, 77], np.int32)
    wanted = reference.values(*wide(p, v), lengths=lengths)
    for b, length in enumerate(lengths):
        v[b, length:] = np.nan
        p[b, :, :, length:] = np.nan
    got = ops.values(to(p), to(v), lengths=to(lengths))
    assert_close(got, wanted, BF16)
    assert (to_numpy(got)[0] == 0).all()


@pytest.mark.parametrize("q_len", [1, 20])
def test_strided_caches(to, rng, q_len):
    q, k, v = make(rng, BF16, 2, q_len, 70, 4, 2, 32)
    views = [to(x.transpose(0, 2, 1, 3).copy()).transpose(0, 2, 1, 3) for x in (k, v)]
    assert_scores(ops.scores(to(q), views[0]), reference.scores(*wide(q, k)), BF16)
    p = reference.softmax(reference.scores(q, k))
    assert_close(ops.values(to(p), views[1]), reference.values(*wide(p, v)), BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_len", [1000, 2049, 8193, 32769])
def test_long_lengths(rng, kv_len):
    import cupy

    q, k, v = make(rng, BF16, 1, 1, kv_len, 8, 2, 64)
    to = cupy.asarray
    assert_scores(ops.scores(to(q), to(k)), reference.scores(*wide(q, k)), BF16)
    p = reference.softmax(reference.scores(q, k))
    assert_close(ops.values(to(p), to(v)), reference.values(*wide(p, v)), BF16)


@pytest.mark.gpu
def test_long_prompts(rng):
    import cupy

    q, k, v = make(rng, BF16, 2, 1000, 1000, 4, 2, 128)
    to = cupy.asarray
    assert_scores(ops.scores(to(q), to(k)), reference.scores(*wide(q, k)), BF16)
    p = reference.softmax(reference.scores(q, k))
    assert_close(ops.values(to(p), to(v)), reference.values(*wide(p, v)), BF16)


def test_nothing_to_score(to):
    q = np.zeros((1, 0, 2, 32), np.float32)
    k = np.zeros((1, 3, 1, 32), np.float32)
    assert ops.scores(to(q), to(k)).shape == (1, 2, 0, 3)
    p = np.zeros((1, 2, 1, 0), np.float32)
    assert (to_numpy(ops.values(to(p), to(k[:, :0]))) == 0).all()


def test_scores_and_values_reject_wrong_arrays():
    q, k = np.zeros((1, 1, 4, 32), np.float32), np.zeros((1, 5, 3, 32), np.float32)
    with pytest.raises(ValueError, match="scores: q has 4 heads, wanted a multiple of the 3"):
        ops.scores(q, k)
    p = np.zeros((1, 4, 1, 5), np.float32)
    with pytest.raises(ValueError, match="values: q has 4 heads, wanted a multiple of the 3"):
        ops.values(p, k)
    with pytest.raises(ValueError, match="but p has kv_len = 5"):
        ops.values(p, k[:, :4, :2])
    with pytest.raises(TypeError, match="lengths has dtype int64"):
        ops.values(p, k[:, :, :2], lengths=np.zeros(1, np.int64))
