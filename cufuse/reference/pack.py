"""Weights in the order in which tensor cores take them; kernels_cu/device/packed.cuh tells it too.

A panel is 16 rows, or 8 of a gate and the same 8 of its up, cut into tiles of 32 bytes a row. A
tile holds 16 bytes for each lane of a warp: pairs of neighbours at rows lane / 4 and 8 further, of
columns 2 (lane % 4) and, in 16-bit types, 8 further.
"""

from __future__ import annotations

import numpy as np


def pack(w: np.ndarray, up: np.ndarray | None = None) -> np.ndarray:
    """Return a weight [n, k], or a gate and its up, as flat panels; padding is zeros."""
    tile_k, word = _tile(w.dtype)
    if up is None:
        rows = _padded(w, 16, 2 * tile_k)
    else:
        gate_and_up = [_padded(x, 8, 2 * tile_k) for x in (w, up)]
        rows = np.concatenate([x.reshape(-1, 8, x.shape[1]) for x in gate_and_up], axis=1)
    # row = (panel, half, row of 8), pair of columns = (tile, eight, pair of 8)
    split = rows.view(word).reshape(-1, 2, 8, rows.shape[-1] // tile_k, tile_k // 8, 4)
    return split.transpose(0, 3, 2, 5, 4, 1).reshape(-1).view(w.dtype)


def unpack(
    packed: np.ndarray, n: int, k: int, *, gated: bool = False
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Return what `pack` took: [n, k], or (gate, up) of [n, k] each."""
    tile_k, word = _tile(packed.dtype)
    tiles = 2 * -(-k // (2 * tile_k))
    split = packed.view(word).reshape(-1, tiles, 8, 4, tile_k // 8, 2)
    rows = split.transpose(0, 5, 2, 1, 4, 3).reshape(-1, tiles * tile_k // 2).view(packed.dtype)
    if not gated:
        return rows[:n, :k]
    halves = rows.reshape(-1, 2, 8, rows.shape[1])
    gate, up = (halves[:, i].reshape(-1, rows.shape[1])[:n, :k] for i in (0, 1))
    return gate, up


def _tile(dtype: np.dtype) -> tuple[int, str]:
    """Return the columns of a tile, and the word that moves a pair of neighbours as it is."""
    return 32 // dtype.itemsize, f"u{2 * dtype.itemsize}"


def _padded(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Fill up with zeros to multiples of rows and columns."""
    n, k = x.shape
    shape = (-(-n // rows) * rows, -(-k // columns) * columns)
    if shape == x.shape:
        return np.ascontiguousarray(x)
    padded = np.zeros(shape, x.dtype)
    padded[:n, :k] = x
    return padded
