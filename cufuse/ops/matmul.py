"""A matrix product, as a launch of its own."""

from __future__ import annotations

from typing import Any

from cufuse import checks, device, jit, pack, reference, tiles
from cufuse.device import Array
from cufuse.ops import _matmul
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width
from cufuse.pack import Packed


@on_stream
def matmul(
    x: Array, w: Array | Packed, *, out: Any = None, stream: Any = None
) -> Array | tuple[Array, Array]:
    """Multiply by a transposed weight, in one launch: x w^T.

    x: [..., k]
    w: [n, k], or packed by `pack.pack`
    out: [..., n]; a pair of them for a gate and its up that are packed together

    Returns [..., n] in x's dtype, or (gate, up) of that shape each; sums in float32, and float32 is
    multiplied in float32. Raises ValueError for sizes and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind("matmul", may_be_packed=("w",), x=(x, "... k"), w=(w, "n k"))
    if isinstance(w, Packed):
        return _by_packed(bound, w, out, stream)
    m, n, k = bound.rows, bound.sizes["n"], bound.sizes["k"]
    y = bound.output("out", out, (*bound.lead, n))
    if y.size == 0:
        return y
    if bound.kind == "numpy":
        y[...] = reference.matmul(bound["x"], bound["w"])
        return y
    target = tiles.target_of(y)
    tile = tiles.choose("matmul", target, m, n, k, bound.dtype)
    shape = tile.launch_shape(target, m, n, bound.dtype.itemsize)
    few = isinstance(tile, tiles.RowsTile)
    kernel = jit.kernel(
        "unfused/matmul.cu",
        "matmul_rows" if few else "matmul_tiles",
        bound.dtype,
        *tile.template,
        width(k, bound["x"], bound["w"]),
    )
    kernel.launch(
        shape.grid,
        shape.threads,
        {"x": bound["x"], "w": bound["w"], "y": y, "rows": m, "n": n, "k": k},
        like=y,
        shared_bytes=shape.shared_bytes,
        stream=stream,
    )
    return y


def _by_packed(
    bound: checks.Bound, w: Packed, out: Any, stream: Any
) -> Array | tuple[Array, Array]:
    shape = (*bound.lead, w.n)
    outs = checks.pair("matmul", out) if w.gated else (out,)
    names = ("gate", "up") if w.gated else ("out",)
    made = [bound.output(name, given, shape) for name, given in zip(names, outs, strict=True)]
    if w.gated and device.overlap(*made):
        raise ValueError("matmul: gate shares memory with up; give it memory of its own")
    if made[0].size and bound.kind == "numpy":
        rows = pack.unpack(w)
        for target, weight in zip(made, rows if w.gated else (rows,), strict=True):
            target[...] = reference.matmul(bound["x"], weight)
    elif made[0].size:
        _matmul.multiply_packed(
            bound,
            made[0],
            "unfused/packed_matmul.cu",
            "matmul",
            (w.gated,),
            w,
            {"up": made[1] if w.gated else None},
            None,
            stream,
            takes_norm=False,
        )
    return (made[0], made[1]) if w.gated else made[0]
