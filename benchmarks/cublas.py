"""The bare matrix product by cuBLAS: what a fused kernel is compared with.

CuPy loads the library and makes the handle. The call itself goes past CuPy, which refuses cuBLAS
while a CUDA graph is captured.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from cufuse import device
from cufuse.device import Array

_CUDA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
_TRANSPOSED, _AS_IT_IS = 1, 0  # cublasOperation
_COMPUTE_32F, _DEFAULT_ALGORITHM = 68, -1


def product(x: Array, w: Array, y: Array) -> None:
    """Compute y [m, n] = x [m, k] w [n, k]^T with sums in float32, all of one dtype.

    Raises ImportError where CuPy finds no cuBLAS.
    """
    (m, k), n = x.shape, w.shape[0]
    kind = _CUDA_TYPES[x.dtype.name]
    library, handle = _library(), _handle()
    stream = ctypes.c_void_p(device.as_stream(None).ptr)
    _check(library.cublasSetStream_v2(handle, stream))
    # cuBLAS counts columns first: to it our rows are columns, and y^T = w x^T is what it is asked.
    _check(
        library.cublasGemmEx(
            handle,
            _TRANSPOSED,
            _AS_IT_IS,
            n,
            m,
            k,
            ctypes.byref(ctypes.c_float(1.0)),
            ctypes.c_void_p(w.data.ptr),
            kind,
            k,
            ctypes.c_void_p(x.data.ptr),
            kind,
            k,
            ctypes.byref(ctypes.c_float(0.0)),
            ctypes.c_void_p(y.data.ptr),
            kind,
            n,
            _COMPUTE_32F,
            _DEFAULT_ALGORITHM,
        )
    )


def version() -> int:
    """Return cuBLAS' version, such as 130100; raises ImportError where CuPy finds none."""
    from cupy_backends.cuda.libs import cublas

    return cublas.getVersion(device.require_cupy().cuda.device.get_cublas_handle())


def _handle() -> ctypes.c_void_p:
    return ctypes.c_void_p(device.require_cupy().cuda.device.get_cublas_handle())


@functools.cache
def _library() -> Any:
    return ctypes.CDLL(f"libcublas.so.{version() // 10000}")  # CuPy has loaded it already


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS failed with status {status}")
