"""One token at a time through the stages of kernels_cu/device/decode_roles.cuh.

What `mega` and `fused` share: the packed weights, the kernel's template values, its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cufuse import device, jit, pack, tiles
from cufuse.config import Config
from cufuse.device import Array
from cufuse.generate import Sampling
from cufuse.ops.sample import filters_of
from cufuse.state import State
from cufuse.tiles import DecodeTile
from cufuse.weights import Layer, Weights

BUDGET_SECONDS = 2.0  # for a token; a launch that takes longer gives up
_TWIN_BUDGET_SECONDS = 1e6  # the twin has a budget of its own

# The phases of a layer in their order, and what each reads beside the cache; the head's comes last.
LAYER_PHASES = {
    "qkv": ("attn_norm", "qkv", "qkv_bias"),
    "attention": ("q_norm", "k_norm", "sinks"),
    "output": ("out", "out_bias"),
    "gate_up": ("mlp_norm", "gate_up", "gate_bias", "up_bias"),
    "down": ("down", "down_bias"),
}
_HEAD = ("final_norm", "head")


def problem(c: Config) -> str | None:
    """Say in a few words what of a config these kernels do not have, or return None."""
    reasons = {
        "layernorm": c.norm != "rmsnorm",
        "a norm behind the block": c.norm_placement != "pre",
        "an MLP without a gate": not c.gated,
        "experts": bool(c.n_experts),
        "a clamped SwiGLU": c.swiglu_limit is not None,
        "no rotary positions": not c.rope_theta or c.rotary_dim % 4 != 0,
        "a bidirectional encoder": not c.causal or not c.has_head,
        "a QK-norm over all heads": c.qk_norm == "full",
        f"{c.n_heads // c.n_kv_heads} query heads a KV head, more than 8": (
            c.n_heads // c.n_kv_heads > 8
        ),
        f"head_dim {c.head_dim}, not a multiple of 16 up to 256": (
            c.head_dim % 16 != 0 or c.head_dim > 256
        ),
        f"dim {c.dim} or hidden_dim {c.hidden_dim}, not multiples of 8": (
            c.dim % 8 != 0 or c.hidden_dim % 8 != 0
        ),
    }
    return next((words for words, applies in reasons.items() if applies), None)


def applies(weights: Weights, state: State, tokens: Array) -> bool:
    """Tell whether these kernels can take tokens [batch, q_len]: one, of a model that they have."""
    c = weights.config
    if tokens.size != 1 or device.kind(tokens) == "numpy" or problem(c):
        return False
    kept = getattr(weights, "_decode_applies", None)
    if kept is None:  # asked once: bits do not change when memory is freed
        try:
            tiles.decode(c, tiles.target_of(state.start), weights.dtype)
            kept = memory_problem(weights) is None
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
    words = problem(c)
    if words:
        raise device.Unsupported(f"engine {engine}: {c.name} has {words}; use engine fused")
    if batch != 1:
        raise device.Unsupported(
            f"engine {engine}: the batch is {batch}, wanted 1; use engine fused"
        )
    tiles.decode(c, tiles.target_of(weights.embedding), weights.dtype)
    lacking = memory_problem(weights)
    if lacking:
        raise device.Unsupported(f"engine {engine}: {lacking}; use engine fused")


# ---- weights ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeWeights:
    """The arrays of a model as the kernels read them, by the names of DecodeArgs."""

    arrays: dict[str, Array]
    packed: bool  # or only made, to count with

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values() if array is not None)


def _matrices(c: Config) -> dict[str, tuple[int, int, int]]:
    """How many there are of each packed matrix, its rows (those of a gate) and its columns."""
    return {
        "head": (1, c.vocab_size, c.dim),
        "qkv": (c.n_layers, c.q_dim + 2 * c.kv_dim, c.dim),
        "out": (c.n_layers, c.dim, c.q_dim),
        "gate_up": (c.n_layers, c.hidden_dim, c.dim),
        "down": (c.n_layers, c.dim, c.hidden_dim),
    }


def packed_bytes(c: Config, dtype: Any) -> int:
    """Bytes of the packed matrices of a model: a second copy of its weights."""
    sizes = (
        count * pack.packed_size(n, k, dtype, gated=name == "gate_up")
        for name, (count, n, k) in _matrices(c).items()
    )
    return sum(sizes) * np.dtype(dtype).itemsize


def memory_problem(weights: Weights) -> str | None:
    """Say that the packed copy of the weights, which is not made yet, does not fit, or None."""
    if getattr(weights, "_decode_weights", None) is not None:
        return None
    free = device.free_bytes(weights.embedding)
    needed = packed_bytes(weights.config, weights.dtype)
    if free is None or needed <= free:
        return None
    return (
        f"{weights.config.name} needs {needed / 1e9:.2f} GB for a second, packed copy of its "
        f"weights and this GPU has {free / 1e9:.2f} GB free"
    )


def prepare(weights: Weights) -> DecodeWeights:
    """Pack a model's weights, layer by layer; the same object for the same weights.

    The packed copy takes as much memory again as the weights, which the many-row kernels go on
    reading, and stays as long as they do.
    """
    kept = getattr(weights, "_decode_weights", None)
    with jit.unrecorded() as runs:  # a step's launches are counted, not those that prepare it
        if kept is None or (runs and not kept.packed):
            kept = DecodeWeights(_arrays(weights), packed=runs)
            weights._decode_weights = kept  # type: ignore[attr-defined]
    return kept


def _arrays(weights: Weights) -> dict[str, Array]:
    c, like, dtype = weights.config, weights.embedding, weights.dtype
    qkv_rows = c.q_dim + 2 * c.kv_dim
    sizes = _matrices(c)

    def stacked(name: str, shape: tuple[int, ...]) -> Array:
        if getattr(weights.layers[0], name) is None:
            return None
        made = device.empty((c.n_layers, *shape), dtype, like)
        for i, layer in enumerate(weights.layers):
            made[i] = getattr(layer, name)
        return made

    def packed(name: str, matrices: Any) -> Array:
        size = pack.packed_size(*sizes[name][1:], dtype, gated=name == "gate_up")
        arena = device.empty((c.n_layers * size,), dtype, like)
        for i, layer in enumerate(weights.layers):
            w, up = matrices(layer)
            pack.pack(w, up=up, out=arena[i * size : (i + 1) * size])
        return arena

    def single(name: str) -> Array:
        return packed(name, lambda layer: (getattr(layer, name), None))

    def gate_up(layer: Layer) -> tuple[Array, Array]:
        return layer.gate, layer.up

    with device.on_device_of(like):
        return {
            "embedding": weights.embedding,
            "head": pack.pack(weights.head).array,
            "qkv": single("qkv"),
            "out": single("out"),
            "gate_up": packed("gate_up", gate_up),
            "down": single("down"),
            "attn_norm": stacked("attn_norm", (c.dim,)),
            "mlp_norm": stacked("mlp_norm", (c.dim,)),
            "final_norm": weights.final_norm,
            "q_norm": stacked("q_norm", (c.head_dim,)),
            "k_norm": stacked("k_norm", (c.head_dim,)),
            "qkv_bias": stacked("qkv_bias", (qkv_rows,)),
            "out_bias": stacked("out_bias", (c.dim,)),
            "gate_bias": stacked("gate_bias", (c.hidden_dim,)),
            "up_bias": stacked("up_bias", (c.hidden_dim,)),
            "down_bias": stacked("down_bias", (c.dim,)),
            "sinks": stacked("sinks", (c.n_heads,)),
        }


# ---- launches -----------------------------------------------------------------------------------


def template(
    c: Config, dtype: Any, tile: DecodeTile, *, trace: bool = False, filtered: bool = False
) -> tuple[Any, ...]:
    """Return the kernels' template values: their shape."""
    values = (
        np.dtype(dtype),
        f"Act::{c.activation}",
        f"Rounding::{c.norm_rounding}",
        f"Pairing::{'interleaved' if c.rope_interleaved else 'half_split'}",
        c.qk_norm == "head",
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
        trace,
        f"Draw::{'filtered' if filtered else 'plain'}",
    )
    return (f"DecodeShape<{', '.join(map(jit.cpp, values))}>",)


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
    args = {
        **prepare(weights).arrays,
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
        "trace": trace,
        "budget_ns": int(seconds * 1e9),
        "seed": sampling.seed,
        "n_tokens": n_tokens if phase in (None, "head") else 0,
        "n_given": tokens.size,
        "layer": layer,
        "all_logits": int(all_logits),
        "capacity": state.all_keys.shape[3],
        "window": c.window or 0,
        "window_every": c.window_every,
        "eps": c.norm_eps,
        "inverse_temperature": 1.0 / sampling.temperature if sampling.temperature else 0.0,
        **(filters or {"top_k": 0, "share": 0, "min_p": 0.0, "mass_scale": 0.0}),
    }
    file, name = kernel
    values = template(c, weights.dtype, tile, trace=trace is not None, filtered=bool(filters))
    if phase is not None:
        values = (*values, f"Phase::{phase}")
    jit.kernel(file, name, *values).launch(
        tile.ctas,
        tiles.DECODE_THREADS,
        args,
        like=state.start,
        shared_bytes=tiles.decode_shared_bytes(c, weights.dtype, tile),
        cooperative=True,
        size_bytes=size_bytes(weights, state, n_tokens, phase),
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


def size_bytes(weights: Weights, state: State, n_tokens: int, phase: str | None = None) -> int:
    """Bytes that a launch has to read: weights once a token, and the cache so far."""
    c, arrays = weights.config, prepare(weights).arrays

    def once(names: tuple[str, ...]) -> int:
        return sum(arrays[name].nbytes for name in names if arrays[name] is not None)

    keys = n_tokens * state.length + n_tokens * (n_tokens - 1) // 2
    cache = 2 * c.n_layers * c.kv_dim * np.dtype(weights.dtype).itemsize * keys
    if phase is None:
        return n_tokens * once(tuple(arrays)[1:]) + cache  # a token takes one row of the embedding
    if phase == "head":
        return once(_HEAD)
    return (once(LAYER_PHASES[phase]) + (cache if phase == "attention" else 0)) // c.n_layers
