"""hw.cuh's barriers, copies, published words and 8-bit products; what the twin says of faults."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import to_numpy

from cufuse import device, jit

ROOT = Path(__file__).parent / "twin" / "primitives"
SEEDS = range(3)
FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def archs(made):
    """The architectures that have the instructions of a kernel; 90a has some for itself."""
    least = re.search(r"^// needs: (\d+a?)$", made.path.read_text(), re.MULTILINE)[1]
    if least.endswith("a"):
        return [least]
    return [arch for arch in jit.ARCHS if int(arch.rstrip("a")) >= int(least)]


@pytest.mark.parametrize("made", jit.samples(ROOT), ids=lambda made: made.expression)
def test_compiles_where_the_instructions_are(made):
    for arch in archs(made):
        assert jit.compile_offline(made, arch).spill_bytes == 0


# ---- ring of bulk copies ------------------------------------------------------------------------


def run_ring(to, root=ROOT, stages=3, tiles=11, ctas=2):
    x = np.arange(tiles * 192, dtype=np.float32).reshape(tiles, 192) % 1021
    out = to(np.full_like(x, np.nan))
    args = {"x": to(x), "out": out, "tiles": tiles}
    size = (stages + 1) * 192 * 4 + 2 * stages * 8
    ring = jit.kernel("ring.cu", "ring", stages, root=root)
    ring.launch(ctas, 96, args, like=out, shared_bytes=size)
    return to_numpy(out), 2 * x + np.roll(x, -1, axis=1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stages, tiles", [(2, 7), (3, 11), (3, 1)])
def test_ring_delivers_every_tile(to_kernels, stages, tiles, seed):
    with jit.twin_seed(seed):
        got, wanted = run_ring(to_kernels, stages=stages, tiles=tiles)
    np.testing.assert_array_equal(got, wanted)


# What is taken out of ring.cu, what stands there instead, and what the report says; without a
# report the numbers are wrong.
RING_FAULTS = {
    "no wait for full": ("mbarrier_wait(&full[stage], i / kStages & 1);", "", None),
    "no wait for empty": (
        "if (i >= kStages) mbarrier_wait(&empty[stage], (i / kStages - 1) & 1);",
        "",
        None,
    ),
    "wrong parity": ("i / kStages & 1);", "(i / kStages + 1) & 1);", None),
    "short byte count": (
        "&full[stage], kTileBytes)",
        "&full[stage], kTileBytes - 16)",
        "too few|-16 bytes",
    ),
    "wrong byte count": (
        "&full[stage], kTileBytes)",
        "&full[stage], kTileBytes + 16)",
        r"mbarrier_wait of parity 0 at shared \+ \d+ \(0 of 1 arrivals missing, 16 bytes",
    ),
    "misaligned bulk copy": (
        "copy_bulk(stages + stage * kTile,",
        "copy_bulk(stages + stage * kTile + 1,",
        "16-byte aligned",
    ),
    "bulk copy past the end": (
        "copy_bulk(stages + stage * kTile,",
        "copy_bulk(stages + (stage + 4) * kTile,",
        "reach beyond",
    ),
    "no initialization": ("mbarrier_init(&full[stage], 1);", "", "no mbarrier was initialized"),
    "an arrival too many": (
        "mbarrier_init(&empty[stage], kConsumers)",
        "mbarrier_init(&empty[stage], 1)",
        None,
    ),
    "no wait for the store's reading": (
        "if (threadIdx.x == 0) store_bulk_wait_read<0>();",
        "",
        None,
    ),
    "no wait for the stores": (
        "if (threadIdx.x == 0) store_bulk_wait<0>();",
        "",
        "before its shared memory was read",
    ),
    "count of half the warps": ("barrier_sync(1, kConsumers * 32)", "barrier_sync(1, 32)", "small"),
    "count of all warps": (
        "barrier_sync(1, kConsumers * 32)",
        "barrier_sync(1, kConsumers * 32 + 32)",
        r"barrier 1 \(64 of 96 threads came\)",
    ),
    "count of no whole warps": (
        "barrier_sync(1, kConsumers * 32)",
        "barrier_sync(1, 40)",
        "no number of warps",
    ),
}


def mutate(tmp_path, file, old, new):
    """Write a copy of a kernel with a fault."""
    text = (ROOT / file).read_text()
    assert old in text, old
    (tmp_path / file).write_text(text.replace(old, new))
    return tmp_path


def report(launch, seeds, monkeypatch):
    """Return the first fault that a seed finds: the twin's words, or that the result is wrong."""
    monkeypatch.setenv("CUFUSE_TWIN_SECONDS", "2")
    monkeypatch.setenv("CUFUSE_TWIN_STEPS", "100000")
    for seed in range(seeds):
        try:
            with jit.twin_seed(seed):
                got, wanted = launch()
        except jit.KernelFault as fault:
            return str(fault)
        if not np.array_equal(got, wanted):
            return "the result is wrong"
    return ""


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("fault", RING_FAULTS)
def test_twin_reports_faults_of_a_ring(tmp_path, monkeypatch, fault):
    old, new, words = RING_FAULTS[fault]
    root = mutate(tmp_path, "ring.cu", old, new)
    said = report(lambda: run_ring(device.twin, root, 2, 13), 8, monkeypatch)
    assert re.search(words or ".", said), said or "no seed found it"


@pytest.mark.cpu_kernels
def test_report_names_lines_of_a_kernel_that_lies_elsewhere(tmp_path, monkeypatch):
    root = mutate(tmp_path, "ring.cu", *RING_FAULTS["no wait for empty"][:2])
    said = report(lambda: run_ring(device.twin, root, 2, 13), 8, monkeypatch)
    place = rf"at {tmp_path.name}/ring\.cu:\d+"
    assert re.search(place, said) and "+0x" not in said, said


# ---- words handed over between CTAs -------------------------------------------------------------


def run_handoff(to, root=ROOT, ctas=4, steps=9):
    words, out = to(np.zeros((2, 64), np.uint64)), to(np.zeros(ctas, np.uint32))
    order = to(np.zeros(ctas + 1, np.uint32))
    args = {"words": words, "out": out, "order": order, "steps": steps}
    jit.kernel("handoff.cu", "handoff", root=root).launch(
        ctas, 32, args, like=out, cooperative=True
    )
    value = np.arange(1, ctas + 1, dtype=np.uint32)
    for _ in range(steps):
        value = value.sum(dtype=np.uint32)[None] * np.uint32(3) + np.arange(ctas, dtype=np.uint32)
    return np.append(to_numpy(out), np.sort(to_numpy(order))), np.append(
        value, [*range(ctas), ctas]
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ctas", [2, 4, 8])
def test_words_are_handed_over(to_kernels, ctas, seed):
    with jit.twin_seed(seed):
        got, wanted = run_handoff(to_kernels, ctas=ctas)
    np.testing.assert_array_equal(got, wanted)


HANDOFF_FAULTS = {
    "a stale step number": ("pair.x >> 32 != step || pair.y >> 32 != step", "pair.x >> 32 != step"),
    "a lapped reader": ("(step % 2) * 64", "0"),
}


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("fault", HANDOFF_FAULTS)
def test_twin_reports_faults_of_a_handoff(tmp_path, monkeypatch, fault):
    root = mutate(tmp_path, "handoff.cu", *HANDOFF_FAULTS[fault])
    launch = lambda: run_handoff(device.twin, root, 4, 30)  # noqa: E731
    assert report(launch, 8, monkeypatch), "no seed found it"


# ---- barriers -----------------------------------------------------------------------------------


def run_groups(to, root=ROOT, steps=7):
    x = np.arange(steps * 64, dtype=np.uint32).reshape(steps, 64)
    out = to(np.zeros_like(x))
    args = {"in": to(x), "out": out, "steps": steps}
    made = jit.kernel("groups.cu", "groups", root=root)
    made.launch(1, 128, args, like=out, shared_bytes=256)
    return to_numpy(out), x[:, ::-1]


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_of_warps_take_turns(to_kernels, seed):
    with jit.twin_seed(seed):
        got, wanted = run_groups(to_kernels)
    np.testing.assert_array_equal(got, wanted)


GROUPS_FAULTS = {
    "no wait for free": (
        "if (step > 0) barrier_sync(kFree, 128);",
        "",
        "twice before it is full|race",
    ),
    "two counts": ("barrier_arrive(kFilled, 128)", "barrier_arrive(kFilled, 96)", "counts of"),
    "nobody arrives": ("barrier_arrive(kFilled, 128);", "", r"barrier 1 \(64 of 128 threads came"),
    "id of __syncthreads": ("kFilled = 1", "kFilled = 0", "not in 1..15"),
    "some lanes only": (
        "      barrier_arrive(kFilled, 128);",
        "      if (j % 2) barrier_arrive(kFilled, 128);",
        "",
    ),
}


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("fault", GROUPS_FAULTS)
def test_twin_reports_faults_of_groups(tmp_path, monkeypatch, fault):
    old, new, words = GROUPS_FAULTS[fault]
    root = mutate(tmp_path, "groups.cu", old, new)
    said = report(lambda: run_groups(device.twin, root), 4, monkeypatch)
    assert said and re.search(words, said), said or "no seed found it"


@pytest.mark.parametrize("seed", SEEDS)
def test_warps_take_turns_and_give_up(to_kernels, seed):
    out = to_kernels(np.array([0, 0, 3, 5], np.uint32))
    wide = to_kernels(np.array([0, 2**40, 5], np.uint64))
    with jit.twin_seed(seed):
        jit.kernel("turns.cu", "turns", root=ROOT).launch(
            1, 256, {"out": out, "wide": wide}, like=out, shared_bytes=80
        )
    total = 1
    for turn in range(24):
        total = (total * 3 + turn % 8) % 2**32
    assert to_numpy(out).tolist() == [total, 256, 3, 5]
    assert to_numpy(wide).tolist() == [256 << 33, 2**40, 5]


# ---- copies of 16 bytes -------------------------------------------------------------------------


def run_copies(to, root=ROOT, rounds=6, threads=40):
    x = np.arange(rounds * threads * 4, dtype=np.uint32).reshape(rounds, threads, 4)
    out = to(np.zeros_like(x))
    args = {"x": to(x), "out": out, "rounds": rounds}
    made = jit.kernel("copies.cu", "copies", root=root)
    made.launch(1, threads, args, like=out, shared_bytes=2 * threads * 16)
    return to_numpy(out), np.roll(x, -1, axis=1)


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_arrive(to_kernels, seed):
    with jit.twin_seed(seed):
        got, wanted = run_copies(to_kernels)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.cpu_kernels
@pytest.mark.parametrize(
    "old, new",
    [
        ("copy_async_wait<1>();", ""),
        ("copy_async_wait<1>();", "copy_async_wait<2>();"),
        # Only a copy that lands before it is waited for shows that others still read the stage.
        ("[round % 2 * threads + (thread + 1) % threads];\n    __syncthreads();", None),
    ],
    ids=["no wait", "a wait for too little", "no barrier before the next copy"],
)
def test_twin_reports_faults_of_copies(tmp_path, monkeypatch, old, new):
    new = old.replace("\n    __syncthreads();", "") if new is None else new
    root = mutate(tmp_path, "copies.cu", old, new)
    assert report(lambda: run_copies(device.twin, root), 8, monkeypatch), "no seed found it"


# ---- 8-bit types --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FP8)
def test_fp8_conversions_are_exact(to_kernels, rng, name):
    dtype, largest = FP8[name], float(ml_dtypes.finfo(FP8[name]).max)
    every = np.arange(256, dtype=np.uint8)
    values = every.view(dtype).astype(np.float32)
    finite = np.unique(values[np.isfinite(values)])
    between = (finite[1:] + finite[:-1]) / 2  # ties, exact in float32
    near = np.concatenate([np.nextafter(between, np.float32(s)) for s in (-np.inf, np.inf)])
    random = rng.standard_normal(999).astype(np.float32) * 2.0 ** rng.integers(-20, 17, 999)
    x = np.concatenate(
        [finite, between, near, random, [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30]]
    ).astype(np.float32)
    bits, wide = to_kernels(np.zeros(x.size, np.uint8)), to_kernels(np.zeros(256, np.float32))
    args = {"x": to_kernels(x), "bits": bits, "narrow": to_kernels(every), "wide": wide}
    jit.kernel("convert_fp8.cu", "convert_fp8", name, root=ROOT).launch(
        -(-x.size // 128), 128, args | {"n": x.size}, like=bits
    )
    np.testing.assert_array_equal(to_numpy(wide), values)
    assert (np.signbit(to_numpy(wide)) == np.signbit(values))[np.isfinite(values)].all()
    wanted = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
    wanted[np.isnan(x)] = 0x7F
    np.testing.assert_array_equal(to_numpy(bits), wanted)


def test_mma_of_int8_is_exact(to_kernels, rng):
    a = rng.integers(-128, 128, (16, 32)).astype(np.int8)
    b = rng.integers(-128, 128, (8, 32)).astype(np.int8)
    c = rng.integers(-1000, 1000, (16, 8)).astype(np.int32)
    out = to_kernels(c.copy())
    args = {"a": to_kernels(a), "b": to_kernels(b), "out": out}
    jit.kernel("mma_s8.cu", "mma_s8", root=ROOT).launch(1, 32, args, like=out)
    np.testing.assert_array_equal(to_numpy(out), c + a.astype(np.int32) @ b.T.astype(np.int32))


@pytest.mark.parametrize("left, right", [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_mma_of_fp8_matches_float64(to_kernels, rng, left, right):
    a = rng.standard_normal((16, 32)).astype(FP8[left])
    b = rng.standard_normal((8, 32)).astype(FP8[right])
    c = rng.standard_normal((16, 8)).astype(np.float32)
    out = to_kernels(c.copy())
    args = {"a": to_kernels(a.view(np.uint8)), "b": to_kernels(b.view(np.uint8)), "out": out}
    jit.kernel("mma_fp8.cu", "mma_fp8", left, right, root=ROOT).launch(1, 32, args, like=out)
    wanted = c + a.astype(np.float64) @ b.T.astype(np.float64)
    scale = np.abs(c) + np.abs(a.astype(np.float64)) @ np.abs(b.T.astype(np.float64))
    # Tensor cores align the products of a step to the largest and drop what is below 2^-13 of it.
    limit = 1e-6 if isinstance(out, np.ndarray) else 2.0**-12
    assert (np.abs(to_numpy(out) - wanted) <= limit * scale).all()
