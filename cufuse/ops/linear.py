"""A matrix product with its norm, bias, activation and residual."""

from __future__ import annotations

from typing import Any

from cufuse import checks, device, reference
from cufuse.device import Array
from cufuse.ops import _matmul
from cufuse.ops._stream import on_stream
from cufuse.ops.rmsnorm import Norm
from cufuse.pack import Packed


@on_stream
def linear(
    x: Array,
    w: Array | Packed,
    b: Array | None = None,
    *,
    activation: str = "none",
    residual: Array | None = None,
    norm: Norm | None = None,
    pre: Array | None = None,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Multiply by a transposed weight, add a bias, apply an activation and add a residual, in one
    launch: act(norm(x) w^T + b) + residual.

    x: [..., k]
    w: [n, k], or packed by `pack.pack`
    b: [n]
    activation: none, relu, relu2, gelu (erf), gelu_tanh, silu, quick_gelu or sigmoid
    residual: [..., n]
    norm: an RMSNorm of x on the way in; for many rows (tiles.MAX_ROWS) a launch of its own
    pre: [..., n], gets norm(x) w^T + b, which a backward pass asks for
    out: [..., n], may be residual

    Returns [..., n] in x's dtype; everything up to the one rounding happens in float32, and float32
    is multiplied in float32. Up to tiles.MAX_ROWS rows a row's bits do not depend on the others; on
    sm_90a, without a norm, they may depend on whether there are any.
    Raises ValueError for sizes and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind(
        "linear",
        optional=("b", "residual", "norm"),
        may_be_packed=("w",),
        x=(x, "... k"),
        w=(w, "n k"),
        b=(b, "n"),
        residual=(residual, "... n"),
        norm=(_matmul.norm_weight("linear", norm), "k"),
    )
    _matmul.check_plain("linear", w)
    checks.option("linear", "activation", activation, _matmul.ACTIVATIONS)
    y = bound.output("out", out, (*bound.lead, bound.sizes["n"]), may_alias=("residual",))
    if pre is not None:
        pre = bound.output("pre", pre, y.shape)
        if device.overlap(pre, y):
            raise ValueError("linear: pre shares memory with out; give it memory of its own")
    if y.size == 0:
        return y
    if bound.kind == "numpy":
        y[...] = reference.linear(
            bound["x"],
            _matmul.rows_of(bound, "w", w),
            bound["b"],
            activation=activation,
            residual=bound["residual"],
            norm=_matmul.norm_tuple(bound, norm),
            pre=pre,
        )
        return y
    args = {"b": bound["b"], "residual": bound["residual"], "pre": pre}
    template = (f"Act::{activation}",)
    if isinstance(w, Packed):
        file = "fused/packed_linear.cu"
        _matmul.multiply_packed(bound, y, file, "linear", template, w, args, norm, stream)
        return y
    weights = {"w": bound["w"]}
    _matmul.multiply(bound, y, "linear", template, weights, args, norm, stream)
    return y
