"""Token ids to vectors."""

from __future__ import annotations

import numpy as np

from cufuse.reference._dtype import narrow, wide


def embed(
    ids: np.ndarray,
    table: np.ndarray,
    *,
    scale: float = 1.0,
    start: np.ndarray | None = None,
    position_table: np.ndarray | None = None,
    token_type: np.ndarray | None = None,
) -> np.ndarray:
    """Look up rows, times scale, plus the position's vector, plus the token type's."""
    y = wide(table[ids])
    y = y * y.dtype.type(scale)
    if position_table is not None:
        positions = np.arange(ids.shape[-1] if ids.ndim else 1)
        if start is not None:
            positions = positions + start[:, None]
        y = y + wide(position_table[positions if ids.ndim else 0])
    if token_type is not None:
        y = y + wide(token_type)
    return narrow(y, table)
