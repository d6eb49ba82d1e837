"""Random weights: the same bits everywhere, and numbers a model can run on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from conftest import DTYPES, to_numpy
from models import CONFIGS

from cufuse import config, device, jit, weights
from cufuse.pack import Packed
from cufuse.reference import random as counter

KINDS = [
    "numpy",
    pytest.param("twin", marks=pytest.mark.cpu_kernels),
    pytest.param("cupy", marks=pytest.mark.gpu),
]


def value_at(i: int, seed: int, stream: int, half_width: float, center: float) -> np.float32:
    """One number in plain Python, written apart from the vectorised code."""
    first, second = counter.hash_key(seed, stream, i >> 32)
    x = (i & 0xFFFFFFFF) ^ first
    x = (x ^ x >> 17) * 0xED5AD4BB & 0xFFFFFFFF
    x = ((x ^ x >> 11) + second) * 0xAC4C1B51 & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x31848BAB & 0xFFFFFFFF
    x ^= x >> 14
    step = np.float32(half_width) * np.float32(2.0**-23)
    return np.float32((x >> 8) - (1 << 23)) * step + np.float32(center)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_hash_uniform_is_the_plain_formula(dtype):
    got = counter.hash_uniform((3, 41), dtype, seed=9, stream=77, half_width=0.3, center=0.1)
    wanted = [value_at(i, 9, 77, 0.3, 0.1) for i in range(123)]
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.reshape(-1), np.array(wanted, np.float32).astype(dtype))


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (33, 130)])
def test_hash_uniform_kernel_makes_the_bits_of_numpy(kind, dtype, shape):
    options = {"seed": 2**63 + 5, "tensor": "layers.3.up", "half_width": 0.035, "center": 0.01}
    got = weights.hash_uniform(shape, dtype, kind=kind, **options)
    assert device.kind(got) == kind
    wanted = weights.hash_uniform(shape, dtype, **options)
    assert to_numpy(got).tobytes() == wanted.tobytes()


@pytest.mark.gpu
def test_hash_uniform_has_64_bit_indices():
    n = 2**32 + 4096
    options = {"seed": 3, "tensor": "huge", "half_width": 1.0}
    got = weights.hash_uniform((n,), np.float16, kind="cupy", **options)[-8192:].get()
    stream = weights._stream("huge")
    wanted = [value_at(i, 3, stream, 1.0, 0.0) for i in range(n - 8192, n)]
    np.testing.assert_array_equal(got, np.array(wanted, np.float32).astype(np.float16))


def test_hash_uniform_is_uniform_and_streams_are_independent():
    a = counter.hash_uniform((1 << 20,), np.float32, seed=0, stream=1, half_width=1.0)
    b = counter.hash_uniform((1 << 20,), np.float32, seed=0, stream=2, half_width=1.0)
    c = counter.hash_uniform((1 << 20,), np.float32, seed=1, stream=1, half_width=1.0)
    assert a.min() >= -1 and a.max() < 1
    counts = np.histogram(a, 256, (-1, 1))[0]
    chi_square = ((counts - 4096.0) ** 2 / 4096.0).sum()
    assert chi_square < 255 + 5 * np.sqrt(2 * 255)
    for other in (b, c, np.roll(a, 1), np.roll(a, 2048)):
        assert abs(np.corrcoef(a, other)[0, 1]) < 5 / 1024
    assert len(np.intersect1d(a[:4096], b[:4096])) < 64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_random_weights_have_the_shapes_of_the_config(kind, name):
    chosen = config.preset(name).cut(1)
    made = weights.random(chosen, dtype=device.bfloat16, kind=kind)
    assert made.dtype == device.bfloat16
    assert device.kind(made.embedding) == kind
    assert {tensor: array.shape for tensor, array in made.rows()} == weights.shapes(chosen)
    assert {device.kind(array) for _, array in made.rows()} == {kind}
    packed = kind != "numpy"
    assert isinstance(made.head, Packed) == packed
    assert (made.head is made.embedding) == (chosen.tied_embeddings and not packed)


def test_random_weights_are_scaled_for_a_model():
    chosen = dataclasses.replace(config.preset("gpt-oss-20b").cut(1), dim=256, vocab_size=4096)
    made = weights.random(chosen, dtype=np.float32)
    layer = made.layers[0]
    assert 0.019 < made.embedding.std() < 0.021
    assert 0.019 < layer.qkv.std() < 0.021
    assert layer.attn_norm.min() >= 0.8 and layer.attn_norm.max() < 1.2
    assert abs(layer.qkv_bias).max() <= 0.02
    assert abs(layer.sinks).max() <= 0.5
    hidden = np.random.default_rng(0).standard_normal((64, chosen.dim))
    logits = hidden @ layer.router.T
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    mass = np.sort(p, -1)[:, -chosen.n_experts_per_token :].sum(-1)
    assert 0.2 < mass.mean() < 0.7


@pytest.mark.parametrize("kind", KINDS)
def test_a_correction_is_float32_whatever_the_dtype(kind):
    made = weights.random(CONFIGS["deepseek-moe"], dtype=np.float16, kind=kind)
    corrections = [layer.router_correction for layer in made.layers]
    assert corrections[0] is None and corrections[1].dtype == np.float32
    assert 0.01 < abs(to_numpy(corrections[1])).max() <= 0.1
    assert made.layers[1].shared_up.dtype == made.dtype == np.float16


def test_random_weights_of_a_cut_model_are_its_first_layers():
    whole = dict(weights.random(config.preset("tiny"), seed=4, dtype=np.float16).named())
    cut = weights.random(config.preset("tiny").cut(1), seed=4, dtype=np.float16)
    for tensor, array in cut.named():
        assert array.tobytes() == whole[tensor].tobytes()
    again = weights.random(config.preset("tiny").cut(1), seed=5, dtype=np.float16)
    assert again.embedding.tobytes() != cut.embedding.tobytes()


def test_random_weights_take_one_launch_a_tensor():
    with jit.record(dry=True) as record:
        made = weights.random(config.preset("tiny"), dtype=np.float32, kind="twin")
    launches = [launch for launch in record.launches if launch.kernel == "hash_uniform"]
    assert len(launches) == len(weights.shapes(made.config))
    shapes = weights.shapes(made.config).values()
    assert sum(launch.size_bytes for launch in launches) == 4 * sum(map(math.prod, shapes))
    others = {launch.kernel for launch in record.launches} - {"hash_uniform"}
    assert others == {"pack"}
    assert len(record.launches) - len(launches) == 4 * made.config.n_layers + 1


def test_random_weights_reject_bad_options():
    with pytest.raises(TypeError, match="random: dtype is float64"):
        weights.random(config.preset("tiny"), dtype=np.float64)
    with pytest.raises(ValueError, match="random: kind is 'torch'"):
        weights.random(config.preset("tiny"), dtype=np.float32, kind="torch")
    with pytest.raises(ValueError, match="random: seed is -1"):
        weights.random(config.preset("tiny"), dtype=np.float32, seed=-1)
