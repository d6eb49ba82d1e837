"""How elementary ops spread their elements over CTAs."""

from __future__ import annotations

from cufuse import tiles
from cufuse.device import Array

THREADS = 256
_CTAS_PER_SM = 16


def grid(like: Array, rows: int, n: int, vec: int) -> tuple[int, int]:
    """CTAs over the columns and over the rows: a few for each SM, which stride over the rest."""
    most = tiles.target_of(like).sm_count * _CTAS_PER_SM
    columns = min(-(-n // (THREADS * vec)), most)
    return columns, min(rows, max(most // columns, 1), 65535)
