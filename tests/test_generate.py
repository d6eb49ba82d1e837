"""The token loop around a step that is easy to predict: launches, draws, kernels that give up."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import to_numpy
from models import CONFIGS, small

from cufuse import engines, jit
from cufuse.generate import Decoder, KernelStopped, Sampling, generate
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
