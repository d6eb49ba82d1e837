"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width

_THREADS = 256


def pairing(interleaved: bool) -> str:
    """Name the enumerator of device/rope.cuh."""
    return "Pairing::interleaved" if interleaved else "Pairing::half_split"


def head_width(head_dim: int, n_pairs: int, interleaved: bool, *arrays: Array | None) -> int:
    """Return the elements of one access to a head: both halves of its pairs have to allow it."""
    vec = width(head_dim, *arrays)
    return vec if (2 * n_pairs if interleaved else n_pairs) % vec == 0 else 1


def check_pairs(op: str, cos: Array, head_dim: int) -> int:
    """Return how many pairs of a head are rotated; raises ValueError when it is too small."""
    n_pairs = cos.shape[1]
    if 2 * n_pairs > head_dim:
        raise ValueError(f"{op}: cos rotates {2 * n_pairs} values of a head, x has {head_dim}")
    return n_pairs


@on_stream
def rope(
    x: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    *,
    interleaved: bool = False,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Rotate the pairs of every head by the angle of its row's position, in one launch.

    x: [rows, heads, head_dim]
    cos, sin: [max_pos, n_pairs] float32, as `reference.rope_table` makes them
    positions: [rows] int32; a row whose position is outside the table becomes NaN
    interleaved: pair t is values 2t and 2t + 1 (Cohere, DeepSeek), else t and t + n_pairs (Llama)
    out: [rows, heads, head_dim], may be x

    Returns [rows, heads, head_dim] in x's dtype, rotated in float32 (Su et al. 2021); values from
    2 * n_pairs on pass through. Raises ValueError for sizes and TypeError for dtypes or mixed
    libraries.
    """
    bound = checks.bind(
        "rope",
        x=(x, "rows heads head_dim"),
        cos=(cos, "max_pos n_pairs", np.float32),
        sin=(sin, "max_pos n_pairs", np.float32),
        positions=(positions, "rows", np.int32),
    )
    rows, heads, head_dim = (bound.sizes[name] for name in ("rows", "heads", "head_dim"))
    n_pairs = check_pairs("rope", bound["cos"], head_dim)
    y = bound.output("out", out, (rows, heads, head_dim), may_alias=("x",))
    if y.size == 0:
        return y
    arrays = {name: bound[name] for name in ("x", "cos", "sin", "positions")}
    if bound.kind == "numpy":
        y[...] = reference.rope(*arrays.values(), interleaved=interleaved)
        return y
    vec = head_width(head_dim, n_pairs, interleaved, bound["x"], y)
    kernel = jit.kernel("unfused/rope.cu", "rope", bound.dtype, pairing(interleaved), vec)
    table_bytes = 2 * min(rows, bound.sizes["max_pos"]) * n_pairs * 4
    kernel.launch(
        (rows, min(-(-heads * head_dim // (vec * _THREADS)), 65535)),
        _THREADS,
        {
            **arrays,
            "y": y,
            "rows": rows,
            "heads": heads,
            "head_dim": head_dim,
            "n_pairs": n_pairs,
            "max_pos": bound.sizes["max_pos"],
        },
        like=y,
        stream=stream,
        size_bytes=2 * y.nbytes + bound["positions"].nbytes + table_bytes,
    )
    return y
