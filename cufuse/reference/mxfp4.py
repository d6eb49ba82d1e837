"""Weights of 4 bits in the order in which warps take them; device/mxfp4.cuh tells it too.

MXFP4 (OCP Microscaling Formats v1.0): blocks of 32 values along k share a scale 2^(byte - 127), a
value is an FP4, e2m1. A panel is 16 rows, or 8 of a gate and the same 8 of its up, cut into tiles
of 64 columns: 512 bytes of values, 16 for each lane of a warp, and 32 bytes of scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse.reference.random import hash_key, hash_word

VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
MXFP4_TILE_BYTES, VALUE_BYTES = 544, 512
_NO_SCALE = 127  # of columns and rows that are padding: 2^0
_BITS = np.uint32(0x81C081C0)  # where two values have their bits in a register
_WORD_BITS = np.uint32(0x1A101A10)  # of the inner word, that lie in the outer one as they do


def quantize_mxfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round x [..., k] to blocks [..., k / 32, 16] and scales [..., k / 32] of uint8.

    The exponent of a scale is that of the block's largest value less 2, the largest FP4's own; a
    value is rounded to the nearest, of two equally near to the even one, and at most 6. A block of
    zeros has the scale 1.
    """
    values = np.asarray(x, np.float32)
    values = values.reshape(*values.shape[:-1], values.shape[-1] // 32, 32).astype(np.float64)
    largest = np.abs(values).max(-1)
    exponent = np.where(largest > 0, np.frexp(largest)[1] - 1 - 2, 0)
    exponent = np.clip(exponent, -127, 127)
    scaled = np.abs(values) * np.exp2(-exponent.astype(np.float64))[..., None]
    # Neighbours of equal distance: the middle goes to the even code.
    middles = (VALUES[1:].astype(np.float64) + VALUES[:-1]) / 2
    codes = np.searchsorted(middles, scaled, side="left")
    tie = (codes < 7) & (scaled == middles[np.minimum(codes, 6)]) & (codes % 2 == 1)
    codes = (codes + tie).astype(np.uint8) | np.signbit(values).astype(np.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).astype(np.uint8)


def mxfp4_values(blocks: np.ndarray, scales: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """Return the values [..., k] of blocks [..., k / 32, 16] and scales [..., k / 32].

    float64 holds all of them; 255 among the scales stands for NaN.
    """
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    signed = np.concatenate([VALUES, -VALUES]).astype(np.float64)
    scale = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
    with np.errstate(over="ignore"):
        exact = signed[codes] * scale[..., None]
        rounded = exact if np.dtype(dtype) == np.float64 else exact.astype(np.float32)
        return rounded.astype(dtype).reshape(*scales.shape[:-1], scales.shape[-1] * 32)


def pack_mxfp4(blocks: np.ndarray, scales: np.ndarray, up: Any = None) -> np.ndarray:
    """Return experts, or gates and (blocks, scales) of their ups, as flat panels of bytes.

    blocks, scales: [n_experts, n, k / 32, 16] and [n_experts, n, k / 32]
    """
    parts = [_padded(blocks, scales, 16 if up is None else 8)]
    if up is not None:
        parts.append(_padded(up[0], up[1], 8))
    rows, row_scales = (_in_turns([part[i] for part in parts]) for i in (0, 1))
    n_experts, n, n_bytes = rows.shape
    tiles, panels = n_bytes // 32, n // 16
    # row = (panel, half, row of 8), byte = (tile, word, eight columns, two columns)
    split = rows.reshape(n_experts, panels, 2, 8, tiles, 4, 2, 4)
    pairs = split.transpose(0, 1, 4, 3, 7, 5, 6, 2).reshape(-1, 4)
    made = np.empty((n_experts * panels * tiles, MXFP4_TILE_BYTES), np.uint8)
    made[:, :VALUE_BYTES] = _join(pairs).view(np.uint8).reshape(-1, VALUE_BYTES)
    of_rows = row_scales.reshape(n_experts, panels, 2, 8, tiles, 2)
    made[:, VALUE_BYTES:] = of_rows.transpose(0, 1, 4, 3, 5, 2).reshape(-1, 32)
    return made.reshape(-1)


def unpack_mxfp4(
    packed: np.ndarray, n_experts: int, n: int, k: int, *, gated: bool = False
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (blocks, scales) as `pack_mxfp4` took them: one pair, or those of gate and up."""
    panels, tiles = -(-n // (8 if gated else 16)), -(-k // 64)
    parts = packed.reshape(-1, MXFP4_TILE_BYTES)
    words = np.ascontiguousarray(parts[:, :VALUE_BYTES]).view("<u4")
    pairs = _split(words).reshape(n_experts, panels, tiles, 8, 4, 4, 2, 2)
    rows = pairs.transpose(0, 1, 7, 3, 2, 5, 6, 4).reshape(n_experts, panels, 2, 8, tiles * 2, 16)
    scales = parts[:, VALUE_BYTES:].reshape(n_experts, panels, tiles, 8, 2, 2)
    scales = scales.transpose(0, 1, 5, 3, 2, 4).reshape(n_experts, panels, 2, 8, tiles * 2)
    halves = [(rows[:, :, i], scales[:, :, i]) for i in (0, 1)] if gated else [(rows, scales)]
    blocks = k // 32
    return [
        (
            values.reshape(n_experts, -1, tiles * 2, 16)[:, :n, :blocks],
            of_rows.reshape(n_experts, -1, tiles * 2)[:, :n, :blocks],
        )
        for values, of_rows in halves
    ]


def _padded(blocks: np.ndarray, scales: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Fill up with zeros and their scale: bytes [n_experts, n, k / 2], scales, of whole tiles."""
    n_experts, n, per_row, _ = blocks.shape
    n_padded, padded = -(-n // rows) * rows, -(-per_row // 2) * 2
    values = np.zeros((n_experts, n_padded, padded, 16), np.uint8)
    values[:, :n, :per_row] = blocks
    of_rows = np.full((n_experts, n_padded, padded), _NO_SCALE, np.uint8)
    of_rows[:, :n, :per_row] = scales
    return values.reshape(n_experts, n_padded, padded * 16), of_rows


def _in_turns(matrices: list[np.ndarray]) -> np.ndarray:
    """Put eight rows of each [n_experts, n, ...] behind eight of the one before it."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    eights = [x.reshape(len(first), -1, 8, first.shape[2]) for x in matrices]
    return np.concatenate(eights, 2).reshape(len(first), -1, first.shape[2])


def _rotated(words: np.ndarray, by: int) -> np.ndarray:
    return words << np.uint32(by) | words >> np.uint32(32 - by)


def _join(pairs: np.ndarray) -> np.ndarray:
    """Turn bytes [..., 4] of two values each into words [...]."""
    byte = pairs.astype(np.uint32)
    bits = (byte & 8) << 12 | (byte & 7) << 6 | (byte & 0x80) << 24 | (byte & 0x70) << 18
    inner = bits[..., 1] | _rotated(bits[..., 2], 29) | _rotated(bits[..., 3], 3)
    return bits[..., 0] | inner & _WORD_BITS | _rotated(inner & ~_WORD_BITS, 27)


def _split(words: np.ndarray) -> np.ndarray:
    """Undo `_join`."""
    inner = words & _WORD_BITS | _rotated(words, 5) & ~_WORD_BITS
    four = [words, inner, _rotated(inner, 3), _rotated(inner, 29)]
    bits = np.stack([x & _BITS for x in four], -1)
    byte = bits >> 12 & 8 | bits >> 6 & 7 | bits >> 24 & 0x80 | bits >> 18 & 0x70
    return byte.astype(np.uint8)


def random_mxfp4(count: int, *, seed: int, streams: tuple[int, int]) -> tuple[Any, Any]:
    """Return `count` blocks [count, 16] of uniform bytes, and scales: a quarter 119, else 120."""

    def words(n: int, stream: int) -> np.ndarray:
        made = np.empty(n, np.uint32)
        for begin in range(0, n, 1 << 20):
            part = made[begin : begin + (1 << 20)]
            counter = np.arange(part.size, dtype=np.uint32) + np.uint32(begin & 0xFFFFFFFF)
            part[...] = hash_word(counter, hash_key(seed, stream, begin >> 32))
        return made

    blocks = words(4 * count, streams[0]).astype("<u4", copy=False).view(np.uint8)
    scales = np.where(words(count, streams[1]) >> np.uint32(30), 120, 119).astype(np.uint8)
    return blocks.reshape(count, 16), scales
