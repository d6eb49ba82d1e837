"""A model's weights as arrays: one copy, row-major, that every engine reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cufuse.config import Config
from cufuse.device import Array


@dataclass
class Layer:
    """One block. Linear weights are [out, in]; what a family does not have is None."""

    attn_norm: Array = None  # [dim]
    attn_norm_bias: Array = None  # [dim]; LayerNorm only
    qkv: Array = None  # [q_dim + 2 kv_dim, dim]; rows of q, then k, then v
    qkv_bias: Array = None  # [q_dim + 2 kv_dim]
    q_norm: Array = None  # [head_dim] or [q_dim]
    k_norm: Array = None  # [head_dim] or [kv_dim]
    sinks: Array = None  # [n_heads]
    out: Array = None  # [dim, q_dim]
    out_bias: Array = None  # [dim]
    mlp_norm: Array = None  # [dim]
    mlp_norm_bias: Array = None  # [dim]; LayerNorm only
    router: Array = None  # [n_experts, dim]
    router_bias: Array = None  # [n_experts]
    gate: Array = None  # [hidden_dim, dim], with experts [n_experts, hidden_dim, dim]
    gate_bias: Array = None  # [hidden_dim], with experts [n_experts, hidden_dim]
    up: Array = None  # as gate
    up_bias: Array = None  # as gate_bias
    down: Array = None  # [dim, hidden_dim], with experts [n_experts, dim, hidden_dim]
    down_bias: Array = None  # [dim], with experts [n_experts, dim]


@dataclass
class Weights:
    """All arrays of a model."""

    config: Config
    embedding: Array = None  # [vocab_size, dim]
    position_embedding: Array = None  # [max_seq_len, dim]; learned positions only
    token_type: Array = None  # [n_token_types, dim]; BERT only
    embedding_norm: Array = None  # [dim]; BERT only
    embedding_norm_bias: Array = None  # [dim]; BERT only
    layers: list[Layer] = dataclasses.field(default_factory=list)
    final_norm: Array = None  # [dim]
    head: Array = None  # [vocab_size, dim]; the same array as `embedding` when tied

    @property
    def dtype(self) -> Any:
        """The dtype all arrays share."""
        return self.embedding.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays, shared ones counted once."""
        return sum({id(array): array.nbytes for _, array in self.named()}.values())

    def named(self) -> Iterator[tuple[str, Array]]:
        """Yield (name, array) of everything that is there, layers as "layers.3.qkv"."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("config", "layers") and value is not None:
                yield field.name, value
        for i, layer in enumerate(self.layers):
            for field in dataclasses.fields(layer):
                value = getattr(layer, field.name)
                if value is not None:
                    yield f"layers.{i}.{field.name}", value

    def map(self, change: Callable[[Array], Array]) -> Weights:
        """Apply a function to every array; an array that is shared stays shared."""
        done: dict[int, Array] = {}

        def apply(value: Array) -> Array:
            if value is None:
                return None
            if id(value) not in done:
                done[id(value)] = change(value)
            return done[id(value)]

        made = Weights(self.config)
        for field in dataclasses.fields(self):
            if field.name not in ("config", "layers"):
                setattr(made, field.name, apply(getattr(self, field.name)))
        for layer in self.layers:
            values = {f.name: apply(getattr(layer, f.name)) for f in dataclasses.fields(layer)}
            made.layers.append(Layer(**values))
        return made


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array a config asks for, by the names of `Weights.named`.

    A tied head is left out: it is the embedding.
    """
    c, d = config, config.dim
    layernorm, post = c.norm == "layernorm", c.norm_placement == "post"
    experts = (c.n_experts,) if c.n_experts else ()
    made: dict[str, tuple[int, ...] | None] = {"embedding": (c.vocab_size, d)}
    if not c.rope_theta:
        made["position_embedding"] = (c.max_seq_len, d)
    if c.n_token_types:
        made["token_type"] = (c.n_token_types, d)
    if post:
        made["embedding_norm"] = (d,)
        made["embedding_norm_bias"] = (d,) if layernorm else None
    qkv_rows = c.q_dim + 2 * c.kv_dim
    full = c.qk_norm == "full"
    layer = {
        "attn_norm": (d,),
        "attn_norm_bias": (d,) if layernorm else None,
        "qkv": (qkv_rows, d),
        "qkv_bias": (qkv_rows,) if c.qkv_bias else None,
        "q_norm": None if c.qk_norm == "none" else (c.q_dim if full else c.head_dim,),
        "k_norm": None if c.qk_norm == "none" else (c.kv_dim if full else c.head_dim,),
        "sinks": (c.n_heads,) if c.sinks else None,
        "out": (d, c.q_dim),
        "out_bias": (d,) if c.output_bias else None,
        "mlp_norm": (d,),
        "mlp_norm_bias": (d,) if layernorm else None,
        "router": (c.n_experts, d) if c.n_experts else None,
        "router_bias": (c.n_experts,) if c.router_bias else None,
        "gate": (*experts, c.hidden_dim, d) if c.gated else None,
        "gate_bias": (*experts, c.hidden_dim) if c.gated and c.mlp_bias else None,
        "up": (*experts, c.hidden_dim, d),
        "up_bias": (*experts, c.hidden_dim) if c.mlp_bias else None,
        "down": (*experts, d, c.hidden_dim),
        "down_bias": (*experts, d) if c.mlp_bias else None,
    }
    for i in range(c.n_layers):
        made.update({f"layers.{i}.{name}": shape for name, shape in layer.items()})
    if not post:
        made["final_norm"] = (d,)
    if c.has_head and not c.tied_embeddings:
        made["head"] = (c.vocab_size, d)
    return {name: shape for name, shape in made.items() if shape is not None}


def assemble(config: Config, arrays: dict[str, Array]) -> Weights:
    """Put arrays named as in `shapes` together; raises ValueError for a missing or wrong one."""
    wanted = shapes(config)
    for name, shape in wanted.items():
        if name not in arrays:
            raise ValueError(f"model {config.name}: tensor {name} is missing")
        if tuple(arrays[name].shape) != shape:
            raise ValueError(
                f"model {config.name}: tensor {name} is {list(arrays[name].shape)}, "
                f"wanted {list(shape)}"
            )
    made = Weights(config, layers=[Layer() for _ in range(config.n_layers)])
    for name in wanted:
        if name.startswith("layers."):
            _, index, field = name.split(".")
            setattr(made.layers[int(index)], field, arrays[name])
        else:
            setattr(made, name, arrays[name])
    if config.has_head and config.tied_embeddings:
        made.head = made.embedding
    return made
