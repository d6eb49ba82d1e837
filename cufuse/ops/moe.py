"""Mixture of experts: the gated MLPs of the chosen experts, summed."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, device, jit, reference, tiles
from cufuse.checks import Bound
from cufuse.device import Array
from cufuse.ops import _matmul
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width
from cufuse.ops.rmsnorm import Norm

# With fewer tokens, or less than one token an expert, tiles would be nearly empty.
_MIN_TILE_TOKENS = 4
# Slots (token, expert) that go through the tiles at once: they bound the scratch memory.
_MAX_SLOTS = 1 << 15


@on_stream
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
        optional=("b_gate", "b_up", "b_down", "residual", "norm"),
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
    gate = _matmul.gate_template(activation, limit)
    gated = _matmul.gate_fields(limit, alpha)
    if m <= _MIN_TILE_TOKENS or m * k <= bound.sizes["n_experts"]:
        _few_tokens(bound, y, gate, gated, norm, stream)
    else:
        normed = _matmul.normed(bound, norm, stream)
        most = max(1, _MAX_SLOTS // k)
        for first in range(0, m, most):
            _many_tokens(bound, normed, y, slice(first, first + most), gate, gated, stream)
    return y


def _few_tokens(
    bound: Bound,
    y: Array,
    gate: tuple[str, str],
    gated: dict[str, float],
    norm: Norm | None,
    stream: Any,
) -> None:
    """Every slot reads its expert's weights; slots of one expert share them through L2."""
    m, k, dim, hidden_dim, n_experts = (
        bound.sizes[name] for name in ("m", "k", "dim", "hidden_dim", "n_experts")
    )
    hidden_bytes = m * k * -(-hidden_dim // 8) * 8 * 4
    hidden = device.SCRATCH.get("moe hidden", hidden_bytes, y, stream)
    sizes = {"k": k, "n_experts": n_experts, "dim": dim, "hidden_dim": hidden_dim}
    matrix_bytes = _matrix_bytes(bound, m)

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
        (_columns(-(-hidden_dim // 8), m * k, 3, y), m * k),
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
            **gated,
        },
        like=y,
        shared_bytes=-(-dim * bound.dtype.itemsize // 512) * 512,
        stream=stream,
        size_bytes=2 * matrix_bytes + bound["x"].nbytes + bound["ids"].nbytes + hidden_bytes,
    )

    down = jit.kernel("fused/moe.cu", "moe_down", bound.dtype, width(hidden_dim, bound["w_down"]))
    splits = max(1, 8 // k)  # warps that share an expert, as the kernel has it
    down.launch(
        (_columns(-(-dim // 4), m, 2, y), m),
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
        size_bytes=matrix_bytes + hidden_bytes + _combined_bytes(bound, y),
    )


def _many_tokens(
    bound: Bound,
    x: Array,
    y: Array,
    tokens: slice,
    gate: tuple[str, str],
    gated: dict[str, float],
    stream: Any,
) -> None:
    """Sort the slots by expert, multiply tiles of slots, add up."""
    k, dim, hidden_dim, n_experts = (
        bound.sizes[name] for name in ("k", "dim", "hidden_dim", "n_experts")
    )
    x, y, ids, weights = x[tokens], y[tokens], bound["ids"][tokens], bound["weights"][tokens]
    residual = None if bound["residual"] is None else bound["residual"][tokens]
    slots = len(x) * k
    dtype, half = bound.dtype, bound.dtype == np.float16
    matrix_bytes = _matrix_bytes(bound, len(x))

    def scratch(name: str, size: int, itemsize: int) -> Array:
        return device.SCRATCH.get(f"moe {name}", size * itemsize, y, stream)

    rows = -(-slots // n_experts)  # of an expert, on average
    up_tile = _tile("gated_linear", y, rows, hidden_dim * n_experts)
    down_tile = _tile("linear", y, rows, dim * n_experts)

    def sort(tile: tiles.MatmulTile, name: str) -> dict[str, Any]:
        """Sort the slots; how many tiles the experts need is known on the device alone."""
        most = slots // tile.block_m + min(slots, n_experts)
        made = {
            "sorted": scratch(f"{name} sorted", slots, 4),
            "tile_expert": scratch(f"{name} tile_expert", most, 4),
            "tile_first": scratch(f"{name} tile_first", most, 4),
            "tile_rows": scratch(f"{name} tile_rows", most, 4),
            "tiles": most,
        }
        jit.kernel("fused/moe_tiles.cu", "moe_sort").launch(
            1,
            32 * min(n_experts, 32),
            {
                **made,
                "ids": ids,
                "slots": slots,
                "n_experts": n_experts,
                "block_m": tile.block_m,
            },
            like=y,
            shared_bytes=4 * (3 * n_experts + 1),
            stream=stream,
            size_bytes=8 * slots + 12 * most,
        )
        return made

    order = sort(up_tile, "up")
    hidden = scratch("hidden", slots * hidden_dim, 4 if half else dtype.itemsize)
    hidden_bytes = slots * hidden_dim * dtype.itemsize
    columns = -(-2 * hidden_dim // up_tile.block_n)
    jit.kernel(
        "fused/moe_tiles.cu",
        "moe_gate_up_tiles",
        dtype,
        *gate,
        *up_tile.template,
        width(dim, x, bound["w_gate"], bound["w_up"]),
    ).launch(
        order["tiles"] * columns,
        32 * up_tile.warps_m * up_tile.warps_n,
        {
            "x": x,
            **{name: bound[name] for name in ("w_gate", "w_up", "b_gate", "b_up")},
            **order,
            "hidden": hidden,
            "k": k,
            "dim": dim,
            "hidden_dim": hidden_dim,
            **gated,
        },
        like=y,
        shared_bytes=up_tile.shared_bytes(dtype.itemsize),
        stream=stream,
        size_bytes=2 * matrix_bytes + x.nbytes + hidden_bytes * (2 if half else 1),
    )
    factor = None
    if half:
        factor, scaled = scratch("factor", slots, 4), scratch("scaled", slots * hidden_dim, 2)
        jit.kernel("fused/moe_tiles.cu", "moe_scale").launch(
            slots,
            256,
            {"hidden": hidden, "scaled": scaled, "factor": factor, "n": hidden_dim},
            like=y,
            stream=stream,
            size_bytes=hidden_bytes * 3 + slots * 4,
        )
        hidden = scaled

    if down_tile.block_m != up_tile.block_m:
        order = sort(down_tile, "down")
    outputs = scratch("outputs", slots * dim, 4)
    jit.kernel(
        "fused/moe_tiles.cu",
        "moe_down_tiles",
        dtype,
        *down_tile.template,
        width(hidden_dim, bound["w_down"]),
    ).launch(
        order["tiles"] * -(-dim // down_tile.block_n),
        32 * down_tile.warps_m * down_tile.warps_n,
        {
            "hidden": hidden,
            "factor": factor,
            "w": bound["w_down"],
            "b": bound["b_down"],
            **order,
            "y": outputs,
            "dim": dim,
            "hidden_dim": hidden_dim,
        },
        like=y,
        shared_bytes=down_tile.shared_bytes(dtype.itemsize),
        stream=stream,
        size_bytes=matrix_bytes + hidden_bytes + slots * dim * 4,
    )
    jit.kernel("unfused/combine.cu", "combine", np.float32, dtype, width(dim, y, residual)).launch(
        len(x),
        256,
        {
            "y": outputs,
            "ids": ids,
            "weights": weights,
            "residual": residual,
            "out": y,
            "k": k,
            "n": dim,
            "n_experts": n_experts,
        },
        like=y,
        shared_bytes=4 * k,
        stream=stream,
        size_bytes=slots * dim * 4 + _combined_bytes(bound, y),
    )


def _tile(op: str, y: Array, rows: int, n: int) -> tiles.MatmulTile:
    """Choose a tile as for one wide product: all experts side by side, with as many rows as one."""
    return tiles.choose_warps(op, tiles.target_of(y), rows, n, y.dtype.itemsize)


def _matrix_bytes(bound: Bound, tokens: int) -> int:
    """Bytes of one matrix of all experts that may have been chosen: the device alone knows them."""
    experts = min(tokens * bound.sizes["k"], bound.sizes["n_experts"])
    return experts * bound.sizes["hidden_dim"] * bound.sizes["dim"] * bound.dtype.itemsize


def _combined_bytes(bound: Bound, y: Array) -> int:
    """Bytes of the last step but for what is added up: ids, weights, residual, output."""
    return len(y) * bound.sizes["k"] * 8 + y.nbytes * (1 if bound["residual"] is None else 2)


def _columns(groups: int, rows: int, per_sm: int, like: Array) -> int:
    """CTAs that share the `groups` of each of `rows` rows: all resident at once, evenly loaded."""
    resident = per_sm * tiles.target_of(like).sm_count
    each = -(-groups // max(1, min(groups, resident // rows)))
    return -(-groups // each)
