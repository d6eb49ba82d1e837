"""An activation, as a launch of its own."""

from __future__ import annotations

from typing import Any

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops import _elementwise
from cufuse.ops._matmul import ACTIVATIONS
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width


@on_stream
def activation(x: Array, kind: str, *, out: Array | None = None, stream: Any = None) -> Array:
    """Apply an activation element by element, in one launch.

    x: [..., n]
    kind: none, relu, relu2, gelu (erf), gelu_tanh, silu, quick_gelu or sigmoid
    out: [..., n], may be x

    Returns [..., n] in x's dtype; computed in float32. gelu is x Phi(x), gelu_tanh and quick_gelu
    (x sigmoid(1.702 x)) are its approximations (Hendrycks and Gimpel 2016); relu2 is relu(x)^2 (So
    et al. 2021), silu is x sigmoid(x). Raises ValueError for an unknown kind and
    TypeError for dtypes.
    """
    bound = checks.bind("activation", x=(x, "... n"))
    checks.option("activation", "kind", kind, ACTIVATIONS)
    y = bound.output("out", out, bound["x"].shape, may_alias=("x",))
    if y.size == 0:
        return y
    if bound.kind == "numpy":
        y[...] = reference.activation(bound["x"], kind)
        return y
    vec = width(0, bound["x"], y)
    kernel = jit.kernel("unfused/activation.cu", "activation", bound.dtype, f"Act::{kind}", vec)
    kernel.launch(
        _elementwise.grid(y, 1, y.size, vec),
        _elementwise.THREADS,
        {"x": bound["x"], "y": y, "size": y.size},
        like=y,
        stream=stream,
    )
    return y
