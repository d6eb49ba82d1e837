"""Faults planted into kernels: the CPU twin has to report each of them for one of a few seeds."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import test_primitives

from cufuse import device, jit, ops, pack, tiles

pytestmark = pytest.mark.cpu_kernels

SEEDS = range(3)
PLANTED = Path(__file__).resolve().parent / "twin" / "exchange.cu"


@pytest.fixture
def tree(monkeypatch, tmp_path):
    """A copy of kernels_cu, with our small kernels, that the twin builds from."""
    jit._host_runtime()
    jit._host_header(jit.twin_check())
    copy = tmp_path / "kernels_cu"
    shutil.copytree(jit.sources(), copy)
    (copy / "planted").mkdir()
    shutil.copy(PLANTED, copy / "planted")
    monkeypatch.setattr(jit, "sources", lambda: copy)
    jit._host_library.cache_clear()
    yield copy
    jit._host_library.cache_clear()


def plant(tree: Path, file: str, old: str, new: str, place: int = 0) -> None:
    """Replace the text's occurrence in a file of the tree, and let no library of old serve."""
    path = tree / file
    text = path.read_text()
    parts = text.split(old)
    assert len(parts) > place + 1, f"{file} has no {old!r}"
    text = old.join(parts[: place + 1]) + new + old.join(parts[place + 1 :])
    path.write_text(text)
    for kernel in tree.rglob("*.cu"):
        kernel.write_text(f"{kernel.read_text()}// {(file, old, new, place)!r}\n")


# The faults that the twin was made for, and where each is planted: in a table of this file or of
# test_primitives.py.
WANTED = {
    "missing full wait": ("FAULTS", "missing full wait"),
    "missing empty wait": ("FAULTS", "missing empty wait"),
    "wrong parity": ("FAULTS", "full wait of the wrong parity"),
    "wrong byte count": ("RING_FAULTS", "wrong byte count"),
    "short byte count": ("RING_FAULTS", "short byte count"),
    "wrong fragment lane": ("FAULTS", "linear: wrong lane of a fragment"),
    "shuffle too short": ("FAULTS", "shuffle too short"),
    "dropped syncwarp": ("FAULTS", "dropped syncwarp"),
    "dropped syncthreads": ("FAULTS", "dropped syncthreads"),
    "stale step number in a flagged word": ("HANDOFF_FAULTS", "a stale step number"),
    "a lapped reader of a slot": ("SLOTS_FAULTS", "a lapped reader"),
    "read before landing": ("FAULTS", "read before landing"),
    "out-of-bounds row store": ("FAULTS", "rmsnorm: a row stored behind the last"),
    "non-resident grid barrier": ("FAULTS", "grid barrier of CTAs that are not resident"),
    "named barrier with a wrong count": ("RING_FAULTS", "count of half the warps"),
    "misaligned bulk copy": ("RING_FAULTS", "misaligned bulk copy"),
}


def launch(name: str, block: int, n: int, *, grid: int = 1, shared: int = 0, cooperative=False):
    """Run one of our small kernels; returns its x and y."""
    x = device.twin(np.arange(1, n + 1, dtype=np.float32))
    y = device.twin(np.full(n, np.nan, np.float32))
    flag = device.twin(np.zeros(1, np.uint32))
    jit.Kernel("planted/exchange.cu", name, ()).launch(
        grid,
        block,
        {"x": x, "y": y, "flag": flag},
        like=x,
        shared_bytes=shared,
        cooperative=cooperative,
    )
    return np.asarray(x), np.asarray(y)


def check_reverse():
    x, y = launch("reverse", 64, 64, shared=256)
    assert np.array_equal(y, x[::-1])


def check_reverse_warp():
    x, y = launch("reverse_warp", 64, 64, shared=256)
    assert np.array_equal(y.reshape(2, 32), x.reshape(2, 32)[:, ::-1])


def check_reverse_copied():
    x, y = launch("reverse_copied", 64, 256, shared=1024)
    assert np.array_equal(y, x[::-1])


def check_sum_warp():
    x, y = launch("sum_warp", 32, 32)
    assert (y == x.sum()).all()


def check_meet():
    x, y = launch("meet", 64, 64, grid=4, cooperative=True)
    assert np.array_equal(y, x)


def check_meet_of_many(cooperative=True):
    x, y = launch("meet", 64, 64, grid=16, cooperative=cooperative)
    assert np.array_equal(y, x)


def check_meet_anywhere():
    check_meet_of_many(cooperative=False)


def check_pipeline():
    x, y = launch("pipeline", 96, 2048, shared=2048 + 32)
    assert np.array_equal(y, x)


def check_rmsnorm():
    x = np.random.default_rng(0).standard_normal((2, 96)).astype(np.float32)
    got = np.asarray(ops.rmsnorm(device.twin(x)))
    np.testing.assert_allclose(got, ops.rmsnorm(x), rtol=1e-4)


def check_linear(m=2, n=16, k=96):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float16) for shape in ((m, k), (n, k)))
    got = np.asarray(ops.linear(device.twin(x), device.twin(w)))
    np.testing.assert_allclose(got, ops.linear(x, w), rtol=2e-2, atol=2e-2)


def check_added(m, n, k):
    rng = np.random.default_rng(0)
    shapes = (m, k), (n, k), (m, n)
    x, w, residual = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    got = ops.linear(device.twin(x), device.twin(w), residual=device.twin(residual))
    wanted = ops.linear(x, w, residual=residual)
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=2e-2, atol=2e-2)


def check_pre(m, n, k):
    rng = np.random.default_rng(0)
    shapes = (m, k), (n, k), (m, n)
    x, w, residual = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    pre, wanted_pre = device.twin(np.empty((m, n), np.float16)), np.empty((m, n), np.float16)
    got = ops.linear(device.twin(x), device.twin(w), residual=device.twin(residual), pre=pre)
    wanted = ops.linear(x, w, residual=residual, pre=wanted_pre)
    for result, right in ((got, wanted), (pre, wanted_pre)):
        np.testing.assert_allclose(np.asarray(result), right, rtol=2e-2, atol=2e-2)


def check_tile_linear():
    check_linear(m=128, n=64, k=256)


def check_packed(m, n, k):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float16) for shape in ((m, k), (n, k)))
    got = np.asarray(ops.linear(device.twin(x), pack.pack(device.twin(w))))
    np.testing.assert_allclose(got, ops.linear(x, w), rtol=2e-2, atol=3e-2)


def check_packed_rows():
    check_packed(3, 400, 96)  # several panels for a CTA


def check_packed_tiles():
    check_packed(40, 80, 520)


def check_warpgroup_tiles(tile=(64, 128, 2, 2, 8, 1, 1), check=check_linear):
    """Check an op whose tile, on a GPU of two SMs, is one of sm_90a."""
    tile = tiles.WarpgroupTile(*tile, 1, 1)
    target = tiles.Target("90a", 2, 227 * 1024)
    with pytest.MonkeyPatch.context() as patched, tiles.only(tile):
        patched.setattr(tiles, "TWIN", target)
        check(70, 264, 392)


def check_warpgroup_residual():
    check_warpgroup_tiles((64, 128, 1, 2, 8, 1, 1), check_added)  # more boxes than one


def check_warpgroup_pre():
    check_warpgroup_tiles((64, 128, 1, 2, 8, 1, 1), check_pre)  # two boxes of each result


def check_warpgroup_teams():
    check_warpgroup_tiles((64, 64, 1, 3, 8, 2, 1))


def check_warpgroup_panels():
    check_warpgroup_tiles(check=check_packed)


def check_warpgroup_split():
    check_warpgroup_tiles((64, 64, 1, 3, 8, 1, 2))


def check_attention(q_len=40):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, q_len, 2, 64)).astype(np.float16)
    k, v = (rng.standard_normal((1, 200, 1, 64)).astype(np.float16) for _ in range(2))
    got = np.asarray(ops.attention(*(device.twin(array) for array in (q, k, v))))
    np.testing.assert_allclose(got, ops.attention(q, k, v), rtol=2e-2, atol=2e-2)


def check_decode():
    check_attention(q_len=1)


CHECKS = (
    check_reverse,
    check_reverse_warp,
    check_reverse_copied,
    check_sum_warp,
    check_meet,
    check_meet_of_many,
    check_pipeline,
    check_rmsnorm,
    check_linear,
    check_tile_linear,
    check_packed_rows,
    check_packed_tiles,
    check_warpgroup_tiles,
    check_warpgroup_residual,
    check_warpgroup_teams,
    check_warpgroup_panels,
    check_warpgroup_split,
    check_attention,
    check_decode,
)
EXCHANGE = "planted/exchange.cu"
RACE = r"a race in shared memory: .*(write|read) by warp \d+ lane \d+ at kernels_cu/\S+:\d+ and "
IN_FLIGHT = r"a copy in flight was not waited for: .* at kernels_cu/\S+:\d+ and copy's write by "
WRONG = r"Not equal|Mismatched|assert"

# name: check, file, text, its replacement, which occurrence, what is reported
FAULTS = {
    "dropped syncthreads": (check_reverse, EXCHANGE, "__syncthreads();  // written", "", 0, RACE),
    "dropped syncwarp": (check_reverse_warp, EXCHANGE, "__syncwarp();  // written", "", 0, RACE),
    "syncwarp of half a warp": (
        check_reverse_warp,
        EXCHANGE,
        "__syncwarp();  // written",
        "__syncwarp(lane < 16 ? 0xffffu : 0xffff0000u);",
        0,
        RACE,
    ),
    "syncwarp without the caller": (
        check_reverse_warp,
        EXCHANGE,
        "__syncwarp();  // written",
        "__syncwarp(0xffffu);",
        0,
        "the calling lane is not named in the mask",
    ),
    "lanes with other masks": (
        check_sum_warp,
        EXCHANGE,
        "__shfl_xor_sync(kFullMask, sum",
        "__shfl_xor_sync(threadIdx.x % 2 ? kFullMask : 0x55555555u, sum",
        0,
        "another mask|is not named",
    ),
    "row out of bounds": (
        check_reverse,
        EXCHANGE,
        "row[i] = ",
        "row[i + 1] = ",
        0,
        r"an access of 4 bytes at offset 256 of dynamic shared memory, which has 256 bytes .*"
        r"exchange\.cu:\d+",
    ),
    "divergent barrier": (
        check_reverse,
        EXCHANGE,
        "__syncthreads();  // written",
        "if (i % 2) {\n__syncthreads();\n} else {\n__syncthreads();\nrow[0] += 1.0f;\n}",
        0,
        r"another lane of the warp waits at a different barrier at kernels_cu/\S+:\d+",
    ),
    "shuffle too short": (check_sum_warp, EXCHANGE, "step = 16", "step = 8", 0, WRONG),
    "shuffle with a lane gone": (
        check_sum_warp,
        EXCHANGE,
        "for (int step",
        "if (threadIdx.x == 31) return;\nfor (int step",
        0,
        "a lane named in the mask has exited",
    ),
    "read before landing": (
        check_reverse_copied,
        EXCHANGE,
        "copy_async_wait<0>();",
        "",
        0,
        IN_FLIGHT,
    ),
    "grid barrier waits for too many": (
        check_meet,
        EXCHANGE,
        "< gridDim.x)",
        "< gridDim.x + 1)",
        0,
        # Which CTAs wait alike, and so share a paragraph, depends on the moment.
        r"hangs: nothing went on .*\n  block .*warp 0: (lanes 1-31 waits at __syncthreads at "
        r"\S+:\d+; )?lanes 0 waits at an acquiring load at kernels_cu/planted/exchange\.cu:\d+",
    ),
    # Nothing is planted but the launch: it does not ask for all CTAs at once.
    "grid barrier of CTAs that are not resident": (
        check_meet_anywhere,
        EXCHANGE,
        "// all CTAs came",
        "",
        0,
        r"hangs: nothing went on .*\n  block .* waits at an acquiring load at .*\n"
        r"  block \d+(-\d+)?(,\S+)? never started",
    ),
    "grid barrier: y written before all came": (
        check_meet,
        EXCHANGE,
        "if (blockIdx.x == 0) args.y",
        "args.y",
        0,
        r"a race in global memory: write by block \d,0,0 warp [01] lane \d+ at kernels_cu/planted/"
        r"exchange\.cu:\d+ and write by block \d,0,0 .* 4 bytes at y offset \d+",
    ),
    "rmsnorm: a row stored behind the last": (
        check_rmsnorm,
        "unfused/rmsnorm.cu",
        "args.y + static_cast<i64>(blockIdx.x)",
        "args.y + static_cast<i64>(blockIdx.x + 1)",
        0,
        r"a write of \d+ bytes (768|[89]\d\d|1\d{3}) bytes into y, which has 768 bytes .*"
        r"device/vec\.cuh:\d+|a write of .* into y, which has 768 bytes .*rmsnorm\.cu:\d+",
    ),
    "element stored beyond the array": (
        check_reverse,
        EXCHANGE,
        "args.y[i] = row",
        "args.y[i + 1] = row",
        0,
        r"a write of 4 bytes 256 bytes into y, which has 256 bytes .*exchange\.cu:\d+",
    ),
    "missing full wait": (
        check_pipeline,
        EXCHANGE,
        "mbarrier_wait(full + s, parity);",
        "",
        0,
        "race in shared memory|in flight",
    ),
    "missing empty wait": (
        check_pipeline,
        EXCHANGE,
        "if (step >= 2) mbarrier_wait(empty + s, parity ^ 1);",
        "",
        0,
        "race in shared memory|in flight|one arrival more",
    ),
    "full wait of the wrong parity": (
        check_pipeline,
        EXCHANGE,
        "mbarrier_wait(full + s, parity);",
        "mbarrier_wait(full + s, parity ^ 1);",
        0,
        "race in shared memory|in flight|hangs",
    ),
    "slot given back before it was read": (
        check_pipeline,
        EXCHANGE,
        "      __syncwarp();\n",
        "",
        0,
        "race in shared memory|in flight",
    ),
    "too many bytes announced": (check_pipeline, EXCHANGE, "1024);", "1040);", 0, "hangs"),
    "block_sum: partial sums not awaited": (
        check_rmsnorm,
        "device/reduce.cuh",
        "__syncthreads();",
        "",
        0,
        RACE,
    ),
    "linear: lane 0's sums not awaited": (
        check_linear,
        "device/matvec.cuh",
        "__syncwarp();",
        "",
        0,
        RACE,
    ),
    "linear: a stage read before landing": (
        check_tile_linear,
        "device/tile_matmul.cuh",
        "copy_async_wait<kStages - 2>();",
        "copy_async_wait<kStages - 1>();",
        0,
        IN_FLIGHT,
    ),
    "linear: a stage overwritten": (
        check_tile_linear,
        "device/tile_matmul.cuh",
        "__syncthreads();",
        "",
        0,
        "race in shared memory|in flight",
    ),
    "linear: wrong lane of a fragment": (
        check_tile_linear,
        "device/tile_matmul.cuh",
        "a_group = lane / 16;",
        "a_group = lane / 8 % 2;",
        0,
        WRONG,
    ),
    "packed rows: sums read before all are there": (
        check_packed_rows,
        "device/packed_rows.cuh",
        "__syncthreads();\n    finish(",
        "finish(",
        0,
        RACE,
    ),
    "packed rows: one buffer of sums": (
        check_packed_rows,
        "device/packed_rows.cuh",
        "partial + i % 2 *",
        "partial + 0 *",
        0,
        RACE,
    ),
    "packed rows: x of another row": (
        check_packed_rows,
        "device/packed_rows.cuh",
        "x[lane / 4 % kM * 4",
        "x[lane / 8 % kM * 4",
        0,
        WRONG,
    ),
    "packed tiles: a stage read before landing": (
        check_packed_tiles,
        "device/packed_tiles.cuh",
        "copy_async_wait<kStages - 2>();",
        "copy_async_wait<kStages - 1>();",
        0,
        IN_FLIGHT,
    ),
    "packed tiles: a stage overwritten": (
        check_packed_tiles,
        "device/packed_tiles.cuh",
        "__syncthreads();  // the block has landed, and all warps",
        "// the block has landed, and all warps",
        0,
        "race in shared memory|in flight",
    ),
    "packed tiles: another row of x": (
        check_packed_tiles,
        "device/packed_tiles.cuh",
        "odd ? first : second, 4)",
        "odd ? first : second, 8)",
        0,
        WRONG,
    ),
    "warpgroup tiles: a stage is never given back": (
        check_warpgroup_tiles,
        "device/warpgroup_tiles.cuh",
        "Ring::release(before);",
        "",
        1,
        "hangs",
    ),
    "warpgroup tiles: fewer bytes announced than copied": (
        check_warpgroup_tiles,
        "device/warpgroup_tiles.cuh",
        "expect_tx(full, Shape::kStageBytes)",
        "expect_tx(full, Shape::kStageBytes - 16)",
        0,
        "hangs|too few were announced",
    ),
    "warpgroup tiles: a stage given back while it is read": (
        check_warpgroup_tiles,
        "device/warpgroup_tiles.cuh",
        "wgmma_wait<1>();  // the block before this one\n",
        "",
        0,
        "race|copy|product|Not equal|Mismatched",
    ),
    "warpgroup tiles: results stored without a fence": (
        check_warpgroup_tiles,
        "device/warpgroup_tiles.cuh",
        "fence_proxy_async_shared();",
        "",
        0,
        "a store without fence_proxy_async",
    ),
    "warpgroup tiles: a box overwritten while it is stored": (
        check_warpgroup_tiles,
        "device/warpgroup_tiles.cuh",
        "store_bulk_wait_read<Shape::kBoxes - 1>();",
        "store_bulk_wait_read<Shape::kBoxes>();",
        0,
        "copy|race",
    ),
    "warpgroup tiles: a residual over a box that is stored": (
        check_warpgroup_residual,
        "device/warpgroup_tiles.cuh",
        "store_bulk_wait_read<0>();",
        "",
        0,
        "copy|race",
    ),
    "warpgroup tiles: a residual read before landing": (
        check_warpgroup_residual,
        "device/warpgroup_tiles.cuh",
        "mbarrier_wait(WarpgroupRing<Shape>::there(warpgroup, i), held >> i & 1);",
        "",
        0,
        "in flight|race",
    ),
    "warpgroup tiles: a residual of the round before": (
        check_warpgroup_pre,
        "device/warpgroup_tiles.cuh",
        "held >> i & 1",
        "used / Shape::kBoxes % 2",
        0,
        "in flight|race|hangs",
    ),
    "warpgroup tiles: a residual over a second result": (
        check_warpgroup_pre,
        "device/warpgroup_tiles.cuh",
        "store_bulk_wait_read<0>();",
        "",
        0,
        "copy|race",
    ),
    "warpgroup tiles: results without a swizzle": (
        check_warpgroup_tiles,
        "device/warpgroup_tiles.cuh",
        "swizzle<Shape::kBoxLineBytes>((line",
        "((line",
        0,
        WRONG,
    ),
    "warpgroup tiles: a box off its alignment": (
        check_warpgroup_tiles,
        "device/warpgroup_tiles.cuh",
        "copy_tensor(left, maps.w, full, k, tile.column);",
        "copy_tensor(left + 64, maps.w, full, k, tile.column);",
        0,
        "multiple of 128",
    ),
    "warpgroup tiles: a box off its place": (
        check_warpgroup_tiles,
        "device/warpgroup_tiles.cuh",
        "copy_tensor(left, maps.w, full, k, tile.column);",
        "copy_tensor(left + 128, maps.w, full, k, tile.column);",
        0,
        IN_FLIGHT,
    ),
    "warpgroup tiles: a team out of turn": (
        check_warpgroup_teams,
        "device/warpgroup_tiles.cuh",
        "if (waits) wait_for_turn<Shape>(team);",
        "",
        0,
        "copy|race|hangs",
    ),
    "warpgroup tiles: fragments of a block before it landed": (
        check_warpgroup_panels,
        "device/warpgroup_tiles.cuh",
        """          mbarrier_wait(Ring::full(cursor.stage), cursor.round);
          fragments[set ^ 1]""",
        "          fragments[set ^ 1]",
        0,
        "in flight|race",
    ),
    "warpgroup tiles: fragments overwritten": (
        check_warpgroup_panels,
        "device/warpgroup_tiles.cuh",
        "wgmma_wait<1>();  // the block before this one, whose",
        "// the block before this one, whose",
        0,
        "written before wgmma_wait|in flight|race",
    ),
    "warpgroup tiles: sums over a ring that is read": (
        check_warpgroup_split,
        "device/warpgroup_tiles.cuh",
        "barrier_sync(1 + Shape::kMultipliers, kThreads);",
        "",
        0,
        "race|in flight|product",
    ),
    "warpgroup tiles: sums read before the cluster met": (
        check_warpgroup_split,
        "device/warpgroup_tiles.cuh",
        """  cluster_sync();
  const int own""",
        "  const int own",
        0,
        "race|cluster|Mismatched",
    ),
    "attention: a block read before landing": (
        check_attention,
        "device/attention_prefill.cuh",
        "copy_async_wait<1>();",
        "copy_async_wait<2>();",
        0,
        IN_FLIGHT,
    ),
    "attention: a block overwritten": (
        check_attention,
        "device/attention_prefill.cuh",
        "__syncthreads();",
        "",
        3,
        "race in shared memory|in flight",
    ),
    "decode: values read before landing": (
        check_decode,
        "device/attention_decode.cuh",
        "copy_async_wait<1>();",
        "",
        1,
        IN_FLIGHT,
    ),
}


def reports(check, seeds=SEEDS) -> list[str]:
    """What the check says for each seed that it fails for."""
    found = []
    for seed in seeds:
        with jit.twin_seed(seed):
            try:
                check()
            except (jit.KernelFault, AssertionError) as error:
                found.append(f"{error}" or "assert")
    return found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_kernels_without_a_fault_are_not_accused(tree, check):
    assert reports(check) == []


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_reported(tree, monkeypatch, name):
    check, file, old, new, place, wanted = FAULTS[name]
    monkeypatch.setenv("CUFUSE_TWIN_SECONDS", "20")
    monkeypatch.setenv("CUFUSE_TWIN_STEPS", "100000")
    plant(tree, file, old, new, place)
    found = reports(check)
    assert any(re.search(wanted, text, re.DOTALL) for text in found), found


@pytest.mark.parametrize("name", WANTED)
def test_every_wanted_fault_is_planted(name):
    table, planted = WANTED[name]
    tables = {"FAULTS": FAULTS, **vars(test_primitives)}
    assert planted in tables[table]


def test_a_deadlock_is_found_at_once(tree, monkeypatch):
    monkeypatch.setenv("CUFUSE_TWIN_STEPS", str(2**62))
    plant(
        tree,
        EXCHANGE,
        "__syncthreads();  // written",
        "if (i < 32) {\n__syncthreads();\n} else if (i > 32) {\n__syncwarp();\n} else {\n"
        "__syncthreads();\n}",
    )
    wanted = (
        r"hangs: every thread waits for another\n  block 0\n    warp 1: lanes 0 waits at "
        r"__syncthreads at \S+; lanes 1-31 waits at __syncwarp of mask ffffffff at \S+:\d+"
    )
    with pytest.raises(jit.KernelFault, match=wanted):
        check_reverse()


def test_the_check_can_be_left_out(tree, monkeypatch):
    monkeypatch.setenv("CUFUSE_TWIN_CHECK", "0")
    plant(tree, EXCHANGE, "row[i] = ", "row[0] = row[i] = ")
    with contextlib.suppress(AssertionError):
        check_reverse()
    monkeypatch.setenv("CUFUSE_TWIN_CHECK", "1")
    with pytest.raises(jit.KernelFault, match="a race in shared memory"):
        check_reverse()
