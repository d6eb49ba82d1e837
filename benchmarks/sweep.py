"""Time the tiles of warpgroups (tiles.py) on many shapes, and fit what they are chosen by.

Every tile of the table and its neighbours multiply each shape, in single launches behind a pause,
as `WarpgroupTile.launch_ns` models them: an overhead, then blocks of K or reading the weights, and
what follows a tile, for the CTA that has most of them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cufuse import config, device, tiles
from cufuse.benchmarks import timing, verify
from cufuse.benchmarks.case import Case, cublas_run
from cufuse.benchmarks.catalogue import cases
from cufuse.benchmarks.rows import SWEEP, Row
from cufuse.tiles import Target, WarpgroupTile

OPS = tiles.WARPGROUP_OPS

_MODELS = ("llama-3.2-1b", "llama-3.1-8b")
_ROWS = (8, 16, 64, 512, 4096)
_SMALL = (16, 256, 512)  # compiles a tile's kernel
_MOST_TURNS = 64  # tiles a CTA, beyond which a tile is too small for a product
_SLOW = 2.0  # times the fastest: what a tile does there says nothing about where it is chosen
_ROUNDS = 20  # of a fit
# Of a block, a finish and the overhead: how they share what no row tells apart.
_USUAL_NS = (100.0, 1500.0, 3500.0)
_NEAR = 1.01  # times the fastest: within what two runs differ by


def shapes(op: str) -> list[tuple[int, ...]]:
    """Return m, n and k of the benchmark and of the products of two models."""
    found = list(cases()[op].gpu_sizes)
    for model in map(config.preset, _MODELS):
        dim, hidden = model.dim, model.hidden_dim
        products = [(hidden, dim)]
        if op == "linear":
            products += [(model.q_dim + 2 * model.kv_dim, dim), (dim, model.q_dim), (dim, hidden)]
        found += [(m, n, k) for n, k in products for m in _ROWS]
    return list(dict.fromkeys(found))


# ---- tiles --------------------------------------------------------------------------------------


def candidates(target: Target) -> list[WarpgroupTile]:
    """Return the table's tiles that fit a GPU, and neighbours in as many stages as fit."""
    found = {tile.template: tile for tile in tiles.WARPGROUP_TILES if _is_possible(tile, target)}
    rows, weight_rows = (8, 16, 32, 64, 128, 192, 256), (64, 128, 256)
    for block_m, block_n, teams, split in itertools.product(rows, weight_rows, (1, 2), (1, 2, 4)):
        area = block_m * block_n
        # An exchange of many sums takes longer than what it saves; small tiles have few to hide.
        if (split > 1 and (area > 64 * 128 or block_n > 128)) or (teams > 1 and area < 64 * 128):
            continue
        for warpgroups in range(1, block_n // 64 + 1):
            for group_m in (8, 16) if area >= 128 * 192 else (8,):
                tile = WarpgroupTile(block_m, block_n, warpgroups, 2, group_m, teams, split, 0, 0)
                tile = _with_most_stages(tile, target)
                if _is_possible(tile, target) and _fits_registers(tile):
                    found.setdefault(tile.template, tile)
    return list(found.values())


def _with_most_stages(tile: WarpgroupTile, target: Target) -> WarpgroupTile:
    one = replace(tile, stages=1).shared_bytes(2)
    stage = tile.shared_bytes(2) - one
    return replace(tile, stages=max((target.shared_bytes - one) // stage + 1, 1))


def _is_possible(tile: WarpgroupTile, target: Target) -> bool:
    """Tell whether WarpgroupShape (device/warpgroup_tiles.cuh) takes a tile, for gates too."""
    multipliers = tile.warpgroups * tile.teams
    owners = min(tile.split, tile.block_m // 8)
    own_rows, odd = divmod(tile.block_m, owners)
    return (
        tile.block_n % (64 * tile.warpgroups) == 0
        and max(tile.block_m, tile.block_n) <= 256
        and tile.block_m % 8 == 0
        and odd == 0
        and own_rows % min(own_rows, 64) == own_rows % 8 == 0
        and tile.block_m * tile.block_n <= 128 * 128 * tile.warpgroups
        and multipliers <= 3
        and (tile.split == 1 or tile.teams == 1)
        and (tile.split == 1 or tile.block_m * tile.block_n * 4 <= tile.stages * _stage_bytes(tile))
        and tile.stages >= 3
        and tile.shared_bytes(2) <= target.shared_bytes
    )


def _stage_bytes(tile: WarpgroupTile) -> int:
    return (tile.block_m + tile.block_n) * 128


def _fits_registers(tile: WarpgroupTile) -> bool:
    """Tell whether a thread has registers for its sums beside the fragments of a gate's slabs.

    Three warpgroups have too few for the fragments, and two slabs of few sums are better left to
    two warpgroups.
    """
    slabs = tile.block_n // tile.warpgroups // 64
    sums = slabs * tile.block_m // 2
    return tile.warpgroups * tile.teams < 3 and (slabs == 1 or (slabs == 2 and sums >= 64))


def worth_trying(tile: WarpgroupTile, target: Target, m: int, n_weight_rows: int, k: int) -> bool:
    """Tell whether a tile could be the fastest: neither half empty nor one of very many."""
    turns = tile.count(m, n_weight_rows) * tile.split / target.sm_count
    half_empty = tile.block_m > 8 and tile.is_half_empty(m)
    return tile.fits(target, k) and not half_empty and turns <= _MOST_TURNS


def label(tile: tiles.Tile) -> str:
    """Name a tile in a row: rows x weight rows, warpgroups x teams, stages, group, split."""
    if not isinstance(tile, WarpgroupTile):
        return f"{type(tile).__name__} {' '.join(map(str, tile.template))}"
    return (
        f"{tile.block_m}x{tile.block_n} wg{tile.warpgroups}x{tile.teams} st{tile.stages} "
        f"gm{tile.group_m} sp{tile.split}"
    )


# ---- measuring ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Nanoseconds that a tile took for a product of m rows with a weight [n_weight_rows, k]."""

    m: int
    n_weight_rows: int
    k: int
    tile: WarpgroupTile
    ns: float

    @property
    def shape(self) -> tuple[int, int, int]:
        """What was multiplied."""
        return self.m, self.n_weight_rows, self.k


@dataclass
class Sweep:
    """A sweep on GPU 0; what was measured is kept for the fit."""

    op: str
    repetitions: int = 5
    checked: bool = True
    log: Callable[[str], None] = lambda _: None
    kind: str = "cupy"  # of arrays
    measured: list[Measured] = field(default_factory=list)

    def __post_init__(self) -> None:
        some = device.namespace(self.kind).empty(1, np.float32)
        self.target = tiles.target_of(device.twin(some) if self.kind == "twin" else some)
        self.tiles = candidates(self.target)

    def rows(self, products: Sequence[Case]) -> Iterator[Row]:
        """Time every tile on every product; yields a row for each, the fastest first."""
        for dtype in dict.fromkeys(product.dtype for product in products):
            tried = [self._tried(product) for product in products if product.dtype == dtype]
            made = list(dict.fromkeys(itertools.chain(*tried)))
            self.log(f"compiling {len(made)} tiles for {dtype}")
            _compile(self.op, dtype, made)
        for product in products:
            yield from self._product(product)

    def _shape(self, case: Case) -> tuple[int, int, int]:
        m, n, k = case.sizes
        return m, n * tiles.WEIGHT_ROWS[self.op], k

    def _tried(self, case: Case) -> list[WarpgroupTile]:
        shape = self._shape(case)
        return [tile for tile in self.tiles if worth_trying(tile, self.target, *shape)]

    def _product(self, case: Case) -> Iterator[Row]:
        count = timing.sets_beyond_l2(case.needed_bytes)
        sets = [case.arrays(self.kind, i) for i in range(count)]
        host = {name: verify.to_numpy(sets[0][name]) for name in case.inputs()}
        product = cublas_run(case, sets)
        base_ms = None
        if product is not None:
            base_ms = timing.alone(product, count, repetitions=self.repetitions).median
        m, n, k = case.sizes
        chosen = tiles.choose(self.op, self.target, m, n, k, case.dtype)
        tried: list[tiles.Tile] = list(dict.fromkeys((*self._tried(case), chosen)))
        made = []
        for tile in tried:
            with _forced(tile):
                error = _error(case, sets[0], host, label(tile)) if self.checked else None
                time = timing.alone(
                    lambda i: case.fused(sets[i]), count, repetitions=self.repetitions
                )
            if isinstance(tile, WarpgroupTile):
                self.measured.append(Measured(*self._shape(case), tile, time.median * 1e6))
            row = case.row(
                "fused",
                tile=label(tile),
                ms_alone=time.median,
                gbps=case.needed_bytes / time.median / 1e6,
                tflops=case.flops / time.median / 1e9 if case.compute_bound else None,
                x_cublas=None if base_ms is None else base_ms / time.median,
                max_rel_err=error,
                std=time.std,
                samples=list(time.samples),
            )
            made.append((time.median, tile == chosen, replace(row, test=SWEEP)))
        made.sort(key=lambda one: one[0])
        for i, (_, is_chosen, row) in enumerate(made):
            notes = ["chosen"] * is_chosen + ["fastest"] * (i == 0)
            yield replace(row, note=", ".join(notes) or None)


def _forced(tile: tiles.Tile) -> contextlib.AbstractContextManager[None]:
    return tiles.only(tile) if isinstance(tile, WarpgroupTile) else contextlib.nullcontext()


def _error(case: Case, a: dict[str, Any], host: dict[str, np.ndarray], what: str) -> float:
    """Multiply into poisoned memory and compare a sample with float64."""
    for name in case.outputs():
        verify.poison(a[name])
    case.fused(a)
    got = {name: verify.to_numpy(a[name]) for name in case.outputs()}
    return case.require({**host, **got}, "fused", f", {what}")


def _compile(op: str, dtype: np.dtype, chosen: Sequence[WarpgroupTile]) -> None:
    """Compile in processes, into CuPy's cache: NVRTC compiles one kernel at a time in each."""
    jobs = min(len(os.sched_getaffinity(0)), 8, len(chosen))
    if jobs < 2:
        return  # as they are launched
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(_launch_once, op, dtype.name, tile) for tile in chosen]:
            done.result()


def _launch_once(op: str, dtype_name: str, tile: WarpgroupTile) -> None:
    dtype = next(dtype for dtype in device.FLOAT_DTYPES if dtype.name == dtype_name)
    case = cases()[op](_SMALL, dtype)
    with tiles.only(tile):
        case.fused(case.arrays("cupy"))
    device.require_cupy().cuda.runtime.deviceSynchronize()


# ---- fitting ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fitted:
    """A tile with the times that were fitted, from so many rows that are so far from them."""

    tile: WarpgroupTile
    rows: int
    error: float  # relative, root of the mean of squares


@dataclass(frozen=True)
class Fit:
    """What all tiles have in common, and the times of each that had enough rows."""

    overhead_ns: float
    tiles: tuple[Fitted, ...]


def fit(measured: Sequence[Measured], target: Target) -> Fit:
    """Fit overhead + max(blocks * block_ns, reading) + finishes * finish_ns to the rows.

    By least squares of relative errors, no time negative. Rows that wait for memory tell nothing of
    blocks, but of what comes after them; which these are follows from the times, round by round.
    Rows that took twice as long as the fastest of their shape are left out.
    """
    fastest = _fastest(measured)
    kept = [one for one in measured if one.ns <= _SLOW * fastest[one.shape].ns]
    numbers = {tile: i for i, tile in enumerate(dict.fromkeys(one.tile for one in kept))}
    at = np.array([numbers[one.tile] for one in kept], int)
    work = np.array([one.tile.work(target, *one.shape) for one in kept], float).reshape(-1, 2)
    read = np.array([tiles.read_ns(one.n_weight_rows, one.k) for one in kept], float)
    ns = np.array([one.ns for one in kept])
    rows = np.arange(len(kept))
    units = np.array([*_USUAL_NS[:2] * len(numbers), _USUAL_NS[2]])
    # No block takes longer than all of a row's time for each.
    longest = np.full(len(numbers), np.inf)
    np.minimum.at(longest, at, ns / work[:, 0])
    waits = work[:, 0] * longest[at] < read
    for _ in range(_ROUNDS):
        matrix = np.zeros((len(kept), 2 * len(numbers) + 1))
        matrix[rows, 2 * at] = np.where(waits, 0, work[:, 0])
        matrix[rows, 2 * at + 1] = work[:, 1]
        matrix[:, -1] = 1
        matrix *= units / ns[:, None]
        wanted = 1 - np.where(waits, read, 0) / ns
        times = units * _positive_least_squares(matrix, wanted)
        before, waits = waits, work[:, 0] * times[2 * at] < read
        if (before == waits).all():
            break
    errors = matrix @ (times / units) - wanted
    found = []
    for tile, i in numbers.items():
        own = at == i
        block_ns, finish_ns = (round(float(time)) for time in times[2 * i : 2 * i + 2])
        if block_ns:
            fitted = replace(tile, block_ns=block_ns, finish_ns=finish_ns)
            error = math.sqrt(float(np.mean(errors[own] ** 2)))
            found.append(Fitted(fitted, int(own.sum()), error))
    return Fit(float(times[-1]), tuple(found))


def _positive_least_squares(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Solve by least squares; what would be most negative is held at 0 until nothing is."""
    free = np.arange(matrix.shape[1])
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, free], wanted, rcond=None)
        if not len(free) or found.min() >= 0:
            break
        free = np.delete(free, found.argmin())
    solution = np.zeros(matrix.shape[1])
    solution[free] = found
    return solution


def _fastest(measured: Sequence[Measured]) -> dict[tuple[int, int, int], Measured]:
    best: dict[tuple[int, int, int], Measured] = {}
    for one in measured:
        if one.shape not in best or one.ns < best[one.shape].ns:
            best[one.shape] = one
    return best


def report(measured: Sequence[Measured], target: Target) -> str:
    """Return the table for tiles.py, of today's tiles and those that were fastest somewhere.

    Behind it, how far from the fastest tile the choice is by today's numbers and by the new ones.
    """
    if len({one.k for one in measured}) < 2:
        return "Too few rows to fit a table: give sizes of several k."
    made = fit(measured, target)
    fitted = {one.tile.template: one for one in made.tiles}
    best = _fastest(measured)
    today = {tile.template: tile for tile in tiles.WARPGROUP_TILES}
    near = {one.tile.template: one.tile for one in measured if one.ns <= _NEAR * best[one.shape].ns}
    seen = {one.tile.template for one in measured}
    lines, table = [], []
    for few, name in ((False, "_WARPGROUPS"), (True, "_WARPGROUPS_OF_FEW")):
        kept = {**near, **today}
        kept = {key: tile for key, tile in kept.items() if (tile.block_m == 8) == few}
        lines.append(f"{name} = (")
        for key, tile in sorted(kept.items(), key=lambda one: _size(one[1]), reverse=True):
            if key in fitted:
                one = fitted[key]
                tile, why = one.tile, f"{one.rows} rows, {100 * one.error:.0f} % off"
            elif key not in seen:
                why = "not measured"
            else:
                lines.append(f"    # without {label(tile)}, which is slow")
                continue
            table.append(tile)
            numbers = ", ".join(map(str, (*tile.template, tile.block_ns, tile.finish_ns)))
            lines.append(f"    WarpgroupTile({numbers}),  # {why}")
        lines.append(")")
    lines.append(f"# overhead of a launch: {made.overhead_ns:.0f} ns")
    for whose, choice in (("today's", tiles.WARPGROUP_TILES), ("the fitted", table)):
        lines.append(f"# by {whose} numbers the choice takes {_regret(measured, target, choice)}")
    return "\n".join(lines)


def _size(tile: WarpgroupTile) -> tuple[int, ...]:
    return (tile.block_m * tile.block_n, tile.block_m, -tile.teams, -tile.split, -tile.group_m)


def _regret(measured: Sequence[Measured], target: Target, table: Sequence[WarpgroupTile]) -> str:
    """Say how much longer than the fastest the tiles take that launch_ns finds the fastest."""
    numbers = {tile.template: tile for tile in table}
    chosen: dict[tuple[int, int, int], tuple[int, float]] = {}
    for one in measured:
        tile = numbers.get(one.tile.template)
        # Few rows have tiles of their own.
        if tile is None or (one.m <= tiles.MAX_ROWS) != (tile.block_m == 8):
            continue
        guess = tile.launch_ns(target, *one.shape), one.ns
        chosen[one.shape] = min(chosen.get(one.shape, guess), guess, key=lambda pair: pair[0])
    if not chosen:
        return "none of these"
    best = _fastest(measured)
    times = {shape: ns / best[shape].ns for shape, (_, ns) in chosen.items()}
    worst = max(times, key=lambda shape: times[shape])
    mean = math.exp(sum(map(math.log, times.values())) / len(times))
    return (
        f"{mean:.3f} of the fastest's time, at worst {times[worst]:.2f} "
        f"({' x '.join(map(str, worst))})"
    )
