"""Where arrays live and what the GPU is: the only file that asks the driver.

An array is of one of three kinds. `numpy` arrays take the reference path, `cupy` arrays run the
kernels on their GPU, and `twin` arrays run the same kernels, compiled by a C++ compiler, on the
CPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import mmap
import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = Any  # numpy.ndarray, cupy.ndarray or TwinArray

bfloat16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), bfloat16)

INSTALL_CUPY = 'pip install "cufuse[cuda13]"'

# Older ones lack bfloat16, or compile every kernel anew in each process.
_OLDEST_CUPY = (14, 2)
_OLDEST_ARCH = 80  # cp.async and mma of bfloat16

_MAP_NORESERVE = 0x4000  # of Linux's mmap; Python's module names it from 3.13 on


class Unsupported(NotImplementedError):
    """An architecture or a model's feature that cufuse does not have; the text names both sides."""


class TwinArray(np.ndarray):
    """A NumPy array on which ops run their CUDA kernels on the CPU: slow, for tests."""


def twin(x: Any) -> TwinArray:
    """View an array-like as a TwinArray; contiguous input is not copied."""
    return np.asarray(x, order="C").view(TwinArray)


def kind(x: Any) -> str:
    """Return "numpy", "cupy" or "twin"; raises TypeError for anything else."""
    if isinstance(x, np.ndarray):
        return "twin" if isinstance(x, TwinArray) else "numpy"
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        return "cupy"
    raise TypeError(f"expected a NumPy or CuPy array, got {type(x).__name__}")


def is_gpu(x: Any) -> bool:
    """Tell whether x lives on a GPU."""
    return kind(x) == "cupy"


def as_array(x: Any) -> Array:
    """Take an array of any library without a copy.

    Accepts NumPy and CuPy arrays, objects with `__cuda_array_interface__` and DLPack tensors. Lists
    and scalars raise TypeError: their dtype would be a guess.
    """
    if isinstance(x, np.ndarray):
        return x
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        return x
    if hasattr(x, "__dlpack_device__"):
        device_type = int(x.__dlpack_device__()[0])
        return np.from_dlpack(x) if device_type == 1 else require_cupy().from_dlpack(x)
    if hasattr(x, "__cuda_array_interface__"):
        return require_cupy().asarray(x)
    raise TypeError(f"expected a NumPy or CuPy array, got {type(x).__name__}")


def namespace(array_kind: str) -> Any:
    """Return the module that makes arrays of a kind (numpy for twins too)."""
    return require_cupy() if array_kind == "cupy" else np


def empty(shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    """Allocate an array of like's kind on like's device; its contents are undefined."""
    return _allocate("empty", shape, dtype, like)


def zeros(shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    """Allocate a zeroed array of like's kind on like's device."""
    return _allocate("zeros", shape, dtype, like)


def _allocate(how: str, shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    array_kind = kind(like)
    if array_kind == "cupy":
        with on_device_of(like):
            return getattr(require_cupy(), how)(shape, dtype)
    made = _reserved(shape, dtype) if how == "empty" else np.zeros(shape, dtype)
    return made.view(TwinArray) if array_kind == "twin" else made


def _reserved(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an empty NumPy array, of whose memory there need not be more than is written.

    Linux refuses what is larger than the machine has unless it is asked for so.
    """
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if size_bytes < 1 << 30 or sys.platform != "linux":
        return np.empty(shape, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), dtype).reshape(shape)


def copy(source: Array, target: Array) -> None:
    """Copy a contiguous array into another of its kind and size, on the current stream."""
    if kind(target) == "cupy":
        target.data.copy_from_device_async(source.data, source.nbytes)
    else:
        target[...] = source


def device_id(x: Array) -> int:
    """Return the GPU's number, or -1 for host memory."""
    return -1 if isinstance(x, np.ndarray) else x.data.device_id


def address(x: Array) -> int:
    """Return the address of the first element."""
    return x.__array_interface__["data"][0] if isinstance(x, np.ndarray) else x.data.ptr


def span(x: Array) -> tuple[int, int]:
    """Return the addresses of the first element and of the end of the last one.

    Strides, if there are any, are not negative.
    """
    begin = address(x)
    if x.flags.c_contiguous:
        return begin, begin + x.nbytes
    steps = zip(x.shape, x.strides, strict=True)
    return begin, begin + x.dtype.itemsize + sum((size - 1) * stride for size, stride in steps)


def overlap(a: Array, b: Array) -> bool:
    """Tell whether the memory from first to last element of two arrays has a part in common."""
    if device_id(a) != device_id(b):
        return False
    (first, first_end), (second, second_end) = span(a), span(b)
    return max(first, second) < min(first_end, second_end)


_HERE = contextlib.nullcontext()


def on_device_of(x: Array) -> contextlib.AbstractContextManager[Any]:
    """Make x's GPU current inside the block and restore the caller's afterwards."""
    cupy = sys.modules.get("cupy")
    if (
        cupy is None
        or not isinstance(x, cupy.ndarray)
        or cupy.cuda.runtime.getDevice() == x.data.device_id
    ):
        return _HERE
    return x.device


def require_cupy() -> Any:
    """Import CuPy, or raise Unsupported with the line that installs it."""
    try:
        import cupy
    except ImportError as error:
        raise Unsupported(f"CuPy is not installed: {INSTALL_CUPY}") from error
    return cupy


@functools.cache
def gpu_problem() -> str | None:
    """Say in one sentence why no GPU can be used, or return None."""
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed: {INSTALL_CUPY}"
    try:
        cupy = require_cupy()
        if cupy.cuda.runtime.getDeviceCount() == 0:
            return "the CUDA driver finds no GPU"
        gpu_info(0)
    except Unsupported as error:
        return str(error)
    except Exception as error:  # the driver's own errors have no common base class
        return f"no GPU can be used ({error})"
    return None


def gpu_available() -> bool:
    """Tell whether CuPy is installed and finds a GPU that the kernels run on."""
    return gpu_problem() is None


@dataclass(frozen=True)
class GpuInfo:
    """What kernels are chosen by, as the driver tells it."""

    name: str
    arch: str  # as NVRTC takes it: "90a" on Hopper, "80" on Ampere
    sm_count: int
    shared_bytes_per_block: int
    memory_bytes: int
    l2_bytes: int
    driver: str
    cuda_runtime: str


# Architectures whose own instructions need the suffixed target.
_SUFFIXED = {"90": "90a", "100": "100a", "103": "103a", "120": "120a", "121": "121a"}


@functools.cache
def gpu_info(gpu: int = 0) -> GpuInfo:
    """Ask the driver about a GPU; raises Unsupported for one, or a CuPy, that is too old."""
    cupy = require_cupy()
    _check_version(cupy.__version__)
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(gpu)
    number = f"{properties['major']}{properties['minor']}"
    name = properties["name"].decode()
    if int(number) < _OLDEST_ARCH:
        raise Unsupported(f"{name} is sm_{number}; the kernels need sm_{_OLDEST_ARCH} or newer")
    return GpuInfo(
        name=name,
        arch=_SUFFIXED.get(number, number),
        sm_count=properties["multiProcessorCount"],
        shared_bytes_per_block=properties["sharedMemPerBlockOptin"],
        memory_bytes=properties["totalGlobalMem"],
        l2_bytes=properties["l2CacheSize"],
        driver=_version(runtime.driverGetVersion()),
        cuda_runtime=_version(runtime.runtimeGetVersion()),
    )


def _check_version(cupy_version: str) -> None:
    major, minor = cupy_version.split(".")[:2]
    if (int(major), int(minor)) < _OLDEST_CUPY:
        raise Unsupported(
            f"CuPy {cupy_version} is too old, wanted {'.'.join(map(str, _OLDEST_CUPY))} or newer: "
            f"{INSTALL_CUPY}"
        )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def as_stream(stream: Any) -> Any:
    """Turn None, a CuPy stream, a `__cuda_stream__` object or a raw handle into a CuPy stream."""
    cuda = require_cupy().cuda
    if stream is None:
        return cuda.get_current_stream()
    if isinstance(stream, cuda.Stream | cuda.ExternalStream):
        return stream
    if isinstance(stream, int):
        stream = _Handle(stream)
    if hasattr(stream, "__cuda_stream__"):
        return cuda.Stream.from_external(stream)
    raise TypeError(
        f"stream is a {type(stream).__name__}, expected None, a CuPy stream, an object with "
        "__cuda_stream__ or an integer handle"
    )


@dataclass(frozen=True)
class _Handle:
    """A raw stream handle, in the protocol that CuPy takes."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class Scratch:
    """Memory that kernels of one stream use between launches and that outlives CUDA graphs.

    Kept for each device and stream. A block never moves: where a larger one is needed it comes
    beside the smaller, into which captured graphs go on pointing. All are kept until the stream is
    forgotten. So graphs captured on one stream share a block; they may be replayed one after the
    other, not at once on two streams.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, int, int], list[Array]] = {}

    def get(self, name: str, size_bytes: int, like: Array, stream: Any = None) -> Array:
        """Return at least size_bytes of uint8, zeroed when first allocated.

        Whoever uses a named block leaves it as it found it, or never relies on its contents.
        """
        handle = as_stream(stream).ptr if kind(like) == "cupy" else 0
        blocks = self._blocks.setdefault((name, device_id(like), handle), [])
        if not blocks or blocks[-1].nbytes < size_bytes:
            rounded = 1 << max(size_bytes - 1, 255).bit_length()
            blocks.append(_zeroed_now(rounded, like))
        return blocks[-1]

    def forget(self, like: Array, stream: Any) -> None:
        """Give back the blocks of a stream that is idle and whose graphs are not replayed again."""
        gone = device_id(like), stream.ptr
        self._blocks = {key: value for key, value in self._blocks.items() if key[1:] != gone}

    def forget_twins(self) -> None:
        """Drop the twin's blocks: a kernel that a fault ended may have left counters in them."""
        self._blocks = {key: value for key, value in self._blocks.items() if key[1] >= 0}


def _zeroed_now(size_bytes: int, like: Array) -> Array:
    """Return zeroed bytes; on a GPU they are zeros already, even while a stream is captured.

    A captured memset would run at every replay, and not before the first.
    """
    if kind(like) != "cupy":
        return zeros((size_bytes,), np.uint8, like)
    with on_device_of(like), require_cupy().cuda.Stream(non_blocking=True) as aside:
        made = zeros((size_bytes,), np.uint8, like)
        aside.synchronize()
    return made


SCRATCH = Scratch()
