"""The maps by which tensor copies know an array (hw.cuh's TensorMap): the driver encodes them."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import sys
from typing import Any

import numpy as np

from cufuse import device
from cufuse.device import Array

_MOST_BOX = 256  # elements of a box in one dimension
_RANKS = (2, 3, 4)
_DATA_TYPES = {np.dtype(np.float16): 6, np.dtype(np.float32): 7, device.bfloat16: 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
_L2_256 = 3  # CUtensorMapL2promotion
_TWIN_MAGIC = 0x70616D5F746E6574  # host/async.cuh


def fits(array: Array) -> bool:
    """Tell whether tensor copies can reach an array: address and pitches are multiples of 16 bytes.

    The last dimension has to be contiguous.
    """
    pitches_fit = _pitches_fit(array.dtype.itemsize, array.shape, array.strides)
    return pitches_fit and device.address(array) % 16 == 0


def rows(matrix: Array, box_rows: int, box_columns: int | None = None) -> bytes:
    """Return the map of a contiguous matrix, in boxes of `box_rows` swizzled rows.

    matrix: [..., columns], rows of a multiple of 16 bytes
    box_columns: 128 bytes of a row when left out, else 128, 64 or 32; the swizzle is as wide

    Returns the 128 bytes of a TensorMap. Raises ValueError for what tensor copies cannot reach.
    """
    columns, itemsize = matrix.shape[-1], matrix.dtype.itemsize
    box_columns = 128 // itemsize if box_columns is None else box_columns
    return _boxes(
        device.kind(matrix),
        device.address(matrix),
        matrix.dtype,
        (matrix.size // columns if columns else 0, columns),
        (columns * itemsize, itemsize),
        (box_rows, box_columns),
        box_columns * itemsize,
    )


def boxes(array: Array, box: tuple[int, ...], *, swizzle: int) -> bytes:
    """Return the map of an array in boxes of a shape.

    array: two to four dimensions, the last one contiguous, all others at multiples of 16 bytes
    box: elements of a box in each dimension, 1 to 256
    swizzle: bytes of the box's lines that change places: 128, 64, 32 or, for none, 0

    A box lies in shared memory line after line, its last dimension a line. Returns the 128 bytes of
    a TensorMap. Raises ValueError for what tensor copies cannot reach.
    """
    kind, address = device.kind(array), device.address(array)
    return _boxes(kind, address, array.dtype, array.shape, array.strides, box, swizzle)


@functools.lru_cache(4096)
def _pitches_fit(itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    pitches = [s for s, n in zip(strides[:-1], shape[:-1], strict=True) if n > 1]
    return (
        0 not in shape
        and shape[-1] * itemsize % 16 == 0
        and strides[-1] == itemsize
        and all(pitch >= 0 and pitch % 16 == 0 for pitch in pitches)
    )


# A model's arrays come again with every step, and most with every layer: each is checked once.
@functools.lru_cache(4096)
def _boxes(
    kind: str,
    address: int,
    dtype: np.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> bytes:
    ndim, itemsize = len(shape), dtype.itemsize
    if ndim not in _RANKS or len(box) != ndim:
        raise ValueError(
            f"tensor map: a box of {len(box)} dimensions in an array of {ndim}, wanted the "
            "same number, 2 to 4"
        )
    if address % 16 or not _pitches_fit(itemsize, shape, strides):
        raise ValueError(
            f"tensor map: array is {list(shape)} of {dtype.name} with strides of "
            f"{list(strides)} bytes at {address:#x}, wanted rows of a multiple "
            "of 16 bytes at one of 16"
        )
    line_bytes = box[-1] * itemsize
    if any(not 1 <= n <= _MOST_BOX for n in box):
        raise ValueError(f"tensor map: a box of {list(box)}, wanted 1 to {_MOST_BOX} elements")
    if swizzle not in _SWIZZLES or line_bytes % 16 or (swizzle and line_bytes > swizzle):
        raise ValueError(
            f"tensor map: a line of {line_bytes} bytes with a swizzle of {swizzle}, wanted a "
            "multiple of 16 that fits a swizzle of 128, 64 or 32, or 0"
        )
    # The driver counts dimensions from the innermost; one of size 1 may have any pitch.
    contiguous = [math.prod(shape[i + 1 :]) * itemsize for i in range(ndim)]
    pitches = [contiguous[i] if shape[i] == 1 else strides[i] for i in range(ndim - 1)]
    encode = _encode_twin if kind == "twin" else _encode
    return encode(address, dtype, shape[::-1], tuple(reversed(pitches)), box[::-1], swizzle)


def _encode(
    address: int,
    dtype: np.dtype,
    sizes: tuple[int, ...],
    pitches: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> bytes:
    rank = len(sizes)
    room = np.zeros(256, np.uint8)
    made = room[-room.ctypes.data % 128 :][:128]
    error = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(made.ctypes.data),
        ctypes.c_int(_DATA_TYPES[dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*pitches),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(0),  # not interleaved
        ctypes.c_int(_SWIZZLES[swizzle]),
        ctypes.c_int(_L2_256),
        ctypes.c_int(0),  # zeros outside
    )
    if error:
        raise RuntimeError(
            f"tensor map of {list(reversed(sizes))} {dtype.name} at {address:#x} in boxes of "
            f"{list(reversed(box))}: CUDA error {error}"
        )
    return made.tobytes()


def _encode_twin(
    address: int,
    dtype: np.dtype,
    sizes: tuple[int, ...],
    pitches: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> bytes:
    """Fill TensorMap of host/async.cuh."""
    missing = 4 - len(sizes)
    return struct.pack(
        "@Q4Q3Q4IIIQQ24x",
        address,
        *sizes,
        *[1] * missing,
        *pitches,
        *[0] * missing,
        *box,
        *[1] * missing,
        dtype.itemsize,
        swizzle,
        _TWIN_MAGIC,
        len(sizes),
    )


NONE = bytes(128)  # where a kernel makes no use of its map


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
