"""What the ops around a matrix product share."""

from __future__ import annotations

from typing import Any

from cufuse import checks, device, jit, pack, tensor_map, tiles
from cufuse.checks import Bound
from cufuse.device import Array
from cufuse.ops._vector import width
from cufuse.ops.rmsnorm import ROUNDINGS, Norm, rmsnorm
from cufuse.pack import Packed

ACTIVATIONS = ("none", "relu", "relu2", "gelu", "gelu_tanh", "silu", "quick_gelu", "sigmoid")


def norm_weight(op: str, norm: Norm | None) -> Array | None:
    """Return the weight to bind; checks the rounding's name."""
    if norm is None:
        return None
    if not isinstance(norm, Norm):
        raise TypeError(
            f"{op}: norm is a {type(norm).__name__}, wanted ops.Norm(weight, eps, rounding)"
        )
    checks.option(op, "norm.rounding", norm.rounding, ROUNDINGS)
    checks.number(op, "norm.eps", norm.eps, 0)
    return norm.weight


def norm_tuple(bound: Bound, norm: Norm | None) -> tuple[Array, float, str] | None:
    """Return what the reference takes as `norm`."""
    return None if norm is None else (bound["norm"], norm.eps, norm.rounding)


def rounding(norm: Norm | None) -> str:
    """Return the template value of a norm on the way in."""
    return f"Rounding::{'cast_first' if norm is None else norm.rounding}"


def normed(bound: Bound, norm: Norm | None, stream: Any) -> Array:
    """Return x, or its norm in scratch memory: tiles of many rows are normalised beforehand."""
    x = bound["x"]
    if norm is None:
        return x
    scratch = device.SCRATCH.get(f"{bound.op} norm", x.nbytes, x, stream)
    out = scratch[: x.nbytes].view(x.dtype).reshape(x.shape)
    return rmsnorm(x, bound["norm"], eps=norm.eps, rounding=norm.rounding, out=out, stream=stream)


def check_plain(op: str, w: Array | Packed) -> None:
    """Raise ValueError for a gate and its up where one weight is wanted."""
    if isinstance(w, Packed) and w.gated:
        raise ValueError(f"{op}: w is a gate and its up packed together, wanted one weight")


def rows_of(bound: Bound, name: str, w: Array | Packed) -> Array:
    """Return a weight that is not gated row-major, for the reference."""
    return pack.unpack(w) if isinstance(w, Packed) else bound[name]


def gate_template(activation: str, limit: float | None) -> tuple[str, str]:
    """Return the template values Gate and Act; a clamped gate has its own activation."""
    if limit is None:
        return "Gate::plain", f"Act::{activation}"
    return "Gate::clamped", "Act::none"


def gate_fields(limit: float | None, alpha: float) -> dict[str, float]:
    """Return the fields that a clamped gate reads."""
    return {"limit": 0.0 if limit is None else limit, "alpha": alpha}


def multiply(
    bound: Bound,
    y: Array,
    kernels: str,
    template: tuple[str, ...],
    weights: dict[str, Array],
    args: dict[str, Any],
    norm: Norm | None,
    stream: Any,
) -> None:
    """Launch `{kernels}_rows` or, for many rows, a norm and `{kernels}_tiles` of the op's file.

    `template` is what both take between dtype and tile, `args` both structs' fields but for x and
    the weights. On sm_90a it may be `{kernels}_warpgroups` of the op's file for that.
    """
    m, n, k = bound.rows, bound.sizes["n"], bound.sizes["k"]
    target, itemsize = tiles.target_of(y), bound.dtype.itemsize
    tile = tiles.choose(
        bound.op,
        target,
        m,
        n,
        k,
        bound.dtype,
        norm=norm is not None,
        tensor_copies=all(map(tensor_map.fits, (bound["x"], *weights.values()))),
    )
    if isinstance(tile, tiles.WarpgroupTile):
        args = {**args, **weights, "x": normed(bound, norm, stream)}
        _multiply_by_warpgroups(bound, y, kernels, template, tile, args, stream)
        return
    shape = tile.launch_shape(target, m, tiles.WEIGHT_ROWS[bound.op] * n, itemsize)
    args = {**args, **weights, "y": y, "rows": m, "n": n, "k": k}
    if isinstance(tile, tiles.RowsTile):
        name = f"{kernels}_rows"
        template = (*template, rounding(norm))
        args["x"], args["norm_weight"] = bound["x"], bound["norm"]
        args["eps"] = 0.0 if norm is None else norm.eps
        vec = width(k, bound["x"], *weights.values(), bound["norm"])
    else:
        name = f"{kernels}_tiles"
        args["x"] = normed(bound, norm, stream)
        vec = width(k, args["x"], *weights.values())
    kernel = jit.kernel(f"fused/{bound.op}.cu", name, bound.dtype, *template, *tile.template, vec)
    kernel.launch(
        shape.grid, shape.threads, args, like=y, shared_bytes=shape.shared_bytes, stream=stream
    )


def _multiply_by_warpgroups(
    bound: Bound,
    y: Array,
    kernels: str,
    template: tuple[Any, ...],
    tile: tiles.WarpgroupTile,
    args: dict[str, Any],
    stream: Any,
    packed: Packed | None = None,
) -> None:
    """Launch `{kernels}_warpgroups`; x and w are within the reach of tensor copies."""
    m, n, k = bound.rows, bound.sizes["n"], bound.sizes["k"]
    gated, itemsize = bound.op == "gated_linear", bound.dtype.itemsize
    beside = {name: args[name] for name in ("residual", "pre") if name in args}
    by_tensor = all(tensor_map.fits(a) for a in (y, *beside.values()) if a is not None)
    boxes = tile.box(tiles.WEIGHT_ROWS[bound.op])
    maps = {
        "x_map": tensor_map.rows(args["x"], tile.block_m),
        "y_map": tensor_map.rows(y, *boxes) if by_tensor else tensor_map.NONE,
    }
    if packed is not None:
        maps["w_map"] = tensor_map.boxes(packed.tiles, (tile.block_n // 16, 4, 256), swizzle=0)
    elif gated:
        maps["w_map"] = tensor_map.rows(args["w_gate"], tile.block_n // 2)
        maps["up_map"] = tensor_map.rows(args["w_up"], tile.block_n // 2)
    else:
        maps["w_map"] = tensor_map.rows(args["w"], tile.block_n)
    layout = f"Layout::{'rows' if packed is None else 'packed'}"
    if gated:
        maps.setdefault("up_map", tensor_map.NONE)
    else:
        template = (*template, *(a is not None for a in beside.values()))
        for name, a in beside.items():
            maps[f"{name}_map"] = (
                tensor_map.rows(a, *boxes) if by_tensor and a is not None else tensor_map.NONE
            )
    kernel = jit.kernel(
        f"fused/{bound.op}_sm90.cu",
        f"{kernels}_warpgroups",
        bound.dtype,
        layout,
        *template,
        f"Stores::{'tensor' if by_tensor else 'threads'}",
        *tile.template,
    )
    n_weight_rows = n * tiles.WEIGHT_ROWS[bound.op]
    shape = tile.launch_shape(tiles.target_of(y), m, n_weight_rows, itemsize)
    kernel.launch(
        shape.grid,
        shape.threads,
        {**maps, **args, "y": y, "rows": m, "n": n, "k": k},
        like=y,
        shared_bytes=shape.shared_bytes,
        cluster=tile.split,
        stream=stream,
    )


def multiply_packed(
    bound: Bound,
    y: Array,
    file: str,
    kernels: str,
    template: tuple[Any, ...],
    w: Packed,
    args: dict[str, Any],
    norm: Norm | None,
    stream: Any,
    *,
    takes_norm: bool = True,
) -> None:
    """Launch `packed_{kernels}_rows` or, for many rows, a norm and `packed_{kernels}_tiles`.

    As `multiply`; kernels that take no norm have neither its rounding nor its fields.
    """
    m, (n, k) = bound.rows, w.shape
    target, n_weight_rows = tiles.target_of(y), n * (2 if w.gated else 1)
    itemsize = bound.dtype.itemsize
    tile = tiles.choose_packed(
        bound.op,
        target,
        m,
        n_weight_rows,
        k,
        bound.dtype,
        tensor_copies=tensor_map.fits(bound["x"]),
    )
    if isinstance(tile, tiles.WarpgroupTile):
        names = ("w_gate", "w_up") if w.gated else ("w",)
        args = {**args, **dict.fromkeys(names), names[0]: w.array}
        args["x"] = normed(bound, norm, stream)
        _multiply_by_warpgroups(bound, y, kernels, template, tile, args, stream, w)
        return
    shape = tile.launch_shape(target, m, n_weight_rows, itemsize)
    args = {**args, "w": w.array, "y": y, "rows": m, "n": n, "k": k}
    if isinstance(tile, tiles.PackedRowsTile):
        name = f"packed_{kernels}_rows"
        args["x"] = bound["x"]
        if takes_norm:
            template = (*template, rounding(norm))
            args["norm_weight"] = bound["norm"]
            args["eps"] = 0.0 if norm is None else norm.eps
        vec = width(k, args["x"], bound["norm"])
    else:
        name = f"packed_{kernels}_tiles"
        args["x"] = normed(bound, norm, stream)
        vec = width(k, args["x"])
    kernel = jit.kernel(file, name, bound.dtype, *template, *tile.template, vec)
    kernel.launch(
        shape.grid, shape.threads, args, like=y, shared_bytes=shape.shared_bytes, stream=stream
    )
