"""Routing: both orders of softmax and top-k, ties, odd sizes, one launch."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import jit, ops, reference
from cufuse.ops.rmsnorm import Norm

ROUTERS = [("softmax_topk", False), ("softmax_topk", True), ("topk_softmax", True)]


def inputs(rng, m, dim, n_experts, dtype, scale=0.3):
    x = rng.standard_normal((m, dim)).astype(dtype)
    w = (rng.standard_normal((n_experts, dim)) * scale / dim**0.5).astype(dtype)
    b = (rng.standard_normal(n_experts) * 0.1).astype(dtype)
    return x, w, b


def check(got, x, w, b, *, k, norm=None, **options):
    """Compare with float64: the weights, and the ids where the logits are not almost tied."""
    ids, weights = (to_numpy(a) for a in got)
    assert ids.dtype == np.int32 and ids.shape == weights.shape == (len(x), k)
    rows = x.astype(np.float64)
    if norm is not None:  # rounded to the model's dtype as the op does; its own test is elsewhere
        rows = reference.rmsnorm(x, norm.weight, eps=norm.eps, rounding=norm.rounding)[0]
        rows = rows.astype(np.float64)
    bias = None if b is None else b.astype(np.float64)
    wanted_ids, wanted = reference.moe_route(rows, w.astype(np.float64), bias, k=k, **options)
    logits = reference.router_logits(rows, w.astype(np.float64), bias)
    slack = 1e-2 if norm is not None else 1e-5
    best = np.take_along_axis(logits, wanted_ids, -1)
    chosen = np.take_along_axis(logits, ids, -1)
    assert np.abs(best - chosen).max() < slack, "a chosen expert is not among the k best"
    assert all(len(set(row)) == k for row in ids.tolist())
    assert_close(weights, wanted, np.float32, factor=1 if norm is None else 1e3)
    return ids, weights


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("router", "renormalize"), ROUTERS)
@pytest.mark.parametrize(
    ("m", "dim", "n_experts", "k"), [(1, 33, 7, 3), (2, 64, 64, 8), (7, 70, 8, 2)]
)
def test_route_matches_float64(to, rng, dtype, router, renormalize, m, dim, n_experts, k):
    x, w, b = inputs(rng, m, dim, n_experts, dtype)
    options = {"k": k, "router": router, "renormalize": renormalize}
    outs = poisoned((m, k), np.int32, to), poisoned((m, k), np.float32, to)
    got = ops.moe_route(to(x), to(w), to(b), **options, out=outs)
    assert got[0] is outs[0] and got[1] is outs[1]
    check(got, x, w, b, **options)


def test_the_two_orders_and_renormalising_differ(to, rng):
    x, w, _ = inputs(rng, 5, 64, 16, np.float32)
    raw = to_numpy(ops.moe_route(to(x), to(w), k=3, renormalize=False)[1])
    assert raw.sum(-1).max() < 0.7  # else the router is saturated and nothing would differ
    divided = to_numpy(ops.moe_route(to(x), to(w), k=3)[1])
    after = to_numpy(ops.moe_route(to(x), to(w), k=3, router="topk_softmax")[1])
    np.testing.assert_allclose(divided, raw / raw.sum(-1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(after, divided, rtol=1e-5)


@pytest.mark.parametrize("m", [1, 130])
@pytest.mark.parametrize("rounding", ["cast_first", "scale_first", "one_plus"])
def test_route_normalises_on_the_way_in(to, rng, m, rounding):
    x, w, b = inputs(rng, m, 64, 24, np.float16)
    norm = Norm(rng.uniform(0.5, 1.5, 64).astype(np.float16), 1e-5, rounding)
    given = Norm(to(norm.weight), norm.eps, rounding)
    got = ops.moe_route(to(x), to(w), to(b), k=4, norm=given)
    check(got, x, w, b, k=4, norm=norm)


@pytest.mark.parametrize(("m", "dim", "n_experts", "k"), [(130, 33, 20, 20), (65, 64, 1, 1)])
def test_route_of_many_tokens(to, rng, m, dim, n_experts, k):
    x, w, b = inputs(rng, m, dim, n_experts, np.float32)
    check(ops.moe_route(to(x), to(w), to(b), k=k, renormalize=False), x, w, b, k=k,
          renormalize=False)  # fmt: skip


def test_route_over_512_experts_and_k_above_32(to, rng):
    x, w, b = inputs(rng, 2, 16, 512, np.float32, scale=1.0)
    check(ops.moe_route(to(x), to(w), to(b), k=10), x, w, b, k=10)
    x, w, b = inputs(rng, 1, 16, 70, np.float32, scale=1.0)
    check(ops.moe_route(to(x), to(w), to(b), k=70), x, w, b, k=70)


@pytest.mark.parametrize("m", [1, 66])
def test_ties_go_to_the_lower_id(to, m):
    w = np.zeros((40, 8), np.float32)
    w[[5, 33, 38], 0] = 1.0
    w[7, 0] = -0.0
    ids, weights = ops.moe_route(to(np.ones((m, 8), np.float32)), to(w), k=6)
    assert (to_numpy(ids) == [5, 33, 38, 0, 1, 2]).all()
    assert (to_numpy(weights)[:, :2] == to_numpy(weights)[:, 1:3]).all()


def test_nan_logits_come_last_and_ids_stay_in_range(to):
    x = np.ones((1, 4), np.float32)
    w = np.zeros((5, 4), np.float32)
    w[0], w[1], w[3] = np.nan, -1.0, 1.0
    ids, weights = ops.moe_route(to(x), to(w), k=5, router="topk_softmax")
    assert to_numpy(ids).tolist() == [[3, 2, 4, 1, 0]]
    assert np.isnan(to_numpy(weights)).all()


def test_a_token_routes_alike_alone_and_among_others(to_kernels, rng):
    x, w, b = inputs(rng, 66, 128, 24, np.float16)
    norm = Norm(to_kernels(rng.uniform(0.5, 1.5, 128).astype(np.float16)))
    many = ops.moe_route(to_kernels(x), to_kernels(w), to_kernels(b), k=4, norm=norm)
    for first, last in ((3, 4), (60, 66)):
        few = ops.moe_route(to_kernels(x[first:last]), to_kernels(w), to_kernels(b), k=4, norm=norm)
        for got, wanted in zip(few, many, strict=True):
            assert (to_numpy(got) == to_numpy(wanted)[first:last]).all()


def test_route_again_gives_the_same_bits(to_kernels, rng):
    x, w, b = (to_kernels(a) for a in inputs(rng, 2, 128, 40, np.float16))
    runs = []
    for seed in range(3):
        with jit.twin_seed(seed):
            runs.append([to_numpy(a).copy() for a in ops.moe_route(x, w, b, k=4)])
    for ids, weights in runs[1:]:
        assert (ids == runs[0][0]).all() and (weights == runs[0][1]).all()


@pytest.mark.parametrize("m", [1, 70])
def test_route_is_one_launch(to_kernels, rng, m):
    x, w, b = (to_kernels(a) for a in inputs(rng, m, 32, 40, np.float32))
    with jit.record(dry=True) as record:
        ops.moe_route(x, w, b, k=2)
    assert len(record.launches) == 1
    assert record.size_bytes == 4 * (m * 32 + 40 * 32 + 40 + 2 * m * 2)


def test_route_of_no_tokens_launches_nothing(to_kernels, rng):
    x, w, _ = inputs(rng, 0, 32, 8, np.float32)
    with jit.record() as record:
        ids, weights = ops.moe_route(to_kernels(x), to_kernels(w), k=2)
    assert ids.shape == weights.shape == (0, 2) and not record.launches


def test_route_of_strided_input(to, rng):
    x, w, b = inputs(rng, 6, 64, 12, np.float32)
    wide = to(np.concatenate([x, x], 1))
    got = ops.moe_route(wide[:, 64:][::-1], to(np.ascontiguousarray(w.T)).T, to(b), k=3)
    check(got, x[::-1], w, b, k=3)


def test_route_says_what_is_wrong(to, rng):
    x, w, _ = inputs(rng, 2, 16, 8, np.float32)
    with pytest.raises(ValueError, match=r"moe_route: k = 9 and there are n_experts = 8"):
        ops.moe_route(to(x), to(w), k=9)
    with pytest.raises(ValueError, match=r"w is \[n_experts dim\] = \[8, 15\] but x has dim = 16"):
        ops.moe_route(to(x), to(w[:, :15]), k=2)
    with pytest.raises(ValueError, match="router is 'sigmoid', wanted one of softmax_topk"):
        ops.moe_route(to(x), to(w), k=2, router="sigmoid")
    with pytest.raises(TypeError, match="w has dtype float16 and x has float32"):
        ops.moe_route(to(x), to(w.astype(np.float16)), k=2)
    with pytest.raises(TypeError, match=r"out\[0\] has dtype int64, wanted int32"):
        ops.moe_route(to(x), to(w), k=2, out=(to(np.zeros((2, 2), np.int64)), None))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "dim", "n_experts", "k"),
    [
        (1, 2048, 64, 8),
        (1234, 2048, 64, 8),
        (1000, 2880, 32, 4),
        (3, 2048, 128, 8),
        (130, 7168, 256, 8),
    ],
)
def test_route_of_real_shapes(rng, m, dim, n_experts, k):
    import cupy

    from cufuse import device

    x, w, b = inputs(rng, m, dim, n_experts, device.bfloat16, scale=1.0)
    norm = Norm(cupy.asarray(np.ones(dim, device.bfloat16)))
    got = ops.moe_route(cupy.asarray(x), cupy.asarray(w), cupy.asarray(b), k=k, norm=norm)
    check(got, x, w, b, k=k, norm=Norm(np.ones(dim, device.bfloat16)))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("m", [3, 70])
def test_router_logits_are_not_rounded(to, rng, dtype, m):
    x, w, b = inputs(rng, m, 64, 20, dtype, scale=1.0)
    out = poisoned((m, 20), np.float32, to)
    got = ops.router_logits(to(x), to(w), to(b), out=out)
    assert got is out
    assert_close(got, reference.router_logits(*(a.astype(np.float64) for a in (x, w, b))), "f4")


def test_router_logits_of_odd_shapes(to, rng):
    x, w, _ = inputs(rng, 2, 33, 9, np.float32)
    wanted = x.astype(np.float64) @ w.astype(np.float64).T
    assert_close(ops.router_logits(to(x), to(w)), wanted, np.float32)
    assert ops.router_logits(to(x[:0]), to(w)).shape == (0, 9)
    with pytest.raises(TypeError, match="out has dtype float16, wanted float32"):
        ops.router_logits(to(x), to(w), out=to(np.zeros((2, 9), np.float16)))


def test_step_by_step_routing_equals_the_fused_one(to_kernels, rng):
    x, w, b = (to_kernels(a) for a in inputs(rng, 5, 64, 20, np.float16))
    ids, weights = ops.moe_route(x, w, b, k=4, router="topk_softmax")
    values, same = ops.topk(ops.router_logits(x, w, b), 4, normalize="softmax")
    assert (to_numpy(ids) == to_numpy(same)).all()
    np.testing.assert_allclose(to_numpy(values), to_numpy(weights), rtol=1e-6)
