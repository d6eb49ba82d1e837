"""Small models of every family's shape, for engine tests."""

from __future__ import annotations

import dataclasses

import numpy as np

from cufuse import engines, weights
from cufuse.config import Config, RopeScaling
from cufuse.mxfp4 import Mxfp4
from cufuse.state import State
from cufuse.weights import Weights

_BASE = Config(
    name="small",
    dim=72,
    n_layers=2,
    n_heads=3,
    n_kv_heads=1,
    head_dim=32,
    hidden_dim=88,
    vocab_size=131,
    max_seq_len=96,
)


def _like(name: str, **changes: object) -> Config:
    return dataclasses.replace(_BASE, name=name, **changes)  # type: ignore[arg-type]


CONFIGS = {
    config.name: config
    for config in (
        _like(
            "llama",
            rope_scaling=RopeScaling("llama3", 8.0, 32, low_freq_factor=1.0, high_freq_factor=4.0),
            tied_embeddings=True,
        ),
        _like("interleaved", rope_interleaved=True, rope_partial=0.5, qkv_bias=True),
        _like("qwen3", qk_norm="head", n_heads=4, n_kv_heads=2, norm_eps=1e-6),
        _like("mistral", window=5, n_heads=2),
        _like(
            "olmoe",
            qk_norm="full",
            n_experts=5,
            n_experts_per_token=2,
            norm_topk_prob=False,
            hidden_dim=40,
        ),
        _like("mixtral", n_experts=4, n_experts_per_token=2, hidden_dim=40),
        _like(
            "gpt-oss",
            norm_rounding="scale_first",
            swiglu_limit=7.0,
            rope_theta=150000.0,
            rope_scaling=RopeScaling("yarn", 4.0, 24, truncate=False),
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            sinks=True,
            window=6,
            window_every=2,
            n_experts=4,
            n_experts_per_token=2,
            router="topk_softmax",
            router_bias=True,
            hidden_dim=40,
        ),
        _like(
            "qwen2-moe",
            qkv_bias=True,
            n_experts=6,
            n_experts_per_token=2,
            norm_topk_prob=False,
            shared_hidden_dim=56,
            shared_gated=True,
            hidden_dim=40,
        ),
        _like(
            "deepseek-moe",
            n_experts=8,
            n_experts_per_token=3,
            router="sigmoid_topk",
            router_correction=True,
            router_groups=4,
            router_top_groups=2,
            routed_scale=2.5,
            shared_hidden_dim=48,
            dense_layers=(0,),
            dense_hidden_dim=104,
            hidden_dim=40,
        ),
        _like(
            "mxfp4",
            dim=96,
            norm_rounding="scale_first",
            swiglu_limit=7.0,
            mlp_bias=True,
            n_experts=5,
            n_experts_per_token=2,
            router="topk_softmax",
            router_bias=True,
            hidden_dim=64,
            expert_dtype="mxfp4",
        ),
        _like(
            "bert",
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
            n_heads=3,
            n_kv_heads=3,
        ),
    )
}


def louder(made: Weights) -> Weights:
    """Scale matrices up, so that a small model's logits differ enough to tell right from wrong."""
    made = made.map(lambda a: (a * np.float32(6)).astype(a.dtype) if a.ndim > 1 else a)
    for _, value in made.named():
        if isinstance(value, Mxfp4):
            scales = value.array.reshape(-1, 544)[:, 512:]
            scales += np.uint8(3)  # times 8
    return made


def small(name: str, dtype: object = np.float32, seed: int = 0) -> Weights:
    """Random weights of a small config, as NumPy arrays."""
    return louder(weights.random(CONFIGS[name], seed=seed, dtype=dtype, kind="numpy"))


def oracle(made: Weights, tokens: np.ndarray) -> np.ndarray:
    """All logits of tokens [batch, n] by the reference engine in float64."""
    exact = made.map(lambda a: a.astype(np.float64))
    state = State(exact, batch=tokens.shape[0], capacity=tokens.shape[1])
    return np.array(engines.get("reference").step(exact, state, tokens, all_logits=True))
