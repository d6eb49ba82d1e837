"""Attention by warpgroups of sm_90a: edges of blocks and tiles, masks, layouts and turns."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import assert_close, poisoned, to_numpy
from graph_nodes import node_names, repeated
from test_attention import exact, make

from cufuse import device, jit, ops, tiles
from cufuse.device import bfloat16
from cufuse.ops import _attention_sm90
from cufuse.ops._attention_sm90 import AttentionTile

KERNEL = "attention_warpgroups"
FREE = AttentionTile(2, 64, 2, "free", 1000, 1000)
TURNS = AttentionTile(3, 64, 2, "fixed", 1000, 1000)


@pytest.fixture
def by_warpgroups(monkeypatch):
    """Let the twin have sm_90a, and take one tile or what is chosen."""

    def take(tile=None, ctas=3):
        monkeypatch.setattr(tiles, "TWIN", tiles.Target("90a", ctas, 227 * 1024))
        if tile is not None:
            monkeypatch.setattr(_attention_sm90, "choose", lambda *_: tile)

    return take


def run(to, q, k, v, kernel=KERNEL, **options):
    """Attend on views of a cache, as models have it, and see which kernel does."""
    moved = {n: to(o) if isinstance(o, np.ndarray) else o for n, o in options.items()}
    out = poisoned(q.shape, q.dtype, to)
    caches = [to(x.transpose(0, 2, 1, 3).copy()).transpose(0, 2, 1, 3) for x in (k, v)]
    with jit.record() as made:
        ops.attention(to(q), *caches, **moved, out=out)
    assert [launch.kernel for launch in made.launches] == [kernel]
    return out


def check(q, k, v, **options):
    got = run(device.twin, q, k, v, **options)
    assert_close(got, exact(q, k, v, **options), q.dtype)
    return got


@pytest.mark.parametrize("dtype", [np.float16, bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 200, 256])
@pytest.mark.cpu_kernels
def test_any_head_matches_float64(by_warpgroups, rng, head_dim, dtype):
    by_warpgroups()
    check(*make(rng, dtype, 1, 140, 150, 2, 1, head_dim))


@pytest.mark.parametrize("tile", [FREE, TURNS], ids=["free", "turns"])
@pytest.mark.parametrize("q_len, kv_len", [(16, 16), (33, 40), (130, 130), (200, 463)])
@pytest.mark.cpu_kernels
def test_tails_of_queries_and_keys(by_warpgroups, rng, tile, q_len, kv_len):
    by_warpgroups(tile)
    q, k, v = make(rng, bfloat16, 2, q_len, kv_len, 2, 2, 64)
    check(q, k, v)
    check(q, k, v, causal=False)


@pytest.mark.parametrize("tile", [FREE, TURNS], ids=["free", "turns"])
@pytest.mark.cpu_kernels
def test_starts_lengths_and_windows(by_warpgroups, rng, tile):
    by_warpgroups(tile)
    q, k, v = make(rng, bfloat16, 3, 150, 400, 2, 1, 64)
    start = np.array([0, 250, 77], np.int32)
    check(q, k, v, start=start)
    check(q, k, v, start=start, lengths=np.array([20, 300, 400], np.int32))
    for window in (1, 17, 64, 200):
        check(q, k, v, start=start, window=window)
    lengths = np.array([30, 260, 0], np.int32)
    check(q, k, v, start=start, lengths=lengths, window=40)
    check(q, k, v, lengths=lengths, causal=False)


@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("tile", [FREE, TURNS], ids=["free", "turns"])
@pytest.mark.cpu_kernels
def test_what_no_query_sees_may_be_nan(by_warpgroups, rng, tile, window):
    by_warpgroups(tile)
    q, k, v = make(rng, bfloat16, 2, 24, 330, 2, 1, 64)
    start, lengths = np.array([66, 100], np.int32), np.array([80, 300], np.int32)
    for options in ({"start": start}, {"start": start, "lengths": lengths}):
        keys, values = k.copy(), v.copy()
        for b, first in enumerate(start):
            last = first + 24
            if "lengths" in options:
                last = min(last, lengths[b])
            for x in (keys, values):
                x[b, last:] = np.nan
                if window:
                    x[b, : max(first + 1 - window, 0)] = np.nan
        wanted = exact(q, k, v, window=window, **options)
        got = run(device.twin, q, keys, values, window=window, **options)
        assert_close(got, wanted, bfloat16)


@pytest.mark.cpu_kernels
def test_scale_softcap_and_sinks(by_warpgroups, rng):
    by_warpgroups()
    q, k, v = make(rng, np.float16, 1, 70, 200, 6, 2, 64)
    sinks = rng.standard_normal(6).astype(np.float16) * np.float16(3)
    for options in ({"scale": 0.7}, {"scale": -0.2}, {"softcap": 2.0}, {"sinks": sinks}):
        check(q, k, v, **options)
    check(q, k, v, scale=0.7, softcap=2.0, sinks=sinks, window=66)


@pytest.mark.parametrize("tile", [FREE, TURNS], ids=["free", "turns"])
@pytest.mark.cpu_kernels
def test_growing_logits_rescale_what_is_there(by_warpgroups, rng, tile):
    by_warpgroups(tile)
    q, k, v = make(rng, bfloat16, 1, 130, 300, 1, 1, 64)
    # Keys are walked over from the last to the first: each block's logits dwarf the last ones'.
    k *= np.linspace(40, 0.1, 300)[None, :, None, None].astype(bfloat16)
    check(q, k, v)
    got = to_numpy(run(device.twin, q, k, v, scale=1000.0)).astype(np.float32)
    assert np.isfinite(got).all()


@pytest.mark.cpu_kernels
def test_queries_that_see_nothing_get_zeros(by_warpgroups, rng):
    by_warpgroups(TURNS)
    q, k, v = make(rng, bfloat16, 2, 200, 150, 2, 1, 64)
    sinks = np.zeros(2, bfloat16)
    start, lengths = np.array([-150, 0], np.int32), np.array([150, 0], np.int32)
    for options in ({}, {"sinks": sinks}):
        got = to_numpy(check(q, k, v, start=start, lengths=lengths, **options))
        assert (got[0, :150] == 0).all() and (got[1] == 0).all()
        assert (got[0, 150:] != 0).any()


@pytest.mark.parametrize("tile", [FREE, TURNS], ids=["free", "turns"])
@pytest.mark.cpu_kernels
def test_no_order_of_copies_changes_a_bit(by_warpgroups, rng, tile):
    by_warpgroups(tile)
    inputs = make(rng, bfloat16, 1, 300, 300, 2, 1, 64)
    results = set()
    for seed in range(4):
        with jit.twin_seed(seed):
            results.add(run(device.twin, *inputs).tobytes())
    assert len(results) == 1


@pytest.mark.cpu_kernels
def test_a_row_does_not_depend_on_its_neighbours(by_warpgroups, rng):
    by_warpgroups(FREE)
    q, k, v = make(rng, bfloat16, 2, 130, 130, 4, 2, 64)
    together = run(device.twin, q, k, v)
    alone = run(device.twin, q[1:], k[1:], v[1:])
    np.testing.assert_array_equal(to_numpy(alone), to_numpy(together)[1:])


@pytest.mark.cpu_kernels
def test_what_copies_cannot_reach_goes_to_warps(by_warpgroups, rng):
    by_warpgroups()
    q, k, v = make(rng, bfloat16, 1, 20, 30, 1, 1, 36)
    got = run(device.twin, q, k, v, kernel="attention_prefill")
    assert_close(got, exact(q, k, v), bfloat16)


def test_tiles_follow_the_work():
    target = tiles.Target("90a", 128, 227 * 1024)

    def queries(q_len, kv_len, only_scaled=True, head_dim=64):
        tile = _attention_sm90.choose(target, head_dim, 32, q_len, kv_len, True, only_scaled)
        return tile.queries

    assert queries(4096, 4096) == 192
    assert queries(512, 4096) == 128  # 128 tiles for 128 CTAs
    assert queries(4096, 4096, only_scaled=False) == 128
    assert _attention_sm90.choose(target, 36, 32, 512, 512, True, True) is None
    other = tiles.Target("100a", 128, 227 * 1024)
    assert _attention_sm90.choose(other, 64, 32, 512, 512, True, True) is None


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_tile_fits_and_spills_nothing(head_dim):
    for tile in _attention_sm90._TILES[next(n for n in _attention_sm90._TILES if head_dim <= n)]:
        assert tile.shared_bytes(head_dim) <= 227 * 1024
        for logits in ("scaled", "any") if tile.warpgroups == 2 else ("scaled",):
            choices = (f"Logits::{logits}", f"Turns::{tile.turns}")
            template = (head_dim, *tile.template, *choices)
            made = jit.kernel("fused/attention_sm90.cu", KERNEL, np.dtype(bfloat16), *template)
            compiled = jit.compile_offline(made, "90a")
            assert compiled.spill_bytes == 0 and not compiled.remarks


# ---- on the GPU


@pytest.fixture
def to_gpu():
    """Move arrays to the GPU; skip where it has no warpgroups."""
    import cupy

    if tiles.target_of(cupy.empty(1)).arch != "90a":
        pytest.skip("needs sm_90a")
    return cupy.asarray


def check_rows(rng, to, q, k, v, **options):
    """Compare some rows of each sequence: all would take float64 too long."""
    got = to_numpy(run(to, q, k, v, **options))
    assert np.isfinite(got.astype(np.float32)).all()
    batch, q_len, kv_len = *q.shape[:2], k.shape[1]
    causal = options.get("causal", True)
    default = np.full(batch, kv_len - q_len if causal else 0)
    start = options.pop("start", default)
    lengths = options.pop("lengths", start + q_len if causal else np.full(batch, kv_len))
    for row in np.unique([0, q_len - 1, *rng.integers(0, q_len, 12)]):
        one = q[:, row : row + 1]
        wanted = exact(one, k, v, start=start + row, lengths=lengths, **options)
        assert_close(got[:, row : row + 1], wanted, q.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [32, 64, 72, 80, 96, 112, 128, 160, 192, 256])
def test_any_head_on_the_gpu(to_gpu, rng, head_dim, dtype):
    for q_len, kv_len in ((1000, 1000), (130, 777), (2048, 2048)):
        q, k, v = make(rng, dtype, 2, q_len, kv_len, 4, 2, head_dim)
        check_rows(rng, to_gpu, q, k, v)
        check_rows(rng, to_gpu, q, k, v, causal=False)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_masks_on_the_gpu(to_gpu, rng, head_dim):
    q, k, v = make(rng, bfloat16, 3, 700, 2000, 8, 2, head_dim)
    start = np.array([0, 1300, 411], np.int32)
    lengths = np.array([500, 1900, 1111], np.int32)
    sinks = rng.standard_normal(8).astype(bfloat16)
    for options in (
        {},
        {"window": 1},
        {"window": 130},
        {"window": 1000, "lengths": lengths},
        {"softcap": 5.0},
        {"sinks": sinks, "scale": 0.3},
    ):
        check_rows(rng, to_gpu, q, k, v, start=start, **options)
    check_rows(rng, to_gpu, q, k, v, causal=False, lengths=lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_growing_logits_on_the_gpu(to_gpu, rng, head_dim, dtype):
    q, k, v = make(rng, dtype, 1, 1000, 1000, 4, 2, head_dim)
    k *= np.linspace(40, 0.1, 1000)[None, :, None, None].astype(dtype)
    check_rows(rng, to_gpu, q, k, v)
    k[:, 0] *= np.array(10, dtype)
    check_rows(rng, to_gpu, q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_that_nobody_sees_on_the_gpu(to_gpu, rng, head_dim, window):
    for q_len in (16, 500):
        q, k, v = make(rng, bfloat16, 2, q_len, 2000, 4, 2, head_dim)
        start = np.array([1000, 350], np.int32)
        wanted = exact(q, k, v, start=start, window=window)
        for b, first in enumerate(start):
            for x in (k, v):
                x[b, first + q_len :] = np.nan
                if window:
                    x[b, : first + 1 - window] = np.nan
        assert_close(run(to_gpu, q, k, v, start=start, window=window), wanted, bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "head_dim, q_len, kv_len", [(64, 512, 4096), (64, 3000, 3000), (128, 2048, 2048)]
)
def test_a_captured_attention_follows_the_start(to_gpu, rng, head_dim, q_len, kv_len):
    import cupy

    q, k, v = make(rng, bfloat16, 1, q_len, kv_len, 8, 2, head_dim)
    moved = [to_gpu(x) for x in (q, k, v)]
    out = poisoned(q.shape, bfloat16, to_gpu)
    start = to_gpu(np.array([kv_len - q_len], np.int32))
    stream = cupy.cuda.Stream(non_blocking=True)

    def work():
        ops.attention(*moved, start=start, out=out, stream=stream)

    graph, results = repeated(work, stream, out)
    assert node_names(graph.graph) == [KERNEL] and len(results) == 1
    start[...] = 0
    cupy.cuda.runtime.deviceSynchronize()
    graph.launch(stream)
    stream.synchronize()
    rows = slice(0, 40)
    wanted = exact(q[:, rows], k[:, rows], v[:, rows])
    assert_close(to_numpy(out)[:, rows], wanted, bfloat16)
