"""The bare matrix product by cuBLAS through CuPy: what a fused kernel is compared with."""

from __future__ import annotations

import numpy as np

from cufuse import device
from cufuse.device import Array

_CUDA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
_COMPUTE_32F, _DEFAULT_ALGORITHM = 68, -1
_ONE, _ZERO = np.float32(1.0).reshape(1), np.float32(0.0).reshape(1)


def product(x: Array, w: Array, y: Array) -> None:
    """Compute y [m, n] = x [m, k] w [n, k]^T with sums in float32, all of one dtype."""
    cupy = device.require_cupy()
    from cupy_backends.cuda.libs import cublas

    (m, k), n = x.shape, w.shape[0]
    kind = _CUDA_TYPES[x.dtype.name]
    # cuBLAS counts columns first: to it our rows are columns, and y^T = w x^T is what it is asked.
    cublas.gemmEx(
        cupy.cuda.device.get_cublas_handle(),
        cublas.CUBLAS_OP_T,
        cublas.CUBLAS_OP_N,
        n,
        m,
        k,
        _ONE.ctypes.data,
        w.data.ptr,
        kind,
        k,
        x.data.ptr,
        kind,
        k,
        _ZERO.ctypes.data,
        y.data.ptr,
        kind,
        n,
        _COMPUTE_32F,
        _DEFAULT_ALGORITHM,
    )
