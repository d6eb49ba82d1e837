"""Neighbouring operations glued: five launches a layer, six where it has experts.

One token of a model that the kernels of `mega` have goes through their phases, a launch each, and
gives the same bits; prompts, batches and other models go through ops.
"""

from __future__ import annotations

from typing import Any

from cufuse import ops
from cufuse.config import Config
from cufuse.device import Array
from cufuse.engines import _decode, _parts
from cufuse.generate import Sampling
from cufuse.ops.rmsnorm import Norm
from cufuse.plan import layer_phases
from cufuse.state import State
from cufuse.weights import Layer, Weights


def step(weights: Weights, state: State, tokens: Array, *, all_logits: bool = False) -> Array:
    """Append tokens [batch, q_len] and return the logits of the last position."""
    _parts.check(weights, state, tokens)
    if _decode.applies(weights, state, tokens):
        ids = state.buffer("ids", (1,), "int32")
        logits = _by_phases(weights, state, tokens, ids)
        return logits.reshape(1, 1, -1) if all_logits else logits
    c = weights.config
    x = _parts.embed(weights, state, tokens)
    if c.norm_placement == "post":
        _encoder_blocks(weights, state, x)
    else:
        for i, layer in enumerate(weights.layers):
            attention = _attention(c, state, i, layer, x, _norm(c, layer.attn_norm))
            ops.linear(attention, layer.out, layer.out_bias, residual=x, out=x)
            _mlp(c, state, i, layer, x)
    logits = _head(weights, state, x, all_logits)
    state.advance(tokens.shape[1])
    return logits


def step_and_draw(
    weights: Weights, state: State, tokens: Array, sampling: Sampling, *, ids: Array
) -> Array:
    """Append tokens [batch, q_len] and draw what comes behind each sequence's last one.

    ids: int32 [batch]; may be `tokens`

    Returns logits [batch, vocab_size] of the last position.
    """
    _parts.check(weights, state, tokens)
    if _decode.applies(weights, state, tokens):
        return _by_phases(weights, state, tokens, ids, sampling)
    logits = step(weights, state, tokens)
    sampling.draw(logits, state, ids)
    return logits


def _by_phases(
    weights: Weights, state: State, tokens: Array, ids: Array, sampling: Sampling | None = None
) -> Array:
    """One token through the stages of `mega`, a phase a launch."""

    def launch(phase: str, layer: int = 0) -> Array:
        return _decode.launch(
            ("fused/decode.cu", "decode_phase"),
            weights,
            state,
            tokens.reshape(-1),
            n_tokens=1,
            ids=ids,
            sampling=sampling,
            phase=phase,
            layer=layer,
        )

    if state.unfinished:
        _decode.skip_tags(state)
    state.unfinished = True
    for layer in range(weights.config.n_layers):
        for phase in layer_phases(weights.config, layer):
            launch(phase, layer)
    logits = launch("head")
    state.unfinished = False
    state.length += 1
    return logits


def _norm(c: Config, weight: Array) -> Norm:
    return Norm(weight, c.norm_eps, c.norm_rounding)


def _attention(c: Config, state: State, i: int, layer: Layer, x: Array, norm: Norm | None) -> Array:
    """[RMSNorm] + QKV + [QK-norm] + RoPE + append, then attention over the cache."""
    batch, q_len, _ = x.shape
    heads = (batch, q_len, c.n_heads, c.head_dim)
    q = ops.qkv_rope_append(
        x,
        layer.qkv,
        layer.qkv_bias,
        cos=state.cos,
        sin=state.sin,
        start=state.start,
        k_cache=state.k_cache[i],
        v_cache=state.v_cache[i],
        n_heads=c.n_heads,
        norm=norm,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        qk_eps=c.norm_eps,
        qk_rounding=c.norm_rounding,
        interleaved=c.rope_interleaved,
        out=state.buffer("q", heads),
    )
    return _parts.attention(c, state, i, layer, q)


def _mlp(c: Config, state: State, i: int, layer: Layer, x: Array) -> None:
    """x += MLP(RMSNorm(x)), in place."""
    batch, q_len, dim = x.shape
    norm = _norm(c, layer.mlp_norm)
    if layer.router is not None:
        _experts(c, state, layer, x.reshape(batch * q_len, dim), norm)
        return
    hidden = state.buffer("hidden", (batch, q_len, c.layer_hidden_dim(i)))
    if c.gated:
        ops.gated_linear(
            x,
            layer.gate if layer.gate_up is None else layer.gate_up,
            layer.up,
            layer.gate_bias,
            layer.up_bias,
            norm=norm,
            out=hidden,
            **_parts.gate(c),
        )
    else:
        ops.linear(x, layer.up, layer.up_bias, activation=c.activation, norm=norm, out=hidden)
    ops.linear(hidden, layer.down, layer.down_bias, residual=x, out=x)


def _experts(c: Config, state: State, layer: Layer, rows: Array, norm: Norm) -> None:
    """rows += the chosen experts, and the shared one, of RMSNorm(rows), in place."""
    residual = rows if layer.shared_down is None else _shared_expert(c, state, layer, rows, norm)
    ids, gates = _route(
        state, rows, layer.router, layer.router_bias, norm=norm, **_parts.routing(c, layer)
    )
    ops.moe(
        rows,
        ids,
        gates,
        *_parts.expert_matrices(state, layer, ids),
        residual=residual,
        norm=norm,
        out=rows,
        **_parts.experts(c, layer),
    )


def _shared_expert(c: Config, state: State, layer: Layer, rows: Array, norm: Norm) -> Array:
    """Return rows + the shared expert of RMSNorm(rows)."""
    hidden = ops.gated_linear(
        rows,
        layer.shared_gate,
        layer.shared_up,
        norm=norm,
        out=state.buffer("hidden", (len(rows), c.shared_hidden_dim)),
        **_parts.gate(c),
    )
    summed = state.buffer("summed", rows.shape)
    if layer.shared_router is None:
        return ops.linear(hidden, layer.shared_down, residual=rows, out=summed)
    shared = ops.linear(hidden, layer.shared_down, out=state.buffer("shared", rows.shape))
    ids, gates = _route(state, rows, layer.shared_router, norm=norm, **_parts.SHARED_ROUTING)
    return ops.combine(shared.reshape(len(rows), 1, c.dim), ids, gates, rows, out=summed)


def _route(
    state: State, rows: Array, w: Array, b: Array | None = None, *, k: int, **options: Any
) -> tuple[Array, Array]:
    """The experts of each row and their weights."""
    shape = (len(rows), k)
    out = state.buffer("ids", shape, "int32"), state.buffer("gates", shape, "float32")
    return ops.moe_route(rows, w, b, k=k, out=out, **options)


def _encoder_blocks(weights: Weights, state: State, x: Array) -> None:
    """Post-norm blocks (BERT): x = LN(x + Attn(x)); x = LN(x + MLP(x)), in place."""
    c = weights.config
    batch, q_len, _ = x.shape
    hidden = state.buffer("hidden", (batch, q_len, c.hidden_dim))
    summed = state.buffer("summed", x.shape)
    for i, layer in enumerate(weights.layers):
        attention = _attention(c, state, i, layer, x, None)
        ops.linear(attention, layer.out, layer.out_bias, residual=x, out=summed)
        _parts.post_norm(c, summed, layer.attn_norm, layer.attn_norm_bias, x)
        ops.linear(x, layer.up, layer.up_bias, activation=c.activation, out=hidden)
        ops.linear(hidden, layer.down, layer.down_bias, residual=x, out=summed)
        _parts.post_norm(c, summed, layer.mlp_norm, layer.mlp_norm_bias, x)


def _head(weights: Weights, state: State, x: Array, all_logits: bool) -> Array:
    c = weights.config
    if not c.has_head:
        return x
    rows = x if all_logits else _parts.last_rows(state, x)
    logits = state.buffer("logits", (*rows.shape[:-1], c.vocab_size))
    norm = _norm(c, weights.final_norm)
    return ops.linear(rows, weights.head, norm=norm, out=logits)
