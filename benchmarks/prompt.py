"""Processing a prompt, a row for each engine: its tokens at once, into an empty cache.

A decoder reads a long prompt as `generate` does and makes the logits of the last position; an
encoder reads it in one step and makes hidden states. No token is drawn. The first prompt that a
decoder reads is launched kernel by kernel; pieces of a length that it had before are replayed as
CUDA graphs, and both are timed. `mega` reads a prompt token after token, a launch for each piece,
as with `generate --prefill chunked`; with `--prefill rows` it takes as long as `fused`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cufuse import device, engines, jit
from cufuse.benchmarks import timing, verify
from cufuse.benchmarks.rows import Row
from cufuse.benchmarks.subject import REFERENCE_REPETITIONS, Oracle, Piece, Subject, Test, ids
from cufuse.benchmarks.timing import Timing
from cufuse.config import Config
from cufuse.device import Array
from cufuse.generate import ContextError, Prefill
from cufuse.state import State
from cufuse.weights import Weights

ENCODER_TOKENS = 128  # what an encoder reads when nothing else is asked for

_CHECKED_TOKENS = 1024  # of a first piece; float64 attention in NumPy takes seconds for as many
_CHECKED_BEHIND = 128  # of a second one: it begins behind a filled cache, as all later ones do
_WARM_UP = 3  # prompts: one to compile, one to capture, one to replay
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
        room = min(self.n_tokens, c.max_seq_len - sum(piece.length for piece in closing))
        first = min(room, _CHECKED_TOKENS) if c.causal else room
        lengths = (first, min(room - first, _CHECKED_BEHIND))
        pieces = [Piece(n, every_position=True) for n in lengths if n]
        return Oracle(subject.cut, self.batch, pieces + closing)

    def on_gpu(
        self, subject: Subject, engine: str, *, repetitions: int, oracle: Oracle | None
    ) -> Row:
        """Verify and time an engine, launched one by one and replayed from CUDA graphs."""
        cupy = device.require_cupy()
        error = None if oracle is None else oracle.error(engine, cupy.asarray, subject.name)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.deviceSynchronize()  # whatever made the weights has ended
        with stream:
            run = _Run(subject.on_gpu, self, engine, stream)
            run()  # everything is compiled and allocated now
            with jit.record() as record:
                logits = run().copy()
            slow = run.time(repetitions)
            for _ in range(_WARM_UP):
                replayed = run(graph=True)
            same = bool((replayed.view(np.uint8) == logits.view(np.uint8)).all())
            fast = run.time(repetitions, graph=True)
            run.state.check_fault()
        device.SCRATCH.forget(logits, stream)
        if not same:
            raise verify.VerificationError(
                f"{subject.name}, {engine}, {self.label}: the prompt replayed from CUDA graphs "
                "makes other bits than single launches; it was not timed"
            )
        return subject.row(
            engine,
            self,
            fast,
            launches_per_token=len(record.launches),
            moved_bytes=record.size_bytes,
            ms_per_step=slow.median,
            ms_per_step_graph=fast.median,
            gbps=record.size_bytes / fast.median / 1e6,
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
            run()
        return subject.row(
            engine, self, launches_per_token=len(record.launches), moved_bytes=record.size_bytes
        )


class _Run:
    """An engine, a cache of the prompt's size, and the prompt."""

    def __init__(self, weights: Weights, test: Prompt, engine: str, stream: Any = None) -> None:
        self.state = State(weights, batch=test.batch, capacity=test.n_tokens)
        causal = weights.config.causal  # an encoder sees all at once
        rows = engines.piece_rows(engine)(self.state) if causal else test.n_tokens
        step = engines.get(engine).step
        self._plain = Prefill(step, weights, self.state, rows=rows)
        self._replayed = Prefill(step, weights, self.state, rows=rows, stream=stream)
        self._stream = stream
        self._ids = ids(weights.config, test.batch, test.n_tokens)

    def __call__(self, *, graph: bool = False) -> Array:
        """Read the prompt into an emptied cache; returns what the step makes of its last piece."""
        self.state.reset()
        return (self._replayed if graph else self._plain)(self._ids)

    def time(self, repetitions: int, *, graph: bool = False) -> Timing:
        """Time whole prompts on the stream, the upload of their ids included."""
        cuda = device.require_cupy().cuda
        samples = []
        for _ in range(repetitions):
            self._stream.synchronize()
            begin, end = cuda.Event(), cuda.Event()
            begin.record(self._stream)
            self(graph=graph)
            end.record(self._stream)
            end.synchronize()
            samples.append(cuda.get_elapsed_time(begin, end))
        return Timing(tuple(samples))
