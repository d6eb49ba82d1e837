"""Mixture of experts: the router's product, as a launch of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width
from cufuse.ops.moe_route import experts_per_cta, router_tile


@on_stream
def router_logits(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Multiply by the router's transposed weight and keep the logits in float32, in one launch.

    x: [m, dim]
    w: [n_experts, dim]
    b: [n_experts]
    out: float32 [m, n_experts]

    Returns float32 [m, n_experts], whatever the inputs' dtype: rounded logits tie too often. Raises
    ValueError for sizes and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind(
        "router_logits", optional=("b",), x=(x, "m dim"), w=(w, "n_experts dim"), b=(b, "n_experts")
    )
    m, dim, n_experts = (bound.sizes[name] for name in ("m", "dim", "n_experts"))
    logits = bound.output("out", out, (m, n_experts), np.float32)
    if logits.size == 0:
        return logits
    if bound.kind == "numpy":
        logits[...] = reference.router_logits(bound["x"], bound["w"], bound["b"])
        return logits
    arrays = {name: bound[name] for name in ("x", "w", "b")}
    tokens, row_bytes = router_tile(m, dim, bound.dtype.itemsize)
    kernel = jit.kernel(
        "unfused/router_logits.cu",
        "router_logits",
        bound.dtype,
        tokens,
        width(dim, bound["x"], bound["w"]),
    )
    kernel.launch(
        (-(-n_experts // experts_per_cta(tokens)), min(-(-m // tokens), 65535)),
        256,
        {**arrays, "logits": logits, "rows": m, "dim": dim, "n_experts": n_experts},
        like=logits,
        shared_bytes=tokens * row_bytes,
        stream=stream,
    )
    return logits
