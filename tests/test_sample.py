"""Sampling: the kept ids and the draws of the kernels are those of the reference, exactly."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DTYPES, poisoned, to_numpy

from cufuse import jit, ops
from cufuse.reference import sampling
from cufuse.reference.random import hash_key, hash_word


def naive_kept(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """HF's order of filters in float64 and plain loops."""
    v = np.asarray(logits, np.float64) / temperature
    order = sorted(range(len(v)), key=lambda i: (-v[i], i))
    order = order[:top_k] if top_k else order
    p = np.exp(v[order] - v[order].max())
    p /= p.sum()
    if top_p < 1:
        mass, count = 0.0, 0
        while count == 0 or (mass < top_p - 1e-9 and count < len(order)):
            mass += p[count]
            count += 1
        order, p = order[:count], p[:count]
    return {i for i, probability in zip(order, p, strict=True) if probability >= min_p * p[0]}


FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 2000},
    {"top_p": 0.5},
    {"top_p": 0.97},
    {"top_p": 1e-9},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"min_p": 1e-9},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
]


def identity(options):
    return "-".join(f"{name}{value}" for name, value in options.items())


def support(logits, to, options, draws):
    """The ids that `draws` rows of the same logits bring."""
    rows = np.repeat(logits[None], draws, 0)
    return set(to_numpy(ops.sample(to(rows), **options)).tolist())


# ---- the reference ------------------------------------------------------------------------------


def test_exponential_is_the_exponential():
    z = -np.geomspace(1e-9, 87, 20000).astype(np.float32)
    wanted = np.exp(z.astype(np.float64))
    np.testing.assert_allclose(sampling.exponential(z), wanted, rtol=3e-7)
    edges = np.array([0, -0.0, -87.5, -1e30, -np.inf], np.float32)
    assert sampling.exponential(edges).tolist() == [1, 1, 0, 0, 0]


def test_gumbel_is_the_formula(rng):
    word = rng.integers(0, 2**32, 20000, dtype=np.uint32)
    edges = np.array([0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32 - 2], np.uint32)
    for w in (word, word >> np.uint32(20), edges):
        wanted = -np.log(-np.log1p(-(w | np.uint32(1)).astype(np.float64) / 2**32))
        np.testing.assert_allclose(sampling.gumbel(w), wanted, rtol=1e-6, atol=4e-7)


@pytest.mark.parametrize("options", FILTERS, ids=identity)
@pytest.mark.parametrize("n", [1, 7, 1000])
def test_reference_keeps_what_the_plain_loops_keep(rng, options, n):
    logits = (rng.standard_normal(n) * 3).astype(np.float32)
    for temperature in (0.5, 1.0, 2.0):
        got = sampling.kept(logits, temperature=temperature, **options)
        assert set(np.nonzero(got)[0]) == naive_kept(logits, temperature, **options)


def test_ties_at_a_cut_go_to_the_lower_ids():
    logits = np.array([1, 3, 2, 2, 3, 2, 2, 0], np.float32)
    assert np.nonzero(sampling.kept(logits, top_k=4))[0].tolist() == [1, 2, 3, 4]
    p = np.exp(logits.astype(np.float64))
    three = p[[1, 4, 2]].sum() / p.sum()
    assert np.nonzero(sampling.kept(logits, top_p=three - 1e-3))[0].tolist() == [1, 2, 4]
    assert np.nonzero(sampling.kept(logits, top_p=three + 1e-3))[0].tolist() == [1, 2, 3, 4]
    assert np.nonzero(sampling.kept(logits, top_k=4, top_p=0.999))[0].tolist() == [1, 2, 3, 4]


# ---- every library ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, *FILTERS], ids=identity)
@pytest.mark.parametrize("n", [1, 7, 1000])
def test_sample_draws_the_ids_of_the_reference(to_kernels, rng, options, n):
    logits = (rng.standard_normal((3, n)) * 2).astype(np.float32)
    options = {**options, "temperature": 0.8, "seed": 11}
    for step in range(2):
        wanted = ops.sample(logits, step=step, **options)
        got = ops.sample(to_kernels(logits), step=step, **options)
        np.testing.assert_array_equal(to_numpy(got), wanted)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("options", [{}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.7}], ids=identity)
def test_sample_in_every_dtype(to_kernels, rng, dtype, options):
    logits = (rng.standard_normal((2, 4000)) * 4 - 6).astype(dtype)
    out = poisoned((2,), np.int32, to_kernels)
    for step in range(2):
        wanted = ops.sample(logits, step=step, seed=2**64 - 1, **options)
        got = ops.sample(to_kernels(logits), step=step, seed=2**64 - 1, out=out, **options)
        assert got is out
        np.testing.assert_array_equal(to_numpy(got), wanted)


@pytest.mark.parametrize("options", FILTERS[1:4] + FILTERS[-1:], ids=identity)
def test_sample_of_ties_at_every_cut(to_kernels, rng, options):
    logits = rng.integers(-2, 2, (4, 300)).astype(np.float16)
    for step in range(3):
        wanted = ops.sample(logits, step=step, **options)
        got = ops.sample(to_kernels(logits), step=step, **options)
        np.testing.assert_array_equal(to_numpy(got), wanted)
        for row, token in zip(logits, wanted, strict=True):
            assert token in naive_kept(row, **options)


@pytest.mark.parametrize("top_k", [0, 29000])
@pytest.mark.parametrize("top_p", [0.4, 0.6, 0.9, 0.999])
def test_top_p_keeps_what_is_unlikely_if_it_has_to(to_kernels, rng, top_p, top_k):
    # Each is below e^-10 of the likeliest, which has half of the mass; at top-k's cut are ties.
    logits = rng.integers(-42, -40, (16, 30000)).astype(np.float32) / 4
    logits[:, rng.integers(30000)] = 0
    options = {"top_p": top_p, "top_k": top_k, "seed": int(rng.integers(2**63))}
    counts = [int(sampling.kept(row, top_p=top_p, top_k=top_k).sum()) for row in logits]
    assert max(counts) == 1 if top_p == 0.4 else min(counts) > 1000
    wanted = ops.sample(logits, **options)
    np.testing.assert_array_equal(to_numpy(ops.sample(to_kernels(logits), **options)), wanted)


def test_kernels_draw_the_whole_support_and_nothing_else(to_kernels, rng):
    logits = rng.integers(0, 3, 24).astype(np.float16)
    options = {"min_p": 0.2, "top_k": 11, "top_p": 0.6}
    assert support(logits, to_kernels, options, 30) <= naive_kept(logits, **options)
    options = {"top_k": 3}
    assert support(logits, to_kernels, options, 50) == naive_kept(logits, **options)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.9}], ids=identity)
def test_frequencies_of_the_reference_are_the_probabilities(rng, options):
    logits = (rng.standard_normal(12) * 1.5).astype(np.float32)
    draws, temperature = 4000, 1.3
    rows = np.repeat(logits[None], draws, 0)
    ids = ops.sample(rows, temperature=temperature, seed=int(rng.integers(2**63)), **options)
    check_frequencies(ids, logits / temperature, naive_kept(logits, temperature, **options))


@pytest.mark.parametrize(("options", "draws"), [({}, 400), ({"top_k": 3}, 100)])
def test_frequencies_of_the_kernels_are_the_probabilities(to_kernels, rng, options, draws):
    logits = (rng.standard_normal(5) * 1.5).astype(np.float32)
    steps = np.arange(draws, dtype=np.int32)
    rows = to_kernels(np.repeat(logits[None], len(steps), 0))
    seed = int(rng.integers(2**63))
    ids = to_numpy(ops.sample(rows, seed=seed, step=to_kernels(steps), **options))
    check_frequencies(ids, logits, naive_kept(logits, **options))


def check_frequencies(ids, scaled, kept):
    """Chi-square below what one fair series of draws in ten million exceeds.

    The bound is that of Laurent and Massart (2000), lemma 1.
    """
    kept = sorted(kept)
    assert set(ids.tolist()) <= set(kept)
    p = np.exp(scaled[kept].astype(np.float64))
    wanted = p / p.sum() * len(ids)
    counts = np.array([(ids == i).sum() for i in kept])
    chi_square = ((counts - wanted) ** 2 / wanted).sum()
    freedom, tail = len(kept) - 1, np.log(1e7)
    assert chi_square < freedom + 2 * np.sqrt(freedom * tail) + 2 * tail


@pytest.mark.parametrize(("i", "j"), [(0, 1), (1, 2), (3, 4), (0, 7), (127, 128), (5, 1000)])
def test_words_of_one_key_are_independent(rng, i, j):
    """Count pairs of words by their first five bits, over random keys."""
    draws, cells = 1 << 22, 1 << 10
    keys = rng.integers(2**32, size=(2, draws), dtype=np.uint32)
    a, b = (hash_word(np.uint32(id_), keys) >> np.uint32(27) for id_ in (i, j))
    counts = np.bincount(a << np.uint32(5) | b, minlength=cells)
    chi_square = ((counts - draws / cells) ** 2 / (draws / cells)).sum()
    assert abs(chi_square - cells) < 7 * np.sqrt(2 * cells)


def test_draws_over_steps_are_independent(rng):
    logits = np.zeros((1, 64), np.float32)
    ids = np.array([ops.sample(logits, step=s, seed=5)[0] for s in range(2000)])
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 5 / np.sqrt(2000)
    check_frequencies(ids, logits[0], set(range(64)))


def test_the_same_seed_draws_the_same_ids(to, rng):
    logits = to(rng.standard_normal((4, 1000)).astype(np.float32))
    first = to_numpy(ops.sample(logits, seed=1, step=3))
    assert to_numpy(ops.sample(logits, seed=1, step=3)).tolist() == first.tolist()
    assert to_numpy(ops.sample(logits, seed=2, step=3)).tolist() != first.tolist()
    assert to_numpy(ops.sample(logits, seed=1, step=4)).tolist() != first.tolist()


def test_a_row_draws_alone_as_it_draws_in_a_batch(to, rng):
    logits = rng.standard_normal((3, 1000)).astype(np.float32)
    batch = to_numpy(ops.sample(to(logits)))
    assert to_numpy(ops.sample(to(logits[:1])))[0] == batch[0]
    logits[1:] = 0
    assert to_numpy(ops.sample(to(logits)))[0] == batch[0]


def test_steps_on_the_device_are_steps(to, rng):
    logits = rng.standard_normal((3, 50)).astype(np.float32)
    steps = np.array([4, 0, 9], np.int32)
    for options in ({}, {"top_k": 9}):
        got = to_numpy(ops.sample(to(logits), step=to(steps), **options))
        for row, step in enumerate(steps):
            assert got[row] == ops.sample(logits, step=int(step), **options)[row]


def test_the_noise_is_hashed_from_seed_step_row_and_id():
    logits = np.zeros((3, 40), np.float32)
    ids = ops.sample(logits, seed=7, step=5)
    for row in range(3):
        words = hash_word(np.arange(40, dtype=np.uint32), hash_key(7, 5, row))
        assert ids[row] == sampling.gumbel(words).argmax()


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-12}, {"top_p": 0}, {"min_p": 1}]
)
def test_the_greediest_options_are_argmax(to, rng, options):
    logits = to(rng.standard_normal((4, 700)).astype(np.float32))
    got, wanted = ops.sample(logits, **options), ops.argmax(logits)
    np.testing.assert_array_equal(to_numpy(got), to_numpy(wanted))


@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_p": 0.9, "min_p": 0.01}])
def test_extreme_logits(to, options):
    logits = np.zeros((7, 600), np.float32)
    logits[0, 3] = np.nan
    logits[1] = -np.inf
    logits[2] = -np.inf
    logits[2, 599] = -3e38
    logits[3, 17] = np.inf
    logits[4] = -1e30
    logits[4, 18] = 1e30
    logits[5] = 3e38
    logits[6] = -np.inf
    logits[6, [4, 400]] = [-80, 20]
    got = to_numpy(ops.sample(to(logits), temperature=0.5, **options)).tolist()
    assert got[:5] == [-1, -1, 599, 17, 18]
    assert 0 <= got[5] < 600 and got[6] == 400


def test_sample_of_strided_logits(to, rng):
    logits = rng.standard_normal((12, 7)).astype(np.float32)
    wanted = ops.sample(np.ascontiguousarray(logits.T), top_k=3)
    np.testing.assert_array_equal(to_numpy(ops.sample(to(logits).T, top_k=3)), wanted)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0}])
def test_sample_counts_one_launch_and_its_bytes(to_kernels, options):
    logits = to_kernels(np.ones((2, 64), np.float16))
    with jit.record(dry=True) as record:
        ops.sample(logits, **options)
    assert len(record.launches) == 1 and record.size_bytes == logits.nbytes + 8
    with jit.record() as record:
        assert ops.sample(logits[:0], **options).shape == (0,)
    assert not record.launches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "sample: temperature is -1, wanted 0 or 1e-06 to 1e"),
        ({"temperature": float("nan")}, "sample: temperature is nan"),
        ({"top_k": -1}, "sample: top_k is -1"),
        ({"top_p": 1.5}, "sample: top_p is 1.5, wanted 0 to 1"),
        ({"min_p": -0.1}, "sample: min_p is -0.1"),
        ({"min_p": float("nan")}, "sample: min_p is nan"),
        ({"seed": -1}, "sample: seed is -1"),
        ({"step": -1}, "sample: step is -1"),
        ({"step": np.zeros(3, np.int32)}, r"sample: step is \[rows\] = \[3\] but logits has rows"),
    ],
)
def test_sample_rejects_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ops.sample(np.ones((2, 4), np.float32), **options)


def test_sample_rejects_bad_arrays():
    logits = np.ones((2, 4), np.float32)
    with pytest.raises(TypeError, match="sample: step has dtype int64, wanted int32"):
        ops.sample(logits, step=np.zeros(2, np.int64))
    with pytest.raises(TypeError, match="sample: logits has dtype float64"):
        ops.sample(logits.astype(np.float64))
    with pytest.raises(ValueError, match="sample: logits has vocab = 0"):
        ops.sample(logits[:, :0])


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [50257, 128256, 151936, 201088])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_sample_of_vocabularies(rng, vocab, dtype):
    import cupy

    logits = (rng.standard_normal((4, vocab), np.float32) * 3).astype(dtype)
    moved = cupy.asarray(logits)
    for options in [{}, *FILTERS]:
        for step in range(3):
            wanted = ops.sample(logits, step=step, temperature=0.9, **options)
            got = ops.sample(moved, step=step, temperature=0.9, **options)
            np.testing.assert_array_equal(got.get(), wanted)


@pytest.mark.gpu
def test_a_captured_graph_draws_anew(rng):
    import cupy

    logits = cupy.asarray(rng.standard_normal((2, 1000), np.float32))
    step, out = cupy.zeros(2, np.int32), cupy.zeros(2, np.int32)
    stream = cupy.cuda.Stream(non_blocking=True)
    for options in ({}, {"top_k": 50}):
        with stream:
            ops.sample(logits, step=step, out=out, **options)
            stream.begin_capture()
            ops.sample(logits, step=step, out=out, **options)
            graph = stream.end_capture()
            for number in range(5):
                step.fill(number)
                graph.launch(stream)
                wanted = ops.sample(logits.get(), step=number, **options)
                np.testing.assert_array_equal(out.get(stream=stream), wanted)
