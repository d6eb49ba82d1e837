"""add, mul, activation and glu against float64."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import jit, ops, reference

bfloat16 = ml_dtypes.bfloat16
ACTIVATIONS = ("none", "relu", "relu2", "gelu", "gelu_tanh", "silu", "quick_gelu")
PAIRS = {"add": (ops.add, reference.add), "mul": (ops.mul, reference.mul)}


def double(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


def test_reference_matches_loops(rng):
    gate, up = rng.standard_normal((2, 5)) * 4
    plain = reference.glu(gate, up, activation="gelu_tanh")
    clamped = reference.glu(gate, up, limit=2.0, alpha=1.7)
    for g, u, p, c in zip(gate, up, plain, clamped, strict=True):
        inner = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
        assert p == pytest.approx(0.5 * g * (1 + math.tanh(inner)) * u, rel=1e-12)
        g, u = min(g, 2.0), min(max(u, -2.0), 2.0)
        assert c == pytest.approx((u + 1) * g / (1 + math.exp(-1.7 * g)), rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 3, 64), (1, 9000)])
def test_pairs_match_float64(to, rng, name, dtype, shape):
    op, specification = PAIRS[name]
    x, y = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    out = poisoned(shape, dtype, to)
    got = op(to(x), to(y), out=out)
    assert got is out
    assert_close(got, specification(*double(x, y)), dtype)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("shape", [(3, 7), (5, 2, 64), (1, 33)])
def test_pairs_with_one_row(to, rng, name, shape):
    op, specification = PAIRS[name]
    x = rng.standard_normal(shape).astype(bfloat16)
    row = rng.standard_normal(shape[-1]).astype(bfloat16)
    got = op(to(x), to(row))
    assert_close(got, specification(*double(x, row)), bfloat16)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_work_in_place(to, rng, name):
    op, specification = PAIRS[name]
    x, y = (rng.standard_normal((2, 9)).astype(np.float32) for _ in range(2))
    for which in range(2):
        pair = [to(x.copy()), to(y.copy())]
        assert op(*pair, out=pair[which]) is pair[which]
        assert_close(pair[which], specification(*double(x, y)), np.float32)


def test_unaligned_arrays(to, rng):
    x, y = (rng.standard_normal(100).astype(bfloat16) for _ in range(2))
    got = ops.add(to(x)[1:], to(y)[:-1])
    assert_close(got, reference.add(*double(x[1:], y[:-1])), bfloat16)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_match_float64(to, rng, kind):
    x = (4 * rng.standard_normal((3, 41))).astype(np.float32)
    out = poisoned(x.shape, np.float32, to)
    got = ops.activation(to(x), kind, out=out)
    assert got is out
    assert_close(got, reference.activation(*double(x), kind), np.float32)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_activation_dtypes(to, rng, dtype):
    x = rng.standard_normal((2, 72)).astype(dtype)
    got = to(x.copy())
    assert ops.activation(got, "silu", out=got) is got
    assert_close(got, reference.activation(*double(x), "silu"), dtype)


def test_gelu_is_told_from_gelu_tanh(to):
    x = np.linspace(-4, 4, 200, dtype=np.float32)
    for kind, other in (("gelu", "gelu_tanh"), ("gelu_tanh", "gelu")):
        got = to_numpy(ops.activation(to(x), kind)).astype(np.float64)
        assert abs(got - reference.activation(x.astype(np.float64), kind)).max() < 1e-6
        assert abs(got - reference.activation(x.astype(np.float64), other)).max() > 3e-4


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_at_the_ends(to, kind):
    x = np.array([-3e4, -100.0, -0.0, 0.0, 100.0, 3e4, np.nan], np.float32)
    got = to_numpy(ops.activation(to(x), kind))
    wanted = reference.activation(x.astype(np.float64), kind)
    assert np.isnan(got[-1])
    np.testing.assert_allclose(got[:-1], wanted[:-1], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("options", [{}, {"limit": 1.0, "alpha": 1.5}], ids=["plain", "clamped"])
def test_glu_matches_float64(to, rng, dtype, options):
    gate, up = (rng.standard_normal((3, 24)).astype(dtype) for _ in range(2))
    got = to(gate.copy())
    assert ops.glu(got, to(up), **options, out=got) is got
    assert_close(got, reference.glu(*double(gate, up), **options), dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_glu_beyond_float16_is_infinite_and_fits_bfloat16(to):
    # 1e5 is no float16; what comes next must be bfloat16 or float32, and nothing turns into NaN.
    for dtype, wanted in ((np.float16, np.inf), (bfloat16, 99840.0), (np.float32, 1e5)):
        gate, up = np.full(3, 1e3, dtype), np.full(3, 1e2, dtype)
        got = to_numpy(ops.glu(to(gate), to(up))).astype(np.float32)
        np.testing.assert_array_equal(got, np.full(3, wanted, np.float32))


@pytest.mark.parametrize("how", ["columns", "transposed", "flipped", "broadcast"])
def test_any_strides(to, rng, how):
    array = rng.standard_normal((6, 8)).astype(np.float32)
    moved = to(array)
    if how == "broadcast":
        module = np if isinstance(moved, np.ndarray) else __import__("cupy")
        view, same = module.broadcast_to(moved[:1], (6, 8)), np.broadcast_to(array[:1], (6, 8))
        view = view.view(type(moved)) if module is np else view
    else:
        pick = {
            "columns": lambda a: a[:, 1:5],
            "transposed": lambda a: a.T,
            "flipped": lambda a: a[::-1, ::-1],
        }[how]
        view, same = pick(moved), pick(array)
    assert_close(ops.add(view, view), reference.add(*double(same, same)), np.float32)
    assert_close(
        ops.activation(view, "silu"), reference.activation(*double(same), "silu"), np.float32
    )
    assert_close(ops.glu(view, view), reference.glu(*double(same, same)), np.float32)


@pytest.mark.parametrize("d", [1, 7, 1234, 3420])
def test_gate_and_up_may_be_halves_of_one_array(to, rng, d):
    both = rng.standard_normal((3, 2 * d)).astype(bfloat16)
    moved = to(both)
    got = ops.glu(moved[:, :d], moved[:, d:])
    assert_close(got, reference.glu(*double(both[:, :d], both[:, d:])), bfloat16)
    halves = both.reshape(2, -1)  # contiguous; the second starts where the first's bytes end
    got = ops.glu(*moved.reshape(2, -1))
    assert_close(got, reference.glu(*double(*halves)), bfloat16)


def test_nothing_launches_nothing(to):
    x = to(np.ones((0, 4), np.float32))
    with jit.record(dry=True) as record:
        for got in (ops.add(x, x), ops.mul(x, x), ops.activation(x, "gelu"), ops.glu(x, x)):
            assert got.shape == (0, 4)
    assert record.launches == []


def test_one_launch_each_with_its_bytes(to_kernels):
    x = to_kernels(np.ones((3, 8), np.float32))
    row = to_kernels(np.ones(8, np.float32))
    with jit.record(dry=True) as record:
        ops.add(x, x)
        ops.mul(x, row)
        ops.activation(x, "relu", out=x)
        ops.glu(x, x)
    assert [launch.kernel for launch in record.launches] == ["add", "mul", "activation", "glu"]
    assert [launch.size_bytes // 4 for launch in record.launches] == [72, 56, 48, 72]


def test_what_is_wrong_is_said(to_kernels):
    x, y = np.ones((2, 4), np.float32), np.ones((2, 5), np.float32)
    with pytest.raises(ValueError, match=r"add: y is \[\.\.\. n\] = \[2, 5\] but x has n = 4"):
        ops.add(x, y)
    with pytest.raises(TypeError, match="mul: y has dtype float16 and x has float32"):
        ops.mul(x, x.astype(np.float16))
    with pytest.raises(TypeError, match="activation: x has dtype float64"):
        ops.activation(x.astype(np.float64), "relu")
    with pytest.raises(ValueError, match="activation: kind is 'tanh'"):
        ops.activation(x, "tanh")
    with pytest.raises(TypeError, match="glu: up is a (twin|cupy) array"):  # noqa: RUF043
        ops.glu(x, to_kernels(x))
    with pytest.raises(ValueError, match="add: out shares memory with x"):
        memory = np.ones(12, np.float32)
        ops.add(memory[:8], memory[:8], out=memory[4:])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3000, 1234), (1, 14336), (70000, 8)])
def test_large_elementwise(rng, shape):
    import cupy

    x, y = (rng.standard_normal(shape).astype(bfloat16) for _ in range(2))
    row = y[0]
    gx, gy, grow = map(cupy.asarray, (x, y, row))
    assert_close(ops.add(gx, gy), reference.add(*double(x, y)), bfloat16)
    assert_close(ops.mul(gx, grow), reference.mul(*double(x, row)), bfloat16)
    assert_close(ops.glu(gx, gy), reference.glu(*double(x, y)), bfloat16)
