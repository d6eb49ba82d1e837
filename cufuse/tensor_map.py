"""The maps by which tensor copies know a matrix (hw.cuh's TensorMap): the driver encodes them."""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from typing import Any

import numpy as np

from cufuse import device
from cufuse.device import Array

_SWIZZLE_BYTES = 128  # of a box's row
_MOST_BOX_ROWS = 256
_DATA_TYPES = {np.dtype(np.float16): 6, np.dtype(np.float32): 7, device.bfloat16: 9}
_SWIZZLE_128, _L2_256 = 3, 3  # CUtensorMapSwizzle, CUtensorMapL2promotion
_TWIN_MAGIC = 0x70616D5F746E6574  # host/async.cuh


def fits(matrix: Array) -> bool:
    """Tell whether tensor copies can reach a matrix: rows and address are multiples of 16 bytes."""
    row_bytes = matrix.shape[-1] * matrix.dtype.itemsize
    return row_bytes % 16 == 0 and device.address(matrix) % 16 == 0


def rows(matrix: Array, box_rows: int) -> bytes:
    """Return the map of a contiguous matrix, in boxes of `box_rows` rows of 128 swizzled bytes.

    matrix: [..., columns], rows of a multiple of 16 bytes

    Returns the 128 bytes of a TensorMap. Raises ValueError for what tensor copies cannot reach.
    """
    columns, itemsize = matrix.shape[-1], matrix.dtype.itemsize
    n_rows = matrix.size // columns if columns else 0
    if not fits(matrix) or n_rows < 1:
        raise ValueError(
            f"tensor map: {n_rows} rows of {columns * itemsize} bytes at "
            f"{device.address(matrix):#x}, wanted rows of a multiple of 16 bytes at one of 16"
        )
    if not 1 <= box_rows <= _MOST_BOX_ROWS:
        raise ValueError(f"tensor map: a box of {box_rows} rows, wanted 1 to {_MOST_BOX_ROWS}")
    encode = _encode_twin if device.kind(matrix) == "twin" else _encode
    return encode(device.address(matrix), matrix.dtype, n_rows, columns, box_rows)


@functools.lru_cache(4096)
def _encode(address: int, dtype: np.dtype, n_rows: int, columns: int, box_rows: int) -> bytes:
    itemsize = dtype.itemsize
    room = np.zeros(256, np.uint8)
    made = room[-room.ctypes.data % 128 :][:128]
    error = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(made.ctypes.data),
        ctypes.c_int(_DATA_TYPES[dtype]),
        ctypes.c_uint32(2),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, n_rows),
        (ctypes.c_uint64 * 1)(columns * itemsize),
        (ctypes.c_uint32 * 2)(_SWIZZLE_BYTES // itemsize, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        ctypes.c_int(0),  # not interleaved
        ctypes.c_int(_SWIZZLE_128),
        ctypes.c_int(_L2_256),
        ctypes.c_int(0),  # zeros outside
    )
    if error:
        raise RuntimeError(
            f"tensor map of [{n_rows}, {columns}] {dtype.name} at {address:#x} in boxes of "
            f"{box_rows} rows: CUDA error {error}"
        )
    return made.tobytes()


@functools.lru_cache(4096)
def _encode_twin(address: int, dtype: np.dtype, n_rows: int, columns: int, box_rows: int) -> bytes:
    """Fill TensorMap of host/async.cuh."""
    itemsize = dtype.itemsize
    return struct.pack(
        "@4Q4IQ72x",
        address,
        n_rows,
        columns,
        columns * itemsize,
        box_rows,
        _SWIZZLE_BYTES // itemsize,
        itemsize,
        _SWIZZLE_BYTES,
        _TWIN_MAGIC,
    )


NONE = bytes(128)  # where a kernel makes no use of its map


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
