"""The read ceiling of this device: our own read-only kernel, 16-byte loads, under our own timer.

How fast memory can be read depends on how much is asked for at once and on how much there is to
read, so a few shapes of the kernel are tried and the fastest counts.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from cufuse import device, jit
from cufuse.benchmarks import timing
from cufuse.device import Array

LARGE_BYTES = 2 << 30
_THREADS = 256
_NEVER = 0x5EED5EED  # an array of zeros folds to 0


def read(data: Array, sink: Array, *, unroll: int, ctas_per_sm: int | None) -> None:
    """Read uint8 data once, in chunks of 4 KB times `unroll` a CTA.

    `ctas_per_sm` CTAs an SM walk over the chunks; with None every chunk has its own CTA.
    """
    count = data.size // 16
    chunks = -(-count // (_THREADS * unroll))
    if ctas_per_sm is not None:
        chunks = min(chunks, ctas_per_sm * device.gpu_info(device.device_id(data)).sm_count)
    if count == 0:
        return
    jit.kernel("unfused/read.cu", "read", unroll).launch(
        chunks,
        _THREADS,
        {"data": data, "sink": sink, "count": count, "never": _NEVER},
        like=data,
        size_bytes=count * 16,
    )


@functools.cache
def read_ms(size_bytes: int, gpu: int = 0) -> float:
    """Return the milliseconds in a CUDA graph that reading size_bytes once takes, at best.

    The bytes come from memory: the sets that are read in turn exceed the L2 cache.
    """
    cupy = device.require_cupy()
    size = max(-(-size_bytes // 16) * 16, 16)
    sets = timing.sets_beyond_l2(size, gpu)
    with cupy.cuda.Device(gpu):
        data = cupy.zeros((sets, size), np.uint8)
        sink = cupy.zeros(1, np.uint32)
        best = math.inf
        for unroll in (4, 8, 16):
            for ctas in (2, 4, 8, None):

                def run(i: int, unroll: int = unroll, ctas: int | None = ctas) -> None:
                    read(data[i], sink, unroll=unroll, ctas_per_sm=ctas)

                best = min(best, timing.in_graph(run, sets, repetitions=3).median)
    return best


def read_gbps(gpu: int = 0) -> float:
    """Return the device's read ceiling in GB/s, over 2 GB or an eighth of a small memory."""
    size = min(LARGE_BYTES, device.gpu_info(gpu).memory_bytes // 8)
    return size / read_ms(size, gpu) / 1e6
