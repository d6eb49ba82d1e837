"""LayerNorm against float64, in every dtype and odd size."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import jit, ops, reference


def naive(x, weight, bias, eps):
    y = np.empty_like(x)
    for i, row in enumerate(x):
        mean = sum(row) / len(row)
        variance = sum((v - mean) ** 2 for v in row) / len(row)
        for j, v in enumerate(row):
            y[i, j] = (v - mean) / (variance + eps) ** 0.5 * weight[j] + bias[j]
    return y


def test_reference_layernorm_is_the_plain_formula(rng):
    x, weight, bias = (rng.standard_normal(s) for s in ((3, 7), 7, 7))
    got, total = reference.layernorm(x, weight, bias, eps=1e-3)
    np.testing.assert_allclose(got, naive(x, weight, bias, 1e-3), rtol=1e-12)
    assert total is x
    residual = rng.standard_normal((3, 7))
    got, total = reference.layernorm(x, residual=residual)
    np.testing.assert_allclose(got, naive(x + residual, np.ones(7), np.zeros(7), 1e-5), rtol=1e-10)
    np.testing.assert_array_equal(total, x + residual)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(3, 7), (2, 576), (2, 3, 769), (1, 3584), (1, 9000)])
def test_layernorm_matches_float64(to, rng, dtype, shape):
    x = rng.standard_normal(shape).astype(dtype)
    weight = rng.uniform(0.5, 1.5, shape[-1]).astype(dtype)
    bias = rng.standard_normal(shape[-1]).astype(dtype)
    wide = [a.astype(np.float64) for a in (x, weight, bias)]
    wanted, _ = reference.layernorm(*wide)
    out = poisoned(shape, dtype, to)
    got = ops.layernorm(to(x), to(weight), to(bias), out=out)
    assert got is out
    assert_close(got, wanted, dtype)
    wanted, _ = reference.layernorm(wide[0], None, wide[2])
    assert_close(ops.layernorm(to(x), None, to(bias)), wanted, dtype)


def test_layernorm_survives_a_large_mean(to, rng):
    x = (rng.standard_normal((2, 384)) + 3e4).astype(np.float32)
    wanted, _ = reference.layernorm(x.astype(np.float64), eps=1e-12)
    assert_close(ops.layernorm(to(x), eps=1e-12), wanted, np.float32)


def test_layernorm_in_place(to, rng):
    x = rng.standard_normal((3, 2500)).astype(np.float32)
    wanted, _ = reference.layernorm(x.astype(np.float64))
    moved = to(x.copy())
    assert ops.layernorm(moved, out=moved) is moved
    assert_close(moved, wanted, np.float32)


def test_layernorm_rows_do_not_depend_on_the_batch(to_kernels, rng):
    x = rng.standard_normal((5, 769)).astype(np.float32)
    whole = to_numpy(ops.layernorm(to_kernels(x)))
    for i in range(5):
        alone = to_numpy(ops.layernorm(to_kernels(x[i : i + 1])))
        assert alone.tobytes() == whole[i : i + 1].tobytes()


def test_layernorm_of_strided_input_is_that_of_a_copy(to, rng):
    x = rng.standard_normal((7, 12)).astype(np.float32)
    views = {
        "columns": lambda a: a[:, 2:9],
        "transposed": lambda a: a.T,
        "flipped": lambda a: a[::-1, ::-1],
    }
    for name, view in views.items():
        wanted = reference.layernorm(view(x))[0]
        assert_close(ops.layernorm(view(to(x))), wanted, np.float32), name


def test_layernorm_counts_one_launch_and_its_bytes(to_kernels):
    x = to_kernels(np.ones((4, 64), np.float16))
    weight = to_kernels(np.ones(64, np.float16))
    with jit.record(dry=True) as record:
        ops.layernorm(x, weight, weight)
    assert [launch.kernel for launch in record.launches] == ["layernorm"]
    assert record.size_bytes == 2 * (2 * 4 * 64 + 2 * 64)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8)])
def test_layernorm_of_nothing_launches_nothing(to, shape):
    with jit.record() as record:
        got = ops.layernorm(to(np.empty(shape, np.float32)))
    assert got.shape == shape and not record.launches


def test_layernorm_rejects_bad_arguments():
    x = np.ones((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"layernorm: bias is \[n\] = \[5\] but x has n = 4"):
        ops.layernorm(x, None, np.ones(5, np.float32))
    with pytest.raises(TypeError, match="layernorm: weight has dtype float16 and x has float32"):
        ops.layernorm(x, np.ones(4, np.float16))
    with pytest.raises(TypeError, match="layernorm: x has dtype float64"):
        ops.layernorm(x.astype(np.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1234, 4096, 14336, 40000])
def test_layernorm_of_many_rows(rng, n):
    import cupy

    x = rng.standard_normal((3000, n), np.float32).astype(np.float16)
    wanted, _ = reference.layernorm(x[::100].astype(np.float64))
    assert_close(ops.layernorm(cupy.asarray(x))[::100], wanted, np.float16)
