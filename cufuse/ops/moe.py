"""Mixture of experts: the gated MLPs of the chosen experts, summed."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, device, jit, reference
from cufuse.checks import Bound
from cufuse.device import Array
from cufuse.ops import _matmul
from cufuse.ops._vector import width
from cufuse.ops.rmsnorm import Norm


def moe(
    x: Array,
    ids: Array,
    weights: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    *,
    b_gate: Array | None = None,
    b_up: Array | None = None,
    b_down: Array | None = None,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float = 1.702,
    residual: Array | None = None,
    norm: Norm | None = None,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Send each token through its experts' gated MLPs and add them up; two launches for few tokens.

    x: [m, dim]
    ids: int32 [m, k], the experts of each token, as `moe_route` gives them
    weights: float32 [m, k], their weights
    w_gate, w_up: [n_experts, hidden_dim, dim]
    w_down: [n_experts, dim, hidden_dim]
    b_gate, b_up: [n_experts, hidden_dim]
    b_down: [n_experts, dim]; weighted as the expert's output is
    activation: of the gate; see `linear`
    limit, alpha: with a limit, (up + 1) * gate * sigmoid(alpha * gate) with gate cut off above the
        limit and up on both sides (gpt-oss); `activation` has no say then
    residual: [m, dim], added at the end
    norm: an RMSNorm of x on the way in
    out: [m, dim], may be x or residual

    Returns [m, dim] in x's dtype: the experts in ascending id, summed in float32 and rounded once.
    An id that is no expert raises ValueError on NumPy arrays and makes its row NaN on others.
    Raises ValueError for sizes and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind(
        "moe",
        x=(x, "m dim"),
        ids=(ids, "m k", np.int32),
        weights=(weights, "m k", np.float32),
        w_gate=(w_gate, "n_experts hidden_dim dim"),
        w_up=(w_up, "n_experts hidden_dim dim"),
        w_down=(w_down, "n_experts dim hidden_dim"),
        b_gate=(b_gate, "n_experts hidden_dim"),
        b_up=(b_up, "n_experts hidden_dim"),
        b_down=(b_down, "n_experts dim"),
        residual=(residual, "m dim"),
        norm=(_matmul.norm_weight("moe", norm), "dim"),
    )
    checks.option("moe", "activation", activation, _matmul.ACTIVATIONS)
    m, k, dim = (bound.sizes[name] for name in ("m", "k", "dim"))
    if k < 1:
        raise ValueError(f"moe: ids is [m, k] = [{m}, 0], wanted at least one expert a token")
    y = bound.output("out", out, (m, dim), may_alias=("x", "residual"))
    if y.size == 0:
        return y
    if bound.kind == "numpy":
        y[...] = reference.moe(
            *(bound[name] for name in ("x", "ids", "weights", "w_gate", "w_up", "w_down")),
            b_gate=bound["b_gate"],
            b_up=bound["b_up"],
            b_down=bound["b_down"],
            activation=activation,
            limit=limit,
            alpha=alpha,
            residual=bound["residual"],
            norm=_matmul.norm_tuple(bound, norm),
        )
        return y
    gate = ("Gate::plain", f"Act::{activation}")
    if limit is not None:
        gate = ("Gate::clamped", "Act::none")
    _few_tokens(bound, y, gate, limit or 0.0, alpha, norm, stream)
    return y


def _few_tokens(
    bound: Bound,
    y: Array,
    gate: tuple[str, str],
    limit: float,
    alpha: float,
    norm: Norm | None,
    stream: Any,
) -> None:
    """Every slot reads its expert's weights; slots of one expert share them through L2."""
    m, k, dim, hidden_dim, n_experts = (
        bound.sizes[name] for name in ("m", "k", "dim", "hidden_dim", "n_experts")
    )
    itemsize = bound.dtype.itemsize
    # Which experts were chosen is known on the device alone; no more than this many were.
    experts = min(m * k, n_experts)
    matrix_bytes = experts * hidden_dim * dim * itemsize
    hidden_bytes = m * k * -(-hidden_dim // 8) * 8 * 4
    hidden = device.SCRATCH.get("moe hidden", hidden_bytes, y, stream)
    sizes = {"k": k, "n_experts": n_experts, "dim": dim, "hidden_dim": hidden_dim}

    inputs = {"x": bound["x"], "norm_weight": bound["norm"]}
    matrices = {"w_gate": bound["w_gate"], "w_up": bound["w_up"]}
    gate_up = jit.kernel(
        "fused/moe.cu",
        "moe_gate_up",
        bound.dtype,
        *gate,
        _matmul.rounding(norm),
        width(dim, *inputs.values(), *matrices.values()),
    )
    gate_up.launch(
        (_columns(-(-hidden_dim // 8), m * k, y), m * k),
        256,
        {
            **inputs,
            "ids": bound["ids"],
            **matrices,
            "b_gate": bound["b_gate"],
            "b_up": bound["b_up"],
            "hidden": hidden,
            **sizes,
            "eps": 0.0 if norm is None else norm.eps,
            "limit": limit,
            "alpha": alpha,
        },
        like=y,
        shared_bytes=-(-dim * itemsize // 512) * 512,
        stream=stream,
        size_bytes=2 * matrix_bytes + bound["x"].nbytes + bound["ids"].nbytes + hidden_bytes,
    )

    splits = max(1, 8 // k)
    down = jit.kernel("fused/moe.cu", "moe_down", bound.dtype, width(hidden_dim, bound["w_down"]))
    down.launch(
        (_columns(-(-dim // 4), m, y), m),
        256,
        {
            "hidden": hidden,
            "ids": bound["ids"],
            "weights": bound["weights"],
            "w": bound["w_down"],
            "b": bound["b_down"],
            "residual": bound["residual"],
            "y": y,
            **sizes,
        },
        like=y,
        shared_bytes=4 * (k + k * splits * 4),
        stream=stream,
        size_bytes=matrix_bytes
        + hidden_bytes
        + bound["ids"].nbytes * 2
        + y.nbytes * (1 if bound["residual"] is None else 2),
    )


def _columns(tiles: int, rows: int, like: Array) -> int:
    """CTAs that share the `tiles` of each of `rows` rows: all resident at once, evenly loaded."""
    resident = 8
    if device.is_gpu(like):
        resident = 2 * device.gpu_info(device.device_id(like)).sm_count
    each = -(-tiles // max(1, min(tiles, resident // rows)))
    return -(-tiles // each)
