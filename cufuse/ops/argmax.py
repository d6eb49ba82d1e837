"""The index of the largest value of a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, device, jit, reference
from cufuse.device import Array
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width

_FEW_ROWS = 8


@on_stream
def argmax(x: Array, *, out: Array | None = None, stream: Any = None) -> Array:
    """Find the index of each row's largest value, the lower one of equal values, in one launch.

    x: [..., n], n >= 1
    out: [...] int32

    Returns [...] int32; -1 for a row that holds a NaN. Raises ValueError for sizes and TypeError
    for dtypes or mixed libraries.
    """
    bound = checks.bind("argmax", x=(x, "... n"))
    ids = bound.output("out", out, bound.lead, np.int32)
    if ids.size == 0:
        return ids
    n = bound.sizes["n"]
    if n == 0:
        raise ValueError("argmax: x has n = 0; an empty row has no largest value")
    if bound.kind == "numpy":
        ids[...] = reference.argmax(bound["x"])
        return ids
    per_access = width(n, bound["x"])
    splits, per_cta = split_rows(bound.rows, n, per_access)
    kernel = jit.kernel("unfused/argmax.cu", "argmax", bound.dtype, per_access)
    kernel.launch(
        bound.rows * splits,
        256,
        {
            "x": bound["x"],
            "ids": ids,
            "scratch": best_of_rows(bound.rows, ids, stream),
            "n": n,
            "splits": splits,
            "per_cta": per_cta,
        },
        like=ids,
        stream=stream,
        size_bytes=bound["x"].nbytes + ids.nbytes,
    )
    return ids


def split_rows(rows: int, n: int, per_access: int) -> tuple[int, int]:
    """Return how many CTAs of 256 threads share a row and how many values each takes.

    Few rows need many CTAs to fill a GPU; with many rows each thread does more.
    """
    per_cta = 256 * per_access * (1 if rows <= _FEW_ROWS else 8)
    return -(-n // per_cta), per_cta


def best_of_rows(rows: int, like: Array, stream: Any) -> Array:
    """Return zeroed memory in which the CTAs of a row meet; kernels leave it zeroed."""
    return device.SCRATCH.get("best of rows", 16 * rows, like, stream)
