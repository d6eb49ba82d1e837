"""Routing: softmax and top-k in both orders, sigmoids, groups, ties, odd sizes, one launch."""

from __future__ import annotations

import math

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


def best_first(values, ids):
    """Sort ids by their values, the largest first; NaN comes last, of ties the lower id first."""
    return sorted(ids, key=lambda i: (math.isnan(values[i]), -np.nan_to_num(values[i], nan=0.0), i))


def sigmoid(v):
    return 1 / (1 + math.exp(-v)) if v > -700 else 0.0 if v == v else math.nan


def choose(logits, k, *, router, correction=None, groups=1, top_groups=1, **_):
    """Return the ids that a token goes to, those it might go to, and what is chosen by."""
    n, two = len(logits), router == "sigmoid_topk"
    by = [sigmoid(v) + (0 if correction is None else correction[i]) for i, v in enumerate(logits)]
    by = by if two else list(logits)
    members = [range(g, g + n // groups) for g in range(0, n, n // groups)]
    marks = [sum(by[i] for i in best_first(by, ids)[: 1 + two]) for ids in members]
    allowed = [i for g in best_first(marks, range(groups))[:top_groups] for i in members[g]]
    return best_first(by, allowed)[:k], allowed, by


def weigh(logits, ids, *, router, renormalize=True, scale=1.0, **_):
    """Return the weights of the chosen."""
    most = max(logits)
    every = [sigmoid(v) if router == "sigmoid_topk" else math.exp(v - most) for v in logits]
    weights = [every[i] for i in ids]
    if renormalize or router == "topk_softmax":
        total = sum(weights) + 1e-20
    else:
        total = sum(every) if router == "softmax_topk" else 1.0
    return [scale * weight / total for weight in weights]


def routed(to, logits, k, **options):
    """Give moe_route logits as they are; returns ids and weights."""
    logits = np.asarray(logits, np.float32)
    if options.get("correction") is not None:
        options["correction"] = to(np.asarray(options["correction"], np.float32))
    x, w = np.zeros((1, 4), np.float32), np.zeros((len(logits), 4), np.float32)
    outs = poisoned((1, k), np.int32, to), poisoned((1, k), np.float32, to)
    ids, weights = ops.moe_route(to(x), to(w), to(logits), k=k, out=outs, **options)
    return to_numpy(ids)[0], to_numpy(weights)[0]


SIGMOID, V2 = {"router": "sigmoid_topk"}, {"router": "softmax_topk", "renormalize": False}
CHOICES = {  # n_experts, k, options
    "one": (1, 1, SIGMOID),
    "one in one group": (1, 1, {**SIGMOID, "renormalize": False, "scale": 0.5}),
    "groups of one": (8, 3, {**SIGMOID, "groups": 8, "top_groups": 3}),
    "all": (8, 8, {**SIGMOID, "groups": 2, "top_groups": 2}),
    "v2": (60, 6, {**V2, "groups": 6, "top_groups": 2, "scale": 16.0}),
    "odd groups": (60, 4, {**SIGMOID, "groups": 4, "top_groups": 1}),
    "renormalised": (64, 7, {"router": "softmax_topk", "groups": 8, "top_groups": 4}),
    "scaled": (128, 2, {"router": "topk_softmax", "scale": 3.0}),
    "raw": (128, 5, {**SIGMOID, "renormalize": False}),
    "v3": (256, 8, {**SIGMOID, "groups": 8, "top_groups": 4, "scale": 2.5}),
    "many groups": (256, 8, {**SIGMOID, "groups": 64, "top_groups": 40}),
}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(("n", "k", "options"), CHOICES.values(), ids=CHOICES)
def test_route_matches_loops(to, rng, n, k, options, corrected):
    logits = (rng.standard_normal(n) * 1.5).astype(np.float32)
    if corrected and options["router"] == "sigmoid_topk":
        options = {**options, "correction": rng.uniform(-0.7, 0.3, n).astype(np.float32)}
    wanted, allowed, by = choose(logits.tolist(), k, **options)
    ids, weights = routed(to, logits, k, **options)
    assert len(set(ids.tolist())) == k and set(ids.tolist()) <= set(allowed)
    # Choices that round to one float32 may change places.
    np.testing.assert_allclose(np.array(by)[ids], np.array(by)[wanted], rtol=0, atol=1e-6)
    np.testing.assert_allclose(weights, weigh(logits.tolist(), ids, **options), rtol=2e-6)


@pytest.mark.parametrize(("n", "k", "options"), CHOICES.values(), ids=CHOICES)
def test_ties_of_experts_and_groups_go_to_the_lower_id(to, rng, n, k, options):
    logits = rng.choice([0.5, 1.0, 2.0], n)
    wanted, _, _ = choose(logits.tolist(), k, **options)
    assert routed(to, logits, k, **options)[0].tolist() == wanted


@pytest.mark.parametrize(("n", "k", "options"), CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("strange", [[math.nan], [math.nan, -math.inf], [math.nan, 1.0, 2.0]])
def test_nan_keeps_ids_distinct_and_in_their_groups(to, rng, n, k, options, strange):
    logits = rng.choice(strange, n)
    with np.errstate(invalid="ignore"):
        wanted, _, _ = choose(logits.tolist(), k, **options)
        assert routed(to, logits, k, **options)[0].tolist() == wanted


def test_sigmoids_that_are_all_zero_weigh_nothing(to):
    ids, weights = routed(to, [-200.0] * 6, 2, **SIGMOID)
    assert ids.tolist() == [0, 1] and (weights == 0).all()


def test_a_correction_chooses_and_does_not_weigh(to):
    logits, correction = [1.0, 0.0, -1.0, -2.0], [0.0, 0.0, 0.0, 5.0]
    ids, weights = routed(to, logits, 2, **SIGMOID, renormalize=False, correction=correction)
    assert ids.tolist() == [3, 0]
    np.testing.assert_allclose(weights, [sigmoid(-2.0), sigmoid(1.0)], rtol=1e-6)


def test_groups_leave_out_better_experts(to):
    logits = [3.0, -9.0, 1.0, 0.9, 0.8, 0.7]  # the best expert's group has no second one
    two = {"groups": 3, "top_groups": 1}
    assert routed(to, logits, 2, **SIGMOID, **two)[0].tolist() == [2, 3]
    assert routed(to, logits, 2, **V2, **two)[0].tolist() == [0, 1]


def test_a_nan_of_a_kept_group_comes_before_what_is_left_out(to):
    logits = [0.5, 0.5, 0.5, 2.0, math.nan, -math.inf]
    two = {"groups": 2, "top_groups": 1}
    assert routed(to, logits, 3, **V2, **two)[0].tolist() == [3, 5, 4]
    _, ids = ops.topk(to(np.array([logits], np.float32)), 3, **two)
    assert to_numpy(ids)[0].tolist() == [3, 5, 4]


@pytest.mark.parametrize("m", [5, 66])
def test_groups_of_many_tokens(to, rng, m):
    x, w, b = inputs(rng, m, 64, 32, np.float16, scale=1.0)
    correction = rng.uniform(-0.2, 0.2, 32).astype(np.float32)
    options = {**SIGMOID, "groups": 4, "top_groups": 2, "scale": 2.5}
    got = ops.moe_route(to(x), to(w), to(b), k=4, correction=to(correction), **options)
    ids, weights = (to_numpy(a) for a in got)
    logits = reference.router_logits(*(a.astype(np.float64) for a in (x, w, b)))
    for row, chosen, weight in zip(logits.tolist(), ids, weights, strict=True):
        wanted, _, by = choose(row, 4, correction=correction.tolist(), **options)
        np.testing.assert_allclose(np.array(by)[chosen], np.array(by)[wanted], atol=1e-5)
        np.testing.assert_allclose(weight, weigh(row, chosen, **options), rtol=1e-4)


def test_groups_and_corrections_say_what_is_wrong(to, rng):
    x, w, _ = inputs(rng, 2, 16, 8, np.float32)
    correction = to(np.zeros(8, np.float32))

    def fails(text, error=ValueError, **options):
        with pytest.raises(error, match=text):
            ops.moe_route(to(x), to(w), **{"k": 2, **SIGMOID, **options})

    fails("n_experts = 8 is not a multiple of groups = 3", groups=3)
    fails("top_groups = 3 and there are groups = 2", groups=2, top_groups=3)
    fails("k = 3 and 1 groups of 2 have too few to choose from", k=3, groups=4)
    fails("groups is 0, wanted at least 1", groups=0)
    fails('"topk_softmax" has no groups and groups is 2', router="topk_softmax", groups=2)
    fails('correction is for "sigmoid_topk" and router is "softmax_topk"', router="softmax_topk",
          correction=correction)  # fmt: skip
    fails(r"correction is \[n_experts\] = \[7\]", correction=correction[:7])
    fails("correction has dtype float16", TypeError, correction=to(np.zeros(8, np.float16)))


@pytest.mark.parametrize(("n", "k", "options"), CHOICES.values(), ids=CHOICES)
def test_grouped_topk_equals_the_fused_choice(to_kernels, rng, n, k, options):
    x, w, b = (to_kernels(a) for a in inputs(rng, 5, 64, n, np.float32, scale=2.0))
    ids, weights = ops.moe_route(x, w, b, k=k, **options)
    logits, sigmoids = ops.router_logits(x, w, b), options["router"] == "sigmoid_topk"
    values = ops.activation(logits, "sigmoid") if sigmoids else logits
    normalize = "softmax" if not sigmoids and options.get("renormalize", True) else "none"
    source = None
    if options["router"] == "softmax_topk" and normalize == "none":
        source = ops.softmax(logits)
    if sigmoids and options.get("renormalize", True):
        normalize = "sum"
    grouped = {name: v for name, v in options.items() if name not in ("router", "renormalize")}
    best = 2 if sigmoids else 1
    got, same = ops.topk(values, k, source=source, normalize=normalize, group_best=best, **grouped)
    assert (to_numpy(ids) == to_numpy(same)).all()
    np.testing.assert_allclose(to_numpy(got), to_numpy(weights), rtol=2e-6)


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
