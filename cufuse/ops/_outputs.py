"""Two outputs of one op."""

from __future__ import annotations

from cufuse.checks import Bound
from cufuse.device import Array, overlap


def pair(bound: Bound, out: Array | None, residual_out: Array | None) -> tuple[Array, Array]:
    """Allocate or check `out` and `residual_out` in x's shape; either may be x or residual."""
    shape = (*bound.lead, bound.sizes["n"])
    y = bound.output("out", out, shape, may_alias=("x", "residual"))
    total = bound.output("residual_out", residual_out, shape, may_alias=("x", "residual"))
    if overlap(y, total):
        raise ValueError(f"{bound.op}: residual_out shares memory with out; they hold two results")
    return y, total
