"""Processing a prompt, a row for each engine: its tokens at once, into an empty cache.

A decoder reads a long prompt in the pieces that `generate` cuts it into and makes the logits of the
last position; an encoder reads it in one step and makes hidden states. No token is drawn. `mega`
reads it token after token, a launch for each piece, as with `generate --prefill chunked`; with
`--prefill rows` it takes as long as `fused`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cufuse import device, engines, jit
from cufuse.benchmarks import timing
from cufuse.benchmarks.rows import Row
from cufuse.benchmarks.subject import REFERENCE_REPETITIONS, Oracle, Piece, Subject, Test, ids
from cufuse.benchmarks.timing import Timing
from cufuse.config import Config
from cufuse.device import Array
from cufuse.generate import PREFILL_ROWS, ContextError
from cufuse.state import State
from cufuse.weights import Weights

ENCODER_TOKENS = 128  # what an encoder reads when nothing else is asked for

_CHECKED_PIECES = 2  # the second one begins behind a filled cache, as all later ones do
_CLOSING = (4, 4, 4, 4)  # ids of the verification's last pieces, which go through the head


@dataclass(frozen=True)
class Prompt(Test):
    """n_tokens of each sequence, appended to an empty cache; a sample is the whole prompt."""

    @property
    def label(self) -> str:
        """The test, such as "pp512"."""
        return f"pp{self.n_tokens}"

    @property
    def tokens(self) -> int:
        """Tokens that one sample's time is for."""
        return self.batch * self.n_tokens

    def check(self, c: Config) -> None:
        """Raise when the model cannot do it."""
        if self.n_tokens > c.max_seq_len:
            raise ContextError(
                f"bench decode: a prompt of {self.n_tokens} tokens does not fit the context of "
                f"{c.name}, {c.max_seq_len}"
            )

    def oracle(self, subject: Subject) -> Oracle:
        """Hidden states of every position; of a decoder also logits behind a few more tokens."""
        c = subject.config
        closing = [Piece(n) for n in _CLOSING] if c.has_head else []
        room = c.max_seq_len - sum(piece.length for piece in closing)
        checked = min(self.n_tokens, _CHECKED_PIECES * _rows(c), room)
        pieces = [Piece(n, every_position=True) for n in _lengths(c, checked)]
        return Oracle(subject.cut, self.batch, pieces + closing)

    def on_gpu(
        self, subject: Subject, engine: str, *, repetitions: int, oracle: Oracle | None
    ) -> Row:
        """Verify and time an engine, launched as `generate` does."""
        cupy = device.require_cupy()
        error = None if oracle is None else oracle.error(engine, cupy.asarray, subject.name)
        run = _Run(subject.on_gpu, self, engine)
        run()  # everything is compiled and allocated now
        with jit.record() as record:
            run()
        samples = []
        for _ in range(repetitions):
            run.state.reset()
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            run.steps()
            end.record()
            end.synchronize()
            samples.append(cupy.cuda.get_elapsed_time(begin, end))
        time = Timing(tuple(samples))
        return subject.row(
            engine,
            self,
            time,
            launches_per_token=len(record.launches),
            moved_bytes=record.size_bytes,
            ms_per_step=time.median,
            gbps=record.size_bytes / time.median / 1e6,
            max_rel_err=error,
        )

    def in_numpy(self, subject: Subject, *, repetitions: int, oracle: Oracle | None) -> Row:
        """Verify and time the reference."""
        error = None if oracle is None else oracle.error("reference", np.asarray, subject.name)
        weights = subject.for_reference
        run = _Run(weights, self, "reference")
        time = timing.on_cpu(lambda _: run(), repetitions=min(repetitions, REFERENCE_REPETITIONS))
        return subject.row(
            "reference",
            self,
            time,
            launches_per_token=0,
            ms_per_step=time.median,
            max_rel_err=error,
            note=subject.note(weights),
        )

    def counted(self, subject: Subject, engine: str) -> Row:
        """Count what the prompt would launch and move."""
        run = _Run(subject.empty(), self, engine)
        with jit.record(dry=True) as record:
            run.steps()
        return subject.row(
            engine, self, launches_per_token=len(record.launches), moved_bytes=record.size_bytes
        )


class _Run:
    """An engine, a cache of the prompt's size, and the prompt's pieces beside the weights."""

    def __init__(self, weights: Weights, test: Prompt, engine: str) -> None:
        self._weights = weights
        self._step = engines.get(engine).step
        self.state = State(weights, batch=test.batch, capacity=test.n_tokens)
        tokens = ids(weights.config, test.batch, test.n_tokens)
        self._pieces: list[Array] = []
        begin = 0
        for n in _lengths(weights.config, test.n_tokens):
            piece = np.ascontiguousarray(tokens[:, begin : begin + n])
            self._pieces.append(self.state.upload(piece))
            begin += n

    def __call__(self) -> None:
        """Read the prompt into an emptied cache."""
        self.state.reset()
        self.steps()

    def steps(self) -> None:
        """Read the prompt."""
        for piece in self._pieces:
            self._step(self._weights, self.state, piece)


def _rows(c: Config) -> int:
    """Return how many tokens of a sequence go through one step; an encoder sees all at once."""
    return PREFILL_ROWS if c.causal else c.max_seq_len


def _lengths(c: Config, n: int) -> Iterator[int]:
    """Cut n tokens into steps."""
    for begin in range(0, n, _rows(c)):
        yield min(_rows(c), n - begin)
