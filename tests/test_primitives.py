"""hw.cuh's barriers, copies, words, clusters and 8-bit products; what the twin says of faults."""

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
    for seed in seeds:
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
    said = report(lambda: run_ring(device.twin, root, 2, 13), SEEDS, monkeypatch)
    assert re.search(words or ".", said), said or "no seed found it"


@pytest.mark.cpu_kernels
def test_report_names_lines_of_a_kernel_that_lies_elsewhere(tmp_path, monkeypatch):
    root = mutate(tmp_path, "ring.cu", *RING_FAULTS["no wait for empty"][:2])
    said = report(lambda: run_ring(device.twin, root, 2, 13), SEEDS, monkeypatch)
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
    "one slot for all steps": ("(step % 2) * 64", "0"),
}


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("fault", HANDOFF_FAULTS)
def test_twin_reports_faults_of_a_handoff(tmp_path, monkeypatch, fault):
    root = mutate(tmp_path, "handoff.cu", *HANDOFF_FAULTS[fault])
    launch = lambda: run_handoff(device.twin, root, 4, 30)  # noqa: E731
    assert report(launch, SEEDS, monkeypatch), "no seed found it"


def run_slots(to, root=ROOT, ctas=8, steps=30):
    words, out = to(np.zeros((4, ctas), np.uint64)), to(np.zeros(ctas, np.uint32))
    args = {"words": words, "out": out, "steps": steps}
    jit.kernel("slots.cu", "slots", root=root).launch(ctas, 32, args, like=out, cooperative=True)
    value, heard = np.arange(1, ctas, dtype=np.uint32), ctas
    for _ in range(steps):
        total = value.sum(dtype=np.uint32)
        heard += int(total)
        value = total[None] * np.uint32(3) + np.arange(ctas - 1, dtype=np.uint32)
    return to_numpy(out), np.append(value, np.uint32(heard % 2**32))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ctas", [3, 8])
def test_slots_of_words_are_read_in_time(to_kernels, ctas, seed):
    with jit.twin_seed(seed):
        got, wanted = run_slots(to_kernels, ctas=ctas)
    np.testing.assert_array_equal(got, wanted)


SLOTS_FAULTS = {
    # Nobody waits for the listener, and it finds a later step where it looks for its own.
    "a lapped reader": (
        "awaited = gridDim.x;",
        "awaited = gridDim.x - 1;",
        r"hangs: .*\n  block 7\n    warp 0: lanes .* waits at a relaxed load at "
        r"\w+/slots\.cu:\d+",
    ),
    "a slot too few": (
        "step % kSlots",
        "0",
        r"hangs: .*waits at a relaxed load at \w+/slots\.cu:\d+",
    ),
}


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("fault", SLOTS_FAULTS)
def test_twin_reports_faults_of_slots(tmp_path, monkeypatch, fault):
    old, new, words = SLOTS_FAULTS[fault]
    root = mutate(tmp_path, "slots.cu", old, new)
    said = report(lambda: run_slots(device.twin, root), SEEDS, monkeypatch)
    assert re.search(words, said, re.DOTALL), said or "no seed found it"


# ---- what one CTA writes and another reads ------------------------------------------------------


def run_edges(to, root=ROOT, ctas=8, edge="ordered", threads=40):
    x = np.arange(ctas * threads, dtype=np.uint32).reshape(ctas, threads)
    buffer, out = to(np.zeros_like(x)), to(np.zeros_like(x))
    args = {"x": to(x), "buffer": buffer, "arrived": to(np.zeros(1, np.uint32)), "out": out}
    made = jit.kernel("edges.cu", "edges", f"Edge::{edge}", root=root)
    made.launch(ctas, threads, args, like=out, cooperative=True)
    return to_numpy(out), np.roll(x, -1, axis=0) + np.roll(x, -2, axis=0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("edge", ["ordered", "fenced"])
def test_rows_are_seen_behind_a_barrier_of_the_grid(to_kernels, edge, seed):
    with jit.twin_seed(seed):
        got, wanted = run_edges(to_kernels, edge=edge)
    np.testing.assert_array_equal(got, wanted)


ACCESS = r"(read|write) by block \d,0,0 warp [01] lane \d+ at \w+/%s\.cu:\d+"
RACE = (
    rf"a race in global memory: {ACCESS % 'edges'} and {ACCESS % 'edges'}, 4 bytes at buffer "
    r"offset \d+"
)
EDGES_FAULTS = {
    "no release": ("ordered", "<Order::release>", "<Order::relaxed>", RACE),
    "no acquire": ("ordered", "<Order::acquire>", "<Order::relaxed>", RACE),
    "no fence before": ("fenced", "__threadfence();  // written before it is said", "", RACE),
    "no fence after": ("fenced", "__threadfence();  // said before it is read", "", RACE),
    "said before all have written": (
        "ordered",
        "__syncthreads();  // the CTA has written",
        "",
        RACE,
    ),
    "read before all have come": ("ordered", "__syncthreads();  // all CTAs have", "", RACE),
    "no barrier": ("ordered", "< gridDim.x)", "< 1)", RACE),
    "a plain load of the counter": (
        "ordered",
        "load_word<Order::acquire>(args.arrived)",
        "*static_cast<volatile u32*>(args.arrived)",
        r"a race in global memory: .*atomic write by block .* 4 bytes at arrived offset 0",
    ),
    "a row too far": (
        "ordered",
        "args.out[blockIdx.x * blockDim.x + i] = sum;",
        "args.out[(blockIdx.x + 1) * blockDim.x + i] = sum;",
        r"a write of 4 bytes 1\d\d\d bytes into out, which has 1280 bytes \(block 7,0,0 warp "
        r"\d lane \d+ at \w+/edges\.cu:\d+\)",
    ),
    "a row before the first": (
        "ordered",
        "args.x[blockIdx.x * blockDim.x + i];",
        "args.x[static_cast<int>((blockIdx.x - 1) * blockDim.x + i)];",
        r"a read of 4 bytes \d+ bytes before x|a read of 4 bytes \d+ bytes into",
    ),
}


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("fault", EDGES_FAULTS)
def test_twin_reports_faults_between_ctas(tmp_path, monkeypatch, fault):
    edge, old, new, words = EDGES_FAULTS[fault]
    root = mutate(tmp_path, "edges.cu", old, new)
    said = report(lambda: run_edges(device.twin, root, edge=edge), SEEDS, monkeypatch)
    assert re.search(words, said), said or "no seed found it"


@pytest.mark.cpu_kernels
def test_a_seed_decides_what_is_reported(tmp_path, monkeypatch):
    root = mutate(tmp_path, "edges.cu", "<Order::release>", "<Order::relaxed>")
    said = [
        [report(lambda: run_edges(device.twin, root), [seed], monkeypatch) for seed in range(6)]
        for _ in range(2)
    ]
    assert said[0] == said[1] and len(set(said[0])) > 1


# ---- bulk copies that combine -------------------------------------------------------------------

REDUCE_TYPES = {"u32": np.uint32, "i32": np.int32, "u64": np.uint64}


def run_reduce(to, root=ROOT, how="add", kind="u32", ctas=5, threads=36, seed=0):
    rng, dtype = np.random.default_rng(seed), REDUCE_TYPES[kind]
    limits = np.iinfo(dtype)
    x = rng.integers(limits.min, limits.max, (ctas, threads), dtype, endpoint=True)
    start = rng.integers(limits.min, limits.max, threads, dtype, endpoint=True)
    out, total = to(start.copy()), to(np.zeros(1, dtype))
    args = {"x": to(x), "out": out, "arrived": to(np.zeros(1, np.uint32)), "total": total}
    made = jit.kernel("reduce.cu", "reduce", f"Reduce::{how}", kind, root=root)
    made.launch(ctas, threads, args, like=out, shared_bytes=threads * x.itemsize)
    combine = {"add": np.add, "min": np.minimum, "max": np.maximum}[how]
    wanted = combine.reduce(np.vstack([start[None], x]), axis=0, dtype=dtype)
    return np.append(to_numpy(out), to_numpy(total)), np.append(wanted, wanted.sum(dtype=dtype))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", REDUCE_TYPES)
@pytest.mark.parametrize("how", ["add", "min", "max"])
def test_bulk_copies_combine(to_kernels, how, kind, seed):
    with jit.twin_seed(seed):
        got, wanted = run_reduce(to_kernels, how=how, kind=kind, seed=seed)
    np.testing.assert_array_equal(got, wanted)


REDUCE_FAULTS = {
    "no wait for the writing": (
        "store_bulk_wait<0>",
        "store_bulk_wait_read<0>",
        r"a copy in flight was not waited for: read by block \d,0,0 warp 0 lane 0 at "
        r"\w+/reduce\.cu:\d+ and copy's atomic write by block \d,0,0 warp 0 lane 0",
    ),
    "another's copy not waited for": (
        "add_acq_rel(args.arrived, 1)",
        "atomic_add<Order::relaxed>(args.arrived, 1)",
        "a race in global memory: .*atomic write by block",
    ),
    "a copy too long": (
        "blockDim.x * static_cast<u32>(sizeof(T)));",
        "blockDim.x * static_cast<u32>(sizeof(T)) + 16);",
        "reach beyond|a write of 160 bytes 0 bytes into out, which has 144 bytes",
    ),
}


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("fault", REDUCE_FAULTS)
def test_twin_reports_faults_of_combining_copies(tmp_path, monkeypatch, fault):
    old, new, words = REDUCE_FAULTS[fault]
    root = mutate(tmp_path, "reduce.cu", old, new)
    said = report(lambda: run_reduce(device.twin, root), SEEDS, monkeypatch)
    assert re.search(words, said), said or "no seed found it"


# ---- clusters -----------------------------------------------------------------------------------


def run_cluster(to, root=ROOT, size=4, clusters=2):
    x = np.arange(clusters * size * 64, dtype=np.uint32).reshape(clusters, size, 64)
    out = to(np.zeros_like(x))
    jit.kernel("cluster.cu", "cluster", root=root).launch(
        clusters * size,
        64,
        {"x": to(x), "out": out},
        like=out,
        shared_bytes=size * 256 + 8,
        cluster=size,
    )
    said = x + (np.arange(size, dtype=np.uint32)[:, None] - 1) % np.uint32(size)
    wanted = said.sum(axis=1, keepdims=True, dtype=np.uint32) + 1000 * np.roll(x, -1, axis=1)
    return to_numpy(out), wanted.astype(np.uint32)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size, clusters", [(1, 3), (2, 3), (4, 2), (8, 1)])
def test_ctas_of_a_cluster_share_their_memory(to_kernels, size, clusters, seed):
    with jit.twin_seed(seed):
        got, wanted = run_cluster(to_kernels, size=size, clusters=clusters)
    np.testing.assert_array_equal(got, wanted)


def test_a_cluster_divides_the_grid(to_kernels):
    x = to_kernels(np.zeros((6, 64), np.uint32))
    made = jit.kernel("cluster.cu", "cluster", root=ROOT)
    for grid, cluster in ((6, 4), (6, 0), (18, 9)):
        with pytest.raises(ValueError, match=f"cluster: clusters of {cluster} CTAs in a grid"):
            made.launch(grid, 64, {"x": x, "out": x}, like=x, cluster=cluster)


BETWEEN = rf"a race in shared memory: {ACCESS % 'cluster'} and {ACCESS % 'cluster'}"
CLUSTER_FAULTS = {
    "no first barrier": (
        "cluster_sync();  // rows and barriers are there",
        "__syncthreads();",
        rf"{BETWEEN}|no mbarrier was initialized",
    ),
    "waits for its own CTA only": (
        "mbarrier_wait_cluster(full, 0);",
        "mbarrier_wait(full, 0);",
        rf"{BETWEEN}, 4 bytes at dynamic offset",
    ),
    "says it before all have written": (
        "__syncthreads();  // the CTA has written",
        "",
        BETWEEN,
    ),
    "no last barrier": (
        "cluster_arrive();  // the CTA has read\n  cluster_wait();",
        "",
        "of block . which has ended|of rank . has ended|of block .,0,0, which has ended",
    ),
    "rank beyond the cluster": (
        "next = (rank + 1) % cluster_size()",
        "next = rank + 1",
        "map_shared: rank 4 of a cluster of 4 CTAs",
    ),
    "an arrival too few": (
        "mbarrier_init(full, cluster_size())",
        "mbarrier_init(full, cluster_size() + 1)",
        r"hangs: .*mbarrier_wait_cluster of parity 0 at shared \+ 1024 \(1 of 5 arrivals missing",
    ),
    "comes to the barrier once more": (
        "cluster_wait();",
        "cluster_arrive();",
        "the thread came before and did not wait",
    ),
    "one thread does not come": (
        "cluster_arrive();  // the CTA has read",
        "if (rank + j == 0) {\n    while (true) __nanosleep(1);\n  }\n  cluster_arrive();",
        r"hangs: .*cluster_wait \(255 of 256 threads came\)",
    ),
    "another's memory beyond its end": (
        "map_shared(inbox, there)[rank * kRow + j]",
        "map_shared(inbox, there)[(rank + 1) * kRow + j]",
        r"a race in shared|an access of 4 bytes at offset \d+ of the shared memory of block|offset",
    ),
}


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("fault", CLUSTER_FAULTS)
def test_twin_reports_faults_of_a_cluster(tmp_path, monkeypatch, fault):
    old, new, words = CLUSTER_FAULTS[fault]
    root = mutate(tmp_path, "cluster.cu", old, new)
    said = report(lambda: run_cluster(device.twin, root), SEEDS, monkeypatch)
    assert re.search(words, said, re.DOTALL), said or "no seed found it"


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
    said = report(lambda: run_groups(device.twin, root), SEEDS, monkeypatch)
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
    assert report(lambda: run_copies(device.twin, root), SEEDS, monkeypatch), "no seed found it"


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
