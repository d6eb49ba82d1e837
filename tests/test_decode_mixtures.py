"""Mixtures of experts through the decode kernel: every router, skewed, tied, NaN, many shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import mixture_oracle
import numpy as np
import pytest
from conftest import DTYPES, _to_gpu, to_numpy
from models import CONFIGS, louder
from test_decode import MEGA, MIXTURES, check_at

from cufuse import device, jit, ops, reference, tiles, weights
from cufuse.config import Config
from cufuse.engines import _parts
from cufuse.ops.rmsnorm import Norm
from cufuse.state import State
from cufuse.weights import Weights


def mixture(config: Config, dtype: str, seed: int = 0) -> Weights:
    """Random weights on the host; of a router logits of a standard deviation of about 1."""
    made = weights.random(config, seed=seed, dtype=DTYPES[dtype], kind="numpy")
    routers = [layer.router for layer in made.layers]
    made = louder(made)
    for layer, router in zip(made.layers, routers, strict=True):
        layer.router = router
    return made


def small(name: str, n_layers: int, **changes: Any) -> Config:
    return dataclasses.replace(CONFIGS[name], n_layers=n_layers, **changes)


# ---- on the twin: few, for a token of one layer takes it seconds ---------------------------------

FEW = {
    "olmoe": (small("olmoe", 1), "bf16", 12),
    "gpt-oss": (small("gpt-oss", 1), "bf16", 9),
    # 96 columns and 64: tiles of 4-bit weights with a padded end, and without.
    "mxfp4": (small("mxfp4", 2), "fp32", 3),
    "4 bits, a dense layer": (
        small("mxfp4", 3, hidden_dim=160, mlp_bias=False, dense_layers=(1,), dense_hidden_dim=72),
        "bf16",
        2,
    ),
    # Of a panel several blocks; as many experts as are chosen.
    "4 bits, all of 4": (
        small("mxfp4", 1, dim=544, hidden_dim=32, n_experts=4, n_experts_per_token=4),
        "fp16",
        0,
    ),
    "4 bits, one expert": (
        small("mxfp4", 1, dim=32, hidden_dim=32, n_experts=1, n_experts_per_token=1),
        "bf16",
        0,
    ),
    "qwen2-moe": (small("qwen2-moe", 1), "fp32", 0),
    "deepseek-moe": (small("deepseek-moe", 2), "fp32", 5),
    "60 experts": (
        small("mixtral", 1, n_experts=60, n_experts_per_token=4, hidden_dim=24),
        "fp16",
        0,
    ),
    "one expert": (small("mixtral", 1, n_experts=1, n_experts_per_token=1), "bf16", 3),
    "wide experts": (small("mixtral", 1, hidden_dim=192, n_experts_per_token=1), "fp32", 0),
    # CTA 0 has none of the experts, and none of what comes behind them.
    "few panels": (
        small("mixtral", 1, dim=16, hidden_dim=8, n_experts_per_token=1),
        "bf16",
        0,
    ),
    # As many logits as rows of the router's panels, and one more.
    "16 experts and a gate": (
        small("qwen2-moe", 1, n_experts=16, n_experts_per_token=2, hidden_dim=16),
        "bf16",
        0,
    ),
    # More of the shared expert for a CTA than its ring and its buffers of sums have room for.
    "wide shared": (small("qwen2-moe", 1, shared_hidden_dim=832, hidden_dim=104), "bf16", 0),
}


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("name", FEW)
def test_a_token_of_a_mixture(rng, name):
    config, dtype, context = FEW[name]
    made = mixture(config, dtype)
    with jit.twin_seed(int(rng.integers(1000))):
        # By phases: those that test_engines.py has compiled already, families in float32.
        by_phases = name in ("deepseek-moe", "mxfp4")
        check_at(made, context, rng, device.twin, n=1, by_phases=by_phases)


@pytest.mark.cpu_kernels
def test_tokens_of_a_mixture_by_other_copies(rng, monkeypatch):
    decode = tiles.decode
    monkeypatch.setattr(
        tiles, "decode", lambda *args: dataclasses.replace(decode(*args), copies="async")
    )
    check_at(mixture(small("qwen2-moe", 1), "fp16"), 2, rng, device.twin, n=2)


# ---- what a router chooses ----------------------------------------------------------------------


def step_of(made: Weights, tokens: np.ndarray, to: Any) -> tuple[State, Weights, np.ndarray]:
    """One launch over tokens [n]: the state, the weights where they ran, what was chosen."""
    there = made.map(to)
    state = State(there, capacity=len(tokens) + 1)
    mixture_oracle.forget(state, len(tokens))
    MEGA.step(there, state, to(tokens[None].astype(np.int32)), all_logits=True)
    state.check_fault()
    return state, there, mixture_oracle.chosen(state, len(tokens))


def words_of(state: State, made: Weights, region: str, n: int, dtype: Any) -> np.ndarray:
    """The n values that lie in a region of the words between CTAs, as a step left them."""
    c = made.config
    tile = tiles.decode(c, tiles.target_of(state.start), made.dtype)
    regions = tiles.decode_regions(c, made.dtype, tile)
    first = sum(regions[name] for name in list(regions)[: list(regions).index(region)])
    size = tiles.decode_words(c, made.dtype, tile)
    words = to_numpy(state.zeroed("words", (size,), np.uint64))[first:]
    return words.astype(np.uint32).view(dtype)[:n]


ROUTED = [("qwen2-moe", "fp32"), ("olmoe", "bf16"), ("deepseek-moe", "fp16"), ("gpt-oss", "fp16")]


@pytest.mark.parametrize(("name", "dtype"), ROUTED)
def test_the_router_chooses_what_ops_choose(to_kernels, rng, name, dtype):
    """From the very vector that the kernel normalised."""
    config = small(name, 1, dense_layers=(), dense_hidden_dim=0)
    made = mixture(config, dtype)
    token = rng.integers(0, config.vocab_size, 1)
    state, there, chosen = step_of(made, token, to_kernels)
    x = words_of(state, made, "middle", config.dim, made.dtype)[None]
    layer, host = there.layers[0], made.layers[0]
    options = _parts.routing(config, layer)
    norm = Norm(layer.mlp_norm, config.norm_eps, config.norm_rounding)
    ids, _ = ops.moe_route(to_kernels(x), layer.router, layer.router_bias, norm=norm, **options)
    rows = reference.rmsnorm(
        x.astype(np.float64), host.mlp_norm.astype(np.float64), eps=config.norm_eps
    )[0]
    bias = None if host.router_bias is None else host.router_bias.astype(np.float64)
    logits = reference.router_logits(rows, host.router.astype(np.float64), bias)
    got = words_of(state, made, "router", 2 * config.n_experts, np.float32)[: config.n_experts]
    tolerance = mixture_oracle.CLEAR[made.dtype.name]
    assert np.abs(got - logits[0]).max() < tolerance
    k, of_host = options.pop("k"), {**options, "correction": host.router_correction}
    if mixture_oracle.margins(logits, k, of_host)[0] > tolerance:
        assert np.sort(to_numpy(ids)[0]).tolist() == chosen[0, 0].tolist()


@pytest.mark.parametrize("name", ["olmoe", "gpt-oss", "qwen2-moe"])
def test_ties_go_to_the_lower_ids(to_kernels, rng, name):
    made = mixture(small(name, 1), "fp16")
    for layer in made.layers:
        layer.router[...] = 0
        if layer.router_bias is not None:
            layer.router_bias[...] = 0
    _, _, chosen = step_of(made, rng.integers(0, 131, 1), to_kernels)
    assert chosen.tolist() == [[list(range(made.config.n_experts_per_token))]]


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek-moe"])
def test_logits_of_nan_choose_experts_that_are_there(to_kernels, rng, name):
    made = mixture(small(name, 2 if name == "deepseek-moe" else 1), "bf16")
    router = made.layers[-1].router
    router[...] = np.nan
    _, _, chosen = step_of(made, rng.integers(0, 131, 1), to_kernels)
    assert chosen[0, -1].tolist() == list(range(made.config.n_experts_per_token))
    router[...] = rng.standard_normal(router.shape).astype(router.dtype)
    router[:2] = np.nan
    _, _, chosen = step_of(made, rng.integers(0, 131, 1), to_kernels)
    if made.config.n_experts - 2 >= made.config.n_experts_per_token and name != "deepseek-moe":
        assert chosen[0, -1].min() >= 2


# ---- on a GPU: every family, skewed routers, many shapes ----------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MIXTURES)
def test_families(rng, name, dtype):
    for n_layers, context in ((2, 0), (3, 37), (2, 90)):
        config = small(name, n_layers, max_seq_len=128)
        for seed in range(2):
            check_at(mixture(config, dtype, seed), context, rng)


BASE = small(
    "mixtral",
    2,
    dim=256,
    hidden_dim=192,
    n_heads=4,
    n_kv_heads=2,
    n_experts=8,
    vocab_size=2500,
    max_seq_len=2048,
)


def skewed(kind: str, dtype: str) -> Weights:
    """A mixture that sends most of its tokens to few experts."""
    changes: dict[str, Any] = {"n_experts": 64, "n_experts_per_token": 4}
    if kind == "correction":
        changes |= {"router": "sigmoid_topk", "router_correction": True}
    else:
        changes |= {"router": "topk_softmax", "router_bias": True}
    made = mixture(dataclasses.replace(BASE, **changes), dtype)
    for layer in made.layers:
        if kind == "correction":
            layer.router_correction[37] = 5.0
        elif kind == "bias":
            layer.router_bias[37] = 20.0
        else:  # Zipf: the r-th expert's logit has a bias of -0.7 log r
            ranks = np.log(np.arange(1, 65))
            layer.router_bias[...] = (-0.7 * ranks).astype(layer.router_bias.dtype)
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["correction", "bias", "zipf"])
def test_skewed_routers(rng, kind, dtype):
    made = skewed(kind, dtype)
    check_at(made, 11, rng, n=5)
    _, _, chosen = step_of(made, rng.integers(0, 2500, 40), _to_gpu)
    if kind == "zipf":
        counts = np.bincount(chosen.ravel(), minlength=64)
        assert counts[:16].sum() > 1.5 * counts[-16:].sum()
    else:
        assert (chosen == 37).any(axis=-1).all()


FOUR_BITS = {"expert_dtype": "mxfp4"}
EVERYTHING = {
    "qk_norm": "full",
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "router_bias": True,
    "sinks": True,
    "window": 40,
    "window_every": 2,
    "swiglu_limit": 7.0,
    "router": "topk_softmax",
    "n_experts": 32,
    "n_experts_per_token": 4,
    "norm_rounding": "scale_first",
    "n_layers": 3,
}
COUNTS = {
    **{f"{n} experts": {"n_experts": n, "n_experts_per_token": min(n, 2)} for n in (1, 8, 60)},
    **{
        f"{n} experts": {"n_experts": n, "n_experts_per_token": 8, "hidden_dim": 40}
        for n in (64, 128, 256, 1024)
    },
    **{
        f"top {k} of 64": {"n_experts": 64, "n_experts_per_token": k, "hidden_dim": 48}
        for k in range(1, 9)
    },
    "all of 8": {"n_experts_per_token": 8},
    **{f"width {n}": {"hidden_dim": n, "dim": 128} for n in (8, 192, 768, 1408, 2880)},
    "dim 2048": {"dim": 2048, "n_layers": 1},
    "dim 2880": {"dim": 2880, "n_layers": 1, "n_experts": 4},
    "no whole lines": {"dim": 200, "hidden_dim": 200},
    "few CTAs have a part": {"dim": 64, "hidden_dim": 16, "n_experts_per_token": 1},
    "shared": {"shared_hidden_dim": 384},
    "shared, parts of 64": {"shared_hidden_dim": 320},
    "shared with a gate, 64 experts": {
        "shared_hidden_dim": 192,
        "shared_gated": True,
        "n_experts": 64,
        "hidden_dim": 64,
    },
    "much shared": {
        "shared_hidden_dim": 40960,
        "shared_gated": True,
        "hidden_dim": 2048,
        "n_layers": 1,
    },
    "dense layers": {"dense_layers": (0, 2), "dense_hidden_dim": 768, "n_layers": 4},
    "dense last": {"dense_layers": (1,), "dense_hidden_dim": 72, "shared_hidden_dim": 96},
    "groups": {
        "n_experts": 256,
        "n_experts_per_token": 8,
        "router": "sigmoid_topk",
        "router_correction": True,
        "router_groups": 8,
        "router_top_groups": 4,
        "routed_scale": 2.5,
        "hidden_dim": 24,
        "shared_hidden_dim": 48,
        "dense_layers": (0,),
        "dense_hidden_dim": 576,
    },
    "groups of softmax": {
        "n_experts": 64,
        "n_experts_per_token": 6,
        "norm_topk_prob": False,
        "router_groups": 8,
        "router_top_groups": 3,
        "routed_scale": 16.0,
    },
    **{f"4 bits, top {k}": FOUR_BITS | {"n_experts_per_token": k} for k in (1, 2, 3, 4)},
    "4 bits, one expert": FOUR_BITS | {"n_experts": 1, "n_experts_per_token": 1},
    # One tile, some, more than a stage has, and as many as gpt-oss; widths of half a tile.
    **{
        f"4 bits, {k} and {n}": FOUR_BITS | {"dim": k, "hidden_dim": n}
        for k, n in ((32, 64), (96, 1920), (2080, 32), (2880, 2880))
    },
    "4 bits among dense layers": FOUR_BITS
    | {"dense_layers": (1,), "dense_hidden_dim": 72, "n_layers": 3},
    "everything": EVERYTHING,
    "everything, 4 bits": EVERYTHING | FOUR_BITS,
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", COUNTS)
def test_shapes(rng, name):
    config = dataclasses.replace(BASE, **COUNTS[name])
    for i, dtype in enumerate(DTYPES):
        check_at(mixture(config, dtype), (0, 70, 300)[i], rng)


@pytest.mark.gpu
def test_a_mixture_draws_the_same_tokens_twice():
    from cufuse.generate import Sampling

    made = mixture(dataclasses.replace(BASE, n_experts=64, n_experts_per_token=8), "bf16")
    there, found = made.map(_to_gpu), []
    for _ in range(3):
        state = State(there, capacity=300)
        ids = _to_gpu(np.full(256, -1, np.int32))
        logits = MEGA.step_and_draw(there, state, state.tokens, Sampling(0.9, seed=3), ids=ids)
        state.check_fault()
        found.append((to_numpy(ids).tobytes(), to_numpy(logits).tobytes()))
    assert found[0] == found[1] == found[2]
