"""Decoding, a row for each engine: launches, bytes, time, distance from the roof.

Every token goes through embedding, all layers, head and the choice of the likeliest token; turning
text into ids and back is left out. Prompts are seeded, so that a mixture's routing is the same for
every engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cufuse import device, engines, jit
from cufuse.benchmarks import ceilings, routing, timing, verify
from cufuse.benchmarks.rows import Row
from cufuse.benchmarks.subject import REFERENCE_REPETITIONS, Oracle, Piece, Subject, Test, ids
from cufuse.benchmarks.timing import Timing
from cufuse.config import Config
from cufuse.generate import ContextError, Decoder
from cufuse.state import State
from cufuse.weights import Weights

_PROMPT, _FOLLOWING = 12, 8  # ids of the verification: a prompt, then one by one
_WARM_UP = 3  # steps: one to compile, one to capture, one to replay
_PLAIN_TOKENS = 32  # launched one by one a step takes long and varies little
_REFERENCE_TOKENS = 4


@dataclass(frozen=True)
class Decode(Test):
    """Tokens drawn one after the other behind a filled cache; a sample is a step."""

    @property
    def label(self) -> str:
        """The test, such as "tg128 @ d512"."""
        return f"tg{self.n_tokens}" + (f" @ d{self.context}" if self.context else "")

    @property
    def tokens(self) -> int:
        """Tokens that one sample's time is for."""
        return self.batch

    @property
    def capacity(self) -> int:
        """Room the cache needs."""
        return self.context + max(self.n_tokens, _WARM_UP)

    def check(self, c: Config) -> None:
        """Raise when the model cannot do it."""
        if self.capacity > c.max_seq_len:
            raise ContextError(
                f"bench decode: {self.context} tokens in the cache and {self.n_tokens} more do not "
                f"fit the context of {c.name}, {c.max_seq_len}"
            )

    def oracle(self, subject: Subject) -> Oracle:
        """Hidden states of a short prompt, and logits behind each token after it."""
        pieces = [Piece(_PROMPT, every_position=True)] + [Piece(1)] * _FOLLOWING
        return Oracle(subject.cut, self.batch, pieces)

    def on_gpu(
        self, subject: Subject, engine: str, *, repetitions: int, oracle: Oracle | None
    ) -> Row:
        """Verify and time an engine, launched one by one and replayed from a CUDA graph."""
        cupy = device.require_cupy()
        error = None if oracle is None else oracle.error(engine, cupy.asarray, subject.name)
        weights = subject.on_gpu
        state = State(weights, batch=self.batch, capacity=self.capacity)
        plain, graph = (
            Decoder(weights=weights, state=state, graph=replay, **engines.functions(engine))
            for replay in (False, True)
        )
        if self.context:
            plain.prefill(ids(weights.config, self.batch, self.context))
            plain.ids()
        first = plain.state.tokens.copy()
        if oracle is not None:
            self._require_same_ids(subject, engine, plain, graph, first)
        rewind(plain, self.context, first)
        with jit.record() as record:
            plain.decode()
        slow = self._time(plain, min(self.n_tokens, _PLAIN_TOKENS), repetitions, first)
        fast = self._time(graph, self.n_tokens, repetitions, first)
        gbps = record.size_bytes / fast.median / 1e6
        return subject.row(
            engine,
            self,
            fast,
            launches_per_token=len(record.launches),
            moved_bytes=record.size_bytes,
            distinct_experts=self._distinct_experts(weights, engine, first),
            ms_per_step=slow.median,
            ms_per_step_graph=fast.median,
            gbps=gbps,
            pct_ceiling=100 * gbps / ceilings.read_gbps(cupy.cuda.runtime.getDevice()),
            max_rel_err=error,
        )

    def in_numpy(self, subject: Subject, *, repetitions: int, oracle: Oracle | None) -> Row:
        """Verify and time a few steps of the reference."""
        error = None if oracle is None else oracle.error("reference", np.asarray, subject.name)
        weights = subject.for_reference
        n = min(self.n_tokens, _REFERENCE_TOKENS)
        state = State(weights, batch=self.batch, capacity=self.capacity)
        decoder = Decoder(engines.get("reference").step, weights, state)
        if self.context:
            decoder.prefill(ids(weights.config, self.batch, self.context))
        first = state.tokens.copy()

        def steps(_: int) -> None:
            rewind(decoder, self.context, first)
            for _ in range(n):
                decoder.decode()

        together = timing.on_cpu(steps, repetitions=min(repetitions, REFERENCE_REPETITIONS))
        time = Timing(tuple(ms / n for ms in together.samples))
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
        """Count what one step would launch and move."""
        weights = subject.empty()
        state = State(weights, batch=self.batch, capacity=self.capacity)
        state.length = self.context
        decoder = Decoder(weights=weights, state=state, **engines.functions(engine))
        with jit.record(dry=True) as record:
            decoder.decode()
        return subject.row(
            engine, self, launches_per_token=len(record.launches), moved_bytes=record.size_bytes
        )

    def _distinct_experts(self, weights: Weights, engine: str, first: Any) -> float | None:
        """Count experts in a few steps that are not timed."""
        if not weights.config.n_experts:
            return None
        state = routing.RecordingState(weights, batch=self.batch, capacity=self.capacity)
        decoder = Decoder(weights=weights, state=state, graph=False, **engines.functions(engine))
        if self.context:
            decoder.prefill(ids(weights.config, self.batch, self.context))
            decoder.ids()
        rewind(decoder, self.context, first)
        return routing.observe(decoder, min(self.n_tokens, _FOLLOWING))

    def _time(self, decoder: Decoder, n: int, repetitions: int, first: Any) -> Timing:
        """Time n steps enqueued at once, from the same place in each repetition."""
        rewind(decoder, self.context, first)
        for _ in range(_WARM_UP):
            decoder.decode()
        cuda = device.require_cupy().cuda
        samples = []
        for _ in range(repetitions):
            rewind(decoder, self.context, first)
            begin, end = cuda.Event(), cuda.Event()
            begin.record(decoder.stream)
            for _ in range(n):
                decoder.decode()
            end.record(decoder.stream)
            end.synchronize()
            samples.append(cuda.get_elapsed_time(begin, end) / n)
            decoder.ids()  # raises where a kernel gave up
        return Timing(tuple(samples))

    def _require_same_ids(
        self, subject: Subject, engine: str, plain: Decoder, graph: Decoder, first: Any
    ) -> None:
        """Raise VerificationError unless the replayed graph draws what single launches draw."""
        runs = []
        for decoder in (plain, graph):
            rewind(decoder, self.context, first)
            drawn = []
            for _ in range(min(self.n_tokens, 16)):
                decoder.decode()
                drawn.append(decoder.ids().tolist())
            runs.append(drawn)
        if runs[0] != runs[1]:
            raise verify.VerificationError(
                f"{subject.name}, {engine}, {self.label}: the step replayed from a CUDA graph "
                "draws other ids than single launches; it was not timed"
            )


def rewind(decoder: Decoder, length: int, tokens: Any) -> None:
    """Go back to `length` tokens in the cache and to the tokens that were drawn then."""
    state = decoder.state
    start = np.full(state.batch, length, np.int32)
    state.length = length
    if not decoder.on_gpu:
        state.start[...] = start
        state.tokens[...] = tokens
        return
    decoder.stream.synchronize()
    state.start.set(start)
    state.tokens[...] = tokens
    device.require_cupy().cuda.runtime.deviceSynchronize()
