"""Time calls: CUDA events on the GPU, back to back, inside a CUDA graph, or each behind a pause; a
clock on the CPU.

Back to back a large product heats the GPU until it lowers its clocks: so it runs inside a model.
Libraries' figures are mostly of calls behind a pause, which are faster. The two are not to be
compared with each other.

Inputs rotate through more memory than the L2 cache holds, as the weights of a model do.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cufuse import device, jit

Run = Callable[[int], Any]  # runs once, on the given set of inputs

_PAUSE_SECONDS = 1e-3  # before a call that is timed alone, at least: Python is slow at times
_CALLS_ALONE = 9  # a repetition


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call, one sample a repetition."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples)

    @property
    def mean(self) -> float:
        """The mean of all samples."""
        return statistics.fmean(self.samples)

    @property
    def std(self) -> float:
        """The standard deviation of the samples; 0 for one."""
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0


def sets_beyond_l2(size_bytes: int, gpu: int = 0, most: int = 512) -> int:
    """Return how many input sets of that size make three times the L2 cache, at least two."""
    wanted = math.ceil(3 * device.gpu_info(gpu).l2_bytes / max(size_bytes, 1))
    return min(max(wanted, 2), most)


def plain(run: Run, sets: int, *, repetitions: int = 5, budget_ms: float = 20.0) -> Timing:
    """Time calls launched one after the other from Python on the current stream."""
    cuda = device.require_cupy().cuda
    for i in range(min(sets, 3)):
        run(i)
    calls = _calls(_events(lambda: run(0), cuda.get_current_stream(), 1)[0], sets, budget_ms)

    def loop() -> None:
        for i in range(calls):
            run(i % sets)

    samples = _events(loop, cuda.get_current_stream(), repetitions)
    return Timing(tuple(ms / calls for ms in samples))


def in_graph(run: Run, sets: int, *, repetitions: int = 5, budget_ms: float = 4.0) -> Timing:
    """Time calls replayed from one CUDA graph that holds many of them."""
    cuda = device.require_cupy().cuda
    stream = cuda.Stream(non_blocking=True)
    cuda.runtime.deviceSynchronize()
    with stream:
        for i in range(min(sets, 3)):
            run(i)
        one = capture(lambda: [run(i) for i in range(sets)], stream)
        one.launch(stream)
        once = min(_events(lambda: one.launch(stream), stream, 3))
        rounds = max(1, math.ceil(budget_ms / max(once, 1e-3)))
        rounds = min(rounds, max(1, 4000 // sets))
        graph = (
            one
            if rounds == 1
            else capture(lambda: [run(i) for _ in range(rounds) for i in range(sets)], stream)
        )
        graph.launch(stream)
        samples = _events(lambda: graph.launch(stream), stream, repetitions)
    return Timing(tuple(ms / (rounds * sets) for ms in samples))


def alone(run: Run, sets: int, *, repetitions: int = 5) -> Timing:
    """Time single calls on the current stream, each behind a pause in which it is enqueued.

    Returns a sample a call, 9 a repetition; their median is what to quote.
    """
    return alone_in_turn([run], sets, repetitions=repetitions)[0]


def alone_in_turn(runs: Sequence[Run], sets: int, *, repetitions: int = 5) -> list[Timing]:
    """Time single calls as `alone` does, of several in turn: all meet the same clocks.

    What a GPU did before decides what power lets it do. Returns a timing for each run.
    """
    cuda = device.require_cupy().cuda
    stream = cuda.get_current_stream()
    pause(0)
    host = []
    for run in runs:
        run(0)
        for i in range(_CALLS_ALONE):
            stream.synchronize()
            started = time.perf_counter()
            run(i % sets)
            host.append(time.perf_counter() - started)
    seconds = max(_PAUSE_SECONDS, 2 * statistics.median(host))
    samples: list[list[float]] = [[] for _ in runs]
    for i in range(_CALLS_ALONE * repetitions):
        for run, found in zip(runs, samples, strict=True):
            stream.synchronize()
            begin, end = cuda.Event(), cuda.Event()
            pause(seconds)
            begin.record(stream)
            run(i % sets)
            end.record(stream)
            end.synchronize()
            found.append(cuda.get_elapsed_time(begin, end))
    return [Timing(tuple(found)) for found in samples]


def pause(seconds: float) -> None:
    """Keep the current stream waiting for so long."""
    like = device.require_cupy().empty(1)
    jit.kernel("unfused/pause.cu", "pause").launch(1, 32, {"ns": int(seconds * 1e9)}, like=like)


def capture(work: Callable[[], Any], stream: Any) -> Any:
    """Capture what `work` enqueues on a stream into a CUDA graph; nothing runs."""
    stream.begin_capture()
    try:
        work()
    finally:
        graph = stream.end_capture()
    return graph


def on_cpu(run: Run, *, repetitions: int = 5, budget_ms: float = 2000.0) -> Timing:
    """Time NumPy calls with a clock; fewer repetitions when one call fills the budget."""
    samples = []
    run(0)
    for _ in range(repetitions):
        begin = time.perf_counter()
        run(0)
        samples.append((time.perf_counter() - begin) * 1e3)
        if sum(samples) > budget_ms:
            break
    return Timing(tuple(samples))


def _calls(one_ms: float, sets: int, budget_ms: float) -> int:
    return max(sets, min(2000, math.ceil(budget_ms / max(one_ms, 1e-3))))


def _events(work: Callable[[], Any], stream: Any, repetitions: int) -> list[float]:
    """Time `work` on a stream, all repetitions enqueued before the first wait."""
    cuda = device.require_cupy().cuda
    events = [cuda.Event() for _ in range(repetitions + 1)]
    stream.synchronize()
    events[0].record(stream)
    for event in events[1:]:
        work()
        event.record(stream)
    events[-1].synchronize()
    return [cuda.get_elapsed_time(begin, end) for begin, end in itertools.pairwise(events)]
