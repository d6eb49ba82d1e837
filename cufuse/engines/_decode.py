"""One token at a time through the stages of kernels_cu/device/decode_roles.cuh.

What `mega` and `fused` share: the weights by their names there, the kernel's template values, its
arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import device, jit, tensor_map, tiles
from cufuse.config import Config
from cufuse.device import Array
from cufuse.generate import Sampling
from cufuse.mxfp4 import Mxfp4
from cufuse.ops.sample import filters_of
from cufuse.pack import Packed
from cufuse.state import State
from cufuse.tiles import DecodeTile
from cufuse.weights import Weights, stack_place

BUDGET_SECONDS = 2.0  # for a token; a launch that takes longer gives up
_TWIN_BUDGET_SECONDS = 1e6  # the twin has a budget of its own

# What each phase of a layer reads beside the cache; the head's comes last.
_READS = {
    "qkv": ("attn_norm", "qkv", "qkv_bias"),
    "attention": ("q_norm", "k_norm", "sinks"),
    "output": ("out", "out_bias"),
}
_HEAD = ("final_norm", "head")


def applies(weights: Weights, state: State, tokens: Array) -> bool:
    """Tell whether these kernels can take tokens [batch, q_len]: one, of a model that they have."""
    c = weights.config
    if tokens.size != 1 or device.kind(tokens) == "numpy" or _problem(weights):
        return False
    kept = getattr(weights, "_decode_applies", None)
    if kept is None:
        try:
            tiles.decode(c, tiles.target_of(state.start), weights.dtype)
            kept = True
        except device.Unsupported:
            kept = False
        weights._decode_applies = kept  # type: ignore[attr-defined]
    return kept


def check(engine: str, weights: Weights, *, batch: int = 1) -> None:
    """Raise Unsupported for a model, a batch or arrays that these kernels do not take."""
    c = weights.config
    if device.kind(weights.embedding) == "numpy":
        raise device.Unsupported(
            f"engine {engine}: the model has NumPy arrays and this engine is a kernel; use engine "
            "reference"
        )
    words = _problem(weights)
    if words:
        raise device.Unsupported(f"engine {engine}: {c.name} has {words}; use engine fused")
    if batch != 1:
        raise device.Unsupported(
            f"engine {engine}: the batch is {batch}, wanted 1; use engine fused"
        )
    tiles.decode(c, tiles.target_of(weights.embedding), weights.dtype)


def _problem(weights: Weights) -> str | None:
    """What of a model these kernels do not have, also of the arrays it came with."""
    c = weights.config
    if not c.decode_problem and c.expert_dtype == "mxfp4":
        for i, layer in enumerate(weights.layers):
            experts = (layer.gate_up, layer.down)
            if c.is_moe_layer(i) and not all(isinstance(w, Mxfp4) for w in experts):
                return "experts of 4 bits a weight that were expanded"
    return c.decode_problem


# ---- weights ------------------------------------------------------------------------------------


_STACKS = (
    *("qkv", "out", "gate_up", "down", "router", "gate", "up", "shared_down", "dense_down"),
    *("gate_up4", "down4"),
    *("attn_norm", "mlp_norm", "q_norm", "k_norm"),
    *("qkv_bias", "out_bias", "gate_bias", "up_bias", "down_bias", "sinks"),
    *("router_bias", "router_correction"),
)


def arrays(weights: Weights) -> dict[str, Array]:
    """Return the arrays of a model by the names of DecodeArgs; None for what it does not have."""
    kept = getattr(weights, "_decode_arrays", None)
    if kept is None:
        kept = {
            "embedding": weights.embedding,
            "head": weights.head.array,
            "final_norm": weights.final_norm,
            **{name: _first_layers(name, weights) for name in _STACKS},
        }
        weights._decode_arrays = kept  # type: ignore[attr-defined]
    return kept


def _first_layers(stack: str, weights: Weights) -> Array:
    """Return what a stack holds of a model's layers: a cut one shares it with the whole one."""
    if stack not in weights.stacks:
        return None
    field = {"dense_down": "down", "gate_up4": "gate_up", "down4": "down"}.get(stack, stack)
    for i, layer in enumerate(weights.layers):
        value = getattr(layer, field)
        if value is None:
            continue
        size = (value.array if isinstance(value, Packed | Mxfp4) else value).size
        name, _, total = stack_place(weights.config, field, i, size)
        if name == stack:
            return weights.stacks[stack][:total]
    return None  # of no layer that is left


def _maps(weights: Weights, tile: DecodeTile) -> dict[str, bytes]:
    """Return the maps of what the decode kernels read in rows, by the names of DecodeArgs."""
    kept: dict[str, bytes] | None = getattr(weights, "_decode_maps", None)
    if kept is None:
        c, made = weights.config, arrays(weights)
        _, part = tiles.expert_columns(c)
        # Columns of a row, those of a panel's part, rows of a box.
        kinds = {
            "router": (c.dim, c.dim, 8),
            "gate": (c.dim, c.dim, 8),
            "up": (c.dim, c.dim, 8),
            "down": (c.hidden_dim, part, 16),
            "shared_down": (c.shared_hidden_dim, part, 16),
            "dense_down": (c.dense_hidden_dim, c.dense_hidden_dim, 16),
        }
        kept = {
            f"{name}_map": _rows_map(made[name], *kind, tile)
            if c.n_experts and made[name] is not None and tile.copies == "bulk"
            else tensor_map.NONE
            for name, kind in kinds.items()
        }
        weights._decode_maps = kept  # type: ignore[attr-defined]
    return kept


def _rows_map(array: Array, columns: int, part: int, box_rows: int, tile: DecodeTile) -> bytes:
    """Return the map of a matrix in boxes as Filler::fill_rows copies them."""
    itemsize, rows = array.dtype.itemsize, array.reshape(-1, columns)
    line = 128 // itemsize
    if part % line:
        return tensor_map.boxes(rows, (box_rows, line), swizzle=128)
    lines = rows.reshape(len(rows), columns // line, line).transpose(1, 0, 2)
    block = tiles.rows_cut(part, itemsize, tile.stage_bytes).block_tiles // 4
    return tensor_map.boxes(lines, (block, box_rows, line), swizzle=128)


# ---- launches -----------------------------------------------------------------------------------


def template(
    c: Config,
    dtype: Any,
    tile: DecodeTile,
    *,
    trace: bool = False,
    filtered: bool = False,
) -> tuple[Any, ...]:
    """Return the kernels' template values: their shape."""
    values = (
        np.dtype(dtype),
        f"Act::{c.activation}",
        f"Gate::{'plain' if c.swiglu_limit is None else 'clamped'}",
        f"Rounding::{c.norm_rounding}",
        f"Pairing::{'interleaved' if c.rope_interleaved else 'half_split'}",
        f"QkNorm::{c.qk_norm}",
        c.dim,
        c.hidden_dim,
        c.n_heads,
        c.n_kv_heads,
        c.head_dim,
        c.rotary_dim,
        c.vocab_size,
        c.n_layers,
        tile.ctas,
        tile.stages,
        tile.stage_bytes,
        tile.window,
        tile.calm_window,
        f"Copies::{tile.copies}",
        tile.split_chunks,
        tile.value_slices,
        f"Probe::{tile.probe}",
        trace,
        f"Draw::{'filtered' if filtered else 'plain'}",
        _mlp(c),
    )
    return (f"DecodeShape<{', '.join(map(jit.cpp, values))}>",)


def _mlp(c: Config) -> str:
    """Return the type that tells a mixture from models whose layers have one MLP each."""
    if not c.n_experts:
        return "OneMlp"
    values = (
        c.n_experts,
        c.n_experts_per_token,
        f"Router::{c.router}",
        c.norm_topk_prob,
        c.router_groups,
        c.router_top_groups,
        c.router_correction,
        c.shared_hidden_dim,
        c.shared_gated,
        c.dense_hidden_dim if c.dense_layers else 0,
        c.mlp_bias,
        c.expert_dtype == "mxfp4",
    )
    return f"Mixture<{', '.join(map(jit.cpp, values))}>"


def launch(
    kernel: tuple[str, str],
    weights: Weights,
    state: State,
    tokens: Array,
    *,
    n_tokens: int,
    ids: Array,
    all_logits: bool = False,
    sampling: Sampling | None = None,
    phase: str | None = None,
    layer: int = 0,
    trace: Array = None,
) -> Array:
    """Launch a decode kernel over n_tokens tokens, the first of them `tokens` [n].

    ids: int32 [n_tokens], what is drawn behind each token with logits; may be `tokens`
    sampling: how it is drawn; greedy when left out
    phase, layer: what the launch does of one token, where it is not all; "head" comes last

    Returns logits [n_tokens or 1, vocab_size]; the kernel counts the tokens in the cache itself.
    """
    c = weights.config
    tile = tiles.decode(c, tiles.target_of(state.start), weights.dtype)
    sampling = sampling or Sampling()
    logits = state.buffer("logits", (n_tokens if all_logits else 1, c.vocab_size))
    on_twin = device.kind(state.start) == "twin"
    seconds = _TWIN_BUDGET_SECONDS if on_twin else BUDGET_SECONDS * n_tokens
    # Greedy, the likeliest is among what filters leave.
    filters = (
        sampling.temperature > 0
        and phase in (None, "head")
        and filters_of(
            c.vocab_size, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
        )
    )
    dense = sum(1 << layer for layer in c.dense_layers)
    chosen = (n_tokens, c.n_layers, c.n_experts_per_token)
    args = {
        **_maps(weights, tile),
        **arrays(weights),
        "cos": state.cos,
        "sin": state.sin,
        "k_cache": state.all_keys,
        "v_cache": state.all_values,
        "tokens": tokens,
        "ids": ids,
        "logits": logits,
        "start": state.start,
        "control": state.control,
        "words": state.zeroed("words", (tiles.decode_words(c, weights.dtype, tile),), np.uint64),
        "experts": state.buffer("experts", chosen, "int32") if c.n_experts else None,
        "trace": trace,
        "budget_ns": int(seconds * 1e9),
        "seed": sampling.seed,
        "dense_low": dense & (2**64 - 1),
        "dense_high": dense >> 64,
        "n_tokens": n_tokens if phase in (None, "head") else 0,
        "n_given": tokens.size,
        "layer": layer,
        "all_logits": int(all_logits),
        "capacity": state.all_keys.shape[3],
        "window": c.window or 0,
        "window_every": c.window_every,
        "eps": c.norm_eps,
        "inverse_temperature": 1.0 / sampling.temperature if sampling.temperature else 0.0,
        "routed_scale": c.routed_scale,
        "limit": c.swiglu_limit or 0.0,
        "alpha": c.swiglu_alpha,
        **(filters or {"top_k": 0, "share": 0, "min_p": 0.0, "mass_scale": 0.0}),
    }
    file, name = kernel
    values = template(
        c,
        weights.dtype,
        tile,
        trace=trace is not None,
        filtered=bool(filters),
    )
    if phase is not None:
        values = (*values, f"Phase::{phase}")
    jit.kernel(file, name, *values).launch(
        tile.ctas,
        tiles.DECODE_THREADS,
        args,
        like=state.start,
        shared_bytes=tiles.decode_shared_bytes(c, weights.dtype, tile),
        cooperative=True,
        size_bytes=size_bytes(weights, state, n_tokens, phase, layer),
    )
    return logits


def skip_tags(state: State) -> None:
    """Leave out the tags of an interrupted step: its words must not look new to the next one."""
    jit.kernel("unfused/advance.cu", "advance").launch(
        1,
        32,
        {"start": state.control[:1].view(np.int32), "batch": 1, "n": state.config.n_layers},
        like=state.start,
    )


def size_bytes(
    weights: Weights, state: State, n_tokens: int, phase: str | None = None, layer: int = 0
) -> int:
    """Bytes that a launch has to read: weights once a token, and the cache so far.

    Of a mixture those of the experts that a token goes to.
    """
    c, made = weights.config, arrays(weights)

    def once(names: tuple[str, ...]) -> int:
        return sum(made[name].nbytes for name in names if made[name] is not None)

    keys = n_tokens * state.length + n_tokens * (n_tokens - 1) // 2
    cache = 2 * c.n_layers * c.kv_dim * np.dtype(weights.dtype).itemsize * keys
    if phase == "head":
        return once(_HEAD)
    if phase is None:
        layers = once((*_READS["qkv"], *_READS["attention"], *_READS["output"]))
        layers += sum(_mlp_bytes(weights, i) for i in range(c.n_layers))
        # A token takes one row of the embedding.
        return n_tokens * (layers + once(_HEAD)) + cache
    if phase in ("gate_up", "down", "router", "experts", "combine"):
        return _mlp_bytes(weights, layer, phase)
    return (once(_READS[phase]) + (cache if phase == "attention" else 0)) // c.n_layers


def _mlp_bytes(weights: Weights, layer: int, phase: str | None = None) -> int:
    """Bytes of a layer's MLP that a token reads, or of a phase of it."""
    c, of = weights.config, weights.layers[layer]

    def size(*values: Array | Packed | Mxfp4) -> int:
        return sum(
            value.size_bytes if isinstance(value, Packed | Mxfp4) else value.nbytes
            for value in values
            if value is not None
        )

    if not c.is_moe_layer(layer):
        parts = {
            "gate_up": size(of.mlp_norm, of.gate, of.up, of.gate_up, of.gate_bias, of.up_bias),
            "down": size(of.down, of.down_bias),
        }
    else:
        k, n = c.n_experts_per_token, c.n_experts
        parts = {
            "router": size(of.mlp_norm, of.router, of.router_bias, of.shared_router)
            + size(of.router_correction),
            "experts": size(of.gate, of.up, of.gate_up, of.gate_bias, of.up_bias) * k // n
            + size(of.shared_gate, of.shared_up),
            "combine": size(of.down, of.down_bias) * k // n + size(of.shared_down),
        }
    return sum(parts.values()) if phase is None else parts[phase]
