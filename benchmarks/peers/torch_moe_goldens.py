#!/usr/bin/env python3
"""What Hugging Face transformers computes for tiny mixtures of experts: tests/data/moe_goldens.

  pip install torch transformers
  python benchmarks/peers/torch_moe_goldens.py

Writes a folder for each family, with config.json, model.safetensors (bfloat16) and golden.npz: the
logits, in float32, of a few tokens by the eager model in float32; and routers.npz: the experts and
weights that the routers of DeepSeek-V2 and V3 choose.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

DATA = Path(__file__).resolve().parents[2] / "tests" / "data" / "moe_goldens"
TOKENS, DIM = 11, 32

SIZES: dict[str, Any] = {
    "hidden_size": DIM,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "qwen3_moe": {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen2_moe": {
        "num_hidden_layers": 3,
        "num_experts": 6,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 40,
        "intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "norm_topk_prob": False,
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
}


def write_model(family: str) -> None:
    """Write a random model of a family, rounded to bfloat16, and its logits."""
    config = transformers.AutoConfig.for_model(
        family, **SIZES | FAMILIES[family], attn_implementation="eager"
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                p.uniform_(0.7, 1.3)
            elif p.ndim == 1 or name.endswith("_bias"):
                p.uniform_(-0.5, 0.5)
            else:
                p.normal_(0.0, 1.5 * p.shape[-1] ** -0.5)
    model.to(torch.bfloat16)
    folder = DATA / family
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    (folder / "generation_config.json").unlink(missing_ok=True)
    # Read anew: on the way through bfloat16 the rotary frequencies were rounded too.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(config.vocab_size, (1, TOKENS))
    with torch.no_grad():
        logits = model(tokens).logits[0]
    np.savez(folder / "golden.npz", tokens=tokens.int().numpy(), logits=logits.numpy())
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{family}: {size} bytes, logits of deviation {logits.std():.2f}")


def write_routers() -> None:
    """Write hidden states, routers and what they choose, experts in ascending order."""
    made: dict[str, Any] = {}
    shared = {"hidden_size": DIM, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5}
    shared |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    grouped = {"n_group": 8, "topk_group": 3}
    v2, v3 = transformers.DeepseekV2Config, transformers.DeepseekV3Config
    routers = {
        "v2_greedy": DeepseekV2TopkRouter(v2(**shared, n_routed_experts=32, topk_method="greedy")),
        "v2_groups": DeepseekV2TopkRouter(
            v2(**shared, **grouped, n_routed_experts=64, topk_method="group_limited_greedy")
        ),
        "v3": DeepseekV3TopkRouter(
            v3(**shared, **grouped, n_routed_experts=64, norm_topk_prob=True)
        ),
        "v3_raw": DeepseekV3TopkRouter(
            v3(**shared, **grouped, n_routed_experts=64, norm_topk_prob=False)
        ),
    }
    for name, router in routers.items():
        x = torch.randn(TOKENS, DIM)
        with torch.no_grad():
            router.weight.normal_(0.0, 1.5 * DIM**-0.5)
            if isinstance(router, DeepseekV3TopkRouter):
                router.e_score_correction_bias.uniform_(-0.3, 0.3)
                made[f"{name}.correction"] = router.e_score_correction_bias.numpy()
            _, weights, ids = router(x)
        ids, order = ids.sort(-1)
        made |= {
            f"{name}.x": x.numpy(),
            f"{name}.w": router.weight.detach().numpy(),
            f"{name}.ids": ids.int().numpy(),
            f"{name}.weights": weights.gather(-1, order).numpy(),
        }
    np.savez(DATA / "routers.npz", **made)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    DATA.mkdir(parents=True, exist_ok=True)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    for family in FAMILIES:
        write_model(family)
    write_routers()


if __name__ == "__main__":
    main()
