"""RoPE: published check values of every scaling, and the kernel against float64."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import config, ops, reference
from cufuse.config import RopeScaling
from cufuse.device import Unsupported
from cufuse.reference.rope import yarn_range

LLAMA31 = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA32 = dataclasses.replace(LLAMA31, factor=32.0)
GPT_OSS = RopeScaling("yarn", 32.0, 4096, truncate=False)
V2_LITE = RopeScaling("yarn", 40.0, 4096, mscale=0.707, mscale_all_dim=0.707)


@pytest.mark.parametrize(
    ("theta", "dim", "scaling", "wanted"),
    [
        (
            5e5,
            128,
            LLAMA31,
            {16: 3.760603093e-2, 32: 5.248461610e-4, 48: 6.647869871e-6, 63: 3.068925989e-7},
        ),
        (5e5, 64, LLAMA32, {16: 4.295567966e-4, 24: 1.661967468e-6, 31: 9.418306725e-8}),
        (150000.0, 64, GPT_OSS, {8: 5.081327482e-2, 12: 6.794959490e-3, 16: 4.564839192e-4}),
        (1e4, 64, V2_LITE, {12: 2.687936011e-2, 16: 5.5e-3}),
    ],
    ids=["llama-3.1-8b", "llama-3.2-1b", "gpt-oss", "deepseek-v2-lite"],
)
def test_frequencies_match_published_values(theta, dim, scaling, wanted):
    frequencies, _ = reference.rope_frequencies(theta, dim, scaling)
    assert frequencies.dtype == np.float64
    for index, value in wanted.items():
        assert frequencies[index] == pytest.approx(value, rel=1e-9)


def test_yarn_range_and_factor_match_published_values():
    low, high = yarn_range(150000.0, 64, GPT_OSS, 4096)
    assert (round(low, 4), round(high, 4)) == (8.0928, 17.3980)
    assert yarn_range(1e4, 64, V2_LITE, 4096) == (10, 23)
    assert reference.rope_frequencies(150000.0, 64, GPT_OSS)[1] == pytest.approx(1.3465736)
    assert reference.rope_frequencies(1e4, 64, V2_LITE)[1] == 1.0
    one_sided = dataclasses.replace(V2_LITE, mscale=1.0, mscale_all_dim=None)
    assert reference.rope_frequencies(1e4, 64, one_sided)[1] == pytest.approx(
        0.1 * math.log(40) + 1
    )
    given = dataclasses.replace(V2_LITE, attention_factor=0.5)
    assert reference.rope_frequencies(1e4, 64, given)[1] == 0.5


def test_plain_and_linear_frequencies():
    plain, factor = reference.rope_frequencies(1e4, 8)
    np.testing.assert_allclose(plain, [1e4 ** (-2 * t / 8) for t in range(4)])
    assert factor == 1.0
    scaled, factor = reference.rope_frequencies(1e4, 8, RopeScaling("linear", 4.0))
    np.testing.assert_allclose(scaled, plain / 4)
    assert factor == 1.0


def test_dynamic_scaling_grows_theta_beyond_the_original_length():
    scaling = RopeScaling("dynamic", 2.0, 100)
    plain, _ = reference.rope_frequencies(1e4, 64)
    np.testing.assert_allclose(reference.rope_frequencies(1e4, 64, scaling, 50)[0], plain)
    theta = 1e4 * (2.0 * 300 / 100 - 1.0) ** (64 / 62)
    np.testing.assert_allclose(
        reference.rope_frequencies(1e4, 64, scaling, 300)[0], theta ** (-np.arange(32) / 32)
    )


def test_longrope_chooses_factors_by_sequence_length():
    short, long = (1.0, 2.0), (4.0, 8.0)
    scaling = RopeScaling("longrope", 1.0, 4096, short_factor=short, long_factor=long)
    plain, _ = reference.rope_frequencies(1e4, 4)
    for seq_len, chosen in ((4096, short), (4097, long)):
        got, factor = reference.rope_frequencies(1e4, 4, scaling, seq_len, max_seq_len=131072)
        np.testing.assert_allclose(got, plain / np.array(chosen))
        assert factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert reference.rope_frequencies(1e4, 4, scaling, 1, max_seq_len=4096)[1] == 1.0
    with pytest.raises(ValueError, match="longrope has 2 factors"):
        reference.rope_frequencies(1e4, 8, scaling, 1)


def test_unknown_scaling_is_unsupported():
    with pytest.raises(Unsupported, match="rope scaling 'mrope' is unknown"):
        reference.rope_frequencies(1e4, 64, RopeScaling("mrope"))


def test_scaling_without_a_length_is_an_error():
    with pytest.raises(ValueError, match="llama3 needs original_max_seq_len"):
        reference.rope_frequencies(1e4, 64, RopeScaling("llama3", 8.0))


def test_table_carries_the_attention_factor():
    model = config.preset("gpt-oss-20b")
    cos, sin = reference.rope_table(model, 5)
    assert cos.shape == sin.shape == (5, 32)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos[0], 1.3465736, rtol=1e-6)
    np.testing.assert_allclose(cos**2 + sin**2, 1.3465736**2, rtol=1e-5)
    assert reference.rope_table(config.preset("minilm"), 3)[0].shape == (3, 0)


def test_reference_rotates_pairs_as_complex_numbers(rng):
    x = rng.standard_normal((3, 2, 10))
    angles = rng.uniform(-3, 3, (7, 4))
    positions = np.array([6, 0, 3], np.int32)
    turn = np.exp(1j * angles[positions])[:, None, :]
    got = reference.rope(x, np.cos(angles), np.sin(angles), positions)
    wanted = (x[..., :4] + 1j * x[..., 4:8]) * turn
    np.testing.assert_allclose(got[..., :4] + 1j * got[..., 4:8], wanted)
    np.testing.assert_array_equal(got[..., 8:], x[..., 8:])
    got = reference.rope(x, np.cos(angles), np.sin(angles), positions, interleaved=True)
    wanted = (x[..., 0:8:2] + 1j * x[..., 1:8:2]) * turn
    np.testing.assert_allclose(got[..., 0:8:2] + 1j * got[..., 1:8:2], wanted)


def table(rng, n_positions, n_pairs):
    angles = rng.uniform(-3, 3, (n_positions, n_pairs))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "n_pairs"),
    [
        (1, 1, 32, 16),
        (2, 2, 56, 28),
        (1, 3, 64, 32),
        (3, 5, 80, 40),
        (2, 3, 96, 48),
        (1, 2, 128, 64),
        (1, 1, 256, 128),
        (2, 3, 96, 32),
        (3, 2, 33, 13),
        (2, 1, 7, 0),
    ],
)
def test_rope_matches_float64(to, rng, dtype, interleaved, rows, heads, head_dim, n_pairs):
    x = rng.standard_normal((rows, heads, head_dim)).astype(dtype)
    cos, sin = table(rng, 9, n_pairs)
    positions = rng.integers(0, 9, rows).astype(np.int32)
    positions[-1] = 8  # the table ends there
    wanted = reference.rope(x.astype(np.float64), cos, sin, positions, interleaved=interleaved)
    out = poisoned(x.shape, dtype, to)
    got = ops.rope(to(x), to(cos), to(sin), to(positions), interleaved=interleaved, out=out)
    assert got is out
    assert_close(got, wanted, dtype)


def test_rope_in_place_and_of_views(to, rng):
    base = rng.standard_normal((4, 3, 128)).astype(np.float32)
    cos, sin = table(rng, 9, 32)
    positions = np.array([8, 1, 0, 4], np.int32)
    wanted = reference.rope(base[..., 32:96], cos, sin, positions)
    got = ops.rope(to(base)[..., 32:96], to(cos), to(sin), to(positions))
    np.testing.assert_allclose(to_numpy(got), wanted, rtol=1e-5, atol=1e-6)
    x = to(base[..., 32:96].copy())
    assert ops.rope(x, to(cos), to(sin), to(positions), out=x) is x
    np.testing.assert_allclose(to_numpy(x), wanted, rtol=1e-5, atol=1e-6)


def test_rope_outside_the_table_is_nan(to, rng):
    x = rng.standard_normal((3, 2, 32)).astype(np.float32)
    cos, sin = table(rng, 4, 16)
    positions = np.array([4, 3, -1], np.int32)
    got = to_numpy(ops.rope(to(x), to(cos), to(sin), to(positions)))
    assert np.isnan(got[[0, 2]]).all()
    assert np.isfinite(got[1]).all()


def test_rope_of_nothing_launches_nothing(to):
    empty = np.zeros((0, 2, 32), np.float32)
    angles = np.zeros((4, 16), np.float32)
    got = ops.rope(to(empty), to(angles), to(angles), to(np.zeros(0, np.int32)))
    assert got.shape == (0, 2, 32)


def test_rope_rejects_wrong_arrays():
    x, angles = np.zeros((2, 3, 32), np.float32), np.zeros((4, 16), np.float32)
    positions = np.zeros(2, np.int32)
    with pytest.raises(TypeError, match="rope: positions has dtype int64, wanted int32"):
        ops.rope(x, angles, angles, positions.astype(np.int64))
    with pytest.raises(TypeError, match="rope: cos has dtype float64"):
        ops.rope(x, angles.astype(np.float64), angles, positions)
    with pytest.raises(ValueError, match=r"rope: positions is \[rows\] = \[3\]"):
        ops.rope(x, angles, angles, np.zeros(3, np.int32))
    wide = np.zeros((4, 17), np.float32)
    with pytest.raises(ValueError, match="rope: cos rotates 34 values of a head, x has 32"):
        ops.rope(x, wide, wide, positions)
