"""Config: what fits together, and how much there is of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from models import CONFIGS

from cufuse import config, weights

MIXTURE = CONFIGS["deepseek-moe"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n_kv_heads": 2}, "n_heads = 3 is not a multiple of n_kv_heads = 2"),
        ({"router": "hash"}, "router is 'hash', wanted one of softmax_topk, topk_softmax"),
        ({"n_experts": 0}, "shared_hidden_dim belongs to a mixture and n_experts is 0"),
        ({"n_experts_per_token": 9}, "n_experts_per_token = 9 of 8 experts, wanted 1 up to all"),
        ({"n_experts_per_token": 0}, "n_experts_per_token = 0 of 8 experts"),
        ({"gated": False}, "the experts of a mixture are gated MLPs"),
        ({"router_groups": 3}, "n_experts = 8 is not a multiple of router_groups = 3"),
        ({"router_top_groups": 5}, "router_top_groups = 5 of 4 groups, wanted 1 up to all"),
        ({"router_top_groups": 1}, "3 and 1 groups of 2 experts have too few to choose from"),
        (
            {"router": "topk_softmax", "router_correction": False},
            "router topk_softmax has no groups and router_groups is 4",
        ),
        ({"router": "softmax_topk"}, "router_correction belongs to sigmoid_topk"),
        ({"routed_scale": 0.0}, "routed_scale is 0.0, wanted a positive number"),
        ({"routed_scale": float("nan")}, "routed_scale is nan"),
        ({"shared_hidden_dim": -1}, "shared_hidden_dim or dense_hidden_dim is negative"),
        ({"shared_hidden_dim": 0, "shared_gated": True}, "shared_gated is set and shared_hidden"),
        ({"dense_hidden_dim": 0}, "dense_layers are given and dense_hidden_dim is 0"),
        ({"dense_layers": (0, 2)}, "dense layer 2 is not one of 2 layers"),
    ],
)
def test_what_does_not_fit_together(changes, text):
    with pytest.raises(ValueError, match=f"^config deepseek-moe: .*{text}"):
        dataclasses.replace(MIXTURE, **changes)


def test_layers_of_a_mixture():
    assert [MIXTURE.is_moe_layer(i) for i in range(2)] == [False, True]
    assert [MIXTURE.layer_hidden_dim(i) for i in range(2)] == [104, 40]
    dense = CONFIGS["llama"]
    assert not dense.is_moe_layer(0) and dense.layer_hidden_dim(0) == dense.hidden_dim
    last = dataclasses.replace(MIXTURE, dense_layers=(1,))
    assert last.cut(1).dense_layers == () and last.cut(2) == last


@pytest.mark.parametrize("name", [*CONFIGS, "tiny", "tiny-moe"])
def test_parameters_are_those_of_the_matrices(name):
    c = CONFIGS.get(name) or config.preset(name)
    tables = ("position_embedding", "token_type")
    shapes = {n: s for n, s in weights.shapes(c).items() if n not in tables}
    bias = ("bias", "norm", "sinks", "correction")
    wanted = sum(int(np.prod(s)) for n, s in shapes.items() if not n.endswith(bias))
    assert c.n_parameters == wanted
