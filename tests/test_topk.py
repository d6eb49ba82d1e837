"""topk, expert_matmul and combine: the elementary steps of a mixture of experts."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import jit, ops, reference


@pytest.mark.parametrize(
    ("dtype", "normalize"),
    [
        (DTYPES["fp32"], "none"),
        (DTYPES["fp32"], "sum"),
        (DTYPES["fp16"], "softmax"),
        (DTYPES["bf16"], "none"),
    ],
    ids=["fp32-none", "fp32-sum", "fp16-softmax", "bf16-none"],
)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 1), (5, 70, 8), (2, 40, 40)])
def test_topk_matches_sorting(to, rng, dtype, normalize, rows, n, k):
    x = rng.uniform(0.1, 4, (rows, n)).astype(dtype)
    outs = poisoned((rows, k), dtype, to), poisoned((rows, k), np.int32, to)
    values, ids = ops.topk(to(x), k, normalize=normalize, out=outs)
    assert values is outs[0] and ids is outs[1]
    order = [sorted(range(n), key=lambda i: (-float(row[i]), i))[:k] for row in x]
    assert to_numpy(ids).tolist() == order
    wanted = np.take_along_axis(x.astype(np.float64), np.array(order), -1)
    if normalize == "softmax":
        wanted = np.exp(wanted)
    if normalize != "none":
        wanted /= wanted.sum(-1, keepdims=True)
    assert_close(values, wanted, dtype)


def test_topk_orders_ties_infinities_and_nan(to):
    row = [1, np.nan, -np.inf, 2, 2, np.inf, -0.0, 0.0, np.nan]
    values, ids = ops.topk(to(np.array([row], np.float32)), 9)
    assert to_numpy(ids).tolist() == [[5, 3, 4, 0, 6, 7, 2, 1, 8]]
    assert np.isnan(to_numpy(values)[0, 7:]).all()


def test_topk_returns_what_stands_in_the_source(to):
    x = to(np.array([[1, 4, 3, 2], [0, 0, 7, -1]], np.float32))
    source = to(np.array([[8, 5, 6, 7], [1, 2, 3, 4]], np.float32))
    values, ids = ops.topk(x, 2, source=source, scale=0.5)
    assert to_numpy(ids).tolist() == [[1, 2], [2, 0]]
    assert to_numpy(values).tolist() == [[2.5, 3.0], [1.5, 0.5]]
    values, _ = ops.topk(x, 2, source=source, normalize="sum")
    np.testing.assert_allclose(to_numpy(values), [[5 / 11, 6 / 11], [0.75, 0.25]], rtol=1e-6)


def test_topk_from_the_best_groups(to):
    x = to(np.array([[9, -9, 4, 3, 5, 1], [1, 1, 1, 1, 1, np.nan]], np.float32))
    assert to_numpy(ops.topk(x, 2, groups=3, top_groups=1)[1]).tolist() == [[0, 1], [0, 1]]
    ids = ops.topk(x, 3, groups=3, top_groups=2, group_best=2)[1]
    assert to_numpy(ids).tolist() == [[4, 2, 3], [0, 1, 2]]


def test_topk_says_what_is_wrong(to):
    with pytest.raises(ValueError, match="group_best is 3, wanted 1 or 2"):
        ops.topk(to(np.ones((1, 4), np.float32)), 1, group_best=3)
    with pytest.raises(ValueError, match="topk: n = 4 is not a multiple of groups = 3"):
        ops.topk(to(np.ones((1, 4), np.float32)), 1, groups=3)
    with pytest.raises(ValueError, match="source has no say"):
        x = to(np.ones((1, 4), np.float32))
        ops.topk(x, 1, source=x, normalize="softmax")
    with pytest.raises(ValueError, match="topk: k = 3 and there are n = 2 to choose from"):
        ops.topk(to(np.ones((1, 2), np.float32)), 3)
    with pytest.raises(ValueError, match="normalize is 'max'"):
        ops.topk(to(np.ones((1, 2), np.float32)), 1, normalize="max")
    with pytest.raises(TypeError, match="x has dtype float64"):
        ops.topk(to(np.ones((1, 2))), 1)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("per_slot", [False, True])
@pytest.mark.parametrize(("m", "k", "n", "dim"), [(1, 1, 1, 1), (3, 2, 33, 70), (5, 3, 40, 64)])
def test_expert_matmul_matches_float64(to, rng, dtype, per_slot, m, k, n, dim):
    x = rng.standard_normal((m, k, dim) if per_slot else (m, dim)).astype(dtype)
    ids = rng.integers(0, 4, (m, k)).astype(np.int32)
    w = rng.standard_normal((4, n, dim)).astype(dtype)
    b = rng.standard_normal((4, n)).astype(dtype)
    wanted = np.zeros((m, k, n))
    for t in range(m):
        for j in range(k):
            row = (x[t, j] if per_slot else x[t]).astype(np.float64)
            e = ids[t, j]
            wanted[t, j] = w[e].astype(np.float64) @ row + b[e].astype(np.float64)
    out = poisoned((m, k, n), dtype, to)
    got = ops.expert_matmul(to(x), to(ids), to(w), to(b), out=out)
    assert got is out
    assert_close(got, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (3, 4, 33), (2, 3, 2056)])
def test_combine_matches_float64(to, rng, dtype, m, k, n):
    y = rng.standard_normal((m, k, n)).astype(dtype)
    ids = np.stack([rng.permutation(9)[:k] for _ in range(m)]).astype(np.int32)
    weights = rng.uniform(0, 1, (m, k)).astype(np.float32)
    residual = rng.standard_normal((m, n)).astype(dtype)
    wanted = (y.astype(np.float64) * weights[..., None]).sum(1)
    out = poisoned((m, n), dtype, to)
    assert_close(ops.combine(to(y), to(ids), to(weights), out=out), wanted, dtype)
    total = to(residual.copy())
    ops.combine(to(y), to(ids), to(weights), total, out=total)
    assert_close(total, wanted + residual.astype(np.float64), dtype)


def test_combine_sums_in_ascending_expert_id(to):
    y = np.array([[[1e8], [1.0], [-1e8]]], np.float32)
    one = np.ones((1, 3), np.float32)
    ids = np.array([[0, 2, 1]], np.int32)
    assert to_numpy(ops.combine(to(y), to(ids), to(one))) == 1.0
    ids = np.array([[0, 1, 2]], np.int32)
    assert to_numpy(ops.combine(to(y), to(ids), to(one))) == 0.0


def test_an_id_that_is_no_expert_is_seen(to):
    x, ids = to(np.ones((2, 4), np.float32)), to(np.array([[0], [3]], np.int32))
    w = to(np.ones((3, 5, 4), np.float32))
    if isinstance(x, np.ndarray) and type(x) is np.ndarray:
        with pytest.raises(ValueError, match="ids go from 0 to 3 and there are 3 experts"):
            ops.expert_matmul(x, ids, w)
    else:
        got = to_numpy(ops.expert_matmul(x, ids, w))
        assert (got[0] == 4).all() and np.isnan(got[1]).all()


def test_strided_input_of_the_elementary_steps(to, rng):
    x = rng.standard_normal((4, 24)).astype(np.float32)
    ids = np.array([[0, 1]] * 4, np.int32)
    w = rng.standard_normal((2, 8, 12)).astype(np.float32)
    wanted = reference.expert_matmul(x[::-1, ::2], ids, w)
    got = ops.expert_matmul(to(x)[::-1, ::2], to(ids), to(np.ascontiguousarray(w.T)).T)
    assert_close(got, wanted.astype(np.float64), np.float32)
    values, _ = ops.topk(to(x)[:, 5:17], 12)
    assert (to_numpy(values) == -np.sort(-x[:, 5:17])).all()


def test_nothing_to_do_launches_nothing(to_kernels):
    def empty(shape, dtype=np.float32):
        return to_kernels(np.zeros(shape, dtype))

    ids = empty((0, 2), np.int32)
    with jit.record() as record:
        assert ops.topk(empty((0, 4)), 2)[0].shape == (0, 2)
        assert ops.expert_matmul(empty((0, 4)), ids, empty((3, 5, 4))).shape == (0, 2, 5)
        assert ops.combine(empty((0, 2, 5)), ids, empty((0, 2))).shape == (0, 5)
    assert not record.launches


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k", "n", "dim"), [(1, 8, 1024, 2048), (257, 4, 2880, 2880)])
def test_elementary_steps_of_real_shapes(m, k, n, dim):
    import cupy

    random = cupy.random.default_rng(1)
    x = (random.standard_normal((m, dim)) / dim**0.5).astype(np.float16)
    ids = cupy.argsort(random.random((m, 32)), axis=1)[:, :k].astype(np.int32)
    w = random.standard_normal((32, n, dim), dtype=np.float32).astype(np.float16)
    y = ops.expert_matmul(x, ids, w)
    wanted = cupy.stack([w[ids[:, j]] @ x[:, :, None] for j in range(k)], 1)[..., 0]
    assert_close(y, wanted.astype(np.float64).get(), np.float16, factor=3)
    total = ops.combine(y, ids, cupy.full((m, k), 0.5, np.float32))
    assert_close(total, y.astype(np.float64).sum(1).get() / 2, np.float16)
