"""What engines share: checks, embedding, routing, attention over the cache, the last rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import device, mxfp4, ops
from cufuse.config import Config
from cufuse.device import Array
from cufuse.mxfp4 import Mxfp4
from cufuse.state import State
from cufuse.weights import Layer, Weights


def check(weights: Weights, state: State, tokens: Array) -> None:
    """Raise before anything is launched: shape and dtype of the tokens, room in the cache."""
    if tokens.ndim != 2 or tokens.shape[0] != state.batch or tokens.shape[1] < 1:
        raise ValueError(
            f"step: tokens is {list(tokens.shape)}, wanted [batch, q_len] = [{state.batch}, n]"
        )
    if tokens.dtype != np.int32:
        raise TypeError(f"step: tokens has dtype {tokens.dtype}, wanted int32")
    if device.kind(tokens) != device.kind(state.start):
        raise TypeError(
            f"step: tokens is a {device.kind(tokens)} array and the model has "
            f"{device.kind(state.start)} arrays"
        )
    if not weights.config.causal and state.length:
        raise ValueError("step: an encoder sees its whole input at once; call state.reset() first")
    state.check_room(tokens.shape[1])


def embed(weights: Weights, state: State, tokens: Array) -> Array:
    """Embed tokens: [batch, q_len, dim]; encoders add positions and token type, then norm."""
    c = weights.config
    shape = (*tokens.shape, c.dim)
    x = state.buffer("x", shape)
    post = c.norm_placement == "post"
    ops.embed(
        tokens,
        weights.embedding,
        start=state.start if weights.position_embedding is not None else None,
        position_table=weights.position_embedding,
        token_type=None if weights.token_type is None else weights.token_type[0],
        out=state.buffer("summed", shape) if post else x,
    )
    if post:
        summed = state.buffer("summed", shape)
        post_norm(c, summed, weights.embedding_norm, weights.embedding_norm_bias, x)
    return x


def post_norm(c: Config, x: Array, weight: Array, bias: Array, out: Array) -> None:
    """The norm behind a residual addition, of the model's kind."""
    if c.norm == "layernorm":
        ops.layernorm(x, weight, bias, eps=c.norm_eps, out=out)
    else:
        ops.rmsnorm(x, weight, eps=c.norm_eps, rounding=c.norm_rounding, out=out)


def routing(c: Config, layer: Layer) -> dict[str, Any]:
    """How a mixture's router chooses and weighs, as the options of `moe_route`."""
    return {
        "k": c.n_experts_per_token,
        "router": c.router,
        "renormalize": c.norm_topk_prob,
        "correction": layer.router_correction,
        "groups": c.router_groups,
        "top_groups": c.router_top_groups,
        "scale": c.routed_scale,
    }


def gate(c: Config) -> dict[str, Any]:
    """How a gate and its up become one, as the options of `gated_linear` and `moe`."""
    return {"activation": c.activation, "limit": c.swiglu_limit, "alpha": c.swiglu_alpha}


def experts(c: Config, layer: Layer) -> dict[str, Any]:
    """What experts have beside their matrices, as the options of `moe`."""
    biases = {"b_gate": layer.gate_bias, "b_up": layer.up_bias, "b_down": layer.down_bias}
    return {**biases, **gate(c)}


def expert_matrices(state: State, layer: Layer, ids: Array) -> tuple[Array, Array, Array]:
    """Return a layer's gate, up and down, row by row: 4-bit ones of the experts in ids expanded."""
    if not isinstance(layer.gate_up, Mxfp4):
        return layer.gate, layer.up, layer.down
    gate, up, down = (
        state.buffer(f"expert {name}", packed.shape)
        for name, packed in zip(
            ("gate", "up", "down"), (layer.gate_up, layer.gate_up, layer.down), strict=True
        )
    )
    mxfp4.dequantize(layer.gate_up, ids=ids, out=(gate, up))
    mxfp4.dequantize(layer.down, ids=ids, out=down)
    return gate, up, down


# The gate of a shared expert: the weight that a router of one expert gives it.
SHARED_ROUTING: dict[str, Any] = {"k": 1, "router": "sigmoid_topk", "renormalize": False}


def attention(c: Config, state: State, i: int, layer: Layer, q: Array) -> Array:
    """Attend from q [batch, q_len, n_heads, head_dim] over layer i's cache: [..., q_dim]."""
    batch, q_len = q.shape[:2]
    keys, values = state.keys(i), state.values(i)
    if not c.causal:
        keys, values = keys[:, :q_len], values[:, :q_len]
    a = ops.attention(
        q,
        keys,
        values,
        start=state.start if c.causal else None,
        causal=c.causal,
        window=c.layer_window(i),
        sinks=layer.sinks,
        out=state.buffer("attention", q.shape),
    )
    return a.reshape(batch, q_len, c.q_dim)


def last_rows(state: State, x: Array) -> Array:
    """The last position of every sequence: [batch, dim]."""
    batch, q_len, dim = x.shape
    if q_len == 1:
        return x.reshape(batch, dim)
    if batch == 1:
        return x[0, -1:]
    index = state.upload_once(
        f"last of {q_len}", np.arange(1, batch + 1, dtype=np.int32) * q_len - 1
    )
    return ops.embed(index, x.reshape(batch * q_len, dim), out=state.buffer("last", (batch, dim)))
