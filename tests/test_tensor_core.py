"""ldmatrix, wgmma and the packed weight tiles against NumPy; what the twin says of faults."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from conftest import DTYPES, poisoned, to_numpy

from cufuse import device, jit

ROOT = Path(__file__).parent / "twin" / "primitives"
SEEDS = range(3)


def error_limit(k):
    """What a sum over k may be off by, as a part of the sum of all |products| and the first value.

    A tensor core takes 16 exact products and the accumulator, shifts them to the largest, cuts
    them below 2^-23 of it or later, and cuts the sum to a float: at most 18 cuts an instruction.
    The twin rounds 17 times, to half of that. Random values on an H200 stay under 2^-21 for k up
    to 1024; a value in the wrong place is seen from 2^-10 on.
    """
    return -(-k // 16) * 18 * 2.0**-23


def draw(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


def assert_product(got, a, b, first=0.0):
    """Compare [m, n] with first + a [m, k] times b [n, k] transposed, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    wanted = first + a @ b.T
    scale = np.abs(first) + np.abs(a) @ np.abs(b.T)
    off = np.abs(to_numpy(got) - wanted) / scale
    limit = error_limit(a.shape[1])
    assert (off <= limit).all(), f"off by 2^{np.log2(off.max()):.1f}, limit 2^{np.log2(limit):.1f}"


# ---- ldmatrix -----------------------------------------------------------------------------------


def run_matrices(to, rng, count, transposed, root=ROOT):
    x = rng.integers(0, 2**16, (count, 8, 8)).astype(np.uint16)
    out = poisoned((32, count, 2), np.int16, to).view(np.uint16)
    made = jit.kernel("matrices.cu", "matrices", count, transposed, root=root)
    made.launch(1, 32, {"x": to(x), "out": out}, like=out, shared_bytes=1024)
    values = x.transpose(0, 2, 1) if transposed else x
    # Lane 4 r + c has columns 2 c and 2 c + 1 of row r.
    return to_numpy(out), values.reshape(count, 32, 2).transpose(1, 0, 2)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_deals_out_rows(to_kernels, rng, count, transposed):
    np.testing.assert_array_equal(*run_matrices(to_kernels, rng, count, transposed))


@pytest.mark.cpu_kernels
def test_twin_reports_a_misaligned_row_of_ldmatrix(tmp_path, rng):
    root = mutate(tmp_path, "matrices.cu", "load_matrix(r, rows", "load_matrix(r, (u32*)(rows) + 1")
    with pytest.raises(jit.KernelFault, match=r"load_matrix: .*16-byte"):
        run_matrices(device.twin, rng, 2, False, root)


# ---- wgmma --------------------------------------------------------------------------------------

# Values, n, swizzle, where a comes from, and which index of a and b runs fastest: the sample
# instantiations of wgmma.cu.
PRODUCTS = [made.template for made in jit.samples(ROOT) if made.name == "product"]


def run_product(to, rng, template, root=ROOT, k=192):
    dtype, n = template[:2]
    a, b = draw(rng, (64, k), dtype), draw(rng, (n, k), dtype)
    first = draw(rng, (64, n), np.float32)
    out = to(first.copy())
    made = jit.kernel("wgmma.cu", "product", *template, root=root)
    size = -(-n // 64) * 64 * 128 + 1024 + 64 * 128
    args = {"a": to(a), "b": to(b), "out": out, "k": k}
    made.launch(1, 128, args, like=out, shared_bytes=size)
    return out, a, b, first


@pytest.mark.parametrize("template", PRODUCTS, ids=lambda t: "-".join(map(str, t)))
def test_wgmma_multiplies(to_kernels, rng, template):
    assert_product(*run_product(to_kernels, rng, template))


@pytest.mark.parametrize("template", PRODUCTS, ids=lambda t: "-".join(map(str, t)))
def test_ptxas_lets_wgmma_run_on(template):
    made = jit.kernel("wgmma.cu", "product", *template, root=ROOT)
    assert jit.compile_offline(made, "90a").remarks == ()


def test_ptxas_remarks_on_accumulators_used_early(tmp_path):
    root = mutate(tmp_path, "wgmma.cu", COMMIT, COMMIT + "\nsums[0] *= 2.0f;")
    made = jit.kernel("wgmma.cu", "product", *PRODUCTS[0], root=root)
    assert any("GMMA" in remark for remark in jit.compile_offline(made, "90a").remarks)


def test_wgmma_elsewhere_is_refused_in_words(tmp_path):
    # 100a has all else that the kernel uses.
    made = jit.kernel("wgmma.cu", "product", *PRODUCTS[0], root=ROOT)
    with pytest.raises(jit.CompileError, match="wgmma is an instruction of sm_90a alone"):
        jit.compile_offline(made, "100a")


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("seed", SEEDS)
def test_wgmma_multiplies_in_every_order(rng, seed):
    with jit.twin_seed(seed):
        assert_product(*run_product(device.twin, rng, PRODUCTS[0], k=64))
        assert_product(*run_product(device.twin, rng, PRODUCTS[1], k=128))


# ---- packed weight tiles ------------------------------------------------------------------------


def pack(w):
    """Pack [n, k] into panels of 16 rows, tiles of 16 columns, 32 lanes, 8 values each.

    A lane of group g = lane / 4 and t = lane % 4 holds rows g and g + 8 alternately, at columns
    2 t, 2 t + 1, and then the same 8 columns on: PTX's left operand of mma.m16n8k16.
    """
    n, k = w.shape
    lane, i = np.arange(32)[:, None], np.arange(8)[None, :]
    row = lane // 4 + 8 * (i // 2 % 2)
    column = 2 * (lane % 4) + i % 2 + 8 * (i // 4)
    tiles = w.reshape(n // 16, 16, k // 16, 16).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(tiles[:, :, row, column])


def run_packed(to, rng, name, dtype, tokens, root=ROOT, panels=8, k=192):
    w, x = draw(rng, (panels * 16, k), dtype), draw(rng, (tokens, k), dtype)
    y = poisoned((tokens, panels * 16), np.float32, to)
    template = (np.dtype(dtype), tokens) if name == "packed_wgmma" else (np.dtype(dtype),)
    made = jit.kernel("packed_tiles.cu", name, *template, root=root)
    args = {"w": to(pack(w)), "x": to(x), "y": y, "k": k}
    made.launch(panels // 4, 128, args, like=y, shared_bytes=2 * tokens * 128)
    return y, x, w


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("tokens", [8, 64])
def test_packed_tiles_are_the_left_operand_of_wgmma(to_kernels, rng, tokens, dtype):
    assert_product(*run_packed(to_kernels, rng, "packed_wgmma", DTYPES[dtype], tokens))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_packed_tiles_are_the_left_operand_of_mma(to_kernels, rng, dtype):
    assert_product(*run_packed(to_kernels, rng, "packed_mma", DTYPES[dtype], 8))


# ---- faults -------------------------------------------------------------------------------------


def mutate(tmp_path, file, old, new):
    """Write a copy of a kernel with a fault."""
    text = (ROOT / file).read_text()
    assert old in text, old
    (tmp_path / file).write_text(text.replace(old, new))
    return tmp_path


def reports(run, seeds=4):
    """Return what the twin says of each seed, or by how much the result is off."""
    found = []
    for seed in range(seeds):
        with jit.twin_seed(seed):
            try:
                assert_product(*run())
            except (jit.KernelFault, AssertionError) as error:
                found.append(str(error))
    return found


WRONG = "off by|assert"
WAIT = "wgmma_wait<0>(sums);"
COMMIT = "wgmma_commit();"
FENCE = "wgmma_fence(sums);"
SHARED_FAULTS = {
    "no wait": (WAIT, "", "before wgmma_wait|in flight"),
    "a wait for too little": (WAIT, "wgmma_wait<1>(sums);", "before wgmma_wait|in flight"),
    "no commit": (COMMIT, "", "before wgmma_wait|in flight"),
    "accumulators not named": (WAIT, "wgmma_wait<0>();", "does not name the accumulators"),
    "no fence at all": (FENCE, "", "no wgmma_fence came before"),
    "accumulators written after the fence": (
        FENCE,
        FENCE + "\nsums[0] += 1.0f;",
        "accumulators were written after the last wgmma_fence",
    ),
    "a fence before the first block only": (
        FENCE,
        "if (first == 0) wgmma_fence(sums);\nsums[0] += 0.0f;",
        "accumulators were used after the last wgmma_fence",
    ),
    "accumulators read early": (
        COMMIT,
        COMMIT + "\nargs.out[0] = sums[0];",
        "accumulators are read before wgmma_wait",
    ),
    "no barrier before the next block": (
        "__syncthreads();  // the block before was read",
        "",
        "race|in flight",
    ),
    "no barrier after the stores": (
        "__syncthreads();  // the block is written",
        "",
        "race|in flight",
    ),
    "operand overwritten before the wait": (
        COMMIT,
        COMMIT + "\nb[threadIdx.x] = 0;",
        "a copy in flight was not waited for: .*product's read",
    ),
    "no proxy fence": ("fence_proxy_async();", "", "a store without fence_proxy_async"),
    "another swizzle in the descriptor": (
        "wgmma_descriptor<kSwizzle>(b",
        "wgmma_descriptor<64>(b",
        f"{WRONG}|in the midst of 8 lines",
    ),
    "no swizzle in the stores": (
        "swizzle<kSwizzle>(row % 8 * kSwizzle + k % kLine * 2)",
        "row % 8 * kSwizzle + k % kLine * 2",
        WRONG,
    ),
    "wrong stride": ("PlacedB::kStride)", "PlacedB::kStride / 2)", WRONG),
    "stride out of shared memory": (
        "PlacedB::kStride)",
        "PlacedB::kStride * 8)",
        r"row \d+ at k 0 of an operand would lie at shared",
    ),
    "wrong step": ("step * PlacedB::kStep", "step * 16", WRONG),
    "a misaligned pattern": (
        "wgmma_descriptor<kSwizzle>(b, ",
        "1ull << 49 | wgmma_descriptor<kSwizzle>(b, ",
        "b's descriptor has a base offset",
    ),
    "a matrix off its alignment": (
        "wgmma_descriptor<kSwizzle>(b, ",
        "wgmma_descriptor<kSwizzle>(b + 128, ",
        "b's descriptor starts in the midst of 8 lines",
    ),
    "garbage in the descriptor": (
        "wgmma_advance(from_b, ",
        "wgmma_advance(from_b, 1u << 18 | ",
        "",
    ),
    "a warp stays away": (
        "wgmma<T, kMajorA, kMajorB>(",
        "if (warp != 3) wgmma<T, kMajorA, kMajorB>(",
        r"hangs: .*warp 0-2: lanes \S+ waits at .*3 of 4 warps of warpgroup 0 came",
    ),
    "some lanes stay away": (
        "wgmma<T, kMajorA, kMajorB>(",
        "if (lane != 5) wgmma<T, kMajorA, kMajorB>(",
        "a lane named in the mask waits at wgmma|wgmma_commit",
    ),
    "warps name two descriptors": (
        "step_a, step_b, true",
        "step_a, step_b + warp, true",
        r"warps \d and \d of a warpgroup name different descriptors of b",
    ),
    "lanes name two descriptors": (
        "step_a, step_b, true",
        "step_a + lane / 16, step_b, true",
        "lanes of a warp name different descriptors of a",
    ),
    "warps name two flags": (
        "step_a, step_b, true",
        "step_a, step_b, warp > 0",
        r"warps \d and \d of a warpgroup name different flags",
    ),
}
REGISTER_FAULTS = {
    "wrong lane of a fragment": ("row + i % 2 * 8", "(row ^ 1) + i % 2 * 8", WRONG),
    "fragment in another order": (
        "row + i % 2 * 8, step * 16 + column + i / 2 * 8",
        "row + i / 2 * 8, step * 16 + column + i % 2 * 8",
        WRONG,
    ),
    "fragment written after the fence": (
        "wgmma_fence(sums, registers);",
        "wgmma_fence(sums, registers);\nregisters[1][2] ^= 1;",
        "a's registers were written after the last wgmma_fence",
    ),
    "fragment written before the wait": (
        COMMIT,
        COMMIT + "\nregisters[1][2] = 0;",
        "a's registers are written before wgmma_wait",
    ),
}
PACKED_FAULTS = {
    "lanes swapped": ("* 32 + lane;", "* 32 + (lane ^ 1);", WRONG),
    "registers swapped": ("= tile.y", "= tile.z", WRONG),
    "one stage for two": ("first / kBlockK % 2", "0", "race|in flight"),
}


@pytest.fixture
def few_steps(monkeypatch):
    monkeypatch.setenv("CUFUSE_TWIN_SECONDS", "20")
    monkeypatch.setenv("CUFUSE_TWIN_STEPS", "100000")


def assert_reported(words, run):
    found = reports(run)
    assert any(re.search(words, text, re.DOTALL) for text in found), found


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("fault", SHARED_FAULTS)
def test_twin_reports_faults_of_wgmma(tmp_path, few_steps, rng, fault):
    old, new, words = SHARED_FAULTS[fault]
    root = mutate(tmp_path, "wgmma.cu", old, new)
    assert_reported(words, lambda: run_product(device.twin, rng, PRODUCTS[0], root))


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("fault", REGISTER_FAULTS)
def test_twin_reports_faults_of_fragments(tmp_path, few_steps, rng, fault):
    old, new, words = REGISTER_FAULTS[fault]
    root = mutate(tmp_path, "wgmma.cu", old, new)
    assert_reported(words, lambda: run_product(device.twin, rng, PRODUCTS[1], root))


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("fault", PACKED_FAULTS)
def test_twin_reports_faults_of_packed_tiles(tmp_path, few_steps, rng, fault):
    old, new, words = PACKED_FAULTS[fault]
    root = mutate(tmp_path, "packed_tiles.cu", old, new)
    bf16 = DTYPES["bf16"]
    assert_reported(words, lambda: run_packed(device.twin, rng, "packed_wgmma", bf16, 8, root))


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("fault", ["no wait", "no commit", "operand overwritten before the wait"])
def test_results_come_late_without_the_check_too(tmp_path, monkeypatch, few_steps, rng, fault):
    monkeypatch.setenv("CUFUSE_TWIN_CHECK", "0")
    old, new, _ = SHARED_FAULTS[fault]
    root = mutate(tmp_path, "wgmma.cu", old, new)
    assert reports(lambda: run_product(device.twin, rng, PRODUCTS[0], root))
