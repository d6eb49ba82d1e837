"""Every op: what is no array is answered with a sentence that names the op and the argument."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from cufuse import ops

X, W, ROW = np.ones((3, 8), np.float32), np.ones((5, 8), np.float32), np.ones(8, np.float32)
IDS, WEIGHTS = np.zeros((3, 2), np.int32), np.ones((3, 2), np.float32)
HEADS = np.ones((2, 3, 4, 8), np.float32)  # [batch, q_len, n_heads, head_dim]
KEYS = np.ones((2, 5, 2, 8), np.float32)  # [batch, kv_len, n_kv_heads, head_dim]
TABLE, START = np.ones((16, 4), np.float32), np.zeros(2, np.int32)
EXPERTS = np.ones((4, 6, 8), np.float32)


def caches():
    return {name: np.zeros((2, 2, 16, 8), np.float32) for name in ("k_cache", "v_cache")}


# The arrays of a call that works; what else it takes is no array.
CALLS = {
    "activation": ({"x": X}, {"kind": "silu"}),
    "add": ({"x": X, "y": X}, {}),
    "add_layernorm": ({"x": X, "residual": X}, {}),
    "add_rmsnorm": ({"x": X, "residual": X}, {}),
    "append": ({"k": KEYS, "v": KEYS, "start": START, **caches()}, {}),
    "argmax": ({"x": X}, {}),
    "attention": ({"q": HEADS, "k": KEYS, "v": KEYS}, {}),
    "combine": ({"y": np.ones((3, 2, 8), np.float32), "ids": IDS, "weights": WEIGHTS}, {}),
    "embed": ({"ids": IDS, "table": W}, {}),
    "expert_matmul": ({"x": X, "ids": IDS, "w": EXPERTS}, {}),
    "gated_linear": ({"x": X, "w_gate": W, "w_up": W}, {}),
    "glu": ({"gate": X, "up": X}, {}),
    "layernorm": ({"x": X}, {}),
    "linear": ({"x": X, "w": W}, {}),
    "matmul": ({"x": X, "w": W}, {}),
    "moe": (
        {
            **{"x": X, "ids": IDS, "weights": WEIGHTS, "w_gate": EXPERTS, "w_up": EXPERTS},
            "w_down": np.ones((4, 8, 6), np.float32),
        },
        {},
    ),
    "moe_route": ({"x": X, "w": W}, {"k": 2}),
    "mul": ({"x": X, "y": X}, {}),
    "qkv_rope_append": (
        {"x": np.ones((2, 3, 8), np.float32), "w": np.ones((64, 8), np.float32)}
        | {"start": START, **caches()},
        {"n_heads": 4},
    ),
    "rmsnorm": ({"x": X}, {}),
    "rope": (
        {"x": HEADS[0], "cos": TABLE, "sin": TABLE, "positions": np.zeros(3, np.int32)},
        {},
    ),
    "rope_append": (
        {"qkv": np.ones((2, 3, 64), np.float32), "start": START, **caches()},
        {"n_heads": 4},
    ),
    "router_logits": ({"x": X, "w": W}, {}),
    "sample": ({"logits": X}, {}),
    "scores": ({"q": HEADS, "k": KEYS}, {}),
    "softmax": ({"x": X}, {}),
    "topk": ({"x": X}, {"k": 2}),
    "values": ({"p": np.ones((2, 4, 3, 5), np.float32), "v": KEYS}, {}),
}


def test_every_op_is_here():
    assert set(CALLS) == {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}


@pytest.mark.parametrize("name", CALLS)
def test_required_arrays(name):
    arrays, options = CALLS[name]
    op = getattr(ops, name)
    op(**arrays, **options)
    for missing in arrays:
        for given in (None, [1.0, 2.0], 3.0):
            sentence = f"{name}: {missing}: expected a NumPy or CuPy array, got .*; make one"
            with pytest.raises(TypeError, match=re.escape(f"{name}: {missing}: ")) as raised:
                op(**{**arrays, missing: given}, **options)
            assert re.match(sentence, str(raised.value))


@pytest.mark.parametrize("name", CALLS)
def test_wrong_stream_names_the_op(name):
    pytest.importorskip("cupy")
    arrays, options = CALLS[name]
    with pytest.raises(TypeError, match=f"^{name}: stream is a str"):
        getattr(ops, name)(**arrays, **options, stream="x")


def test_norm_has_to_be_a_norm():
    with pytest.raises(TypeError, match=r"^linear: norm is a ndarray, wanted ops.Norm"):
        ops.linear(X, W, norm=ROW)
