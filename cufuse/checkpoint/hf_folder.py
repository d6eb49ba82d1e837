"""Folders with config.json and safetensors files: llama, mistral, qwen, mixtures and BERT."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cufuse import mxfp4, weights
from cufuse.checkpoint._source import (
    CHUNK,
    CheckpointError,
    Part,
    Picked,
    Plan,
    Stored,
    decoder_plan,
)
from cufuse.config import Config, RopeScaling
from cufuse.device import Unsupported

INDEX = "model.safetensors.index.json"


# ---- the files ----------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises CheckpointError when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} holds no JSON object")
    return value


class HfFolder:
    """An open folder of safetensors files, sharded or not."""

    supported = ("F32", "F16", "BF16")

    def __init__(self, path: Path) -> None:
        # Importing cufuse.device has imported ml_dtypes, without which safetensors has no bfloat16.
        from safetensors import SafetensorError, safe_open

        self.path = path
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} has no config.json; give a model's whole folder")
        self.config = read_json(path / "config.json")
        self.tensors: dict[str, Stored] = {}
        self._file: dict[str, Any] = {}
        for file in self._files():
            if not file.is_file():
                raise FileNotFoundError(f"{path} has no {file.name}; download it again")
            try:
                opened = safe_open(file, framework="np")
                for name in opened.keys():  # noqa: SIM118 - it is no dict
                    if name in self.tensors:
                        raise CheckpointError(f"{path.name}: tensor {name} is in two files")
                    described = opened.get_slice(name)
                    self.tensors[name] = Stored(tuple(described.get_shape()), described.get_dtype())
                    self._file[name] = opened
            except SafetensorError as error:
                raise CheckpointError(
                    f"{file.name} is truncated or no safetensors file ({error}); download it again"
                ) from None

    def _files(self) -> list[Path]:
        index = self.path / INDEX
        if index.is_file():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not names:
                raise CheckpointError(f"{INDEX} has no weight_map")
            shards = sorted({str(name) for name in names.values()})
            if any(Path(name).name != name for name in shards):
                raise CheckpointError(f"{INDEX} names files outside its folder")
            return [self.path / name for name in shards]
        single = self.path / "model.safetensors"
        files = [single] if single.is_file() else sorted(self.path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{self.path} has no *.safetensors file")
        return files

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """Yield a tensor's values in order, as stored."""
        described = self._file[name].get_slice(name)
        sizes = self.tensors[name].shape
        width = int(np.prod(sizes[1:]))
        step = max(CHUNK // max(width, 1), 1)
        for at in range(0, sizes[0], step):
            yield np.asarray(described[at : min(at + step, sizes[0])])

    def blocks(self, parts: list[Part]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (blocks, scales) of 4-bit experts: of gate and up when their rows take turns."""
        blocks, scales = (np.concatenate(list(self.chunks(part.name))) for part in parts)
        if parts[0].name.endswith(_GATE_UP + "_blocks"):
            return [(blocks[:, half::2], scales[:, half::2]) for half in (0, 1)]
        return [(blocks, scales)]


# ---- config.json --------------------------------------------------------------------------------


class _Keys:
    """config.json with checked types; null counts as absent."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            got = "is missing" if value is None else f"is {value!r}, wanted a positive integer"
            raise CheckpointError(f"{self.where}: {key} {got}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            got = "is missing" if value is None else f"is {value!r}, wanted a number"
            raise CheckpointError(f"{self.where}: {key} {got}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} is {value!r}, wanted true or false")
        return value

    def refuse(self, key: str, *allowed: Any) -> None:
        """Raise Unsupported when a key is set to anything but `allowed`."""
        value = self.get(key)
        if value is not None and value not in allowed:
            wanted = f" other than {', '.join(map(repr, allowed))}" if allowed else ""
            raise Unsupported(f"{self.where} sets {key} = {value!r}; cufuse has no {key}{wanted}")


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}


def _activation(keys: _Keys, default: str) -> str:
    name = keys.get("hidden_act", default)
    if name not in _ACTIVATIONS:
        raise Unsupported(
            f"{keys.where}: hidden_act is {name!r}; cufuse has {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _rope(keys: _Keys, default_theta: float, head_dim: int) -> dict[str, Any]:
    """Read rotary positions: rope_theta and rope_scaling (v4), or rope_parameters (v5)."""
    where = keys.where
    given = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{where}: rope_scaling is {given!r}, wanted an object or null")
    if given and all(isinstance(value, dict) for value in given.values()):
        kinds = list(given.values())
        if any(kind != kinds[0] for kind in kinds):
            raise Unsupported(f"{where}: rope_parameters differ between {', '.join(given)}")
        given = kinds[0]
    rope = _Keys(given, f"{where}: rope")
    theta = rope.number("rope_theta", keys.number("rope_theta", default_theta))
    partial = rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    return {
        "rope_theta": theta,
        "rope_partial": partial,
        "rope_scaling": _rope_scaling(keys, rope, int(head_dim * partial)),
    }


def _rope_scaling(keys: _Keys, rope: _Keys, rotary_dim: int) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    trained = keys.size("max_position_embeddings")
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor"))
    if kind == "dynamic":
        return RopeScaling("dynamic", rope.number("factor"), trained)
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            rope.number("factor"),
            rope.size("original_max_position_embeddings"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    optional: dict[str, Any] = {
        name: rope.number(name) if rope.get(name) is not None else None
        for name in ("attention_factor", "mscale", "mscale_all_dim")
    }
    if kind == "yarn":
        original = rope.size("original_max_position_embeddings", trained)
        return RopeScaling(
            "yarn",
            rope.number("factor", trained / original),
            original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
            **optional,
        )
    if kind == "longrope":
        inner = rope.get("original_max_position_embeddings", trained)
        original = keys.size("original_max_position_embeddings", inner)
        lists = [rope.get("short_factor"), rope.get("long_factor")]
        for values in lists:
            if not isinstance(values, list) or len(values) != rotary_dim // 2:
                raise CheckpointError(
                    f"{rope.where}: short_factor and long_factor need {rotary_dim // 2} numbers"
                )
        return RopeScaling(
            "longrope",
            rope.number("factor", trained / original),
            original,
            attention_factor=optional["attention_factor"],
            short_factor=tuple(map(float, lists[0])),
            long_factor=tuple(map(float, lists[1])),
        )
    raise Unsupported(
        f"{rope.where} type is {kind!r}; cufuse has default, linear, dynamic, llama3, yarn and "
        "longrope"
    )


def _window(keys: _Keys, sliding: list[bool]) -> dict[str, Any]:
    """Say which layers have the window: every n-th from layer 0, all, or none."""
    types = keys.get("layer_types")
    if types is not None:
        if not isinstance(types, list):
            raise CheckpointError(f"{keys.where}: layer_types is {types!r}, wanted a list")
        known = {"full_attention": False, "sliding_attention": True}
        strange = [kind for kind in types if kind not in known]
        if strange:
            raise Unsupported(
                f"{keys.where}: layer_types has {strange[0]!r}; cufuse has {', '.join(known)}"
            )
        if len(types) != len(sliding):
            raise CheckpointError(
                f"{keys.where}: layer_types has {len(types)} entries for {len(sliding)} layers"
            )
        sliding = [known[kind] for kind in types]
    if not any(sliding):
        return {}
    window = keys.size("sliding_window")
    for every in range(1, len(sliding) + 1):
        if sliding == [i % every == 0 for i in range(len(sliding))]:
            return {"window": window, "window_every": every}
    layers = [i for i, slides in enumerate(sliding) if slides]
    raise Unsupported(
        f"{keys.where}: layers {', '.join(map(str, layers))} have a sliding window; cufuse has it "
        "on every n-th layer from layer 0"
    )


def _decoder(
    keys: _Keys,
    *,
    eps: float,
    max_seq_len: int,
    theta: float = 10000.0,
    head_dim: int | None = None,
) -> dict[str, Any]:
    """Read what all decoders share; the numbers are the family's defaults."""
    dim, n_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    head_dim = keys.size("head_dim", head_dim or max(dim // n_heads, 1))
    return {
        "dim": dim,
        "n_layers": keys.size("num_hidden_layers"),
        "n_heads": n_heads,
        "n_kv_heads": keys.size("num_key_value_heads", n_heads),
        "head_dim": head_dim,
        "hidden_dim": keys.size("intermediate_size"),
        "vocab_size": keys.size("vocab_size"),
        "max_seq_len": keys.size("max_position_embeddings", max_seq_len),
        "norm_eps": keys.number("rms_norm_eps", eps),
        "activation": _activation(keys, "silu"),
        **_rope(keys, theta, head_dim),
    }


def _llama(keys: _Keys) -> dict[str, Any]:
    made = _decoder(keys, eps=1e-6, max_seq_len=2048)
    keys.refuse("sliding_window")
    bias = keys.flag("attention_bias")
    return made | {
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": keys.flag("mlp_bias"),
    }


def _mistral(keys: _Keys) -> dict[str, Any]:
    made = _decoder(keys, eps=1e-6, max_seq_len=4096 * 32)
    slides = keys.get("sliding_window") is not None
    return made | _window(keys, [slides] * made["n_layers"])


def _qwen_window(keys: _Keys, n_layers: int) -> dict[str, Any]:
    if not keys.flag("use_sliding_window"):
        return {}
    first = keys.number("max_window_layers", 28)
    return _window(keys, [i >= first for i in range(n_layers)])


def _qwen2(keys: _Keys) -> dict[str, Any]:
    made = _decoder(keys, eps=1e-6, max_seq_len=32768)
    return made | {"qkv_bias": True} | _qwen_window(keys, made["n_layers"])


def _qwen3(keys: _Keys) -> dict[str, Any]:
    made = _decoder(keys, eps=1e-6, max_seq_len=32768, head_dim=128)
    bias = keys.flag("attention_bias")
    made |= {"qk_norm": "head", "qkv_bias": bias, "output_bias": bias}
    return made | _qwen_window(keys, made["n_layers"])


def _qwen2_moe(keys: _Keys) -> dict[str, Any]:
    made = _decoder(keys, eps=1e-6, max_seq_len=32768)
    made |= {"qkv_bias": keys.flag("qkv_bias", True)}
    made |= _dense_among(keys, made) | _experts(keys, "num_experts", hidden="moe_intermediate_size")
    made |= {
        "shared_hidden_dim": keys.size("shared_expert_intermediate_size"),
        "shared_gated": True,
    }
    if keys.flag("use_sliding_window"):
        first_without = keys.number("max_window_layers", 28)
        slides = [i % 2 == 0 and i < first_without for i in range(made["n_layers"])]
        made |= _window(keys, slides)
    return made


def _qwen3_moe(keys: _Keys) -> dict[str, Any]:
    made = _decoder(keys, eps=1e-6, max_seq_len=32768)
    keys.refuse("shared_expert_intermediate_size", 0)
    bias = keys.flag("attention_bias")
    made |= {"qk_norm": "head", "qkv_bias": bias, "output_bias": bias}
    made |= _dense_among(keys, made) | _experts(keys, "num_experts", hidden="moe_intermediate_size")
    if keys.flag("use_sliding_window"):
        made |= _window(keys, [True] * made["n_layers"])
    return made


def _dense_among(keys: _Keys, decoder: dict[str, Any]) -> dict[str, Any]:
    """Say which layers of a Qwen mixture have one MLP, whose width the decoder's is."""
    every, given = keys.size("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    if not isinstance(given, list) or not all(isinstance(layer, int) for layer in given):
        raise CheckpointError(f"{keys.where}: mlp_only_layers is {given!r}, wanted layer numbers")
    layers = range(decoder["n_layers"])
    dense = tuple(i for i in layers if i in given or (i + 1) % every)
    return {"dense_layers": dense, "dense_hidden_dim": decoder["hidden_dim"]} if dense else {}


def _olmoe(keys: _Keys) -> dict[str, Any]:
    made = _decoder(keys, eps=1e-5, max_seq_len=4096)
    keys.refuse("clip_qkv")
    keys.refuse("shared_expert_intermediate_size", 0)
    keys.refuse("sliding_window")
    bias = keys.flag("attention_bias")
    made |= {"qk_norm": "full", "qkv_bias": bias, "output_bias": bias}
    return made | _experts(keys, "num_experts", hidden="intermediate_size")


def _mixtral(keys: _Keys) -> dict[str, Any]:
    made = _decoder(keys, eps=1e-5, theta=1e6, max_seq_len=4096 * 32)
    slides = keys.get("sliding_window") is not None
    made |= _experts(keys, "num_local_experts", hidden="intermediate_size")
    return made | {"norm_topk_prob": True} | _window(keys, [slides] * made["n_layers"])


def _gpt_oss(keys: _Keys) -> dict[str, Any]:
    made = _decoder(keys, eps=1e-5, theta=150000.0, max_seq_len=131072, head_dim=64)
    bias = keys.flag("attention_bias", True)
    made |= _experts(keys, "num_local_experts", hidden="intermediate_size")
    made |= _window(keys, [i % 2 == 0 for i in range(made["n_layers"])])
    return made | {
        "norm_rounding": "scale_first",
        "swiglu_limit": keys.number("swiglu_limit", 7.0),
        "swiglu_alpha": keys.number("swiglu_alpha", 1.702),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": True,
        "sinks": True,
        "router": "topk_softmax",
        "router_bias": True,
        "norm_topk_prob": True,
    }


def _experts(keys: _Keys, count: str, *, hidden: str) -> dict[str, Any]:
    # Files of transformers 5 call num_experts num_local_experts, whatever the family.
    if keys.get(count) is None and keys.get("num_local_experts") is not None:
        count = "num_local_experts"
    made = {
        "hidden_dim": keys.size(hidden),
        "n_experts": keys.size(count),
        "n_experts_per_token": keys.size("num_experts_per_tok"),
        "norm_topk_prob": keys.flag("norm_topk_prob"),
    }
    if made["n_experts_per_token"] > made["n_experts"]:
        raise CheckpointError(
            f"{keys.where}: num_experts_per_tok is {made['n_experts_per_token']} of "
            f"{made['n_experts']} experts"
        )
    return made


def _bert(keys: _Keys) -> dict[str, Any]:
    keys.refuse("position_embedding_type", "absolute")
    keys.refuse("is_decoder", False)
    dim, n_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    return {
        "dim": dim,
        "n_layers": keys.size("num_hidden_layers"),
        "n_heads": n_heads,
        "n_kv_heads": n_heads,
        "head_dim": max(dim // n_heads, 1),
        "hidden_dim": keys.size("intermediate_size"),
        "vocab_size": keys.size("vocab_size"),
        "max_seq_len": keys.size("max_position_embeddings", 512),
        "norm": "layernorm",
        "norm_eps": keys.number("layer_norm_eps", 1e-12),
        "norm_placement": "post",
        "activation": _activation(keys, "gelu"),
        "gated": False,
        "rope_theta": None,
        "causal": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "n_token_types": keys.size("type_vocab_size", 2),
        "has_head": False,
    }


_FAMILIES: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "bert": _bert,
}


def read_config(folder: HfFolder) -> Config:
    """Read config.json; raises Unsupported for a family or feature that cufuse does not have."""
    keys = _Keys(folder.config, f"{folder.path.name}/config.json")
    family = keys.get("model_type")
    if family not in _FAMILIES:
        raise Unsupported(
            f"{keys.where}: model_type is {family!r}; cufuse has {', '.join(_FAMILIES)}"
        )
    quantization = keys.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    four_bits = family == "gpt_oss" and method == "mxfp4"
    if quantization is not None and not four_bits:
        raise Unsupported(
            f"{keys.where}: weights are quantised ({method}); cufuse reads F32, F16 and BF16 "
            "safetensors, and experts of gpt_oss in mxfp4"
        )
    made = _FAMILIES[family](keys)
    if four_bits:
        made["expert_dtype"] = "mxfp4"
    if family != "bert":
        made["tied_embeddings"] = _tied(folder, keys)
    return Config(name=folder.path.name, **made)


def _tied(folder: HfFolder, keys: _Keys) -> bool:
    """Decide by what the file holds: a head that is there is used."""
    tied, head = keys.flag("tie_word_embeddings"), _HEAD in folder.tensors
    if not head and not tied:
        warnings.warn(
            f"{keys.where} says the head is not tied, but {_HEAD} is missing: using the embedding",
            stacklevel=4,
        )
    if not (head and tied):
        return not head
    embedding = _prefix(folder) + "embed_tokens.weight"
    if _same(folder, embedding, _HEAD):
        return True
    warnings.warn(
        f"{keys.where} says the head is tied, but {_HEAD} is there and differs: using it",
        stacklevel=4,
    )
    return False


def _same(folder: HfFolder, a: str, b: str) -> bool:
    if folder.tensors.get(a) != folder.tensors.get(b) or a not in folder.tensors:
        return False
    if folder.tensors[a].type not in folder.supported:
        return False
    pairs = zip(folder.chunks(a), folder.chunks(b), strict=True)
    return all(x.tobytes() == y.tobytes() for x, y in pairs)


# ---- tensor names -------------------------------------------------------------------------------

_HEAD = "lm_head.weight"
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LAYER_NAMES: dict[str, Any] = {
    "attn_norm": "input_layernorm.weight",
    "qkv": tuple(f"{name}.weight" for name in _QKV),
    "qkv_bias": tuple(f"{name}.bias" for name in _QKV),
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "out": "self_attn.o_proj.weight",
    "out_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up": "mlp.up_proj.weight",
    "up_bias": "mlp.up_proj.bias",
    "down": "mlp.down_proj.weight",
    "down_bias": "mlp.down_proj.bias",
}
_EXPERT_NAMES: dict[str, Any] = {
    "router": "mlp.gate.weight",
    "gate": "mlp.experts.{expert}.gate_proj.weight",
    "up": "mlp.experts.{expert}.up_proj.weight",
    "down": "mlp.experts.{expert}.down_proj.weight",
    "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_up": "mlp.shared_expert.up_proj.weight",
    "shared_down": "mlp.shared_expert.down_proj.weight",
    "shared_router": "mlp.shared_expert_gate.weight",
}
_MIXTRAL_NAMES: dict[str, Any] = {
    "router": "block_sparse_moe.gate.weight",
    "gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "up": "block_sparse_moe.experts.{expert}.w3.weight",
    "down": "block_sparse_moe.experts.{expert}.w2.weight",
}
_GATE_UP = "mlp.experts.gate_up_proj"  # rows of gate and up take turns
_DOWN = "mlp.experts.down_proj"
_GPT_OSS_NAMES: dict[str, Any] = {
    "sinks": "self_attn.sinks",
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.bias",
    "gate": Picked(_GATE_UP, every=2, transposed=True),
    "gate_bias": Picked(_GATE_UP + "_bias", every=2),
    "up": Picked(_GATE_UP, first=1, every=2, transposed=True),
    "up_bias": Picked(_GATE_UP + "_bias", first=1, every=2),
    "down": Picked(_DOWN, transposed=True),
    "down_bias": _DOWN + "_bias",
}
_BERT_QKV = ("attention.self.query", "attention.self.key", "attention.self.value")
_BERT_LAYER_NAMES: dict[str, Any] = {
    "qkv": tuple(f"{name}.weight" for name in _BERT_QKV),
    "qkv_bias": tuple(f"{name}.bias" for name in _BERT_QKV),
    "out": "attention.output.dense.weight",
    "out_bias": "attention.output.dense.bias",
    "attn_norm": "attention.output.LayerNorm.weight",
    "attn_norm_bias": "attention.output.LayerNorm.bias",
    "up": "intermediate.dense.weight",
    "up_bias": "intermediate.dense.bias",
    "down": "output.dense.weight",
    "down_bias": "output.dense.bias",
    "mlp_norm": "output.LayerNorm.weight",
    "mlp_norm_bias": "output.LayerNorm.bias",
}
_BERT_NAMES = {
    "embedding": "embeddings.word_embeddings.weight",
    "position_embedding": "embeddings.position_embeddings.weight",
    "token_type": "embeddings.token_type_embeddings.weight",
    "embedding_norm": "embeddings.LayerNorm.weight",
    "embedding_norm_bias": "embeddings.LayerNorm.bias",
}


def _prefix(folder: HfFolder) -> str:
    """Tensors of a model without its head have no "model." before them."""
    return "" if "embed_tokens.weight" in folder.tensors else "model."


def read_plan(folder: HfFolder, config: Config) -> Plan:
    """Name the tensors that fill each array."""
    family = folder.config["model_type"]
    if family == "bert":
        return _bert_plan(folder, config)
    before = _prefix(folder)
    names = {
        "embedding": before + "embed_tokens.weight",
        "final_norm": before + "norm.weight",
        "head": _HEAD,
    }
    expert_names = {"mixtral": _MIXTRAL_NAMES, "gpt_oss": _GPT_OSS_NAMES}
    plan = decoder_plan(
        config,
        names,
        _LAYER_NAMES,
        before + "layers.{layer}.",
        expert_names.get(family, _EXPERT_NAMES),
    )
    wanted = weights.shapes(config)
    for array, replaced in weights.quantized(config).items():
        _, layer, field = array.split(".")
        rows = sum(wanted[name][1] for name in replaced)
        shape = (config.n_experts, rows, wanted[replaced[0]][2] // mxfp4.BLOCK)
        name = f"{before}layers.{layer}.{_GATE_UP if field == 'gate_up' else _DOWN}"
        for part in replaced:
            del plan[part]
        plan[array] = [
            Part(name + "_blocks", (*shape, mxfp4.BLOCK // 2), types=("U8",)),
            Part(name + "_scales", shape, types=("U8",)),
        ]
    return plan


def _bert_plan(folder: HfFolder, config: Config) -> Plan:
    before = "bert." if "bert." + _BERT_NAMES["embedding"] in folder.tensors else ""

    def rename(name: str) -> str:
        # Files older than 2019 call a norm's weight gamma and its bias beta.
        if name.endswith(("LayerNorm.weight", "LayerNorm.bias")) and _old(folder):
            return name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
        return name

    names = {array: before + rename(name) for array, name in _BERT_NAMES.items()}
    layer_names = {
        array: name if isinstance(name, tuple) else rename(name)
        for array, name in _BERT_LAYER_NAMES.items()
    }
    return decoder_plan(config, names, layer_names, before + "encoder.layer.{layer}.")


def _old(folder: HfFolder) -> bool:
    return any(name.endswith("embeddings.LayerNorm.gamma") for name in folder.tensors)


def ignored(folder: HfFolder, config: Config) -> tuple[str, ...]:
    """Return the endings of tensors that are no part of the model's result.

    Rotary frequencies follow from the configuration; a BERT's sentences are pooled by their mean,
    without its pooler and task heads; a head equal to the tied embedding is not kept twice.
    """
    endings = ["rotary_emb.inv_freq"]
    if folder.config["model_type"] == "bert":
        endings += [n for n in folder.tensors if n.startswith(("cls.", "pooler.", "bert.pooler."))]
        endings += ["embeddings.position_ids"]
    elif config.tied_embeddings:
        endings += [_HEAD]
    return tuple(endings)
