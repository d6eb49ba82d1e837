"""How elementary ops spread their elements over CTAs, and what those of two arrays share."""

from __future__ import annotations

from typing import Any

from cufuse import checks, jit, reference, tiles
from cufuse.device import Array
from cufuse.ops._vector import width

THREADS = 256
_CTAS_PER_SM = 16


def grid(like: Array, rows: int, n: int, vec: int) -> tuple[int, int]:
    """CTAs over the columns and over the rows: a few for each SM, which stride over the rest."""
    most = tiles.target_of(like).sm_count * _CTAS_PER_SM
    columns = min(-(-n // (THREADS * vec)), most)
    return columns, min(rows, max(most // columns, 1), 65535)


def pairwise(op: str, x: Array, y: Array, out: Array | None, stream: Any) -> Array:
    """Combine two arrays, or an array and one row, by the kernel and the reference named `op`."""
    one_row = getattr(y, "ndim", 0) == 1
    bound = checks.bind(op, x=(x, "... n"), y=(y, "n" if one_row else "... n"))
    n = bound.sizes["n"]
    z = bound.output("out", out, (*bound.lead, n), may_alias=("x", "y"))
    if z.size == 0:
        return z
    if bound.kind == "numpy":
        z[...] = getattr(reference, op)(bound["x"], bound["y"])
        return z
    # Arrays of one size are one long row.
    rows, columns = (bound.rows, n) if one_row else (1, bound.rows * n)
    vec = width(n if rows > 1 else 0, bound["x"], bound["y"], z)
    jit.kernel(f"unfused/{op}.cu", op, bound.dtype, vec).launch(
        grid(z, rows, columns, vec),
        THREADS,
        {"a": bound["x"], "b": bound["y"], "y": z, "rows": rows, "n": columns},
        like=z,
        stream=stream,
    )
    return z
