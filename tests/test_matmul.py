"""matmul against float64, and against linear bit by bit."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import jit, ops, reference


def inputs(rng, m, n, k, dtype):
    x = rng.standard_normal((m, k)).astype(dtype)
    return x, (rng.standard_normal((n, k)) / math.sqrt(k)).astype(dtype)


def double(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


def test_reference_matches_loops(rng):
    x, w = inputs(rng, 2, 3, 5, np.float64)
    got = reference.matmul(x, w)
    for i in range(2):
        for j in range(3):
            assert got[i, j] == pytest.approx(sum(x[i, t] * w[j, t] for t in range(5)), rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("m, n, k", [(1, 21, 264), (3, 7, 33), (10, 33, 72), (18, 5, 1)])
def test_matmul_matches_float64(to, rng, dtype, m, n, k):
    x, w = inputs(rng, m, n, k, dtype)
    out = poisoned((m, n), dtype, to)
    got = ops.matmul(to(x), to(w), out=out)
    assert got is out
    assert_close(got, reference.matmul(*double(x, w)), dtype)


@pytest.mark.parametrize("m", [1, 10])
def test_matmul_is_linear_without_the_rest(to_kernels, rng, m):
    x, w = (to_kernels(a) for a in inputs(rng, m, 12, 264, ml_dtypes.bfloat16))
    np.testing.assert_array_equal(to_numpy(ops.matmul(x, w)), to_numpy(ops.linear(x, w)))


def test_matmul_is_one_launch_of_its_bytes(to_kernels, rng):
    x, w = (to_kernels(a) for a in inputs(rng, 2, 6, 32, np.float32))
    with jit.record(dry=True) as record:
        ops.matmul(x, w)
    (launch,) = record.launches
    assert launch.size_bytes == (2 * 32 + 6 * 32 + 2 * 6) * 4


def test_matmul_takes_any_strides(to, rng):
    w = rng.standard_normal((24, 9)).astype(np.float32)
    x = rng.standard_normal((3, 50)).astype(np.float32)
    got = ops.matmul(to(x)[:, 1:49:2], to(w).T)
    assert_close(got, reference.matmul(*double(x[:, 1:49:2], w.T)), np.float32)


def test_matmul_of_nothing_launches_nothing(to):
    with jit.record(dry=True) as record:
        got = ops.matmul(to(np.ones((2, 8), np.float32)), to(np.ones((0, 8), np.float32)))
    assert got.shape == (2, 0)
    assert record.launches == []


def test_matmul_says_what_is_wrong():
    x = np.ones((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"matmul: w is \[n k\] = \[3, 5\] but x has k = 4"):
        ops.matmul(x, np.ones((3, 5), np.float32))
    with pytest.raises(TypeError, match="matmul: w has dtype float64"):
        ops.matmul(x, np.ones((3, 4)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("m, n, k", [(1, 1234, 14336), (7, 4096, 3420), (100, 3420, 1234)])
def test_large_matmul(rng, dtype, m, n, k):
    import cupy

    x, w = inputs(rng, m, n, k, dtype)
    got = ops.matmul(cupy.asarray(x), cupy.asarray(w))
    assert_close(got, reference.matmul(*double(x, w)), dtype)


@pytest.mark.gpu
@pytest.mark.slow
def test_matmul_of_weights_beyond_32_bits():
    # 9 GB of weights: the offset of a row does not fit into 32 bits.
    import cupy

    if cupy.cuda.runtime.memGetInfo()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free memory")
    n, k = 1 << 20, 4608
    w = cupy.zeros((n, k), ml_dtypes.bfloat16)
    w[-1] = 1
    w[n // 2] = 2
    for m in (1, 9):
        got = ops.matmul(cupy.ones((m, k), ml_dtypes.bfloat16), w)
        assert float(got[-1, -1]) == k and float(got[0, n // 2]) == 2 * k
        assert int((got != 0).sum()) == 2 * m
