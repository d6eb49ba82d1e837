"""Products with packed weights: linear, gated_linear and matmul against float64, bit by bit."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import device, jit, ops, reference, tiles
from cufuse.ops.rmsnorm import Norm
from cufuse.pack import Packed, pack

bfloat16 = ml_dtypes.bfloat16
SIZES = [
    (1, 33, 520),
    (3, 13, 130),
    (1, 1, 2),
    (8, 40, 1),
    (9, 40, 72),
    (33, 21, 67),
    (18, 130, 33),
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
each_size = pytest.mark.parametrize("m, n, k", SIZES)


def inputs(rng, m, n, k, dtype, count=1):
    x = rng.standard_normal((m, k)).astype(dtype)
    w = [(rng.standard_normal((n, k)) / math.sqrt(k)).astype(dtype) for _ in range(count)]
    return x, *w


def double(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


def vector(rng, n, dtype):
    return rng.standard_normal(n).astype(dtype)


# ---- against float64


@each_size
@each_dtype
def test_linear_matches_float64(to, rng, dtype, m, n, k):
    x, w = inputs(rng, m, n, k, dtype)
    b, residual = vector(rng, n, dtype), rng.standard_normal((m, n)).astype(dtype)
    out = poisoned((m, n), dtype, to)
    got = ops.linear(
        to(x), pack(to(w)), to(b), activation="gelu_tanh", residual=to(residual), out=out
    )
    assert got is out
    wanted = reference.linear(
        *double(x, w, b), activation="gelu_tanh", residual=double(residual)[0]
    )
    assert_close(got, wanted, dtype)


@each_size
@each_dtype
def test_gated_linear_matches_float64(to, rng, dtype, m, n, k):
    x, gate, up = inputs(rng, m, n, k, dtype, 2)
    biases = [vector(rng, n, dtype) for _ in range(2)]
    out = poisoned((m, n), dtype, to)
    got = ops.gated_linear(to(x), pack(to(gate), up=to(up)), None, *map(to, biases), out=out)
    assert got is out
    assert_close(got, reference.gated_linear(*double(x, gate, up, *biases)), dtype)


@each_size
@each_dtype
def test_matmul_matches_float64(to, rng, dtype, m, n, k):
    x, gate, up = inputs(rng, m, n, k, dtype, 2)
    outs = tuple(poisoned((m, n), dtype, to) for _ in range(2))
    got = ops.matmul(to(x), pack(to(gate), up=to(up)), out=outs)
    assert got[0] is outs[0] and got[1] is outs[1]
    for mine, w in zip(got, (gate, up), strict=True):
        assert_close(mine, reference.matmul(*double(x, w)), dtype)
    out = poisoned((m, n), dtype, to)
    assert ops.matmul(to(x), pack(to(up)), out=out) is out
    assert_close(out, reference.matmul(*double(x, up)), dtype)


@pytest.mark.parametrize("rounding", ["cast_first", "scale_first", "one_plus"])
@pytest.mark.parametrize("m, dtype", [(2, np.float32), (5, bfloat16), (11, np.float16)], ids=str)
def test_with_a_norm(to, rng, rounding, m, dtype):
    k = 769 if dtype == np.float32 else 1350
    x, w, up = inputs(rng, m, 9, k, dtype, 2)
    x = (4 * x.astype(np.float32)).astype(dtype)
    weight = rng.uniform(0.5, 1.5, k).astype(dtype)
    norm = Norm(to(weight), 1e-5, rounding)
    rounded, _ = reference.rmsnorm(x, weight, eps=1e-5, rounding=rounding)
    # The norm's own rounding may fall on either side of a tie.
    got = ops.linear(to(x), pack(to(w)), norm=norm)
    assert_close(got, reference.linear(*double(rounded, w)), dtype, 1.5)
    got = ops.gated_linear(to(x), pack(to(w), up=to(up)), norm=norm)
    assert_close(got, reference.gated_linear(*double(rounded, w, up)), dtype, 1.5)


@pytest.mark.parametrize("m", [2, 10])
def test_clamped_gate(to, rng, m):
    x, gate, up = inputs(rng, m, 12, 40, np.float32, 2)
    x *= 4
    got = ops.gated_linear(to(x), pack(to(gate), up=to(up)), limit=3.0, alpha=1.5)
    wanted = reference.gated_linear(*double(x, gate, up), limit=3.0, alpha=1.5)
    assert_close(got, wanted, np.float32)


@pytest.mark.parametrize("m", [1, 20])
def test_a_view_of_rows_is_a_weight(to, rng, m):
    x, w = inputs(rng, m, 75, 40, bfloat16)
    whole = pack(to(w))
    for begin, end in ((0, 32), (16, 48), (64, 75), (32, 33)):
        got = ops.matmul(to(x), whole.rows(begin, end))
        assert_close(got, reference.matmul(*double(x, w[begin:end])), bfloat16)


# ---- bits


@each_dtype
def test_bits_of_a_row_do_not_depend_on_other_rows(to_kernels, rng, dtype):
    x, gate, up = inputs(rng, tiles.MAX_ROWS, 11, 1160, dtype, 2)
    both = pack(to_kernels(gate), up=to_kernels(up))
    norm = Norm(to_kernels(rng.uniform(0.5, 1.5, 1160).astype(dtype)), 1e-5, "cast_first")
    alone = [to_numpy(ops.gated_linear(to_kernels(r[None]), both, norm=norm))[0] for r in x]
    for m in (2, 3, tiles.MAX_ROWS):
        together = to_numpy(ops.gated_linear(to_kernels(x[:m]), both, norm=norm))
        np.testing.assert_array_equal(together, np.stack(alone[:m]))


@each_dtype
def test_bits_of_many_rows_do_not_depend_on_their_number(to_kernels, rng, dtype):
    x, w = inputs(rng, 70, 35, 133, dtype)
    packed = pack(to_kernels(w))
    wanted = to_numpy(ops.linear(to_kernels(x), packed))
    for m in (9, 17, 33):
        got = to_numpy(ops.linear(to_kernels(x[-m:].copy()), packed))
        np.testing.assert_array_equal(got, wanted[-m:])


@pytest.mark.parametrize("tile", [*tiles._PACKED_WARPS, *tiles._PACKED_FFMA], ids=str)
def test_every_tile_gives_the_same_bits(to_kernels, rng, tile, monkeypatch):
    dtype = np.float32 if tile in tiles._PACKED_FFMA else bfloat16
    arrays = inputs(rng, 18, 40, 133, dtype, 2)
    x, w, up = map(to_kernels, arrays)
    plain, both = pack(w), pack(w, up=up)
    wanted = [to_numpy(y) for y in (ops.linear(x, plain), ops.gated_linear(x, both))]
    monkeypatch.setattr(tiles, "choose_packed", lambda *args, **options: tile)
    got = [to_numpy(y) for y in (ops.linear(x, plain), ops.gated_linear(x, both))]
    for mine, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert_close(got[0], reference.linear(*double(*arrays[:2])), dtype)
    assert_close(got[1], reference.gated_linear(*double(*arrays)), dtype)


@pytest.mark.parametrize("m", [2, 12])
def test_bits_do_not_depend_on_the_alignment_of_x(to_kernels, rng, m):
    x, w = inputs(rng, m, 9, 1032, bfloat16)
    packed = pack(to_kernels(w))
    flat = to_kernels(np.concatenate([np.zeros(1, bfloat16), x.ravel()]))
    got = ops.matmul(flat[1:].reshape(x.shape), packed)
    np.testing.assert_array_equal(to_numpy(got), to_numpy(ops.matmul(to_kernels(x), packed)))


def test_many_rows_of_float32_have_the_bits_of_rows(to_kernels, rng):
    x, w = map(to_kernels, inputs(rng, 19, 37, 83, np.float32))
    np.testing.assert_array_equal(to_numpy(ops.linear(x, pack(w))), to_numpy(ops.linear(x, w)))


@pytest.mark.parametrize("m", [1, 10])
@each_dtype
def test_matmul_is_linear_without_the_rest(to_kernels, rng, m, dtype):
    x, w, up = map(to_kernels, inputs(rng, m, 21, 261, dtype, 2))
    plain = to_numpy(ops.matmul(x, pack(w)))
    np.testing.assert_array_equal(plain, to_numpy(ops.linear(x, pack(w))))
    gate, _ = ops.matmul(x, pack(w, up=up))
    np.testing.assert_array_equal(to_numpy(gate), plain)


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("m", [1, 3, 20])
def test_bits_do_not_depend_on_the_number_of_sms(rng, m, monkeypatch):
    x, w = map(device.twin, inputs(rng, m, 77, 72, bfloat16))
    packed = pack(w)
    results = set()
    for sm_count in (1, 2, 3, 78):
        monkeypatch.setattr(tiles, "TWIN", dataclasses.replace(tiles.TWIN, sm_count=sm_count))
        results.add(ops.linear(x, packed).tobytes())
    assert len(results) == 1


@pytest.mark.cpu_kernels
@each_dtype
@pytest.mark.parametrize("m, n, k", [(2, 70, 2100), (20, 40, 200)], ids=["rows", "tiles"])
def test_no_interleaving_of_threads_changes_a_bit(rng, m, n, k, dtype):
    x, w = map(device.twin, inputs(rng, m, n, k, dtype))
    packed = pack(w)
    weight = device.twin(rng.uniform(0.5, 1.5, k).astype(dtype))
    results = set()
    for seed in range(4):
        with jit.twin_seed(seed):
            results.add(ops.linear(x, packed, norm=Norm(weight)).tobytes())
    assert len(results) == 1


def test_padding_stays_out(to_kernels, rng):
    # A weight that is not finite reaches its own column and no other.
    for m in (1, 9):
        w = np.zeros((19, 41), np.float32)
        w[3, 40], w[18, 0] = np.nan, np.inf
        got = to_numpy(ops.linear(to_kernels(np.ones((m, 41), np.float32)), pack(to_kernels(w))))
        assert np.isnan(got[:, 3]).all() and np.isinf(got[:, 18]).all()
        assert (np.delete(got, [3, 18], axis=1) == 0).all()


def test_sums_of_half_stay_in_float32(to):
    # The sum passes fp16's 65504 on the way and comes back before it is rounded.
    row = np.concatenate([np.full(64, 200.0), np.full(64, -200.0)]).astype(np.float16)
    w = pack(to(np.full((3, 128), 100.0, np.float16)))
    for m in (1, 9):
        got = ops.linear(to(np.tile(row, (m, 1))), w, to(np.array([1, 2, 3], np.float16)))
        np.testing.assert_array_equal(to_numpy(got), [[1, 2, 3]] * m)


# ---- launches


@pytest.mark.parametrize("m, kernel", [(2, "packed_linear_rows"), (9, "packed_linear_tiles")])
def test_a_product_is_one_launch_of_its_bytes(to_kernels, rng, m, kernel):
    x, w = map(to_kernels, inputs(rng, m, 9, 1033, bfloat16))
    packed = pack(w)
    with jit.record(dry=True) as record:
        ops.linear(x, packed, activation="gelu")
    (launch,) = record.launches
    assert launch.kernel == kernel
    assert launch.size_bytes == x.nbytes + packed.size_bytes + m * 9 * 2


@pytest.mark.parametrize("m, wanted", [(8, ["rows"]), (9, ["rmsnorm", "tiles"])])
def test_norm_of_many_rows_is_a_launch_before(to_kernels, rng, m, wanted):
    x, gate, up = map(to_kernels, inputs(rng, m, 16, 65, np.float16, 2))
    both = pack(gate, up=up)
    with jit.record(dry=True) as record:
        ops.gated_linear(x, both, norm=Norm(to_kernels(np.ones(65, np.float16))))
    assert [launch.kernel.rpartition("_")[2] for launch in record.launches] == wanted


def test_gate_and_up_are_one_launch(to_kernels, rng):
    x, gate, up = map(to_kernels, inputs(rng, 3, 16, 64, bfloat16, 2))
    both = pack(gate, up=up)
    with jit.record(dry=True) as record:
        ops.matmul(x, both)
    (launch,) = record.launches
    assert launch.size_bytes == x.nbytes + both.size_bytes + 2 * 3 * 16 * 2


def test_nothing_launches_nothing(to):
    w = to(np.ones((3, 8), np.float32))
    x = to(np.ones((2, 0, 8), np.float32))
    plain, both = pack(w), pack(w, up=w)
    with jit.record(dry=True) as record:
        shapes = [
            ops.linear(x, plain).shape,
            ops.gated_linear(x, both).shape,
            ops.matmul(x, plain).shape,
            *(y.shape for y in ops.matmul(x, both)),
        ]
    assert set(shapes) == {(2, 0, 3)} and record.launches == []


@pytest.mark.parametrize("dtype", [np.dtype(bfloat16), np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("k", [1, 33, 4096, 14336, 28672, 2**20])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 9, 16, 64, 4096])
def test_every_choice_fits(dtype, k, m):
    for target in (
        tiles.TWIN,
        tiles.Target("90a", 131, 227 * 1024),
        tiles.Target("86", 84, 101376),
    ):
        for n in (1, 16, 576, 14336):
            tile = tiles.choose_packed("linear", target, m, n, k, dtype)
            shape = tile.launch_shape(target, m, n, dtype.itemsize)
            static = 0
            if isinstance(tile, tiles.PackedRowsTile):
                static = 2 * tile.warps * tile.rows * 20 * 4
                assert tile.warps == 8 and tile.resident >= 1
                assert m <= shape.grid[1] * tile.rows < m + tile.rows
            assert static + shape.shared_bytes <= target.shared_bytes
            assert min(shape.grid) >= 1


# ---- wrong input


def test_what_is_wrong_is_said(to):
    x, w = to(np.ones((2, 4), np.float32)), to(np.ones((3, 4), np.float32))
    plain, both = pack(w), pack(w, up=w)
    with pytest.raises(ValueError, match=r"linear: w is \[n k\] = \[3, 4\] but x has k = 5"):
        ops.linear(to(np.ones((2, 5), np.float32)), plain)
    with pytest.raises(ValueError, match=r"linear: b is \[n\] = \[2\] but w has n = 3"):
        ops.linear(x, plain, to(np.ones(2, np.float32)))
    with pytest.raises(TypeError, match="linear: w has dtype float32 and x has float16; cast one"):
        ops.linear(to(np.ones((2, 4), np.float16)), plain)
    with pytest.raises(ValueError, match="linear: w is a gate and its up packed together, wanted"):
        ops.linear(x, both)
    with pytest.raises(ValueError, match="gated_linear: w_gate is one packed weight, wanted a gat"):
        ops.gated_linear(x, plain)
    with pytest.raises(ValueError, match="gated_linear: w_up is given and w_gate has it packed"):
        ops.gated_linear(x, both, w)
    with pytest.raises(
        TypeError, match="gated_linear: w_up: expected a NumPy or CuPy array, got N"
    ):
        ops.gated_linear(x, w)
    with pytest.raises(ValueError, match=r"matmul: w is \[n k\] = \[3, 4\] but x has k = 5"):
        ops.matmul(to(np.ones((2, 5), np.float32)), both)
    with pytest.raises(TypeError, match=r"matmul: out is a \w+, wanted a pair of arrays"):
        ops.matmul(x, both, out=to(np.ones((2, 3), np.float32)))
    y = to(np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match="matmul: gate shares memory with up; give it memory"):
        ops.matmul(x, both, out=(y, y))
    with pytest.raises(ValueError, match="linear: out shares memory with w"):
        ops.linear(x, plain, out=plain.array[:6].reshape(2, 3))
    with pytest.raises(TypeError, match="embed: table: expected a NumPy or CuPy array, got Packed"):
        ops.embed(to(np.zeros(1, np.int32)), plain)


def test_packed_weights_of_another_library_are_refused(to_kernels):
    x, w = np.ones((2, 4), np.float32), pack(to_kernels(np.ones((3, 4), np.float32)))
    with pytest.raises(TypeError, match=r"linear: w is a (twin|cupy) array and the others are nu"):
        ops.linear(x, w)


def test_rows_of_a_packed_weight_begin_with_a_panel(to):
    plain = pack(to(np.ones((40, 8), np.float32)))
    both = pack(to(np.ones((40, 8), np.float32)), up=to(np.ones((40, 8), np.float32)))
    assert (plain.rows(16, 40).n, both.rows(8, 16).n) == (24, 8)
    assert device.overlap(plain.rows(16, 40).array, plain.array)
    assert isinstance(plain.rows(0, 1), Packed)
    with pytest.raises(ValueError, match="rows: begin is 8, wanted a multiple of 16"):
        plain.rows(8, 16)
    with pytest.raises(ValueError, match="rows: begin is 4, wanted a multiple of 8"):
        both.rows(4, 16)
    with pytest.raises(ValueError, match="rows: end is 41 and the weight has n = 40 rows"):
        plain.rows(16, 41)
    with pytest.raises(ValueError, match="rows: end is 16, wanted at least 17"):
        plain.rows(16, 16)


# ---- large shapes


@pytest.mark.gpu
@each_dtype
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
def test_large_products(rng, dtype, m, n, k):
    import cupy

    x, w, up = inputs(rng, m, n, k, dtype, 2)
    weight = rng.uniform(0.5, 1.5, k).astype(dtype)
    norm = Norm(cupy.asarray(weight), 1e-5, "scale_first")
    there, gate = cupy.asarray(x), cupy.asarray(w)
    got = ops.linear(there, pack(gate), activation="gelu", norm=norm)
    gated = ops.gated_linear(there, pack(gate, up=cupy.asarray(up)), norm=norm)
    rows = np.unique(rng.integers(0, m, 16))
    x, _ = reference.rmsnorm(x[rows], weight, eps=1e-5, rounding="scale_first")
    assert_close(got[rows], reference.linear(*double(x, w), activation="gelu"), dtype)
    assert_close(gated[rows], reference.gated_linear(*double(x, w, up)), dtype)


@pytest.mark.gpu
@pytest.mark.slow
def test_weights_beyond_32_bits():
    # 9 GB of weights: the offset of a panel does not fit into 32 bits.
    import cupy

    if cupy.cuda.runtime.memGetInfo()[0] < 21 << 30:
        pytest.skip("needs 21 GB of free memory")
    n, k = 1 << 20, 4608
    w = cupy.zeros((n, k), bfloat16)
    w[-1] = 1
    w[n // 2] = 2
    packed = pack(w)
    del w
    for m in (1, 9):
        got = ops.matmul(cupy.ones((m, k), bfloat16), packed)
        assert float(got[-1, -1]) == k and float(got[0, n // 2]) == 2 * k
        assert int((got != 0).sum()) == 2 * m
