"""One measured line: its fields, how it is printed, where it is kept."""

from __future__ import annotations

import csv
import datetime
import io
import json
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cufuse import __version__, device

FORMATS = ("md", "csv", "json", "jsonl")
SWEEP = "sweep"  # the test of a row that one tile of many has


@dataclass(frozen=True)
class Row:
    """What was run and what came out. What does not apply or was not measured is None."""

    test: str  # "op", "sweep", or as llama-bench writes it: "tg128 @ d512", "pp512"
    engine: str  # "reference", "unfused", "fused" or "mega"
    dtype: str
    op: str | None = None
    sizes: str | None = None  # of the op: "m x n x k" in numbers
    tile: str | None = None  # of a sweep
    model: str | None = None
    size_bytes: int | None = None  # of the model's weights
    n_parameters: int | None = None
    batch: int | None = None
    context: int | None = None  # tokens in the cache before the first step
    launches_per_token: int | None = None  # kernels launched a step, a prompt, or a call of the op
    moved_bytes: int | None = None  # global-memory bytes those launches have to read and write
    distinct_experts: float | None = None  # a layer of a mixture reads a step, mean
    ms_per_step: float | None = None  # launched one by one from Python; of a prompt, all of it
    ms_per_step_graph: float | None = None  # replayed from a CUDA graph
    ms_alone: float | None = None  # of an op: a single call behind a pause
    tok_s: float | None = None
    tok_s_std: float | None = None
    # Rates of an op that the tensor cores bound are those of a single call, all others those in a
    # graph, where there is one.
    gbps: float | None = None  # moved_bytes by the time
    tflops: float | None = None
    pct_ceiling: float | None = None  # of this device's measured read speed
    x_cublas: float | None = None  # time of the bare product by cuBLAS through CuPy by our time
    max_rel_err: float | None = None  # against float64
    std: float | None = None  # of the samples, ms
    samples: list[float] = field(default_factory=list)  # ms a step, prompt or call
    note: str | None = None
    gpu: str | None = None
    date: str | None = None
    commit: str | None = None
    version: str = __version__
    command: str | None = None


def stamp(command: str | None = None, commit: str | None = None) -> Callable[[Row], Row]:
    """Return what writes the device, the date, the commit and the command into a row."""
    known: dict[str, Any] = {
        "gpu": device.gpu_info().name if device.gpu_available() else None,
        "date": datetime.date.today().isoformat(),
        "commit": commit or _commit(),
        "command": command,
    }
    return lambda row: replace(row, **known)


def _commit() -> str | None:
    """Name the commit of the checkout this file lies in, with "+" when something was changed."""
    folder = Path(__file__).resolve().parent
    if not (folder.parent / "pyproject.toml").is_file():
        return None

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    name = git("rev-parse", "--short", "HEAD")
    return (name + ("+" if git("status", "--porcelain", "-uno") else "")) or None


# ---- tables -------------------------------------------------------------------------------------

Column = tuple[str, Callable[[Row], str]]


def number(value: float | None, digits: int = 3) -> str:
    """Write a number with so many significant digits, never as a power of ten."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    whole = len(str(int(abs(value))))
    return f"{value:.{max(digits - whole, 0)}f}" if abs(value) >= 1 else f"{value:.{digits}g}"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _us(ms: float | None) -> str:
    return number(None if ms is None else ms * 1e3)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _speed(row: Row) -> str:
    if row.tflops is not None:
        return f"{number(row.tflops)} TFLOP/s"
    return "-" if row.gbps is None else f"{number(row.gbps, 4)} GB/s"


def _rate(row: Row) -> str:
    if row.tok_s is None:
        return "-"
    return f"{number(row.tok_s, 4)} ± {number(row.tok_s_std or 0.0, 2)}"


def _megabytes(row: Row) -> str:
    return number(None if row.moved_bytes is None else row.moved_bytes / 1e6)


def _integer(value: int | None) -> str:
    return "-" if value is None else str(value)


OP_COLUMNS: tuple[Column, ...] = (
    ("op", lambda r: r.op or ""),
    ("sizes", lambda r: r.sizes or ""),
    ("dtype", lambda r: r.dtype),
    ("variant", lambda r: r.engine),
    ("launches", lambda r: _integer(r.launches_per_token)),
    ("MB moved", _megabytes),
    ("us", lambda r: _us(r.ms_per_step)),
    ("us in graph", lambda r: _us(r.ms_per_step_graph)),
    ("us alone", lambda r: _us(r.ms_alone)),
    ("speed", _speed),
    ("% ceiling", lambda r: _percent(r.pct_ceiling)),
    ("x cuBLAS", lambda r: number(r.x_cublas)),
    ("max err", lambda r: _error(r.max_rel_err)),
)

_MODEL: tuple[Column, ...] = (
    ("model", lambda r: f"{r.model} ({r.note})" if r.note else r.model or ""),
    ("size", lambda r: f"{number((r.size_bytes or 0) / 1e9)} GB"),
    ("params", lambda r: f"{number((r.n_parameters or 0) / 1e6)} M"),
    ("engine", lambda r: r.engine),
    ("dtype", lambda r: r.dtype),
    ("batch", lambda r: _integer(r.batch)),
    ("test", lambda r: r.test),
)

DECODE_COLUMNS: tuple[Column, ...] = (
    *_MODEL,
    ("launches/tok", lambda r: _integer(r.launches_per_token)),
    ("experts/layer", lambda r: number(r.distinct_experts)),
    ("MB moved", _megabytes),
    ("ms/tok", lambda r: number(r.ms_per_step)),
    ("ms/tok in graph", lambda r: number(r.ms_per_step_graph)),
    ("t/s", _rate),
    ("GB/s", lambda r: number(r.gbps, 4)),
    ("% ceiling", lambda r: _percent(r.pct_ceiling)),
    ("max err", lambda r: _error(r.max_rel_err)),
)

PROMPT_COLUMNS: tuple[Column, ...] = (
    *_MODEL,
    ("launches", lambda r: _integer(r.launches_per_token)),
    ("MB moved", _megabytes),
    ("ms", lambda r: number(r.ms_per_step)),
    ("ms in graph", lambda r: number(r.ms_per_step_graph)),
    ("t/s", _rate),
    ("GB/s", lambda r: number(r.gbps, 4)),
    ("max err", lambda r: _error(r.max_rel_err)),
)

SWEEP_COLUMNS: tuple[Column, ...] = (
    ("op", lambda r: r.op or ""),
    ("sizes", lambda r: r.sizes or ""),
    ("dtype", lambda r: r.dtype),
    ("tile", lambda r: r.tile or ""),
    ("us alone", lambda r: _us(r.ms_alone)),
    ("speed", _speed),
    ("x cuBLAS", lambda r: number(r.x_cublas)),
    ("max err", lambda r: _error(r.max_rel_err)),
    ("", lambda r: r.note or ""),
)

TABLES = (OP_COLUMNS, DECODE_COLUMNS, PROMPT_COLUMNS, SWEEP_COLUMNS)


def columns(row: Row) -> tuple[Column, ...]:
    """Return the columns of the table that a row belongs to, one of TABLES."""
    if row.test == SWEEP:
        return SWEEP_COLUMNS
    if row.op:
        return OP_COLUMNS
    return PROMPT_COLUMNS if row.test.startswith("pp") else DECODE_COLUMNS


class Writer:
    """Writes rows as they come, in one of FORMATS."""

    def __init__(self, form: str, emit: Callable[[str], None]) -> None:
        self._form = form
        self._emit = emit
        self._rows: list[Row] = []

    def write(self, row: Row) -> None:
        """Print a row, or keep it for the end."""
        first, last = not self._rows, self._rows[-1] if self._rows else None
        self._rows.append(row)
        if self._form == "jsonl":
            self._emit(json.dumps(asdict(row)))
        elif self._form == "csv":
            if first:
                self._emit(_csv([f.name for f in fields(Row)]))
            values = asdict(row)
            values["samples"] = " ".join(f"{ms:.6g}" for ms in row.samples)
            self._emit(_csv(["" if value is None else str(value) for value in values.values()]))
        elif self._form == "md":
            shape = columns(row)
            if last is None or columns(last) is not shape:
                if last is not None:
                    self._emit("")
                self._emit(_line([title for title, _ in shape]))
                self._emit(_line(["---"] * len(shape)))
            self._emit(_line([cell(row) for _, cell in shape]))

    def close(self) -> None:
        """Print what has to come whole."""
        if self._form == "json" and self._rows:
            self._emit(json.dumps([asdict(row) for row in self._rows], indent=2))


def markdown(rows: Iterable[Row]) -> str:
    """Return the rows as Markdown tables."""
    lines: list[str] = []
    writer = Writer("md", lines.append)
    for row in rows:
        writer.write(row)
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _csv(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


# ---- results ------------------------------------------------------------------------------------


def results_folder() -> Path:
    """Return `benchmarks/results` of the checkout, or of the current folder without one."""
    here = Path(__file__).resolve().parent
    if (here.parent / "pyproject.toml").is_file():
        return here / "results"
    return Path.cwd() / "benchmarks" / "results"


def save(rows: Sequence[Row], folder: Path | None = None) -> Path:
    """Append rows to `<date>-<gpu>.jsonl` and return its path."""
    folder = folder or results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    gpu = (rows[0].gpu or "cpu").lower().replace("nvidia", "").split()
    path = folder / f"{rows[0].date}-{'-'.join(gpu)}.jsonl"
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    return path


def load(folder: Path | None = None) -> list[Row]:
    """Read all rows that were kept, oldest first; those of peers are left out."""
    known = {f.name for f in fields(Row)}
    found = []
    for path in sorted((folder or results_folder()).glob("*.jsonl")):
        for line in filter(None, path.read_text().splitlines()):
            values = json.loads(line)
            if "peer" not in values:
                found.append(Row(**{k: v for k, v in values.items() if k in known}))
    return found
