"""GGUF files of architectures `llama`, `qwen2moe` and `qwen3moe`: configuration, tensors, values.

The `gguf` package reads the header and dequantises the blocks. Checked here is what it leaves open:
where a file ends, and what cufuse reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cufuse import mxfp4, weights
from cufuse.checkpoint._source import CHUNK, CheckpointError, Part, Plan, Stored, decoder_plan
from cufuse.config import Config, RopeScaling
from cufuse.device import Unsupported
from cufuse.tokenizer import INSTALL_MODELS

MAGIC = b"GGUF"
_MAX_DIMS = 4  # ggml's
_MXFP4_BYTES = 17  # of a block: its scale, then its values

# What the reader raises over bytes that make no sense.
_DAMAGE = (ValueError, LookupError, OverflowError, RecursionError)


# ---- the file -----------------------------------------------------------------------------------


def _read(path: Path) -> Any:
    """Open a file with the package's reader, whose slices past the end would just be shorter."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise Unsupported(
            f"GGUF files need the gguf package: {INSTALL_MODELS} (safetensors load without)"
        ) from error

    class Reader(GGUFReader):
        data: Any

        def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **options: Any) -> Any:
            # Slicing a memmap takes three times as long, and a vocabulary is 150,000 slices.
            if isinstance(self.data, np.memmap):
                self.data = self.data.view(np.ndarray)
            end = offset + int(count) * np.dtype(dtype).itemsize
            if end > self.data.size:
                raise CheckpointError(
                    f"{path.name} is truncated: its contents reach to byte {end} and the file has "
                    f"{self.data.size}; download it again"
                )
            return super()._get(offset, dtype, count, *args, **options)

    try:
        with np.errstate(over="ignore"):  # offsets that wrap around are caught afterwards
            return Reader(path)
    except CheckpointError:
        raise
    except _DAMAGE as error:
        if "GGMLQuantizationType" in str(error):
            raise Unsupported(
                f"{path.name} has a tensor of unknown type ({error}); cufuse reads "
                f"{', '.join(GgufFile.supported)}"
            ) from error
        raise CheckpointError(f"{path.name} is broken: {error}; download it again") from error


class Metadata(Mapping[str, Any]):
    """A file's keys and values; a value is read when it is first asked for, and kept."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields, self._where = fields, where
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            field = self._fields[key]
            try:
                self._values[key] = field.contents()
            except _DAMAGE as error:
                raise CheckpointError(
                    f"{self._where}: {key} is broken: {error}; download it again"
                ) from error
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def under(self, prefix: str) -> Metadata:
        """Return the part whose keys begin with prefix."""
        kept = {key: field for key, field in self._fields.items() if key.startswith(prefix)}
        return Metadata(kept, self._where)


class GgufFile:
    """An open GGUF file; tensors are read from the mapped file when asked for."""

    supported = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "MXFP4")

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            magic, version = file.read(len(MAGIC)), file.read(4)
        if magic != MAGIC:
            raise CheckpointError(f"{path.name} is not a GGUF file: it does not begin with GGUF")
        number = int.from_bytes(version, "little")
        if len(version) == 4 and number not in (2, 3):
            raise Unsupported(
                f"{path.name} has GGUF version {number}; cufuse reads 2 and 3, little-endian"
            )
        reader = _read(path)
        # The reader lists the header's counts as fields too.
        fields = {k: field for k, field in reader.fields.items() if not k.startswith("GGUF.")}
        self.metadata = Metadata(fields, path.name)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.tensors: dict[str, Stored] = {}
        for name, tensor in self._tensors.items():
            if len(tensor.shape) > _MAX_DIMS or tensor.data_offset < reader.data_offset:
                raise CheckpointError(f"{path.name}: the entry of tensor {name} is broken")
            # ggml counts dimensions from the innermost one.
            self.tensors[name] = Stored(tuple(tensor.shape[::-1].tolist()), tensor.tensor_type.name)

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """Yield a tensor's values in order: float32, or float16 where it is stored so."""
        import gguf

        kind = self._tensors[name].tensor_type
        stored = self._tensors[name].data.reshape(-1)
        if stored.dtype != np.uint8:
            for at in range(0, stored.size, CHUNK):
                yield stored[at : at + CHUNK]
            return
        values, size_bytes = gguf.GGML_QUANT_SIZES[kind]
        step = max(CHUNK // values, 1) * size_bytes
        for at in range(0, stored.size, step):
            yield gguf.quants.dequantize(stored[at : at + step], kind)

    def blocks(self, parts: list[Part]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (blocks, scales) of 4-bit experts, of each part one pair."""
        made = []
        for part in parts:
            stored = self._tensors[part.name].data.reshape(-1, _MXFP4_BYTES)
            # Byte j has columns j and j + 16 here, and 2 j and 2 j + 1 in blocks.
            low, high = stored[:, 1:] & 15, stored[:, 1:] >> 4
            halves = [nibbles[:, 0::2] | nibbles[:, 1::2] << 4 for nibbles in (low, high)]
            rows = (*part.shape[:-1], part.shape[-1] // mxfp4.BLOCK)
            blocks = np.concatenate(halves, 1).reshape(*rows, mxfp4.BLOCK // 2)
            made.append((blocks, stored[:, 0].reshape(rows).copy()))
        return made


# ---- the model ----------------------------------------------------------------------------------

_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}
_LAYER_NAMES = {
    "attn_norm": "attn_norm.weight",
    "qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "qkv_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "out": "attn_output.weight",
    "out_bias": "attn_output.bias",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "gate_bias": "ffn_gate.bias",
    "up": "ffn_up.weight",
    "up_bias": "ffn_up.bias",
    "down": "ffn_down.weight",
    "down_bias": "ffn_down.bias",
}
_EXPERT_NAMES = {
    "router": "ffn_gate_inp.weight",
    "router_correction": "exp_probs_b.bias",
    "gate": "ffn_gate_exps.weight",
    "up": "ffn_up_exps.weight",
    "down": "ffn_down_exps.weight",
    "shared_gate": "ffn_gate_shexp.weight",
    "shared_up": "ffn_up_shexp.weight",
    "shared_down": "ffn_down_shexp.weight",
    "shared_router": "ffn_gate_inp_shexp.weight",
}
# Architectures, and whether the weights of a token's experts are divided by their sum if the file
# does not say.
_ARCHITECTURES = {"llama": True, "qwen2moe": False, "qwen3moe": True}
_ROUTERS = {0: "softmax_topk", 1: "softmax_topk", 2: "sigmoid_topk"}  # of expert_gating_func

# Keys that change what a model computes and that have no counterpart in Config.
_REFUSED = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "embedding_scale",
    "expert_group_scale",
    "logit_scale",
    "residual_scale",
    "rope.scaling.alpha",
    "rope.scaling.yarn_log_multiplier",
    "use_parallel_residual",
)

ROPE_FACTORS = "rope_freqs.weight"


def read_config(file: GgufFile) -> Config:
    """Read a model's sizes and choices; raises Unsupported for those that cufuse does not have."""
    where, metadata = file.path.name, file.metadata
    if metadata.get("split.count", 1) > 1:
        raise Unsupported(
            f"{where} is one of {metadata['split.count']} parts; merge them with gguf-split"
        )
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise Unsupported(
            f"{where} has architecture {architecture}; cufuse reads {', '.join(_ARCHITECTURES)} "
            "from GGUF"
        )
    keys = _Keys(file, architecture)
    for key in _REFUSED:
        if metadata.get(f"{architecture}.{key}"):
            raise Unsupported(
                f"{where} sets {architecture}.{key} = {metadata[f'{architecture}.{key}']}, which "
                "cufuse has not"
            )
    dim, n_heads = keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", max(dim // n_heads, 1))
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise Unsupported(f"{where}: keys and values of different lengths")
    rotary_dim = keys.size("rope.dimension_count", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise CheckpointError(f"{where}: {rotary_dim} of {head_dim} values of a head rotate")
    embedding = file.tensors.get(_NAMES["embedding"])
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{where}: tensor {_NAMES['embedding']} is missing or not a matrix")

    def has(name: str) -> bool:
        return f"blk.0.{name}" in file.tensors

    made: dict[str, Any] = {
        "dim": dim,
        "n_layers": keys.size("block_count"),
        "n_heads": n_heads,
        "n_kv_heads": keys.size("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_seq_len": keys.size("context_length"),
        "norm_eps": keys.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": float(keys.get("rope.freq_base", 10000.0)),
        "rope_partial": _partial(rotary_dim, head_dim),
        "rope_scaling": _rope_scaling(file, keys, rotary_dim),
        "qkv_bias": has("attn_q.bias"),
        "output_bias": has("attn_output.bias"),
        "mlp_bias": has("ffn_up.bias"),
        "qk_norm": "head" if architecture == "qwen3moe" else "none",
        "window": keys.get("attention.sliding_window", 0) or None,
        "tied_embeddings": _NAMES["head"] not in file.tensors,
    }
    if keys.get("expert_count", 0):
        made |= _mixture(file, keys, made["n_layers"])
    else:
        made["hidden_dim"] = keys.size("feed_forward_length")
    return Config(name=file.path.stem, **made)


def _mixture(file: GgufFile, keys: _Keys, n_layers: int) -> dict[str, Any]:
    """Read experts, their router, shared experts and dense layers."""
    hidden_dim = keys.get("expert_feed_forward_length", 0) or keys.size("feed_forward_length")
    function = keys.get("expert_gating_func", 0)
    if function not in _ROUTERS:
        raise Unsupported(
            f"{keys.where} sets {keys.architecture}.expert_gating_func = {function}; cufuse has 1 "
            "(softmax) and 2 (sigmoid)"
        )
    n_dense = keys.get("leading_dense_block_count", 0)
    last = f"blk.{n_layers - 1}."
    shared = 0
    if last + _EXPERT_NAMES["shared_up"] in file.tensors:
        several = hidden_dim * keys.get("expert_shared_count", 0)
        shared = keys.get("expert_shared_feed_forward_length", 0) or several
        shared = shared or keys.size("feed_forward_length")
    matrices = tuple(f".{_EXPERT_NAMES[field]}" for field in ("gate", "up", "down"))
    types = {stored.type for name, stored in file.tensors.items() if name.endswith(matrices)}
    return {
        "hidden_dim": hidden_dim,
        "expert_dtype": "mxfp4" if types == {"MXFP4"} else "model",
        "n_experts": keys.size("expert_count"),
        "n_experts_per_token": keys.size("expert_used_count"),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", keys.normalizes)),
        "router": _ROUTERS[function],
        "router_correction": last + _EXPERT_NAMES["router_correction"] in file.tensors,
        "router_groups": keys.get("expert_group_count", 0) or 1,
        "router_top_groups": keys.get("expert_group_used_count", 0) or 1,
        "routed_scale": float(keys.get("expert_weights_scale", 0.0)) or 1.0,
        "shared_hidden_dim": shared,
        "shared_gated": last + _EXPERT_NAMES["shared_router"] in file.tensors,
        "dense_layers": tuple(range(n_dense)),
        "dense_hidden_dim": keys.size("feed_forward_length") if n_dense else 0,
    }


class _Keys:
    """The keys of an architecture, as numbers."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.metadata, self.where = file.metadata, file.path.name
        self.architecture, self.normalizes = architecture, _ARCHITECTURES[architecture]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a number, or the one that all layers have; a missing one is broken."""
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise Unsupported(f"{self.where}: {name} differs from layer to layer")
            value = value[0]
        if value is None:
            raise CheckpointError(f"{self.where} has no {name}")
        if not isinstance(value, int | float):
            raise CheckpointError(f"{self.where}: {name} is {value!r}, wanted a number")
        return _shortest(value) if isinstance(value, float) else int(value)

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.get(key, default)
        if value < 1 or value != int(value):
            raise CheckpointError(
                f"{self.where}: {self.architecture}.{key} is {value}, wanted a positive integer"
            )
        return int(value)


def _partial(rotary_dim: int, head_dim: int) -> float:
    """Return the share that head_dim is multiplied with and truncated: 30 / 44 comes to 29.99…"""
    share = rotary_dim / head_dim
    return share if int(head_dim * share) == rotary_dim else math.nextafter(share, 1.0)


def _shortest(value: float) -> float:
    """Undo the trip through float32: 9.999999747378752e-06 was 1e-05."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GgufFile, keys: _Keys, rotary_dim: int) -> RopeScaling | None:
    kind = file.metadata.get(f"{keys.architecture}.rope.scaling.type", "none")
    where, get = file.path.name, keys.get
    if kind == "none" and (linear := get("rope.scale_linear", 1.0)) != 1.0:
        return RopeScaling("linear", float(linear))
    if kind not in ("none", "linear", "yarn"):
        raise Unsupported(f"{where} has rope scaling {kind}; cufuse reads linear and yarn")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise Unsupported(f"{where} has both {kind} rope scaling and {ROPE_FACTORS}")
        # Llama 3's scaling is stored as the divisors it comes to, which is what longrope names.
        stored = file.tensors[ROPE_FACTORS]
        if stored.shape != (rotary_dim // 2,) or stored.type not in file.supported:
            raise CheckpointError(f"{where}: tensor {ROPE_FACTORS} is not [{rotary_dim // 2}]")
        factors = tuple(float(f) for chunk in file.chunks(ROPE_FACTORS) for f in chunk)
        return RopeScaling(
            "longrope",
            original_max_seq_len=get("context_length"),
            attention_factor=1.0,
            short_factor=factors,
            long_factor=factors,
        )
    if kind == "none":
        return None
    made = RopeScaling(kind, float(get("rope.scaling.factor")))
    if kind == "linear":
        return made
    factor = made.factor
    stretch = 1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0
    default = get("rope.scaling.attn_factor", 1.0)
    return dataclasses.replace(
        made,
        original_max_seq_len=get("rope.scaling.original_context_length"),
        attention_factor=stretch * get("rope.scaling.yarn_attn_factor", default),
        beta_fast=float(get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(get("rope.scaling.yarn_beta_slow", 1.0)),
    )


def read_plan(file: GgufFile, config: Config) -> Plan:
    """Name a model's tensors. Those of `llama` have rows of q and k for interleaved rotation."""
    plan = decoder_plan(config, _NAMES, _LAYER_NAMES, "blk.{layer}.", _EXPERT_NAMES)
    interleaved = file.metadata["general.architecture"] == "llama"
    for array, parts in plan.items():
        if interleaved and array.endswith((".qkv", ".qkv_bias")):
            query, key, value = parts
            plan[array] = [
                dataclasses.replace(query, interleaved_heads=config.n_heads),
                dataclasses.replace(key, interleaved_heads=config.n_kv_heads),
                value,
            ]
        elif array.endswith(".shared_router"):
            plan[array] = [dataclasses.replace(parts[0], shape=(config.dim,))]
    for array, replaced in weights.quantized(config).items():
        plan[array] = [part for name in replaced for part in plan.pop(name)]
    return plan
