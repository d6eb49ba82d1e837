"""Try the ways to cut a product of few rows: python -m cufuse.benchmarks.tune_linear [--rows 1].

Each variant of fused/linear.cu's linear_rows runs over weights that rotate beyond the L2 cache, in
a CUDA graph, beside a kernel that only reads the same bytes. The winner belongs into
`tiles.choose`; `split` decides the order of a sum, so it may depend on n, k and the dtype alone.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cufuse import device, jit, tiles
from cufuse.benchmarks import ceilings, timing
from cufuse.tiles import RowsTile

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (6144, 4096), (1024, 2048), (50304, 2048))


@dataclass(frozen=True)
class Variant:
    """A tile, and how many CTAs an SM gets; None: a CTA for each tile."""

    tile: RowsTile
    ctas_per_sm: int | None

    def __str__(self) -> str:
        tile = self.tile
        ctas = "one a tile" if self.ctas_per_sm is None else f"{self.ctas_per_sm} an SM"
        return (
            f"outputs {tile.outputs} unroll {tile.unroll:2d} warps {tile.warps:2d} "
            f"split {tile.split} CTAs {ctas}"
        )

    def grid(self, target: tiles.Target, m: int, n: int) -> tuple[int, int]:
        """CTAs over the weight rows, and passes."""
        tile = self.tile
        count = -(-n // (tile.outputs * (tile.warps // tile.split)))
        if self.ctas_per_sm is not None:
            count = min(count, target.sm_count * self.ctas_per_sm)
        return count, -(-m // tile.rows)


def variants(rows: int, k: int, itemsize: int) -> Iterator[Variant]:
    """Every cut for `rows` rows of x a pass whose loads fit into registers."""
    row_bytes = tiles.chunks(k, itemsize) * 512
    for outputs, unroll, warps, split in itertools.product(
        (1, 2), (2, 4, 8), (4, 8, 16), (1, 2, 4, 8)
    ):
        # A load takes four registers a lane; a warp whose share of K is no batch idles.
        if outputs * unroll > 8 or split > warps or unroll * split > 2 * tiles.chunks(k, itemsize):
            continue
        tile = RowsTile(rows, outputs, unroll, warps, split, rows * row_bytes, 1)
        for ctas in (24 // warps, 16 // warps, None):
            yield Variant(tile, ctas)


def time_variant(
    variant: Variant, target: tiles.Target, x: device.Array, weights: device.Array, y: device.Array
) -> float:
    """Return microseconds a launch."""
    tile = variant.tile
    vec = 16 // x.dtype.itemsize
    kernel = jit.kernel(
        "fused/linear.cu",
        "linear_rows",
        x.dtype,
        "Act::none",
        "Rounding::cast_first",
        *tile.template,
        vec,
    )
    m, (n, k) = len(x), weights.shape[1:]

    def run(i: int) -> None:
        kernel.launch(
            variant.grid(target, m, n),
            tile.warps * 32,
            {
                "x": x,
                "w": weights[i],
                "b": None,
                "residual": None,
                "pre": None,
                "norm_weight": None,
                "y": y,
                "rows": m,
                "n": n,
                "k": k,
                "eps": 0.0,
            },
            like=y,
            shared_bytes=tile.shared_bytes,
        )

    return timing.in_graph(run, len(weights), repetitions=3).median * 1e3


def tune(m: int, n: int, k: int, dtype: np.dtype, best: int) -> None:
    """Print the fastest variants of one shape beside the read kernel and today's choice."""
    cupy = device.require_cupy()
    target = tiles.target_of(cupy.empty(1))
    size_bytes = (n * k + m * k + m * n) * dtype.itemsize
    sets = timing.sets_beyond_l2(n * k * dtype.itemsize)
    rng = cupy.random.default_rng(0)
    x = rng.standard_normal((m, k), np.float32).astype(dtype)
    weights = cupy.empty((sets, n, k), dtype)
    for w in weights:
        w[...] = rng.standard_normal((n, k), np.float32).astype(dtype)
    y = cupy.empty((m, n), dtype)
    read_us = ceilings.read_ms(size_bytes) * 1e3
    print(f"{m} x {n} x {k} {dtype}: {size_bytes / 1e6:.1f} MB, {sets} sets of weights")
    print(f"  {'read only':58s} {read_us:8.2f} us {size_bytes / read_us / 1e3:6.0f} GB/s")

    def line(name: str, us: float) -> str:
        share = read_us / us * 100
        return f"  {name:58s} {us:8.2f} us {size_bytes / us / 1e3:6.0f} GB/s {share:4.0f} %"

    chosen = tiles.choose("linear", target, m, n, k, dtype)
    if not isinstance(chosen, RowsTile):
        raise SystemExit(f"{m} x {n} x {k} takes tiles, not rows: at most {tiles.MAX_ROWS} rows")
    now = Variant(chosen, chosen.resident)
    print(line(f"now: {now}", time_variant(now, target, x, weights, y)))
    found = []
    for variant in variants(chosen.rows, k, dtype.itemsize):
        found.append((time_variant(variant, target, x, weights, y), str(variant)))
    for us, name in sorted(found)[:best]:
        print(line(name, us))


def main() -> None:
    """Tune every shape named on the command line, or a few of known models."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("shapes", nargs="*", help="n x k, as 4096x4096")
    parser.add_argument("--rows", type=int, default=1, help="rows of x")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")
    parser.add_argument("--best", type=int, default=8, help="variants to print for each shape")
    options = parser.parse_args()
    dtype = np.dtype(getattr(ml_dtypes, options.dtype, options.dtype))
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes] or SHAPES
    for n, k in shapes:
        tune(options.rows, n, k, dtype, options.best)


if __name__ == "__main__":
    main()
