"""Attention of many queries by the warpgroups of sm_90a (kernels_cu/fused/attention_sm90.cu)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from cufuse import device, jit, tensor_map, tiles
from cufuse.checks import Bound
from cufuse.device import Array
from cufuse.tiles import Target

_BOX = 64  # rows and columns of a box of queries, columns of one of keys
_SMALLEST_HEAD_DIM = 32
_MOST = 1 << 29  # queries, keys, or positions of a window: sums of two are int32


@dataclass(frozen=True)
class AttentionTile:
    """A CTA's warpgroups take 64 queries each and walk over the keys in blocks."""

    warpgroups: int
    keys: int
    stages: int  # of keys, and of values
    turns: str  # "free" or "fixed"
    block_ns: float  # what a block of keys takes
    tile_ns: float  # and a tile besides

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return self.warpgroups * _BOX

    @property
    def template(self) -> tuple[int, ...]:
        """The kernel's template values behind the head's size."""
        return (self.warpgroups, self.keys, self.stages)

    def shared_bytes(self, head_dim: int) -> int:
        """Dynamic shared memory, as AttentionShape::kSharedBytes has it."""
        boxes = -(-head_dim // _BOX)
        queries = self.queries * boxes * 128
        ring = 2 * self.stages * self.keys * boxes * 128
        query_stages = 2 if 2 * queries + ring + 1024 <= 227 * 1024 else 1
        barriers = 4 * self.stages + 2 * query_stages * self.warpgroups
        return query_stages * queries + ring + barriers * 8

    def time(self, ctas: int, heads: int, q_len: int, kv_len: int, causal: bool) -> float:
        """Return the ns of the slowest CTA, of queries that are the last ones if causal."""
        count = -(-q_len // self.queries)
        keys = [kv_len - i * self.queries if causal else kv_len for i in range(count)]
        blocks = [-(-max(n, 1) // self.keys) for n in keys]
        costs = np.repeat([self.block_ns * n + self.tile_ns for n in blocks], heads)
        rounds = np.append(costs, np.zeros(-costs.size % ctas)).reshape(-1, ctas)
        rounds[1::2] = rounds[1::2, ::-1].copy()
        return float(rounds.sum(0).max())


# For heads of up to so many columns. Times are fitted to an H200, bfloat16 and causal. The best of
# these took, in us: 32 heads of 64 and 4096 tokens 133, and 512 tokens behind 3584 others 42.5;
# 16 heads of 128 and 8192 tokens 356, and 2048 tokens 36.2. Blocks of 96 or 112 keys (64 columns)
# and of 64, 96 or 144 (128 columns) were slower.
_TILES = {
    64: (
        AttentionTile(3, 128, 2, "fixed", 1200, 3200),
        AttentionTile(2, 128, 2, "fixed", 1090, 2400),
    ),
    128: (
        AttentionTile(3, 80, 2, "fixed", 1190, 3300),
        AttentionTile(2, 128, 2, "free", 1410, 1900),
    ),
    256: (AttentionTile(2, 64, 2, "fixed", 1450, 1900),),
}


@functools.lru_cache(4096)
def choose(
    target: Target,
    head_dim: int,
    heads: int,
    q_len: int,
    kv_len: int,
    causal: bool,
    only_scaled: bool,
) -> AttentionTile | None:
    """Choose the tile for `heads` heads of all sequences; None where the kernel has none."""
    if target.arch != "90a" or head_dim % 8 or head_dim < _SMALLEST_HEAD_DIM:
        return None
    fitting = [
        tile
        for tile in _TILES[next(limit for limit in _TILES if head_dim <= limit)]
        # A soft cap needs more registers than three warpgroups leave.
        if tile.shared_bytes(head_dim) <= target.shared_bytes
        and (only_scaled or tile.warpgroups == 2)
    ]
    if not fitting:
        return None
    ctas = target.sm_count
    return min(fitting, key=lambda tile: tile.time(ctas, heads, q_len, kv_len, causal))


def by_heads(x: Array) -> Array:
    """Return [batch, len, heads, head_dim] as [batch, heads, len, head_dim]."""
    return x.transpose(0, 2, 1, 3)


def attend(bound: Bound, args: dict[str, Any], stream: Any, size_bytes: int) -> bool:
    """Launch the kernel of warpgroups where there is one; tell whether that was done."""
    sizes, out = bound.sizes, args["out"]
    if max(sizes["q_len"], sizes["kv_len"], args["window"]) > _MOST:
        return False
    only_scaled = args["scale"] > 0 and not args["softcap"]
    target, heads = tiles.target_of(out), sizes["batch"] * sizes["n_heads"]
    tile = choose(
        target,
        sizes["head_dim"],
        heads,
        sizes["q_len"],
        sizes["kv_len"],
        bool(args["causal"]),
        only_scaled,
    )
    if (
        tile is None
        or device.address(out) % 16
        or not all(map(tensor_map.fits, (bound[x] for x in "qkv")))
    ):
        return False
    names = ("q", "k", "v", "start", "lengths", "sinks", "out", "q_len", "kv_len", "n_heads")
    rest = ("n_kv_heads", "default_start", "window", "causal", "scale", "softcap", "inv_softcap")
    rows = {"q": _BOX, "k": tile.keys, "v": tile.keys}
    jit.kernel(
        "fused/attention_sm90.cu",
        "attention_warpgroups",
        bound.dtype,
        sizes["head_dim"],
        *tile.template,
        f"Logits::{'scaled' if only_scaled else 'any'}",
        f"Turns::{tile.turns}",
    ).launch(
        min(heads * -(-sizes["q_len"] // tile.queries), target.sm_count),
        (tile.warpgroups + 1) * 128,
        {
            **{
                f"{x}_map": tensor_map.boxes(by_heads(bound[x]), (1, 1, n, _BOX), swizzle=128)
                for x, n in rows.items()
            },
            **{name: args[name] for name in (*names, *rest)},
            "batch": sizes["batch"],
        },
        like=out,
        shared_bytes=tile.shared_bytes(sizes["head_dim"]),
        stream=stream,
        size_bytes=size_bytes,
    )
    return True
