"""How a matrix product is cut: (op, target, shape, dtype) -> a frozen tile, as plain data.

Two kinds: `RowsTile` for a few rows of x, where the time is that of reading the weights once
(device/matvec.cuh), and `MatmulTile` for many (device/tile_matmul.cuh). Packed weights have a
`PackedRowsTile` (device/packed_rows.cuh) and `MatmulTile`s of their own (device/packed_tiles.cuh).
On sm_90a both have a `WarpgroupTile` (device/warpgroup_tiles.cuh).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cufuse import device, reference
from cufuse.config import Config

# Rows of x that one pass over the weights serves; more go to tiles.
MAX_ROWS = 8

# The ops that have a kernel of warpgroups.
WARPGROUP_OPS = ("linear", "gated_linear")

# The weight rows an op takes for each of its outputs.
WEIGHT_ROWS = {"linear": 1, "matmul": 1, "gated_linear": 2, "qkv_rope_append": 1}


@dataclass(frozen=True)
class Target:
    """What a choice may depend on: the GPU's numbers."""

    arch: str
    sm_count: int
    shared_bytes: int  # that a CTA can have


# The CPU twin: few SMs, so that small tests walk through the loops of large grids.
TWIN = Target("twin", 4, 99 * 1024)


class LaunchShape(NamedTuple):
    """Grid, threads of a CTA and its dynamic shared memory."""

    grid: tuple[int, ...]
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class RowsTile:
    """A warp multiplies `outputs` weight rows by `rows` rows of x; `split` warps share a K.

    What a sum's order depends on is `split`, and `warps` through the norm: both come from n, k and
    the dtype alone.
    """

    rows: int
    outputs: int
    unroll: int
    warps: int
    split: int
    shared_bytes: int  # of x
    resident: int  # CTAs that an SM holds

    @property
    def template(self) -> tuple[int, ...]:
        """The kernel's template values, before the access width."""
        return (self.rows, self.outputs, self.unroll, self.warps, self.split)

    def launch_shape(
        self, target: Target, m: int, n_weight_rows: int, itemsize: int
    ) -> LaunchShape:
        """CTAs that walk over the weight rows, and passes over them."""
        tiles = -(-n_weight_rows // (self.outputs * (self.warps // self.split)))
        ctas = min(tiles, target.sm_count * self.resident)
        return LaunchShape((ctas, -(-m // self.rows)), self.warps * 32, self.shared_bytes)


@dataclass(frozen=True)
class MatmulTile:
    """A CTA multiplies block_m rows of x by block_n weight rows, block_k values at a time."""

    block_m: int
    block_n: int
    block_k: int
    warps_m: int
    warps_n: int
    stages: int
    rate: float  # products a time unit, relative: what a tile's shape costs

    @property
    def template(self) -> tuple[int, ...]:
        """The kernel's template values, before the access width."""
        return (
            self.block_m,
            self.block_n,
            self.block_k,
            self.warps_m,
            self.warps_n,
            self.stages,
        )

    def count(self, m: int, n_weight_rows: int) -> int:
        """Tiles of a product."""
        return -(-m // self.block_m) * -(-n_weight_rows // self.block_n)

    def launch_shape(
        self, target: Target, m: int, n_weight_rows: int, itemsize: int
    ) -> LaunchShape:
        """A CTA for each tile."""
        threads = self.warps_m * self.warps_n * 32
        return LaunchShape((self.count(m, n_weight_rows),), threads, self.shared_bytes(itemsize))

    def shared_bytes(self, itemsize: int) -> int:
        """Dynamic shared memory, as TileShape::kShared has it."""
        if itemsize == 4:
            return 2 * self.block_k * (self.block_m + 4 + self.block_n + 4) * itemsize
        return self.stages * (self.block_m + self.block_n) * self.block_k * itemsize


@dataclass(frozen=True)
class PackedRowsTile:
    """The `warps` of a CTA share the K of a panel of packed weights, for `rows` rows of x.

    What a sum's order depends on is `warps`, the same for all.
    """

    rows: int
    warps: int
    unroll: int
    shared_bytes: int  # of x
    resident: int  # CTAs that an SM holds

    @property
    def template(self) -> tuple[int, ...]:
        """The kernel's template values, before the access width."""
        return (self.rows, self.warps, self.unroll)

    def launch_shape(
        self, target: Target, m: int, n_weight_rows: int, itemsize: int
    ) -> LaunchShape:
        """CTAs that walk over the panels, and passes over them."""
        ctas = min(-(-n_weight_rows // _PANEL_ROWS), target.sm_count * self.resident)
        return LaunchShape((ctas, -(-m // self.rows)), self.warps * 32, self.shared_bytes)


@dataclass(frozen=True)
class WarpgroupTile:
    """Teams of warpgroups multiply tiles that a CTA an SM walks over (sm_90a).

    A tile has `block_m` rows of x and `block_n` weight rows. `group_m` tiles below each other lie
    side by side in that walk; `teams` take tiles in turn; `split` CTAs, a cluster, share the K of a
    tile (device/warpgroup_tiles.cuh). What a sum's order depends on is `split`.
    """

    block_m: int
    block_n: int
    warpgroups: int
    stages: int
    group_m: int
    teams: int
    split: int
    block_ns: int  # what 64 values of K take
    finish_ns: int  # what a tile takes beside; with teams the last one of a CTA

    @property
    def template(self) -> tuple[int, ...]:
        """The kernel's template values."""
        return (
            self.block_m,
            self.block_n,
            self.warpgroups,
            self.stages,
            self.group_m,
            self.teams,
            self.split,
        )

    def box(self, weight_rows: int) -> tuple[int, int]:
        """Rows of x and columns of y, each of so many weight rows, of a box of results."""
        rows = self.block_m // min(self.split, self.block_m // 8)
        return min(rows, 64), 64 // weight_rows

    def count(self, m: int, n_weight_rows: int) -> int:
        """Tiles of a product."""
        return -(-m // self.block_m) * -(-n_weight_rows // self.block_n)

    def takes(self, k: int) -> bool:
        """Tell whether every CTA of a cluster has a part of K."""
        return -(-k // 64) >= self.split

    def is_half_empty(self, m: int) -> bool:
        """Tell whether a tile half as high would do."""
        return self.block_m >= 2 * m

    def fits(self, target: Target, k: int) -> bool:
        """Tell whether it takes K and a CTA's shared memory holds it."""
        return self.takes(k) and self.shared_bytes(2) <= target.shared_bytes

    def work(self, target: Target, m: int, n_weight_rows: int, k: int) -> tuple[int, int]:
        """Blocks of K that the CTA with the most tiles multiplies, and finishes that cost it time.

        Of teams only the last one's does.
        """
        tiles = -(-self.count(m, n_weight_rows) * self.split // target.sm_count)
        return tiles * -(-k // (64 * self.split)), tiles if self.teams == 1 else 1

    def launch_ns(self, target: Target, m: int, n_weight_rows: int, k: int) -> int:
        """What the CTA with the most tiles takes, or reading the weights."""
        blocks, finishes = self.work(target, m, n_weight_rows, k)
        return max(blocks * self.block_ns, read_ns(n_weight_rows, k)) + finishes * self.finish_ns

    def launch_shape(
        self, target: Target, m: int, n_weight_rows: int, itemsize: int
    ) -> LaunchShape:
        """A CTA an SM, or as many as there are tiles; a cluster for each tile with a split."""
        count = self.count(m, n_weight_rows)
        ctas = min(count, target.sm_count) if self.split == 1 else count * self.split
        threads = (self.warpgroups * self.teams + 1) * 128
        return LaunchShape((ctas,), threads, self.shared_bytes(itemsize))

    def shared_bytes(self, itemsize: int) -> int:
        """Dynamic shared memory at most, as WarpgroupShape::kSharedBytes has it."""
        boxes = self.warpgroups * self.teams * 2
        stage = (self.block_m + self.block_n) * 128 + 16
        return self.stages * stage + boxes * (max(self.box(1)[0] * 128, 1024) + 8)


Tile = RowsTile | MatmulTile | WarpgroupTile
PackedTile = PackedRowsTile | MatmulTile | WarpgroupTile

_PANEL_ROWS = 16

_TENSOR_CORES = (
    MatmulTile(128, 128, 64, 2, 4, 3, 1.0),
    MatmulTile(128, 64, 64, 4, 2, 3, 0.8),
    MatmulTile(64, 64, 64, 2, 2, 4, 0.6),
    MatmulTile(64, 32, 64, 4, 1, 4, 0.4),
    MatmulTile(32, 32, 64, 2, 1, 6, 0.25),
    MatmulTile(16, 32, 64, 1, 2, 8, 0.15),
)
_FFMA = (
    MatmulTile(128, 128, 16, 4, 2, 2, 1.0),
    MatmulTile(64, 64, 16, 2, 2, 2, 0.6),
)
# A warp's weight rows are whole panels; its rows of x are what it reads again and again.
_PACKED_WARPS = (
    MatmulTile(128, 128, 64, 4, 2, 3, 1.0),
    MatmulTile(64, 128, 64, 2, 4, 3, 0.75),
    MatmulTile(64, 64, 64, 2, 2, 4, 0.55),
    MatmulTile(32, 64, 64, 1, 4, 6, 0.35),
    MatmulTile(16, 64, 64, 1, 4, 8, 0.23),
    MatmulTile(16, 32, 64, 1, 2, 8, 0.11),
)
# With wgmma and tensor copies. Times are fitted to an H200, bfloat16 and gelu (`cufuse bench linear
# --sweep`). Teams hide what comes after a sum, but their smaller tiles read shared memory more
# often; a split costs an exchange between CTAs.
_WARPGROUPS = (
    WarpgroupTile(256, 128, 2, 4, 8, 1, 1, 625, 4000),
    WarpgroupTile(128, 256, 2, 4, 8, 1, 1, 640, 4200),
    WarpgroupTile(128, 128, 1, 6, 16, 2, 1, 365, 1500),
    WarpgroupTile(128, 128, 2, 6, 8, 1, 1, 335, 2000),
    WarpgroupTile(64, 128, 2, 8, 8, 1, 1, 205, 1500),
    WarpgroupTile(128, 64, 1, 8, 8, 1, 1, 205, 1300),
    WarpgroupTile(64, 64, 1, 13, 8, 1, 1, 135, 1000),
    WarpgroupTile(64, 64, 1, 13, 8, 1, 2, 135, 2000),
    WarpgroupTile(64, 64, 1, 13, 8, 1, 4, 135, 2500),
    WarpgroupTile(32, 64, 1, 18, 8, 1, 1, 130, 900),
    WarpgroupTile(32, 64, 1, 18, 8, 1, 2, 130, 1900),
    WarpgroupTile(32, 64, 1, 18, 8, 1, 4, 130, 2400),
    WarpgroupTile(16, 128, 2, 12, 8, 1, 1, 150, 900),
    WarpgroupTile(16, 64, 1, 22, 8, 1, 1, 125, 800),
    WarpgroupTile(16, 64, 1, 22, 8, 1, 2, 125, 1800),
    WarpgroupTile(16, 64, 1, 22, 8, 1, 4, 125, 2300),
)
# Of few rows: the tile may depend on the weight alone, so that a row's bits do not on the others.
_WARPGROUPS_OF_FEW = (
    WarpgroupTile(8, 128, 2, 13, 8, 1, 1, 150, 800),
    WarpgroupTile(8, 64, 1, 24, 8, 1, 1, 125, 700),
)
WARPGROUP_TILES = (*_WARPGROUPS, *_WARPGROUPS_OF_FEW)
_BYTES_PER_NS = 4300  # that an H200 reads
_PACKED_FFMA = (
    MatmulTile(128, 128, 16, 4, 2, 2, 1.0),
    MatmulTile(64, 64, 16, 2, 2, 2, 0.6),
)


def read_ns(n_weight_rows: int, k: int) -> int:
    """What reading a weight of 16-bit values from memory takes."""
    return n_weight_rows * k * 2 // _BYTES_PER_NS


_only: contextvars.ContextVar[WarpgroupTile | None] = contextvars.ContextVar("only", default=None)


@contextlib.contextmanager
def only(tile: WarpgroupTile) -> Iterator[None]:
    """Inside the block, let all products that warpgroups can take have one tile, few rows too."""
    token = _only.set(tile)
    try:
        yield
    finally:
        _only.reset(token)


@functools.cache
def _gpu_target(gpu: int) -> Target:
    info = device.gpu_info(gpu)
    return Target(info.arch, info.sm_count, info.shared_bytes_per_block)


def target_of(like: device.Array) -> Target:
    """Return what kernels on like's device are chosen by."""
    return _gpu_target(like.device.id) if device.kind(like) == "cupy" else TWIN


def choose(
    op: str,
    target: Target,
    m: int,
    n: int,
    k: int,
    dtype: Any,
    *,
    norm: bool = False,
    tensor_copies: bool = True,
) -> Tile:
    """Choose the tile of x [m, k] times w [n, k] (twice for "gated_linear").

    norm: x is normalised on the way in, which of few rows is a part of the product
    tensor_copies: they can reach x and w
    """
    return _choose(op, target, m, n, k, dtype, norm, tensor_copies, _only.get())


@functools.cache
def _choose(
    op: str,
    target: Target,
    m: int,
    n: int,
    k: int,
    dtype: Any,
    norm: bool,
    tensor_copies: bool,
    forced: WarpgroupTile | None,
) -> Tile:
    itemsize = np.dtype(dtype).itemsize
    n_weight_rows = n * WEIGHT_ROWS[op]
    takes = tensor_copies and _take_warpgroups(op, target, k, itemsize)
    if takes and forced is not None and forced.fits(target, k):
        return forced
    if m <= MAX_ROWS:
        # A warp for each weight row keeps more of the GPU busy where they are few, and is faster
        # for one row of x: 10.0 us instead of 11.1 for 4096 x 4096, 53.8 instead of 61.5 for a gate
        # and its up of 14336 x 4096 (H200, back to back).
        busy = -(-n_weight_rows // 64) * 8 >= target.sm_count * 3
        if takes and busy and m > 1 and not norm:
            tile = _fastest(_WARPGROUPS_OF_FEW, target, m, n_weight_rows, k)
            if tile is not None:
                return tile
        rows_tile = _rows_tile(op, target, m, n, k, itemsize)
        if rows_tile is not None:
            return rows_tile
    tile = _fastest(_WARPGROUPS, target, m, n_weight_rows, k) if takes else None
    return tile or choose_warps(op, target, m, n, itemsize)


def choose_warps(op: str, target: Target, m: int, n: int, itemsize: int) -> MatmulTile:
    """Choose among the tiles that take rows of any size at any address."""
    shapes = _FFMA if itemsize == 4 else _TENSOR_CORES
    return _cheapest(shapes, target, m, n * WEIGHT_ROWS[op], itemsize)


def choose_packed(
    op: str,
    target: Target,
    m: int,
    n_weight_rows: int,
    k: int,
    dtype: Any,
    *,
    tensor_copies: bool = True,
) -> PackedTile:
    """Choose the tile of x [m, k] times a packed weight [n_weight_rows, k], or two of half that."""
    return _choose_packed(op, target, m, n_weight_rows, k, dtype, tensor_copies, _only.get())


@functools.cache
def _choose_packed(
    op: str,
    target: Target,
    m: int,
    n_weight_rows: int,
    k: int,
    dtype: Any,
    tensor_copies: bool,
    forced: WarpgroupTile | None,
) -> PackedTile:
    itemsize = np.dtype(dtype).itemsize
    takes = tensor_copies and _take_warpgroups(op, target, k, itemsize)
    if takes and forced is not None and forced.fits(target, k):
        return forced
    if m <= MAX_ROWS:
        tile = _packed_rows_tile(target, m, k, itemsize)
        if tile is not None:
            return tile
    by_warpgroups = _fastest(_WARPGROUPS, target, m, n_weight_rows, k) if takes else None
    if by_warpgroups is not None:
        return by_warpgroups
    shapes = _PACKED_FFMA if itemsize == 4 else _PACKED_WARPS
    return _cheapest(shapes, target, m, n_weight_rows, itemsize)


def _take_warpgroups(op: str, target: Target, k: int, itemsize: int) -> bool:
    # Rows that are no multiple of 16 bytes are out of the reach of tensor copies.
    return op in WARPGROUP_OPS and itemsize == 2 and target.arch == "90a" and k > 0 and k % 8 == 0


def _fastest(
    shapes: tuple[WarpgroupTile, ...], target: Target, m: int, n_weight_rows: int, k: int
) -> WarpgroupTile | None:
    fitting = [tile for tile in shapes if tile.fits(target, k)]
    # Where reading the weights takes all of the time, half-empty tiles would seem as good.
    full = [tile for tile in fitting if not tile.is_half_empty(m)] or fitting
    if not full:
        return None
    return min(full, key=lambda tile: tile.launch_ns(target, m, n_weight_rows, k))


def _cheapest(
    shapes: tuple[MatmulTile, ...], target: Target, m: int, n_weight_rows: int, itemsize: int
) -> MatmulTile:
    fitting = [tile for tile in shapes if tile.shared_bytes(itemsize) <= target.shared_bytes]

    def cost(tile: MatmulTile) -> tuple[float, int]:
        waves = -(-tile.count(m, n_weight_rows) // target.sm_count)
        area = tile.block_m * tile.block_n
        return waves * area / tile.rate, -area

    return min(fitting, key=cost)


def _packed_rows_tile(target: Target, m: int, k: int, itemsize: int) -> PackedRowsTile | None:
    """Eight warps of four KB each on their way, two CTAs an SM where their x fits."""
    warps, unroll = 8, 4
    row_bytes = 32 * _packed_tiles(k, itemsize)
    for rows in (8, 4, 2, 1):
        if rows > 1 and rows // 2 >= m:
            continue
        partial_bytes = 2 * warps * rows * (_PANEL_ROWS + 4) * 4
        used = rows * row_bytes + partial_bytes
        if used > target.shared_bytes:
            continue
        resident = min(max(target.shared_bytes // (used + 1024), 1), 16 // warps)
        return PackedRowsTile(rows, warps, unroll, rows * row_bytes, resident)
    return None


def chunks(k: int, itemsize: int) -> int:
    """Accesses of a warp, 32 x 16 bytes, that a row takes: staging.cuh's chunk_count."""
    return -(-k * itemsize // 512)


def k_split(k: int, itemsize: int) -> int:
    """Warps that share a row's K: 4, unless that leaves a warp less than two chunks.

    The answer fixes the order of a sum, so it comes from the row alone.
    """
    split = 4
    while split > 1 and chunks(k, itemsize) < 2 * split:
        split //= 2
    return split


def _rows_tile(op: str, target: Target, m: int, n: int, k: int, itemsize: int) -> RowsTile | None:
    """Two weight rows a slot, four warps of four loads in flight each, six CTAs an SM.

    Measured on an H200, bf16, one row, 2026-11-29 (benchmarks/tune_linear.py), in % of a kernel
    that only reads: 4096 x 4096 89, 14336 x 4096 94; with 8 warps, 1 weight row and a split of 1
    they were 81 and 90. A decode of Llama-3.1-8B went from 4.31 to 4.22 ms a token.
    """
    row_bytes = chunks(k, itemsize) * 512
    warps, outputs = 4, 2
    for rows in (8, 4, 2, 1):
        if rows > 1 and rows // 2 >= m:
            continue
        partial_bytes = 2 * warps * rows * outputs * 4
        if rows * row_bytes + partial_bytes > target.shared_bytes:
            continue
        by_registers = (24 if rows == 1 else 16) // warps
        by_shared = max(target.shared_bytes // (rows * row_bytes + partial_bytes + 1024), 1)
        return RowsTile(
            rows,
            outputs,
            4,
            warps,
            k_split(k, itemsize),
            rows * row_bytes,
            min(by_registers, by_shared),
        )
    return None


# ---- the decode step of mega and fused ----------------------------------------------------------

DECODE_THREADS = 19 * 32  # decode_shape.cuh: 16 warps multiply, and there are three roles more
_PANEL_WARPS = 16
_PANEL_GROUPS = 4


@dataclass(frozen=True)
class DecodeTile:
    """How a decode step is spread over a GPU (kernels_cu/device/decode_shape.cuh).

    What bits depend on is `stage_bytes`, which cuts K, `split_chunks`, which cuts the cache, and
    `value_slices`, which orders the keys of a chunk.
    """

    ctas: int  # one an SM
    stages: int  # of the ring
    stage_bytes: int
    window: int  # stages that are on their way at a time
    calm_window: int  # from qkv to output, where a token waits for one CTA after the other
    copies: str  # "bulk" or "async"
    split_chunks: int  # chunks of the cache that one split takes
    value_slices: int = 4  # copies that the values of a chunk come by
    probe: str = "last"  # word of a vector that a CTA waits for before all threads look: or "first"


@functools.cache
def decode(config: Config, target: Target, dtype: Any) -> DecodeTile:
    """Choose the tile of a model's decode step; raises Unsupported where none fits.

    Measured on an H200, bf16, 512 tokens in the cache (SmolLM2 256), us a token back to back, all
    rows in benchmarks/results. 2026-12-01, windows (calm and other): Llama-3.2-1B 3 and 3 575, 3
    and 4 577, 2 and 3 580, 2 and 4 581; Qwen3-0.6B 1 and 2 439, 1 and 3 443, 2 and 2 443;
    SmolLM2-135M 2 and 3 268, 1 and 2 274, 2 and 2 275; Llama-3.1-8B 3 and 4 3295, 3 and 5 3296.
    What waits for its hand-offs waits behind what is on its way from memory; the larger a model,
    the more it is memory that it waits for. Stages of 8 KB instead of 16: SmolLM2-135M 285,
    Qwen3-0.6B 453. Slices of the values, 4 and 2: Qwen3-0.6B 439, 447, SmolLM2-135M 274, 276.
    Chunks a split, 3 and 4: Qwen3-0.6B 446, 444, Llama-3.2-1B 581, 584. Probe of the first, a
    middle and the last word: Qwen3-0.6B 414, 416, 424, Llama-3.2-1B 575, 576, 572, SmolLM2-135M
    267, 268, 266. 2026-11-30, slices of the values, 4, 2 and 1: Llama-3.2-1B with 8192 tokens 702,
    696, 705; Llama-3.1-8B with 32768 tokens 4818, 4714, 4751. Mixtures, 2026-12-01, windows 3 and
    5, 4 and 5, 5 and 6: OLMoE-1B-7B 717, 710, 708; 3 and 4, 4 and 4, 4 and 6, 5 and 6:
    Qwen3-30B-A3B 1868, 1862, 1854, 1853; 3 and 4, 4 and 4, 4 and 6: Mixtral-8x7B 6140, 6137, 6409.
    Slices of the values, 4 and 2: OLMoE-1B-7B 706, 711, Qwen3-30B-A3B 1836, 1851.
    """
    bulk = target.arch == "twin" or int(target.arch.rstrip("af")) >= 90
    ctas = min(target.sm_count, -(-config.vocab_size // 16))
    row_bytes = config.head_dim * np.dtype(dtype).itemsize
    dim = config.dim
    window, calm_window = (
        (3, 2) if dim < 1024 else (2, 1) if dim < 2048 else (3, 3) if dim < 4096 else (4, 3)
    )
    if config.n_experts and dim < 4096:
        window, calm_window = 6, 5
    large = target.shared_bytes > 160 * 1024
    for stage_bytes in (16384, 8192) if large else (8192, 16384):
        if stage_bytes < 2 * _FEWEST_KEYS * row_bytes:
            continue
        in_large = 16384 // stage_bytes  # stages that make a large one
        for stages in range(_MOST_STAGES * in_large, _FEWEST_STAGES - 1, -1):
            tile = DecodeTile(
                ctas,
                stages,
                stage_bytes,
                min(window * in_large, stages - _PANEL_GROUPS),
                min(calm_window * in_large, stages - _PANEL_GROUPS),
                "bulk" if bulk else "async",
                split_chunks=4 * in_large,
                value_slices=2 if dim >= 2048 and not config.n_experts else 4,
                probe="first" if 1024 <= dim < 2048 else "last",
            )
            if decode_shared_bytes(config, dtype, tile) <= target.shared_bytes:
                return tile
    raise device.Unsupported(
        f"mega: {config.name} has vectors or heads too large for the {target.shared_bytes} bytes "
        "of shared memory of this GPU; use engine unfused"
    )


_FEWEST_KEYS = 16  # of a chunk of the cache
_MOST_STAGES, _FEWEST_STAGES = 12, 5


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _packed_tiles(k: int, itemsize: int) -> int:
    return -(-k // (64 // itemsize)) * 2


class PartCut(NamedTuple):
    """How a part of a panel is cut along K: PanelShape in panels.cuh."""

    tiles: int
    blocks: int
    block_tiles: int
    last_tiles: int

    @classmethod
    def of(cls, n: int, blocks: int, block_tiles: int) -> PartCut:
        """Cut n tiles."""
        return cls(n, blocks, block_tiles, n - (blocks - 1) * block_tiles)


def rows_cut(k: int, itemsize: int, stage_bytes: int) -> PartCut:
    """Cut a panel of 16 rows of k values that lie in rows; four tiles are lines of 128 bytes."""
    n = -(-k * itemsize // 128) * 4
    blocks = -(-n // (stage_bytes // 512))
    return PartCut.of(n, blocks, _round_up(-(-n // blocks), 4))


def mxfp4_cut(k: int, stage_bytes: int) -> PartCut:
    """Cut a panel of 16 rows of k weights of 4 bits; a tile is of 64 columns."""
    n = -(-k // 64)
    blocks = -(-n // (stage_bytes // reference.MXFP4_TILE_BYTES))
    return PartCut.of(n, blocks, -(-n // blocks))


def expert_columns(c: Config) -> tuple[int, int]:
    """Columns of the last product of chosen and shared experts, and those of a part of it."""
    shared = c.shared_hidden_dim
    part = math.gcd(shared, c.hidden_dim) if shared else c.hidden_dim
    return shared + c.n_experts_per_token * c.hidden_dim, part


def _mlp_tiles(c: Config, itemsize: int, stage_bytes: int) -> int:
    """Tiles of the widest x of an MLP."""
    if not c.n_experts:
        return _packed_tiles(c.hidden_dim, itemsize)

    def in_rows(k: int, parts: int = 1) -> int:
        return parts * rows_cut(k, itemsize, stage_bytes).tiles

    def of_4_bits(k: int, parts: int = 1) -> int:
        return parts * mxfp4_cut(k, stage_bytes).tiles * 2 * itemsize  # x's tiles are of 32 bytes

    columns, part = expert_columns(c)
    of_experts = of_4_bits if c.expert_dtype == "mxfp4" else in_rows
    return max(
        in_rows(c.dim),
        in_rows(max(c.dense_hidden_dim, 8)),
        of_experts(c.dim),
        of_experts(part, columns // part),
    )


def cache_keys(c: Config, dtype: Any, tile: DecodeTile) -> int:
    """Keys of a chunk of the cache, a stage with their values, as CacheShape::kKeys has it."""
    fitting = tile.stage_bytes // 2 // (c.head_dim * np.dtype(dtype).itemsize)
    return next((keys for keys in (64, 32) if fitting >= keys), _FEWEST_KEYS)


def most_splits(c: Config) -> int:
    """Parts of a cache that attention may cut, as DecodeShape::kMostSplits has it."""
    return max(128 // c.n_kv_heads, 1)


def decode_shared(c: Config, dtype: Any, tile: DecodeTile) -> dict[str, int]:
    """Bytes of what lies in a CTA's dynamic shared memory, in its order."""
    itemsize = np.dtype(dtype).itemsize
    group = c.n_heads // c.n_kv_heads
    row_bytes = c.head_dim * itemsize
    launch, threads = 128, _PANEL_WARPS * 32
    ring = tile.stages * (tile.stage_bytes + 128 + 16)
    fragments = 32 * max(
        _packed_tiles(max(c.dim, c.q_dim), itemsize), _mlp_tiles(c, itemsize, tile.stage_bytes)
    )
    choice = _round_up(16 + 8 * c.n_experts_per_token, 8)
    merge = 4 * group * (c.head_dim + 8 + 2 * (cache_keys(c, dtype, tile) + 8)) * 4
    # Bins for a draw with filters, where x and partial sums are when there are any.
    sums = 4 * _PANEL_WARPS * 16 * 4
    squares = min(c.dim * itemsize // 8, threads)
    bins = 2 * threads * 8 + threads // 32 * 8 + 16 - sums
    return {
        "launch": launch,
        "ring": _round_up(launch + ring, 128) - launch,
        "x": _round_up(max(fragments, merge, bins), 16),
        "partial sums": sums + 4 * 8,
        "norm": 4 * (_PANEL_WARPS if np.dtype(dtype) == np.float16 else _round_up(squares, 128)),
        "head rows": _round_up((group + 2) * row_bytes, 16),
        "head norms": _round_up((group + 1) * row_bytes, 16) if c.qk_norm != "none" else 0,
        "angles": _round_up(c.rotary_dim * 4, 16),
        "softmax": (2 * 4 + 1) * 8 * 4,
        "roles": _round_up(3 * 52, 8),
        "experts": choice if c.n_experts else 0,
    }


def decode_shared_bytes(c: Config, dtype: Any, tile: DecodeTile) -> int:
    """Dynamic shared memory, as DecodeShape::kSharedBytes has it."""
    return sum(decode_shared(c, dtype, tile).values())


def decode_regions(c: Config, dtype: Any, tile: DecodeTile) -> dict[str, int]:
    """Words of 8 bytes of what CTAs hand to each other, in the order in which they lie."""
    per_word = 4 // np.dtype(dtype).itemsize

    def vector(n: int) -> int:
        return _round_up(-(-n // per_word), 16)

    splits = most_splits(c)
    return {
        "x": vector(c.dim),
        "middle": vector(c.dim),
        "qkv": vector(c.q_dim + 2 * c.kv_dim),
        "attention": vector(c.q_dim),
        "hidden": vector(
            max(expert_columns(c)[0], c.dense_hidden_dim) if c.n_experts else c.hidden_dim
        ),
        "parts": 2 * splits * vector(c.q_dim),
        "weights": _round_up(splits * c.n_heads, 16),
        "best": _round_up(4 * tile.ctas, 16),
        "appended": _round_up(2 * c.n_layers * c.n_kv_heads, 16),
        "drawn": 16,
        "highest": _round_up(-(-_head_panels(c) // 2), 16),
        "router": _round_up(c.n_experts + 1, 16) if c.n_experts else 0,
        "squares": _round_up((c.q_dim + c.kv_dim) // 16, 16) if c.qk_norm == "full" else 0,
    }


def _head_panels(c: Config) -> int:
    return -(-c.vocab_size // 16)


def decode_words(c: Config, dtype: Any, tile: DecodeTile) -> int:
    """Words of 8 bytes between CTAs, as DecodeShape::kWords has it."""
    return sum(decode_regions(c, dtype, tile).values())
