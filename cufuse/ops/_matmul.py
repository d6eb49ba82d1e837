"""What the ops around a matrix product share."""

from __future__ import annotations

from typing import Any

from cufuse import checks, device
from cufuse.checks import Bound
from cufuse.device import Array
from cufuse.ops.rmsnorm import ROUNDINGS, Norm, rmsnorm

ACTIVATIONS = ("none", "relu", "relu2", "gelu", "gelu_tanh", "silu", "quick_gelu")


def norm_weight(op: str, norm: Norm | None) -> Array | None:
    """Return the weight to bind; checks the rounding's name."""
    if norm is None:
        return None
    checks.option(op, "norm.rounding", norm.rounding, ROUNDINGS)
    return norm.weight


def norm_tuple(bound: Bound, norm: Norm | None) -> tuple[Array, float, str] | None:
    """Return what the reference takes as `norm`."""
    return None if norm is None else (bound["norm"], norm.eps, norm.rounding)


def rounding(norm: Norm | None) -> str:
    """Return the template value of a norm on the way in."""
    return f"Rounding::{'cast_first' if norm is None else norm.rounding}"


def normed(bound: Bound, norm: Norm | None, stream: Any) -> Array:
    """Return x, or its norm in scratch memory: tiles of many rows are normalised beforehand."""
    x = bound["x"]
    if norm is None:
        return x
    scratch = device.SCRATCH.get(f"{bound.op} norm", x.nbytes, x, stream)
    out = scratch[: x.nbytes].view(x.dtype).reshape(x.shape)
    return rmsnorm(x, bound["norm"], eps=norm.eps, rounding=norm.rounding, out=out, stream=stream)


def gate_template(activation: str, limit: float | None) -> tuple[str, str]:
    """Return the template values Gate and Act; a clamped gate has its own activation."""
    if limit is None:
        return "Gate::plain", f"Act::{activation}"
    return "Gate::clamped", "Act::none"


def gate_fields(limit: float | None, alpha: float) -> dict[str, float]:
    """Return the fields that a clamped gate reads."""
    return {"limit": 0.0 if limit is None else limit, "alpha": alpha}
