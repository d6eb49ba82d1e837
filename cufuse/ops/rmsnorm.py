"""RMSNorm, alone or behind a residual addition."""

from __future__ import annotations

from typing import Any, NamedTuple

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width


class Norm(NamedTuple):
    """An RMSNorm of the input that a fused op applies on the way in."""

    weight: Array  # [n]
    eps: float = 1e-5
    rounding: str = "cast_first"


ROUNDINGS = ("cast_first", "scale_first", "one_plus")


@on_stream
def rmsnorm(
    x: Array,
    weight: Array | None = None,
    *,
    eps: float = 1e-5,
    rounding: str = "cast_first",
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Normalise rows by their root mean square and multiply by a weight, in one launch.

    x: [..., n]
    weight: [n], ones when left out
    eps: added to the mean of squares
    rounding: "cast_first" rounds before the weight (Llama, Qwen, Mistral), "scale_first" after it
        (OLMo 2, gpt-oss), "one_plus" multiplies by 1 + weight in float32 (Gemma)
    out: [..., n], may be x

    Returns [..., n] in x's dtype; the mean is taken in float32 (Zhang and Sennrich 2019). Raises
    ValueError for sizes and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind("rmsnorm", optional=("weight",), x=(x, "... n"), weight=(weight, "n"))
    checks.option("rmsnorm", "rounding", rounding, ROUNDINGS)
    checks.number("rmsnorm", "eps", eps, 0)
    n = bound.sizes["n"]
    y = bound.output("out", out, (*bound.lead, n), may_alias=("x",))
    if y.size == 0:
        return y
    if bound.kind == "numpy":
        y[...] = reference.rmsnorm(bound["x"], bound["weight"], eps=eps, rounding=rounding)[0]
        return y
    arrays = {"x": bound["x"], "weight": bound["weight"], "y": y}
    kernel = jit.kernel(
        "unfused/rmsnorm.cu",
        "rmsnorm",
        bound.dtype,
        f"Rounding::{rounding}",
        width(n, *arrays.values()),
    )
    kernel.launch(
        bound.rows, 256, {**arrays, "rows": bound.rows, "n": n, "eps": eps}, like=y, stream=stream
    )
    return y
