"""The dtype that sums are kept in, and the way back."""

from __future__ import annotations

from typing import Any

import numpy as np


def wide(x: Any) -> np.ndarray:
    """Widen to the dtype that sums are kept in: float64 stays, everything else becomes float32."""
    x = np.asarray(x)
    return x if x.dtype in (np.float64, np.float32) else x.astype(np.float32)


def narrow(y: np.ndarray, like: Any) -> np.ndarray:
    """Round to like's dtype."""
    return np.asarray(y).astype(np.asarray(like).dtype, copy=False)
