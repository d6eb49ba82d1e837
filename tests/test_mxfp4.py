"""4-bit weights: the layout against a formula, kernels against NumPy bit by bit, sums, engines."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import DTYPES, relative_error, to_numpy
from models import CONFIGS, louder, oracle

from cufuse import device, engines, jit, mxfp4, weights
from cufuse.mxfp4 import Mxfp4, dequantize, from_blocks, packed_bytes, quantize
from cufuse.state import State

PRIMITIVES = Path(__file__).parent / "twin" / "primitives"
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SIZES = [(1, 1, 32), (2, 24, 96), (3, 17, 64), (1, 130, 160), (2, 33, 2880)]

each_size = pytest.mark.parametrize("n_experts, n, k", SIZES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
one_or_two = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])


def any_blocks(rng, n_experts, n, k, low=0, high=256):
    blocks = rng.integers(0, 256, (n_experts, n, k // 32, 16), np.uint8)
    return blocks, rng.integers(low, high, (n_experts, n, k // 32), np.uint8)


def exact(blocks, scales):
    """Decode value by value, as the specification writes it: [n_experts, n, k] in float64."""
    n_experts, n, n_blocks, _ = blocks.shape
    made = np.empty((n_experts, n, n_blocks * 32))
    for place in np.ndindex(n_experts, n, n_blocks):
        scale = np.nan if scales[place] == 255 else 2.0 ** (int(scales[place]) - 127)
        for j, byte in enumerate(blocks[place].tolist()):
            for nibble, column in ((byte & 15, 2 * j), (byte >> 4, 2 * j + 1)):
                value = FP4[nibble & 7] * scale
                made[(*place[:2], place[2] * 32 + column)] = -value if nibble & 8 else value
    return made


def rounded(values, dtype):
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(dtype)


def assert_same_bits(got, wanted):
    """NaNs are alike, whatever their bits; zeros keep their signs."""
    got = np.ascontiguousarray(to_numpy(got))
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    nans = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nans)
    word = f"u{got.dtype.itemsize}"
    wanted = np.ascontiguousarray(wanted)
    np.testing.assert_array_equal(got.view(word)[~nans], wanted.view(word)[~nans])


def packed_of(rng, to, n_experts, n, k, gated, dtype=np.float32, **scales):
    """Packed experts and what they are worth: one array, or those of gate and up."""
    parts = [any_blocks(rng, n_experts, n, k, **scales) for _ in range(2 if gated else 1)]
    up = tuple(to(x) for x in parts[1]) if gated else None
    made = from_blocks(*(to(x) for x in parts[0]), up=up, dtype=dtype)
    return made, [exact(*part) for part in parts]


def by_formula(parts, n_experts, n, k):
    """Tiles [n_experts, panels, tiles]: nibbles [32 lanes, 4, 8] and scales [32 lanes, 4]."""
    rows_of_each = 16 // len(parts)
    panels, tiles = -(-n // rows_of_each), -(-k // 64)
    nibbles = np.zeros((n_experts, panels, tiles, 32, 4, 8), np.uint8)
    scales = np.full((n_experts, panels, tiles, 8, 4), 127, np.uint8)
    for e, p, tile, lane in np.ndindex(n_experts, panels, tiles, 32):
        g, t = divmod(lane, 4)
        for half in (0, 1):
            row = g + 8 * half
            blocks, of_rows = parts[row // rows_of_each]
            r = p * rows_of_each + row % rows_of_each
            if r >= n:
                continue
            for block in (0, 1):
                if tile * 2 + block < k // 32:
                    scales[e, p, tile, g, block * 2 + half] = of_rows[e, r, tile * 2 + block]
            for s in range(4):
                for i, column in enumerate((2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)):
                    c = tile * 64 + s * 16 + column
                    if c < k:
                        byte = int(blocks[e, r, c // 32, c % 32 // 2])
                        place = i // 2 * 4 + half * 2 + i % 2
                        nibbles[e, p, tile, lane, s, place] = byte >> 4 if c % 2 else byte & 15
    return nibbles, scales


# ---- the layout ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n_experts, n, k", [(1, 1, 32), (2, 24, 96), (2, 17, 128)])
@one_or_two
def test_numpy_packs_by_the_formula(rng, n_experts, n, k, gated):
    parts = [any_blocks(rng, n_experts, n, k) for _ in range(2 if gated else 1)]
    packed = from_blocks(*parts[0], up=parts[1] if gated else None, dtype=np.float16)
    assert packed.shape == (n_experts, n, k)
    assert packed.size_bytes == packed_bytes(n_experts, n, k, gated=gated)
    tiles = packed.array.reshape(n_experts, packed.panels, -1, 544)
    nibbles, scales = by_formula(parts, n_experts, n, k)
    np.testing.assert_array_equal(tiles[..., 512:], scales.reshape(*scales.shape[:3], 32))
    words = np.ascontiguousarray(tiles[..., :512]).view("<u4").reshape(nibbles.shape[:-1])
    # The bits of a word are a permutation: each nibble alone gives its own four bits.
    masks = [
        [word_of([1 << bit if i == place else 0 for i in range(8)]) for bit in range(4)]
        for place in range(8)
    ]
    assert sorted(mask for four in masks for mask in four) == [1 << i for i in range(32)]
    for place, four in enumerate(masks):
        found = sum((words >> np.uint32(m.bit_length() - 1) & 1) << b for b, m in enumerate(four))
        np.testing.assert_array_equal(found, nibbles[..., place])


def word_of(nibbles):
    """Pack eight nibbles as lane 0's first fragment has them and return its word."""
    blocks = np.zeros((1, 16, 2, 16), np.uint8)
    for place, nibble in enumerate(nibbles):
        row, column = place // 2 % 2 * 8, place // 4 * 8 + place % 2
        blocks[0, row, 0, column // 2] |= nibble << (4 * (column % 2))
    packed = from_blocks(blocks, np.full((1, 16, 2), 127, np.uint8), dtype=np.float32)
    return int(packed.array[:4].view("<u4")[0])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["fp16", "bf16"])
def test_a_lanes_words_are_its_fragments(to_kernels, rng, dtype):
    blocks, scales = any_blocks(rng, 1, 16, 64)
    packed = from_blocks(to_kernels(blocks), to_kernels(scales), dtype=dtype)
    out = to_kernels(np.full((32, 4, 8), np.nan, dtype))
    made = jit.kernel("mxfp4.cu", "mxfp4_fragments", np.dtype(dtype), root=PRIMITIVES)
    made.launch(1, 32, {"panel": packed.array, "out": out}, like=out)
    nibbles, _ = by_formula([(blocks, scales)], 1, 16, 64)
    wanted = np.array(FP4 + [-x for x in FP4])[nibbles[0, 0, 0]]
    unit = 2.0**-14 if dtype == np.float16 else 1.0
    assert_same_bits(out, (wanted * unit).astype(dtype))


def test_products_of_pairs_are_rounded_once(to_kernels, rng):
    """Subnormal factors and products are kept."""
    a, b = rng.integers(0, 1 << 16, (2, 4096), np.uint16)
    b[:1024] = 0x7E80  # 2^126
    a[:1024] = rng.integers(0, 1 << 9, 1024) | rng.integers(0, 2, 1024) << 15
    out = to_kernels(np.zeros(2048, np.uint32))
    made = jit.kernel("mxfp4.cu", "pair_products", root=PRIMITIVES)
    args = {"a": to_kernels(a.view(np.uint32)), "b": to_kernels(b.view(np.uint32))}
    made.launch(1, 32, {**args, "out": out, "count": 2048}, like=out)
    with np.errstate(all="ignore"):
        x, y = (v.view(ml_dtypes.bfloat16).astype(np.float64) for v in (a, b))
        exact_products = x * y
        # In units of the last place of the result, which a float64 holds.
        exponent = np.maximum(np.frexp(exact_products)[1] - 8, -133)
        units = np.rint(np.ldexp(exact_products, -exponent))
        wanted = np.ldexp(units, exponent).astype(np.float32).astype(ml_dtypes.bfloat16)
    assert_same_bits(to_numpy(out).view(ml_dtypes.bfloat16), wanted)


# ---- packing and its inverse --------------------------------------------------------------------


@each_size
@one_or_two
def test_kernel_packs_the_bits_of_numpy(to_kernels, rng, n_experts, n, k, gated):
    parts = [any_blocks(rng, n_experts, n, k) for _ in range(2 if gated else 1)]
    size = packed_bytes(n_experts, n, k, gated=gated)
    out = to_kernels(np.full(size, 0xA5, np.uint8))
    there = [tuple(to_kernels(x) for x in part) for part in parts]
    packed = from_blocks(*there[0], up=there[1] if gated else None, dtype=np.float32, out=out)
    assert packed.array is out
    wanted = from_blocks(*parts[0], up=parts[1] if gated else None, dtype=np.float32)
    np.testing.assert_array_equal(to_numpy(out), wanted.array)


@each_size
@each_dtype
@one_or_two
def test_dequantize_gives_the_values(to, rng, n_experts, n, k, dtype, gated):
    packed, values = packed_of(rng, to, n_experts, n, k, gated, dtype)
    outs = tuple(to(np.full((n_experts, n, k), 7, dtype)) for _ in range(2))
    got = dequantize(packed, out=outs if gated else outs[0])
    for array, out, wanted in zip(got if gated else [got], outs, values, strict=False):
        assert array is out
        assert_same_bits(array, rounded(wanted, dtype))


@each_dtype
def test_every_value_with_every_scale(to, dtype):
    """256 scales and 16 values, in both columns of a byte."""
    scales = np.arange(256, dtype=np.uint8).reshape(1, 256, 1)
    nibbles = np.concatenate([np.arange(16), np.arange(16)[::-1]]).astype(np.uint8)
    row = nibbles[0::2] | nibbles[1::2] << 4
    blocks = np.broadcast_to(row, (1, 256, 1, 16)).copy()
    got = dequantize(from_blocks(to(blocks), to(scales), dtype=dtype))
    assert_same_bits(got, rounded(exact(blocks, scales), dtype))


@one_or_two
def test_dequantize_of_one_expert(to, rng, gated):
    packed, values = packed_of(rng, to, 3, 21, 96, gated)
    got = dequantize(packed, 1, dtype=np.float16)
    for array, wanted in zip(got if gated else [got], values, strict=True):
        assert device.kind(array) == device.kind(packed.array)
        assert_same_bits(array, rounded(wanted[1], np.float16))


@one_or_two
def test_dequantize_of_the_chosen_experts(to, rng, gated):
    packed, values = packed_of(rng, to, 5, 21, 96, gated)
    ids = to(np.array([[3, 1], [1, -1], [3, 5]], np.int32))  # the last two are no experts
    outs = tuple(to(np.full((5, 21, 96), 7, np.float32)) for _ in range(2))
    dequantize(packed, ids=ids, out=outs if gated else outs[0])
    for array, wanted in zip(outs, values, strict=False):
        assert_same_bits(array[1], rounded(wanted[1], np.float32))
        assert_same_bits(array[3], rounded(wanted[3], np.float32))
        assert (to_numpy(array)[[0, 2, 4]] == 7).all()


@each_dtype
def test_dequantize_writes_its_part_alone(to, rng, dtype):
    packed, (values,) = packed_of(rng, to, 2, 19, 96, False, dtype)
    whole = to(np.full((4, 19, 96), 7, dtype))
    dequantize(packed, out=whole[1:3])
    assert_same_bits(whole[1:3], rounded(values, dtype))
    assert (to_numpy(whole)[[0, 3]] == 7).all()
    # One value at a time where an address is no multiple of 16.
    flat = to(np.full(2 * 19 * 96 + 2, 7, dtype))
    dequantize(packed, out=flat[1:-1].reshape(2, 19, 96))
    assert_same_bits(flat[1:-1].reshape(2, 19, 96), rounded(values, dtype))
    assert (to_numpy(flat)[[0, -1]] == 7).all()


def test_rows_of_gate_and_up_in_turns(to, rng):
    blocks, scales = any_blocks(rng, 2, 48, 96)
    there, of_rows = to(blocks), to(scales)
    made = from_blocks(
        there[:, 0::2], of_rows[:, 0::2], up=(there[:, 1::2], of_rows[:, 1::2]), dtype=np.float32
    )
    values = exact(blocks, scales)
    for array, wanted in zip(dequantize(made), (values[:, 0::2], values[:, 1::2]), strict=True):
        assert_same_bits(array, rounded(wanted, np.float32))
    # A gate with gaps beside an up without.
    up = (to(blocks[:, 1::2].copy()), to(scales[:, 1::2].copy()))
    other = from_blocks(there[:, 0::2], of_rows[:, 0::2], up=up, dtype=np.float32)
    np.testing.assert_array_equal(to_numpy(other.array), to_numpy(made.array))


@one_or_two
def test_panels_take_turns_in_a_small_grid(to_kernels, rng, monkeypatch, gated):
    monkeypatch.setattr(mxfp4, "_MAX_GRID_Y", 2)
    packed, values = packed_of(rng, to_kernels, 3, 70, 64, gated)
    got = dequantize(packed)
    for array, wanted in zip(got if gated else [got], values, strict=True):
        assert_same_bits(array, rounded(wanted, np.float32))


# ---- quantising ---------------------------------------------------------------------------------


def test_quantize_keeps_what_is_exact(to, rng):
    blocks, scales = any_blocks(rng, 2, 9, 96, low=3, high=250)
    blocks[..., 0] = 0x17 | blocks[..., 0] & 0x80  # a 6 in each block, which fixes its scale
    values = exact(blocks, scales)
    got_blocks, got_scales = quantize(to(values.astype(np.float32)))
    np.testing.assert_array_equal(to_numpy(got_scales), scales)
    np.testing.assert_array_equal(to_numpy(got_blocks), blocks)
    assert device.kind(got_blocks) == device.kind(to(values))


def test_quantize_rounds_to_the_nearest_and_even():
    x = np.zeros(32, np.float32)
    x[:16] = [4, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.01, 7.9, 0.26, -0.25, -0.75, 0.2, 4.9, -2.6]
    wanted = [4, 0, 1, 1, 2, 2, 4, 4, 6, 6, 0.5, -0.0, -1, 0, 4, -3]
    blocks, scales = quantize(x)
    assert scales.tolist() == [127]
    np.testing.assert_array_equal(exact(blocks[None, None], scales[None, None])[0, 0, :16], wanted)


def test_quantize_takes_the_largest_exponent(rng):
    x = rng.standard_normal((7, 160)) * 10.0 ** rng.integers(-6, 6, (7, 160))
    blocks, scales = quantize(x.astype(np.float32))
    largest = np.abs(x.astype(np.float32)).reshape(7, 5, 32).max(-1)
    np.testing.assert_array_equal(scales, np.floor(np.log2(largest)) - 2 + 127)
    error = np.abs(exact(blocks[None], scales[None])[0] - x).reshape(7, 5, 32)
    # Half a step of the binade up to 6; what is more is cut off there, at most 2 away.
    assert (error <= 2.0 * np.exp2(scales - 127.0)[..., None]).all()


# ---- sums ---------------------------------------------------------------------------------------


def panel_sums(to_kernels, packed, x, dtype):
    tiles = -(-packed.k // 64)
    wide = np.zeros(tiles * 64, dtype)
    wide[: packed.k] = x
    out = to_kernels(np.full((32, 2), np.nan, np.float32))
    made = jit.kernel("mxfp4.cu", "mxfp4_panel", np.dtype(dtype), root=PRIMITIVES)
    args = {"panel": packed.array, "x": to_kernels(wide.view(np.uint32)), "out": out}
    made.launch(1, 32, {**args, "tiles": tiles}, like=out)
    found = to_numpy(out).reshape(8, 4, 2)
    np.testing.assert_array_equal(found, found[:, :1].repeat(4, 1))
    return found[:, 0].T.reshape(16)


@pytest.mark.parametrize("k", [32, 96, 64, 2880])
@each_dtype
@one_or_two
def test_sums_of_a_panel(to_kernels, rng, k, dtype, gated):
    n = 8 if gated else 16
    packed, values = packed_of(rng, to_kernels, 1, n, k, gated, dtype, low=117, high=124)
    x = rng.standard_normal(k).astype(dtype)
    got = panel_sums(to_kernels, packed, x, dtype)
    wide = x.astype(np.float64)
    wanted = np.concatenate([part[0] @ wide for part in values])
    size = np.concatenate([np.abs(part[0]) @ np.abs(wide) for part in values])
    assert (np.abs(got - wanted) <= 1e-6 * size).all()


@each_dtype
def test_each_value_and_scale_reaches_its_row(to_kernels, rng, dtype):
    """One column of x at a time: the sum is the weight, to the bit."""
    packed, (values,) = packed_of(rng, to_kernels, 1, 16, 96, False, dtype, low=1, high=255)
    wanted = rounded(values, np.float32)[0]
    for column in rng.permutation(96)[:24]:
        x = np.zeros(96, dtype)
        x[column] = 1
        got = panel_sums(to_kernels, packed, x, dtype)
        usable = np.isfinite(wanted[:, column]) & (np.abs(wanted[:, column]) > 2.0**-110)
        np.testing.assert_array_equal(got[usable], wanted[usable, column])


# ---- random weights -----------------------------------------------------------------------------


def test_random_blocks_are_the_same_everywhere(to_kernels):
    shape = (3, 10, 96)
    here = mxfp4.random_blocks(shape, seed=5, streams=(1, 2))
    kind = device.kind(to_kernels(here[0]))
    there = mxfp4.random_blocks(shape, seed=5, streams=(1, 2), kind=kind)
    for a, b in zip(here, there, strict=True):
        np.testing.assert_array_equal(a, to_numpy(b))


def test_random_blocks_have_the_usual_deviation():
    blocks, scales = mxfp4.random_blocks((2, 64, 512), seed=1, streams=(1, 2))
    values = dequantize(from_blocks(blocks, scales, dtype=np.float32))
    assert abs(values.std() / 0.0206 - 1) < 0.02 and abs(values.mean()) < 3e-4
    counts = np.bincount(np.concatenate([(blocks & 15).ravel(), (blocks >> 4).ravel()]))
    assert len(counts) == 16 and (abs(counts / counts.mean() - 1) < 0.1).all()
    assert set(np.unique(scales)) == {119, 120}
    other, _ = mxfp4.random_blocks((2, 64, 512), seed=1, streams=(3, 2))
    assert (other != blocks).mean() > 0.99


# ---- a model's weights --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["fp32", "bf16"])
def test_a_models_experts_are_the_same_everywhere(to, dtype):
    config = CONFIGS["mxfp4"]
    kind = device.kind(to(np.zeros(1)))
    made = weights.random(config, seed=3, dtype=dtype, kind=kind)
    here = weights.random(config, seed=3, dtype=dtype)
    shapes = {name: array.shape for name, array in made.rows()}
    assert shapes == weights.shapes(config)
    for (_, got), (_, wanted) in zip(made.rows(), here.rows(), strict=True):
        assert_same_bits(got, wanted)
    layer = made.layers[1]
    assert layer.gate is None and layer.up is None
    assert layer.gate_up.shape == (5, 64, 96) and layer.gate_up.gated
    assert layer.down.shape == (5, 96, 64) and layer.down.dtype == dtype
    assert layer.gate_up.size_bytes == here.layers[1].gate_up.size_bytes
    assert layer.down.size_bytes == here.layers[1].down.size_bytes
    # Moved, they stay as they are; in another type they are rows.
    moved = made.map(lambda array: array.copy())
    np.testing.assert_array_equal(
        to_numpy(moved.layers[0].down.array), to_numpy(made.layers[0].down.array)
    )
    cast = here.map(lambda array: array.astype(np.float64))
    assert cast.layers[0].gate_up is None and cast.layers[0].gate.dtype == np.float64
    gate, _ = dequantize(here.layers[0].gate_up)
    np.testing.assert_array_equal(cast.layers[0].gate, gate.astype(np.float64))


def test_experts_that_do_not_fit_are_named(rng):
    config = CONFIGS["mxfp4"].cut(1)
    made = dict(weights.random(config, dtype=np.float32).named())
    wrong = from_blocks(*any_blocks(rng, 5, 64, 96), dtype=np.float32)
    with pytest.raises(
        ValueError, match=r"tensor layers.0.down is \[5, 64, 96\], wanted \[5, 96, 64"
    ):
        weights.assemble(config, made | {"layers.0.down": wrong})
    del made["layers.0.gate_up"]
    with pytest.raises(ValueError, match=r"tensor layers.0.gate is missing"):
        weights.assemble(config, made)


def test_a_config_counts_its_bytes():
    four_bits = CONFIGS["mxfp4"]
    whole = dataclasses.replace(four_bits, expert_dtype="model")
    experts = 2 * 5 * 3 * 96 * 64
    assert whole.size_bytes(2) == 2 * whole.n_parameters
    assert four_bits.n_parameters == whole.n_parameters
    assert whole.size_bytes(2) - four_bits.size_bytes(2) == experts * 2 - experts * 17 // 32
    among = dataclasses.replace(four_bits, dense_layers=(0,), dense_hidden_dim=40)
    of_rows = dataclasses.replace(among, expert_dtype="model")
    assert of_rows.size_bytes(2) - among.size_bytes(2) == experts - experts // 2 * 17 // 32
    made = weights.random(among, dtype=np.float16)
    assert made.layers[0].gate.shape == (40, 96) and made.layers[1].gate_up.k == 96


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"expert_dtype": "fp4"}, "expert_dtype is 'fp4', wanted model or mxfp4"),
        ({"hidden_dim": 40}, "hidden_dim = 40 is no multiple of 32"),
        ({"n_experts": 0}, "expert_dtype belongs to a mixture"),
    ],
)
def test_a_config_that_does_not_fit(changes, text):
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(CONFIGS["mxfp4"], **changes)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("engine", ["unfused", "fused"])
def test_engines_in_half_precision(to_kernels, rng, engine, dtype):
    # All experts are chosen: rounding cannot take another one.
    every = dataclasses.replace(CONFIGS["mxfp4"], n_experts_per_token=5)
    made = louder(weights.random(every, dtype=DTYPES[dtype]))
    tokens = rng.integers(0, made.config.vocab_size, (1, 5)).astype(np.int32)
    wanted = oracle(made, tokens)
    moved = made.map(to_kernels)
    assert isinstance(moved.layers[0].gate_up, Mxfp4)
    step = engines.get(engine).step
    got = step(moved, State(moved, capacity=8), to_kernels(tokens), all_logits=True)
    assert relative_error(got, wanted) < {"fp16": 1e-2, "bf16": 8e-2}[dtype]


# ---- wrong input --------------------------------------------------------------------------------


def test_wrong_sizes_are_rejected(to, rng):
    blocks, scales = (to(x) for x in any_blocks(rng, 2, 5, 64))
    with pytest.raises(ValueError, match=r"scales is .* but blocks has n = 5"):
        from_blocks(blocks, scales[:, :4], dtype=np.float32)
    with pytest.raises(ValueError, match="wanted no size of 0"):
        from_blocks(blocks[:0], scales[:0], dtype=np.float32)
    with pytest.raises(TypeError, match="scales has dtype int8, wanted uint8"):
        from_blocks(blocks, scales.view(np.int8), dtype=np.float32)
    packed = from_blocks(blocks, scales, dtype=np.float32)
    with pytest.raises(ValueError, match=r"array has 543 bytes, wanted 1088|wanted 1088"):
        Mxfp4(packed.array[:543], 2, 5, 64, np.float32)
    with pytest.raises(ValueError, match="expert is 2 and there are 2"):
        dequantize(packed, 2)
    with pytest.raises(TypeError, match="dequantize: dtype is int32"):
        dequantize(packed, dtype=np.int32)
    with pytest.raises(ValueError, match=r"out is \[2, 5, 32\], wanted \[2, 5, 64\]"):
        dequantize(packed, out=to(np.zeros((2, 5, 32), np.float32)))
    with pytest.raises(ValueError, match="k is 40, wanted a multiple of 32"):
        packed_bytes(1, 1, 40)
    with pytest.raises(ValueError, match="wanted a k of n times 32"):
        quantize(np.zeros((2, 40), np.float32))
    with pytest.raises(ValueError, match="not finite"):
        quantize(np.full((2, 32), np.inf, np.float32))


@pytest.mark.gpu
def test_more_panels_than_a_grid_is_high(rng):
    import cupy

    packed, _ = packed_of(rng, cupy.asarray, 1, 1, 32, False)
    blocks = cupy.asarray(rng.integers(0, 256, (1, 16 * 65535 + 33, 1, 16), np.uint8))
    scales = cupy.full((1, 16 * 65535 + 33, 1), 120, np.uint8)
    packed = from_blocks(blocks, scales, dtype=np.float16)
    got = dequantize(packed)
    last = exact(blocks[:, -40:].get(), scales[:, -40:].get())
    assert_same_bits(got[:, -40:], rounded(last, np.float16))
