"""Every op: what is no array, and a number out of range, is answered with a sentence."""

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


@pytest.mark.parametrize(
    ("name", "options", "kind", "sentence"),
    [
        ("rmsnorm", {"eps": -1}, ValueError, "eps is -1, wanted at least 0"),
        ("rmsnorm", {"eps": float("nan")}, ValueError, "eps is nan, wanted at least 0"),
        ("layernorm", {"eps": None}, TypeError, "eps is None, wanted a number of at least 0"),
        ("add_rmsnorm", {"eps": "a"}, TypeError, "eps is 'a', wanted a number"),
        ("add_layernorm", {"eps": -1e-5}, ValueError, "eps is -1e-05, wanted"),
        ("linear", {"norm": ops.Norm(ROW, eps=-1)}, ValueError, "norm.eps is -1, wanted"),
        ("topk", {"k": 1.5}, TypeError, "k is 1.5, wanted an integer of at least 1"),
        ("topk", {"k": 0}, ValueError, "k is 0, wanted at least 1"),
        ("topk", {"out": X}, TypeError, "out is a ndarray, wanted a pair"),
        ("topk", {"out": (None, None, None)}, TypeError, "out is a tuple, wanted a pair"),
        ("moe_route", {"k": 1.5}, TypeError, "k is 1.5, wanted an integer"),
        ("moe_route", {"out": X}, TypeError, "out is a ndarray, wanted a pair"),
        ("rope_append", {"n_heads": 4.0}, TypeError, "n_heads is 4.0, wanted an integer"),
        ("qkv_rope_append", {"n_heads": 0}, ValueError, "n_heads is 0, wanted at least 1"),
        ("attention", {"window": 1.5}, TypeError, "window is 1.5, wanted an integer or None"),
        ("sample", {"top_k": 1.5}, TypeError, "top_k is 1.5, wanted an integer"),
        ("sample", {"top_p": None}, TypeError, "top_p is None, wanted a number"),
        ("sample", {"seed": 1.5}, TypeError, "seed is 1.5, wanted an integer"),
    ],
)
def test_options(name, options, kind, sentence):
    arrays, given = CALLS[name]
    with pytest.raises(kind, match=re.escape(f"{name}: {sentence}")):
        getattr(ops, name)(**{**arrays, **given, **options})


def test_norm_has_to_be_a_norm():
    with pytest.raises(TypeError, match=r"^linear: norm is a ndarray, wanted ops.Norm"):
        ops.linear(X, W, norm=ROW)
