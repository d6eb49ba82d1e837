"""A gate, as a launch of its own."""

from __future__ import annotations

from typing import Any

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops import _elementwise, _matmul
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width


@on_stream
def glu(
    gate: Array,
    up: Array,
    *,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float = 1.702,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Put a gate on, element by element, in one launch: act(gate) * up.

    gate, up: [..., n]
    activation: none, relu, relu2, gelu (erf), gelu_tanh, silu (SwiGLU), quick_gelu or
        sigmoid
    limit: with it, gate = min(gate, limit), up is cut to +-limit, and the result is
        (up + 1) * gate * sigmoid(alpha * gate) (gpt-oss); activation is not used
    out: [..., n], may be gate or up

    Returns [..., n] in the inputs' dtype; computed in float32 (Shazeer 2020). Raises ValueError for
    sizes and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind("glu", gate=(gate, "... n"), up=(up, "... n"))
    checks.option("glu", "activation", activation, _matmul.ACTIVATIONS)
    y = bound.output("out", out, bound["gate"].shape, may_alias=("gate", "up"))
    if y.size == 0:
        return y
    if bound.kind == "numpy":
        y[...] = reference.glu(
            bound["gate"], bound["up"], activation=activation, limit=limit, alpha=alpha
        )
        return y
    vec = width(0, bound["gate"], bound["up"], y)
    kernel = jit.kernel(
        "unfused/glu.cu", "glu", bound.dtype, *_matmul.gate_template(activation, limit), vec
    )
    kernel.launch(
        _elementwise.grid(y, 1, y.size, vec),
        _elementwise.THREADS,
        {
            "gate": bound["gate"],
            "up": bound["up"],
            "y": y,
            "size": y.size,
            **_matmul.gate_fields(limit, alpha),
        },
        like=y,
        stream=stream,
    )
    return y
