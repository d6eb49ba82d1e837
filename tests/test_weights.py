"""A model's weights: one copy, packed where kernels run, and what lies where."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import pytest
from conftest import DTYPES, to_numpy
from models import CONFIGS, small

from cufuse import device, pack, weights
from cufuse.mxfp4 import Mxfp4
from cufuse.pack import Packed

PACKED = [name for name, config in CONFIGS.items() if config.decode_problem is None]
DENSE = [name for name in PACKED if not CONFIGS[name].n_experts]
MIXTURES = [name for name in PACKED if CONFIGS[name].n_experts]
FOUR_BITS = [name for name in MIXTURES if CONFIGS[name].expert_dtype == "mxfp4"]
MATRICES = ("qkv", "out", "gate_up", "down")


def flat(value):
    """The array that a field of a layer is, or has."""
    return value.array if isinstance(value, Packed | Mxfp4) else value


def same(made, wanted):
    """Compare two models row by row, bit by bit."""
    pairs = zip(made.rows(), wanted.rows(), strict=True)
    for (name, got), (other, array) in pairs:
        assert name == other
        np.testing.assert_array_equal(to_numpy(got), to_numpy(array), err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_packed_has_the_numbers_of_the_rows(to, name, dtype):
    host = small(name, dtype)
    made = host.map(to)
    packs = to is not np.asarray and name in PACKED
    layer = made.layers[0]
    assert bool(made.stacks) == packs
    assert isinstance(layer.qkv, Packed) == isinstance(made.head, Packed) == packs
    if packs and name in DENSE:
        assert layer.gate is None and layer.up is None and layer.gate_up.gated
    elif packs:
        assert isinstance(layer.gate_up, Mxfp4) == (name in FOUR_BITS)
        assert layer.gate_up is None or layer.gate is layer.up is None
        assert layer.down.shape == host.layers[0].down.shape
    same(made, host)
    same(made.map(to_numpy), host)
    assert not made.map(to_numpy).stacks


def test_matrices_of_a_kind_lie_one_behind_the_other(to_kernels):
    made = small("interleaved", np.float16).map(to_kernels)
    for name, stack in made.stacks.items():
        begin = device.address(stack)
        for layer in made.layers:
            array = flat(getattr(layer, name))
            assert device.address(array) == begin
            begin += array.nbytes
        assert begin == device.address(stack) + stack.nbytes
    assert set(made.stacks) == {*MATRICES, "attn_norm", "mlp_norm", "qkv_bias"}


def spans_of_stacks(made):
    """The bytes [begin, end) of each stack that a layer's fields take, by the stack's name."""
    found = {name: [] for name in made.stacks}
    places = {name: device.address(stack) for name, stack in made.stacks.items()}
    for i, layer in enumerate(made.layers):
        for field in dataclasses.fields(layer):
            value = getattr(layer, field.name)
            if value is None:
                continue
            array = flat(value)
            stack, first, total = weights.stack_place(made.config, field.name, i, array.size)
            begin = device.address(array) - places[stack]
            assert begin == first * array.itemsize, (field.name, i)
            assert made.stacks[stack].size == total, (field.name, i)
            found[stack].append((begin, begin + array.nbytes))
    return found


@pytest.mark.parametrize("name", PACKED)
def test_stacks_are_made_of_the_fields_of_layers(to_kernels, name):
    """Each byte belongs to one field, which lies where `stack_place` says."""
    config = dataclasses.replace(CONFIGS[name], n_layers=3)
    if config.dense_layers:
        config = dataclasses.replace(config, dense_layers=(0, 2))
    host = weights.random(config, dtype=np.float16, kind="numpy")
    made = host.map(to_kernels)
    for stack, spans in spans_of_stacks(made).items():
        at = 0
        for begin, end in sorted(spans):
            assert begin == at, stack
            at = end
        assert at == made.stacks[stack].nbytes, stack
    same(made, host)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_keeps_what_belongs_together_together(to_kernels, name):
    """A shared expert's rows come behind the experts', and its router's behind theirs."""
    c = dataclasses.replace(CONFIGS[name], n_layers=3)
    made = weights.random(c, dtype=np.float16, kind="numpy").map(to_kernels)
    experts = {"gate_up4", "down4"} if name in FOUR_BITS else {"gate", "up", "down"}
    assert set(made.stacks) >= {"qkv", "out", "router", *experts}
    assert ("dense_down" in made.stacks) == bool(c.dense_layers)
    assert not any(stack in ("gate_up", "shared_gate", "shared_router") for stack in made.stacks)
    for i, layer in enumerate(made.layers):
        if not c.is_moe_layer(i):
            assert layer.router is None and layer.gate.shape == (c.dense_hidden_dim, c.dim)
            continue
        for first, second in (
            (layer.gate, layer.shared_gate),
            (layer.up, layer.shared_up),
            (layer.router, layer.shared_router),
        ):
            assert first is None or first.flags.c_contiguous
            if second is not None:
                assert device.address(second) == device.address(first) + first.nbytes


@pytest.mark.parametrize("name", PACKED)
def test_a_cut_model_has_its_places_in_the_whole_ones_stacks(name):
    whole = dataclasses.replace(CONFIGS[name], n_layers=4)
    host = weights.random(whole, dtype=np.float16, kind="numpy")
    totals = {}
    for kept in (1, 2, 3, 4):
        for array_name, value in host.named():
            if not array_name.startswith("layers."):
                continue
            _, index, field = array_name.split(".")
            if int(index) >= kept:
                continue
            array = flat(value)
            of_whole = weights.stack_place(whole, field, int(index), array.size)
            of_cut = weights.stack_place(whole.cut(kept), field, int(index), array.size)
            assert of_cut[:2] == of_whole[:2]
            assert of_cut[1] + array.size <= of_cut[2] <= of_whole[2]
            # All fields of a stack, whatever their layer, have one idea of its size.
            assert totals.setdefault((kept, of_cut[0]), of_cut[2]) == of_cut[2]


def row_major_bytes(made):
    """Bytes of the arrays that are no vectors and not packed, the embedding left out."""
    return sum(
        value.nbytes
        for name, value in made.named()
        if not isinstance(value, Packed) and value.ndim > 1 and name != "embedding"
    )


@pytest.mark.parametrize("name", DENSE)
def test_nothing_but_the_embedding_is_held_row_by_row(to_kernels, name):
    host = small(name, np.float16)
    made = host.map(to_kernels)
    c = made.config
    assert row_major_bytes(host) > 0 and row_major_bytes(made) == 0
    sizes = {
        "qkv": pack.packed_size(c.q_dim + 2 * c.kv_dim, c.dim, made.dtype),
        "out": pack.packed_size(c.dim, c.q_dim, made.dtype),
        "gate_up": pack.packed_size(c.hidden_dim, c.dim, made.dtype, gated=True),
        "down": pack.packed_size(c.dim, c.hidden_dim, made.dtype),
    }
    assert {name: made.stacks[name].size for name in sizes} == {
        name: c.n_layers * size for name, size in sizes.items()
    }
    vectors = sum(v.nbytes for _, v in made.named() if not isinstance(v, Packed) and v.ndim == 1)
    matrices = 2 * (c.n_layers * sum(sizes.values()) + made.head.array.size)
    assert made.size_bytes == vectors + matrices + made.embedding.nbytes


class Watch:
    """Count what of the arrays that pass through here is still alive, matrices alone."""

    def __init__(self, function, allowed):
        self.function, self.allowed = function, allowed
        self.seen, self.most = [], 0

    def alive(self):
        return [made for made in (seen() for seen in self.seen) if made is not None]

    def __call__(self, *args, **options):
        self.most = max(self.most, len(self.alive()))
        made = self.function(*args, **options)
        if made.ndim > 1:
            self.seen.append(weakref.ref(made))
        return made


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("tied", [True, False])
def test_a_layer_is_packed_before_the_next_one_is_made(monkeypatch, tied):
    config = dataclasses.replace(CONFIGS["qwen3"], n_layers=4, tied_embeddings=tied)
    watch = Watch(weights.hash_uniform, 2)
    monkeypatch.setattr(weights, "hash_uniform", watch)
    made = weights.random(config, dtype=np.float16, kind="twin")
    assert len(watch.seen) == 5 * 4 + 1 + (not tied)
    # The embedding, and a gate that waits for its up.
    assert watch.most == 2
    assert watch.alive() == [made.embedding] or watch.alive()[0] is made.embedding
    assert len(watch.alive()) == 1


@pytest.mark.cpu_kernels
def test_moving_a_model_drops_what_it_moved():
    host = small("qwen3", np.float16)
    watch = Watch(lambda array: device.twin(array.copy()), 2)
    made = host.map(watch)
    assert watch.most == 2 and len(watch.alive()) == 1
    assert watch.alive()[0] is made.embedding


@pytest.mark.cpu_kernels
def test_moving_a_mixture_drops_what_it_moved():
    host = small("qwen2-moe", np.float16)
    watch = Watch(lambda array: device.twin(array.copy()), 1)
    made = host.map(watch)
    assert watch.most == 1 or watch.most == 2
    assert len(watch.alive()) == 1 and watch.alive()[0] is made.embedding


def test_assemble_takes_arrays_one_by_one(to):
    host = small("llama")
    assert dict(host.rows()).keys() == weights.shapes(host.config).keys()
    made = weights.assemble(host.config, ((name, to(array)) for name, array in host.rows()))
    same(made, host)
    assert (made.head is made.embedding) == (to is np.asarray)
    with pytest.raises(ValueError, match=r"model llama: tensor layers\.1\.out is missing"):
        weights.assemble(host.config, ((n, to(a)) for n, a in host.rows() if n != "layers.1.out"))
    with pytest.raises(ValueError, match=r"tensor embedding is \[72, 131\], wanted \[131, 72\]"):
        weights.assemble(host.config, {"embedding": to(np.ones((72, 131), np.float32))})
