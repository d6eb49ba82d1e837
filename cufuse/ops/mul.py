"""An elementwise product, as a launch of its own."""

from __future__ import annotations

from typing import Any

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops import _elementwise
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width


@on_stream
def mul(x: Array, y: Array, *, out: Array | None = None, stream: Any = None) -> Array:
    """Multiply two arrays element by element, or an array and one row, in one launch.

    x: [..., n]
    y: [..., n], or [n] for all rows of x
    out: [..., n], may be x, or y if it has x's shape

    Returns [..., n] in x's dtype. Raises ValueError for sizes and TypeError for dtypes or mixed
    libraries.
    """
    one_row = getattr(y, "ndim", 0) == 1
    bound = checks.bind("mul", x=(x, "... n"), y=(y, "n" if one_row else "... n"))
    n = bound.sizes["n"]
    z = bound.output("out", out, (*bound.lead, n), may_alias=("x", "y"))
    if z.size == 0:
        return z
    if bound.kind == "numpy":
        z[...] = reference.mul(bound["x"], bound["y"])
        return z
    # Arrays of one size are one long row.
    rows, columns = (bound.rows, n) if one_row else (1, bound.rows * n)
    vec = width(n if rows > 1 else 0, bound["x"], bound["y"], z)
    kernel = jit.kernel("unfused/mul.cu", "mul", bound.dtype, vec)
    kernel.launch(
        _elementwise.grid(z, rows, columns, vec),
        _elementwise.THREADS,
        {"a": bound["x"], "b": bound["y"], "y": z, "rows": rows, "n": columns},
        like=z,
        stream=stream,
    )
    return z
