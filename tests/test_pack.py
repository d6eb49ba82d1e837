"""The packed layout: NumPy against a formula, kernels against NumPy, and the way back; all bits."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import DTYPES, to_numpy

from cufuse import device, jit, reference
from cufuse import pack as packing
from cufuse.pack import Packed, pack, packed_size, unpack

PRIMITIVES = Path(__file__).parent / "twin" / "primitives"
POISON = 0xA5
SIZES = [(1, 1), (1, 130), (7, 7), (16, 16), (17, 33), (33, 17), (130, 7), (130, 130), (3420, 72)]

each_size = pytest.mark.parametrize("n, k", SIZES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
one_or_two = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])


def any_bits(rng, shape, dtype):
    """Every pattern of bits, so NaNs of every kind, infinities, subnormals and -0 too."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rng.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def poison(size, dtype):
    return np.full(size * np.dtype(dtype).itemsize, POISON, np.uint8).view(dtype)


def bits(x):
    made = np.ascontiguousarray(to_numpy(x))
    return made.view(f"u{made.dtype.itemsize}")


def assert_same_bits(got, wanted):
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(bits(got), bits(wanted))


def weights(rng, n, k, dtype, gated):
    """A weight and None, or a gate and its up."""
    return any_bits(rng, (n, k), dtype), any_bits(rng, (n, k), dtype) if gated else None


def moved(to, x):
    return None if x is None else to(x)


# ---- the layout ---------------------------------------------------------------------------------


def lane_places(lane, itemsize):
    """Row and column in its tile of each value of a lane, in the order of mma.m16n8k16's A."""
    g, t = divmod(lane, 4)
    four = [(g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1)]
    return four if itemsize == 4 else four + [(row, column + 8) for row, column in four]


def by_formula(w, up=None):
    """Pack value by value."""
    n, k = w.shape
    itemsize = w.dtype.itemsize
    tile_k = {2: 16, 4: 8}[itemsize]
    tiles = (k + tile_k - 1) // tile_k
    tiles += tiles % 2
    rows_of_each = 16 if up is None else 8
    sources = [bits(w).tolist()] if up is None else [bits(w).tolist(), bits(up).tolist()]
    made = []
    for panel in range((n + rows_of_each - 1) // rows_of_each):
        for tile in range(tiles):
            for lane in range(32):
                for row, column in lane_places(lane, itemsize):
                    source = sources[row // rows_of_each]
                    r, c = panel * rows_of_each + row % rows_of_each, tile * tile_k + column
                    made.append(source[r][c] if r < n and c < k else 0)
    return np.array(made, f"u{itemsize}").view(w.dtype)


@each_size
@each_dtype
@one_or_two
def test_numpy_packs_by_the_formula(rng, n, k, dtype, gated):
    w, up = weights(rng, n, k, dtype, gated)
    packed = pack(w, up=up)
    assert (packed.n, packed.k, packed.gated, packed.dtype) == (n, k, gated, dtype)
    assert_same_bits(packed.array, by_formula(w, up))
    assert packed.array.size == packed_size(n, k, dtype, gated=gated)
    assert packed.size_bytes % 1024 == 0


@pytest.mark.parametrize("n, k", [(1, 1), (8, 16), (9, 33), (16, 32), (17, 64), (35, 130)])
@each_dtype
def test_device_header_tells_the_same_layout(to_kernels, n, k, dtype):
    places = to_kernels(np.full((16, k), -1, np.int64))
    sizes = to_kernels(np.full(6, -1, np.int64))
    made = jit.kernel("packing.cu", "packed_places", np.dtype(dtype), root=PRIMITIVES)
    made.launch(1, 64, {"places": places, "sizes": sizes, "n": n, "k": k}, like=places)
    itemsize = np.dtype(dtype).itemsize
    numbered = np.arange(1, 16 * k + 1, dtype=f"u{itemsize}").view(dtype).reshape(16, k)
    panel = bits(by_formula(numbered)).tolist()
    wanted = [[panel.index(value) for value in row] for row in bits(numbered).tolist()]
    np.testing.assert_array_equal(to_numpy(places), wanted)
    tiles = len(panel) * itemsize // 512
    panels = [packed_size(n, k, dtype, gated=gated) // len(panel) for gated in (False, True)]
    assert to_numpy(sizes).tolist() == [tiles, len(panel), tiles * 512, *panels, 512]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["fp16", "bf16"])
def test_a_lanes_bytes_are_its_fragment_of_mma(to_kernels, rng, dtype):
    w = rng.standard_normal((16, 72)).astype(dtype)
    packed = pack(to_kernels(w))
    x = rng.standard_normal((8, 96)).astype(dtype)  # as wide as the panel, whose padding is zeros
    out = to_kernels(np.full((16, 8), np.nan, np.float32))
    made = jit.kernel("packing.cu", "packed_mma", np.dtype(dtype), root=PRIMITIVES)
    args = {"packed": packed.array, "b": to_kernels(x.view(np.uint32)), "out": out, "tiles": 6}
    made.launch(1, 32, args, like=out)
    wanted = w.astype(np.float64) @ x[:, :72].astype(np.float64).T
    np.testing.assert_allclose(to_numpy(out), wanted, rtol=0, atol=1e-4)


# ---- kernels ------------------------------------------------------------------------------------


@each_size
@each_dtype
@one_or_two
def test_kernel_packs_the_bits_of_numpy(to_kernels, rng, n, k, dtype, gated):
    w, up = weights(rng, n, k, dtype, gated)
    size = packed_size(n, k, dtype, gated=gated)
    out = to_kernels(poison(size, dtype))
    packed = pack(to_kernels(w), up=moved(to_kernels, up), out=out)
    assert packed.array is out and (packed.n, packed.k, packed.gated) == (n, k, gated)
    assert_same_bits(out, reference.pack(w, up))


@each_size
@each_dtype
@one_or_two
def test_unpack_gives_back_what_was_packed(to, rng, n, k, dtype, gated):
    w, up = weights(rng, n, k, dtype, gated)
    packed = pack(to(w), up=moved(to, up))
    outs = tuple(to(poison(n * k, dtype).reshape(n, k)) for _ in range(2))
    got = unpack(packed, out=outs if gated else outs[0])
    if gated:
        assert got[0] is outs[0] and got[1] is outs[1]
        assert_same_bits(got[1], up)
    else:
        assert got is outs[0]
    assert_same_bits(outs[0], w)


@pytest.mark.parametrize("begin, end", [(0, 1), (3, 20), (15, 17), (16, 32), (40, 45), (33, None)])
@pytest.mark.parametrize("k", [7, 130])
@one_or_two
def test_unpack_of_some_rows(to, rng, begin, end, k, gated):
    w, up = weights(rng, 45, k, np.float16, gated)
    packed = pack(to(w), up=moved(to, up))
    got = unpack(packed, begin=begin, end=end)
    for array, wanted in zip(got if gated else (got,), (w, up) if gated else (w,), strict=True):
        assert device.kind(array) == device.kind(packed.array)
        assert_same_bits(array, wanted[begin:end])


@pytest.mark.parametrize("begin", [0, 17, 33])
@one_or_two
def test_unpack_of_no_rows_launches_nothing(to, rng, begin, gated):
    w, up = weights(rng, 33, 7, np.float32, gated)
    packed = pack(to(w), up=moved(to, up))
    with jit.record() as record:
        got = unpack(packed, begin=begin, end=begin)
    assert [x.shape for x in (got if gated else (got,))] == [(0, 7)] * (2 if gated else 1)
    assert record.launches == []


@each_dtype
@one_or_two
def test_pack_writes_its_part_of_an_arena_alone(to, rng, dtype, gated):
    w, up = weights(rng, 19, 41, dtype, gated)
    size = packed_size(19, 41, dtype, gated=gated)
    gap = 16 // np.dtype(dtype).itemsize
    arena = to(poison(size + 3 * gap, dtype))
    packed = pack(to(w), up=moved(to, up), out=arena[2 * gap : 2 * gap + size])
    assert device.address(packed.array) == device.address(arena) + 32
    around = np.concatenate([to_numpy(arena)[: 2 * gap], to_numpy(arena)[-gap:]])
    assert_same_bits(around, poison(3 * gap, dtype))
    assert_same_bits(to_numpy(arena)[2 * gap : 2 * gap + size], by_formula(w, up))


@one_or_two
def test_unpack_writes_its_rows_alone(to, rng, gated):
    w, up = weights(rng, 21, 17, np.float16, gated)
    rows = [to(poison(23 * 17, np.float16).reshape(23, 17)) for _ in range(2)]
    outs = tuple(x[1:20] for x in rows)
    unpack(pack(to(w), up=moved(to, up)), begin=2, out=outs if gated else outs[0])
    for array, wanted in zip(rows, (w, up) if gated else (w,), strict=False):
        assert_same_bits(array[1:20], wanted[2:])
        around = np.concatenate([to_numpy(array)[:1], to_numpy(array)[20:]])
        assert_same_bits(around, poison(4 * 17, np.float16).reshape(4, 17))


@each_dtype
def test_payloads_of_nans_are_preserved(to, dtype):
    word = np.dtype(f"u{np.dtype(dtype).itemsize}")
    top = np.array(np.inf, dtype).view(word)  # all ones in the exponent, none in the mantissa
    sign = word.type(1 << (8 * word.itemsize - 1))
    payloads = np.arange(1, 1 + 18 * 11, dtype=np.uint32) % 96 + 1
    w = (top | payloads.astype(word)).reshape(18, 11).view(dtype)
    up = (top | sign | payloads[::-1].astype(word)).reshape(18, 11).view(dtype)
    assert np.isnan(w.astype(np.float32)).all() and np.isnan(up.astype(np.float32)).all()
    packed = pack(to(w), up=to(up))
    assert_same_bits(packed.array, by_formula(w, up))
    for got, wanted in zip(unpack(packed), (w, up), strict=True):
        assert_same_bits(got, wanted)


@each_dtype
def test_pack_takes_arrays_as_they_lie(to, rng, dtype):
    whole = any_bits(rng, (40, 66), dtype)
    there = to(whole)
    views = {
        "every other row": lambda x: x[::2],
        "some columns": lambda x: x[:, 2:50],
        "an odd number of columns": lambda x: x[:, 2:51],
        "columns at an odd address": lambda x: x[:, 1:50],
        "rows from last to first": lambda x: x[::-1],
        "every other column": lambda x: x[:, ::2],
        "transposed": lambda x: x.T,
    }
    for view in views.values():
        assert_same_bits(pack(view(there)).array, by_formula(view(whole)))
    # Gate and up row by row in one matrix.
    made = pack(there[0::2], up=there[1::2])
    assert_same_bits(made.array, by_formula(whole[0::2], whole[1::2]))
    alone = any_bits(rng, (20, 66), dtype)
    assert_same_bits(pack(there[::2], up=to(alone)).array, by_formula(whole[::2], alone))


@each_dtype
def test_rows_with_gaps_are_not_copied(rng, dtype):
    whole = device.twin(any_bits(rng, (40, 66), dtype))
    with jit.record(dry=True) as record:
        packed = pack(whole[0::2], up=whole[1::2])
    (launch,) = record.launches
    assert launch.kernel == "pack"
    assert launch.size_bytes == whole.nbytes + packed.size_bytes


@one_or_two
def test_panels_take_turns_in_a_small_grid(to_kernels, rng, monkeypatch, gated):
    monkeypatch.setattr(packing, "_MAX_GRID_Y", 2)
    w, up = weights(rng, 117, 19, np.float32, gated)
    out = to_kernels(poison(packed_size(117, 19, np.float32, gated=gated), np.float32))
    packed = pack(to_kernels(w), up=moved(to_kernels, up), out=out)
    assert_same_bits(out, by_formula(w, up))
    got = unpack(packed, begin=9)
    for array, wanted in zip(got if gated else (got,), (w, up) if gated else (w,), strict=True):
        assert_same_bits(array, wanted[9:])


@pytest.mark.gpu
def test_more_panels_than_a_grid_is_high(rng):
    import cupy

    w = any_bits(rng, (16 * 65535 + 33, 1), np.float16)
    packed = pack(cupy.asarray(w))
    assert_same_bits(packed.array, reference.pack(w))
    assert_same_bits(unpack(packed), w)


@pytest.mark.gpu
def test_offsets_have_64_bits():
    import cupy

    n, k = 33001, 65601
    counters = cupy.arange(n * k, dtype=cupy.uint32)
    w = (counters ^ counters >> 13).astype(cupy.uint16).view(np.float16).reshape(n, k)
    del counters
    packed = pack(w)
    last = packed.array.size // packing._panels(n, False)
    begin = n // 16 * 16
    assert_same_bits(packed.array[-last:], reference.pack(w[begin:].get()))
    assert bool((unpack(packed).view(np.uint16) == w.view(np.uint16)).all())
    assert_same_bits(unpack(packed, begin=n - 3), w[-3:])


# ---- wrong input --------------------------------------------------------------------------------


def test_pack_rejects_wrong_weights(to):
    w = to(np.ones((5, 8), np.float32))
    with pytest.raises(ValueError, match=r"pack: w is \[5\], wanted \[n, k\]"):
        pack(w[:, 0])
    with pytest.raises(ValueError, match=r"pack: w is \[0, 8\], wanted at least one row"):
        pack(w[:0])
    with pytest.raises(ValueError, match=r"pack: w is \[5, 0\], wanted at least one row"):
        pack(w[:, :0])
    with pytest.raises(ValueError, match=r"pack: up is \[n k\] = \[4, 8\] but w has n = 5"):
        pack(w, up=w[:4])
    with pytest.raises(TypeError, match="pack: up has dtype float16 and w has float32; cast one"):
        pack(w, up=to(np.ones((5, 8), np.float16)))
    with pytest.raises(TypeError, match="pack: w has dtype int32, wanted float16, bfloat16 or"):
        pack(to(np.ones((5, 8), np.int32)))
    with pytest.raises(TypeError, match="pack: w: expected a NumPy or CuPy array, got list; make"):
        pack([[1.0]])


def test_pack_rejects_mixed_kinds():
    w = np.ones((5, 8), np.float32)
    with pytest.raises(TypeError, match="pack: up is a twin array and the others are numpy arrays"):
        pack(w, up=device.twin(w))
    with pytest.raises(TypeError, match="pack: out is a twin array and the inputs are numpy"):
        pack(w, out=device.twin(np.empty(256, np.float32)))


def test_pack_rejects_a_wrong_out(to):
    w = to(np.ones((5, 8), np.float32))
    arena = to(np.zeros(1024, np.float32))
    with pytest.raises(ValueError, match=r"pack: out is \[255\], wanted \[256\]"):
        pack(w, out=arena[:255])
    with pytest.raises(ValueError, match=r"pack: out is \[16, 16\], wanted \[256\]"):
        pack(w, out=arena[:256].reshape(16, 16))
    with pytest.raises(ValueError, match=r"pack: out is \[256\], wanted \[512\]"):
        pack(to(np.ones((9, 8), np.float32)), up=to(np.ones((9, 8), np.float32)), out=arena[:256])
    with pytest.raises(TypeError, match="pack: out has dtype float16, wanted float32"):
        pack(w, out=to(np.zeros(256, np.float16)))
    with pytest.raises(ValueError, match="pack: out has to be C-contiguous and writable"):
        pack(w, out=arena[:512:2])
    with pytest.raises(ValueError, match=r"pack: out begins at address 0x\w+, wanted a multi"):
        pack(w, out=arena[1:257])
    with pytest.raises(ValueError, match="pack: out shares memory with w"):
        pack(arena[:40].reshape(5, 8), out=arena[:256])
    assert not to_numpy(arena).any()


def test_packed_rejects_another_array(to):
    array = to(np.zeros(1024, np.float32))
    with pytest.raises(
        ValueError, match=r"Packed: array has 1024 elements, wanted 512 for \[n, k\] = \[17, 8\]"
    ):
        Packed(array, 17, 8)
    with pytest.raises(ValueError, match=r"wanted 768 for \[n, k\] = \[17, 8\] twice"):
        Packed(array, 17, 8, gated=True)
    with pytest.raises(ValueError, match=r"Packed: array is \[4, 256\], wanted \[size\]"):
        Packed(array.reshape(4, 256), 17, 8)
    with pytest.raises(ValueError, match="Packed: array has to be C-contiguous"):
        Packed(array[::2], 17, 8)
    with pytest.raises(ValueError, match="Packed: array begins at address 0x"):
        Packed(array[1:513], 17, 8)
    with pytest.raises(TypeError, match="Packed: array has dtype uint8, wanted float16"):
        Packed(array.view(np.uint8), 17, 8)


def test_packed_size_rejects_what_is_no_weight():
    with pytest.raises(ValueError, match="packed_size: n is 0, wanted at least 1"):
        packed_size(0, 4, np.float32)
    with pytest.raises(ValueError, match="packed_size: k is -1, wanted at least 1"):
        packed_size(4, -1, np.float32)
    with pytest.raises(TypeError, match=r"packed_size: k is 1.5, wanted an integer of at least 1"):
        packed_size(4, 1.5, np.float32)
    with pytest.raises(TypeError, match="packed_size: dtype is float64, wanted float16, bfloat16"):
        packed_size(4, 4, np.float64)


def test_unpack_rejects_wrong_rows_and_outs(to):
    w = to(np.ones((5, 8), np.float32))
    packed, gated = pack(w), pack(w, up=to(np.ones((5, 8), np.float32)))
    with pytest.raises(ValueError, match="unpack: end is 6 and the weight has n = 5 rows"):
        unpack(packed, end=6)
    with pytest.raises(ValueError, match="unpack: begin is -1, wanted at least 0"):
        unpack(packed, begin=-1)
    with pytest.raises(ValueError, match="unpack: end is 2, wanted at least 3"):
        unpack(packed, begin=3, end=2)
    with pytest.raises(ValueError, match=r"unpack: out is \[5, 8\], wanted \[4, 8\]"):
        unpack(packed, begin=1, out=w)
    with pytest.raises(TypeError, match=r"unpack: out is a \w+, wanted a pair of arrays"):
        unpack(gated, out=w)
    with pytest.raises(ValueError, match="unpack: gate shares memory with up"):
        unpack(gated, out=(w, w))
    with pytest.raises(ValueError, match="unpack: out shares memory with packed"):
        unpack(packed, out=packed.array[:40].reshape(5, 8))
