"""Residual addition with RMSNorm or LayerNorm behind it, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import jit, ops, reference

SHAPES = [(1, 1), (3, 7), (2, 576), (1, 3, 769), (2, 3584), (1, 9000)]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("rounding", ["cast_first", "scale_first", "one_plus"])
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rmsnorm_matches_float64(to, rng, dtype, rounding, shape):
    x, residual = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    weight = rng.uniform(0.5, 1.5, shape[-1]).astype(dtype)
    total = (x.astype(np.float32) + residual.astype(np.float32)).astype(dtype)
    wanted, _ = reference.rmsnorm(
        total.astype(np.float64), weight.astype(np.float64), eps=1e-5, rounding=rounding
    )
    outs = [poisoned(shape, dtype, to) for _ in range(2)]
    got = ops.add_rmsnorm(
        to(x), to(residual), to(weight), rounding=rounding, out=outs[0], residual_out=outs[1]
    )
    assert got[0] is outs[0] and got[1] is outs[1]
    assert_close(got[0], wanted, dtype)
    assert to_numpy(got[1]).tobytes() == total.tobytes()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_add_layernorm_matches_float64(to, rng, dtype, shape):
    x, residual = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    weight, bias = (rng.uniform(0.5, 1.5, shape[-1]).astype(dtype) for _ in range(2))
    total = (x.astype(np.float32) + residual.astype(np.float32)).astype(dtype)
    wanted, _ = reference.layernorm(*(a.astype(np.float64) for a in (total, weight, bias)))
    got = ops.add_layernorm(to(x), to(residual), to(weight), to(bias))
    assert_close(got[0], wanted, dtype)
    assert to_numpy(got[1]).tobytes() == total.tobytes()


OPS = [ops.add_rmsnorm, ops.add_layernorm]
NAMES = ["add_rmsnorm", "add_layernorm"]


@pytest.mark.parametrize("op", OPS, ids=NAMES)
@pytest.mark.parametrize("n", [40, 2500])
@pytest.mark.parametrize("places", [("x", "residual"), ("residual", "x"), ("x", "new")])
def test_add_norms_in_place(to, rng, op, n, places):
    x, residual = (rng.standard_normal((3, n)).astype(np.float32) for _ in range(2))
    wanted = [to_numpy(a) for a in op(to(x), to(residual))]
    given = {"x": to(x.copy()), "residual": to(residual.copy()), "new": None}
    got = op(given["x"], given["residual"], out=given[places[0]], residual_out=given[places[1]])
    assert given[places[0]] is got[0]
    for array, want in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(to_numpy(array), want)


@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_add_norms_give_the_bits_of_the_two_steps(to_kernels, rng, op):
    x, residual = (rng.standard_normal((3, 576)).astype(np.float16) for _ in range(2))
    total = to_kernels((x.astype(np.float32) + residual.astype(np.float32)).astype(np.float16))
    alone = ops.rmsnorm(total) if op is ops.add_rmsnorm else ops.layernorm(total)
    assert (
        to_numpy(op(to_kernels(x), to_kernels(residual))[0]).tobytes() == to_numpy(alone).tobytes()
    )


@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_add_norms_of_strided_input(to, rng, op):
    x, residual = (rng.standard_normal((12, 7)).astype(np.float32) for _ in range(2))
    wanted = op(np.ascontiguousarray(x.T), np.ascontiguousarray(residual[::-1].T))
    got = op(to(x).T, to(residual)[::-1].T)
    for array, want in zip(got, wanted, strict=True):
        assert_close(array, want, np.float32)


@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_add_norms_launch_once_or_not_at_all(to_kernels, op):
    x = to_kernels(np.ones((4, 64), np.float16))
    with jit.record(dry=True) as record:
        op(x, to_kernels(np.ones((4, 64), np.float16)))
    assert len(record.launches) == 1 and record.size_bytes == 4 * x.nbytes
    with jit.record() as record:
        got = op(x[:0], x[:0])
    assert got[0].shape == got[1].shape == (0, 64) and not record.launches


@pytest.mark.parametrize(("op", "name"), list(zip(OPS, NAMES, strict=True)), ids=NAMES)
def test_add_norms_reject_bad_arguments(op, name):
    x, y = np.ones((2, 4), np.float32), np.ones((2, 4), np.float32)
    with pytest.raises(ValueError, match=f"{name}: residual is .* but x has n = 4"):
        op(x, np.ones((2, 5), np.float32))
    with pytest.raises(ValueError, match=f"{name}: residual is .* leading dimensions differ"):
        op(x, np.ones((3, 4), np.float32))
    with pytest.raises(TypeError, match=f"{name}: residual has dtype float16"):
        op(x, y.astype(np.float16))
    with pytest.raises(ValueError, match=f"{name}: residual_out shares memory with out"):
        op(x, y, out=x, residual_out=x)
    big = np.ones((3, 4), np.float32)
    with pytest.raises(ValueError, match=f"{name}: out shares memory with x"):
        op(big[:2], y, out=big[1:])
    with pytest.raises(TypeError, match=f"{name}: out has dtype float16, wanted float32"):
        op(x, y, out=np.ones((2, 4), np.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1234, 3420, 14336, 40000])
def test_add_norms_of_many_rows(rng, n):
    import cupy

    x, residual = (rng.standard_normal((2000, n), np.float32).astype(np.float16) for _ in range(2))
    some = slice(None, None, 97)
    total = (x[some].astype(np.float32) + residual[some].astype(np.float32)).astype(np.float16)
    wanted = reference.rmsnorm(total.astype(np.float64))[0]
    got = ops.add_rmsnorm(cupy.asarray(x), cupy.asarray(residual))
    assert_close(got[0][some], wanted, np.float16)
    wanted = reference.layernorm(total.astype(np.float64))[0]
    got = ops.add_layernorm(cupy.asarray(x), cupy.asarray(residual))
    assert_close(got[0][some], wanted, np.float16)
    assert to_numpy(got[1][some]).tobytes() == total.tobytes()
