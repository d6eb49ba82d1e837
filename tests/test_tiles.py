"""tiles.py as data: what depends on what, and that every choice fits."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from cufuse import tiles
from cufuse.tiles import MatmulTile, RowsTile, Target

bfloat16 = np.dtype(ml_dtypes.bfloat16)
TARGETS = [
    Target("80", 1, 163 * 1024),
    Target("80", 108, 163 * 1024),
    Target("86", 84, 99 * 1024),
    Target("89", 58, 99 * 1024),
    Target("90a", 78, 227 * 1024),
    Target("90a", 131, 227 * 1024),
    Target("90a", 132, 227 * 1024),
    Target("120a", 170, 99 * 1024),
    tiles.TWIN,
]
SHAPES = [(1, 1), (1, 4096), (576, 576), (1024, 4096), (4096, 14336), (14336, 4096), (50304, 2048)]
SHAPES += [(17408, 5120), (5120, 25600), (153600, 5120)]


@pytest.mark.parametrize("op", tiles.WEIGHT_ROWS)
@pytest.mark.parametrize("dtype", [bfloat16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("n, k", SHAPES)
def test_order_of_a_sum_depends_on_the_shape_alone(op, dtype, n, k):
    chosen = {
        (tile.split, tile.warps)
        for target in TARGETS
        for m in range(1, tiles.MAX_ROWS + 1)
        if isinstance(tile := tiles.choose(op, target, m, n, k, dtype), RowsTile)
    }
    assert len(chosen) == 1


@pytest.mark.parametrize("op", tiles.WEIGHT_ROWS)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
@pytest.mark.parametrize("m", [1, 2, 3, 8, 9, 16, 17, 64, 100, 4096, 100_000])
def test_every_choice_fits(op, target, m):
    for dtype in (bfloat16, np.dtype(np.float32)):
        for n, k in [*SHAPES, (1, 2**20)]:
            tile = tiles.choose(op, target, m, n, k, dtype)
            if isinstance(tile, RowsTile):
                static = 2 * tile.warps * tile.rows * tile.outputs * 4
                assert tile.shared_bytes + static <= target.shared_bytes
                assert tile.resident >= 1 and tile.warps % tile.split == 0
                (ctas, passes), _, _ = tile.launch_shape(target, m, n, dtype.itemsize)
                assert ctas >= 1 and m <= passes * tile.rows < m + tile.rows
            else:
                assert tile.shared_bytes(dtype.itemsize) <= target.shared_bytes
                assert 1 <= tile.count(m, n) < 2**31


def test_few_rows_stream_weights_and_many_take_tiles():
    target = TARGETS[3]
    few = tiles.choose("linear", target, tiles.MAX_ROWS, 4096, 4096, bfloat16)
    many = tiles.choose("linear", target, tiles.MAX_ROWS + 1, 4096, 4096, bfloat16)
    assert isinstance(few, RowsTile) and isinstance(many, MatmulTile)


def test_a_k_too_long_for_shared_memory_takes_tiles_at_any_m():
    for m in (1, 8):
        tile = tiles.choose("linear", TARGETS[1], m, 16, 2**17, bfloat16)
        assert isinstance(tile, MatmulTile)


def test_tiles_grow_with_the_rows():
    areas = [
        tile.block_m * tile.block_n
        for m in (16, 64, 512, 8192)
        if isinstance(
            tile := tiles.choose("linear", TARGETS[0], m, 4096, 4096, bfloat16), MatmulTile
        )
    ]
    assert areas == sorted(areas) and areas[0] < areas[-1]


def test_a_long_row_is_shared_by_warps():
    assert tiles.k_split(4096, 2) == 4
    assert tiles.k_split(1024, 2) == 2
    assert tiles.k_split(576, 2) == 1
    assert tiles.k_split(256, 2) == 1


def test_tiles_are_frozen():
    tile = tiles.choose("linear", TARGETS[0], 1, 8, 8, bfloat16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tile.split = 3


@pytest.mark.parametrize(
    "m, n, k, wanted",
    [
        (8192, 8192, 8192, (256, 128, 1, 1)),
        (4096, 14336, 4096, (256, 128, 1, 1)),
        (4096, 8192, 2048, (128, 128, 2, 1)),
        (1024, 4096, 4096, (256, 128, 1, 1)),
        (256, 4096, 4096, (128, 64, 1, 1)),
        (512, 2048, 8192, (128, 64, 1, 1)),
        (64, 4096, 4096, (32, 64, 1, 1)),
        (16, 4096, 4096, (16, 64, 1, 1)),
        (16, 1024, 4096, (16, 64, 1, 4)),
        (8, 4096, 4096, (8, 64, 1, 1)),
        (2, 14336, 4096, (8, 128, 1, 1)),
    ],
)
def test_warpgroups_take_the_tile_that_was_fastest(m, n, k, wanted):
    tile = tiles.choose("linear", Target("90a", 132, 227 * 1024), m, n, k, bfloat16)
    assert isinstance(tile, tiles.WarpgroupTile)
    assert (tile.block_m, tile.block_n, tile.teams, tile.split) == wanted
    assert tile.launch_shape(Target("90a", 132, 227 * 1024), m, n, 2).grid[0] <= 132


def test_one_row_and_few_of_a_small_weight_or_with_a_norm_are_rows():
    target = Target("90a", 132, 227 * 1024)
    assert isinstance(tiles.choose("linear", target, 1, 4096, 4096, bfloat16), tiles.RowsTile)
    assert isinstance(tiles.choose("linear", target, 2, 1024, 4096, bfloat16), tiles.RowsTile)
    tile = tiles.choose("linear", target, 2, 4096, 4096, bfloat16, norm=True)
    assert isinstance(tile, tiles.RowsTile)
