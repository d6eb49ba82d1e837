"""Mixture of experts: every path against float64, the dense MLP it has to equal, odd sizes."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import device, jit, ops, reference
from cufuse.ops.rmsnorm import Norm

# A layer of experts may be a little worse than one product (routing fixed).
FACTOR = {"float32": 1, "float16": 1e-3 / 6e-4, "bfloat16": 5e-3 / 4e-3}


class Layer:
    """Random experts and the tokens that go to them."""

    def __init__(self, rng, m, dim, hidden_dim, n_experts, k, dtype, ids=None):
        def normal(*shape, scale=1.0):
            return (rng.standard_normal(shape) * scale).astype(dtype)

        self.dtype = np.dtype(dtype)
        self.x = normal(m, dim)
        if ids is None:
            ids = [rng.permutation(n_experts)[:k] for _ in range(m)]
        self.ids = np.array(ids, np.int32).reshape(m, k)
        self.weights = rng.uniform(0.05, 1, (m, k)).astype(np.float32)
        self.w = [
            normal(n_experts, hidden_dim, dim, scale=dim**-0.5),
            normal(n_experts, hidden_dim, dim, scale=dim**-0.5),
            normal(n_experts, dim, hidden_dim, scale=hidden_dim**-0.5),
        ]
        self.b = {
            "b_gate": normal(n_experts, hidden_dim),
            "b_up": normal(n_experts, hidden_dim),
            "b_down": normal(n_experts, dim),
        }
        self.residual = normal(m, dim)
        self.norm = Norm(rng.uniform(0.5, 1.5, dim).astype(dtype))

    def run(self, to, rows=slice(None), bias=False, residual=False, norm=False, **options):
        if bias:
            options |= {name: to(b) for name, b in self.b.items()}
        if residual:
            options["residual"] = to(self.residual[rows])
        if norm:
            options["norm"] = self.norm._replace(weight=to(self.norm.weight))
        inputs = self.x[rows], self.ids[rows], self.weights[rows], *self.w
        return ops.moe(*(to(a) for a in inputs), **options)

    def wanted(self, bias=False, residual=False, norm=False, **options):
        """Loop over tokens and experts in float64."""
        rows = self.x
        if norm:  # rounded to the model's dtype, as the op does
            rows = reference.rmsnorm(rows, self.norm.weight, eps=self.norm.eps)[0]
        total = np.zeros(self.x.shape)
        w = [a.astype(np.float64) for a in self.w]
        b = {name: a.astype(np.float64) * bias for name, a in self.b.items()}
        for t, row in enumerate(rows.astype(np.float64)):
            for e, weight in zip(self.ids[t], self.weights[t].astype(np.float64), strict=True):
                gate, up = w[0][e] @ row + b["b_gate"][e], w[1][e] @ row + b["b_up"][e]
                hidden = reference.glu(gate, up, **options)
                total[t] += weight * (w[2][e] @ hidden + b["b_down"][e])
        return total + self.residual.astype(np.float64) if residual else total

    def check(self, to, factor=1.0, **options):
        out = poisoned(self.x.shape, self.dtype, to)
        got = self.run(to, **options, out=out)
        assert got is out
        assert_close(got, self.wanted(**options), self.dtype, FACTOR[self.dtype.name] * factor)
        return got


EVEN, ODD = (64, 48, 12, 4), (70, 33, 5, 2)  # dim, hidden_dim, n_experts, k


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (DTYPES["fp32"], EVEN),
        (DTYPES["fp32"], ODD),
        (DTYPES["fp16"], EVEN),
        (DTYPES["fp16"], ODD),
        (DTYPES["bf16"], EVEN),
    ],
    ids=["fp32", "fp32-odd", "fp16", "fp16-odd", "bf16"],
)
@pytest.mark.parametrize("m", [1, 2, 7, 130])
def test_moe_matches_float64(to, rng, dtype, sizes, m):
    Layer(rng, m, *sizes, dtype).check(to, residual=True)


@pytest.mark.parametrize("m", [3, 70])
@pytest.mark.parametrize("dtype", [DTYPES["fp16"], DTYPES["bf16"]], ids=["fp16", "bf16"])
def test_clamped_gate_with_biases_and_norm(to, rng, dtype, m):
    layer = Layer(rng, m, 64, 48, 8, 2, dtype)
    layer.w[0] = (layer.w[0] * 4).astype(dtype)  # so that the limit is passed on both sides
    layer.w[1] = (layer.w[1] * 4).astype(dtype)
    clamped = layer.check(to, bias=True, residual=True, norm=True, limit=2.0, alpha=1.702)
    plain = layer.check(to, bias=True, residual=True, norm=True)
    assert np.abs(to_numpy(clamped).astype(float) - to_numpy(plain).astype(float)).max() > 0.5


@pytest.mark.parametrize("activation", ["relu2", "gelu_tanh"])
def test_moe_activations(to, rng, activation):
    Layer(rng, 2, 16, 16, 3, 2, np.float32).check(to, activation=activation)


@pytest.mark.parametrize("m", [1, 9])
@pytest.mark.parametrize(("n_experts", "k"), [(1, 1), (6, 6), (6, 1), (40, 11)])
def test_any_number_of_experts(to, rng, m, n_experts, k):
    Layer(rng, m, 24, 16, n_experts, k, np.float32).check(to, bias=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("m", [3, 70])
def test_most_experts_get_nothing_and_one_gets_all(to, rng, m, dtype):
    """In 200 experts: all to the last; all to the first; every token to the same two."""
    for ids in ([[199]] * m, [[0]] * m):
        Layer(rng, m, 16, 16, 200, 1, dtype, ids).check(to)
    Layer(rng, m, 16, 16, 200, 2, dtype, [[150, 3]] * m).check(to)


@pytest.mark.parametrize("m", [2, 40])
def test_an_ffn_cut_into_experts_equals_the_dense_one(to, rng, m):
    """Eight experts of 24 with unit weights are the FFN of 192: none is missing or added twice."""
    dim, hidden_dim, n = 40, 192, 8
    layer = Layer(rng, m, dim, hidden_dim, 1, 1, np.float32)
    gate, up, down = (a[0] for a in layer.w)
    x = layer.x.astype(np.float64)
    dense = reference.glu(x @ gate.astype(float).T, x @ up.astype(float).T) @ down.astype(float).T
    layer.w = [
        gate.reshape(n, hidden_dim // n, dim),
        up.reshape(n, hidden_dim // n, dim),
        np.ascontiguousarray(down.reshape(dim, n, hidden_dim // n).swapaxes(0, 1)),
    ]
    layer.ids = np.stack([rng.permutation(n) for _ in range(m)]).astype(np.int32)
    layer.weights = np.ones((m, n), np.float32)
    assert_close(layer.run(to), dense, np.float32)


@pytest.mark.parametrize("m", [2, 40])
def test_copies_of_an_ffn_equal_the_dense_one(to, rng, m):
    """With renormalised weights of a real router, whichever experts it picks."""
    layer = Layer(rng, m, 40, 32, 1, 1, np.float32)
    dense = reference.moe(
        layer.x.astype(np.float64), np.zeros((m, 1), int), np.ones((m, 1)), *layer.w
    )
    router = (rng.standard_normal((8, 40)) * 0.02).astype(np.float32)
    ids, raw = ops.moe_route(to(layer.x), to(router), k=3, renormalize=False)
    assert to_numpy(raw).sum(-1).max() < 0.9  # else dividing by the sum would change nothing
    _, weights = ops.moe_route(to(layer.x), to(router), k=3)
    w = [to(np.repeat(a, 8, 0)) for a in layer.w]
    assert_close(ops.moe(to(layer.x), ids, weights, *w), dense, np.float32)
    assert abs(to_numpy(ops.moe(to(layer.x), ids, raw, *w)) - dense).max() > 0.05


@pytest.mark.parametrize("m", [1, 70])
def test_a_hidden_value_beyond_float16(to, rng, m):
    """gate * up = 1e5 overflows float16 (65504); the result, 1e5 / 64, does not."""
    layer = Layer(rng, m, 16, 32, 4, 2, np.float16)
    layer.x[:] = 1
    for w, value in zip(layer.w, (400 / 16, 250 / 16, 0), strict=True):
        w[:] = value
    layer.w[2][:, :, 5] = 1 / 64
    layer.w[2][:, :, 6] = -1 / 128
    got = layer.run(to)
    wanted = 1e5 / 128 * layer.weights.sum(-1, keepdims=True) * np.ones(16)
    assert_close(got, wanted, np.float16)


def test_residual_in_place(to, rng):
    for m in (2, 40):
        layer = Layer(rng, m, 24, 16, 4, 2, np.float32)
        wanted = layer.wanted(residual=True, norm=True)
        total = to(layer.residual.copy())
        norm = layer.norm._replace(weight=to(layer.norm.weight))
        inputs = layer.x, layer.ids, layer.weights, *layer.w
        got = ops.moe(*(to(a) for a in inputs), residual=total, norm=norm, out=total)
        assert got is total
        assert_close(got, wanted, np.float32)


def test_x_in_place_is_its_own_residual(to, rng):
    for m in (2, 40):
        layer = Layer(rng, m, 24, 16, 4, 2, np.float32)
        layer.residual = layer.x
        wanted = layer.wanted(residual=True, norm=True)
        x = to(layer.x.copy())
        norm = layer.norm._replace(weight=to(layer.norm.weight))
        inputs = layer.ids, layer.weights, *layer.w
        ops.moe(x, *(to(a) for a in inputs), residual=x, norm=norm, out=x)
        assert_close(x, wanted, np.float32)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_token_alone_has_the_bits_it_has_among_others(to_kernels, rng, dtype):
    layer = Layer(rng, 4, 72, 40, 6, 3, dtype)
    options = {"bias": True, "residual": True, "norm": True}
    together = to_numpy(layer.run(to_kernels, **options))
    for t in range(4):
        alone = to_numpy(layer.run(to_kernels, slice(t, t + 1), **options))
        assert (alone[0] == together[t]).all()


@pytest.mark.parametrize("m", [2, 40])
def test_moe_again_gives_the_same_bits(to_kernels, rng, m):
    layer = Layer(rng, m, 40, 24, 4, 2, np.float16)
    runs = []
    for seed in range(2):
        with jit.twin_seed(seed):
            runs.append(to_numpy(layer.run(to_kernels)).copy())
    assert (runs[0] == runs[1]).all()


@pytest.mark.parametrize("m", [2, 40])
def test_an_id_that_is_no_expert_makes_its_token_nan(to, rng, m):
    layer = Layer(rng, m, 16, 16, 4, 2, np.float32)
    layer.ids[1] = [2, -1]
    if to is np.asarray:
        with pytest.raises(ValueError, match=r"ids go from -1 to [0-3] and there are 4 experts"):
            layer.run(to)
        return
    got = to_numpy(layer.run(to))
    assert np.isnan(got[1]).all() and np.isfinite(np.delete(got, 1, 0)).all()


def test_more_slots_than_go_through_the_tiles_at_once(to, rng, monkeypatch):
    monkeypatch.setattr(importlib.import_module("cufuse.ops.moe"), "_MAX_SLOTS", 33)
    layer = Layer(rng, 50, 24, 16, 4, 2, np.float32)
    layer.check(to, bias=True, residual=True, norm=True)


def test_few_tokens_are_two_launches(to_kernels, rng):
    layer = Layer(rng, 2, 32, 24, 8, 2, np.float32)
    with jit.record(dry=True) as record:
        layer.run(to_kernels, norm=True)
    assert [launch.kernel for launch in record.launches] == ["moe_gate_up", "moe_down"]
    weights = 4 * 3 * 24 * 32 * 4  # of the four experts that two tokens can have
    assert weights < record.size_bytes < weights * 1.25


def test_many_tokens_read_each_expert_once(to_kernels, rng):
    layer = Layer(rng, 40, 64, 48, 4, 2, np.float32)
    with jit.record(dry=True) as record:
        layer.run(to_kernels)
    sizes = {launch.kernel: launch.size_bytes for launch in record.launches}
    matrix, slots = 4 * 48 * 64 * 4, 80
    assert sizes["moe_gate_up_tiles"] == 2 * matrix + 4 * (40 * 64 + slots * 48)
    assert sizes["moe_down_tiles"] == matrix + 4 * slots * (48 + 64)
    assert sizes["combine"] == 4 * (slots * 64 + 2 * slots + 40 * 64)


def test_no_tokens_launch_nothing(to_kernels, rng):
    layer = Layer(rng, 0, 16, 16, 4, 2, np.float32)
    with jit.record() as record:
        assert layer.run(to_kernels).shape == (0, 16)
    assert not record.launches


@pytest.mark.parametrize("m", [3, 40])
def test_strided_input(to, rng, m):
    layer = Layer(rng, m, 24, 16, 4, 2, np.float32)
    x = to(np.concatenate([layer.x, layer.x], 1))[::-1, 24:]
    layer.ids, layer.weights = layer.ids[::-1].copy(), layer.weights[::-1].copy()
    layer.x = layer.x[::-1].copy()
    gate, up, down = (to(np.ascontiguousarray(w.T)).T for w in layer.w)
    weights = to(np.repeat(layer.weights, 2, 1))[:, ::2]
    got = ops.moe(x, to(layer.ids), weights, gate, up, down)
    assert_close(got, layer.wanted(), np.float32)


def test_moe_says_what_is_wrong(to, rng):
    layer = Layer(rng, 2, 16, 8, 4, 2, np.float32)
    x, ids, weights, *w = (to(a) for a in (layer.x, layer.ids, layer.weights, *layer.w))
    with pytest.raises(ValueError, match=r"w_down is .* = \[4, 8, 16\] but x has dim = 16"):
        ops.moe(x, ids, weights, w[0], w[1], w[0])
    with pytest.raises(ValueError, match="activation is 'swish', wanted one of none, relu"):
        ops.moe(x, ids, weights, *w, activation="swish")
    with pytest.raises(ValueError, match=r"ids is \[m, k\] = \[2, 0\], wanted at least one"):
        ops.moe(x, ids[:, :0], weights[:, :0], *w)
    with pytest.raises(TypeError, match="ids has dtype int64, wanted int32"):
        ops.moe(x, to(layer.ids.astype(np.int64)), weights, *w)
    with pytest.raises(TypeError, match="w_up has dtype float16 and x has float32"):
        ops.moe(x, ids, weights, w[0], to(layer.w[1].astype(np.float16)), w[2])
    with pytest.raises(ValueError, match="out shares memory with w_gate"):
        ops.moe(x, ids, weights, *w, out=w[0][0, :2])
    with pytest.raises(TypeError, match="a numpy array and the others are"):
        ops.moe(device.twin(layer.x), layer.ids, weights, *w)


REAL = {  # m, dim, hidden_dim, n_experts, k
    "olmoe": (1, 2048, 1024, 64, 8),
    "olmoe-batch": (8, 2048, 1024, 64, 8),
    "olmoe-prefill": (1234, 2048, 1024, 64, 8),
    "gpt-oss": (2, 2880, 2880, 32, 4),
    "gpt-oss-prefill": (1000, 2880, 2880, 32, 4),
    "odd": (300, 1234, 570, 16, 2),
}


@pytest.mark.cpu_kernels
def test_offsets_of_experts_go_beyond_32_bits(rng):
    # Zeros that are never written take no memory.
    n_experts, n = (1 << 21) + 2, 32
    w = np.zeros((n_experts, n, n), np.float16)
    w[-1] = rng.standard_normal((n, n)) / 4
    x = rng.standard_normal((2, n)).astype(np.float16)
    ids = np.array([[n_experts - 1], [1]], np.int32)
    weights = np.ones((2, 1), np.float32)
    moved = device.twin(w)
    got = ops.moe(*map(device.twin, (x, ids, weights)), moved, moved, moved)
    last, exact = w[-1].astype(np.float64), x.astype(np.float64)
    wanted = reference.gated_linear(exact[:1], last, last) @ last.T
    assert_close(got[:1], wanted, np.float16, FACTOR["float16"])
    assert (got[1] == 0).all()
    got = ops.expert_matmul(device.twin(x), device.twin(ids), moved)
    assert_close(got[0], exact[:1] @ last.T, np.float16)
    assert (got[1] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
def test_moe_of_real_shapes(shape, dtype):
    """Against float64 products on the CPU."""
    import cupy

    m, dim, hidden_dim, n_experts, k = shape
    random = cupy.random.default_rng(3)

    def normal(*sizes):
        values = random.standard_normal(sizes, dtype=np.float32) / sizes[-1] ** 0.5
        return values.astype(dtype)

    x = (random.standard_normal((m, dim), dtype=np.float32)).astype(dtype)
    w_gate, w_up = normal(n_experts, hidden_dim, dim), normal(n_experts, hidden_dim, dim)
    w_down = normal(n_experts, dim, hidden_dim)
    b = {name: normal(n_experts, hidden_dim) for name in ("b_gate", "b_up")}
    b["b_down"] = normal(n_experts, dim)
    ids = cupy.argsort(random.random((m, n_experts)), axis=1)[:, :k].astype(np.int32)
    weights = random.random((m, k), dtype=np.float32) + 0.05
    got = ops.moe(x, ids, weights, w_gate, w_up, w_down, **b, limit=7.0, residual=x)

    wanted = to_numpy(x).astype(np.float64)
    for e in range(n_experts):
        token, slot = (to_numpy(a) for a in cupy.nonzero(ids == e))
        rows = to_numpy(x)[token].astype(np.float64)
        gate = rows @ to_numpy(w_gate[e]).astype(np.float64).T + to_numpy(b["b_gate"][e]).astype(
            np.float64
        )
        up = rows @ to_numpy(w_up[e]).astype(np.float64).T + to_numpy(b["b_up"][e]).astype(
            np.float64
        )
        hidden = reference.glu(gate, up, limit=7.0)
        y = hidden @ to_numpy(w_down[e]).astype(np.float64).T + to_numpy(b["b_down"][e]).astype(
            np.float64
        )
        np.add.at(wanted, token, y * to_numpy(weights)[token, slot, None])
    assert_close(got, wanted, dtype, FACTOR[np.dtype(dtype).name])
