"""gated_linear against float64: SwiGLU, GeGLU, the clamped gate, few rows and many."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import jit, ops, reference, tiles
from cufuse.ops.rmsnorm import Norm

bfloat16 = ml_dtypes.bfloat16


def inputs(rng, m, n, k, dtype):
    x = rng.standard_normal((m, k)).astype(dtype)
    w = [(rng.standard_normal((n, k)) / math.sqrt(k)).astype(dtype) for _ in range(2)]
    return x, *w


def biases(rng, n, dtype):
    return [rng.standard_normal(n).astype(dtype) for _ in range(2)]


def double(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


def test_reference_matches_loops(rng):
    x, w_gate, w_up = inputs(rng, 2, 3, 5, np.float64)
    b_gate, b_up = biases(rng, 3, np.float64)
    plain = reference.gated_linear(x, w_gate, w_up, b_gate, b_up)
    clamped = reference.gated_linear(x, w_gate, w_up, b_gate, b_up, limit=0.5, alpha=1.7)
    for i in range(2):
        for j in range(3):
            gate = sum(x[i, t] * w_gate[j, t] for t in range(5)) + b_gate[j]
            up = sum(x[i, t] * w_up[j, t] for t in range(5)) + b_up[j]
            assert plain[i, j] == pytest.approx(gate / (1 + math.exp(-gate)) * up, rel=1e-12)
            gate, up = min(gate, 0.5), min(max(up, -0.5), 0.5)
            wanted = (up + 1) * gate / (1 + math.exp(-1.7 * gate))
            assert clamped[i, j] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("m, n, k", [(1, 19, 520), (3, 7, 57), (9, 20, 72), (21, 37, 67)])
def test_gated_linear_matches_float64(to, rng, dtype, m, n, k):
    arrays = [*inputs(rng, m, n, k, dtype), *biases(rng, n, dtype)]
    out = poisoned((m, n), dtype, to)
    got = ops.gated_linear(*map(to, arrays), out=out)
    assert got is out
    assert_close(got, reference.gated_linear(*double(*arrays)), dtype)


@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh"])
def test_gated_linear_activations(to, rng, activation):
    arrays = inputs(rng, 1, 9, 24, np.float32)
    got = ops.gated_linear(*map(to, arrays), activation=activation)
    wanted = reference.gated_linear(*double(*arrays), activation=activation)
    assert_close(got, wanted, np.float32)


@pytest.mark.parametrize("m", [2, 10])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16], ids=["fp32", "bf16"])
def test_clamped_gate(to, rng, m, dtype):
    x, w_gate, w_up = inputs(rng, m, 12, 40, dtype)
    x = (4 * x.astype(np.float32)).astype(dtype)
    arrays = [x, w_gate, w_up, *biases(rng, 12, dtype)]
    got = ops.gated_linear(*map(to, arrays), limit=3.0, alpha=1.5)
    wanted = reference.gated_linear(*double(*arrays), limit=3.0, alpha=1.5)
    assert_close(got, wanted, dtype)
    plain = reference.gated_linear(*double(*arrays))
    assert np.linalg.norm(wanted - plain) > 0.1 * np.linalg.norm(wanted)


def test_gated_linear_with_norm(to, rng):
    x, w_gate, w_up = inputs(rng, 2, 9, 136, bfloat16)
    weight = rng.uniform(0.5, 1.5, 136).astype(bfloat16)
    got = ops.gated_linear(to(x), to(w_gate), to(w_up), norm=Norm(to(weight), 1e-6, "one_plus"))
    rounded, _ = reference.rmsnorm(x, weight, eps=1e-6, rounding="one_plus")
    wanted = reference.gated_linear(*double(rounded, w_gate, w_up))
    assert_close(got, wanted, bfloat16, 1.5)


def test_bits_of_a_row_do_not_depend_on_other_rows(to_kernels, rng):
    x, w_gate, w_up = inputs(rng, tiles.MAX_ROWS, 9, 1160, bfloat16)
    w_gate, w_up = to_kernels(w_gate), to_kernels(w_up)
    alone = [to_numpy(ops.gated_linear(to_kernels(row[None]), w_gate, w_up))[0] for row in x]
    for m in (2, tiles.MAX_ROWS):
        together = to_numpy(ops.gated_linear(to_kernels(x[:m]), w_gate, w_up))
        np.testing.assert_array_equal(together, np.stack(alone[:m]))


@pytest.mark.parametrize("tile", [tiles._TENSOR_CORES[0], *tiles._FFMA], ids=str)
def test_every_tile_gives_the_same_bits(to_kernels, rng, tile, monkeypatch):
    dtype = np.float32 if tile in tiles._FFMA else bfloat16
    arrays = [to_kernels(a) for a in inputs(rng, 12, 24, 69, dtype)]
    wanted = to_numpy(ops.gated_linear(*arrays))
    monkeypatch.setattr(tiles, "choose", lambda *args, **options: tile)
    np.testing.assert_array_equal(to_numpy(ops.gated_linear(*arrays)), wanted)


def test_gate_and_up_stay_in_float32(to):
    # Gate and up pass fp16's 65504; what is stored does not.
    x = np.full((1, 64), 64.0, np.float16)
    w_gate = np.full((2, 64), 32.0, np.float16)  # gate 131072
    w_up = np.full((2, 64), 2.0**-20, np.float16)  # up 2^-8
    got = ops.gated_linear(to(x), to(w_gate), to(w_up))
    np.testing.assert_array_equal(to_numpy(got), np.full((1, 2), 512.0, np.float16))


def test_large_products_fit_bfloat16(to):
    x = np.full((1, 64), 8.0, bfloat16)
    w = np.full((2, 64), 1.0, bfloat16)
    got = to_numpy(ops.gated_linear(to(x), to(w), to(w))).astype(np.float32)
    np.testing.assert_array_equal(got, np.full((1, 2), 512.0 * 512.0))


@pytest.mark.parametrize("m", [1, 9])
def test_gated_linear_launches(to_kernels, rng, m):
    arrays = [to_kernels(a) for a in inputs(rng, m, 8, 32, bfloat16)]
    with jit.record(dry=True) as record:
        ops.gated_linear(*arrays)
    (launch,) = record.launches
    assert launch.size_bytes == sum(a.nbytes for a in arrays) + m * 8 * 2


def test_gated_linear_of_nothing_launches_nothing(to):
    w = to(np.ones((3, 8), np.float32))
    with jit.record(dry=True) as record:
        got = ops.gated_linear(to(np.ones((0, 8), np.float32)), w, w)
    assert got.shape == (0, 3)
    assert record.launches == []


@pytest.mark.parametrize("d", [1, 7, 1234, 3420])
def test_gate_and_up_may_be_halves_of_one_weight(to, rng, d):
    # The second half starts 16-byte aligned or not.
    x, gate, up = inputs(rng, 1, d, 9, bfloat16)
    both = to(np.concatenate([gate, up]))
    got = ops.gated_linear(to(x), both[:d], both[d:])
    assert_close(got, reference.gated_linear(*double(x, gate, up)), bfloat16)


def test_gated_linear_takes_any_strides(to, rng):
    both = rng.standard_normal((14, 40)).astype(np.float32)
    moved = to(both)
    x = to(rng.standard_normal((40, 2)).astype(np.float32)).T
    got = ops.gated_linear(x, moved[::2], moved[1::2])
    wanted = reference.gated_linear(*double(to_numpy(x), both[::2], both[1::2]))
    assert_close(got, wanted, np.float32)


@pytest.mark.parametrize(
    "change, error, text",
    [
        (
            {"w_up": np.ones((2, 4), np.float32)},
            ValueError,
            r"w_up is \[n k\] = \[2, 4\] but w_gate has n",
        ),
        (
            {"b_up": np.ones(4, np.float32)},
            ValueError,
            r"b_up is \[n\] = \[4\] but w_gate has n = 3",
        ),
        ({"w_gate": np.ones((3, 4), np.int32)}, TypeError, "w_gate has dtype int32"),
        ({"activation": "swiglu"}, ValueError, "activation is 'swiglu'"),
    ],
)
def test_gated_linear_says_what_is_wrong(change, error, text):
    given = {name: np.ones((3, 4), np.float32) for name in ("x", "w_gate", "w_up")} | change
    arrays = [given.pop(name) for name in ("x", "w_gate", "w_up")]
    with pytest.raises(error, match="gated_linear: .*" + text):
        ops.gated_linear(*arrays, **given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "m, n, k", [(1, 3420, 4096), (6, 14336, 1234), (65, 3420, 2880), (2000, 1234, 520)]
)
def test_large_gated_linear(rng, dtype, m, n, k):
    import cupy

    x, w_gate, w_up = inputs(rng, m, n, k, dtype)
    got = ops.gated_linear(cupy.asarray(x), cupy.asarray(w_gate), cupy.asarray(w_up))
    rows = np.unique(rng.integers(0, m, 16))
    wanted = reference.gated_linear(*double(x[rows], w_gate, w_up))
    assert_close(got[rows], wanted, dtype)
