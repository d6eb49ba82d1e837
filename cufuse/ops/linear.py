"""A matrix product with its norm, bias, activation and residual."""

from __future__ import annotations

from typing import Any

from cufuse import checks, jit, reference, tiles
from cufuse.device import Array
from cufuse.ops import _matmul
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width
from cufuse.ops.rmsnorm import Norm


@on_stream
def linear(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    activation: str = "none",
    residual: Array | None = None,
    norm: Norm | None = None,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Multiply by a transposed weight, add a bias, apply an activation and add a residual, in one
    launch: act(norm(x) w^T + b) + residual.

    x: [..., k]
    w: [n, k]
    b: [n]
    activation: none, relu, relu2, gelu (erf), gelu_tanh, silu or quick_gelu
    residual: [..., n]
    norm: an RMSNorm of x on the way in; for many rows (tiles.MAX_ROWS) a launch of its own
    out: [..., n], may be residual

    Returns [..., n] in x's dtype; everything up to the one rounding happens in float32, and float32
    is multiplied in float32. Up to tiles.MAX_ROWS rows a row's bits do not depend on the others.
    Raises ValueError for sizes and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind(
        "linear",
        x=(x, "... k"),
        w=(w, "n k"),
        b=(b, "n"),
        residual=(residual, "... n"),
        norm=(_matmul.norm_weight("linear", norm), "k"),
    )
    checks.option("linear", "activation", activation, _matmul.ACTIVATIONS)
    m, n, k = bound.rows, bound.sizes["n"], bound.sizes["k"]
    y = bound.output("out", out, (*bound.lead, n), may_alias=("residual",))
    if y.size == 0:
        return y
    if bound.kind == "numpy":
        y[...] = reference.linear(
            bound["x"],
            bound["w"],
            bound["b"],
            activation=activation,
            residual=bound["residual"],
            norm=_matmul.norm_tuple(bound, norm),
        )
        return y
    target = tiles.target_of(y)
    tile = tiles.choose("linear", target, m, n, k, bound.dtype)
    shape = tile.launch_shape(target, m, n, bound.dtype.itemsize)
    args = {
        "w": bound["w"],
        "b": bound["b"],
        "residual": bound["residual"],
        "y": y,
        "rows": m,
        "n": n,
        "k": k,
    }
    if isinstance(tile, tiles.RowsTile):
        kernel = jit.kernel(
            "fused/linear.cu",
            "linear_rows",
            bound.dtype,
            f"Act::{activation}",
            _matmul.rounding(norm),
            *tile.template,
            width(k, bound["x"], bound["w"], bound["norm"]),
        )
        kernel.launch(
            shape.grid,
            shape.threads,
            {
                **args,
                "x": bound["x"],
                "norm_weight": bound["norm"],
                "eps": 0.0 if norm is None else norm.eps,
            },
            like=y,
            shared_bytes=shape.shared_bytes,
            stream=stream,
        )
        return y
    source = _matmul.normed(bound, norm, stream)
    kernel = jit.kernel(
        "fused/linear.cu",
        "linear_tiles",
        bound.dtype,
        f"Act::{activation}",
        *tile.template,
        width(k, source, bound["w"]),
    )
    kernel.launch(
        shape.grid,
        shape.threads,
        {**args, "x": source},
        like=y,
        shared_bytes=shape.shared_bytes,
        stream=stream,
    )
    return y
