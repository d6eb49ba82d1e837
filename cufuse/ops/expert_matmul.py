"""Mixture of experts: one matrix product, each token with its own experts' weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width


@on_stream
def expert_matmul(
    x: Array,
    ids: Array,
    w: Array,
    b: Array | None = None,
    *,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Multiply each token, or each of its slots, by its experts' transposed weights.

    x: [m, dim], the same for all k experts of a token, or [m, k, dim]
    ids: int32 [m, k]
    w: [n_experts, n, dim]
    b: [n_experts, n]
    out: [m, k, n]

    Returns [m, k, n] in x's dtype; sums in float32. An id that is no expert raises ValueError on
    NumPy arrays and makes its slot NaN on others. Raises ValueError for sizes and TypeError for
    dtypes or mixed libraries.
    """
    per_slot = getattr(x, "ndim", 2) == 3
    bound = checks.bind(
        "expert_matmul",
        optional=("b",),
        x=(x, "m k dim" if per_slot else "m dim"),
        ids=(ids, "m k", np.int32),
        w=(w, "n_experts n dim"),
        b=(b, "n_experts n"),
    )
    m, k, n, dim = (bound.sizes[name] for name in ("m", "k", "n", "dim"))
    y = bound.output("out", out, (m, k, n))
    if y.size == 0:
        return y
    if bound.kind == "numpy":
        y[...] = reference.expert_matmul(*(bound[name] for name in ("x", "ids", "w", "b")))
        return y
    arrays = {"x": bound["x"], "ids": bound["ids"], "w": bound["w"], "b": bound["b"], "y": y}
    n_experts, itemsize = bound.sizes["n_experts"], bound.dtype.itemsize
    kernel = jit.kernel(
        "unfused/expert_matmul.cu",
        "expert_matmul",
        bound.dtype,
        width(dim, bound["x"], bound["w"]),
    )
    kernel.launch(
        (-(-n // 32), min(m * k, 65535)),  # 8 warps take 4 rows each
        256,
        {
            **arrays,
            "slots": m * k,
            "per_row": 1 if per_slot else k,
            "n_experts": n_experts,
            "n": n,
            "dim": dim,
        },
        like=y,
        shared_bytes=-(-dim * itemsize // 512) * 512,
        stream=stream,
        size_bytes=min(m * k, n_experts) * n * dim * itemsize
        + sum(arrays[name].nbytes for name in ("x", "ids", "y")),
    )
    return y
