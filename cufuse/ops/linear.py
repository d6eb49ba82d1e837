"""A matrix product with its norm, bias, activation and residual."""

from __future__ import annotations

from typing import Any

from cufuse import checks, reference
from cufuse.device import Array
from cufuse.ops import _matmul
from cufuse.ops._stream import on_stream
from cufuse.ops.rmsnorm import Norm


@on_stream
def linear(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    activation: str = "none",
    residual: Array | None = None,
    norm: Norm | None = None,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Multiply by a transposed weight, add a bias, apply an activation and add a residual, in one
    launch: act(norm(x) w^T + b) + residual.

    x: [..., k]
    w: [n, k]
    b: [n]
    activation: none, relu, relu2, gelu (erf), gelu_tanh, silu or quick_gelu
    residual: [..., n]
    norm: an RMSNorm of x on the way in; for many rows (tiles.MAX_ROWS) a launch of its own
    out: [..., n], may be residual

    Returns [..., n] in x's dtype; everything up to the one rounding happens in float32, and float32
    is multiplied in float32. Up to tiles.MAX_ROWS rows a row's bits do not depend on the others.
    Raises ValueError for sizes and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind(
        "linear",
        optional=("b", "residual", "norm"),
        x=(x, "... k"),
        w=(w, "n k"),
        b=(b, "n"),
        residual=(residual, "... n"),
        norm=(_matmul.norm_weight("linear", norm), "k"),
    )
    checks.option("linear", "activation", activation, _matmul.ACTIVATIONS)
    y = bound.output("out", out, (*bound.lead, bound.sizes["n"]), may_alias=("residual",))
    if y.size == 0:
        return y
    if bound.kind == "numpy":
        y[...] = reference.linear(
            bound["x"],
            bound["w"],
            bound["b"],
            activation=activation,
            residual=bound["residual"],
            norm=_matmul.norm_tuple(bound, norm),
        )
        return y
    args = {name: bound[name] for name in ("w", "b", "residual")}
    template = (f"Act::{activation}",)
    _matmul.multiply(bound, y, "linear", template, (bound["w"],), args, norm, stream)
    return y
