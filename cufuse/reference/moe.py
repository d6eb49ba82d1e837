"""Mixture of experts: which experts a token goes to, what they compute, how it is summed."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse.reference._dtype import narrow, wide
from cufuse.reference.linear import glu, sigmoid
from cufuse.reference.norm import rmsnorm

_LEAST_SUM = 1e-20  # added to the sum that weights are divided by: sigmoids may all be 0


def topk(
    x: np.ndarray,
    k: int,
    *,
    source: np.ndarray | None = None,
    normalize: str = "none",
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
    scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k largest of each row and their ids, descending; ties go to the lower id.

    A NaN counts as smaller than everything. `source` is where the values are taken from if not from
    x. `normalize` divides the values by their "sum", or takes their "softmax". With groups, the
    choice is from the top_groups best, by the sum of the group_best largest values of each.
    """
    ids = _choose(wide(x), k, groups, top_groups, group_best)
    values = np.take_along_axis(wide(x if source is None else source), ids, -1)
    if normalize == "softmax":
        values = _softmax(values)
    elif normalize == "sum":
        values = values / (values.sum(-1, keepdims=True) + _LEAST_SUM)
    return narrow(values * values.dtype.type(scale), x), ids.astype(np.int32)


def router_logits(x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
    """Return x [m, dim] times w [n_experts, dim] transposed plus b, not rounded to x's dtype."""
    logits = wide(x) @ wide(w).T
    return logits if b is None else logits + wide(b)


def moe_route(
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None = None,
    *,
    k: int,
    router: str = "softmax_topk",
    renormalize: bool = True,
    correction: np.ndarray | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    norm: tuple[Any, float, str] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose k experts a token: (ids, weights), the best choice first, ties to the lower id.

    "softmax_topk" weighs by the softmax over all experts, "topk_softmax" by the softmax over the k
    chosen; softmax keeps the order, so both choose by logit. "sigmoid_topk" weighs by the sigmoid
    and chooses by the sigmoid plus `correction`. `renormalize` divides by the k weights' sum, and
    `scale` multiplies. With groups, the choice is from the top_groups best: by their best logit, or
    the sum of their two best sigmoids, corrected.
    """
    logits = router_logits(_normed(x, norm), w, b)
    if router == "sigmoid_topk":
        scores = sigmoid(logits)
        choices = scores if correction is None else scores + wide(correction)
    else:
        scores, choices = _softmax(logits), logits
    ids = _choose(choices, k, groups, top_groups, 2 if router == "sigmoid_topk" else 1)
    if router == "topk_softmax":
        weights = _softmax(np.take_along_axis(logits, ids, -1))
    else:
        weights = np.take_along_axis(scores, ids, -1)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdims=True) + _LEAST_SUM)
    return ids.astype(np.int32), weights * weights.dtype.type(scale)


def expert_matmul(
    x: np.ndarray, ids: np.ndarray, w: np.ndarray, b: np.ndarray | None = None
) -> np.ndarray:
    """Multiply each token (or each of its slots) by the weights of the experts it goes to.

    x is [m, dim], the same for a token's slots, or [m, k, dim]; w is [n_experts, n, dim]. Returns
    [m, k, n].
    """
    m, k = ids.shape
    per_slot = x.ndim == 3
    y = np.zeros((m, k, w.shape[1]), wide(x).dtype)
    for expert in _experts(ids, w.shape[0]):
        token, slot = np.nonzero(ids == expert)
        rows = wide(x[token, slot] if per_slot else x[token])
        y[token, slot] = rows @ wide(w[expert]).T
        if b is not None:
            y[token, slot] += wide(b[expert])
    return narrow(y, x)


def combine(
    y: np.ndarray, ids: np.ndarray, weights: np.ndarray, residual: np.ndarray | None = None
) -> np.ndarray:
    """Add the k experts' outputs of each token, weighted, in ascending expert id."""
    order = np.argsort(ids, -1, kind="stable")
    v, weights = wide(y), wide(weights)
    total = np.zeros((v.shape[0], v.shape[2]), v.dtype)
    rows = np.arange(v.shape[0])
    for slot in order.T:
        total += v[rows, slot] * weights[rows, slot, None]
    return narrow(total if residual is None else total + wide(residual), y)


def moe(
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    w_gate: np.ndarray,
    w_up: np.ndarray,
    w_down: np.ndarray,
    *,
    b_gate: np.ndarray | None = None,
    b_up: np.ndarray | None = None,
    b_down: np.ndarray | None = None,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float = 1.702,
    residual: np.ndarray | None = None,
    norm: tuple[Any, float, str] | None = None,
) -> np.ndarray:
    """Send each token through its experts' gated MLPs and add them up, rounding once at the end."""
    rows = wide(_normed(x, norm))
    gate = expert_matmul(rows, ids, w_gate, b_gate)
    up = expert_matmul(rows, ids, w_up, b_up)

    hidden = glu(gate, up, activation=activation, limit=limit, alpha=alpha)
    y = combine(expert_matmul(hidden, ids, w_down, b_down), ids, weights)
    return narrow(y if residual is None else y + wide(residual), x)


def _normed(x: np.ndarray, norm: tuple[Any, float, str] | None) -> np.ndarray:
    if norm is None:
        return x
    weight, eps, rounding = norm
    return rmsnorm(x, weight, eps=eps, rounding=rounding)[0]


def _experts(ids: np.ndarray, n_experts: int) -> np.ndarray:
    chosen = np.unique(ids)
    if chosen.size and (chosen[0] < 0 or chosen[-1] >= n_experts):
        raise ValueError(
            f"ids go from {chosen[0]} to {chosen[-1]} and there are {n_experts} experts"
        )
    return chosen


def _choose(x: np.ndarray, k: int, groups: int, top_groups: int, group_best: int) -> np.ndarray:
    """Return the ids of the k largest of each row, from the groups with the best sums."""
    order = _descending(x, x.shape[-1])
    if groups > 1:
        size = x.shape[-1] // groups
        members = x.reshape(*x.shape[:-1], groups, size)
        best = np.take_along_axis(members, _descending(members, min(group_best, size)), -1)
        top = _descending(best.sum(-1), top_groups)
        chosen = (order[..., None] // size == top[..., None, :]).any(-1)
        order = np.take_along_axis(order, np.argsort(~chosen, -1, kind="stable"), -1)
    return order[..., :k]


def _descending(x: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-x, -1, kind="stable")[..., :k]


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
