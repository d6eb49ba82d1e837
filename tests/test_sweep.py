"""The sweep over tiles: candidates, the fit, the rows and the command line."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from cufuse import device, jit, tiles
from cufuse.benchmarks import readme, rows, sweep, timing
from cufuse.benchmarks.catalogue import cases
from cufuse.benchmarks.sweep import Measured, Sweep
from cufuse.benchmarks.timing import Timing
from cufuse.benchmarks.verify import VerificationError
from cufuse.cli import main
from cufuse.device import bfloat16
from cufuse.tiles import Target, WarpgroupTile

HOPPER = Target("90a", 132, 227 * 1024)
SHAPES = [(m, n, k) for m, n in ((512, 2048), (1024, 4096), (4096, 4096)) for k in (512, 2048)]


def bench(*arguments: str):
    return CliRunner().invoke(main, ["bench", *arguments])


# ---- tiles --------------------------------------------------------------------------------------


def test_candidates_hold_the_table_and_more_that_fit():
    found = sweep.candidates(HOPPER)
    templates = [tile.template for tile in found]
    assert len(set(templates)) == len(templates) > len(tiles.WARPGROUP_TILES)
    assert set(tiles.WARPGROUP_TILES) <= set(found)
    for tile in found:
        assert tile.shared_bytes(2) <= HOPPER.shared_bytes
        assert replace(tile, stages=tile.stages + 1).shared_bytes(2) > HOPPER.shared_bytes
    small = sweep.candidates(replace(HOPPER, shared_bytes=100 * 1024))
    assert small and all(tile.shared_bytes(2) <= 100 * 1024 for tile in small)


@pytest.mark.parametrize("op", sweep.OPS)
def test_every_shape_has_tiles_worth_trying(op):
    shapes = sweep.shapes(op)
    assert len(set(shapes)) == len(shapes) and (4096, 14336, 4096) in shapes
    for m, n, k in shapes:
        n_weight_rows = n * tiles.WEIGHT_ROWS[op]
        tried = [
            tile
            for tile in sweep.candidates(HOPPER)
            if sweep.worth_trying(tile, HOPPER, m, n_weight_rows, k)
        ]
        assert len(tried) >= 6


def test_only_one_tile_is_taken_inside_the_block():
    tile = WarpgroupTile(64, 64, 1, 3, 8, 1, 4, 1, 1)
    arguments = (HOPPER, 1, 4096, 4096, bfloat16)
    before = tiles.choose("linear", *arguments)
    with tiles.only(tile):
        assert tiles.choose("linear", *arguments) is tile
        assert tiles.choose("linear", *arguments, norm=True) is tile
        assert tiles.choose_packed("linear", *arguments) is tile
        # What warpgroups cannot take is as it was.
        assert tiles.choose("linear", HOPPER, 9, 64, 128, bfloat16) is not tile
        assert tiles.choose("linear", *arguments, tensor_copies=False) is not tile
        assert tiles.choose("linear", replace(HOPPER, arch="80"), *arguments[1:]) is not tile
    assert tiles.choose("linear", *arguments) is before


# ---- the fit ------------------------------------------------------------------------------------

KNOWN = (
    WarpgroupTile(256, 128, 2, 4, 8, 1, 1, 620, 4100),
    WarpgroupTile(128, 128, 1, 6, 16, 2, 1, 360, 1700),
    WarpgroupTile(64, 64, 1, 13, 8, 1, 2, 140, 1800),
)
OVERHEAD = 3500


def synthetic(known=KNOWN, shapes=SHAPES, noise=0.0):
    rng = np.random.default_rng(0)
    made = []
    for shape, tile in itertools.product(shapes, known):
        ns = OVERHEAD + tile.launch_ns(HOPPER, *shape)
        blank = replace(tile, block_ns=0, finish_ns=0)
        made.append(Measured(*shape, blank, ns * (1 + noise * rng.standard_normal())))
    return made


def fitted(measured):
    return {one.tile.template: one for one in sweep.fit(measured, HOPPER).tiles}


def test_fit_recovers_known_numbers():
    made = sweep.fit(synthetic(), HOPPER)
    assert made.overhead_ns == pytest.approx(OVERHEAD, rel=1e-6)
    assert {one.tile for one in made.tiles} == set(KNOWN)
    assert all(one.error < 1e-6 and one.rows >= 2 for one in made.tiles)


def test_fit_bears_noise():
    found = fitted(synthetic(shapes=[(m, n, k + 64) for m, n, k in SHAPES] + SHAPES, noise=0.01))
    for tile in KNOWN:
        one = found[tile.template]
        assert one.tile.block_ns == pytest.approx(tile.block_ns, rel=0.1)
        assert 0 < one.error < 0.03


def test_fit_tells_rows_that_wait_for_memory():
    shapes = [(m, n, k) for m in (16, 256) for n in (8192, 65536) for k in (512, 4096)]
    made = synthetic(shapes=SHAPES + shapes)
    waits = [
        tile.work(HOPPER, *one.shape)[0] * tile.block_ns < tiles.read_ns(*one.shape[1:])
        for one, tile in zip(made, itertools.cycle(KNOWN), strict=False)
    ]
    assert 3 < sum(waits) < len(waits)
    assert {one.tile for one in fitted(made).values()} == set(KNOWN)


def test_fit_leaves_out_rows_that_are_far_behind():
    good = synthetic()
    far = [replace(one, ns=50 * one.ns) for one in good if one.tile.teams == 1]
    assert {one.tile for one in fitted(good + far).values()} == set(KNOWN)


def test_no_time_is_negative():
    tile = replace(KNOWN[0], block_ns=0, finish_ns=0)
    made = [
        Measured(1024, 4096, k, tile, 500 * tile.work(HOPPER, 1024, 4096, k)[0] - 900)
        for k in (512, 1024, 4096)
    ]
    one = fitted(made)[tile.template]
    assert one.tile.finish_ns == 0 and one.tile.block_ns > 0


def test_what_rows_do_not_tell_apart_is_shared():
    made = [one for one in synthetic() if one.k == 512]
    assert "Too few rows to fit a table: give sizes of several k" in sweep.report(made, HOPPER)
    for one in fitted(made).values():
        assert one.tile.block_ns > 0 and one.error < 0.01


def test_tiles_that_are_slow_everywhere_are_left_out():
    slow = tiles._WARPGROUPS[-1]
    made = [*synthetic(), *(Measured(*shape, slow, 1e9) for shape in SHAPES)]
    text = sweep.report(made, HOPPER)
    assert f"# without {sweep.label(slow)}, which is slow" in text
    assert f"WarpgroupTile({', '.join(map(str, slow.template))}," not in text
    assert text.count("# not measured") > 10


def test_the_report_can_be_pasted():
    text = sweep.report(synthetic(), HOPPER)
    made = {"WarpgroupTile": WarpgroupTile}
    exec(text, made)
    assert set(KNOWN) <= set(made["_WARPGROUPS"])
    assert set(made["_WARPGROUPS_OF_FEW"]) == set(tiles._WARPGROUPS_OF_FEW)
    assert {t.template for t in tiles._WARPGROUPS} <= {t.template for t in made["_WARPGROUPS"]}
    assert re.search(r"by the fitted numbers the choice takes 1\.000 of the fastest's", text)


# ---- rows ---------------------------------------------------------------------------------------


@pytest.fixture
def on_twin(monkeypatch):
    """A sweep of three tiles on the twin, as on an sm_90a of few SMs, timed by a rule."""
    monkeypatch.setattr(tiles, "TWIN", replace(HOPPER, sm_count=4))
    monkeypatch.setattr(sweep, "_compile", lambda *_: None)
    monkeypatch.setattr(sweep, "cublas_run", lambda *_: None)
    monkeypatch.setattr(timing, "sets_beyond_l2", lambda _: 2)
    timed = []

    def alone(run, sets, *, repetitions):
        with jit.record(dry=True) as made:
            run(sets - 1)
        timed.append(made.launches[0])
        return Timing((1e-3 * made.launches[0].grid[0],) * repetitions)

    monkeypatch.setattr(timing, "alone", alone)
    made = Sweep("linear", repetitions=2, kind="twin")
    taken = ((64, 64, 1, 1), (64, 128, 2, 1), (128, 64, 1, 1))
    made.tiles = [
        tile
        for tile in tiles.WARPGROUP_TILES
        if (tile.block_m, tile.block_n, tile.warpgroups, tile.split) in taken
    ]
    assert len(made.tiles) == 3
    return made, timed


@pytest.mark.cpu_kernels
def test_every_tile_has_a_checked_row(on_twin):
    made, timed = on_twin
    case = cases()["linear"]((70, 136, 136), bfloat16)
    found = list(made.rows([case]))
    assert {launch.kernel for launch in timed} == {"linear_warpgroups"}
    assert [row.ms_alone for row in found] == sorted(row.ms_alone for row in found)
    assert sum("fastest" in (row.note or "") for row in found) == 1
    (chosen,) = (row for row in found if "chosen" in (row.note or ""))
    target = made.target
    assert chosen.tile == sweep.label(tiles.choose("linear", target, 70, 136, 136, bfloat16))
    for row in found:
        assert row.test == "sweep" and row.op == "linear" and row.sizes == "70 x 136 x 136"
        assert 0 < row.max_rel_err < 4e-3 and len(row.samples) == 2
    assert {one.tile for one in made.measured} == set(made.tiles)
    assert all(one.ns > 0 and one.shape == (70, 136, 136) for one in made.measured)
    table = rows.markdown(found).splitlines()
    assert table[0] == "| op | sizes | dtype | tile | us alone | speed | x cuBLAS | max err |  |"
    assert "64x64 wg1x1 st13 gm8 sp1" in "".join(table)
    assert readme.newest([replace(row, gpu="NVIDIA X") for row in found]) == []


@pytest.mark.cpu_kernels
def test_a_wrong_tile_is_named_and_not_timed(on_twin, monkeypatch):
    made, timed = on_twin
    case = cases()["linear"]((70, 136, 136), bfloat16)

    def fused(a):
        a["y"].view(np.uint8)[...] = 0

    monkeypatch.setattr(case, "fused", fused)
    with pytest.raises(VerificationError, match=r"linear 70x136x136, fused, bfloat16, \d+x\d+ wg"):
        list(made.rows([case]))
    assert not timed


# ---- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "--sweep needs the name linear or gated_linear."),
        (("decode",), "--sweep needs the name linear or gated_linear."),
        (("moe_route",), "--sweep needs the name linear or gated_linear."),
        (("linear", "-e", "fused"), "--engine does not go with it"),
        (("linear", "--plot", "x.png"), "--plot does not go with it"),
        (("linear", "--dtype", "float32"), "--sweep is for bfloat16 and float16"),
        (("linear", "--size", "4x4"), "wanted mxnxk"),
        (("linear", "--size", "4x4x12"), "k is 12, wanted a multiple of 8"),
    ],
)
def test_wrong_usage_exits_2(arguments, sentence):
    result = bench(*arguments, "--sweep", "--device", "cpu")
    assert result.exit_code == 2 and sentence in " ".join(result.stderr.split())


def test_a_sweep_needs_warpgroups(monkeypatch):
    monkeypatch.setattr(device, "gpu_problem", lambda: "the CUDA driver finds no GPU")
    result = bench("linear", "--sweep", "--device", "cpu")
    assert result.exit_code == 4 and "--sweep needs a GPU of sm_90a: the CUDA" in result.stderr
    monkeypatch.setattr(device, "gpu_problem", lambda: None)
    info = device.GpuInfo("NVIDIA A100", "80", 108, 1, 1, 1, "13.0", "13.0")
    monkeypatch.setattr(device, "gpu_available", lambda: True)
    monkeypatch.setattr(device, "gpu_info", lambda: info)
    result = bench("linear", "--sweep")
    assert result.exit_code == 4 and "NVIDIA A100 is sm_80" in result.stderr


def test_help_has_an_example():
    assert "cufuse bench linear --sweep" in bench("--help").stdout


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("op", sweep.OPS)
def test_a_sweep_on_the_gpu(op):
    import cupy

    if tiles.target_of(cupy.empty(1)).arch != "90a":
        pytest.skip("needs sm_90a")
    sizes = ("--size", "512x1024x512", "--size", "512x1024x2048")
    result = bench(op, "--sweep", *sizes, "-r", "1", "-o", "jsonl")
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len({row["tile"] for row in found}) > 20
    assert sum("chosen" in (row["note"] or "") for row in found) == 2
    assert all(row["ms_alone"] > 0 and row["max_rel_err"] < 4e-3 for row in found)
    assert "_WARPGROUPS = (" in result.stderr
