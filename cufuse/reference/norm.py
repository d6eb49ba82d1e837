"""RMSNorm and LayerNorm, with the rounding of each model family."""

from __future__ import annotations

import numpy as np

from cufuse.reference._dtype import narrow, wide


def rmsnorm(
    x: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    residual: np.ndarray | None = None,
    eps: float = 1e-5,
    rounding: str = "cast_first",
) -> tuple[np.ndarray, np.ndarray]:
    """Normalise rows by their root mean square; returns (y, x + residual)."""
    if residual is not None:
        x = narrow(wide(x) + wide(residual), x)
    v = wide(x)
    normal = v / np.sqrt((v * v).mean(-1, keepdims=True) + v.dtype.type(eps))
    if weight is None:
        return narrow(normal, x), x
    if rounding == "cast_first":
        return narrow(wide(narrow(normal, x)) * wide(weight), x), x
    if rounding == "scale_first":
        return narrow(normal * wide(weight), x), x
    return narrow(normal * (1 + wide(weight)), x), x


def layernorm(
    x: np.ndarray,
    weight: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    *,
    residual: np.ndarray | None = None,
    eps: float = 1e-5,
) -> tuple[np.ndarray, np.ndarray]:
    """Normalise rows to mean 0 and variance 1; returns (y, x + residual)."""
    if residual is not None:
        x = narrow(wide(x) + wide(residual), x)
    v = wide(x)
    difference = v - v.mean(-1, keepdims=True)
    difference = difference - difference.mean(-1, keepdims=True)  # a large mean was rounded
    variance = (difference * difference).mean(-1, keepdims=True)
    y = difference / np.sqrt(variance + v.dtype.type(eps))
    if weight is not None:
        y = y * wide(weight)
    if bias is not None:
        y = y + wide(bias)
    return narrow(y, x), x
