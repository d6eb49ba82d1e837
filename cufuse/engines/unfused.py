"""One launch for each elementary operation, intermediates through global memory.

Elementary is what a model's description writes as one step: a product, a bias, a norm, a rotation,
an activation, a sum. Steps that come with their own scale, mask or bias are taken whole: scores
(scaled, masked), the append of keys and values, top-k with its groups and the weights it gives, an
expert's or the router's product with its bias, the clamped gate, gate and up where they are packed
together, and an encoder's embedding of token, position and type.
"""

from __future__ import annotations

import math

from cufuse import generate, ops
from cufuse.config import Config
from cufuse.device import Array
from cufuse.engines import _parts
from cufuse.pack import Packed
from cufuse.state import State
from cufuse.weights import Layer, Weights


def piece_rows(state: State) -> int:
    """Return how many tokens of each sequence go through one step; scores are the widest of all."""
    keys = state.all_keys
    return generate.piece_rows(state, state.config.n_heads * keys.shape[3] * keys.itemsize)


def step(weights: Weights, state: State, tokens: Array, *, all_logits: bool = False) -> Array:
    """Append tokens [batch, q_len] and return the logits of the last position."""
    c = weights.config
    _parts.check(weights, state, tokens)
    x = _parts.embed(weights, state, tokens)
    positions = state.positions(tokens.shape[1])
    h = state.buffer("h", x.shape)
    o = state.buffer("o", x.shape)
    for i, layer in enumerate(weights.layers):
        if c.norm_placement == "pre":
            _rmsnorm(c, x, layer.attn_norm, h)
            _attention(c, state, i, layer, h, positions, o)
            ops.add(x, o, out=x)
            _rmsnorm(c, x, layer.mlp_norm, h)
            _mlp(c, state, i, layer, h, o)
            ops.add(x, o, out=x)
        else:
            _attention(c, state, i, layer, x, positions, o)
            ops.add(x, o, out=h)
            _parts.post_norm(c, h, layer.attn_norm, layer.attn_norm_bias, x)
            _mlp(c, state, i, layer, x, o)
            ops.add(x, o, out=h)
            _parts.post_norm(c, h, layer.mlp_norm, layer.mlp_norm_bias, x)
    if c.has_head:
        rows = x if all_logits else _parts.last_rows(state, x)
        h = state.buffer("h", rows.shape)
        _rmsnorm(c, rows, weights.final_norm, h)
        logits = state.buffer("logits", (*rows.shape[:-1], c.vocab_size))
        x = ops.matmul(h, weights.head, out=logits)
    state.advance(tokens.shape[1])
    return x


def _rmsnorm(c: Config, x: Array, weight: Array, out: Array) -> None:
    ops.rmsnorm(x, weight, eps=c.norm_eps, rounding=c.norm_rounding, out=out)


def _linear(x: Array, w: Array | Packed, b: Array | None, out: Array) -> Array:
    ops.matmul(x, w, out=out)
    return _biased(out, b)


def _biased(x: Array, b: Array | None) -> Array:
    if b is not None:
        ops.add(x, b, out=x)
    return x


def _attention(
    c: Config, state: State, i: int, layer: Layer, h: Array, positions: Array, o: Array
) -> None:
    """o = the attention block of h: projections, QK-norm, RoPE, append, scores, softmax, values."""
    batch, q_len, _ = h.shape
    ends = (0, c.q_dim, c.q_dim + c.kv_dim, c.q_dim + 2 * c.kv_dim)
    q, k, v = (
        _linear(
            h,
            _rows(layer.qkv, low, high),
            None if layer.qkv_bias is None else layer.qkv_bias[low:high],
            state.buffer(name, (batch, q_len, high - low)),
        )
        for name, low, high in zip("qkv", ends[:-1], ends[1:], strict=True)
    )
    heads = (batch, q_len, c.n_heads, c.head_dim)
    kv_heads = (batch, q_len, c.n_kv_heads, c.head_dim)
    if c.qk_norm != "none":
        full = c.qk_norm == "full"
        for x, weight, shape in ((q, layer.q_norm, heads), (k, layer.k_norm, kv_heads)):
            rows = x if full else x.reshape(shape)
            _rmsnorm(c, rows, weight, rows)
    if c.rope_theta:
        for x, shape in ((q, heads), (k, kv_heads)):
            rows = x.reshape(batch * q_len, *shape[2:])
            ops.rope(
                rows, state.cos, state.sin, positions, interleaved=c.rope_interleaved, out=rows
            )
    ops.append(
        k.reshape(kv_heads),
        v.reshape(kv_heads),
        state.start,
        state.k_cache[i],
        state.v_cache[i],
    )
    keys, values = state.keys(i), state.values(i)
    if not c.causal:
        keys, values = keys[:, :q_len], values[:, :q_len]
    start = state.start if c.causal else None
    s = ops.scores(
        q.reshape(heads),
        keys,
        start,
        causal=c.causal,
        window=c.layer_window(i),
        out=state.buffer("scores", (batch, c.n_heads, q_len, keys.shape[1])),
    )
    ops.softmax(s, sinks=layer.sinks, start=start, out=s)
    a = ops.values(s, values, start=start, out=state.buffer("attention", heads))
    _linear(a.reshape(batch, q_len, c.q_dim), layer.out, layer.out_bias, o)


def _rows(w: Array | Packed, begin: int, end: int) -> Array | Packed:
    return w.rows(begin, end) if isinstance(w, Packed) else w[begin:end]


def _mlp(c: Config, state: State, i: int, layer: Layer, h: Array, o: Array) -> None:
    """o = the MLP, or the chosen experts, of h."""
    if layer.router is not None:
        _experts(c, state, layer, h, o)
        return
    shape = (*h.shape[:-1], c.layer_hidden_dim(i))
    up = state.buffer("up", shape)
    if layer.gate_up is not None:
        gate = state.buffer("gate", shape)
        ops.matmul(h, layer.gate_up, out=(gate, up))  # what is packed together is read together
        up = _glu(c, _biased(gate, layer.gate_bias), _biased(up, layer.up_bias))
    elif c.gated:
        gate = _linear(h, layer.gate, layer.gate_bias, state.buffer("gate", shape))
        up = _glu(c, gate, _linear(h, layer.up, layer.up_bias, up))
    else:
        _linear(h, layer.up, layer.up_bias, up)
        ops.activation(up, c.activation, out=up)
    _linear(up, layer.down, layer.down_bias, o)


def _glu(c: Config, gate: Array, up: Array) -> Array:
    if c.swiglu_limit is not None:
        return ops.glu(gate, up, limit=c.swiglu_limit, alpha=c.swiglu_alpha, out=gate)
    ops.activation(gate, c.activation, out=gate)
    return ops.mul(gate, up, out=gate)


def _experts(c: Config, state: State, layer: Layer, h: Array, o: Array) -> None:
    m, k = math.prod(h.shape[:-1]), c.n_experts_per_token
    rows, total = h.reshape(m, c.dim), o.reshape(m, c.dim)
    gates, ids = _route(state, rows, layer.router, layer.router_bias, **_parts.routing(c, layer))
    shape = (m, k, c.hidden_dim)
    w_gate, w_up, w_down = _parts.expert_matrices(state, layer, ids)
    gate = ops.expert_matmul(rows, ids, w_gate, layer.gate_bias, out=state.buffer("gate", shape))
    up = ops.expert_matmul(rows, ids, w_up, layer.up_bias, out=state.buffer("up", shape))
    hidden = _glu(c, gate, up)
    down = state.buffer("down", (m, k, c.dim))
    ops.expert_matmul(hidden, ids, w_down, layer.down_bias, out=down)
    ops.combine(down, ids, gates, out=total)
    if layer.shared_down is not None:
        _shared_expert(c, state, layer, rows, total)


def _shared_expert(c: Config, state: State, layer: Layer, rows: Array, total: Array) -> None:
    """Add what the shared expert makes of rows to total, both [m, dim]."""
    shape = (len(rows), c.shared_hidden_dim)
    gate = ops.matmul(rows, layer.shared_gate, out=state.buffer("gate", shape))
    up = ops.matmul(rows, layer.shared_up, out=state.buffer("up", shape))
    hidden = _glu(c, gate, up)
    shared = state.buffer("down", rows.shape)
    ops.matmul(hidden, layer.shared_down, out=shared)
    if layer.shared_router is None:
        ops.add(total, shared, out=total)
        return
    gates, ids = _route(state, rows, layer.shared_router, None, **_parts.SHARED_ROUTING)
    ops.combine(shared.reshape(len(rows), 1, c.dim), ids, gates, total, out=total)


def _route(
    state: State,
    rows: Array,
    w: Array,
    b: Array | None,
    *,
    k: int,
    router: str,
    renormalize: bool,
    correction: Array | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Array, Array]:
    """The weights and ids that `ops.moe_route` gives, step by step."""
    m, n_experts = len(rows), len(w)
    scores = state.buffer("router", (m, n_experts), "float32")
    ops.router_logits(rows, w, b, out=scores)
    sigmoid, choices = router == "sigmoid_topk", scores
    if sigmoid:
        ops.activation(scores, "sigmoid", out=scores)
    elif router == "softmax_topk":
        ops.softmax(scores, out=scores)
    if correction is not None:
        choices = ops.add(scores, correction, out=state.buffer("choices", scores.shape, "float32"))
    normalize = "sum" if renormalize else "none"
    return ops.topk(
        choices,
        k,
        source=None if choices is scores else scores,
        normalize="softmax" if router == "topk_softmax" else normalize,
        groups=groups,
        top_groups=top_groups,
        group_best=2 if sigmoid else 1,
        scale=scale,
        out=(state.buffer("gates", (m, k), "float32"), state.buffer("ids", (m, k), "int32")),
    )
