"""The engines against the reference in float64: every family, prompts, tokens, batches."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DTYPES, relative_error, to_numpy
from models import CONFIGS, oracle, small

from cufuse import device, engines, jit
from cufuse.generate import Decoder, Sampling
from cufuse.state import State

KERNEL_ENGINES = ("unfused", "fused")
ON_NUMPY = ("reference", *KERNEL_ENGINES)  # mega is a kernel and nothing else: test_decode.py
DECODERS = [name for name, config in CONFIGS.items() if config.causal]

# Relative L2 error of all logits of a two-layer model: a few roundings of each op behind another.
LOGITS = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}


def moved(weights, to):
    return weights.map(to)


def few(to, on_gpu):
    """Tokens to decode one by one: the twin takes seconds for one (test_decode.py has more)."""
    return 2 if to is device.twin else on_gpu


def check_prompt(engine, name, rng, to):
    made = small(name)
    tokens = rng.integers(0, made.config.vocab_size, (1, 11)).astype(np.int32)
    wanted = oracle(made, tokens)
    weights = moved(made, to)
    state = State(weights, capacity=16)
    got = engines.get(engine).step(weights, state, to(tokens), all_logits=True)
    assert relative_error(got, wanted) < LOGITS["float32"]
    assert state.length == 11 and int(to_numpy(state.start)[0]) == 11


@pytest.mark.parametrize("engine", KERNEL_ENGINES)
@pytest.mark.parametrize("name", CONFIGS)
def test_prompt_matches_float64(to, rng, engine, name):
    check_prompt(engine, name, rng, to)


@pytest.mark.parametrize("name", CONFIGS)
def test_reference_in_float32_matches_float64(rng, name):
    check_prompt("reference", name, rng, np.asarray)


@pytest.mark.parametrize("engine", KERNEL_ENGINES)
@pytest.mark.parametrize("name", DECODERS)
def test_token_by_token_matches_float64(to_kernels, rng, engine, name):
    made = small(name)
    n = 4 + few(to_kernels, 5)
    tokens = rng.integers(0, made.config.vocab_size, (1, n)).astype(np.int32)
    wanted = oracle(made, tokens)
    weights = moved(made, to_kernels)
    state = State(weights, capacity=12)
    step = engines.get(engine).step
    step(weights, state, to_kernels(tokens[:, :4].copy()))
    for i in range(4, n):
        got = step(weights, state, to_kernels(tokens[:, i : i + 1].copy()))
        assert relative_error(got[0], wanted[0, i]) < LOGITS["float32"]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("engine", KERNEL_ENGINES)
def test_half_precision(to_kernels, rng, engine, dtype):
    made = small("llama", DTYPES[dtype])
    tokens = rng.integers(0, made.config.vocab_size, (1, 7)).astype(np.int32)
    wanted = oracle(made, tokens)
    weights = moved(made, to_kernels)
    got = engines.get(engine).step(
        weights, State(weights, capacity=8), to_kernels(tokens), all_logits=True
    )
    assert got.dtype == np.dtype(DTYPES[dtype])
    assert relative_error(got, wanted) < LOGITS[np.dtype(DTYPES[dtype]).name]


@pytest.mark.parametrize("engine", KERNEL_ENGINES)
def test_sequences_of_a_batch_do_not_mix(to_kernels, rng, engine):
    made = small("qwen3")
    tokens = rng.integers(0, made.config.vocab_size, (3, 6)).astype(np.int32)
    wanted = oracle(made, tokens)
    weights = moved(made, to_kernels)
    state = State(weights, batch=3, capacity=8)
    step = engines.get(engine).step
    got = step(weights, state, to_kernels(tokens[:, :5].copy()))
    assert relative_error(got, wanted[:, 4]) < LOGITS["float32"]
    got = step(weights, state, to_kernels(tokens[:, 5:].copy()))
    assert relative_error(got, wanted[:, 5]) < LOGITS["float32"]


@pytest.mark.parametrize("engine", KERNEL_ENGINES)
@pytest.mark.parametrize("name", ["llama", "olmoe"])
def test_same_bits_from_run_to_run(to_kernels, rng, engine, name):
    weights = moved(small(name, DTYPES["bf16"]), to_kernels)
    tokens = to_kernels(rng.integers(0, 131, (1, 3)).astype(np.int32))
    runs = []
    for seed in (1, 2):
        with jit.twin_seed(seed):
            got = engines.get(engine).step(weights, State(weights, capacity=4), tokens)
        runs.append(to_numpy(got).tobytes())
    assert runs[0] == runs[1]


@pytest.mark.parametrize("engine", KERNEL_ENGINES)
def test_greedy_ids_equal_reference(to_kernels, rng, engine):
    made = small("llama")
    prompt = rng.integers(0, 131, (1, 5)).astype(np.int32)
    ids = {}
    for name, weights in (("reference", made), (engine, moved(made, to_kernels))):
        decoder = Decoder(engines.get(name).step, weights, State(weights, capacity=16))
        decoder.prefill(prompt)
        ids[name] = [int(decoder.ids()[0])]
        for _ in range(few(to_kernels, 8)):
            decoder.decode()
            ids[name].append(int(decoder.ids()[0]))
    assert ids[engine] == ids["reference"]


@pytest.mark.gpu
@pytest.mark.parametrize("engine", KERNEL_ENGINES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_graph_replay_gives_the_same_ids(rng, engine, temperature):
    import cupy

    weights = moved(small("olmoe"), cupy.asarray)
    prompt = rng.integers(0, 131, (1, 5)).astype(np.int32)
    runs = []
    for graph in (False, True):
        sampling = Sampling(temperature, top_k=20, seed=3)
        state = State(weights, capacity=64)
        decoder = Decoder(engines.get(engine).step, weights, state, sampling, graph=graph)
        decoder.prefill(prompt)
        ids = [int(decoder.ids()[0])]
        for _ in range(40):
            decoder.decode()
            ids.append(int(decoder.ids()[0]))
        runs.append(ids)
        # Every replay moved on; the likeliest tokens of a random model may still be few.
        assert int(to_numpy(state.start)[0]) == state.length == 5 + 40
    assert runs[0] == runs[1]
    assert temperature == 0 or len(set(runs[0])) > 3


@pytest.mark.parametrize("engine", ON_NUMPY)
def test_full_cache_raises_and_keeps_the_state(rng, engine):
    weights = small("llama")
    state = State(weights, capacity=4)
    step = engines.get(engine).step
    step(weights, state, np.zeros((1, 3), np.int32))
    before = state.k_cache[0].copy()
    with pytest.raises(ValueError, match="2 more tokens do not fit: the cache holds 3 of 4"):
        step(weights, state, np.zeros((1, 2), np.int32))
    assert state.length == 3 and (state.k_cache[0] == before).all()


def test_step_rejects_wrong_tokens():
    weights = small("llama")
    state = State(weights, capacity=4)
    step = engines.get("fused").step
    with pytest.raises(ValueError, match=r"tokens is \[2, 1\], wanted \[batch, q_len\] = \[1, n\]"):
        step(weights, state, np.zeros((2, 1), np.int32))
    with pytest.raises(TypeError, match="dtype int64, wanted int32"):
        step(weights, state, np.zeros((1, 1), np.int64))


def test_unknown_engine_names_the_others():
    with pytest.raises(ValueError, match="engine is 'turbo', wanted one of reference"):
        engines.get("turbo")


def test_fused_launches_a_few_a_layer():
    weights = moved(small("llama"), device.twin)
    tokens = device.twin(np.zeros((1, 1), np.int32))
    counts = {}
    for engine in KERNEL_ENGINES:
        with jit.record(dry=True) as record:
            engines.get(engine).step(weights, State(weights, capacity=4), tokens)
        counts[engine] = len(record.launches)
    assert counts["fused"] == 5 * 2 + 1  # five a layer; the head
    assert counts["unfused"] > 2 * counts["fused"]


PACKED = "packed_matmul_rows"  # gate and up, where they are packed together, are one product
PRODUCTS = f"{PACKED} {PACKED} {PACKED}"
BIASED = f"{PACKED} add {PACKED} add {PACKED} add"
CORE = f"append scores_rows softmax values_rows {PACKED}"
UNFUSED_LAYERS = {
    "llama": f"rmsnorm {PRODUCTS} rope rope {CORE} add "
    f"rmsnorm {PACKED} activation mul {PACKED} add",
    "olmoe": f"rmsnorm {PRODUCTS} rmsnorm rmsnorm rope rope {CORE} add "
    "rmsnorm router_logits softmax topk "
    "expert_matmul expert_matmul activation mul expert_matmul combine add",
    "gpt-oss": f"rmsnorm {BIASED} rope rope {CORE} add add "
    "rmsnorm router_logits topk expert_matmul expert_matmul glu expert_matmul combine add",
    "qwen2-moe": f"rmsnorm {BIASED} rope rope {CORE} add "
    "rmsnorm router_logits softmax topk "
    "expert_matmul expert_matmul activation mul expert_matmul combine "
    "matmul_rows matmul_rows activation mul matmul_rows router_logits activation topk combine add",
    "deepseek-moe": f"rmsnorm {PRODUCTS} rope rope {CORE} add "  # a dense layer comes first
    "rmsnorm matmul_rows matmul_rows activation mul matmul_rows add; "
    f"rmsnorm {PRODUCTS} rope rope {CORE} add "
    "rmsnorm router_logits activation add topk "
    "expert_matmul expert_matmul activation mul expert_matmul combine "
    "matmul_rows matmul_rows activation mul matmul_rows add add",
    "bert": f"{BIASED} {CORE} add add layernorm ".replace(PACKED, "matmul_rows")
    + "matmul_rows add activation matmul_rows add add layernorm",
}


@pytest.mark.parametrize("name", UNFUSED_LAYERS)
def test_unfused_launches_every_operation_by_itself(name):
    weights = moved(small(name), device.twin)
    tokens = device.twin(np.zeros((1, 1), np.int32))
    with jit.record(dry=True) as record:
        engines.get("unfused").step(weights, State(weights, capacity=4), tokens)
    launched = [launch.kernel for launch in record.launches]
    layers = UNFUSED_LAYERS[name].split("; ")
    layers = " ".join(layers * (2 // len(layers)))
    encoder, product = name == "bert", PACKED
    wanted = f"embed layernorm {layers}" if encoder else f"embed {layers} rmsnorm {product}"
    assert launched == [*wanted.split(), "advance"]


@pytest.mark.parametrize("engine", ON_NUMPY)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_unused_cache_slots_may_hold_anything(to, rng, engine, name):
    made = small(name)
    tokens = rng.integers(0, made.config.vocab_size, (1, 9)).astype(np.int32)
    wanted = oracle(made, tokens)
    weights = moved(made, to if engine != "reference" else np.asarray)
    state = State(weights, capacity=20)
    for cache in (*state.k_cache, *state.v_cache):
        cache.fill(np.nan)
    step, upload = engines.get(engine).step, state.upload
    got = step(weights, state, upload(tokens[:, :8].copy()))
    assert relative_error(got[0], wanted[0, 7]) < LOGITS["float32"]
    got = step(weights, state, upload(tokens[:, 8:].copy()))
    assert relative_error(got[0], wanted[0, 8]) < LOGITS["float32"]
