"""What a mixture's router chose in a decode step, and float64 answers that follow it.

A router whose logits are almost tied chooses otherwise in 16 bits than in float64, and everything
behind it differs. So the oracle goes where the kernel went, and says where it should have gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import to_numpy

from cufuse import reference
from cufuse.config import Config
from cufuse.state import State

# By how much a choice has to be clear, for logits of a standard deviation of 1.
CLEAR = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1.5e-1}


def forget(state: State, n: int) -> None:
    """Overwrite what was chosen for n tokens."""
    c = state.config
    state.buffer("experts", (n, c.n_layers, c.n_experts_per_token), "int32").fill(-7)


def chosen(state: State, n: int) -> np.ndarray:
    """What n tokens of a launch chose: ids [n, layers with experts, k], in range and ascending."""
    c = state.config
    ids = to_numpy(state.buffer("experts", (n, c.n_layers, c.n_experts_per_token), "int32"))
    ids = ids[:, [c.is_moe_layer(i) for i in range(c.n_layers)]]
    assert ids.min() >= 0 and ids.max() < c.n_experts, ids
    assert (np.diff(ids, axis=-1) > 0).all(), ids
    return ids.copy()


def margins(logits: np.ndarray, k: int, options: dict[str, Any]) -> np.ndarray:
    """How far each row's logits are from another choice."""
    scores = logits
    if options["router"] == "sigmoid_topk":
        scores = 1 / (1 + np.exp(-logits))
        if options["correction"] is not None:
            scores = scores + options["correction"]
    groups, top_groups = options["groups"], options["top_groups"]
    found = np.full(len(logits), np.inf)
    if groups > 1:
        members = np.sort(scores.reshape(len(logits), groups, -1))[..., ::-1]
        best = members[..., : 2 if options["router"] == "sigmoid_topk" else 1].sum(-1)
        ranked = np.sort(best)[:, ::-1]
        if top_groups < groups:
            found = ranked[:, top_groups - 1] - ranked[:, top_groups]
        kept = np.repeat(best >= ranked[:, top_groups - 1, None], members.shape[-1], axis=-1)
        scores = np.where(kept, scores, -np.inf)
    ranked = np.sort(scores)[:, ::-1]
    if k < scores.shape[-1]:
        found = np.minimum(found, ranked[:, k - 1] - ranked[:, k])
    return found


def weigh(logits: np.ndarray, ids: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """The weights of given experts."""
    if options["router"] == "sigmoid_topk":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
    weights = np.take_along_axis(scores, ids, -1)
    if options["renormalize"] or options["router"] == "topk_softmax":
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * options["scale"]


@contextlib.contextmanager
def follows(c: Config, ids: np.ndarray, dtype: Any) -> Iterator[None]:
    """Let the reference engine send tokens to ids [n, layers with experts, k], once.

    Raises AssertionError where it would clearly have sent them elsewhere.
    """
    route, layers = reference.moe_route, iter(range(ids.shape[1]))

    def forced(x: np.ndarray, w: np.ndarray, b: Any = None, *, k: int, **options: Any) -> Any:
        if "correction" not in options:  # the gate of a shared expert
            return route(x, w, b, k=k, **options)
        its = ids[:, next(layers)]
        logits = reference.router_logits(x, w, b)
        own, _ = route(x, w, b, k=k, **options)
        clear = margins(logits, k, options) > CLEAR[np.dtype(dtype).name]
        assert np.sort(own)[clear].tolist() == its[clear].tolist()
        return its, weigh(logits, its, options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reference, "moe_route", forced)
        yield
    assert next(layers, None) is None, "a layer's experts were not asked for"
