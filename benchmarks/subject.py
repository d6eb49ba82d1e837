"""A benchmarked model: its weights in the forms that are measured, what is measured, its oracle."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cufuse import config as configs
from cufuse import device, engines, jit, model, mxfp4, reference
from cufuse import weights as weights_module
from cufuse.benchmarks import verify
from cufuse.benchmarks.rows import Row
from cufuse.benchmarks.timing import Timing
from cufuse.config import Config
from cufuse.device import Array
from cufuse.mxfp4 import Mxfp4
from cufuse.state import State
from cufuse.weights import Weights

# Above so many parameters NumPy takes the first layers only, and float64 always does.
REFERENCE_PARAMETERS = 200_000_000
CUT_LAYERS = 2
REFERENCE_REPETITIONS = 2


class Subject:
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
        wanted = weights_module.shapes(self.config)
        arrays: dict[str, Any] = {
            name: device.twin(np.empty(shape, self.dtype)) for name, shape in wanted.items()
        }
        for name, parts in weights_module.quantized(self.config).items():
            n_experts, n, k = wanted[parts[0]]
            gated = len(parts) == 2
            size = mxfp4.packed_bytes(n_experts, n, k, gated=gated)
            for part in parts:
                del arrays[part]
            array = device.twin(np.empty(size, np.uint8))
            arrays[name] = Mxfp4(array, n_experts, n, k, self.dtype, gated)
        with jit.record(dry=True):  # nothing is packed
            return weights_module.assemble(self.config, arrays)

    def problem(self, engine: str, batch: int) -> str | None:
        """Say why an engine cannot run the model with such a batch, or return None."""
        if not hasattr(engines.get(engine), "check"):
            return None
        weights = self.on_gpu if self._where == "cuda" else self.empty()
        try:
            engines.check(engine, weights, batch=batch)
        except device.Unsupported as error:
            return str(error)
        return None

    def row(self, engine: str, test: Test, time: Timing | None = None, **values: Any) -> Row:
        """Start the row of one engine; with a time, tokens a second follow from it."""
        if time is not None:
            rates = [1e3 * test.tokens / ms for ms in time.samples]
            values["tok_s"], values["tok_s_std"] = float(np.mean(rates)), float(np.std(rates))
            values["std"], values["samples"] = time.std, list(time.samples)
        return Row(
            test=test.label,
            engine=engine,
            dtype=self.dtype.name,
            model=self.config.name,
            size_bytes=self.config.size_bytes(self.dtype.itemsize),
            n_parameters=self.config.n_parameters,
            batch=test.batch,
            context=test.context,
            **values,
        )

    def note(self, timed: Weights) -> str | None:
        """Say how much of the model was timed, when it was not all."""
        layers, of = timed.config.n_layers, self.config.n_layers
        return None if layers == of else f"{layers} of {of} layers"


@dataclass(frozen=True)
class Test(ABC):
    """What a row measures, apart from model and engine."""

    batch: int
    n_tokens: int
    context: int = 0  # tokens in the cache before the first step

    @property
    @abstractmethod
    def label(self) -> str:
        """The test as llama-bench names it."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens that one sample's time is for."""

    @abstractmethod
    def check(self, c: Config) -> None:
        """Raise when the model cannot do it."""

    @abstractmethod
    def oracle(self, subject: Subject) -> Oracle:
        """Make what the engines are compared with."""

    @abstractmethod
    def on_gpu(
        self, subject: Subject, engine: str, *, repetitions: int, oracle: Oracle | None
    ) -> Row:
        """Verify and time an engine on the current GPU."""

    @abstractmethod
    def in_numpy(self, subject: Subject, *, repetitions: int, oracle: Oracle | None) -> Row:
        """Verify and time the reference."""

    @abstractmethod
    def counted(self, subject: Subject, engine: str) -> Row:
        """Count what an engine's kernels would launch and move."""


def first_layers(weights: Weights, n: int = CUT_LAYERS) -> Weights:
    """Keep the first n layers, embedding and head of a model; arrays are shared."""
    return dataclasses.replace(weights, config=weights.config.cut(n), layers=weights.layers[:n])


def ids(c: Config, batch: int, length: int) -> np.ndarray:
    """Return seeded ids, int32 [batch, length]; sequences of a batch differ."""
    return np.random.default_rng(0).integers(0, c.vocab_size, (batch, length)).astype(np.int32)


@dataclass(frozen=True)
class Piece:
    """Tokens that go through one step of the verification."""

    length: int
    every_position: bool = False  # compare hidden states of all positions, else the last's logits


class Oracle:
    """What the first layers make of seeded ids in float64, piece by piece."""

    def __init__(self, cut: Weights, batch: int, pieces: Sequence[Piece]) -> None:
        self._distinct = min(batch, 2)  # sequences; a larger batch repeats them
        self._batch = batch
        self._dtype = np.dtype(cut.dtype)
        self._cut = cut
        self._pieces = pieces
        self._ids = ids(cut.config, self._distinct, sum(piece.length for piece in pieces))
        # NumPy computes in the dtype of the rows, which is the embedding's. Layers are widened
        # where they are used: a mixture's experts never lie in memory in float64.
        exact = dataclasses.replace(cut, layers=[]).map(lambda a: a.astype(np.float64))
        exact.layers = cut.layers
        self._wanted = self._run("reference", exact, self._ids, np.asarray)

    def error(self, engine: str, upload: Callable[[np.ndarray], Array], name: str) -> float:
        """Run an engine on the same layers; returns its error or raises VerificationError."""
        repeated = np.arange(self._batch) % self._distinct
        outputs = self._run(engine, self._cut.map(upload), self._ids[repeated], upload)
        errors: dict[bool, list[np.ndarray]] = {}  # hidden states and logits are judged apart
        for piece, got, wanted in zip(self._pieces, outputs, self._wanted, strict=True):
            hidden = piece.every_position and not _has_head_inside(engine)
            if piece.every_position and not hidden:
                wanted = self._head(wanted[:, _some_of(piece)])
            errors.setdefault(hidden, []).append(verify.row_errors(got, wanted[repeated]))
        mixture = self._cut.config.n_experts > 0
        error = max(
            verify.model_error(np.concatenate(rows), mixture=mixture) for rows in errors.values()
        )
        what = f"{name} cut to {CUT_LAYERS} layers, {engine}, {self._dtype}, batch {self._batch}"
        return verify.require(what, error, verify.MODEL_LIMIT[self._dtype.name])

    def _run(
        self,
        engine: str,
        weights: Weights,
        tokens: np.ndarray,
        upload: Callable[[np.ndarray], Array],
    ) -> list[np.ndarray]:
        """Return what each piece makes: [batch, vocab_size] or [batch, length, dim].

        Where an engine has no hidden states to show, [batch, positions, vocab_size] of some.
        """
        step = engines.get(engine).step
        headless = dataclasses.replace(
            weights, config=dataclasses.replace(weights.config, has_head=False)
        )
        state = State(weights, batch=len(tokens), capacity=tokens.shape[1])
        made = []
        for piece in self._pieces:
            part = tokens[:, state.length : state.length + piece.length]
            part = upload(np.ascontiguousarray(part))
            if not piece.every_position:
                got = step(weights, state, part)
            elif _has_head_inside(engine):
                got = step(weights, state, part, all_logits=True)[:, _some_of(piece)]
            else:
                got = step(headless, state, part)
            made.append(np.array(verify.to_numpy(got)))
        return made

    def _head(self, hidden: np.ndarray) -> np.ndarray:
        """Return the logits of float64 hidden states."""
        c = self._cut.config
        x, _ = reference.rmsnorm(
            hidden, self._cut.final_norm, eps=c.norm_eps, rounding=c.norm_rounding
        )
        return reference.linear(x, self._cut.head)


def _has_head_inside(engine: str) -> bool:
    """Whether a step of the engine is one kernel, head and all, that shows no hidden states."""
    return engine == "mega"


def _some_of(piece: Piece) -> np.ndarray:
    """Choose the positions of a piece whose logits are compared."""
    return verify.sample(piece.length, 16, np.random.default_rng(0))
