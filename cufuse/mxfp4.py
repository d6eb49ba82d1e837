"""Experts of 4-bit weights (MXFP4), as checkpoints have them and packed (device/mxfp4.cuh)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from cufuse import checks, device, jit, reference
from cufuse.device import Array

BLOCK = 32  # columns that share a scale
_THREADS = 256
_TILES_PER_CTA = _THREADS // 32
_MAX_GRID_Y = 65535


@dataclass(frozen=True, eq=False)
class Mxfp4:
    """Weights [n_experts, n, k] of 4 bits, or gates and ups of [n_experts, n, k] each, packed.

    array: uint8, flat, of `packed_bytes` bytes; C-contiguous, on 16 bytes
    dtype: what the model computes in

    Raises ValueError or TypeError when the array is anything else.
    """

    array: Array
    n_experts: int
    n: int
    k: int
    dtype: Any
    gated: bool = False

    def __post_init__(self) -> None:
        """Check the array."""
        bound = checks.bind("Mxfp4", array=(self.array, "size", np.uint8))
        wanted = packed_bytes(self.n_experts, self.n, self.k, gated=self.gated)
        if bound.sizes["size"] != wanted:
            raise ValueError(
                f"Mxfp4: array has {bound.sizes['size']} bytes, wanted {wanted} for [n_experts, n, "
                f"k] = {list(self.shape)}{' twice' if self.gated else ''}"
            )
        if not self.array.flags.c_contiguous or device.address(self.array) % 16:
            raise ValueError("Mxfp4: array has to be C-contiguous and begin on 16 bytes")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, rows and columns; of gates and ups those of each."""
        return self.n_experts, self.n, self.k

    @property
    def size_bytes(self) -> int:
        """Bytes of the array: 17 for 32 weights, and padding."""
        return self.array.nbytes

    @property
    def panels(self) -> int:
        """Panels of 16 rows that an expert has."""
        return _panels(self.n, self.gated)


def packed_bytes(n_experts: int, n: int, k: int, *, gated: bool = False) -> int:
    """Return the bytes that experts [n_experts, n, k], or gates and ups of these, pack into.

    Raises ValueError unless there are experts and rows, and k is a multiple of 32.
    """
    for name, value in {"n_experts": n_experts, "n": n, "k": k}.items():
        checks.number("packed_bytes", name, value, 1, whole=True)
    if k % BLOCK:
        raise ValueError(f"packed_bytes: k is {k}, wanted a multiple of {BLOCK}")
    return n_experts * _panels(n, gated) * _tiles(k) * reference.MXFP4_TILE_BYTES


def from_blocks(
    blocks: Array,
    scales: Array,
    *,
    up: tuple[Array, Array] | None = None,
    dtype: Any,
    out: Array | None = None,
) -> Mxfp4:
    """Pack experts in one launch, bits unchanged.

    blocks: uint8 [n_experts, n, k / 32, 16]; column 2 j of a block in byte j's low nibble
    scales: uint8 [n_experts, n, k / 32]; 2^(byte - 127)
    up: (blocks, scales) of the same shape; the others are then the gate
    dtype: what the model computes in
    out: uint8 [packed_bytes(n_experts, n, k, gated=up is not None)], 16-byte aligned

    Rows may lie apart, as gate and up do that take turns in one matrix. Returns Mxfp4 around `out`,
    or around a new array. NumPy arrays take the reference. Raises ValueError for sizes and
    TypeError for dtypes or mixed libraries.
    """
    up_blocks, up_scales = checks.pair("from_blocks", up)
    names = ("blocks", "scales", "up_blocks", "up_scales")
    bound = checks.bind(
        "from_blocks",
        strided=names,
        optional=("up_blocks", "up_scales"),
        blocks=(blocks, "n_experts n n_blocks 16", np.uint8),
        scales=(scales, "n_experts n n_blocks", np.uint8),
        up_blocks=(up_blocks, "n_experts n n_blocks 16", np.uint8),
        up_scales=(up_scales, "n_experts n n_blocks", np.uint8),
    )
    n_experts, n, n_blocks = (bound.sizes[name] for name in ("n_experts", "n", "n_blocks"))
    if not n_experts or not n or not n_blocks:
        raise ValueError(f"from_blocks: blocks is {list(blocks.shape)}, wanted no size of 0")
    k, gated = n_blocks * BLOCK, up is not None
    size = packed_bytes(n_experts, n, k, gated=gated)
    target = bound.output("out", out, (size,), np.uint8)
    made = Mxfp4(target, n_experts, n, k, np.dtype(dtype), gated)
    arrays = {name: bound[name] for name in names if bound[name] is not None}
    if bound.kind == "numpy":
        ups = (bound["up_blocks"], bound["up_scales"]) if gated else None
        target[...] = reference.pack_mxfp4(bound["blocks"], bound["scales"], ups)
        return made
    arrays = _readable(arrays)
    jit.kernel("unfused/pack_mxfp4.cu", "pack_mxfp4").launch(
        _grid(made),
        _THREADS,
        {
            "blocks": arrays["blocks"],
            "scales": arrays["scales"],
            "up_blocks": arrays.get("up_blocks"),
            "up_scales": arrays.get("up_scales"),
            "packed": target,
            "expert_stride": arrays["blocks"].strides[0],
            "row_stride": arrays["blocks"].strides[1],
            "scale_expert_stride": arrays["scales"].strides[0],
            "scale_row_stride": arrays["scales"].strides[1],
            "n_experts": n_experts,
            "n": n,
            "k": k,
        },
        like=target,
        size_bytes=sum(array.nbytes for array in arrays.values()) + target.nbytes,
    )
    return made


def quantize(x: Array) -> tuple[Array, Array]:
    """Round floating-point weights to MXFP4 on the CPU, by the rule of the OCP's specification.

    x: [..., k], k a multiple of 32

    Returns blocks [..., k / 32, 16] and scales [..., k / 32] of uint8, arrays of x's kind: what
    `from_blocks` takes. Raises ValueError for k and for what is not finite.
    """
    kind = device.kind(x)
    values = np.asarray(x.get() if kind == "cupy" else x).astype(np.float32)
    if not values.ndim or values.shape[-1] % BLOCK or not values.shape[-1]:
        raise ValueError(f"quantize: x is {list(values.shape)}, wanted a k of n times {BLOCK}")
    if not np.isfinite(values).all():
        raise ValueError("quantize: x has values that are not finite")
    blocks, scales = reference.quantize_mxfp4(values)
    return _moved(blocks, x), _moved(scales, x)


def dequantize(
    packed: Mxfp4,
    expert: int | None = None,
    *,
    ids: Array | None = None,
    out: Any = None,
    dtype: Any = None,
) -> Array | tuple[Array, Array]:
    """Return experts row by row in one launch, each weight rounded once to dtype.

    expert: which one; all when left out
    ids: int32 [m, k]; of all experts only those among them are written
    out: [n, k], of all experts [n_experts, n, k]; a pair of them when gated
    dtype: float32, float16 or bfloat16 (float64 too, of a NumPy array); the model's when left out

    Returns what `out` is; without it and with ids the others' rows are undefined. Raises ValueError
    for sizes and TypeError for dtypes or mixed libraries.
    """
    dtype = np.dtype(packed.dtype if dtype is None else dtype)
    bound = checks.bind(
        "dequantize",
        optional=("ids",),
        packed=(packed.array, "size", np.uint8),
        ids=(ids, "m k", np.int32),
    )
    if dtype not in device.FLOAT_DTYPES and not (bound.kind == "numpy" and dtype == np.float64):
        raise TypeError(f"dequantize: dtype is {dtype}, wanted float16, bfloat16 or float32")
    array, n_experts = bound["packed"], packed.n_experts
    shape: tuple[int, ...] = packed.shape
    if expert is not None and ids is not None:
        raise ValueError("dequantize: expert and ids are both given, wanted one of them")
    if expert is not None:
        checks.number("dequantize", "expert", expert, 0, whole=True)
        if expert >= n_experts:
            raise ValueError(f"dequantize: expert is {expert} and there are {n_experts}")
        each = array.size // n_experts
        array, n_experts, shape = array[expert * each : (expert + 1) * each], 1, packed.shape[1:]
    names = ("gate", "up") if packed.gated else ("out",)
    outs = checks.pair("dequantize", out) if packed.gated else (out,)
    made = [
        bound.output(name, given, shape, dtype) for name, given in zip(names, outs, strict=True)
    ]
    if len(made) == 2 and device.overlap(*made):
        raise ValueError("dequantize: gate shares memory with up; give it memory of its own")
    if bound.kind == "numpy":
        each = array.reshape(n_experts, -1)
        chosen = range(n_experts) if ids is None else np.unique(ids).tolist()
        for i in chosen:  # one by one: the intermediates are of 8 bytes a weight
            if not 0 <= i < n_experts:
                continue
            parts = reference.unpack_mxfp4(each[i], 1, packed.n, packed.k, gated=packed.gated)
            for target, part in zip(made, parts, strict=True):
                rows = target.reshape(n_experts, packed.n, packed.k)
                rows[i] = reference.mxfp4_values(*part, dtype)[0]
    else:
        some = Mxfp4(array, n_experts, packed.n, packed.k, packed.dtype, packed.gated)
        _launch_unpack(some, bound["ids"], made)
    return (made[0], made[1]) if packed.gated else made[0]


def random_blocks(
    shape: tuple[int, int, int],
    *,
    seed: int,
    streams: tuple[int, int],
    kind: str = "numpy",
    gpu: int = 0,
) -> tuple[Array, Array]:
    """Make experts that nobody trained, the same to the bit wherever they are made.

    shape: [n_experts, n, k]
    streams: which tensor, for blocks and for scales
    kind: "numpy", "cupy" (one launch on `gpu`) or "twin"

    Nibbles are uniform; a quarter of the scales is 2^-8 and the others are 2^-7, which gives a
    standard deviation of 0.0206. Returns (blocks, scales), as `from_blocks` takes them.
    """
    n_experts, n, k = shape
    count = n_experts * n * (k // BLOCK)
    if kind == "numpy":
        blocks, scales = reference.random_mxfp4(count, seed=seed, streams=streams)
    else:
        cupy = device.require_cupy() if kind == "cupy" else None
        with cupy.cuda.Device(gpu) if cupy else contextlib.nullcontext():
            blocks, scales = (
                device.namespace(kind).empty(size, np.uint8) for size in (count * 16, count)
            )
            if kind == "twin":
                blocks, scales = device.twin(blocks), device.twin(scales)
            jit.kernel("unfused/hash_mxfp4.cu", "hash_mxfp4").launch(
                -(-count // _THREADS),
                _THREADS,
                {
                    "blocks": blocks,
                    "scales": scales,
                    "count": count,
                    "seed": seed,
                    "block_stream": streams[0],
                    "scale_stream": streams[1],
                },
                like=blocks,
            )
    rows = (n_experts, n, k // BLOCK)
    return blocks.reshape(*rows, 16), scales.reshape(rows)


def _launch_unpack(packed: Mxfp4, ids: Array | None, targets: list[Array]) -> None:
    target, n_ids = targets[0], 0 if ids is None else ids.size
    per_access = 16 // target.itemsize
    aligned = all(device.address(x) % 16 == 0 for x in targets)
    kernel = jit.kernel(
        "unfused/pack_mxfp4.cu", "unpack_mxfp4", target.dtype, per_access if aligned else 1
    )
    kernel.launch(
        _grid(packed),
        _THREADS,
        {
            "packed": packed.array,
            "w": target,
            "up": targets[1] if packed.gated else None,
            "ids": ids,
            "n_ids": n_ids,
            "n_experts": packed.n_experts,
            "n": packed.n,
            "k": packed.k,
        },
        like=packed.array,
        size_bytes=(packed.size_bytes + sum(x.nbytes for x in targets))
        * (packed.n_experts if ids is None else min(n_ids, packed.n_experts))
        // packed.n_experts,
    )


def _readable(arrays: dict[str, Array]) -> dict[str, Array]:
    """Copy what the kernel cannot read as it lies: blocks within a row apart, or an up elsewhere.

    Gate and up have one stride of experts and one of rows.
    """

    def rows_are_whole(array: Array) -> bool:
        inner = 16 if array.ndim == 4 else 1
        return array.strides[2:] == ((inner, 1) if array.ndim == 4 else (1,))

    pairs = [("blocks", "up_blocks"), ("scales", "up_scales")]
    made = dict(arrays)
    for pair in pairs:
        given = [arrays[name] for name in pair if name in arrays]
        alike = all(array.strides == given[0].strides for array in given)
        if alike and all(map(rows_are_whole, given)):
            continue
        for name in pair:
            if name in made:
                made[name] = _contiguous(made[name])
    return made


def _contiguous(array: Array) -> Array:
    if device.kind(array) == "cupy":
        with device.on_device_of(array):
            return device.require_cupy().ascontiguousarray(array)
    return np.ascontiguousarray(array).view(type(array))


def _moved(array: np.ndarray, like: Array) -> Array:
    kind = device.kind(like)
    if kind == "cupy":
        with device.on_device_of(like):
            return device.require_cupy().asarray(array)
    return device.twin(array) if kind == "twin" else array


def _panels(n: int, gated: bool) -> int:
    return -(-n // (8 if gated else 16))


def _tiles(k: int) -> int:
    return -(-k // 64)


def _grid(packed: Mxfp4) -> tuple[int, int]:
    """Cut the tiles of a panel over x and all panels, in turns if there are many, over y."""
    panels = packed.n_experts * packed.panels
    return -(-_tiles(packed.k) // _TILES_PER_CTA), min(panels, _MAX_GRID_Y)
