"""linear and gated_linear by warpgroups of sm_90a: tails, teams, splits, stores, epilogues."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import numpy as np
import pytest
from conftest import assert_close, poisoned, to_numpy
from graph_nodes import node_names, repeated

from cufuse import device, jit, ops, reference, tensor_map, tiles
from cufuse.device import bfloat16
from cufuse.ops import _matmul
from cufuse.pack import pack
from cufuse.tiles import WarpgroupTile

TILES = {
    "single": WarpgroupTile(128, 128, 2, 3, 2, 1, 1, 1, 1),
    "teams": WarpgroupTile(64, 64, 1, 3, 2, 2, 1, 1, 1),
    "teams of slabs": WarpgroupTile(64, 128, 1, 2, 2, 2, 1, 1, 1),
    "three teams": WarpgroupTile(64, 64, 1, 2, 2, 3, 1, 1, 1),
    "one warpgroup": WarpgroupTile(64, 64, 1, 2, 8, 1, 1, 1, 1),
    "slabs": WarpgroupTile(64, 256, 2, 2, 1, 1, 1, 1, 1),
    "largest": WarpgroupTile(256, 128, 2, 4, 8, 1, 1, 1, 1),
    "few rows": WarpgroupTile(8, 64, 1, 4, 8, 1, 1, 1, 1),
    "16 rows": WarpgroupTile(16, 128, 2, 4, 8, 1, 1, 1, 1),
    "split": WarpgroupTile(64, 64, 1, 3, 8, 1, 4, 1, 1),
    "split of two": WarpgroupTile(128, 128, 2, 4, 2, 1, 2, 1, 1),
    "split of few rows": WarpgroupTile(8, 128, 2, 4, 2, 1, 4, 1, 1),
    "split of 16 rows": WarpgroupTile(16, 128, 1, 4, 2, 1, 4, 1, 1),
}


@pytest.fixture
def by_warpgroups(monkeypatch):
    """Let the twin take one tile of sm_90a, for any number of rows."""
    with contextlib.ExitStack() as forced:

        def take(name, ctas=4):
            tile = TILES[name]
            target = tiles.Target("90a", ctas, 227 * 1024)
            monkeypatch.setattr(tiles, "TWIN", target)
            forced.enter_context(tiles.only(tile))
            assert tiles.choose("linear", target, 9, 8, 256, np.dtype(bfloat16)) is tile
            return tile

        yield take


def inputs(rng, m, n, k, dtype):
    x = rng.standard_normal((m, k)).astype(dtype)
    w, up = ((rng.standard_normal((n, k)) / math.sqrt(k)).astype(dtype) for _ in range(2))
    b, residual = rng.standard_normal(n).astype(dtype), rng.standard_normal((m, n)).astype(dtype)
    return {"x": x, "w": w, "up": up, "b": b, "residual": residual}


def double(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


def check_linear(
    rng, m, n, k, dtype, *, packed=False, activation="gelu", plain=False, to=device.twin
):
    """Compare with float64; on the GPU some rows of it."""
    a = inputs(rng, m, n, k, dtype)
    out = poisoned((m, n), dtype, to)
    there = {name: to(array) for name, array in a.items()}
    w = pack(there["w"]) if packed else there["w"]
    options = {} if plain else {"activation": activation, "residual": there["residual"]}
    with jit.record() as made:
        ops.linear(there["x"], w, *(() if plain else (there["b"],)), **options, out=out)
    assert [launch.kernel for launch in made.launches] == ["linear_warpgroups"]
    rows = np.unique([0, m // 2, m - 1, *rng.integers(0, m, 30)])
    x, w, b, residual = double(a["x"][rows], a["w"], a["b"], a["residual"][rows])
    options = {} if plain else {"b": b, "activation": activation, "residual": residual}
    got = to_numpy(out)
    assert np.isfinite(got.astype(np.float32)).all()
    assert_close(got[rows], reference.linear(x, w, **options), dtype)


def check_gated(
    rng, m, n, k, dtype, *, packed=False, activation="silu", limit=None, biases=True, to=device.twin
):
    a = inputs(rng, m, n, k, dtype)
    out = poisoned((m, n), dtype, to)
    there = {name: to(array) for name, array in a.items()}
    w, up = there["w"], there["up"]
    weights = (pack(w, up=up), None) if packed else (w, up)
    b = (there["b"], to(a["b"][::-1].copy())) if biases else (None, None)
    options = {"activation": activation, "limit": limit}
    with jit.record() as made:
        ops.gated_linear(there["x"], *weights, *b, **options, out=out)
    assert [launch.kernel for launch in made.launches] == ["gated_warpgroups"]
    rows = np.unique([0, m // 2, m - 1, *rng.integers(0, m, 30)])
    x, w, up, b = double(a["x"][rows], a["w"], a["up"], a["b"])
    b = (b, b[::-1]) if biases else (None, None)
    got = to_numpy(out)
    assert np.isfinite(got.astype(np.float32)).all()
    assert_close(got[rows], reference.gated_linear(x, w, up, *b, **options), dtype)


SHAPES = [(9, 1, 8), (33, 7, 72), (130, 136, 264), (300, 130, 136)]
LAYOUT = pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
DTYPE = pytest.mark.parametrize("dtype", [np.float16, bfloat16], ids=["fp16", "bf16"])


@DTYPE
@LAYOUT
@pytest.mark.parametrize("m, n, k", SHAPES)
@pytest.mark.parametrize("tile", ["teams", "single"])
@pytest.mark.cpu_kernels
def test_warpgroups_match_float64(by_warpgroups, rng, tile, m, n, k, packed, dtype):
    by_warpgroups(tile)
    check_linear(rng, m, n, k, dtype, packed=packed)


@LAYOUT
@pytest.mark.parametrize("m, n, k", SHAPES)
@pytest.mark.parametrize("tile", ["teams of slabs", "single"])
@pytest.mark.cpu_kernels
def test_gates_match_float64(by_warpgroups, rng, tile, m, n, k, packed):
    by_warpgroups(tile)
    check_gated(rng, m, n, k, bfloat16, packed=packed)


@LAYOUT
@pytest.mark.parametrize("dtype, options", [
    (np.float16, {"activation": "gelu_tanh", "biases": False}),
    (bfloat16, {"limit": 0.7}),
], ids=["gelu_tanh", "clamped"])  # fmt: skip
@pytest.mark.cpu_kernels
def test_gates_of_every_kind(by_warpgroups, rng, packed, dtype, options):
    by_warpgroups("single")
    check_gated(rng, 40, 72, 200, dtype, packed=packed, **options)


@LAYOUT
@pytest.mark.parametrize("tile", [name for name in TILES if name not in ("teams", "single")])
@pytest.mark.cpu_kernels
def test_tiles_of_every_kind_match_float64(by_warpgroups, rng, tile, packed):
    rows = by_warpgroups(tile, ctas=2).block_m
    check_linear(rng, min(3 * rows - 2, 150), 264, 328, bfloat16, packed=packed, activation="silu")
    check_gated(rng, min(2 * rows - 2, 70), 72, 328, bfloat16, packed=packed)


@LAYOUT
@pytest.mark.parametrize("tile", ["single", "split"])
@pytest.mark.cpu_kernels
def test_a_product_alone(by_warpgroups, rng, tile, packed):
    by_warpgroups(tile)
    check_linear(rng, 33, 72, 328, np.float16, plain=True, packed=packed)


def check_pre(rng, m, n, k, dtype, *, packed=False, residual=False, to=device.twin, out_at=0):
    """Compare both results with float64, and y with what comes without pre."""
    a = inputs(rng, m, n, k, dtype)
    there = {name: to(array) for name, array in a.items()}
    w = pack(there["w"]) if packed else there["w"]
    options = {"activation": "silu", "residual": there["residual"] if residual else None}
    room = poisoned((m * n + out_at,), dtype, to)
    pre, out = room[out_at:].reshape(m, n), poisoned((m, n), dtype, to)
    with jit.record() as made:
        ops.linear(there["x"], w, there["b"], **options, pre=pre, out=out)
    assert [launch.kernel for launch in made.launches] == ["linear_warpgroups"]
    rows = np.unique([0, m // 2, m - 1, *rng.integers(0, m, 30)])
    x, w64, b = double(a["x"][rows], a["w"], a["b"])
    got = to_numpy(pre)
    assert np.isfinite(got.astype(np.float32)).all()
    assert_close(got[rows], reference.linear(x, w64, b), dtype)
    without = to_numpy(ops.linear(there["x"], w, there["b"], **options))
    np.testing.assert_array_equal(to_numpy(out), without)


RESIDUAL = pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])


@RESIDUAL
@pytest.mark.parametrize("tile", ["teams", "three teams", "slabs", "largest", "split", "few rows"])
@pytest.mark.cpu_kernels
def test_pre_of_tiles_of_every_kind(by_warpgroups, rng, tile, residual):
    by_warpgroups(tile, ctas=2)
    check_pre(rng, 135, 136, 264, bfloat16, residual=residual)


@RESIDUAL
@pytest.mark.cpu_kernels
def test_pre_of_packed_weights(by_warpgroups, rng, residual):
    by_warpgroups("teams of slabs", ctas=2)
    check_pre(rng, 135, 264, 136, np.float16, packed=True, residual=residual)


@RESIDUAL
@pytest.mark.cpu_kernels
def test_pre_of_odd_bytes_goes_through_threads(by_warpgroups, rng, residual):
    by_warpgroups("teams of slabs")
    check_pre(rng, 70, 37, 136, np.float16, residual=residual)
    check_pre(rng, 70, 136, 136, np.float16, residual=residual, out_at=1)


@pytest.mark.cpu_kernels
def test_no_order_of_copies_changes_pre(by_warpgroups, rng):
    by_warpgroups("slabs", ctas=2)
    a = {name: device.twin(v) for name, v in inputs(rng, 70, 300, 136, bfloat16).items()}
    results = set()
    for seed in range(4):
        pre = poisoned((70, 300), bfloat16, device.twin)
        with jit.twin_seed(seed):
            y = ops.linear(
                a["x"], a["w"], a["b"], activation="gelu", residual=a["residual"], pre=pre
            )
            results.add(y.tobytes() + pre.tobytes())
    assert len(results) == 1


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
    a = inputs(rng, 70, 136, 136, bfloat16)
    out = device.twin(a["residual"].copy())
    ops.linear(device.twin(a["x"]), device.twin(a["w"]), residual=out, out=out)
    x, w, residual = double(a["x"], a["w"], a["residual"])
    wanted = reference.linear(x, w, residual=residual)
    assert_close(out, wanted, bfloat16)


@pytest.mark.cpu_kernels
def test_rows_of_odd_bytes_go_through_threads(by_warpgroups, rng):
    by_warpgroups("teams")
    check_linear(rng, 33, 37, 328, np.float16)
    check_gated(rng, 33, 37, 328, np.float16, packed=True)


@LAYOUT
@pytest.mark.parametrize("tile", ["single", "teams", "three teams", "split"])
@pytest.mark.cpu_kernels
def test_no_order_of_copies_changes_a_bit(by_warpgroups, rng, tile, packed):
    by_warpgroups(tile, ctas=4)
    a = {name: device.twin(v) for name, v in inputs(rng, 140, 72, 328, bfloat16).items()}
    w = pack(a["w"]) if packed else a["w"]
    results = set()
    for seed in range(4):
        with jit.twin_seed(seed):
            y = ops.linear(a["x"], w, a["b"], activation="gelu", residual=a["residual"])
            results.add(y.tobytes())
    assert len(results) == 1


@pytest.mark.cpu_kernels
def test_rows_that_copies_cannot_reach_go_to_warps(by_warpgroups, rng):
    by_warpgroups("single")
    a = inputs(rng, 20, 24, 68, bfloat16)
    x, w = device.twin(a["x"]), device.twin(a["w"])
    with jit.record() as made:
        got = ops.linear(x, w), ops.linear(x, pack(w))
    kernels = [launch.kernel for launch in made.launches]
    assert kernels == ["linear_tiles", "pack", "packed_linear_tiles"]
    for y in got:
        assert_close(y, reference.linear(*double(a["x"], a["w"])), bfloat16)


@pytest.mark.cpu_kernels
def test_packed_and_row_major_weights_give_the_same_bits(by_warpgroups, rng):
    by_warpgroups("split of two")
    a = {name: device.twin(v) for name, v in inputs(rng, 40, 136, 264, bfloat16).items()}
    assert (ops.linear(a["x"], a["w"]) == ops.linear(a["x"], pack(a["w"]))).all()
    gated = ops.gated_linear(a["x"], a["w"], a["up"])
    assert (gated == ops.gated_linear(a["x"], pack(a["w"], up=a["up"]))).all()


@LAYOUT
@pytest.mark.cpu_kernels
def test_values_stay_in_their_columns(by_warpgroups, packed):
    by_warpgroups("single")
    w = np.zeros((19, 40), np.float16)
    w[3, 39], w[18, 0] = np.nan, np.inf
    there = device.twin(w)
    got = ops.linear(device.twin(np.ones((9, 40), np.float16)), pack(there) if packed else there)
    assert np.isnan(got[:, 3]).all() and np.isinf(got[:, 18]).all()
    assert (np.delete(got, [3, 18], axis=1) == 0).all()


def test_a_map_says_what_it_wants():
    with pytest.raises(ValueError, match="rows of a multiple of 16 bytes"):
        tensor_map.rows(device.twin(np.zeros((4, 9), np.float16)), 4)
    with pytest.raises(ValueError, match="wanted 1 to 256 elements"):
        tensor_map.rows(device.twin(np.zeros((4, 8), np.float16)), 257)


def test_a_map_is_of_the_array_at_hand():
    """Maps are kept: what any of them was made of makes another one."""
    x = device.twin(np.zeros((8, 64), np.float16))
    made = [
        tensor_map.rows(x, 4),
        tensor_map.rows(x, 8),
        tensor_map.rows(x, 4, 32),
        tensor_map.rows(x[4:], 4),
        tensor_map.rows(x.view(device.bfloat16), 4),
        tensor_map.rows(x.reshape(16, 32), 4, 32),
        tensor_map.boxes(x[:, :32], (4, 32), swizzle=64),
        tensor_map.boxes(x[:, :32], (4, 32), swizzle=0),
    ]
    assert len(set(made)) == len(made) - 1  # the twin takes both 16-bit types alike
    assert tensor_map.rows(x.reshape(2, 4, 64), 4) == made[0]
    assert not tensor_map.fits(x[:, 4:]) and not tensor_map.fits(x[:0]) and tensor_map.fits(x[1:])


def test_shared_bytes_are_those_of_the_kernel():
    tile = TILES["largest"]
    assert tile.shared_bytes(2) == 4 * (384 * 128 + 16) + 4 * (8192 + 8)
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
def on_gpu():
    """Skip where the GPU has no warpgroups."""
    import cupy

    if tiles.target_of(cupy.empty(1)).arch != "90a":
        pytest.skip("needs sm_90a")


@pytest.mark.gpu
@DTYPE
@LAYOUT
@pytest.mark.parametrize("m, n, k", GPU_SHAPES)
@pytest.mark.parametrize(
    "tile", tiles.WARPGROUP_TILES, ids=lambda tile: "-".join(map(str, tile.template))
)
def test_every_tile_on_the_gpu(on_gpu, rng, tile, m, n, k, packed, dtype):
    import cupy

    if not tile.takes(k):
        k = 64 * tile.split
    with tiles.only(tile):
        check_linear(rng, m, n, k, dtype, packed=packed, to=cupy.asarray)
        check_gated(rng, m, n, k, dtype, packed=packed, to=cupy.asarray)


SIZES = (1, 7, 33, 130, 3420, 151936)


@pytest.mark.gpu
@LAYOUT
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", ["m", "n", "k"])
def test_every_size_in_every_position(rng, place, size, packed):
    """What the op chooses, warps and rows included: against float64."""
    import cupy

    sizes = {"m": 33, "n": 136, "k": 264, place: size}
    a = inputs(rng, *sizes.values(), bfloat16)
    there = {name: cupy.asarray(v) for name, v in a.items()}
    rows = np.unique([0, sizes["m"] // 2, sizes["m"] - 1])
    x, w, up, b, residual = double(a["x"][rows], a["w"], a["up"], a["b"], a["residual"][rows])
    out = poisoned((sizes["m"], sizes["n"]), bfloat16, cupy.asarray)
    weight = pack(there["w"]) if packed else there["w"]
    options = {"activation": "gelu", "residual": there["residual"]}
    ops.linear(there["x"], weight, there["b"], **options, out=out)
    wanted = reference.linear(x, w, b, activation="gelu", residual=residual)
    assert_close(to_numpy(out)[rows], wanted, bfloat16)
    out = poisoned((sizes["m"], sizes["n"]), bfloat16, cupy.asarray)
    both = (pack(there["w"], up=there["up"]), None) if packed else (there["w"], there["up"])
    ops.gated_linear(there["x"], *both, out=out)
    assert_close(to_numpy(out)[rows], reference.gated_linear(x, w, up), bfloat16)


@pytest.mark.gpu
@LAYOUT
@RESIDUAL
@pytest.mark.parametrize("m, n, k", [(7, 33, 72), (130, 3420, 1032), (3420, 130, 520)])
@pytest.mark.parametrize(
    "tile", tiles.WARPGROUP_TILES, ids=lambda tile: "-".join(map(str, tile.template))
)
def test_pre_of_every_tile_on_the_gpu(on_gpu, rng, tile, m, n, k, residual, packed):
    import cupy

    with tiles.only(tile):
        k = max(k, 64 * tile.split)
        check_pre(rng, m, n, k, bfloat16, packed=packed, residual=residual, to=cupy.asarray)


@pytest.mark.gpu
@DTYPE
@pytest.mark.parametrize("activation", _matmul.ACTIVATIONS)
def test_every_activation_on_the_gpu(on_gpu, rng, activation, dtype):
    import cupy

    for m, n, k in ((130, 3420, 1032), (513, 131, 328)):
        check_linear(rng, m, n, k, dtype, activation=activation, to=cupy.asarray)
        check_gated(rng, m, n, k, dtype, activation=activation, packed=True, to=cupy.asarray)


@pytest.mark.gpu
def test_clamped_gates_on_the_gpu(on_gpu, rng):
    import cupy

    check_gated(rng, 130, 264, 520, bfloat16, limit=0.7, packed=True, to=cupy.asarray)


@pytest.mark.gpu
@LAYOUT
@pytest.mark.parametrize(
    "m, n, k", [(16, 4096, 4096), (256, 4096, 4096), (3420, 3424, 1032), (2048, 4096, 2048)]
)
def test_a_captured_product_has_the_same_bits(on_gpu, rng, m, n, k, packed):
    import cupy

    a = {name: cupy.asarray(v) for name, v in inputs(rng, m, n, k, bfloat16).items()}
    w = pack(a["w"]) if packed else a["w"]
    out = poisoned((m, n), bfloat16, cupy.asarray)
    stream = cupy.cuda.Stream(non_blocking=True)

    def work():
        ops.linear(
            a["x"], w, a["b"], activation="gelu", residual=a["residual"], out=out, stream=stream
        )

    graph, results = repeated(work, stream, out)
    assert node_names(graph.graph) == ["linear_warpgroups"] and len(results) == 1
