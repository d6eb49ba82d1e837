"""The warp that chooses experts in a decode step: every router, ties, NaNs, odd counts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from conftest import poisoned, to_numpy
from models import CONFIGS

from cufuse import jit, reference
from cufuse.config import Config
from cufuse.engines import _decode

ROOT = Path(__file__).parent / "twin" / "primitives"

# Experts, how many a token goes to, router, renormalised, groups, best groups, corrected, scale.
ROUTERS = {
    "softmax": (8, 2, "softmax_topk", False, 1, 1, False, 1.0),
    "softmax, renormalised": (60, 4, "softmax_topk", True, 1, 1, False, 1.0),
    "softmax of many": (128, 8, "softmax_topk", True, 1, 1, False, 1.0),
    "softmax in groups": (64, 6, "softmax_topk", False, 8, 3, False, 16.0),
    "top first": (32, 4, "topk_softmax", True, 1, 1, False, 1.0),
    "one expert": (1, 1, "topk_softmax", True, 1, 1, False, 1.0),
    "all experts": (7, 7, "softmax_topk", True, 1, 1, False, 1.0),
    "sigmoid": (33, 3, "sigmoid_topk", False, 1, 1, False, 1.0),
    "sigmoid, corrected": (40, 5, "sigmoid_topk", True, 1, 1, True, 2.5),
    "sigmoid in groups": (256, 8, "sigmoid_topk", True, 8, 4, True, 2.5),
    "groups of one": (12, 3, "sigmoid_topk", True, 12, 5, True, 1.0),
    "groups of five": (35, 4, "sigmoid_topk", False, 7, 2, False, 1.0),
    "most": (1024, 8, "softmax_topk", True, 1, 1, False, 1.0),
    "most chosen": (70, 40, "sigmoid_topk", True, 2, 2, True, 1.0),
}


def config_of(name: str) -> Config:
    """A model with a router of that name."""
    n, k, router, renormalises, groups, top_groups, corrects, scale = ROUTERS[name]
    return dataclasses.replace(
        CONFIGS["mixtral"],
        name=name,
        n_experts=n,
        n_experts_per_token=k,
        router=router,
        norm_topk_prob=renormalises,
        router_groups=groups,
        router_top_groups=top_groups,
        router_correction=corrects,
        routed_scale=scale,
    )


def choose(c: Config, logits: np.ndarray, correction: np.ndarray | None, to):
    """Ids and weights [n, k] of logits [n, n_experts], in ascending ids."""
    k = c.n_experts_per_token
    ids = poisoned((len(logits), k), np.int32, to)
    weights = poisoned((len(logits), k), np.float32, to)
    args = {
        "logits": to(logits),
        "correction": None if correction is None else to(correction),
        "ids": ids,
        "weights": weights,
        "n": len(logits),
        "scale": c.routed_scale,
    }
    kernel = jit.kernel("route.cu", "route", _decode._mlp(c), root=ROOT)
    kernel.launch(3, 32, args, like=ids, shared_bytes=8 * k + 64)
    return to_numpy(ids), to_numpy(weights)


def wanted_of(c: Config, logits: np.ndarray, correction: np.ndarray | None):
    """What the reference chooses, in ascending ids."""
    ids, weights = reference.moe_route(
        logits.astype(np.float64),
        np.eye(c.n_experts),
        k=c.n_experts_per_token,
        router=c.router,
        renormalize=c.norm_topk_prob,
        correction=None if correction is None else correction.astype(np.float64),
        groups=c.router_groups,
        top_groups=c.router_top_groups,
        scale=c.routed_scale,
    )
    order = np.argsort(ids, axis=-1)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(weights, order, -1)


def correction_of(c: Config, rng: np.random.Generator) -> np.ndarray | None:
    return rng.uniform(-0.3, 0.3, c.n_experts).astype(np.float32) if c.router_correction else None


@pytest.mark.parametrize("name", ROUTERS)
def test_a_warp_chooses_as_the_reference(to_kernels, rng, name):
    c = config_of(name)
    correction = correction_of(c, rng)
    logits = rng.standard_normal((40, c.n_experts)).astype(np.float32) * np.float32(1.5)
    ids, weights = choose(c, logits, correction, to_kernels)
    wanted_ids, wanted = wanted_of(c, logits, correction)
    # Another order of two that lie closer than float32 tells is none of the reference's concern.
    alike = (ids == wanted_ids).all(axis=-1)
    assert alike.sum() >= 38
    np.testing.assert_allclose(weights[alike], wanted[alike], rtol=2e-5)
    assert (np.diff(ids, axis=-1) > 0).all() and ids.min() >= 0 and ids.max() < c.n_experts


@pytest.mark.parametrize("name", ROUTERS)
def test_ties_go_to_the_lower_id(to_kernels, name):
    """Of experts, and of groups."""
    c = config_of(name)
    correction = np.zeros(c.n_experts, np.float32) if c.router_correction else None
    rows = np.zeros((3, c.n_experts), np.float32)
    rows[1] = -0.0
    rows[2, c.n_experts // 2 :] = 1.0
    ids, weights = choose(c, rows, correction, to_kernels)
    wanted_ids, wanted = wanted_of(c, rows, correction)
    assert ids.tolist() == wanted_ids.tolist()
    np.testing.assert_allclose(weights, wanted, rtol=2e-5)
    assert ids[0].tolist() == ids[1].tolist() == list(range(c.n_experts_per_token))


@pytest.mark.parametrize("name", ROUTERS)
def test_logits_of_nan_leave_ids_in_range_and_distinct(to_kernels, rng, name):
    c = config_of(name)
    correction = correction_of(c, rng)
    rows = rng.standard_normal((8, c.n_experts)).astype(np.float32)
    rows[0] = np.nan
    rows[1] = -np.nan
    rows[2] = np.inf
    rows[3] = -np.inf
    rows[4, ::2] = np.nan
    rows[5, 1::2] = -np.inf
    rows[6, rng.integers(0, c.n_experts)] = np.nan
    rows[7, rng.integers(0, c.n_experts)] = np.inf
    ids, _ = choose(c, rows, correction, to_kernels)
    assert (np.diff(ids, axis=-1) > 0).all() and ids.min() >= 0 and ids.max() < c.n_experts
    assert ids[0].tolist() == ids[1].tolist() == list(range(c.n_experts_per_token))
    # A NaN is smaller than everything: chosen only when nothing else is left.
    if c.router_groups == 1:
        others = np.isfinite(rows[4]).sum()
        chosen = np.isfinite(rows[4][ids[4]]).sum()
        assert chosen == min(others, c.n_experts_per_token)


def test_a_weight_does_not_have_the_correction(to_kernels):
    c = config_of("sigmoid, corrected")
    correction = np.zeros(c.n_experts, np.float32)
    correction[[3, 39]] = 100.0
    logits = np.full((1, c.n_experts), 1.0, np.float32)
    logits[0, 3] = -2.0
    ids, weights = choose(c, logits, correction, to_kernels)
    assert {3, 39} < set(ids[0].tolist())
    scores = 1 / (1 + np.exp(-logits[0, ids[0]].astype(np.float64)))
    np.testing.assert_allclose(weights[0], c.routed_scale * scores / scores.sum(), rtol=1e-5)
