"""Mixture of experts: which experts a token goes to, what they compute, how it is summed."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse.reference._dtype import narrow, wide
from cufuse.reference.linear import glu
from cufuse.reference.norm import rmsnorm


def topk(x: np.ndarray, k: int, *, normalize: str = "none") -> tuple[np.ndarray, np.ndarray]:
    """Return the k largest of each row and their ids, descending; ties go to the lower id.

    A NaN counts as smaller than everything. `normalize` divides the values by their "sum", or
    takes their "softmax".
    """
    ids = _descending(wide(x), k)
    values = np.take_along_axis(wide(x), ids, -1)
    if normalize == "softmax":
        values = _softmax(values)
    elif normalize == "sum":
        values = values / values.sum(-1, keepdims=True)
    return narrow(values, x), ids.astype(np.int32)


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
    norm: tuple[Any, float, str] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose k experts a token; returns (ids, weights), heaviest first, ties to the lower id.

    Softmax keeps the order, so both routers choose by logit. "softmax_topk" weighs by the softmax
    over all experts, divided by the k weights' sum if `renormalize`; "topk_softmax" by the softmax
    over the k chosen.
    """
    x = _normed(x, norm)
    logits = router_logits(x, w, b)
    ids = _descending(logits, k)
    chosen = np.take_along_axis(logits, ids, -1)
    if router == "topk_softmax":
        return ids.astype(np.int32), _softmax(chosen)
    weights = np.take_along_axis(_softmax(logits), ids, -1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return ids.astype(np.int32), weights


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


def _descending(x: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-x, -1, kind="stable")[..., :k]


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
