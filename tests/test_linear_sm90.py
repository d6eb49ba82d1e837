"""linear by warpgroups of sm_90a: tails, teams, stores and the epilogue."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from conftest import assert_close, poisoned, to_numpy
from graph_nodes import launched

from cufuse import device, jit, ops, reference, tensor_map, tiles
from cufuse.device import bfloat16
from cufuse.ops import _matmul
from cufuse.tiles import WarpgroupTile

TILES = {
    "single": WarpgroupTile(128, 128, 2, 1, 3, 2, 1, 1, 1),
    "teams": WarpgroupTile(64, 64, 1, 1, 3, 2, 2, 1, 1),
    "teams of slabs": WarpgroupTile(128, 64, 1, 1, 2, 2, 2, 1, 1),
    "three teams": WarpgroupTile(64, 64, 1, 1, 2, 2, 3, 1, 1),
    "columns": WarpgroupTile(64, 128, 1, 2, 2, 3, 1, 1, 1),
    "one warpgroup": WarpgroupTile(64, 64, 1, 1, 2, 8, 1, 1, 1),
    "slabs": WarpgroupTile(256, 64, 2, 1, 2, 1, 1, 1, 1),
    "largest": WarpgroupTile(128, 256, 2, 1, 4, 8, 1, 1, 1),
}


@pytest.fixture
def by_warpgroups(monkeypatch):
    """Let the twin take one tile of sm_90a, for any number of rows that are not few."""

    def take(name, ctas=4):
        tile = TILES[name]
        target = tiles.Target("90a", ctas, 227 * 1024)
        monkeypatch.setattr(tiles, "TWIN", target)
        monkeypatch.setattr(tiles, "_WARPGROUPS", (tile,))
        monkeypatch.setattr(tiles, "WARPGROUP_ROWS", tiles.MAX_ROWS)
        tiles.choose.cache_clear()
        assert tiles.choose("linear", target, 9, 8, 256, np.dtype(bfloat16)) is tile
        return tile

    yield take
    tiles.choose.cache_clear()


def inputs(rng, m, n, k, dtype):
    x = rng.standard_normal((m, k)).astype(dtype)
    w = (rng.standard_normal((n, k)) / math.sqrt(k)).astype(dtype)
    b, residual = rng.standard_normal(n).astype(dtype), rng.standard_normal((m, n)).astype(dtype)
    return x, w, b, residual


def double(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


def check(rng, m, n, k, dtype, activation="gelu", plain=False):
    x, w, b, residual = inputs(rng, m, n, k, dtype)
    to = device.twin
    out = poisoned((m, n), dtype, to)
    with jit.record() as made:
        if plain:
            ops.linear(to(x), to(w), out=out)
        else:
            ops.linear(to(x), to(w), to(b), activation=activation, residual=to(residual), out=out)
    assert [launch.kernel for launch in made.launches] == ["linear_warpgroups"]
    x, w, b, residual = double(x, w, b, residual)
    if plain:
        wanted = reference.linear(x, w)
    else:
        wanted = reference.linear(x, w, b, activation=activation, residual=residual)
    assert_close(out, wanted, dtype)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("m, n, k", [(9, 1, 8), (33, 7, 72), (130, 136, 264), (300, 130, 136)])
@pytest.mark.parametrize("tile", ["teams", "single"])
@pytest.mark.cpu_kernels
def test_warpgroups_match_float64(by_warpgroups, rng, tile, m, n, k, dtype):
    by_warpgroups(tile)
    check(rng, m, n, k, dtype)


@pytest.mark.parametrize("tile", [name for name in TILES if name not in ("teams", "single")])
@pytest.mark.cpu_kernels
def test_tiles_of_every_kind_match_float64(by_warpgroups, rng, tile):
    by_warpgroups(tile, ctas=2)
    check(rng, 150, 264, 328, bfloat16, "silu")


@pytest.mark.cpu_kernels
def test_a_product_alone(by_warpgroups, rng):
    by_warpgroups("single")
    check(rng, 33, 72, 200, np.float16, plain=True)


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("dtype", [np.float16, bfloat16], ids=["fp16", "bf16"])
def test_gelu_of_any_sum(by_warpgroups, dtype):
    by_warpgroups("single")
    values = np.linspace(-9, 9, 16 * 200).reshape(16, 200)
    values[:, :4] = np.nan, np.inf, 1e4, -1e4
    x, b = np.zeros((16, 8), dtype), np.zeros(200, dtype)
    x[:, 0] = 1
    got = []
    for row in values:  # a bias alone makes the sums
        b[:] = row
        y = ops.linear(*map(device.twin, (x, np.zeros((200, 8), dtype), b)), activation="gelu")
        assert (y == y[0]).all(0)[1:].all() and np.isnan(y[:, 0].astype(np.float32)).all()
        got.append(np.asarray(y[0]))
    got = np.asarray(got, np.float64)
    assert (got[:, 1] == np.inf).all()
    # Half the last place and what the approximation adds.
    limit = 2.0**-10 if dtype == np.float16 else 2.0**-7.8
    wanted = reference.activation(values[:, 2:].astype(dtype).astype(np.float64), "gelu")
    assert (np.abs(got[:, 2:] - wanted) <= np.abs(wanted) * limit + 1e-6).all()


@pytest.mark.cpu_kernels
def test_residual_may_be_the_output(by_warpgroups, rng):
    by_warpgroups("single")
    x, w, _, residual = inputs(rng, 70, 136, 136, bfloat16)
    out = device.twin(residual.copy())
    ops.linear(device.twin(x), device.twin(w), residual=out, out=out)
    wanted = reference.linear(*double(x, w), residual=double(residual)[0])
    assert_close(out, wanted, bfloat16)


@pytest.mark.cpu_kernels
def test_results_without_words_go_through_threads(by_warpgroups, rng):
    by_warpgroups("teams")
    check(rng, 33, 37, 328, np.float16)


@pytest.mark.parametrize("tile", ["single", "teams", "three teams"])
@pytest.mark.cpu_kernels
def test_no_order_of_copies_changes_a_bit(by_warpgroups, rng, tile):
    by_warpgroups(tile, ctas=4)
    x, w, b, _ = map(device.twin, inputs(rng, 140, 72, 328, bfloat16))
    results = set()
    for seed in range(4):
        with jit.twin_seed(seed):
            results.add(ops.linear(x, w, b, activation="gelu").tobytes())
    assert len(results) == 1


@pytest.mark.cpu_kernels
def test_rows_that_copies_cannot_reach_go_to_warps(by_warpgroups, rng):
    by_warpgroups("single")
    x, w, _, _ = inputs(rng, 20, 24, 68, bfloat16)
    with jit.record() as made:
        got = ops.linear(device.twin(x), device.twin(w))
    assert [launch.kernel for launch in made.launches] == ["linear_tiles"]
    assert_close(got, reference.linear(*double(x, w)), bfloat16)


def test_a_map_says_what_it_wants():
    with pytest.raises(ValueError, match="rows of a multiple of 16 bytes"):
        tensor_map.rows(device.twin(np.zeros((4, 9), np.float16)), 4)
    with pytest.raises(ValueError, match="wanted 1 to 256 elements"):
        tensor_map.rows(device.twin(np.zeros((4, 8), np.float16)), 257)


def test_shared_bytes_are_those_of_the_kernel():
    tile = TILES["largest"]
    assert tile.shared_bytes(2) == 4 * 384 * 128 + 4 * 8192 + 64 + 2 * 512
    assert dataclasses.replace(tile, stages=3).shared_bytes(2) < tile.shared_bytes(2)


# ---- on the GPU

GPU_SHAPES = [
    (1, 8, 8),
    (7, 33, 72),
    (33, 7, 200),
    (65, 130, 64),
    (130, 3420, 1032),
    (129, 264, 4096),
    (3420, 130, 520),
    (3420, 3420, 264),
    (300, 3421, 136),
    (1024, 4096, 1024),
]


@pytest.fixture
def on_gpu(monkeypatch):
    """Let the GPU take one tile for any number of rows; skip where it has no warpgroups."""
    import cupy

    if tiles.target_of(cupy.empty(1)).arch != "90a":
        pytest.skip("needs sm_90a")

    def take(tile=None):
        if tile is not None:
            monkeypatch.setattr(tiles, "_WARPGROUPS", (tile,))
        monkeypatch.setattr(tiles, "WARPGROUP_ROWS", 0)
        monkeypatch.setattr(tiles, "MAX_ROWS", 0)
        tiles.choose.cache_clear()

    yield take
    tiles.choose.cache_clear()


def check_on_gpu(rng, m, n, k, dtype, activation):
    import cupy

    x, w, b, residual = inputs(rng, m, n, k, dtype)
    out = poisoned((m, n), dtype, cupy.asarray)
    there = [cupy.asarray(a) for a in (x, w, b, residual)]
    with jit.record() as made:
        ops.linear(*there[:3], activation=activation, residual=there[3], out=out)
    assert [launch.kernel for launch in made.launches] == ["linear_warpgroups"]
    got = to_numpy(out)
    assert np.isfinite(got.astype(np.float32)).all()
    rows = np.unique([0, m // 2, m - 1, *rng.integers(0, m, 30)])
    x, w, b, residual = double(x[rows], w, b, residual[rows])
    wanted = reference.linear(x, w, b, activation=activation, residual=residual)
    assert_close(got[rows], wanted, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("m, n, k", GPU_SHAPES)
@pytest.mark.parametrize(
    "tile", tiles._WARPGROUPS, ids=lambda tile: "-".join(map(str, tile.template))
)
def test_every_tile_on_the_gpu(on_gpu, rng, tile, m, n, k, dtype):
    on_gpu(tile)
    check_on_gpu(rng, m, n, k, dtype, "gelu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("activation", _matmul.ACTIVATIONS)
def test_every_activation_on_the_gpu(on_gpu, rng, activation, dtype):
    on_gpu()
    for m, n, k in ((130, 3420, 1032), (513, 131, 328)):
        check_on_gpu(rng, m, n, k, dtype, activation)


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", [(256, 4096, 4096), (3420, 3424, 1032), (2048, 4096, 2048)])
def test_a_captured_product_has_the_same_bits(on_gpu, rng, m, n, k):
    import cupy

    on_gpu()
    x, w, b, _ = map(cupy.asarray, inputs(rng, m, n, k, bfloat16))
    out = poisoned((m, n), bfloat16, cupy.asarray)
    stream = cupy.cuda.Stream(non_blocking=True)

    def work():
        ops.linear(x, w, b, activation="gelu", out=out, stream=stream)

    cupy.cuda.runtime.deviceSynchronize()
    results = set()
    for _ in range(3):
        work()
        stream.synchronize()
        results.add(to_numpy(out).tobytes())
    assert launched(work, stream) == ["linear_warpgroups"]
    stream.begin_capture()
    work()
    graph = stream.end_capture()
    for _ in range(3):
        out.view(np.uint16)[...] = 0
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        results.add(to_numpy(out).tobytes())
    assert len(results) == 1
