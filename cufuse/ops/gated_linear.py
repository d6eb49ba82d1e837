"""Gate and up projection with the gate between them."""

from __future__ import annotations

from typing import Any

from cufuse import checks, reference
from cufuse.device import Array
from cufuse.ops import _matmul
from cufuse.ops._stream import on_stream
from cufuse.ops.rmsnorm import Norm


@on_stream
def gated_linear(
    x: Array,
    w_gate: Array,
    w_up: Array,
    b_gate: Array | None = None,
    b_up: Array | None = None,
    *,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float = 1.702,
    norm: Norm | None = None,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Multiply by a gate and an up weight and put the gate on, in one launch: act(gate) * up.

    x: [..., k]
    w_gate, w_up: [n, k]; gate is norm(x) w_gate^T + b_gate, up likewise
    b_gate, b_up: [n]
    activation: none, relu, relu2, gelu (erf), gelu_tanh, silu (SwiGLU) or quick_gelu
    limit: with it, gate = min(gate, limit), up is cut to +-limit, and the result is
        (up + 1) * gate * sigmoid(alpha * gate) (gpt-oss); activation is not used
    norm: an RMSNorm of x on the way in; for many rows (tiles.MAX_ROWS) a launch of its own
    out: [..., n]

    Returns [..., n] in x's dtype; everything up to the one rounding happens in float32 (a product
    above 65504 is infinite in float16; bfloat16 holds it). Up to tiles.MAX_ROWS rows a row's bits
    do not depend on the others. Raises ValueError for sizes and TypeError for dtypes or mixed
    libraries.
    """
    bound = checks.bind(
        "gated_linear",
        optional=("b_gate", "b_up", "norm"),
        x=(x, "... k"),
        w_gate=(w_gate, "n k"),
        w_up=(w_up, "n k"),
        b_gate=(b_gate, "n"),
        b_up=(b_up, "n"),
        norm=(_matmul.norm_weight("gated_linear", norm), "k"),
    )
    checks.option("gated_linear", "activation", activation, _matmul.ACTIVATIONS)
    y = bound.output("out", out, (*bound.lead, bound.sizes["n"]))
    if y.size == 0:
        return y
    if bound.kind == "numpy":
        y[...] = reference.gated_linear(
            *(bound[name] for name in ("x", "w_gate", "w_up", "b_gate", "b_up")),
            activation=activation,
            limit=limit,
            alpha=alpha,
            norm=_matmul.norm_tuple(bound, norm),
        )
        return y
    args = {name: bound[name] for name in ("w_gate", "w_up", "b_gate", "b_up")}
    args |= _matmul.gate_fields(limit, alpha)
    template = _matmul.gate_template(activation, limit)
    weights = bound["w_gate"], bound["w_up"]
    _matmul.multiply(bound, y, "gated", template, weights, args, norm, stream)
    return y
