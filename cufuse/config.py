"""Config: the sizes and choices of a model, and the presets by name."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass

ROUTERS = ("softmax_topk", "topk_softmax", "sigmoid_topk")
EXPERT_DTYPES = ("model", "mxfp4")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length; MODELS' own field names.

    kind: "linear", "dynamic", "llama3", "yarn" or "longrope"
    """

    kind: str
    factor: float = 1.0
    original_max_seq_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class Config:
    """Everything about a model but its numbers. Sizes are in elements."""

    name: str
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int  # width of the MLP, or of one expert
    vocab_size: int
    max_seq_len: int

    # Blocks
    norm: str = "rmsnorm"  # or "layernorm"
    norm_eps: float = 1e-5
    norm_rounding: str = "cast_first"  # "scale_first", "one_plus"; see ops.rmsnorm
    norm_placement: str = "pre"  # or "post": norm(x + block(x)), as in BERT
    activation: str = "silu"
    gated: bool = True
    swiglu_limit: float | None = None  # clamps gate and up and multiplies by up + 1 (gpt-oss)
    swiglu_alpha: float = 1.702

    # Positions
    rope_theta: float | None = 10000.0  # None: learned positions are added to the embedding
    rope_interleaved: bool = False
    rope_partial: float = 1.0
    rope_scaling: RopeScaling | None = None

    # Attention
    causal: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = "none"  # "head": over head_dim (Qwen3); "full": over the projection (OLMoE)
    sinks: bool = False
    window: int | None = None
    window_every: int = 1  # layer i has the window when i % window_every == 0

    # Embedding and head
    tied_embeddings: bool = False
    n_token_types: int = 0  # BERT: the first row is added to every token
    has_head: bool = True

    # Mixture of experts
    n_experts: int = 0
    n_experts_per_token: int = 0
    router: str = "softmax_topk"  # "topk_softmax", "sigmoid_topk"; see ops.moe_route
    norm_topk_prob: bool = True
    router_bias: bool = False
    expert_dtype: str = "model"  # or "mxfp4": experts of 4 bits a weight; see mxfp4.Mxfp4
    router_correction: bool = False  # a float32 bias for the choice, not for the weight
    router_groups: int = 1  # experts come in so many groups ...
    router_top_groups: int = 1  # ... and are chosen from the best so many
    routed_scale: float = 1.0  # multiplies the weights
    shared_hidden_dim: int = 0  # width of an MLP that every token goes through besides; no biases
    shared_gated: bool = False  # what it gives is multiplied by sigmoid(x . shared_router)
    dense_layers: tuple[int, ...] = ()  # layers with one MLP in place of the experts ...
    dense_hidden_dim: int = 0  # ... of this width

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"config {self.name}: n_heads = {self.n_heads} is not a multiple of "
                f"n_kv_heads = {self.n_kv_heads}"
            )
        problem = self._mixture_problem()
        if problem:
            raise ValueError(f"config {self.name}: {problem}")

    def _mixture_problem(self) -> str | None:
        """What does not fit together in the mixture of experts, as a clause; None for nothing."""
        groups, top_groups = self.router_groups, self.router_top_groups
        if self.expert_dtype not in EXPERT_DTYPES:
            return f"expert_dtype is {self.expert_dtype!r}, wanted {' or '.join(EXPERT_DTYPES)}"
        if self.router not in ROUTERS:
            return f"router is {self.router!r}, wanted one of {', '.join(ROUTERS)}"
        if not self.n_experts:
            extras = ("shared_hidden_dim", "dense_layers", "router_correction")
            extra = next((name for name in extras if getattr(self, name)), None)
            extra = "expert_dtype" if self.expert_dtype != "model" else extra
            return f"{extra} belongs to a mixture and n_experts is 0" if extra else None
        if not 1 <= self.n_experts_per_token <= self.n_experts:
            return (
                f"n_experts_per_token = {self.n_experts_per_token} of {self.n_experts} experts, "
                "wanted 1 up to all"
            )
        if not self.gated:
            return "the experts of a mixture are gated MLPs and gated is False"
        if self.expert_dtype == "mxfp4" and (self.dim % 32 or self.hidden_dim % 32):
            return (
                f"dim = {self.dim} or hidden_dim = {self.hidden_dim} is no multiple of 32, the "
                "weights that have a scale in mxfp4"
            )
        if groups < 1 or self.n_experts % groups:
            return f"n_experts = {self.n_experts} is not a multiple of router_groups = {groups}"
        if not 1 <= top_groups <= groups:
            return f"router_top_groups = {top_groups} of {groups} groups, wanted 1 up to all"
        if self.n_experts_per_token > top_groups * (self.n_experts // groups):
            return (
                f"n_experts_per_token = {self.n_experts_per_token} and {top_groups} groups of "
                f"{self.n_experts // groups} experts have too few to choose from"
            )
        if groups > 1 and self.router == "topk_softmax":
            return f"router topk_softmax has no groups and router_groups is {groups}"
        if self.router_correction and self.router != "sigmoid_topk":
            return f"router_correction belongs to sigmoid_topk and router is {self.router}"
        if not 0.0 < self.routed_scale < math.inf:
            return f"routed_scale is {self.routed_scale}, wanted a positive number"
        if self.shared_hidden_dim < 0 or self.dense_hidden_dim < 0:
            return "shared_hidden_dim or dense_hidden_dim is negative"
        if self.shared_gated and not self.shared_hidden_dim:
            return "shared_gated is set and shared_hidden_dim is 0"
        if self.dense_layers and not self.dense_hidden_dim:
            return "dense_layers are given and dense_hidden_dim is 0"
        strange = [layer for layer in self.dense_layers if not 0 <= layer < self.n_layers]
        if strange:
            return f"dense layer {strange[0]} is not one of {self.n_layers} layers"
        return None

    @property
    def q_dim(self) -> int:
        """Rows of the query projection."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Rows of the key (and of the value) projection."""
        return self.n_kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """How many values of a head are rotated."""
        return int(self.head_dim * self.rope_partial) if self.rope_theta else 0

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of a layer: how many keys a query sees, itself included."""
        return self.window if self.window and layer % self.window_every == 0 else None

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.n_experts > 0 and layer not in self.dense_layers

    def layer_hidden_dim(self, layer: int) -> int:
        """Width of a layer's MLP, or of one of its experts."""
        return self.dense_hidden_dim if layer in self.dense_layers else self.hidden_dim

    def cut(self, n_layers: int) -> Config:
        """Keep the first n_layers layers."""
        n_layers = min(n_layers, self.n_layers)
        dense = tuple(layer for layer in self.dense_layers if layer < n_layers)
        return dataclasses.replace(self, n_layers=n_layers, dense_layers=dense)

    @property
    def decode_problem(self) -> str | None:
        """What of the model, in a few words, the decode kernels do not have; None for nothing."""
        group = self.n_heads // self.n_kv_heads
        reasons = {
            "layernorm": self.norm != "rmsnorm",
            "a norm behind the block": self.norm_placement != "pre",
            "an MLP without a gate": not self.gated,
            "no rotary positions": not self.rope_theta or self.rotary_dim % 4 != 0,
            "a bidirectional encoder": not self.causal or not self.has_head,
            f"{group} query heads a KV head, more than 8": group > 8,
            f"head_dim {self.head_dim}, not a multiple of 16 up to 256": (
                self.head_dim % 16 != 0 or self.head_dim > 256
            ),
            f"dim {self.dim} or hidden_dim {self.hidden_dim}, not multiples of 8": (
                self.dim % 8 != 0 or self.hidden_dim % 8 != 0
            ),
            "a shared or dense width that is not a multiple of 8": (
                self.shared_hidden_dim % 8 != 0 or self.dense_hidden_dim % 8 != 0
            ),
            "biases in dense layers among experts": bool(self.dense_layers) and self.mlp_bias,
            f"{self.n_layers} layers with dense ones among experts, more than 128": (
                bool(self.dense_layers) and self.n_layers > 128
            ),
            f"{self.n_experts} experts, more than 1024": self.n_experts > 1024,
            f"{self.router_groups} groups of experts, more than 32": self.router_groups > 32,
            "a shared expert beside experts of 4 bits a weight": (
                self.expert_dtype == "mxfp4" and self.shared_hidden_dim > 0
            ),
        }
        return next((words for words, applies in reasons.items() if applies), None)

    def size_bytes(self, itemsize: int) -> int:
        """Count the bytes of the weights of all matrices; 32 of mxfp4 have 17."""
        n = 0
        if self.expert_dtype == "mxfp4":
            layers = self.n_layers - len(self.dense_layers)
            n = layers * self.n_experts * 3 * self.dim * self.hidden_dim
        return (self.n_parameters - n) * itemsize + n * 17 // 32

    @property
    def n_parameters(self) -> int:
        """Count the weights of all matrices."""
        d, experts = self.dim, max(self.n_experts, 1)
        matrices = 3 if self.gated else 2
        attention = d * (self.q_dim + 2 * self.kv_dim) + self.q_dim * d
        mlp = experts * matrices * d * self.hidden_dim + self.n_experts * d
        mlp += matrices * d * self.shared_hidden_dim + (d if self.shared_gated else 0)
        dense = matrices * d * self.dense_hidden_dim
        mlps = sum(dense if i in self.dense_layers else mlp for i in range(self.n_layers))
        embeddings = self.vocab_size * d * (1 if self.tied_embeddings or not self.has_head else 2)
        return self.n_layers * attention + mlps + embeddings


_LLAMA3 = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)

_PRESETS = (
    Config(
        name="tiny",
        dim=128,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        hidden_dim=256,
        vocab_size=512,
        max_seq_len=512,
        tied_embeddings=True,
        qk_norm="head",
    ),
    Config(
        name="tiny-moe",
        dim=128,
        n_layers=2,
        n_heads=4,
        n_kv_heads=4,
        head_dim=32,
        hidden_dim=64,
        vocab_size=512,
        max_seq_len=512,
        qk_norm="full",
        n_experts=8,
        n_experts_per_token=2,
        norm_topk_prob=False,
    ),
    Config(
        name="smollm2-135m",
        dim=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        hidden_dim=1536,
        vocab_size=49152,
        max_seq_len=8192,
        rope_theta=1e5,
        tied_embeddings=True,
    ),
    Config(
        name="llama-3.2-1b",
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        head_dim=64,
        hidden_dim=8192,
        vocab_size=128256,
        max_seq_len=131072,
        rope_theta=5e5,
        tied_embeddings=True,
        rope_scaling=dataclasses.replace(_LLAMA3, factor=32.0),
    ),
    Config(
        name="llama-3.1-8b",
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        hidden_dim=14336,
        vocab_size=128256,
        max_seq_len=131072,
        rope_theta=5e5,
        rope_scaling=_LLAMA3,
    ),
    Config(
        name="qwen3-0.6b",
        dim=1024,
        n_layers=28,
        n_heads=16,
        n_kv_heads=8,
        head_dim=128,
        hidden_dim=3072,
        vocab_size=151936,
        max_seq_len=40960,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied_embeddings=True,
        qk_norm="head",
    ),
    Config(
        name="olmoe-1b-7b",
        dim=2048,
        n_layers=16,
        n_heads=16,
        n_kv_heads=16,
        head_dim=128,
        hidden_dim=1024,
        vocab_size=50304,
        max_seq_len=4096,
        qk_norm="full",
        n_experts=64,
        n_experts_per_token=8,
        norm_topk_prob=False,
    ),
    Config(
        name="qwen3-30b-a3b",
        dim=2048,
        n_layers=48,
        n_heads=32,
        n_kv_heads=4,
        head_dim=128,
        hidden_dim=768,
        vocab_size=151936,
        max_seq_len=40960,
        norm_eps=1e-6,
        rope_theta=1e6,
        qk_norm="head",
        n_experts=128,
        n_experts_per_token=8,
    ),
    Config(
        name="mixtral-8x7b",
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        hidden_dim=14336,
        vocab_size=32000,
        max_seq_len=32768,
        rope_theta=1e6,
        n_experts=8,
        n_experts_per_token=2,
    ),
    Config(
        name="gpt-oss-20b",
        dim=2880,
        n_layers=24,
        n_heads=64,
        n_kv_heads=8,
        head_dim=64,
        hidden_dim=2880,
        vocab_size=201088,
        max_seq_len=131072,
        norm_rounding="scale_first",
        swiglu_limit=7.0,
        rope_theta=150000.0,
        rope_scaling=RopeScaling("yarn", 32.0, 4096, truncate=False),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        sinks=True,
        window=128,
        window_every=2,
        n_experts=32,
        n_experts_per_token=4,
        router="topk_softmax",
        router_bias=True,
        expert_dtype="mxfp4",
    ),
    Config(
        name="minilm",
        dim=384,
        n_layers=6,
        n_heads=12,
        n_kv_heads=12,
        head_dim=32,
        hidden_dim=1536,
        vocab_size=30522,
        max_seq_len=512,
        norm="layernorm",
        norm_eps=1e-12,
        norm_placement="post",
        activation="gelu",
        gated=False,
        rope_theta=None,
        causal=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        n_token_types=2,
        has_head=False,
    ),
)

PRESETS: dict[str, Config] = {config.name: config for config in _PRESETS}


class UnknownModel(ValueError):
    """No preset and no file has that name."""


def preset(name: str) -> Config:
    """Return the preset of that name; raises UnknownModel and names the nearest."""
    if name in PRESETS:
        return PRESETS[name]
    if "/" in name or name.endswith((".gguf", ".safetensors")):
        raise UnknownModel(f"{name}: no such file or folder")
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"presets are {', '.join(PRESETS)}"
    raise UnknownModel(f"unknown model {name}: {hint}")
