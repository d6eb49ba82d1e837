"""The decode step of a model, a row for each engine: launches, bytes, time, distance from the roof.

Every token goes through embedding, all layers, head and the choice of the likeliest token; turning
text into ids and back is left out. Prompts are seeded, so that a mixture's routing is the same for
every engine.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cufuse import config as configs
from cufuse import device, engines, jit, model
from cufuse import weights as weights_module
from cufuse.benchmarks import ceilings, timing, verify
from cufuse.benchmarks.rows import Row
from cufuse.benchmarks.timing import Timing
from cufuse.config import Config
from cufuse.generate import ContextError, Decoder
from cufuse.state import State
from cufuse.weights import Weights

# Above so many parameters NumPy takes the first layers only, and float64 always does.
REFERENCE_PARAMETERS = 200_000_000
CUT_LAYERS = 2

_PROMPT, _FOLLOWING = 12, 4  # ids of the verification: a prompt, then one by one
_WARM_UP = 3  # steps: one to compile, one to capture, one to replay
_PLAIN_TOKENS = 32  # launched one by one a step takes long and varies little
_REFERENCE_TOKENS, _REFERENCE_REPETITIONS = 4, 2


@dataclass(frozen=True)
class Point:
    """What a row measures, apart from the engine."""

    batch: int
    context: int  # tokens in the cache before the first step
    n_tokens: int

    @property
    def test(self) -> str:
        """The test as llama-bench names it."""
        return f"tg{self.n_tokens}" + (f" @ d{self.context}" if self.context else "")

    @property
    def capacity(self) -> int:
        """Room the cache needs."""
        return self.context + max(self.n_tokens, _WARM_UP)

    def check(self, c: Config) -> None:
        """Raise when the model cannot do it."""
        if not c.has_head:
            raise device.Unsupported(
                f"bench decode: {c.name} is an encoder and has no next token; take another model"
            )
        if self.capacity > c.max_seq_len:
            raise ContextError(
                f"bench decode: {self.context} tokens in the cache and {self.n_tokens} more do not "
                f"fit the context of {c.name}, {c.max_seq_len}"
            )


def run(
    name: str,
    *,
    where: str,
    dtype: np.dtype,
    chosen: Sequence[str],
    points: Sequence[Point],
    repetitions: int,
    checked: bool,
) -> Iterator[Row]:
    """Verify and time a model's engines; yields a row for each point and engine.

    name: a preset (random weights), or a model to load
    where: "cuda", or "cpu" to time the reference and count what the kernels would launch and move
    chosen: the engines
    """
    whole = _Model(name, where, dtype)
    for point in points:
        point.check(whole.config)
    compared = checked and (where == "cuda" or "reference" in chosen)
    for point in points:
        oracle = _Oracle(whole.cut, point.batch) if compared else None
        for engine in chosen:
            if engine == "reference":
                yield _reference_row(whole, point, repetitions, oracle)
            elif where == "cuda":
                yield _gpu_row(whole, point, engine, repetitions, oracle)
            else:
                yield _counted_row(whole, point, engine)


class _Model:
    """The weights a benchmark needs, each form made when it is first asked for."""

    def __init__(self, name: str, where: str, dtype: np.dtype) -> None:
        self.name = name
        self.dtype = dtype
        self._where = where
        self._cut: Weights | None = None
        if name in configs.PRESETS:
            self.config = configs.preset(name)
            self._weights = None
        else:
            loaded = model.load(name, device=where, dtype=dtype)
            self.config, self._weights = loaded.config, loaded.weights

    @property
    def on_gpu(self) -> Weights:
        """All weights, on the GPU."""
        if self._weights is None:
            self._weights = model.load(
                self.name, device=self._where, dtype=self.dtype, seed=0
            ).weights
        return self._weights

    @property
    def cut(self) -> Weights:
        """The first layers, as NumPy arrays."""
        if self._cut is None:
            if self._where == "cuda" or self._weights is not None:
                self._cut = first_layers(self.on_gpu).map(verify.to_numpy)
            else:
                self._cut = weights_module.random(
                    self.config.cut(CUT_LAYERS), seed=0, dtype=self.dtype, kind="numpy"
                )
        return self._cut

    @property
    def for_reference(self) -> Weights:
        """What NumPy is timed on: all layers of a small model, the first of a large one."""
        if self.config.n_parameters > REFERENCE_PARAMETERS:
            return self.cut
        if self._where == "cuda":
            return self.on_gpu.map(verify.to_numpy)
        return self.on_gpu if self._weights is not None else self._random_on_host()

    def _random_on_host(self) -> Weights:
        self._weights = weights_module.random(self.config, seed=0, dtype=self.dtype, kind="numpy")
        return self._weights

    def empty(self) -> Weights:
        """Arrays of the right shapes that are never touched, to count with."""
        arrays = {
            name: device.twin(np.empty(shape, self.dtype))
            for name, shape in weights_module.shapes(self.config).items()
        }
        return weights_module.assemble(self.config, arrays)

    def row(self, engine: str, point: Point, **values: Any) -> Row:
        """Start the row of one engine."""
        return Row(
            test=point.test,
            engine=engine,
            dtype=self.dtype.name,
            model=self.config.name,
            size_bytes=self.config.n_parameters * self.dtype.itemsize,
            n_parameters=self.config.n_parameters,
            batch=point.batch,
            context=point.context,
            **values,
        )


def first_layers(weights: Weights, n: int = CUT_LAYERS) -> Weights:
    """Keep the first n layers, embedding and head of a model; arrays are shared."""
    return dataclasses.replace(weights, config=weights.config.cut(n), layers=weights.layers[:n])


def prompt(c: Config, batch: int, length: int) -> np.ndarray:
    """Return seeded ids, int32 [batch, length]; sequences of a batch differ."""
    return np.random.default_rng(0).integers(0, c.vocab_size, (batch, length)).astype(np.int32)


class _Oracle:
    """Logits of the first layers in float64, behind a prompt and behind each token after it."""

    def __init__(self, cut: Weights, batch: int) -> None:
        self._distinct = min(batch, 2)  # sequences; a larger batch repeats them
        self._batch = batch
        self._dtype = np.dtype(cut.dtype)
        self._cut = cut
        self._ids = prompt(cut.config, self._distinct, _PROMPT + _FOLLOWING)
        exact = cut.map(lambda a: a.astype(np.float64))
        step = engines.get("reference").step
        state = State(exact, batch=self._distinct, capacity=self._ids.shape[1])
        self._wanted = [
            np.array(step(exact, state, piece)) for piece in _pieces(self._ids)
        ]  # [distinct, vocab_size] each

    def error(self, engine: str, upload: Callable[[np.ndarray], Any], name: str) -> float:
        """Run an engine on the same layers; returns its error or raises VerificationError."""
        weights = self._cut.map(upload)
        repeated = np.arange(self._batch) % self._distinct
        ids = self._ids[repeated]
        state = State(weights, batch=self._batch, capacity=ids.shape[1])
        step = engines.get(engine).step
        error = 0.0
        for piece, wanted in zip(_pieces(ids), self._wanted, strict=True):
            got = verify.to_numpy(step(weights, state, upload(piece)))
            error = max(error, verify.row_error(got, wanted[repeated]))
        what = f"{name} cut to {CUT_LAYERS} layers, {engine}, {self._dtype}, batch {self._batch}"
        return verify.require(what, error, verify.MODEL_LIMIT[self._dtype.name])


def _pieces(ids: np.ndarray) -> list[np.ndarray]:
    """Cut ids into the prompt and the single tokens that follow."""
    cuts = [0, *range(_PROMPT, ids.shape[1] + 1)]
    return [np.ascontiguousarray(ids[:, a:b]) for a, b in itertools.pairwise(cuts)]


# ---- rows ---------------------------------------------------------------------------------------


def _gpu_row(
    whole: _Model, point: Point, engine: str, repetitions: int, oracle: _Oracle | None
) -> Row:
    cupy = device.require_cupy()
    error = None if oracle is None else oracle.error(engine, cupy.asarray, whole.name)
    weights = whole.on_gpu
    state = State(weights, batch=point.batch, capacity=point.capacity)
    step = engines.get(engine).step
    plain, graph = (Decoder(step, weights, state, graph=replay) for replay in (False, True))
    if point.context:
        plain.prefill(prompt(weights.config, point.batch, point.context))
        plain.ids()
    first = plain.state.tokens.copy()
    if oracle is not None:
        _require_same_ids(whole, engine, point, plain, graph, first)
    rewind(plain, point.context, first)
    with jit.record() as record:
        plain.decode()
    slow = _decode_time(plain, point, min(point.n_tokens, _PLAIN_TOKENS), repetitions, first)
    fast = _decode_time(graph, point, point.n_tokens, repetitions, first)
    gbps = record.size_bytes / fast.median / 1e6
    rates = [1e3 * point.batch / ms for ms in fast.samples]
    return whole.row(
        engine,
        point,
        launches_per_token=len(record.launches),
        moved_bytes=record.size_bytes,
        ms_per_step=slow.median,
        ms_per_step_graph=fast.median,
        tok_s=float(np.mean(rates)),
        tok_s_std=float(np.std(rates)),
        gbps=gbps,
        pct_ceiling=100 * gbps / ceilings.read_gbps(cupy.cuda.runtime.getDevice()),
        max_rel_err=error,
        std=fast.std,
        samples=list(fast.samples),
    )


def _reference_row(whole: _Model, point: Point, repetitions: int, oracle: _Oracle | None) -> Row:
    error = None if oracle is None else oracle.error("reference", lambda a: a, whole.name)
    weights = whole.for_reference
    n = min(point.n_tokens, _REFERENCE_TOKENS)
    state = State(weights, batch=point.batch, capacity=point.capacity)
    decoder = Decoder(engines.get("reference").step, weights, state)
    if point.context:
        decoder.prefill(prompt(weights.config, point.batch, point.context))
    first = state.tokens.copy()

    def steps(_: int) -> None:
        rewind(decoder, point.context, first)
        for _ in range(n):
            decoder.decode()

    time = timing.on_cpu(steps, repetitions=min(repetitions, _REFERENCE_REPETITIONS))
    samples = tuple(ms / n for ms in time.samples)
    rates = [1e3 * point.batch / ms for ms in samples]
    layers, of = weights.config.n_layers, whole.config.n_layers
    return whole.row(
        "reference",
        point,
        launches_per_token=0,
        ms_per_step=Timing(samples).median,
        tok_s=float(np.mean(rates)),
        tok_s_std=float(np.std(rates)),
        max_rel_err=error,
        std=Timing(samples).std,
        samples=list(samples),
        note=None if layers == of else f"{layers} of {of} layers",
    )


def _counted_row(whole: _Model, point: Point, engine: str) -> Row:
    weights = whole.empty()
    state = State(weights, batch=point.batch, capacity=point.capacity)
    state.length = point.context
    decoder = Decoder(engines.get(engine).step, weights, state)
    with jit.record(dry=True) as record:
        decoder.decode()
    return whole.row(
        engine, point, launches_per_token=len(record.launches), moved_bytes=record.size_bytes
    )


# ---- steps --------------------------------------------------------------------------------------


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


def _decode_time(decoder: Decoder, point: Point, n: int, repetitions: int, first: Any) -> Timing:
    """Time n steps enqueued at once, from the same place in each repetition."""
    rewind(decoder, point.context, first)
    for _ in range(_WARM_UP):
        decoder.decode()
    cuda = device.require_cupy().cuda
    samples = []
    for _ in range(repetitions):
        rewind(decoder, point.context, first)
        begin, end = cuda.Event(), cuda.Event()
        begin.record(decoder.stream)
        for _ in range(n):
            decoder.decode()
        end.record(decoder.stream)
        end.synchronize()
        samples.append(cuda.get_elapsed_time(begin, end) / n)
    return Timing(tuple(samples))


def _require_same_ids(
    whole: _Model, engine: str, point: Point, plain: Decoder, graph: Decoder, first: Any
) -> None:
    """Raise VerificationError unless the replayed graph draws what single launches draw."""
    runs = []
    for decoder in (plain, graph):
        rewind(decoder, point.context, first)
        ids = []
        for _ in range(min(point.n_tokens, 16)):
            decoder.decode()
            ids.append(decoder.ids().tolist())
        runs.append(ids)
    if runs[0] != runs[1]:
        raise verify.VerificationError(
            f"{whole.name}, {engine}, {point.test}: the step replayed from a CUDA graph draws "
            "other ids than single launches; it was not timed"
        )
