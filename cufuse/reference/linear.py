"""Matrix products with what surrounds them, activations and gates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cufuse.reference._dtype import narrow, wide
from cufuse.reference.norm import rmsnorm

_erf = np.frompyfunc(math.erf, 1, 1)


def sigmoid(v: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-v)) in v's dtype."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-v))


def _activate(v: np.ndarray, kind: str) -> np.ndarray:
    """Apply an activation to float32 or float64 values."""
    if kind == "none":
        return v
    if kind == "relu":
        return np.maximum(v, 0)
    if kind == "relu2":
        return np.maximum(v, 0) ** 2
    if kind == "gelu":
        return v * 0.5 * (1 + np.asarray(_erf(v * math.sqrt(0.5)), v.dtype))
    if kind == "gelu_tanh":
        return v * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
    if kind == "silu":
        return v * sigmoid(v)
    if kind == "quick_gelu":
        return v * sigmoid(1.702 * v)
    if kind == "sigmoid":
        return sigmoid(v)
    raise ValueError(f"no activation {kind!r}")


def _gate(
    gate: np.ndarray, up: np.ndarray, kind: str, limit: float | None, alpha: float
) -> np.ndarray:
    if limit is None:
        return _activate(gate, kind) * up
    gate = np.minimum(gate, limit)
    return (np.clip(up, -limit, limit) + 1) * gate * sigmoid(alpha * gate)


def _product(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, norm: Any) -> np.ndarray:
    """Return norm(x) w^T + b, not rounded; `norm` is (weight, eps, rounding)."""
    if norm is not None:
        weight, eps, rounding = norm
        x, _ = rmsnorm(x, weight, eps=eps, rounding=rounding)
    y = wide(x) @ wide(w).T
    return y if b is None else y + wide(b)


def linear(
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None = None,
    *,
    activation: str = "none",
    residual: np.ndarray | None = None,
    norm: Any = None,
    pre: np.ndarray | None = None,
) -> np.ndarray:
    """Return act(norm(x) w^T + b) + residual, rounded once; `pre` gets what act is applied to."""
    before = _product(x, w, b, norm)
    if pre is not None:
        pre[...] = narrow(before, x)
    y = _activate(before, activation)
    return narrow(y if residual is None else y + wide(residual), x)


def gated_linear(
    x: np.ndarray,
    w_gate: np.ndarray,
    w_up: np.ndarray,
    b_gate: np.ndarray | None = None,
    b_up: np.ndarray | None = None,
    *,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float = 1.702,
    norm: Any = None,
) -> np.ndarray:
    """Return act(gate) * up, or the clamped gate when a limit is given, rounded once."""
    gate, up = _product(x, w_gate, b_gate, norm), _product(x, w_up, b_up, norm)
    return narrow(_gate(gate, up, activation, limit, alpha), x)


def matmul(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return x w^T."""
    return narrow(wide(x) @ wide(w).T, x)


def add(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return x + y; y may be one row."""
    return narrow(wide(x) + wide(y), x)


def mul(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return x * y; y may be one row."""
    return narrow(wide(x) * wide(y), x)


def activation(x: np.ndarray, kind: str) -> np.ndarray:
    """Apply an activation."""
    return narrow(_activate(wide(x), kind), x)


def glu(
    gate: np.ndarray,
    up: np.ndarray,
    *,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float = 1.702,
) -> np.ndarray:
    """Return act(gate) * up, or the clamped gate when a limit is given."""
    return narrow(_gate(wide(gate), wide(up), activation, limit, alpha), gate)
