"""A benchmarked op: its arrays, its variants, how it is checked and how much work it is."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from cufuse import device, jit, weights
from cufuse.benchmarks import ceilings, timing, verify
from cufuse.benchmarks.rows import Row
from cufuse.device import Array

Arrays = dict[str, Array]
Spec = Mapping[str, tuple[tuple[int, ...], Any]]  # name -> shape, dtype

# Above so many operations a byte no GPU that we know is bound by memory, and TFLOP/s are shown.
_COMPUTE_BOUND = 128
_SAMPLED_ROWS, _SAMPLED_COLUMNS = 16, 256


class Case:
    """One op with its sizes; a subclass a file, named as the op, which `catalogue` finds.

    A variant is a method that takes the arrays of one set and leaves the result in them: `unfused`
    and `fused` launch our kernels, `cublas` computes the bare product, `reference` is NumPy.
    """

    name: ClassVar[str]
    size_names: ClassVar[str]  # "m n k"
    gpu_sizes: ClassVar[tuple[tuple[int, ...], ...]]
    cpu_sizes: ClassVar[tuple[tuple[int, ...], ...]]
    small_size: ClassVar[tuple[int, ...]]  # what the tests run
    rounded: ClassVar[int] = 1  # how many results in a row `unfused` rounds to the dtype

    def __init__(self, sizes: tuple[int, ...], dtype: np.dtype) -> None:
        names = self.size_names.split()
        if len(sizes) != len(names) or min(sizes) < 1:
            raise ValueError(
                f"bench {self.name}: sizes are {'x'.join(map(str, sizes))}, wanted "
                f"{'x'.join(names)}"
            )
        self.sizes = sizes
        self.size = dict(zip(names, sizes, strict=True))
        self.dtype = dtype

    def inputs(self) -> Spec:
        """Arrays that are read."""
        raise NotImplementedError

    def outputs(self) -> Spec:
        """Arrays that are the result."""
        raise NotImplementedError

    def between(self) -> Spec:
        """Intermediates that only `unfused` and `cublas` need."""
        return {}

    def unfused(self, a: Arrays) -> None:
        """Launch one kernel for each elementary operation."""
        raise NotImplementedError

    def fused(self, a: Arrays) -> None:
        """Launch the glued kernel."""
        raise NotImplementedError

    def cublas(self, a: Arrays) -> None:
        """Compute the bare matrix product."""
        raise NotImplementedError

    def reference(self, a: Arrays) -> None:
        """Compute the result in NumPy."""
        raise NotImplementedError

    def error(self, a: Arrays, rows: np.ndarray, rng: np.random.Generator) -> float:
        """Compare the outputs of some rows with float64; returns the largest relative error."""
        raise NotImplementedError

    @property
    def flops(self) -> int:
        """Multiplications and additions of the matrix products."""
        raise NotImplementedError

    @property
    def needed_bytes(self) -> int:
        """Bytes that any way of computing it reads and writes: inputs and outputs once."""
        return sum(_size(spec) for spec in (*self.inputs().values(), *self.outputs().values()))

    @property
    def compute_bound(self) -> bool:
        """Tell whether the tensor cores rather than memory set the pace."""
        return self.flops > _COMPUTE_BOUND * self.needed_bytes

    def scale(self, name: str) -> float:
        """Half of the range that an input's numbers are drawn from, around 0."""
        return 1.0

    def limit(self, engine: str) -> float:
        """The largest error that is right."""
        times = self.rounded if engine == "unfused" else 1
        return verify.OP_LIMIT[self.dtype.name] * math.sqrt(times)

    def arrays(self, kind: str, index: int = 0, *, filled: bool = True) -> Arrays:
        """Make one set: inputs full of seeded numbers, room for everything else."""
        made: Arrays = {}
        for name, (shape, dtype) in self.inputs().items():
            made[name] = (
                weights.hash_uniform(
                    shape,
                    dtype,
                    seed=index,
                    tensor=f"{self.name} {name}",
                    half_width=self.scale(name),
                    kind=kind,
                )
                if filled
                else _empty(shape, dtype, kind)
            )
        for name, (shape, dtype) in {**self.outputs(), **self.between()}.items():
            made[name] = _empty(shape, dtype, kind)
        return made

    def verify(self, a: Arrays, engine: str) -> float:
        """Run one variant on poisoned outputs and return its error; raises VerificationError."""
        for name in (*self.outputs(), *self.between()):
            verify.poison(a[name])
        getattr(self, engine)(a)
        return self.require(
            {name: verify.to_numpy(a[name]) for name in (*self.inputs(), *self.outputs())}, engine
        )

    def require(self, host: Arrays, engine: str, how: str = "") -> float:
        """Return the error of some rows of a result; raises VerificationError if it is too large.

        host: inputs and outputs
        how: what was done in particular, for the message
        """
        rng = np.random.default_rng(0)
        rows = verify.sample(self.size["m"], _SAMPLED_ROWS, rng)
        what = f"{self.name} {'x'.join(map(str, self.sizes))}, {engine}, {self.dtype}{how}"
        return verify.require(what, self.error(host, rows, rng), self.limit(engine))

    def columns(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Choose the output columns that are compared."""
        return verify.sample(n, _SAMPLED_COLUMNS, rng)

    def row(self, engine: str, **values: Any) -> Row:
        """Start the row of one variant."""
        return Row(
            test="op",
            engine=engine,
            dtype=self.dtype.name,
            op=self.name,
            sizes=" x ".join(map(str, self.sizes)),
            batch=self.size["m"],
            **values,
        )


def run_on_gpu(
    case: Case, engines: tuple[str, ...], *, repetitions: int, checked: bool
) -> Iterator[Row]:
    """Verify and time a case on the current GPU; yields a row for each engine."""
    gpu = device.require_cupy().cuda.runtime.getDevice()
    count = timing.sets_beyond_l2(case.needed_bytes, gpu)
    sets = [case.arrays("cupy", i) for i in range(count)]
    # A large product's speed is quoted as libraries quote theirs, of single calls; what waits for
    # memory is measured as a model does it, one after the other.
    product = cublas_run(case, sets)
    product_ms = None
    if product is not None and not case.compute_bound:
        product_ms = timing.in_graph(product, count, repetitions=repetitions).median
    for engine in engines:
        if engine not in ("unfused", "fused"):
            continue
        error = case.verify(sets[0], engine) if checked else None
        variant = getattr(case, engine)

        def run(i: int, variant: Any = variant) -> None:
            variant(sets[i])

        with jit.record() as record:
            run(0)
        plain = timing.plain(run, count, repetitions=repetitions)
        graph = timing.in_graph(run, count, repetitions=repetitions)
        if product is not None and case.compute_bound:
            alone, beside = timing.alone_in_turn([run, product], count, repetitions=repetitions)
            product_ms = beside.median
        else:
            alone = timing.alone(run, count, repetitions=repetitions)
        quoted = alone if case.compute_bound else graph
        ms = quoted.median
        memory_bound = not case.compute_bound
        yield case.row(
            engine,
            launches_per_token=len(record.launches),
            moved_bytes=record.size_bytes,
            ms_per_step=plain.median,
            ms_per_step_graph=graph.median,
            ms_alone=alone.median,
            gbps=record.size_bytes / ms / 1e6,
            tflops=None if memory_bound else case.flops / ms / 1e9,
            pct_ceiling=(
                100 * ceilings.read_ms(case.needed_bytes, gpu) / ms if memory_bound else None
            ),
            x_cublas=None if product_ms is None else product_ms / ms,
            max_rel_err=error,
            std=quoted.std,
            samples=list(quoted.samples),
        )


def run_on_cpu(
    case: Case, engines: tuple[str, ...], *, repetitions: int, checked: bool, where: str = "cpu"
) -> Iterator[Row]:
    """Time NumPy and count what the kernels would launch and move; yields a row for each engine.

    where: "cpu", or "cpu-kernels" to verify the kernels on the CPU twin too
    """
    for engine in engines:
        if engine == "reference":
            a = case.arrays("numpy")
            error = case.verify(a, engine) if checked else None

            def run(_: int, a: Arrays = a) -> None:
                case.reference(a)

            time = timing.on_cpu(run, repetitions=repetitions)
            yield case.row(
                engine,
                launches_per_token=0,
                ms_per_step=time.median,
                max_rel_err=error,
                std=time.std,
                samples=list(time.samples),
            )
        elif engine in ("unfused", "fused"):
            with jit.record(dry=True) as record:
                getattr(case, engine)(case.arrays("twin", filled=False))
            verified = checked and where == "cpu-kernels"
            yield case.row(
                engine,
                launches_per_token=len(record.launches),
                moved_bytes=record.size_bytes,
                max_rel_err=case.verify(case.arrays("twin"), engine) if verified else None,
            )


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read "1x4096x4096"; raises ValueError for anything else."""
    if not re.fullmatch(r"\d+(\s*x\s*\d+)*", text.strip()):
        raise ValueError(f"sizes are {text!r}, wanted numbers such as 1x4096x4096")
    return tuple(int(part) for part in text.split("x"))


def double(x: np.ndarray) -> np.ndarray:
    """Widen to float64."""
    return x.astype(np.float64)


def cublas_run(case: Case, sets: list[Arrays]) -> timing.Run | None:
    """Return what runs the bare product by cuBLAS; None where CuPy finds no cuBLAS."""
    try:
        case.cublas(sets[0])
    except ImportError:
        return None

    def run(i: int) -> None:
        case.cublas(sets[i])

    return run


def _size(spec: tuple[tuple[int, ...], Any]) -> int:
    shape, dtype = spec
    return math.prod(shape) * np.dtype(dtype).itemsize


def _empty(shape: tuple[int, ...], dtype: Any, kind: str) -> Array:
    made = device.namespace(kind).empty(shape, dtype)
    return device.twin(made) if kind == "twin" else made
