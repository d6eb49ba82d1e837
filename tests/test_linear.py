"""linear against float64: few rows and many, every activation, norm, residual and odd size."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import device, jit, ops, reference, tiles
from cufuse.ops.rmsnorm import Norm
from cufuse.pack import pack

bfloat16 = ml_dtypes.bfloat16
ACTIVATIONS = ("none", "relu", "relu2", "gelu", "gelu_tanh", "silu", "quick_gelu")


def inputs(rng, m, n, k, dtype):
    x = rng.standard_normal((m, k)).astype(dtype)
    w = (rng.standard_normal((n, k)) / math.sqrt(max(k, 1))).astype(dtype)
    return x, w


def double(*arrays):
    return [None if a is None else np.asarray(a, np.float64) for a in arrays]


# ---- the reference


def test_reference_matches_loops(rng):
    x, w = inputs(rng, 2, 3, 5, np.float64)
    b, residual = rng.standard_normal(3), rng.standard_normal((2, 3))
    got = reference.linear(x, w, b, activation="gelu", residual=residual)
    for i in range(2):
        for j in range(3):
            v = sum(x[i, t] * w[j, t] for t in range(5)) + b[j]
            wanted = 0.5 * v * (1 + math.erf(v / math.sqrt(2))) + residual[i, j]
            assert got[i, j] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "kind, value, wanted",
    [
        ("none", -1.5, -1.5),
        ("relu", -1.5, 0.0),
        ("relu2", 1.5, 2.25),
        ("relu2", -1.5, 0.0),
        ("gelu", -1.0, -0.15865525393145707),
        ("gelu_tanh", -1.0, -0.15880800939172324),
        ("silu", -1.0, -1 / (1 + math.e)),
        ("quick_gelu", -1.0, -1 / (1 + math.exp(1.702))),
    ],
)
def test_reference_activation_values(kind, value, wanted):
    got = reference.activation(np.array([value]), kind)[0]
    assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12)


# ---- few rows


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("m, n, k", [(1, 33, 520), (3, 13, 130), (1, 1, 2)])
def test_linear_matches_float64(to, rng, dtype, m, n, k):
    x, w = inputs(rng, m, n, k, dtype)
    out = poisoned((m, n), dtype, to)
    got = ops.linear(to(x), to(w), out=out)
    assert got is out
    assert_close(got, reference.linear(*double(x, w)), dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_activations(to, rng, activation):
    x, w = inputs(rng, 1, 19, 72, np.float32)
    b = rng.standard_normal(19).astype(np.float32)
    got = ops.linear(to(x), to(w), to(b), activation=activation)
    wanted = reference.linear(*double(x, w, b), activation=activation)
    assert_close(got, wanted, np.float32)


def test_gelu_is_told_from_gelu_tanh(to):
    x = np.linspace(-4, 4, 64, dtype=np.float32)[None]
    w = np.eye(64, dtype=np.float32)
    for kind, other in (("gelu", "gelu_tanh"), ("gelu_tanh", "gelu")):
        got = to_numpy(ops.linear(to(x), to(w), activation=kind)).astype(np.float64)
        wanted = reference.activation(x.astype(np.float64), kind)
        wrong = reference.activation(x.astype(np.float64), other)
        assert abs(got - wanted).max() < 1e-6
        assert abs(got - wrong).max() > 3e-4


@pytest.mark.parametrize("rounding", ["cast_first", "scale_first", "one_plus"])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16], ids=["fp32", "bf16"])
def test_linear_with_norm_bias_residual(to, rng, rounding, dtype):
    k = 769 if dtype == np.float32 else 576
    x, w = inputs(rng, 2, 9, k, dtype)
    x = (4 * x.astype(np.float32)).astype(dtype)
    b = rng.standard_normal(9).astype(dtype)
    residual = rng.standard_normal((2, 9)).astype(dtype)
    weight = rng.uniform(0.5, 1.5, k).astype(dtype)
    got = ops.linear(
        to(x),
        to(w),
        to(b),
        activation="silu",
        residual=to(residual),
        norm=Norm(to(weight), 1e-5, rounding),
    )
    rounded, _ = reference.rmsnorm(x, weight, eps=1e-5, rounding=rounding)
    wanted = reference.linear(
        *double(rounded, w, b), activation="silu", residual=double(residual)[0]
    )
    # The norm's own rounding may fall on either side of a tie.
    assert_close(got, wanted, dtype, 1.5)


def test_norm_of_linear_is_the_norm_of_rmsnorm(to_kernels, rng):
    x, w = inputs(rng, 1, 8, 264, bfloat16)
    weight = to_kernels(rng.uniform(0.5, 1.5, 264).astype(bfloat16))
    x, w = to_kernels(x), to_kernels(w)
    fused = ops.linear(x, w, norm=Norm(weight, 1e-6, "cast_first"))
    apart = ops.linear(ops.rmsnorm(x, weight, eps=1e-6), w)
    np.testing.assert_array_equal(to_numpy(fused), to_numpy(apart))


def test_bits_of_a_row_do_not_depend_on_other_rows(to_kernels, rng):
    x, w = inputs(rng, tiles.MAX_ROWS, 11, 1160, bfloat16)
    w = to_kernels(w)
    weight = to_kernels(rng.uniform(0.5, 1.5, 1160).astype(bfloat16))
    norm = Norm(weight, 1e-5, "cast_first")
    alone = [to_numpy(ops.linear(to_kernels(row[None]), w, norm=norm))[0] for row in x]
    for m in (2, tiles.MAX_ROWS):
        together = to_numpy(ops.linear(to_kernels(x[:m]), w, norm=norm))
        np.testing.assert_array_equal(together, np.stack(alone[:m]))


def test_bits_do_not_depend_on_alignment(to_kernels, rng):
    x, w = inputs(rng, 2, 9, 1032, bfloat16)
    flat = to_kernels(np.concatenate([np.zeros(1, bfloat16), w.ravel()]))
    shifted = flat[1:].reshape(w.shape)
    got = ops.linear(to_kernels(x), shifted)
    wanted = ops.linear(to_kernels(x), to_kernels(w))
    np.testing.assert_array_equal(to_numpy(got), to_numpy(wanted))


# ---- many rows


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("m, n, k", [(9, 40, 72), (33, 21, 67)])
def test_linear_of_many_rows(to, rng, dtype, m, n, k):
    x, w = inputs(rng, m, n, k, dtype)
    b = rng.standard_normal(n).astype(dtype)
    residual = rng.standard_normal((m, n)).astype(dtype)
    out = poisoned((m, n), dtype, to)
    got = ops.linear(to(x), to(w), to(b), activation="gelu_tanh", residual=to(residual), out=out)
    wanted = reference.linear(
        *double(x, w, b), activation="gelu_tanh", residual=double(residual)[0]
    )
    assert_close(got, wanted, dtype)


@pytest.mark.parametrize("tile", [*tiles._TENSOR_CORES, *tiles._FFMA], ids=str)
def test_every_tile_gives_the_same_bits(to_kernels, rng, tile, monkeypatch):
    dtype = np.float32 if tile in tiles._FFMA else bfloat16
    x, w = (to_kernels(a) for a in inputs(rng, 18, 40, 133, dtype))
    wanted = to_numpy(ops.linear(x, w))
    monkeypatch.setattr(tiles, "choose", lambda *args, **options: tile)
    got = ops.linear(x, w)
    np.testing.assert_array_equal(to_numpy(got), wanted)
    assert_close(got, reference.linear(*double(to_numpy(x), to_numpy(w))), dtype)


def test_norm_of_many_rows_is_a_launch_before(to_kernels, rng):
    x, w = inputs(rng, 12, 16, 64, np.float32)
    weight = rng.uniform(0.5, 1.5, 64).astype(np.float32)
    with jit.record() as record:
        got = ops.linear(to_kernels(x), to_kernels(w), norm=Norm(to_kernels(weight), 1e-6))
    assert [launch.kernel for launch in record.launches] == ["rmsnorm", "linear_tiles"]
    wanted = reference.linear(*double(x, w), norm=(weight.astype(np.float64), 1e-6, "cast_first"))
    assert_close(got, wanted, np.float32)


def test_few_rows_are_one_launch(to_kernels, rng):
    x, w = (to_kernels(a) for a in inputs(rng, 2, 9, 1032, bfloat16))
    weight = to_kernels(np.ones(1032, bfloat16))
    with jit.record(dry=True) as record:
        ops.linear(x, w, activation="gelu", norm=Norm(weight))
    (launch,) = record.launches
    assert launch.kernel == "linear_rows"
    assert launch.size_bytes == x.nbytes + w.nbytes + weight.nbytes + 2 * 9 * 2


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("m, n, k", [(2, 21, 2100), (20, 40, 200)], ids=["rows", "tiles"])
def test_no_interleaving_of_threads_changes_a_bit(rng, m, n, k):
    x, w = (device.twin(a) for a in inputs(rng, m, n, k, bfloat16))
    weight = device.twin(rng.uniform(0.5, 1.5, k).astype(bfloat16))
    results = []
    for seed in range(4):
        with jit.twin_seed(seed):
            results.append(np.asarray(ops.linear(x, w, norm=Norm(weight))))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


# ---- the contract of an op


def test_linear_adds_in_place(to, rng):
    x, w = inputs(rng, 2, 7, 40, np.float32)
    residual = rng.standard_normal((2, 7)).astype(np.float32)
    out = to(residual.copy())
    assert ops.linear(to(x), to(w), residual=out, out=out) is out
    assert_close(out, reference.linear(*double(x, w), residual=double(residual)[0]), np.float32)


def test_linear_flattens_leading_dimensions(to, rng):
    x, w = inputs(rng, 6, 7, 40, np.float32)
    got = ops.linear(to(x.reshape(2, 3, 40)), to(w))
    assert got.shape == (2, 3, 7)
    assert_close(got.reshape(6, 7), reference.linear(*double(x, w)), np.float32)


@pytest.mark.parametrize("how", ["columns", "transposed", "flipped", "broadcast"])
def test_linear_takes_any_strides(to, rng, how):
    k, n = 24, 10
    wide = rng.standard_normal((4, 2 * k)).astype(np.float32)
    w = rng.standard_normal((n, k)).astype(np.float32)
    moved = to(wide)
    if how == "columns":
        x, same = moved[:, 3 : 3 + k], wide[:, 3 : 3 + k]
    elif how == "transposed":
        tall = rng.standard_normal((k, 4)).astype(np.float32)
        x, same = to(tall).T, tall.T
    elif how == "flipped":
        x, same = moved[::-1, k - 1 :: -1], wide[::-1, k - 1 :: -1]
    else:
        module = np if isinstance(moved, np.ndarray) else __import__("cupy")
        x = module.broadcast_to(moved[:1, :k], (4, k))
        x = x.view(type(moved)) if module is np else x
        same = np.broadcast_to(wide[:1, :k], (4, k))
    for weight, same_weight in ((to(w), w), (to(np.ascontiguousarray(w.T)).T, w)):
        got = ops.linear(x, weight)
        assert_close(got, reference.linear(*double(same, same_weight)), np.float32)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_linear_of_nothing_launches_nothing(to, shape):
    with jit.record(dry=True) as record:
        got = ops.linear(to(np.ones(shape, np.float32)), to(np.ones((3, 8), np.float32)))
    assert got.shape == (*shape[:-1], 3)
    assert record.launches == []


def test_linear_without_k_is_the_bias(to):
    x, w = to(np.ones((2, 0), np.float32)), to(np.ones((3, 0), np.float32))
    got = ops.linear(x, w, to(np.arange(3, dtype=np.float32)))
    np.testing.assert_array_equal(to_numpy(got), [[0, 1, 2]] * 2)


def test_linear_sums_half_in_float32(to):
    # The sum passes fp16's 65504 on the way and comes back before it is rounded.
    x = np.concatenate([np.full(64, 200.0), np.full(64, -200.0)]).astype(np.float16)[None]
    w = np.full((3, 128), 100.0, np.float16)
    got = ops.linear(to(x), to(w), to(np.array([1, 2, 3], np.float16)))
    np.testing.assert_array_equal(to_numpy(got), [[1, 2, 3]])


def test_linear_masks_nothing_with_zero(to_kernels):
    # What lies past the end of a row in shared memory or in the next weight row stays out.
    x = np.ones((1, 40), np.float32)
    w = np.zeros((3, 40), np.float32)
    w[1] = np.nan
    w[2] = np.inf
    got = to_numpy(ops.linear(to_kernels(x), to_kernels(w)))[0]
    assert got[0] == 0 and np.isnan(got[1]) and np.isinf(got[2])


@pytest.mark.parametrize(
    "change, error, text",
    [
        (
            {"w": np.ones((3, 5), np.float32)},
            ValueError,
            r"linear: w is \[n k\] = \[3, 5\] but x has k = 4",
        ),
        ({"b": np.ones(2, np.float32)}, ValueError, r"linear: b is \[n\] = \[2\] but w has n = 3"),
        ({"x": np.ones((2, 4), np.float64)}, TypeError, "linear: x has dtype float64"),
        (
            {"w": np.ones((3, 4), np.float16)},
            TypeError,
            "linear: w has dtype float16 and x has float32",
        ),
        ({"residual": np.ones((1, 3), np.float32)}, ValueError, "linear: residual is"),
        ({"activation": "swish"}, ValueError, "linear: activation is 'swish', wanted one of none"),
        ({"norm": Norm(np.ones(4, np.float32), 1e-5, "up")}, ValueError, "norm.rounding is 'up'"),
        (
            {"out": np.ones((2, 4), np.float32)},
            ValueError,
            r"linear: out is \[2, 4\], wanted \[2, 3\]",
        ),
    ],
)
def test_linear_says_what_is_wrong(change, error, text):
    given = {"x": np.ones((2, 4), np.float32), "w": np.ones((3, 4), np.float32), **change}
    with pytest.raises(error, match=text):
        ops.linear(given.pop("x"), given.pop("w"), **given)


def test_linear_refuses_two_libraries(to_kernels):
    x, w = np.ones((2, 4), np.float32), to_kernels(np.ones((3, 4), np.float32))
    with pytest.raises(
        TypeError, match=r"linear: w is a (twin|cupy) array and the others are numpy"
    ):
        ops.linear(x, w)


def test_linear_refuses_out_over_x(to):
    x = to(np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match="linear: out shares memory with x"):
        ops.linear(x, to(np.ones((3, 3), np.float32)), out=x)


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("m", [1, 3, 20])
def test_bits_do_not_depend_on_the_number_of_sms(rng, m, monkeypatch):
    arrays = [device.twin(array) for array in inputs(rng, m, 37, 72, bfloat16)]
    results = set()
    for sm_count in (1, 2, 3, 78):
        monkeypatch.setattr(tiles, "TWIN", dataclasses.replace(tiles.TWIN, sm_count=sm_count))
        results.add(ops.linear(*arrays).tobytes())
    assert len(results) == 1


# ---- large shapes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "m, n, k",
    [
        (1, 4096, 14336),
        (8, 3420, 4096),
        (5, 1234, 3420),
        (16, 4096, 2880),
        (300, 1234, 3420),
        (4096, 520, 1024),
    ],
)
def test_large_linear(rng, dtype, m, n, k):
    import cupy

    x, w = inputs(rng, m, n, k, dtype)
    weight = rng.uniform(0.5, 1.5, k).astype(dtype)
    norm = Norm(cupy.asarray(weight), 1e-5, "scale_first")
    got = ops.linear(cupy.asarray(x), cupy.asarray(w), activation="gelu", norm=norm)
    rows = np.unique(rng.integers(0, m, 16))
    x, _ = reference.rmsnorm(x[rows], weight, eps=1e-5, rounding="scale_first")
    assert_close(got[rows], reference.linear(*double(x, w), activation="gelu"), dtype)


# ---- what the activation is applied to


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("m, n, k", [(1, 33, 520), (3, 13, 130), (9, 40, 72), (70, 131, 67)])
def test_pre_matches_float64_and_changes_no_bit(to, rng, dtype, m, n, k, packed):
    x, w = inputs(rng, m, n, k, dtype)
    b, residual = rng.standard_normal(n).astype(dtype), rng.standard_normal((m, n)).astype(dtype)
    arguments = to(x), pack(to(w)) if packed else to(w), to(b)
    options = {"activation": "gelu", "residual": to(residual)}
    pre, out = poisoned((m, n), dtype, to), poisoned((m, n), dtype, to)
    with jit.record() as made:
        got = ops.linear(*arguments, **options, pre=pre, out=out)
    assert got is out and len(made.launches) <= 1
    assert_close(pre, reference.linear(*double(x, w, b)), dtype)
    without = to_numpy(ops.linear(*arguments, **options))
    np.testing.assert_array_equal(to_numpy(got), without)


def test_pre_is_behind_the_norm_and_before_the_residual(to, rng):
    x, w = inputs(rng, 2, 9, 264, bfloat16)
    weight, residual = rng.uniform(0.5, 1.5, 264), rng.standard_normal((2, 9))
    weight, residual = weight.astype(bfloat16), residual.astype(bfloat16)
    pre, y = poisoned((2, 9), bfloat16, to), to(residual.copy())
    norm = Norm(to(weight), 1e-5, "cast_first")
    ops.linear(to(x), to(w), activation="silu", residual=y, norm=norm, pre=pre, out=y)
    rounded, _ = reference.rmsnorm(x, weight, eps=1e-5, rounding="cast_first")
    assert_close(pre, reference.linear(*double(rounded, w)), bfloat16, 1.5)
    wanted = reference.linear(*double(rounded, w), activation="silu", residual=double(residual)[0])
    assert_close(y, wanted, bfloat16, 1.5)


def test_pre_of_no_activation_is_the_output(to, rng):
    x, w = inputs(rng, 5, 21, 40, np.float16)
    pre = poisoned((5, 21), np.float16, to)
    y = ops.linear(to(x), to(w), pre=pre)
    np.testing.assert_array_equal(to_numpy(pre), to_numpy(y))


def test_pre_is_checked_as_an_output(to, rng):
    x, w = (to(a) for a in inputs(rng, 4, 16, 16, np.float32))
    room = to(np.zeros((8, 16), np.float32))
    for pre, out, match in [
        (x, None, "pre shares memory with x"),
        (w[:4], None, "pre shares memory with w"),
        (room[:4], room[2:6], "pre shares memory with out; give it memory of its own"),
        (room[:4], room[:4], "pre shares memory with out"),
        (room, None, r"pre is \[8, 16\], wanted \[4, 16\]"),
    ]:
        with pytest.raises(ValueError, match=match):
            ops.linear(x, w, pre=pre, out=out)
    with pytest.raises(ValueError, match="pre shares memory with residual"):
        ops.linear(x, w, residual=room[:4], pre=room[:4])
    with pytest.raises(TypeError, match="pre has dtype float16, wanted float32"):
        ops.linear(x, w, pre=to(np.zeros((4, 16), np.float16)))
    empty = ops.linear(x[:0], w, pre=room[:0])
    assert empty.shape == (0, 16)
