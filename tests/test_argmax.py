"""Argmax: exact, ties to the lower index, -1 for NaN."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DTYPES, poisoned, to_numpy

from cufuse import jit, ops, reference


def naive(row):
    best = 0
    for i, v in enumerate(row):
        if np.isnan(v):
            return -1
        if v > row[best]:
            best = i
    return best if not np.isnan(row[0]) else -1


@pytest.mark.parametrize("dtype", [*DTYPES.values(), np.float64])
def test_reference_argmax_is_the_plain_loop(rng, dtype):
    x = rng.integers(-3, 3, (20, 9)).astype(dtype)
    x[3, 4] = np.nan
    x[5] = -np.inf
    assert reference.argmax(x).tolist() == [naive(row) for row in x]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 2, 130), (1, 9001), (9, 2080)])
def test_argmax_equals_the_reference(to, rng, dtype, shape):
    x = rng.standard_normal(shape).astype(dtype)
    out = poisoned(shape[:-1], np.int32, to)
    got = ops.argmax(to(x), out=out)
    assert got is out and got.dtype == np.int32
    np.testing.assert_array_equal(to_numpy(got), reference.argmax(x))


@pytest.mark.parametrize("n", [7, 4096, 9001])
def test_argmax_of_ties_is_the_lowest_index(to, rng, n):
    x = rng.integers(0, 3, (6, n)).astype(np.float16)
    x[1] = 5
    x[2] = -np.inf
    x[3, : n // 2] = -0.0
    x[3, n // 2 :] = 0.0
    x[4] = -x[4] - 1
    got = to_numpy(ops.argmax(to(x)))
    np.testing.assert_array_equal(got, reference.argmax(x))
    assert got[1] == got[2] == got[3] == 0


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_argmax_of_extreme_values(to, dtype):
    tiny = 2.0**-14 * 2.0**-8 if dtype == np.float16 else 1e-40
    x = np.zeros((6, 600), dtype)
    x[0] = -np.inf
    x[0, 511] = -6e4
    x[1, 77] = np.inf
    x[2, 300] = np.nan
    x[3, 599] = np.nan
    x[3, 0] = np.inf
    x[4, 450] = tiny  # a denormal is more than zero
    x[5] = -tiny
    x[5, 123] = 0
    assert to_numpy(ops.argmax(to(x))).tolist() == [511, 77, -1, -1, 450, 123]


def test_argmax_leaves_its_memory_ready_for_the_next_launch(to_kernels, rng):
    for n in (9001, 30, 20000, 9001):
        x = rng.standard_normal((2, n)).astype(np.float32)
        x[0, 5] = np.nan
        for _ in range(2):
            got = to_numpy(ops.argmax(to_kernels(x)))
            assert got.tolist() == [-1, int(x[1].argmax())]


def test_argmax_of_strided_input(to, rng):
    x = rng.standard_normal((7, 12)).astype(np.float32)
    for view in (lambda a: a.T, lambda a: a[:, 2:9], lambda a: a[::-1, ::-1]):
        np.testing.assert_array_equal(to_numpy(ops.argmax(view(to(x)))), view(x).argmax(-1))
    row = np.broadcast_to(x[0], (3, 12))
    np.testing.assert_array_equal(ops.argmax(row), [x[0].argmax()] * 3)


def test_argmax_counts_one_launch_and_its_bytes(to_kernels):
    x = to_kernels(np.ones((2, 9000), np.float16))
    with jit.record(dry=True) as record:
        ops.argmax(x)
    assert len(record.launches) == 1 and record.size_bytes == x.nbytes + 8
    assert record.launches[0].grid[0] > 2
    with jit.record() as record:
        assert ops.argmax(x[:0]).shape == (0,)
    assert not record.launches


def test_argmax_rejects_bad_arguments():
    with pytest.raises(ValueError, match="argmax: x has n = 0"):
        ops.argmax(np.ones((2, 0), np.float32))
    with pytest.raises(TypeError, match="argmax: x has dtype float64"):
        ops.argmax(np.ones((2, 4)))
    with pytest.raises(TypeError, match="argmax: out has dtype int64, wanted int32"):
        ops.argmax(np.ones((2, 4), np.float32), out=np.zeros(2, np.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [128256, 151936, 201088, 50257])
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_argmax_of_vocabularies(rng, vocab, rows):
    import cupy

    x = rng.standard_normal((rows, vocab), np.float32).astype(np.float16)
    np.testing.assert_array_equal(ops.argmax(cupy.asarray(x)).get(), reference.argmax(x))
    x[-1, vocab // 2] = np.nan
    assert ops.argmax(cupy.asarray(x)).get()[-1] == -1
