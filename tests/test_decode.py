"""A token through the decode kernels: `mega` in one launch and `fused` in one a phase."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mixture_oracle
import numpy as np
import pytest
from conftest import DTYPES, _to_gpu, relative_error, to_numpy
from models import CONFIGS, louder, oracle
from test_engines import LOGITS

from cufuse import device, engines, jit, ops, tiles, weights
from cufuse.config import Config
from cufuse.engines import _decode
from cufuse.generate import KernelStopped, Sampling
from cufuse.state import State
from cufuse.weights import Weights

MEGA, FUSED = engines.get("mega"), engines.get("fused")
BOTH = pytest.mark.parametrize("engine", [MEGA, FUSED], ids=["mega", "fused"])
FAMILIES = ("llama", "qwen3", "interleaved", "mistral")
MIXTURES = ("olmoe", "mixtral", "gpt-oss", "qwen2-moe", "deepseek-moe", "mxfp4")


# ---- small models -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A small model where the kernels run, and the same on the host."""

    to: Callable[[Any], Any]
    host: Weights
    weights: Weights

    @property
    def config(self) -> Config:
        return self.host.config

    @property
    def n_tokens(self) -> int:
        """How many to decode: a token of one layer takes the twin seconds."""
        return 2 if device.kind(self.weights.embedding) == "twin" else 9

    def state(self, capacity: int = 24) -> State:
        """An empty cache whose memory holds NaN."""
        state = State(self.weights, capacity=capacity)
        state.all_keys.fill(np.nan)
        state.all_values.fill(np.nan)
        return state

    def tokens(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return rng.integers(0, self.config.vocab_size, (1, n)).astype(np.int32)


@functools.cache
def _case(kind: str, name: str, dtype: str, n_layers: int) -> Case:
    config = dataclasses.replace(CONFIGS[name], n_layers=n_layers)
    host = louder(weights.random(config, dtype=DTYPES[dtype], kind="numpy"))
    to = device.twin if kind == "twin" else _to_gpu
    return Case(to, host, host.map(to))


def _cases(*on_twin: tuple[str, str, int], names: tuple[str, ...] = FAMILIES) -> Any:
    """Fixture values: what the twin takes the time for, and everything on a GPU."""
    on_gpu = [(name, dtype, 2) for name in names for dtype in DTYPES]
    return [
        pytest.param((kind, *values), marks=mark, id=f"{kind}-{values[0]}-{values[1]}")
        for kind, mark, chosen in (
            ("twin", pytest.mark.cpu_kernels, on_twin),
            ("cupy", pytest.mark.gpu, on_gpu),
        )
        for values in chosen
    ]


@pytest.fixture(params=_cases(("qwen3", "bf16", 2), ("mistral", "fp32", 1), ("llama", "fp16", 1)))
def case(request: pytest.FixtureRequest) -> Case:
    return _case(*request.param)


@pytest.fixture(params=_cases(("interleaved", "fp16", 1)))
def one_case(request: pytest.FixtureRequest) -> Case:
    """One model on the twin, the same in all tests that take it: it is compiled once."""
    return _case(*request.param)


@pytest.fixture(params=_cases(("interleaved", "fp16", 1), names=(*FAMILIES, *MIXTURES)))
def any_case(request: pytest.FixtureRequest) -> Case:
    """The same on the twin, and mixtures too on a GPU: for what is compared with no oracle."""
    return _case(*request.param)


def bits(x: Any) -> bytes:
    return to_numpy(x).tobytes()


def caches(state: State) -> tuple[bytes, bytes]:
    return bits(state.all_keys), bits(state.all_values)


def test_mega_and_fused_give_the_same_bits_behind_a_prompt(case, rng):
    n = case.n_tokens
    tokens = case.tokens(rng, 5 + n)
    wanted = oracle(case.host, tokens)
    states = {engine: case.state() for engine in (MEGA, FUSED)}
    for state in states.values():
        FUSED.step(case.weights, state, case.to(tokens[:, :5].copy()))
    for i in range(5, 5 + n):
        token = case.to(tokens[:, i : i + 1].copy())
        got = {e: to_numpy(e.step(case.weights, state, token)) for e, state in states.items()}
        assert got[MEGA].dtype == case.host.dtype
        assert relative_error(got[MEGA][0], wanted[0, i]) < LOGITS[case.host.dtype.name]
        assert bits(got[MEGA]) == bits(got[FUSED])
        assert caches(states[MEGA]) == caches(states[FUSED])
        for state in states.values():
            assert state.length == int(to_numpy(state.start)[0]) == i + 1


def test_several_tokens_in_a_launch_give_the_bits_of_one_by_one(any_case, rng):
    case, n, given = any_case, any_case.n_tokens + 1, 2
    tokens = case.tokens(rng, given)
    together, apart = case.state(), case.state()
    ids = case.to(np.full(n, -1, np.int32))
    logits = MEGA.step_and_draw(case.weights, together, case.to(tokens), Sampling(), ids=ids)
    one = case.to(np.empty((1, 1), np.int32))
    for i in range(n):
        if i < given:
            one[...] = case.to(tokens[:, i : i + 1].copy())
        last = FUSED.step_and_draw(case.weights, apart, one, Sampling(), ids=one.reshape(-1))
        if i >= given - 1:
            assert int(to_numpy(ids)[i]) == int(to_numpy(one)[0, 0])
    assert bits(logits) == bits(last)
    assert caches(together) == caches(apart)
    assert together.length == int(to_numpy(together.start)[0]) == n


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_all_logits_of_a_launch_are_those_of_one_by_one(rng, name):
    case = _case("cupy", name, "bf16", 2)
    tokens = case.tokens(rng, 9)
    got = MEGA.step(case.weights, case.state(), case.to(tokens), all_logits=True)
    assert relative_error(got, oracle(case.host, tokens)) < LOGITS["bfloat16"]
    state = case.state()
    for i in range(9):
        token = case.to(tokens[:, i : i + 1].copy())
        for all_logits in (False, True):
            one = FUSED.step(case.weights, state, token, all_logits=all_logits)
            assert one.shape == (1, 1, case.config.vocab_size)[not all_logits :]
            assert bits(one) == bits(got[:, i])
            state.length -= 1
            state.start -= np.int32(1)
        state.length += 1
        state.start += np.int32(1)


@BOTH
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.7, seed=11), Sampling(0.0, top_k=5), Sampling(1.3, top_p=0.9, seed=3)],
    ids=["greedy", "temperature", "greedy of 5", "top-p"],
)
def test_ids_are_those_that_ops_draw(any_case, rng, engine, sampling):
    case = any_case
    state, token = case.state(), case.to(case.tokens(rng, 1))
    n = case.n_tokens
    if engine is MEGA and n == 2:
        n = 1  # the other test of several tokens draws there too
    for _ in range(n):
        logits = engine.step_and_draw(case.weights, state, token, sampling, ids=token.reshape(-1))
        wanted = case.to(np.empty(1, np.int32))
        sampling.draw(logits, state, wanted)
        assert int(to_numpy(token)[0, 0]) == int(to_numpy(wanted)[0])
        likeliest = int(np.argmax(to_numpy(logits)[0]))
        assert sampling.temperature or int(to_numpy(wanted)[0]) == likeliest


def test_several_tokens_in_a_launch_draw_with_filters_as_one_by_one(any_case, rng):
    case, n, given = any_case, any_case.n_tokens + 2, 2
    sampling = Sampling(1.5, top_k=40, top_p=0.9, min_p=0.01, seed=int(rng.integers(2**63)))
    tokens = case.tokens(rng, given)
    together, apart = case.state(), case.state()
    ids = case.to(np.full(n, -1, np.int32))
    MEGA.step_and_draw(case.weights, together, case.to(tokens), sampling, ids=ids)
    one, wanted = case.to(np.empty((1, 1), np.int32)), case.to(np.empty(1, np.int32))
    for i in range(n):
        if i < given:
            one[...] = case.to(tokens[:, i : i + 1].copy())
        logits = FUSED.step_and_draw(case.weights, apart, one, sampling, ids=one.reshape(-1))
        if i >= given - 1:
            sampling.draw(logits, apart, wanted)
            assert int(to_numpy(ids)[i]) == int(to_numpy(one)[0, 0]) == int(to_numpy(wanted)[0])
    assert caches(together) == caches(apart)


# ---- the head alone, with logits as a test wants them -------------------------------------------


def head_of(config: Config, dtype: str, rng: np.random.Generator, *, rows: int = 0) -> Weights:
    """A model of one layer, of whose head only `rows` rows differ; all do when left out."""
    config = dataclasses.replace(config, n_layers=1, tied_embeddings=False)
    made = louder(weights.random(config, dtype=DTYPES[dtype], kind="numpy"))
    if rows:
        made.head[...] = made.head[rng.integers(0, rows, config.vocab_size)]
    return made


def draw_by_head(
    made: Weights, x: np.ndarray, sampling: Sampling, to: Callable[[Any], Any]
) -> tuple[np.ndarray, int]:
    """Logits [vocab_size] of a hidden state [dim] and the id drawn, by the phase of the head."""
    state = State(made, capacity=4)
    tile = tiles.decode(made.config, tiles.target_of(state.start), made.dtype)
    size = tiles.decode_words(made.config, made.dtype, tile)
    tag = made.config.n_layers  # of the last layer of a state's first token
    data = x.astype(made.dtype).view(np.uint32).astype(np.uint64)
    state.zeroed("words", (size,), np.uint64)[: len(data)] = to(data | np.uint64(tag << 32))
    ids = to(np.full(1, -7, np.int32))
    logits = _decode.launch(
        ("fused/decode.cu", "decode_phase"),
        made,
        state,
        state.tokens.reshape(-1),
        n_tokens=1,
        ids=ids,
        sampling=sampling,
        phase="head",
    )
    state.check_fault()
    return to_numpy(logits)[0], int(to_numpy(ids)[0])


def ops_draw(logits: np.ndarray, sampling: Sampling) -> int:
    """What the reference draws behind a first token."""
    options = dataclasses.asdict(sampling)
    return int(ops.sample(logits[None], step=1, **options)[0])


FILTERS = (
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 100},
    {"top_p": 1 - 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.97},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1e-9},
    {"top_k": 10**6, "min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
)


@pytest.mark.parametrize(
    ("vocab_size", "rows"), [(131, 0), (131, 9), (600, 40)], ids=["odd", "odd ties", "ties"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_head_draws_with_filters_what_ops_draw(to_kernels, rng, dtype, vocab_size, rows):
    config = dataclasses.replace(CONFIGS["interleaved"], vocab_size=vocab_size)
    host = head_of(config, dtype, rng, rows=rows)
    made, drawn = host.map(to_kernels), []
    # The twin takes a second for each.
    on_gpu = device.is_gpu(made.embedding)
    for options in FILTERS if on_gpu else FILTERS[list(DTYPES).index(dtype) :: len(DTYPES)]:
        x = rng.standard_normal(config.dim).astype(np.float32)
        seed = int(rng.integers(2**63))
        sampling = Sampling(float(rng.choice([0.3, 1.0, 2.0])), seed=seed, **options)
        logits, token = draw_by_head(made, x, sampling, to_kernels)
        assert token == ops_draw(logits, sampling), sampling
        assert not rows or len(np.unique(logits)) <= rows
        drawn.append(token)
    assert len(set(drawn)) > 1


def test_the_head_says_with_filters_that_nothing_can_be_drawn(to_kernels, rng):
    config, sampling = CONFIGS["interleaved"], Sampling(1.0, top_k=5, top_p=0.9, min_p=0.1)
    x = np.ones(config.dim, np.float32)
    for value, where, wanted in ((np.nan, 77, -1), (-np.inf, slice(None), -1), (np.inf, 130, 130)):
        host = head_of(config, "fp32", rng)
        host.head[where, 3] = value
        logits, token = draw_by_head(host.map(to_kernels), x, sampling, to_kernels)
        assert token == wanted == ops_draw(logits, sampling)
    host.head[:, 3] = -np.inf
    host.head[[5, 9], 3] = 0.5
    drawn = set()
    for seed in range(8):
        likely = dataclasses.replace(sampling, temperature=1e3, seed=seed)
        logits, token = draw_by_head(host.map(to_kernels), x, likely, to_kernels)
        assert token == ops_draw(logits, likely)
        drawn.add(token)
    assert drawn <= {5, 9}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [5000, 32003, 151936])
def test_the_head_draws_with_filters_from_large_vocabularies(rng, dtype, vocab_size):
    config = dataclasses.replace(CONFIGS["interleaved"], vocab_size=vocab_size)
    made = head_of(config, dtype, rng).map(_to_gpu)
    for options in (*FILTERS, {"top_k": 3000}, {"top_k": 50, "top_p": 0.9}):
        for _ in range(5):
            x = rng.standard_normal(config.dim).astype(np.float32)
            seed = int(rng.integers(2**63))
            sampling = Sampling(float(rng.choice([0.3, 1.0, 2.0])), seed=seed, **options)
            logits, token = draw_by_head(made, x, sampling, _to_gpu)
            assert token == ops_draw(logits, sampling), sampling


def test_fused_draws_for_what_these_kernels_do_not_take(to_kernels, rng):
    made = louder(weights.random(CONFIGS["olmoe"], dtype=np.float32)).map(to_kernels)
    tokens = to_kernels(rng.integers(0, 131, (2, 3)).astype(np.int32))
    ids = to_kernels(np.full(2, -1, np.int32))
    state = State(made, batch=2, capacity=4)
    logits = FUSED.step_and_draw(made, state, tokens, Sampling(), ids=ids)
    assert (to_numpy(ids) == np.argmax(to_numpy(logits), axis=1)).all()
    assert state.length == 3


# ---- launches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n_layers", "phases"),
    [("qwen3", 1, 6), ("qwen3", 3, 16), ("qwen2-moe", 2, 13), ("deepseek-moe", 3, 18)],
)
def test_mega_launches_once_and_fused_once_a_phase(name, n_layers, phases):
    case = _case("twin", name, "bf16", n_layers)
    c = case.config
    for engine, wanted in ((MEGA, 1), (FUSED, phases)):
        state = State(case.weights, capacity=8)
        state.length = 4
        with jit.record(dry=True) as record:
            engine.step(case.weights, state, state.tokens)
        assert len(record.launches) == wanted
        for options in ({}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}):
            sampling = Sampling(0.8, **options)
            with jit.record(dry=True) as drawing:
                engine.step_and_draw(
                    case.weights, _at(state, 4), state.tokens, sampling, ids=state.ids.reshape(-1)
                )
            assert len(drawing.launches) == wanted
        # Both read the same: what is packed here has whole panels of 16 rows.
        assert record.size_bytes == _decode.size_bytes(case.weights, _at(state, 4), 1)
        unread = case.weights.embedding.nbytes
        if c.n_experts:
            layers = [layer for layer in case.weights.layers if layer.router is not None]
            experts = sum(a.nbytes for layer in layers for a in (layer.gate, layer.up, layer.down))
            unread += experts * (c.n_experts - c.n_experts_per_token) // c.n_experts
        assert record.size_bytes > case.weights.size_bytes - unread


def _at(state: State, length: int) -> State:
    state.length = length
    return state


def test_a_step_takes_the_weights_as_they_lie():
    case = _case("twin", "llama", "fp16", 1)
    with jit.record() as record:
        arrays = _decode.arrays(case.weights)
    assert _decode.arrays(case.weights) is arrays and not record.launches
    layer = case.weights.layers[0]
    for name in ("qkv", "out", "gate_up", "down"):
        assert device.address(arrays[name]) == device.address(getattr(layer, name).array)
    assert device.address(arrays["head"]) == device.address(case.weights.head.array)
    assert arrays["sinks"] is None and arrays["qkv_bias"] is None


@pytest.mark.parametrize(("name", "kept"), [("deepseek-moe", 2), ("qwen2-moe", 1)])
def test_a_cut_mixture_reads_the_first_layers(name, kept):
    whole = _case("twin", name, "bf16", 3).weights
    c = whole.config.cut(kept)
    cut = dataclasses.replace(whole, config=c, layers=whole.layers[:kept])
    alone = louder(weights.random(c, dtype=DTYPES["bf16"], kind="numpy")).map(device.twin)
    wanted = _decode.arrays(alone)
    for name, array in _decode.arrays(cut).items():
        assert (array is None) == (wanted[name] is None), name
        if array is not None:
            got = getattr(array, "array", array)
            np.testing.assert_array_equal(
                to_numpy(got).ravel(), to_numpy(wanted[name]).ravel(), err_msg=name
            )
        if array is not None and name in whole.stacks:
            assert device.address(array) == device.address(whole.stacks[name])


def test_a_cut_model_reads_the_first_layers(rng):
    whole = _case("twin", "qwen3", "bf16", 3).weights
    cut = dataclasses.replace(whole, config=whole.config.cut(1), layers=whole.layers[:1])
    for name, array in _decode.arrays(cut).items():
        of_all = _decode.arrays(whole)[name]
        if name in whole.stacks:
            assert array.size * 3 == of_all.size
            assert device.address(array) == device.address(of_all)
        else:
            assert array is of_all


@BOTH
def test_a_launch_that_gives_up_says_so_and_the_next_one_is_right(
    one_case, rng, engine, monkeypatch
):
    case = one_case
    tokens = case.tokens(rng, 2)
    state = case.state()
    ids = case.to(np.full(1, -1, np.int32))
    first, second = (case.to(tokens[:, i : i + 1].copy()) for i in range(2))
    FUSED.step(case.weights, state, first)
    state.check_fault()  # there is none

    if device.kind(state.start) == "twin":
        with monkeypatch.context() as none:
            none.setattr(_decode, "_TWIN_BUDGET_SECONDS", 0.0)
            MEGA.step_and_draw(case.weights, state, second, Sampling(), ids=ids)
    else:  # where nothing waits for long: a thread says that it has
        state.control[1] = 1
        MEGA.step_and_draw(case.weights, state, second, Sampling(), ids=ids)
    assert int(to_numpy(ids)[0]) == -2
    # Until the host has seen it every launch says so.
    ids.fill(-1)
    FUSED.step_and_draw(case.weights, state, second, Sampling(), ids=ids)
    assert int(to_numpy(ids)[0]) == -2
    drawn = case.to(np.full(3, -1, np.int32))
    filtered = Sampling(1.0, top_k=20, top_p=0.9)
    MEGA.step_and_draw(case.weights, state, second, filtered, ids=drawn)
    assert to_numpy(drawn).tolist() == [-2] * 3
    with pytest.raises(KernelStopped, match="gave up waiting when its time was over"):
        state.check_fault()
    assert state.length == int(to_numpy(state.start)[0]) == 1

    logits = engine.step(case.weights, state, second)
    state.check_fault()
    wanted = oracle(case.host, tokens)[0, 1]
    assert relative_error(logits[0], wanted) < LOGITS[case.host.dtype.name]
    assert state.length == int(to_numpy(state.start)[0]) == 2


def test_a_step_interrupted_between_its_launches_leaves_nothing_that_looks_new(
    one_case, rng, monkeypatch
):
    case, launch = one_case, _decode.launch
    tokens = case.tokens(rng, 2)
    state = case.state()
    first, second = (case.to(tokens[:, i : i + 1].copy()) for i in range(2))
    FUSED.step(case.weights, state, first)
    before = int(to_numpy(state.control)[0])

    def interrupted(*args: Any, **options: Any) -> Any:
        if options["phase"] == "gate_up":
            raise KeyboardInterrupt
        return launch(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(_decode, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            FUSED.step(case.weights, state, second)
    assert state.length == int(to_numpy(state.start)[0]) == 1

    logits = FUSED.step(case.weights, state, second)
    wanted = oracle(case.host, tokens)[0, 1]
    assert relative_error(logits[0], wanted) < LOGITS[case.host.dtype.name]
    after = int(to_numpy(state.control)[0])
    assert after == before + 2 * case.config.n_layers  # the tags of the lost step are left out


# ---- what mega does not take --------------------------------------------------------------------


def test_mega_names_what_it_does_not_take():
    def wanted(name: str, to: Callable[[Any], Any], message: str, batch: int = 1) -> None:
        made = weights.random(CONFIGS[name], dtype=np.float32).map(to)
        state = State(made, batch=batch, capacity=4)
        with pytest.raises(device.Unsupported, match=message):
            MEGA.step(made, state, state.tokens)
        assert state.length == 0

    wanted("bert", device.twin, "engine mega: bert has layernorm; use engine fused")
    wanted("llama", device.twin, "engine mega: the batch is 2, wanted 1; use engine fused", batch=2)
    wanted("llama", np.asarray, "engine mega: the model has NumPy arrays .* use engine reference")


@BOTH
def test_full_cache_raises_before_anything_is_launched(engine):
    case = _case("twin", "llama", "fp16", 1)
    state = _at(case.state(4), 4)
    with (
        jit.record(dry=True) as record,
        pytest.raises(ValueError, match="1 more tokens do not fit"),
    ):
        engine.step(case.weights, state, state.tokens)
    assert state.length == 4 and not record.launches


# ---- many shapes and contexts, on a GPU ---------------------------------------------------------

WIDE = dataclasses.replace(
    CONFIGS["qwen3"],
    name="wide",
    dim=640,
    hidden_dim=1536,
    n_heads=4,
    n_kv_heads=2,
    head_dim=64,
    vocab_size=5000,
    max_seq_len=20000,
)
CONTEXTS = (0, 1, 63, 64, 65, 127, 128, 255, 256, 257, 511, 513, 1000, 1024, 1025, 4097, 8191, 8192)


def check_at(
    made: Weights,
    context: int,
    rng: np.random.Generator,
    to: Callable[[Any], Any] = _to_gpu,
    n: int = 3,
    *,
    by_phases: bool = True,
) -> None:
    """Some tokens behind a random cache: float64, and the same bits however they are launched.

    by_phases: launch them one by one too, in mega and in fused, whose phases are kernels to compile

    Of a mixture float64 goes to the experts that the kernel chose.
    """
    config = made.config
    there = made.map(to)
    shape = State(made, capacity=context + n).all_keys.shape
    keys, values = (rng.standard_normal(shape, np.float32).astype(made.dtype) for _ in range(2))

    tokens = rng.integers(0, config.vocab_size, (1, n)).astype(np.int32)

    def oracle() -> np.ndarray:
        exact = made.map(lambda array: array.astype(np.float64))
        state = _at(State(exact, capacity=context + n), context)
        state.all_keys[...], state.all_values[...] = keys, values
        state.start[...] = context
        return engines.get("reference").step(exact, state, tokens, all_logits=True)

    def again() -> State:
        state = _at(State(there, capacity=context + n), context)
        state.start.fill(context)
        for cache, rows in ((state.all_keys, keys), (state.all_values, values)):
            cache[...] = to(rows)
            cache[..., context:, :] = np.nan
        return state

    state = again()
    if config.n_experts:
        mixture_oracle.forget(state, n)
    together = to_numpy(MEGA.step(there, state, to(tokens), all_logits=True))
    if config.n_experts:
        experts = mixture_oracle.chosen(state, n)
        with mixture_oracle.follows(config, experts, made.dtype):
            wanted = oracle()
    else:
        wanted = oracle()
    for i in range(n):
        assert relative_error(together[0, i], wanted[0, i]) < LOGITS[made.dtype.name]
    filled = caches(state)
    for engine in (MEGA, FUSED) if by_phases else ():
        state = again()
        for i in range(n):
            one = engine.step(there, state, to(tokens[:, i : i + 1].copy()))
            assert bits(one) == together[:, i].tobytes(), f"{engine.__name__}, token {i}"
            if config.n_experts:
                assert mixture_oracle.chosen(state, 1).tolist() == experts[i : i + 1].tolist()
        assert caches(state) == filled


# head_dim, dtype, context, and what else the model has.
NARROW = {
    "no keys": (64, "bf16", 0, {}),
    "whole chunks": (128, "fp16", 64, {}),
    "a key behind a chunk": (64, "bf16", 65, {"sinks": True}),
    "splits": (128, "bf16", 150, {}),
    "a window": (64, "fp16", 200, {"window": 77}),
    "a window in a chunk": (128, "bf16", 61, {"window": 9, "sinks": True}),
    "head_dim 32": (32, "fp16", 97, {"n_heads": 8}),
    "head_dim 80": (80, "bf16", 45, {}),
    "head_dim 192": (192, "bf16", 27, {"n_heads": 1}),
    "head_dim 256": (256, "fp16", 35, {"n_heads": 1, "window": 21}),
    "float32": (80, "fp32", 45, {"window": 30}),
}


def narrow(head_dim: int, dtype: str, changes: dict[str, Any]) -> Weights:
    """A model of one layer that is hardly more than its attention."""
    sizes = {"dim": 32, "hidden_dim": 32, "n_kv_heads": 1, "n_layers": 1, "vocab_size": 48}
    c = dataclasses.replace(WIDE, **{**sizes, "head_dim": head_dim, **changes})
    return louder(weights.random(c, dtype=DTYPES[dtype]))


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("name", NARROW)
def test_attention_over_a_cache(rng, name):
    head_dim, dtype, context, changes = NARROW[name]
    check_at(narrow(head_dim, dtype, changes), context, rng, device.twin, n=2)


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("changes", [{"copies": "async"}, {"probe": "first"}])
def test_attention_over_a_cache_with_another_tile(rng, monkeypatch, changes):
    decode = tiles.decode
    monkeypatch.setattr(
        tiles, "decode", lambda *args: dataclasses.replace(decode(*args), **changes)
    )
    check_at(narrow(128, "bf16", {}), 77, rng, device.twin, n=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_contexts(rng, dtype):
    made = weights.random(WIDE, dtype=DTYPES[dtype])
    for context in CONTEXTS:
        check_at(made, context, rng)


SHAPES = {
    **{f"head_dim {d}": {"head_dim": d} for d in (32, 80, 96, 128, 256)},
    **{f"group of {g}": {"n_heads": g, "n_kv_heads": 1} for g in range(1, 9)},
    "many KV heads": {"n_heads": 16, "n_kv_heads": 16},
    "dim 576": {"dim": 576, "n_heads": 9, "n_kv_heads": 3},
    "dim 5120": {"dim": 5120, "n_layers": 1, "head_dim": 128, "n_heads": 8},
    "hidden_dim 17408": {"hidden_dim": 17408, "n_layers": 1},
    "small vocabulary": {"vocab_size": 131},
    "odd vocabulary": {"vocab_size": 132 * 16 * 2 + 17},
    "no QK-norm": {"qk_norm": "none"},
    "window 5": {"window": 5},
    "window 333": {"window": 333},
    "everything": {
        "qk_norm": "none",
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "sinks": True,
        "window": 200,
        "window_every": 2,
        "n_layers": 3,
        "rope_partial": 0.5,
        "rope_interleaved": True,
        "norm_rounding": "scale_first",
        "activation": "gelu_tanh",
        "tied_embeddings": True,
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(rng, name):
    dtype = list(DTYPES.values())[list(SHAPES).index(name) % 3]
    made = weights.random(dataclasses.replace(WIDE, **SHAPES[name]), dtype=dtype)
    for context in (3, 1100):
        check_at(made, context, rng)
