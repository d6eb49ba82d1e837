"""GGUF files of architecture `llama`: header, quantised blocks, configuration, tensor names.

The header is parsed here and not by the `gguf` package, which makes an array of every string: 0.1 s
against several for the vocabulary of a small model. The tests hold both against each other.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cufuse.checkpoint._source import CHUNK, CheckpointError, Plan, Stored, decoder_plan
from cufuse.config import Config, RopeScaling
from cufuse.device import Unsupported, bfloat16

MAGIC = b"GGUF"

# fmt: off
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}
# fmt: on

# Values and bytes of a block.
_BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
}

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


# ---- blocks -------------------------------------------------------------------------------------


def dequantize(raw: np.ndarray, type_name: str) -> np.ndarray:
    """Turn the bytes of whole blocks into values: float32, or the stored float type as it is."""
    if type_name == "F32":
        return raw.view("<f4")
    if type_name == "F16":
        return raw.view("<f2")
    if type_name == "BF16":
        return raw.view(bfloat16)
    blocks = raw.reshape(-1, _BLOCKS[type_name][1])
    scale = _halves(blocks, 0)
    if type_name == "Q8_0":
        return (blocks[:, 2:].view(np.int8) * scale).reshape(-1)
    if type_name == "Q4_0":
        return ((_nibbles(blocks[:, 2:]) - np.float32(8)) * scale).reshape(-1)
    return (_nibbles(blocks[:, 4:]) * scale + _halves(blocks, 2)).reshape(-1)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """The low nibbles are a block's first half, the high ones its second."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


# ---- the file -----------------------------------------------------------------------------------


class _Cursor:
    """Read a header front to back; the end of the file is an error, not a crash."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def _advance(self, size: int) -> int:
        begin, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise CheckpointError(
                f"{self.where} is truncated: its header ends after {len(self.data)} bytes; "
                "download it again"
            )
        return begin

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self._advance(struct.calcsize(code)))[0]

    def text(self) -> str:
        size = self.number("Q")
        begin = self._advance(size)
        return self.data[begin : begin + size].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            element, count = self.number("I"), self.number("Q")
            if element == _STRING:
                return [self.text() for _ in range(count)]
            if element in _SCALARS:
                code = np.dtype(_SCALARS[element]).newbyteorder("<")
                begin = self._advance(count * code.itemsize)
                return np.frombuffer(self.data, code, count, begin).tolist()
            kind = element
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.where}: metadata of type {kind} at byte {self.at}")
        return self.number(_SCALARS[kind])


class GgufFile:
    """An open GGUF file; tensors are read from the mapped file when asked for."""

    supported = tuple(_BLOCKS)

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise CheckpointError(
                    f"{path.name} is not a GGUF file: it does not begin with GGUF"
                )
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._data, path.name)
        cursor.at = len(MAGIC)
        version = cursor.number("I")
        if version not in (2, 3):
            raise Unsupported(
                f"{path.name} has GGUF version {version}; cufuse reads 2 and 3, little-endian"
            )
        n_tensors, n_values = cursor.number("Q"), cursor.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(n_values):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.number("I"))
        self.tensors: dict[str, Stored] = {}
        self._begin: dict[str, int] = {}
        for _ in range(n_tensors):
            name = cursor.text()
            n_dims = cursor.number("I")
            if n_dims > 4 or name in self.tensors:
                raise CheckpointError(f"{path.name}: the entry of tensor {name} is broken")
            sizes = tuple(cursor.number("Q") for _ in range(n_dims))
            kind = cursor.number("I")
            # ggml counts dimensions from the innermost one.
            self.tensors[name] = Stored(sizes[::-1], _TYPE_NAMES.get(kind, f"number {kind}"))
            self._begin[name] = cursor.number("Q")
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise CheckpointError(f"{path.name}: general.alignment is {align!r}")
        data_begin = -(-cursor.at // align) * align
        for name, stored in self.tensors.items():
            self._begin[name] += data_begin
            if stored.type in _BLOCKS:
                self._check_size(name, stored)

    def _check_size(self, name: str, stored: Stored) -> None:
        values, _ = _BLOCKS[stored.type]
        if stored.shape and stored.shape[-1] % values:
            raise CheckpointError(
                f"{self.path.name}: rows of tensor {name} hold {stored.shape[-1]} values, not a "
                f"multiple of the {values} in a {stored.type} block"
            )
        end = self._begin[name] + self._size_bytes(name)
        if end > len(self._data):
            raise CheckpointError(
                f"{self.path.name} is truncated: tensor {name} ends at byte {end} and the file "
                f"has {len(self._data)}; download it again"
            )

    def _size_bytes(self, name: str) -> int:
        stored = self.tensors[name]
        values, size = _BLOCKS[stored.type]
        return math.prod(stored.shape) // values * size

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """Yield a tensor's values in order, dequantised."""
        values, size = _BLOCKS[self.tensors[name].type]
        begin, total = self._begin[name], self._size_bytes(name)
        step = max(CHUNK // values, 1) * size
        for at in range(0, total, step):
            raw = np.frombuffer(self._data, np.uint8, min(step, total - at), begin + at)
            yield dequantize(raw, self.tensors[name].type)


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
    "out": "attn_output.weight",
    "out_bias": "attn_output.bias",
    "mlp_norm": "ffn_norm.weight",
    "router": "ffn_gate_inp.weight",
    "gate": "ffn_gate.weight",
    "gate_bias": "ffn_gate.bias",
    "up": "ffn_up.weight",
    "up_bias": "ffn_up.bias",
    "down": "ffn_down.weight",
    "down_bias": "ffn_down.bias",
}
_EXPERT_NAMES = _LAYER_NAMES | {
    "gate": "ffn_gate_exps.weight",
    "up": "ffn_up_exps.weight",
    "down": "ffn_down_exps.weight",
}

# Keys that change what a llama model computes and that have no counterpart in Config.
_REFUSED = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "embedding_scale",
    "expert_shared_count",
    "expert_weights_scale",
    "leading_dense_block_count",
    "logit_scale",
    "residual_scale",
    "rope.scaling.alpha",
    "rope.scaling.yarn_log_multiplier",
    "use_parallel_residual",
)

ROPE_FACTORS = "rope_freqs.weight"


def read_config(file: GgufFile) -> Config:
    """Read the sizes and choices of a `llama` model; raises Unsupported for everything else."""
    where, metadata = file.path.name, file.metadata
    if metadata.get("split.count", 1) > 1:
        raise Unsupported(
            f"{where} is one of {metadata['split.count']} parts; merge them with gguf-split"
        )
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise Unsupported(f"{where} has architecture {architecture}; cufuse reads llama from GGUF")
    for key in _REFUSED:
        if metadata.get(f"llama.{key}"):
            raise Unsupported(
                f"{where} sets llama.{key} = {metadata[f'llama.{key}']}, which cufuse has not"
            )

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"llama.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise Unsupported(f"{where}: llama.{key} differs from layer to layer")
            value = value[0]
        if value is None:
            raise CheckpointError(f"{where} has no llama.{key}")
        if not isinstance(value, int | float):
            raise CheckpointError(f"{where}: llama.{key} is {value!r}, wanted a number")
        return _shortest(value) if isinstance(value, float) else int(value)

    def size(key: str, default: int | None = None) -> int:
        value = get(key, default)
        if value < 1 or value != int(value):
            raise CheckpointError(f"{where}: llama.{key} is {value}, wanted a positive integer")
        return int(value)

    dim, n_heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", max(dim // n_heads, 1))
    if get("attention.value_length", head_dim) != head_dim:
        raise Unsupported(f"{where}: keys and values of different lengths")
    n_experts = get("expert_count", 0)
    rotary_dim = size("rope.dimension_count", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise CheckpointError(f"{where}: {rotary_dim} of {head_dim} values of a head rotate")
    embedding = file.tensors.get(_NAMES["embedding"])
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{where}: tensor {_NAMES['embedding']} is missing or not a matrix")

    def has(name: str) -> bool:
        return f"blk.0.{name}" in file.tensors

    return Config(
        name=file.path.stem,
        dim=dim,
        n_layers=size("block_count"),
        n_heads=n_heads,
        n_kv_heads=size("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        hidden_dim=get("expert_feed_forward_length", 0) * (n_experts > 0)
        or size("feed_forward_length"),
        vocab_size=embedding.shape[0],
        max_seq_len=size("context_length"),
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=float(get("rope.freq_base", 10000.0)),
        rope_partial=_partial(rotary_dim, head_dim),
        rope_scaling=_rope_scaling(file, get, rotary_dim),
        qkv_bias=has("attn_q.bias"),
        output_bias=has("attn_output.bias"),
        mlp_bias=has("ffn_up.bias"),
        window=get("attention.sliding_window", 0) or None,
        tied_embeddings=_NAMES["head"] not in file.tensors,
        n_experts=n_experts,
        n_experts_per_token=size("expert_used_count") if n_experts else 0,
    )


def _partial(rotary_dim: int, head_dim: int) -> float:
    """Return the share that head_dim is multiplied with and truncated: 30 / 44 comes to 29.99…"""
    share = rotary_dim / head_dim
    return share if int(head_dim * share) == rotary_dim else math.nextafter(share, 1.0)


def _shortest(value: float) -> float:
    """Undo the trip through float32: 9.999999747378752e-06 was 1e-05."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GgufFile, get: Callable[..., Any], rotary_dim: int) -> RopeScaling | None:
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    where = file.path.name
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


def read_plan(config: Config) -> Plan:
    """Name the tensors of a `llama` model. Rows of q and k are stored for interleaved rotation."""
    layer_names = _EXPERT_NAMES if config.n_experts else _LAYER_NAMES
    plan = decoder_plan(config, _NAMES, layer_names, "blk.{layer}.")
    for array, parts in plan.items():
        if array.endswith((".qkv", ".qkv_bias")):
            query, key, value = parts
            plan[array] = [
                dataclasses.replace(query, interleaved_heads=config.n_heads),
                dataclasses.replace(key, interleaved_heads=config.n_kv_heads),
                value,
            ]
    return plan
