"""A transformer step in plain NumPy: the specification of what the other engines compute.

It rounds to the weights' dtype where the op contract rounds; with float64 weights it is the oracle
that tests compare with.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import mxfp4, reference
from cufuse.config import Config
from cufuse.engines import _parts
from cufuse.mxfp4 import Mxfp4
from cufuse.state import State
from cufuse.weights import Layer, Weights


def step(
    weights: Weights, state: State, tokens: np.ndarray, *, all_logits: bool = False
) -> np.ndarray:
    """Append tokens [batch, q_len] and return the logits of the last position."""
    c = weights.config
    _parts.check(weights, state, tokens)
    positions = state.length + np.arange(tokens.shape[1])

    x = weights.embedding[tokens]
    if weights.position_embedding is not None:
        x = x + weights.position_embedding[positions]
    if weights.token_type is not None:
        x = x + weights.token_type[0]
    if c.norm_placement == "post":
        x = _norm(c, x, weights.embedding_norm, weights.embedding_norm_bias)

    for i, layer in enumerate(weights.layers):
        if c.norm_placement == "pre":
            h = _norm(c, x, layer.attn_norm)
            x = x + _attention(c, state, i, layer, h, positions)
            h = _norm(c, x, layer.mlp_norm)
            x = x + _mlp(c, layer, h)
        else:
            x = x + _attention(c, state, i, layer, x, positions)
            x = _norm(c, x, layer.attn_norm, layer.attn_norm_bias)
            x = x + _mlp(c, layer, x)
            x = _norm(c, x, layer.mlp_norm, layer.mlp_norm_bias)

    state.advance(tokens.shape[1])
    if not c.has_head:
        return x
    x = _norm(c, x if all_logits else x[:, -1], weights.final_norm)
    return reference.linear(x, weights.head)


def _norm(
    c: Config, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None
) -> np.ndarray:
    if c.norm == "layernorm":
        return reference.layernorm(x, weight, bias, eps=c.norm_eps)[0]
    return reference.rmsnorm(x, weight, eps=c.norm_eps, rounding=c.norm_rounding)[0]


def _attention(
    c: Config, state: State, i: int, layer: Layer, h: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """Project, norm and rotate q and k, append k and v, attend over the cache, project back."""
    batch, q_len, _ = h.shape
    qkv = reference.linear(h, layer.qkv, layer.qkv_bias)
    q, k, v = np.split(qkv, [c.q_dim, c.q_dim + c.kv_dim], axis=-1)
    if c.qk_norm == "full":
        q, k = _norm(c, q, layer.q_norm), _norm(c, k, layer.k_norm)
    q, k, v = (a.reshape(batch, q_len, -1, c.head_dim) for a in (q, k, v))
    if c.qk_norm == "head":
        q, k = _norm(c, q, layer.q_norm), _norm(c, k, layer.k_norm)
    if c.rope_theta:
        q, k = _rotate(c, state, q, positions), _rotate(c, state, k, positions)

    end = state.length + q_len
    state.k_cache[i][:, :, state.length : end] = k.transpose(0, 2, 1, 3)
    state.v_cache[i][:, :, state.length : end] = v.transpose(0, 2, 1, 3)
    a = reference.attention(
        q,
        state.keys(i)[:, :end],
        state.values(i)[:, :end],
        causal=c.causal,
        window=c.layer_window(i),
        sinks=layer.sinks,
    )
    return reference.linear(a.reshape(batch, q_len, c.q_dim), layer.out, layer.out_bias)


def _rotate(c: Config, state: State, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    batch, q_len, heads, head_dim = x.shape
    return reference.rope(
        x.reshape(batch * q_len, heads, head_dim),
        state.cos,
        state.sin,
        np.tile(positions, batch),
        interleaved=c.rope_interleaved,
    ).reshape(x.shape)


def _mlp(c: Config, layer: Layer, h: np.ndarray) -> np.ndarray:
    if layer.router is not None:
        return _experts(c, layer, h.reshape(-1, c.dim)).reshape(h.shape)
    if c.gated:
        hidden = reference.gated_linear(
            h, layer.gate, layer.up, layer.gate_bias, layer.up_bias, **_parts.gate(c)
        )
    else:
        hidden = reference.linear(h, layer.up, layer.up_bias, activation=c.activation)
    return reference.linear(hidden, layer.down, layer.down_bias)


def _experts(c: Config, layer: Layer, rows: np.ndarray) -> np.ndarray:
    """Send rows through the chosen experts, and through the shared one."""
    ids, gates = reference.moe_route(
        rows, layer.router, layer.router_bias, **_parts.routing(c, layer)
    )
    shared = None
    if layer.shared_down is not None:
        hidden = reference.gated_linear(rows, layer.shared_gate, layer.shared_up, **_parts.gate(c))
        shared = reference.linear(hidden, layer.shared_down)
        if layer.shared_router is not None:
            _, gate = reference.moe_route(rows, layer.shared_router, **_parts.SHARED_ROUTING)
            shared = (shared * gate).astype(rows.dtype)
    return reference.moe(
        rows,
        ids,
        gates,
        *_expert_matrices(layer, ids),
        residual=shared,
        **_parts.experts(c, layer),
    )


def _expert_matrices(layer: Layer, ids: np.ndarray) -> tuple[Any, Any, Any]:
    """Return gate, up and down; of 4-bit experts those in ids."""
    if not isinstance(layer.gate_up, Mxfp4):
        return layer.gate, layer.up, layer.down
    gate, up = mxfp4.dequantize(layer.gate_up, ids=ids)
    return gate, up, mxfp4.dequantize(layer.down, ids=ids)
