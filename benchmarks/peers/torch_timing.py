"""How the peers' scripts time a call and write a row."""

from __future__ import annotations

import datetime
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

_PAUSE_CYCLES = 200_000  # what a call needs to be enqueued before the GPU comes to it


def samples_ms(
    calls: Sequence[Callable[[], Any]], device: torch.device, repetitions: int, *, pause: bool
) -> list[float]:
    """Time single calls in turn, each by events of its own, once all have run.

    pause: let the GPU wait before each, so that it has rested and the host is not timed
    """
    for call in calls:
        call()
    samples = []
    for i in range(repetitions):
        call = calls[i % len(calls)]
        if device.type == "cpu":
            started = time.perf_counter()
            call()
            samples.append((time.perf_counter() - started) * 1e3)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if pause:
            torch.cuda._sleep(_PAUSE_CYCLES)
        begin.record()
        call()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end))
    return samples


def write_row(device: torch.device, samples: Sequence[float], **fields: Any) -> None:
    """Print a JSON line: what was run, the median and the samples in ms, and where."""
    row = {
        "peer": "torch",
        "version": torch.__version__,
        **fields,
        "ms": statistics.median(samples),
        "ms_min": min(samples),
        "samples": [round(ms, 5) for ms in samples],
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(
            ["python", f"benchmarks/peers/{Path(sys.argv[0]).name}", *sys.argv[1:]]
        ),
    }
    print(json.dumps(row), flush=True)


def choose_device(name: str) -> torch.device:
    """Return the device; ends the program with a sentence when it is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU; --device cpu tries the script out")
    return torch.device(name)
