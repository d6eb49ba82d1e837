"""Ops on NumPy or CuPy arrays: `op(x, ..., *, out=None, stream=None)`.

NumPy in gives NumPy out through the reference; CuPy in gives CuPy out through the kernels, on the
arrays' device and the current stream, asynchronously.
"""

from cufuse.ops.rmsnorm import rmsnorm
from cufuse.ops.rope import rope

__all__ = ["rmsnorm", "rope"]
