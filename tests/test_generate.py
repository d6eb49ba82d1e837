"""The token loop around a step that is easy to predict: launches, draws, kernels that give up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import DTYPES, to_numpy
from graph_nodes import launched
from models import CONFIGS, small

from cufuse import engines, jit, ops
from cufuse import generate as generate_module
from cufuse.generate import Decoder, KernelStopped, Prefill, Sampling, generate, piece_rows
from cufuse.state import State

VOCAB = CONFIGS["llama"].vocab_size


class Engine:
    """Draws the token before times 3 plus its own position; counts launches and can give up."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.launches: list[int] = []  # tokens of each
        self.fails_at = fails_at

    def follow(self, token: int, position: int) -> int:
        return (3 * token + position) % VOCAB

    def step(self, weights, state, tokens):
        """Append tokens; the logits name what follows the last one."""
        self.launches.append(tokens.shape[1])
        logits = np.zeros((1, VOCAB), np.float32)
        if self._gives_up(state):
            return logits
        state.length += tokens.shape[1]
        state.start += np.int32(tokens.shape[1])
        logits[0, self.follow(int(tokens[0, -1]), state.length)] = 1
        return logits

    def step_and_draw(self, weights, state, tokens, sampling, *, ids):
        self.launches.append(len(ids))
        if self._gives_up(state):
            ids[...] = -2
            return
        token, position = int(tokens[0, 0]), state.length
        for i in range(len(ids)):
            token = self.follow(token, position + i + 1)
            ids[i] = token
        state.length += len(ids)
        state.start += np.int32(len(ids))

    def _gives_up(self, state) -> bool:
        """As the kernel does: from the launch that fails on until the host has cleared the word."""
        if len(self.launches) - 1 == self.fails_at:
            state.control[1] = 1
        return bool(state.control[1])

    def wanted(self, prompt: list[int], n: int) -> list[int]:
        ids, token = [], prompt[-1]
        for i in range(n):
            token = self.follow(token, len(prompt) + i)
            ids.append(token)
        return ids

    def decoder(self, tokens_per_launch: int, *, capacity: int = 32, draws: bool = True) -> Decoder:
        weights = small("llama")
        state = State(weights, capacity=capacity, tokens_per_launch=tokens_per_launch)
        return Decoder(
            self.step, weights, state, step_and_draw=self.step_and_draw if draws else None
        )


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("limit", [1, 2, 6, 7, 8])
def test_ids_do_not_depend_on_the_tokens_of_a_launch(n, limit):
    engine, prompt = Engine(), [5, 6]
    ids = generate(
        engine.step,
        small("llama"),
        prompt,
        max_new_tokens=limit,
        sampling=Sampling(),
        step_and_draw=engine.step_and_draw,
        tokens_per_launch=n,
    )
    assert list(ids) == engine.wanted(prompt, limit)
    whole, rest = divmod(limit - 1, n)
    assert engine.launches == [2, *[n] * whole, *[rest] * bool(rest)]


def test_generation_ends_at_the_end_of_the_context():
    engine, prompt = Engine(), [1] * (CONFIGS["llama"].max_seq_len - 6)
    ids = generate(
        engine.step,
        small("llama"),
        prompt,
        max_new_tokens=100,
        sampling=Sampling(),
        step_and_draw=engine.step_and_draw,
        tokens_per_launch=4,
    )
    assert list(ids) == engine.wanted(prompt, 6)
    assert engine.launches == [len(prompt), 4, 1]


def test_what_a_launch_draws_behind_a_stop_id_is_dropped():
    engine, prompt = Engine(), [5, 6]
    wanted = engine.wanted(prompt, 12)
    stop = next(i for i in range(5, 12) if wanted[i] not in wanted[:i])  # inside a launch of 4
    ids = generate(
        engine.step,
        small("llama"),
        prompt,
        max_new_tokens=30,
        sampling=Sampling(),
        stop_ids=(wanted[stop],),
        step_and_draw=engine.step_and_draw,
        tokens_per_launch=4,
    )
    assert list(ids) == wanted[:stop]
    assert engine.launches == [2, *[4] * -(-stop // 4)]


@pytest.mark.parametrize("n", [1, 3])
def test_state_counts_what_was_launched(n):
    engine, prompt = Engine(), [5, 6, 7]
    decoder = engine.decoder(n, capacity=3 + 2 * n + 1)
    decoder.prefill(np.array([prompt], np.int32))
    decoder.decode()
    decoder.decode(1)
    assert decoder.state.length == int(decoder.state.start[0]) == 3 + n + 1
    assert decoder.n_drawn == 1 + n + 1
    drawn = [int(decoder.ids(i)[0]) for i in range(decoder.n_drawn)]
    assert drawn == engine.wanted(prompt, n + 2) and int(decoder.ids()[0]) == drawn[-1]
    with pytest.raises(ValueError, match=f"n is {n + 1}, wanted 1 to {n}, the tokens of a launch"):
        decoder.decode(n + 1)
    decoder.decode()
    with pytest.raises(ValueError, match="more tokens do not fit"):
        decoder.decode()
    assert decoder.state.length == 3 + 2 * n + 1 and decoder.n_drawn == 2 + 2 * n


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_decoder_goes_on_after_a_kernel_gave_up(n, draws, fails_at):
    """Two launches behind the one that fails are enqueued before anybody looks."""
    if n > 1 and not draws:
        with pytest.raises(
            ValueError, match="tokens_per_launch is 3, wanted 1: this step does not"
        ):
            Engine().decoder(n, draws=False)
        return
    engine, prompt = Engine(fails_at), [5, 6, 7]
    decoder = engine.decoder(n, draws=draws)
    decoder.prefill(np.array([prompt], np.int32))
    for _ in range(fails_at + 2):
        decoder.decode()
    with pytest.raises(KernelStopped, match="gave up waiting when its time was over; is "):
        decoder.ids()
    state = decoder.state
    before = 0 if fails_at == 0 else 3 + (fails_at - 1) * n
    assert state.length == int(state.start[0]) == before and not state.control.any()
    if fails_at == 0:
        assert decoder.n_drawn == 0
        decoder.prefill(np.array([prompt], np.int32))
    while decoder.n_drawn < 1 + 4 * n:
        decoder.decode()
    drawn = [int(decoder.ids(i)[0]) for i in range(decoder.n_drawn)]
    assert drawn == engine.wanted(prompt, 1 + 4 * n)


def test_draws_before_the_launch_that_gave_up_are_good():
    engine = Engine(fails_at=2)
    decoder = engine.decoder(1)
    decoder.prefill(np.array([[5]], np.int32))
    decoder.decode()
    decoder.decode()
    assert [int(decoder.ids(i)[0]) for i in range(2)] == engine.wanted([5], 2)
    with pytest.raises(KernelStopped):
        decoder.ids(2)


def test_a_nan_is_told_from_a_kernel_that_gave_up():
    decoder = Engine().decoder(1)
    decoder.prefill(np.array([[5]], np.int32))
    decoder._launches[-1].drawn[0] = -1
    with pytest.raises(RuntimeError, match="the logits hold a NaN") as raised:
        decoder.ids()
    assert not isinstance(raised.value, KernelStopped)


# ---- pieces of a prompt -------------------------------------------------------------------------


class Captured:
    """A stream that can be captured and what it makes of that: a list of calls, run by `launch`."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] | None = None  # while it is captured
        self.replayed: list[int] = []  # calls of each graph that was launched

    def begin_capture(self) -> None:
        assert self.calls is None
        self.calls = []

    def end_capture(self) -> SimpleNamespace:
        calls, self.calls = self.calls, None

        def launch(stream):
            assert stream is self
            self.replayed.append(len(calls))
            for call in calls:
                call()

        return SimpleNamespace(launch=launch)

    def enqueue(self, call: Callable[[], None]) -> None:
        if self.calls is None:
            call()
        else:
            self.calls.append(call)


class Sums:
    """A step whose logits say which tokens it was given, and behind how many others."""

    def __init__(self, stream: Captured) -> None:
        self.stream = stream
        self.plain: list[int] = []  # tokens of each step that was not captured
        self.fails = False

    def __call__(self, weights, state, tokens):
        n, logits = tokens.shape[1], state.buffer("logits", (1, 2), np.int64)
        state.check_room(n)
        if self.stream.calls is None:
            self.plain.append(n)

        def work():
            logits[0] = (tokens * np.arange(1, n + 1)).sum(), state.start[0]
            state.start += np.int32(n)

        self.stream.enqueue(work)
        if self.fails:
            raise KeyboardInterrupt
        state.length += n
        return logits

    @staticmethod
    def wanted(ids: np.ndarray, rows: int) -> list[int]:
        begin = (ids.shape[1] - 1) // rows * rows
        last = ids[0, begin:].astype(np.int64)
        return [int((last * np.arange(1, len(last) + 1)).sum()), begin]


def reading(rows: int) -> tuple[Prefill, Sums, State]:
    weights, stream = small("llama"), Captured()
    state, step = State(weights, capacity=96), Sums(stream)
    return Prefill(step, weights, state, rows=rows, stream=stream), step, state


def test_a_length_that_comes_again_is_replayed(rng):
    prefill, step, state = reading(rows=4)
    for number in range(3):
        ids = rng.integers(0, VOCAB, (1, 15)).astype(np.int32)
        got = prefill(ids)
        assert got[0].tolist() == step.wanted(ids, 4)
        assert state.length == int(state.start[0]) == 15
        # Of four pieces the first and the last were new once.
        assert step.plain == [4, 3]
        assert step.stream.replayed == [1] * (2 + 4 * number)
        state.reset()


def test_the_lengths_used_last_are_kept(rng):
    prefill, step, state = reading(rows=9)
    for n in (5, 1, 2, 3, 5, 4, 5, 1):  # 1 has been forgotten for 4
        ids = rng.integers(0, VOCAB, (1, n)).astype(np.int32)
        assert prefill(ids)[0].tolist() == [*step.wanted(ids, 9)[:1], state.length - n]
    assert step.plain == [5, 1, 2, 3, 4, 1]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_interrupted_prompt_leaves_whole_pieces(at):
    """In a plain step, in a capture, and in a plain step behind a replay."""
    prefill, step, state = reading(rows=4)
    ids = np.arange(11, dtype=np.int32)[None]
    begins = [0, 4, 8]
    if at:
        prefill(ids[:, : begins[at]])
    step.fails = True
    with pytest.raises(KeyboardInterrupt):
        prefill(ids[:, begins[at] : begins[at] + 4])
    step.fails = False
    assert state.length == begins[at] and step.stream.calls is None
    state.restart(state.length)  # the step that failed had enqueued its work
    got = prefill(ids[:, state.length :])
    assert got[0].tolist() == step.wanted(ids, 4)
    assert state.length == int(state.start[0]) == 11


def test_an_unfinished_step_is_not_replayed():
    prefill, step, state = reading(rows=2)
    prefill(np.zeros((1, 4), np.int32))
    state.unfinished = True  # what has to be left out of the next step is not in the graph
    prefill(np.zeros((1, 2), np.int32))
    assert step.plain == [2, 2] and len(step.stream.replayed) == 1


@pytest.mark.parametrize("batch", [1, 3, 5000])
def test_pieces_are_bounded(monkeypatch, batch):
    made = small("llama")
    state = State(made, batch=1, capacity=96)
    state.batch = batch
    rows = piece_rows(state)
    assert rows & (rows - 1) == 0 and rows == {1: 4096, 3: 1024, 5000: 1}[batch]
    if batch == 1:
        widest = state.config.q_dim + 2 * state.config.kv_dim
        monkeypatch.setattr(generate_module, "_PIECE_BYTES", 300 * 4 * widest)
        assert piece_rows(state) == 256 and piece_rows(state, 8 * widest) == 128
        assert piece_rows(state, 1 << 40) == 128


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *[("llama", engine) for engine in ("unfused", "fused", "mega")],
        *[("gpt-oss", engine) for engine in ("unfused", "fused")],
    ],
)
def test_replayed_pieces_have_the_bits_of_single_launches(rng, monkeypatch, name, engine):
    """Pieces of 20, 32 and 7 tokens; the one of 20 is captured before buffers grow for 32."""
    import cupy

    monkeypatch.setattr(generate_module, "PREFILL_ROWS", 32)
    weights = small(name, DTYPES["bf16"]).map(cupy.asarray)
    prompts = [rng.integers(0, VOCAB, (1, n)).astype(np.int32) for n in (20, 20, 71, 20, 71)]
    runs = []
    for graph in (False, True):
        state = State(weights, capacity=96)
        decoder = Decoder(weights=weights, state=state, graph=graph, **engines.functions(engine))
        runs.append([])
        for prompt in prompts:
            n = prompt.shape[1]
            with decoder.stream:
                state.reset()
            decoder.prefill(prompt)
            ids = [int(decoder.ids()[0])]
            for _ in range(5):
                decoder.decode()
                ids.append(int(decoder.ids()[0]))
            cache = [to_numpy(state.keys(i))[0, : n + 5].tobytes() for i in range(2)]
            runs[-1].append((ids, cache))
            assert int(to_numpy(state.start)[0]) == state.length == n + 5
        decoder.close()
    assert runs[0] == runs[1]


@pytest.mark.gpu
def test_scratch_that_a_capture_needs_first_is_zeroed_before_it_runs(rng):
    import cupy

    x = cupy.asarray(rng.standard_normal((2, 5000), np.float32))
    out = cupy.full(2, -7, np.int32)
    stream = cupy.cuda.Stream(non_blocking=True)
    ops.argmax(x, out=out)  # compiles it; scratch memory is another stream's
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        ops.argmax(x, out=out)
        graph = stream.end_capture()
        ops.argmax(x, out=out)  # before the graph ran once
        assert out.get().tolist() == x.get().argmax(1).tolist()
        out.fill(-7)
        graph.launch(stream)
        assert out.get().tolist() == x.get().argmax(1).tolist()
    assert launched(lambda: ops.argmax(x, out=out, stream=stream), stream) == ["argmax"]


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("prefill", engines.PREFILLS)
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.8, seed=5), Sampling(1.2, 30, 0.9, 0.02, seed=6)],
    ids=["greedy", "drawn", "filtered"],
)
def test_mega_draws_the_same_ids_however_many_a_launch(rng, prefill, sampling, graph):
    import cupy

    weights = small("qwen3").map(cupy.asarray)
    prompt = rng.integers(0, VOCAB, (1, 9)).astype(np.int32)
    runs = []
    for n in (1, 3, 8):
        functions = engines.functions("mega", prefill=prefill, tokens_per_launch=n)
        state = State(weights, capacity=64, tokens_per_launch=n)
        decoder = Decoder(weights=weights, state=state, sampling=sampling, graph=graph, **functions)
        decoder.prefill(prompt)
        with jit.record() as record:
            for _ in range(24 // n):
                decoder.decode()
        runs.append([int(decoder.ids(i)[0]) for i in range(25)])
        assert int(to_numpy(state.start)[0]) == state.length == 9 + 24
        if not graph:
            assert [launch.kernel for launch in record.launches] == ["decode"] * (24 // n)
    assert runs[0] == runs[1] == runs[2]
