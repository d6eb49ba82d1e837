"""Gate and up projection with the gate between them."""

from __future__ import annotations

from typing import Any

from cufuse import checks, pack, reference
from cufuse.device import Array
from cufuse.ops import _matmul
from cufuse.ops._stream import on_stream
from cufuse.ops.rmsnorm import Norm
from cufuse.pack import Packed


@on_stream
def gated_linear(
    x: Array,
    w_gate: Array | Packed,
    w_up: Array | None = None,
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
    w_gate, w_up: [n, k]; gate is norm(x) w_gate^T + b_gate, up likewise. Or w_gate is both,
        packed by `pack.pack(gate, up=up)`, and w_up is left out
    b_gate, b_up: [n]
    activation: none, relu, relu2, gelu (erf), gelu_tanh, silu (SwiGLU), quick_gelu or
        sigmoid
    limit: with it, gate = min(gate, limit), up is cut to +-limit, and the result is
        (up + 1) * gate * sigmoid(alpha * gate) (gpt-oss); activation is not used
    norm: an RMSNorm of x on the way in; for many rows (tiles.MAX_ROWS) a launch of its own
    out: [..., n]

    Returns [..., n] in x's dtype; everything up to the one rounding happens in float32 (a product
    above 65504 is infinite in float16; bfloat16 holds it). Up to tiles.MAX_ROWS rows a row's bits
    do not depend on the others; on sm_90a, without a norm, they may depend on whether there are
    any. Raises ValueError for sizes and TypeError for dtypes or mixed libraries.
    """
    is_packed = isinstance(w_gate, Packed)
    if is_packed and not w_gate.gated:
        raise ValueError(
            "gated_linear: w_gate is one packed weight, wanted a gate and its up packed together: "
            "pack(gate, up=up)"
        )
    if is_packed and w_up is not None:
        raise ValueError("gated_linear: w_up is given and w_gate has it packed; leave it out")
    bound = checks.bind(
        "gated_linear",
        optional=("b_gate", "b_up", "norm", *(("w_up",) if is_packed else ())),
        may_be_packed=("w_gate",),
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
        gate, up = pack.unpack(w_gate) if is_packed else (bound["w_gate"], bound["w_up"])
        y[...] = reference.gated_linear(
            bound["x"],
            gate,
            up,
            bound["b_gate"],
            bound["b_up"],
            activation=activation,
            limit=limit,
            alpha=alpha,
            norm=_matmul.norm_tuple(bound, norm),
        )
        return y
    args = {name: bound[name] for name in ("b_gate", "b_up")}
    args |= _matmul.gate_fields(limit, alpha)
    template = _matmul.gate_template(activation, limit)
    if is_packed:
        file = "fused/packed_gated_linear.cu"
        _matmul.multiply_packed(bound, y, file, "gated", template, w_gate, args, norm, stream)
        return y
    weights = {"w_gate": bound["w_gate"], "w_up": bound["w_up"]}
    _matmul.multiply(bound, y, "gated", template, weights, args, norm, stream)
    return y
