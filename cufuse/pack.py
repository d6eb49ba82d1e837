"""Weights to the layout in which kernels multiply (device/packed.cuh), and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cufuse import checks, device, jit, reference
from cufuse.device import Array

_THREADS = 256
_TILES_PER_CTA = _THREADS // 32
_MAX_GRID_Y = 65535


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight [n, k], or a gate and its up of [n, k] each, packed.

    array: flat, of `packed_size` elements; C-contiguous, on 16 bytes

    Raises ValueError or TypeError when the array is anything else.
    """

    array: Array
    n: int
    k: int
    gated: bool = False

    def __post_init__(self) -> None:
        """Check the array."""
        bound = checks.bind("Packed", array=(self.array, "size"))
        wanted = packed_size(self.n, self.k, bound.dtype, gated=self.gated)
        if bound.sizes["size"] != wanted:
            raise ValueError(
                f"Packed: array has {bound.sizes['size']} elements, wanted {wanted} for "
                f"[n, k] = [{self.n}, {self.k}]{' twice' if self.gated else ''}"
            )
        if not self.array.flags.c_contiguous:
            raise ValueError("Packed: array has to be C-contiguous")
        _check_address("Packed: array", self.array)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight; of a gate and its up those of each."""
        return self.n, self.k

    @property
    def dtype(self) -> Any:
        """The weight's dtype."""
        return self.array.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the array, padding included."""
        return self.array.nbytes

    @property
    def tiles(self) -> Array:
        """The array as [panels, tiles along k, elements of a tile], a view."""
        panels, tile = _panels(self.n, self.gated), 512 // self.dtype.itemsize
        return self.array.reshape(panels, self.array.size // (panels * tile), tile)

    def rows(self, begin: int, end: int) -> Packed:
        """Return rows from begin to before end, a view; of a gate and its up those of each.

        begin: where a panel begins: a multiple of 16, gated of 8

        Raises ValueError for rows that the weight does not have, or that begin within a panel.
        """
        checks.number("rows", "begin", begin, 0, whole=True)
        checks.number("rows", "end", end, begin + 1, whole=True)
        if end > self.n:
            raise ValueError(f"rows: end is {end} and the weight has n = {self.n} rows")
        per_panel = _panel_rows(self.gated)
        if begin % per_panel:
            raise ValueError(f"rows: begin is {begin}, wanted a multiple of {per_panel}")
        panel = self.array.size // _panels(self.n, self.gated)
        first, last = begin // per_panel, _panels(end, self.gated)
        return Packed(self.array[first * panel : last * panel], end - begin, self.k, self.gated)


def packed_size(n: int, k: int, dtype: Any, *, gated: bool = False) -> int:
    """Return the elements that a weight [n, k], or a gate and its up of [n, k] each, packs into.

    Their bytes are a multiple of 1024: weights one after the other in an arena stay aligned.
    Raises ValueError unless n and k are at least 1, TypeError for other dtypes than the three.
    """
    checks.number("packed_size", "n", n, 1, whole=True)
    checks.number("packed_size", "k", k, 1, whole=True)
    dtype = np.dtype(dtype)
    if dtype not in device.FLOAT_DTYPES:
        raise TypeError(f"packed_size: dtype is {dtype}, wanted float16, bfloat16 or float32")
    two_tiles = 64 // dtype.itemsize
    return _panels(n, gated) * 16 * -(-k // two_tiles) * two_tiles


def pack(w: Array, *, up: Array | None = None, out: Array | None = None) -> Packed:
    """Pack a weight in one launch, bits unchanged.

    w: [n, k]; the gate, when `up` is given
    up: [n, k]
    out: [packed_size(n, k, dtype, gated=up is not None)], 16-byte aligned; part of an arena, say

    Returns Packed around `out`, or around a new array. NumPy arrays take the reference. Raises
    ValueError for sizes and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind("pack", strided=("w", "up"), optional=("up",), w=(w, "n k"), up=(up, "n k"))
    n, k = bound.sizes["n"], bound.sizes["k"]
    if not n or not k:
        raise ValueError(f"pack: w is [{n}, {k}], wanted at least one row and one column")
    gated = bound["up"] is not None
    target = bound.output("out", out, (packed_size(n, k, bound.dtype, gated=gated),))
    _check_address("pack: out", target)
    packed = Packed(target, n, k, gated)
    if bound.kind == "numpy":
        target[...] = reference.pack(bound["w"], bound["up"])
        return packed
    sources = {name: bound[name] for name in ("w", "up") if bound[name] is not None}
    strides = {name: array.strides[0] // array.itemsize for name, array in sources.items()}
    kernel = jit.kernel(
        "unfused/pack.cu", "pack", bound.dtype, _width(sources.values(), strides.values())
    )
    kernel.launch(
        _grid(k, bound.dtype, _panels(n, gated)),
        _THREADS,
        {
            **bound.arrays,
            "packed": target,
            "w_stride": strides["w"],
            "up_stride": strides.get("up", 0),
            "n": n,
            "k": k,
        },
        like=target,
    )
    return packed


def unpack(
    packed: Packed, *, begin: int = 0, end: int | None = None, out: Any = None
) -> Array | tuple[Array, Array]:
    """Return rows of a packed weight, row-major, in one launch, bits unchanged.

    begin, end: the rows from begin to before end; all when left out
    out: [end - begin, k], a pair of them for a gated weight

    Returns [end - begin, k], or (gate, up) of that shape each. Raises ValueError for sizes and
    TypeError for dtypes or mixed libraries.
    """
    n, k, gated = packed.n, packed.k, packed.gated
    end = n if end is None else end
    checks.number("unpack", "begin", begin, 0, whole=True)
    checks.number("unpack", "end", end, begin, whole=True)
    if end > n:
        raise ValueError(f"unpack: end is {end} and the weight has n = {n} rows")
    bound = checks.bind("unpack", packed=(packed.array, "size"))
    names = ("gate", "up") if gated else ("out",)
    outs = checks.pair("unpack", out) if gated else (out,)
    made = [
        bound.output(name, given, (end - begin, k)) for name, given in zip(names, outs, strict=True)
    ]
    if gated and device.overlap(*made):
        raise ValueError("unpack: gate shares memory with up; give it memory of its own")
    if begin < end and bound.kind == "numpy":
        rows = reference.unpack(packed.array, n, k, gated=gated)
        for target, source in zip(made, rows if isinstance(rows, tuple) else (rows,), strict=True):
            target[...] = source[begin:end]
    elif begin < end:
        _launch_unpack(packed, begin, end, made)
    return (made[0], made[1]) if gated else made[0]


def _launch_unpack(packed: Packed, begin: int, end: int, targets: list[Array]) -> None:
    panels = _panels(end, packed.gated) - begin // _panel_rows(packed.gated)
    panel_bytes = packed.size_bytes // _panels(packed.n, packed.gated)
    kernel = jit.kernel("unfused/pack.cu", "unpack", packed.dtype, _width(targets, [packed.k]))
    kernel.launch(
        _grid(packed.k, packed.dtype, panels),
        _THREADS,
        {
            "packed": packed.array,
            "w": targets[0],
            "up": targets[1] if packed.gated else None,
            "begin": begin,
            "end": end,
            "k": packed.k,
        },
        like=packed.array,
        size_bytes=panels * panel_bytes + sum(target.nbytes for target in targets),
    )


def _panel_rows(gated: bool) -> int:
    """Return the rows of a weight, or of each of two, in a panel."""
    return 8 if gated else 16


def _panels(n: int, gated: bool) -> int:
    return -(-n // _panel_rows(gated))


def _grid(k: int, dtype: Any, panels: int) -> tuple[int, int]:
    """Cut the tiles of a panel over x and the panels, in turns if there are many, over y."""
    tiles = 2 * -(-k * dtype.itemsize // 64)
    return -(-tiles // _TILES_PER_CTA), min(panels, _MAX_GRID_Y)


def _width(arrays: Any, strides: Any) -> int:
    """Return 2 where two neighbours can be accessed at once in all row-major arrays, else 1."""
    even = all(stride % 2 == 0 for stride in strides)
    return 2 if even and all(device.address(x) % (2 * x.itemsize) == 0 for x in arrays) else 1


def _check_address(what: str, array: Array) -> None:
    if device.address(array) % 16:
        raise ValueError(
            f"{what} begins at address {device.address(array):#x}, wanted a multiple of 16: "
            "slice the arena at multiples of 16 bytes"
        )
