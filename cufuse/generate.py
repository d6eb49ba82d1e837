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

# A longer prompt goes through the step in pieces. Large ones have tiles enough for every SM in the
# narrowest product, and their kernels take longer than the host does to launch them. No
# intermediate of a piece is to be larger than so many bytes, however wide the model is: each has
# memory of its own as long as the state lives.
PREFILL_ROWS = 4096
_PIECE_BYTES = 256 << 20
_LEAST_ROWS = 128
_KEPT_PIECES = 4  # lengths whose graphs are kept: a chat has few, texts as they come have none


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


def piece_rows(state: State, row_bytes: int = 0) -> int:
    """Return how many tokens of each sequence go through one step of a prompt: a power of two.

    row_bytes: what the engine's widest intermediate takes for a token, if that is more than the
        projections and the MLP take in any engine
    """
    c = state.config
    mlp = max(c.hidden_dim * max(c.n_experts_per_token, 1), c.dense_hidden_dim, c.shared_hidden_dim)
    widest = max(c.dim, c.q_dim + 2 * c.kv_dim, mlp)
    row_bytes = max(row_bytes, widest * np.dtype(state.like.dtype).itemsize)
    rows = min(max(_PIECE_BYTES // row_bytes, _LEAST_ROWS), PREFILL_ROWS) // state.batch
    return 1 << (max(rows, 1).bit_length() - 1)


@dataclass
class _Piece:
    """Tokens of one length: where a step takes them from, and that step, once it was captured."""

    tokens: Array  # [batch, q_len] int32
    graph: Any = None
    logits: Array = None  # where the graph leaves them


class Prefill:
    """Sends prompts through a step, piece by piece, on the current stream.

    On a GPU a length that comes again is captured and from then on replayed: all that a step reads
    lies at addresses that stay, and where its tokens stand it learns on the device. The first time
    a length is launched kernel by kernel, which compiles them and allocates what they write. The
    lengths used last are kept.

    rows: tokens of each sequence in a piece, `piece_rows` when left out
    stream: the one that is current, where steps are to be replayed
    """

    def __init__(
        self,
        step: Callable[..., Array],
        weights: Weights,
        state: State,
        *,
        rows: int | None = None,
        stream: Any = None,
    ) -> None:
        self._step = step
        self._weights = weights
        self._state = state
        self._stream = stream
        self._pieces: dict[int, _Piece] = {}  # by length, the one used last behind the others
        self.rows = piece_rows(state) if rows is None else rows

    def __call__(self, ids: np.ndarray) -> Array:
        """Append ids, int32 [batch, n], and return what the step makes of the last piece.

        Interrupted, the state counts the pieces that were enqueued, here and on the device.
        """
        made = None
        for begin in range(0, ids.shape[1], self.rows):
            host = np.ascontiguousarray(ids[:, begin : begin + self.rows], np.int32)
            uploaded = self._state.upload(host)
            made = self._plain(uploaded) if self._stream is None else self._kept(uploaded)
        return made

    def _plain(self, tokens: Array) -> Array:
        return self._step(self._weights, self._state, tokens)

    def _kept(self, uploaded: Array) -> Array:
        """Do a step as it was done before for as many tokens."""
        state, n = self._state, uploaded.shape[1]
        piece = self._pieces.get(n) or _Piece(device.empty(uploaded.shape, np.int32, uploaded))
        device.copy(uploaded, piece.tokens)
        if n not in self._pieces or state.unfinished:
            made = self._plain(piece.tokens)
        else:
            if piece.graph is None:
                piece.graph, piece.logits = capture(
                    lambda: self._plain(piece.tokens), state, self._stream
                )
            piece.graph.launch(self._stream)
            state.length += n
            made = piece.logits
        self._pieces[n] = self._pieces.pop(n, piece)
        while len(self._pieces) > _KEPT_PIECES:
            del self._pieces[next(iter(self._pieces))]
        return made


def capture(work: Callable[[], Any], state: State, stream: Any) -> tuple[Any, Any]:
    """Record as a graph what `work` enqueues on a stream, and return it and what `work` returns.

    Nothing runs, and the state counts no tokens.
    """
    length = state.length
    stream.begin_capture()
    try:
        made = work()
    finally:
        state.length = length
        graph = stream.end_capture()
    return graph, made


class Decoder:
    """Prefill, then a launch at a time; on a GPU steps are captured once and replayed.

    `prefill` takes a prompt where that is another function than the step, in pieces of
    `piece_rows(state)` tokens. `step_and_draw` does a step and the draw behind it at once, or, as
    the state's `tokens_per_launch` says, several.

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
        piece_rows: Callable[[State], int] = piece_rows,
        step_and_draw: Callable[..., Array] | None = None,
    ) -> None:
        if state.tokens_per_launch > 1 and step_and_draw is None:
            raise ValueError(
                f"decode: tokens_per_launch is {state.tokens_per_launch}, wanted 1: this step does "
                "not draw"
            )
        self.step_function = step
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
        self._prefill = Prefill(
            prefill or step,
            weights,
            state,
            rows=piece_rows(state),
            stream=self.stream if self.use_graph else None,
        )

    @property
    def n_drawn(self) -> int:
        """Draws so far, those that the GPU has yet to make among them."""
        return len(self._draws)

    def prefill(self, ids: np.ndarray) -> None:
        """Append a prompt, int32 [batch, n], and draw the first token."""
        before = self.state.length
        self.state.check_room(ids.shape[1])
        with _current(self.stream, self.state.tokens):
            self._draw(self._prefill(ids))
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
            if n < whole or self.state.unfinished:
                self._run(n)
            elif self.use_graph and self._warm:
                if self._graph is None:
                    self._graph, _ = capture(lambda: self._run(n), self.state, self.stream)
                self._graph.launch(self.stream)
                self.state.length += n
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

    def close(self) -> None:
        """Wait for what was enqueued and give scratch memory back; decodes nothing afterwards."""
        if self.stream is not None:
            self.stream.synchronize()
            device.SCRATCH.forget(self.state.tokens, self.stream)

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
    piece_rows: Callable[[State], int] = piece_rows,
    step_and_draw: Callable[..., Array] | None = None,
    tokens_per_launch: int = 1,
) -> Iterator[int]:
    """Yield up to max_new_tokens ids that follow `ids`; a stop id ends it and is not yielded.

    `prefill`, `piece_rows` and `step_and_draw` are those of `Decoder`. With tokens_per_launch ids
    come so many at a time, and what a launch drew behind a stop id is dropped.

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
            piece_rows=piece_rows,
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
    try:
        decoder.prefill(prompt[None])
        whole = decoder.state.tokens_per_launch
        # A GPU works on the next launch while these ids are looked at; after a stop id it is
        # dropped.
        ahead = whole if decoder.on_gpu else 0
        for draw in range(limit):
            while decoder.n_drawn < min(limit, draw + 1 + ahead):
                decoder.decode(min(whole, limit - decoder.n_drawn))
            token = int(decoder.ids(draw)[0])
            if token in stop_ids:
                return
            yield token
    finally:
        decoder.close()  # the launch ahead still writes to memory that others may be given


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
