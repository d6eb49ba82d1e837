"""What every CTA of the mega kernel does when, as its own clock tells: decoded, summed up, drawn.

The kernel is compiled with `kTrace` for it (kernels_cu/device/trace.cuh) and writes what its roles
do to a buffer, a word a span. The times of two CTAs compare by the pairs of global timer and SM
clock that each role writes when it begins and when it ends.
"""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cufuse import device, generate, jit, plan, tiles
from cufuse.config import Config
from cufuse.device import Array
from cufuse.generate import Sampling
from cufuse.state import State
from cufuse.weights import Weights, hash_uniform

# In a picture, and in the order of its legend: what is lost is red and yellow.
COLORS = {
    "multiplying": "#1b7837",
    "attending": "#5aae61",
    "gathering": "#2166ac",
    "merging": "#67a9cf",
    "finishing": "#999999",
    "drawing": "#762a83",
    "waiting for activations": "#b2182b",
    "waiting for weights": "#fdae61",
    "waiting for room": "#f6e8c3",
    "waiting for sums": "#d8b365",
}
_COMPUTING = ("multiplying", "attending")
_HANDING_ON = ("finishing", "merging")  # with these a CTA's part of a phase ends
_NEXT_PHASE = "next phase"

SPAN = np.dtype(
    [
        ("cta", np.int32),
        ("role", np.int32),
        ("activity", np.int32),
        ("phase", np.int32),  # counted from the step's begin; -1 before the first
        ("begin_us", np.float64),
        ("end_us", np.float64),
        ("own_us", np.float64),  # without the spans inside it
    ]
)

PHASE = np.dtype(
    [
        ("cta", np.int32),
        ("role", np.int32),
        ("phase", np.int32),
        ("begin_us", np.float64),
        ("end_us", np.float64),
    ]
)


@dataclass(frozen=True)
class Layout:
    """How the kernel writes, read from kernels_cu/device/trace.cuh."""

    roles: tuple[str, ...]
    activities: tuple[str, ...]
    words: int  # of a row, one role of one CTA
    head: int  # of them before the spans
    activity_bits: int  # of a span's word

    @property
    def clock_bits(self) -> int:
        """How many bits of the clock a span's word has."""
        return 32 - self.activity_bits


@functools.cache
def layout() -> Layout:
    """Read the roles, the activities and the sizes from the header."""
    text = (jit.sources() / "device" / "trace.cuh").read_text()
    text = re.sub(r"//[^\n]*", "", text)

    def names(enum: str) -> list[str]:
        found = re.search(rf"enum {enum} : int \{{(.*?)\}}", text, re.DOTALL)
        if not found:
            raise ValueError(f"trace.cuh: no enum {enum}")
        return [_words(word) for word in re.findall(r"\w+", found[1])]

    def number(constant: str) -> int:
        found = re.search(rf"constexpr int {constant} = (\d+)(?: << (\d+))?;", text)
        if not found:
            raise ValueError(f"trace.cuh: no constant {constant}")
        return int(found[1]) << int(found[2] or 0)

    roles = [name.removesuffix(" role") for name in names("RoleId")[:-1]]
    return Layout(
        tuple(roles),
        tuple(names("Activity")),
        number("kTraceWords"),
        number("kTraceHead"),
        number("kActivityBits"),
    )


def _words(enumerator: str) -> str:
    """Turn "kWaitingForRoom" into "waiting for room"."""
    return " ".join(re.findall(r"[A-Z][a-z]*", enumerator)).lower()


@dataclass(frozen=True)
class Trace:
    """One step: what each role of each CTA did, in microseconds since the first one began."""

    name: str  # what was traced
    walk: tuple[tuple[int, str], ...]  # the step's phases, as plan.walk
    spans: np.ndarray  # SPAN, by begin; one inside another comes behind it
    phases: np.ndarray  # PHASE, when each role of each CTA was in it
    roles: np.ndarray  # [ctas, roles, 2] when each began and ended
    clock_error_us: float  # standard error of how two CTAs' clocks compare
    dropped: int  # spans that did not fit their row
    cycles: int  # of the role that took longest

    @property
    def ctas(self) -> int:
        """CTAs, one an SM."""
        return self.roles.shape[0]

    @property
    def us(self) -> float:
        """From the first role's begin to the last one's end."""
        return float(self.roles[..., 1].max())

    def phase(self, number: int) -> str:
        """Name a phase: "layer 3 gate_up", "head"."""
        layer, phase = self.walk[number]
        return phase if phase == plan.HEAD else f"layer {layer} {phase}"

    @property
    def problem(self) -> str | None:
        """Say what is missing from the spans, or return None."""
        if self.dropped:
            return (
                f"{self.dropped} spans are missing: a role has room for "
                f"{layout().words - layout().head} of them; trace fewer layers (--layers)"
            )
        if self.cycles >= 1 << layout().clock_bits:
            return (
                f"a role took {self.cycles} cycles and the clock of a span tells "
                f"{1 << layout().clock_bits} apart; trace fewer layers (--layers)"
            )
        return None


# ---- a step -------------------------------------------------------------------------------------


def allocate(ctas: int, like: Array) -> Array:
    """Make the buffer of a traced launch: uint64 [ctas, roles, words], on like's device."""
    made = layout()
    return device.zeros((ctas, len(made.roles), made.words), np.uint64, like)


def fill_cache(state: State, context: int) -> None:
    """Fill the cache with seeded numbers and count `context` tokens in it."""
    kind = device.kind(state.like)
    gpu = max(device.device_id(state.like), 0)
    with device.on_device_of(state.like):
        for name, cache in (("keys", state.k_cache), ("values", state.v_cache)):
            for i, layer in enumerate(cache):
                layer[...] = hash_uniform(
                    layer.shape,
                    layer.dtype,
                    seed=0,
                    tensor=f"layers.{i}.{name}",
                    half_width=math.sqrt(3.0),  # a standard deviation of 1
                    kind="cupy" if kind == "cupy" else "numpy",
                    gpu=gpu,
                )
        state.start[...] = context
    state.length = context


class Stepper:
    """A greedy step that starts from the same place each time, traced or not.

    step_and_draw: of an engine whose kernel writes what it does when it is given `trace`
    """

    def __init__(
        self, step_and_draw: Callable[..., Array], weights: Weights, state: State, token: int = 1
    ) -> None:
        self._step = step_and_draw
        self._weights = weights
        self._state = state
        self._context = state.length
        self._ids = device.empty((1,), np.int32, state.like)
        state.tokens[...] = token % weights.config.vocab_size
        c = weights.config
        tile = tiles.decode(c, tiles.target_of(state.start), weights.dtype)
        self.walk = plan.walk(c)
        self.buffer = allocate(tile.ctas, state.like)

    def enqueue(self, *, traced: bool) -> None:
        """Launch the step, without waiting for it."""
        self.rewind()
        self.launch(traced=traced)

    def rewind(self) -> None:
        """Go back to the place where all steps start."""
        self._state.length = self._context
        self._state.start[...] = self._context

    def launch(self, *, traced: bool) -> None:
        """Launch the step from where the state is."""
        self._step(
            self._weights,
            self._state,
            self._state.tokens,
            Sampling(),
            ids=self._ids,
            trace=self.buffer if traced else None,
        )

    def token(self) -> int:
        """Wait for the step and return what it drew; raises as `Decoder.ids`."""
        return int(generate.check_drawn(_to_numpy(self._ids))[0])

    def trace(self, name: str, warm_up: int = 2) -> tuple[Trace, int]:
        """Trace a step behind some that warm up, and return it with the token that it drew."""
        with device.on_device_of(self._state.like):
            for _ in range(warm_up):
                self.enqueue(traced=True)
            self.buffer[...] = 0
            self.enqueue(traced=True)
            token = self.token()
            read = _to_numpy(self.buffer)
        return decode(read, name=name, walk=self.walk), token

    def cost(self, launches: int = 20) -> tuple[float, float]:
        """Time untraced and traced steps in turn on a GPU: the medians, in microseconds."""
        cuda = device.require_cupy().cuda
        kinds = (False, True)
        with device.on_device_of(self._state.like):
            for traced in kinds:
                self.enqueue(traced=traced)
            events = [
                (traced, cuda.Event(), cuda.Event()) for _ in range(launches) for traced in kinds
            ]
            for traced, begin, end in events:
                self.rewind()
                begin.record()
                self.launch(traced=traced)
                end.record()
            events[-1][2].synchronize()
            times: dict[bool, list[float]] = {traced: [] for traced in kinds}
            for traced, begin, end in events:
                times[traced].append(cuda.get_elapsed_time(begin, end) * 1e3)
        return statistics.median(times[False]), statistics.median(times[True])


def _to_numpy(x: Array) -> np.ndarray:
    return x.get() if device.is_gpu(x) else np.array(x)


# ---- the buffer ---------------------------------------------------------------------------------


def decode(buffer: np.ndarray, *, name: str = "", walk: tuple[tuple[int, str], ...]) -> Trace:
    """Turn what a launch wrote into spans.

    buffer: uint64 [ctas, roles, words] as `allocate` makes it
    walk: the phases of the step, as `plan.walk` says them

    All SMs are taken to run at one rate, which all rows tell together; where an SM's clock stands
    is the mean over its roles. Raises ValueError for rows that no kernel wrote to their end.
    """
    made = layout()
    if buffer.ndim != 3 or buffer.shape[1:] != (len(made.roles), made.words):
        raise ValueError(
            f"trace: the buffer is {list(buffer.shape)}, wanted "
            f"[ctas, {len(made.roles)}, {made.words}]"
        )
    counts, timers, clocks, dropped = _heads(buffer, made)
    first = clocks.min(axis=(1, 2))
    elapsed = (clocks - first[:, None, None]).astype(np.float64)  # cycles
    rate = float(np.sum(timers[..., 1] - timers[..., 0])) / float(np.sum(np.diff(elapsed)))
    offsets = (timers - timers.min()) - rate * elapsed
    starts = offsets.mean(axis=(1, 2))
    error = float(np.sqrt(np.mean((offsets - starts[:, None, None]) ** 2) / offsets[0].size))
    roles = starts[:, None, None] + rate * elapsed
    starts -= roles.min()
    roles -= roles.min()

    tables, in_phases = [], []
    for cta, role in np.ndindex(counts.shape):
        words = buffer[cta, role, made.head : made.head + counts[cta, role]]
        activity, *cycles = _read(words, clocks[cta, role, 0], made)
        table = np.zeros(words.size, SPAN)
        table["cta"], table["role"], table["activity"] = cta, role, activity
        for field, at in zip(("begin_us", "end_us"), cycles, strict=True):
            table[field] = (starts[cta] + rate * (at - first[cta])) / 1e3
        next_phase = activity == made.activities.index(_NEXT_PHASE)
        table["phase"] = np.cumsum(next_phase) - 1
        tables.append(_nest(table[~next_phase]))
        begins = table["begin_us"][next_phase].tolist()
        ends = [*begins[1:], roles[cta, role, 1] / 1e3]
        in_phases += [
            (cta, role, phase, begin, end)
            for phase, (begin, end) in enumerate(zip(begins, ends, strict=False))
        ]
    spans = np.concatenate(tables)
    return Trace(
        name,
        walk,
        spans[_outer_first(spans)],
        np.array(in_phases, PHASE),
        roles / 1e3,
        error / 1e3,
        dropped,
        int(np.diff(clocks).max()),
    )


def _heads(buffer: np.ndarray, made: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Return counts [ctas, roles], timers in ns and clocks in cycles [.., .., 2], and the drops."""
    heads = buffer[:, :, : made.head].astype(np.int64)
    counts, timers, clocks = heads[..., 0], heads[..., 1:5:2], heads[..., 2:5:2]
    wrong = (clocks[..., 1] <= clocks[..., 0]) | (timers[..., 1] < timers[..., 0])
    wrong |= counts < 0
    if wrong.any() or not (timers[..., 1] > timers[..., 0]).any():
        cta, role = (int(i) for i in np.argwhere(wrong)[0]) if wrong.any() else (0, 0)
        raise ValueError(
            f"trace: the {made.roles[role]} of CTA {cta} did not come to its end; was the launch "
            "one that traces?"
        )
    kept = np.minimum(counts, made.words - made.head)
    return kept, timers, clocks, int((counts - kept).sum())


def _read(
    words: np.ndarray, row_began: int, made: Layout
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the activity of each word of a row, and the clock at its begin and at its end.

    A word has the lower bits of the clock at its end: they are unwrapped from where the row began.
    A launch is far shorter than it takes them to come round; `Trace.problem` says when it was not.
    """
    low, took = (words & np.uint64(0xFFFFFFFF)).astype(np.int64), words >> np.uint64(32)
    activity = low & ((1 << made.activity_bits) - 1)
    if (activity >= len(made.activities)).any():
        raise ValueError(
            f"trace: activity {activity.max()} is none of {len(made.activities)}; the kernel and "
            "this cufuse differ"
        )
    ends = row_began + (((low >> made.activity_bits) - row_began) & ((1 << made.clock_bits) - 1))
    return activity, ends - took.astype(np.int64), ends


def _outer_first(spans: np.ndarray) -> np.ndarray:
    """Return the order by begin in which a span comes behind the one that it is inside of."""
    return np.lexsort((-spans["end_us"], spans["begin_us"]))


def _nest(spans: np.ndarray) -> np.ndarray:
    """Return a row's spans, outer ones first, with their own time."""
    spans = spans[_outer_first(spans)]
    begins, ends = spans["begin_us"].tolist(), spans["end_us"].tolist()
    own = [end - begin for begin, end in zip(begins, ends, strict=True)]
    around: list[int] = []
    for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        while around and ends[around[-1]] < end:
            around.pop()
        if around:
            own[around[-1]] -= end - begin
        around.append(i)
    spans["own_us"] = own
    return spans


# ---- what it says -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What a role spends on an activity, the mean over the CTAs."""

    role: str
    activity: str
    us: float
    percent: float  # of the role's time


@dataclass(frozen=True)
class Phase:
    """One phase of all layers that have it, means over them in microseconds."""

    name: str
    us: float  # from the last CTA's end of the phase before to that of this one
    skew_us: float  # between the first and the last CTA's end
    late_us: float  # between the mean and the last CTA's end
    hand_off_us: float | None  # from the last CTA's end until the next phase's CTAs compute


def shares(trace: Trace) -> list[Share]:
    """Sum up each role's activities; what is in no span is "other"."""
    made = layout()
    found = []
    for role, name in enumerate(made.roles):
        mine = trace.spans[trace.spans["role"] == role]
        whole = float(np.diff(trace.roles[:, role]).mean())
        total = 0.0
        for activity in COLORS:
            own = mine["own_us"][mine["activity"] == made.activities.index(activity)]
            us = float(own.sum()) / trace.ctas
            total += us
            if own.size:
                found.append(Share(name, activity, us, 100 * us / whole))
        found.append(Share(name, "other", whole - total, 100 * (whole - total) / whole))
    return found


def phases(trace: Trace) -> list[Phase]:
    """Tell of each kind of phase how far apart the CTAs end, and what handing on takes.

    A CTA has ended a phase when it stored its last result, and computes in the next one when what
    it waited for lies in its shared memory, mean over the CTAs. Attention does not need all of qkv.
    """
    count = len(trace.walk)
    ends = np.full((count, trace.ctas), np.nan)
    starts = np.full((count, trace.ctas), np.nan)
    last, first = _of(trace, _HANDING_ON), _of(trace, _COMPUTING)
    np.fmax.at(ends, (last["phase"], last["cta"]), last["end_us"])
    np.fmin.at(starts, (first["phase"], first["cta"]), first["begin_us"])
    found = []
    for name in (*plan.PHASES, plan.HEAD):
        numbers = [i for i, (_, phase) in enumerate(trace.walk) if phase == name]
        there = [p for p in numbers if np.isfinite(ends[p]).any()]
        if not there:
            continue
        own = [ends[p][np.isfinite(ends[p])] for p in there]
        handed = [
            float(np.nanmean(starts[p + 1])) - float(e.max())
            for p, e in zip(there, own, strict=True)
            if p + 1 < count and np.isfinite(starts[p + 1]).any()
        ]
        before = [np.nanmax(ends[p - 1]) if p else 0.0 for p in there]
        found.append(
            Phase(
                name,
                float(np.mean([e.max() - b for e, b in zip(own, before, strict=True)])),
                float(np.mean([e.max() - e.min() for e in own])),
                float(np.mean([e.max() - e.mean() for e in own])),
                float(np.mean(handed)) if handed else None,
            )
        )
    return found


def _of(trace: Trace, activities: Sequence[str]) -> np.ndarray:
    """Return the spans of some activities that lie in a phase of the model."""
    spans = trace.spans
    chosen = [layout().activities.index(name) for name in activities]
    inside = (spans["phase"] >= 0) & (spans["phase"] < len(trace.walk))
    return spans[inside & np.isin(spans["activity"], chosen)]


def summary(trace: Trace) -> str:
    """Write the shares and the phases as text."""
    lines = [
        f"{trace.name}: {trace.us:.1f} us, {trace.ctas} CTAs, clocks aligned to "
        f"{trace.clock_error_us:.2f} us",
        "",
        "| role | activity | us | % |",
        "| --- | --- | --- | --- |",
        *(f"| {s.role} | {s.activity} | {s.us:.1f} | {s.percent:.1f} |" for s in shares(trace)),
        "",
        "| phase | us | first to last CTA's end | mean to last | last to the next phase |",
        "| --- | --- | --- | --- | --- |",
    ]
    for p in phases(trace):
        handed = "-" if p.hand_off_us is None else f"{p.hand_off_us:.2f}"
        lines.append(f"| {p.name} | {p.us:.2f} | {p.skew_us:.2f} | {p.late_us:.2f} | {handed} |")
    return "\n".join(lines)


# ---- for others to look at ----------------------------------------------------------------------


def chrome(trace: Trace) -> dict[str, Any]:
    """Return the trace as Perfetto and chrome://tracing read it: a process a CTA, a thread a role.

    Times are in microseconds. Around the spans of a phase lies one with its name.
    """
    made = layout()
    named: list[dict[str, Any]] = []
    for cta in range(trace.ctas):
        named.append(_named("process_name", cta, 0, name=f"CTA {cta}"))
        named.append(_named("process_sort_index", cta, 0, sort_index=cta))
        for role, name in enumerate(made.roles):
            named.append(_named("thread_name", cta, role, name=name))
            named.append(_named("thread_sort_index", cta, role, sort_index=role))
    events = [
        _complete(made.activities[span["activity"]], "activity", span) for span in trace.spans
    ]
    events += [_complete(trace.phase(int(p["phase"])), "phase", p) for p in trace.phases]
    events.sort(key=lambda event: (event["ts"], -event["dur"], event["cat"] != "phase"))
    return {
        "traceEvents": named + events,
        "displayTimeUnit": "ns",
        "otherData": {
            "traced": trace.name,
            "dropped spans": trace.dropped,
            "clock error us": round(trace.clock_error_us, 3),
        },
    }


def _named(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _complete(name: str, cat: str, span: Any) -> dict[str, Any]:
    ts = round(float(span["begin_us"]), 3)
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "pid": int(span["cta"]),
        "tid": int(span["role"]),
        "ts": ts,
        "dur": round(round(float(span["end_us"]), 3) - ts, 3),
    }


def write(trace: Trace, path: Path) -> None:
    """Write Chrome trace JSON."""
    path.write_text(json.dumps(chrome(trace)))


def raster(trace: Trace, role: int, columns: int) -> np.ndarray:
    """Return what each CTA's role does as time goes by: int [ctas, columns], -1 for nothing."""
    grid = np.full((trace.ctas, columns), -1)
    scale = columns / trace.us
    for span in trace.spans[trace.spans["role"] == role]:  # inner ones come behind outer ones
        begin = int(span["begin_us"] * scale)
        end = max(math.ceil(span["end_us"] * scale), begin + 1)
        grid[span["cta"], begin:end] = span["activity"]
    return grid


def require_matplotlib() -> None:
    """Raise Unsupported, with the line that installs it, without matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise device.Unsupported(
            'trace: --png needs matplotlib: pip install "cufuse[plot]"'
        ) from error


def draw(trace: Trace, path: Path) -> None:
    """Write a picture, a panel a role: SM by time, the colours are the activities.

    Raises Unsupported without matplotlib.
    """
    require_matplotlib()
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    made = layout()
    colors = ["#ffffff", *(COLORS.get(name, "#ffffff") for name in made.activities)]
    figure = Figure(figsize=(16, 12), layout="constrained")
    panels = figure.subplots(len(made.roles), 1, sharex=True)
    for role, axis in enumerate(panels):
        axis.imshow(
            raster(trace, role, 3000),
            cmap=ListedColormap(colors),
            norm=BoundaryNorm(np.arange(-1.5, len(made.activities)), len(colors)),
            extent=(0.0, trace.us, trace.ctas - 0.5, -0.5),
            aspect="auto",
            interpolation="nearest",
        )
        axis.set_ylabel(f"{made.roles[role]}, SM")
        axis.yaxis.get_major_locator().set_params(integer=True)
    panels[-1].set_xlabel("us")
    figure.suptitle(trace.name)
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=150)


def describe(config: Config, dtype: Any, context: int) -> str:
    """Name what is traced."""
    return f"{config.name} ({config.n_layers} layers), {np.dtype(dtype)}, {context} in the cache"
