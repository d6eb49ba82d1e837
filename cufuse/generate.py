"""The token loop: takes a step, knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cufuse import device, ops
from cufuse.device import Array
from cufuse.ops.sample import check_options
from cufuse.state import KernelStopped, State
from cufuse.weights import Weights

_STOPPED = -2  # the id a kernel writes that gave up

PREFILL_ROWS = 512  # a longer prompt goes through the step in pieces, so that buffers stay small


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; temperature 0 takes the likeliest."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def check(self) -> None:
        """Raise ValueError for a value out of range."""
        check_options(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)

    def draw(self, logits: Array, state: State, out: Array) -> None:
        """Draw one id per row of logits [batch, vocab_size] into out [batch]."""
        if self.temperature == 0:
            ops.argmax(logits, out=out)
            return
        ops.sample(
            logits,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            step=state.start,
            out=out,
        )


@dataclass
class _Launch:
    """What came of a launch: a copy of the state's `drawn`, on its way until `landed`."""

    drawn: np.ndarray
    landed: Any  # an event; None without a GPU
    length: int  # tokens in the cache before it


class Decoder:
    """Prefill, then a launch at a time; on a GPU the step is captured once and replayed.

    `prefill` takes a prompt where that is another function than the step. `step_and_draw` does a
    step and the draw behind it at once, or, as the state's `tokens_per_launch` says, several.

    Works on a stream of its own. Every draw is copied to the host behind the step, so that the next
    step can be enqueued before the last one is looked at.
    """

    def __init__(
        self,
        step: Callable[..., Array],
        weights: Weights,
        state: State,
        sampling: Sampling | None = None,
        *,
        graph: bool = True,
        prefill: Callable[..., Array] | None = None,
        step_and_draw: Callable[..., Array] | None = None,
    ) -> None:
        if state.tokens_per_launch > 1 and step_and_draw is None:
            raise ValueError(
                f"decode: tokens_per_launch is {state.tokens_per_launch}, wanted 1: this step does "
                "not draw"
            )
        self.step_function = step
        self.prefill_function = prefill or step
        self.step_and_draw = step_and_draw
        self.weights = weights
        self.state = state
        self.sampling = sampling or Sampling()
        self.on_gpu = device.is_gpu(state.tokens)
        self.use_graph = graph and self.on_gpu
        self._graph: Any = None
        self._warm = False
        self._launches: list[_Launch] = []
        self._draws: list[tuple[int, int]] = []  # the launch of each, and its row of the ids there
        self.stream: Any = None
        if self.on_gpu:
            cuda = device.require_cupy().cuda
            with device.on_device_of(state.tokens):
                cuda.runtime.deviceSynchronize()  # whatever made the weights has ended
                self.stream = cuda.Stream(non_blocking=True)

    @property
    def n_drawn(self) -> int:
        """Draws so far, those that the GPU has yet to make among them."""
        return len(self._draws)

    def prefill(self, ids: np.ndarray) -> None:
        """Append a prompt, int32 [batch, n], and draw the first token."""
        before = self.state.length
        self.state.check_room(ids.shape[1])
        with _current(self.stream, self.state.tokens):
            for begin in range(0, ids.shape[1], PREFILL_ROWS):
                piece = np.ascontiguousarray(ids[:, begin : begin + PREFILL_ROWS], np.int32)
                tokens = self.state.upload(piece)
                logits = self.prefill_function(self.weights, self.state, tokens)
            self._draw(logits)
            self._fetch(1, before)

    def decode(self, n: int | None = None) -> None:
        """Append the last token drawn and draw the next n in one launch, without waiting for them.

        n: at most the state's tokens_per_launch, and that when left out
        """
        whole = self.state.tokens_per_launch
        n = whole if n is None else n
        if not 1 <= n <= whole:
            raise ValueError(f"decode: n is {n}, wanted 1 to {whole}, the tokens of a launch")
        before = self.state.length
        self.state.check_room(n)
        with _current(self.stream, self.state.tokens):
            if n < whole:
                self._run(n)
            elif self._graph is not None:
                self._graph.launch(self.stream)
                self.state.length += n
            elif self.use_graph and self._warm:
                self._graph = self._capture()
                self._graph.launch(self.stream)
            else:
                self._run(n)
                self._warm = True  # everything is compiled and allocated now
            self._fetch(n, before)

    def ids(self, draw: int = -1) -> np.ndarray:
        """Wait for a draw, the last one if not said, and return it: int32 [batch].

        Raises KernelStopped when a kernel gave up; the decoder has then gone back to where it was
        before that launch, and can go on. Raises RuntimeError when the logits held a NaN.
        """
        number, row = self._draws[draw]
        launch = self._launches[number]
        if launch.landed is not None:
            launch.landed.synchronize()
        stopped = self.state.stopped(launch.drawn)
        if stopped is not None:
            self._go_back()
            raise stopped
        return check_drawn(self.state.ids_in(launch.drawn)[row])

    def _run(self, n: int) -> None:
        state = self.state
        if self.step_and_draw is not None:
            ids = state.ids[-n:].reshape(-1)
            self.step_and_draw(self.weights, state, state.tokens, self.sampling, ids=ids)
        else:
            self._draw(self.step_function(self.weights, state, state.tokens))

    def _draw(self, logits: Array) -> None:
        self.sampling.draw(logits, self.state, self.state.tokens.reshape(-1))

    def _capture(self) -> Any:
        """Record one step, which counts its tokens but does not run, as a graph."""
        self.stream.begin_capture()
        try:
            self._run(self.state.tokens_per_launch)
        finally:
            graph = self.stream.end_capture()
        return graph

    def _fetch(self, n: int, before: int) -> None:
        """Copy the last n draws to the host, behind the step that makes them."""
        state = self.state
        first = state.tokens_per_launch - n
        self._draws += [(len(self._launches), first + i) for i in range(n)]
        if not self.on_gpu:
            self._launches.append(_Launch(np.array(state.drawn), None, before))
            return
        import cupyx

        pinned = cupyx.empty_pinned(state.drawn.shape, state.drawn.dtype)
        drawn = state.drawn.get(self.stream, blocking=False, out=pinned)
        event = device.require_cupy().cuda.Event(disable_timing=True)
        event.record(self.stream)
        self._launches.append(_Launch(drawn, event, before))

    def _go_back(self) -> None:
        """Forget the launch that gave up, and those behind it: they found that word and stopped."""
        state = self.state
        if self.stream is not None:
            self.stream.synchronize()
        first = next(i for i, made in enumerate(self._launches) if state.stopped(made.drawn))
        length = self._launches[first].length
        del self._launches[first:]
        self._draws = [draw for draw in self._draws if draw[0] < first]
        with _current(self.stream, state.tokens):
            state.restart(length)
            if first:
                tokens = state.ids_in(self._launches[-1].drawn)[-1].reshape(state.tokens.shape)
                if self.on_gpu:
                    state.tokens.set(tokens)
                    self.stream.synchronize()
                else:
                    state.tokens[...] = tokens


def generate(
    step: Callable[..., Array],
    weights: Weights,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int] = (),
    graph: bool = True,
    prefill: Callable[..., Array] | None = None,
    step_and_draw: Callable[..., Array] | None = None,
    tokens_per_launch: int = 1,
) -> Iterator[int]:
    """Yield up to max_new_tokens ids that follow `ids`; a stop id ends it and is not yielded.

    `prefill` and `step_and_draw` are those of `Decoder`. With tokens_per_launch ids come so many at
    a time, and what a launch drew behind a stop id is dropped.

    Raises ValueError, before anything is launched, for an empty prompt, an id outside the
    vocabulary, or a prompt that does not leave room for a token in the model's context.
    """
    c = weights.config
    if not c.has_head:
        raise device.Unsupported(f"generate: {c.name} is an encoder and has no next token")
    prompt = check_ids("generate", ids, c.vocab_size)
    if len(prompt) >= c.max_seq_len:
        raise ContextError(
            f"generate: the prompt has {len(prompt)} tokens and the context of {c.name} is "
            f"{c.max_seq_len}; shorten it"
        )
    if not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 0:
        raise ValueError(f"generate: max_new_tokens is {max_new_tokens!r}, wanted 0 or more")
    if not isinstance(tokens_per_launch, int | np.integer) or tokens_per_launch < 1:
        raise ValueError(f"generate: tokens_per_launch is {tokens_per_launch!r}, wanted 1 or more")
    limit = min(max_new_tokens, c.max_seq_len - len(prompt))

    def decoder() -> Decoder:
        state = State(
            weights, capacity=len(prompt) + limit, tokens_per_launch=int(tokens_per_launch)
        )
        return Decoder(
            step,
            weights,
            state,
            sampling,
            graph=graph,
            prefill=prefill,
            step_and_draw=step_and_draw,
        )

    return _tokens(decoder, prompt, limit, frozenset(stop_ids))


class ContextError(ValueError):
    """A prompt is longer than the model's context."""


def check_drawn(drawn: np.ndarray) -> np.ndarray:
    """Return drawn ids, int32 [batch]; raises RuntimeError for what says that there is none."""
    if (drawn == _STOPPED).any():
        raise KernelStopped(
            "a decode kernel gave up waiting for the other SMs; is another program using this "
            "GPU? The cache holds what it held before this token"
        )
    if (drawn < 0).any():
        raise RuntimeError(
            "the logits hold a NaN: the weights or the dtype's range are at fault (try dtype "
            "bfloat16 or float32)"
        )
    return drawn


def check_ids(op: str, ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Return ids as int32 [n]; raises ValueError when empty or outside the vocabulary."""
    if isinstance(ids, str):
        raise TypeError(f"{op}: ids is text; turn it into ids (model.tokenizer.encode, .chat)")
    array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{op}: ids is {list(array.shape)}, wanted [n] with at least one id")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{op}: ids has dtype {array.dtype}, wanted integers")
    wrong = array[(array < 0) | (array >= vocab_size)]
    if wrong.size:
        raise ValueError(f"{op}: id {wrong[0]} is outside the vocabulary of {vocab_size}")
    return array.astype(np.int32)


def _tokens(
    make: Callable[[], Decoder], prompt: np.ndarray, limit: int, stop_ids: frozenset[int]
) -> Iterator[int]:
    if limit == 0:
        return
    decoder = make()
    decoder.prefill(prompt[None])
    whole = decoder.state.tokens_per_launch
    # A GPU works on the next launch while these ids are looked at; after a stop id it is dropped.
    ahead = whole if decoder.on_gpu else 0
    for draw in range(limit):
        while decoder.n_drawn < min(limit, draw + 1 + ahead):
            decoder.decode(min(whole, limit - decoder.n_drawn))
        token = int(decoder.ids(draw)[0])
        if token in stop_ids:
            return
        yield token


class _current:
    """Make a stream and its device current; does nothing without a stream."""

    def __init__(self, stream: Any, like: Array) -> None:
        self._stream = stream
        self._device = device.on_device_of(like)

    def __enter__(self) -> None:
        self._device.__enter__()
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._stream is not None:
            self._stream.__exit__(*error)
        self._device.__exit__(*error)
