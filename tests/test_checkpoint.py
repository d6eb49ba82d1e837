"""GGUF files and safetensors folders, made here in every type and family, whole and broken."""

from __future__ import annotations

import json
import struct
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from conftest import to_numpy
from safetensors.numpy import load_file, save_file

from cufuse import checkpoint, config, device, weights
from cufuse.checkpoint import CheckpointError, _source, gguf_file
from cufuse.device import Unsupported

DIM, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB, LAYERS = 64, 4, 2, 32, 96, 40, 2
TYPES = {name: gguf.GGMLQuantizationType[name] for name in gguf_file.GgufFile.supported}


# ---- GGUF ---------------------------------------------------------------------------------------


def gguf_tensors(rng: np.random.Generator, *, experts: int = 0, bias: bool = False) -> dict:
    """Make a llama's tensors under the names that GGUF gives them."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    e = (experts,) if experts else ()
    suffix = "_exps" if experts else ""
    shapes = {"token_embd.weight": (VOCAB, DIM), "output_norm.weight": (DIM,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (DIM,),
            f"blk.{i}.attn_q.weight": (q, DIM),
            f"blk.{i}.attn_k.weight": (kv, DIM),
            f"blk.{i}.attn_v.weight": (kv, DIM),
            f"blk.{i}.attn_output.weight": (DIM, q),
            f"blk.{i}.ffn_norm.weight": (DIM,),
            f"blk.{i}.ffn_gate{suffix}.weight": (*e, HIDDEN, DIM),
            f"blk.{i}.ffn_up{suffix}.weight": (*e, HIDDEN, DIM),
            f"blk.{i}.ffn_down{suffix}.weight": (*e, DIM, HIDDEN),
        }
        if experts:
            shapes[f"blk.{i}.ffn_gate_inp.weight"] = (experts, DIM)
        if bias:
            shapes |= {
                f"blk.{i}.attn_q.bias": (q,),
                f"blk.{i}.attn_k.bias": (kv,),
                f"blk.{i}.attn_v.bias": (kv,),
            }
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


METADATA: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": DIM,
    "llama.feed_forward_length": HIDDEN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.key_length": HEAD_DIM,
    "llama.attention.value_length": HEAD_DIM,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.rope.freq_base": 5000.0,
}


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    type_name: str = "F32",
    metadata: dict[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """Write a file with the gguf package; matrices get the type, vectors stay F32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (METADATA | (metadata or {})).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_string(key, value)
    for name, values in tensors.items():
        stored = type_name if values.ndim > 1 else "F32"
        if stored == "F32":
            writer.add_tensor(name, values)
        else:
            packed = gguf.quants.quantize(values, TYPES[stored])
            writer.add_tensor(name, packed, raw_dtype=TYPES[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def decoded(values: np.ndarray, type_name: str) -> np.ndarray:
    """Return what a stored tensor is worth, its blocks decoded one by one as ggml lays them out."""
    if type_name == "F32" or values.ndim == 1:
        return values
    packed = gguf.quants.quantize(values, TYPES[type_name])
    if type_name in ("F16", "BF16"):
        stored = packed.view(np.float16 if type_name == "F16" else ml_dtypes.bfloat16)
        return stored.astype(np.float32)
    size = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "MXFP4": 17}[type_name]
    blocks = packed.reshape(-1, size)
    made = np.empty((len(blocks), 32), np.float32)
    for row, block in zip(made, blocks, strict=True):
        if type_name == "MXFP4":
            codes = np.concatenate([block[1:] % 16, block[1:] // 16]).tolist()
            fp4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
            signed = [-fp4[c - 8] if c > 7 else fp4[c] for c in codes]
            row[:] = [value * 2.0 ** (int(block[0]) - 127) for value in signed]
            continue
        scale = np.float32(block[:2].view(np.float16)[0])
        if type_name == "Q8_0":
            row[:] = [scale * np.float32(q) for q in block[2:].view(np.int8)]
            continue
        quants = block[size - 16 :].astype(np.int32)
        whole = np.concatenate([quants % 16, quants // 16])  # low nibbles come first
        if type_name == "Q4_0":
            row[:] = [scale * np.float32(q - 8) for q in whole]
        else:
            least = np.float32(block[2:4].view(np.float16)[0])
            row[:] = [scale * np.float32(q) + least for q in whole]
    return made.reshape(values.shape)


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's order of q and k rows one row at a time."""
    made = np.empty_like(rows)
    for row in range(len(rows)):
        head, at = divmod(row, len(rows) // heads)
        half = len(rows) // heads // 2
        made[head * 2 * half + at // 2 + (at % 2) * half] = rows[row]
    return made


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_gguf_values(tmp_path, rng, monkeypatch, type_name, bias):
    monkeypatch.setattr(gguf_file, "CHUNK", 1000)  # many chunks, the last one shorter
    given = gguf_tensors(rng, bias=bias)
    path = write_gguf(tmp_path / "m.gguf", given, type_name)
    tensors = {name: decoded(values, type_name) for name, values in given.items()}
    loaded = checkpoint.load(path, dtype=np.float32)
    assert loaded.config.tied_embeddings and loaded.config.qkv_bias == bias
    assert loaded.weights.head is loaded.weights.embedding
    np.testing.assert_array_equal(loaded.weights.embedding, tensors["token_embd.weight"])
    np.testing.assert_array_equal(loaded.weights.final_norm, tensors["output_norm.weight"])
    for i, layer in enumerate(loaded.weights.layers):
        at = {n.removeprefix(f"blk.{i}."): t for n, t in tensors.items()}
        for kind in ["weight", "bias"] if bias else ["weight"]:
            wanted = [
                unpermuted(at[f"attn_q.{kind}"], HEADS),
                unpermuted(at[f"attn_k.{kind}"], KV_HEADS),
                at[f"attn_v.{kind}"],
            ]
            got = layer.qkv if kind == "weight" else layer.qkv_bias
            np.testing.assert_array_equal(got, np.concatenate(wanted))
        for ours, theirs in {
            "attn_norm": "attn_norm",
            "out": "attn_output",
            "mlp_norm": "ffn_norm",
            "gate": "ffn_gate",
            "up": "ffn_up",
            "down": "ffn_down",
        }.items():
            np.testing.assert_array_equal(getattr(layer, ours), at[f"{theirs}.weight"])


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q8_0"])
def test_gguf_converts_to_every_dtype(tmp_path, rng, monkeypatch, type_name, dtype):
    monkeypatch.setattr(gguf_file, "CHUNK", 100)  # many chunks, the last one shorter
    tensors = gguf_tensors(rng)
    path = write_gguf(tmp_path / "m.gguf", tensors, type_name)
    made = checkpoint.load(path, dtype=dtype).weights
    assert {array.dtype for _, array in made.named()} == {np.dtype(dtype)}
    wanted = decoded(tensors["blk.1.ffn_up.weight"], type_name).astype(dtype)
    np.testing.assert_array_equal(made.layers[1].up, wanted)


TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.tokens": ["a", "ü", "", "<s>"],
    "tokenizer.ggml.scores": [0.5, -1.0, -2.0, 0.0],
    "tokenizer.ggml.token_type": [1, 1, 2, 3],
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.model": "gpt2",
}


def test_gguf_header(tmp_path, rng):
    tensors = gguf_tensors(rng)
    path = write_gguf(tmp_path / "m.gguf", tensors, "Q4_0", TOKENIZER)
    file = gguf_file.GgufFile(path)
    given = {"general.architecture": "llama"} | METADATA | TOKENIZER
    assert len(file.metadata) == len(given)
    for key, value in given.items():
        got = file.metadata[key]
        assert got == (np.float32(value) if isinstance(value, float) else value), key
        assert type(got) is type(value), key
    described = {n: (t.shape, "Q4_0" if t.ndim > 1 else "F32") for n, t in tensors.items()}
    assert {n: (t.shape, t.type) for n, t in file.tensors.items()} == described
    assert checkpoint.tokenizer_source(path) == TOKENIZER


def test_gguf_metadata_is_read_once(tmp_path, rng, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(rng), metadata=TOKENIZER)
    read, contents = [], gguf.ReaderField.contents

    def counted(field: Any) -> Any:
        read.append(field.name)
        return contents(field)

    monkeypatch.setattr(gguf.ReaderField, "contents", counted)
    source = checkpoint.load(path, dtype=np.float32).tokenizer_source
    tokens = "tokenizer.ggml.tokens"
    assert tokens not in read
    assert source[tokens] is source[tokens]
    assert read.count(tokens) == 1


def test_gguf_without_its_package(tmp_path, rng, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(rng))
    folder = write_folder(tmp_path / "m", "llama", hf_tensors(rng, "llama"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    text = r'GGUF files need the gguf package: pip install "cufuse\[models\]"'
    for read in (checkpoint.read_config, checkpoint.tokenizer_source):
        with pytest.raises(Unsupported, match=text):
            read(path)
    with pytest.raises(Unsupported, match=text):
        checkpoint.load(path, dtype=np.float32)
    checkpoint.load(folder, dtype=np.float32)


@pytest.mark.parametrize("rotary", [HEAD_DIM, 20], ids=["whole", "partial"])
def test_half_split_rows_give_the_scores_of_interleaved_rows(rng, rotary):
    tokens = 9
    x = rng.standard_normal((tokens, DIM))
    inverse = 100.0 ** (-np.arange(0, rotary, 2) / rotary)
    angle = np.arange(tokens)[:, None, None] * inverse

    def rotated(rows: np.ndarray, heads: int, *, interleaved: bool) -> np.ndarray:
        y = (x @ rows.T).reshape(tokens, heads, HEAD_DIM)
        if interleaved:
            first, second = slice(0, rotary, 2), slice(1, rotary, 2)
        else:
            first, second = slice(0, rotary // 2), slice(rotary // 2, rotary)
        made = y.copy()
        made[..., first] = y[..., first] * np.cos(angle) - y[..., second] * np.sin(angle)
        made[..., second] = y[..., first] * np.sin(angle) + y[..., second] * np.cos(angle)
        return np.repeat(made, HEADS // heads, axis=1)

    q = rng.standard_normal((HEADS * HEAD_DIM, DIM))
    k = rng.standard_normal((KV_HEADS * HEAD_DIM, DIM))
    q2, k2 = (
        checkpoint.half_split(q, HEADS, rotary),
        checkpoint.half_split(k, KV_HEADS, rotary),
    )
    wanted = np.einsum(
        "qhd,khd->hqk",
        rotated(q, HEADS, interleaved=True),
        rotated(k, KV_HEADS, interleaved=True),
    )

    def scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return np.einsum(
            "qhd,khd->hqk",
            rotated(q, HEADS, interleaved=False),
            rotated(k, KV_HEADS, interleaved=False),
        )

    np.testing.assert_allclose(scores(q2, k2), wanted, atol=1e-9)
    assert np.abs(scores(q, k) - wanted).max() > 1  # the wrong order does not go unseen


def test_gguf_config(tmp_path, rng):
    path = write_gguf(tmp_path / "small.gguf", gguf_tensors(rng))
    wanted = config.Config(
        name="small",
        dim=DIM,
        n_layers=LAYERS,
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_dim=HIDDEN,
        vocab_size=VOCAB,
        max_seq_len=128,
        rope_theta=5000.0,
        tied_embeddings=True,
    )
    assert checkpoint.read_config(path) == wanted
    loaded = checkpoint.load(path, dtype=np.float32)
    assert loaded.config == wanted and loaded.tokenizer_source is None
    names = {name for name, _ in loaded.weights.named()}
    assert names == {*weights.shapes(wanted), "head"}


@pytest.mark.parametrize("rotary", range(2, HEAD_DIM + 1, 2))
def test_gguf_partial_rotation(tmp_path, rng, rotary):
    keys = {"llama.rope.dimension_count": rotary}
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(rng), "F32", keys)
    assert checkpoint.read_config(path).rotary_dim == rotary


def test_partial_rotation_survives_truncation():
    for head in range(2, 257):
        for rotary in range(2, head + 1, 2):
            assert int(head * gguf_file._partial(rotary, head)) == rotary


def test_gguf_head_is_used_when_it_is_there(tmp_path, rng):
    tensors = gguf_tensors(rng) | {"output.weight": np.ones((VOCAB, DIM), np.float32)}
    loaded = checkpoint.load(write_gguf(tmp_path / "m.gguf", tensors), dtype=np.float32)
    assert not loaded.config.tied_embeddings
    assert (loaded.weights.head == 1).all()


def test_gguf_experts(tmp_path, rng):
    keys = {"llama.expert_count": 3, "llama.expert_used_count": 2}
    tensors = gguf_tensors(rng, experts=3)
    path = write_gguf(tmp_path / "m.gguf", tensors, "Q8_0", keys)
    loaded = checkpoint.load(path, dtype=np.float32)
    made = loaded.config
    assert (made.n_experts, made.n_experts_per_token, made.norm_topk_prob) == (3, 2, True)
    for ours, theirs in {
        "router": "ffn_gate_inp",
        "gate": "ffn_gate_exps",
        "up": "ffn_up_exps",
        "down": "ffn_down_exps",
    }.items():
        got = getattr(loaded.weights.layers[1], ours)
        wanted = decoded(tensors[f"blk.1.{theirs}.weight"], "Q8_0")
        np.testing.assert_array_equal(got, wanted)


GOLDENS = Path(__file__).resolve().parent / "data" / "moe_goldens"
QWEN = {  # Hugging Face's names in a layer -> GGUF's
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}


def qwen_gguf(path: Path, folder: Path, architecture: str, **changes: Any) -> Path:
    """Write a folder's model, whose dense layers come first, as a GGUF file."""
    made = checkpoint.read_config(folder)
    tensors: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, stored in sorted(load_file(folder / "model.safetensors").items()):
        values = stored.astype(np.float32)
        outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
        stem, _, kind = name.rpartition(".")
        if not stem.startswith("model.layers."):
            tensors[f"{outside.get(stem, 'output')}.{kind}"] = values
            continue
        layer, _, rest = stem.removeprefix("model.layers.").partition(".")
        if ".experts." in rest:
            matrix = rest.rpartition(".")[2].removesuffix("_proj")
            stacks.setdefault(f"blk.{layer}.ffn_{matrix}_exps.{kind}", []).append(values)
        else:
            flat = values.reshape(-1) if rest == "mlp.shared_expert_gate" else values
            tensors[f"blk.{layer}.{QWEN[rest]}.{kind}"] = flat
    tensors |= {name: np.stack(experts) for name, experts in stacks.items()}
    keys = {
        "block_count": made.n_layers,
        "context_length": made.max_seq_len,
        "embedding_length": made.dim,
        "feed_forward_length": made.dense_hidden_dim or made.hidden_dim,
        "attention.head_count": made.n_heads,
        "attention.head_count_kv": made.n_kv_heads,
        "attention.key_length": made.head_dim,
        "attention.value_length": made.head_dim,
        "attention.layer_norm_rms_epsilon": made.norm_eps,
        "rope.freq_base": made.rope_theta,
        "expert_count": made.n_experts,
        "expert_used_count": made.n_experts_per_token,
        "expert_feed_forward_length": made.hidden_dim,
        **changes,
    }
    named = {f"{architecture}.{key}": value for key, value in keys.items()}
    return write_gguf(path, tensors, "F32", named, architecture)


def test_gguf_of_a_mixture_with_a_shared_expert(tmp_path):
    folder = GOLDENS / "qwen2_moe"
    changes = {"leading_dense_block_count": 1, "expert_shared_feed_forward_length": 40}
    path = qwen_gguf(tmp_path / "qwen2_moe.gguf", folder, "qwen2moe", **changes)
    got, wanted = (checkpoint.load(place, dtype=np.float32) for place in (path, folder))
    assert got.config == wanted.config
    for (name, array), (_, other) in zip(got.weights.named(), wanted.weights.named(), strict=True):
        np.testing.assert_array_equal(array, other, err_msg=name)


def test_gguf_router_keys(tmp_path, rng):
    tensors = gguf_tensors(rng, experts=4)
    bias = rng.standard_normal(4).astype(np.float32)
    tensors |= {f"blk.{i}.exp_probs_b.bias": bias for i in range(LAYERS)}
    tensors |= {
        f"blk.{i}.ffn_{name}_shexp.weight": np.ones(s, np.float32)
        for i in range(LAYERS)
        for name, s in {"gate": (192, DIM), "up": (192, DIM), "down": (DIM, 192)}.items()
    }
    keys: dict[str, Any] = {
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_gating_func": 2,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": False,
        "expert_group_count": 2,
        "expert_group_used_count": 1,
        "expert_shared_count": 2,
    }
    named = {f"llama.{key}": value for key, value in keys.items()}
    path = write_gguf(tmp_path / "m.gguf", tensors, "F32", named)
    loaded = checkpoint.load(path, dtype=np.float16)
    made = loaded.config
    assert (made.router, made.routed_scale, made.norm_topk_prob) == ("sigmoid_topk", 2.5, False)
    assert (made.router_groups, made.router_top_groups) == (2, 1)
    assert (made.shared_hidden_dim, made.shared_gated, made.router_correction) == (192, False, True)
    correction = loaded.weights.layers[1].router_correction
    assert correction.dtype == np.float32
    np.testing.assert_array_equal(correction, bias)
    named["llama.expert_gating_func"] = 3
    path = write_gguf(tmp_path / "n.gguf", tensors, "F32", named)
    with pytest.raises(Unsupported, match="expert_gating_func = 3; cufuse has 1"):
        checkpoint.load(path, dtype=np.float16)


def test_gguf_of_qwen3moe(tmp_path, rng):
    settings = {"mlp_only_layers": [], "moe_intermediate_size": 48}
    tensors = hf_tensors(rng, "qwen3_moe")
    folder = write_folder(tmp_path / "m", "qwen3_moe", tensors, **settings)
    path = qwen_gguf(tmp_path / "m.gguf", folder, "qwen3moe")
    got, wanted = (checkpoint.load(place, dtype=np.float32) for place in (path, folder))
    assert got.config == wanted.config and got.config.norm_topk_prob
    for (name, array), (_, other) in zip(got.weights.named(), wanted.weights.named(), strict=True):
        np.testing.assert_array_equal(array, other, err_msg=name)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, None),
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scale_linear": 2.0}, config.RopeScaling("linear", 2.0)),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            config.RopeScaling("linear", 4.0),
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.attn_factor": 2.0,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            config.RopeScaling(
                "yarn", 4.0, 32, beta_fast=16.0, attention_factor=2 * (1 + 0.1 * np.log(4.0))
            ),
        ),
    ],
)
def test_gguf_rope_scaling(tmp_path, rng, keys, wanted):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(rng), "F32", keys)
    assert checkpoint.read_config(path).rope_scaling == wanted


def test_gguf_rope_factors_divide_the_frequencies(tmp_path, rng):
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    tensors = gguf_tensors(rng) | {"rope_freqs.weight": factors}
    loaded = checkpoint.load(write_gguf(tmp_path / "m.gguf", tensors), dtype=np.float32)
    scaling = loaded.config.rope_scaling
    assert scaling.kind == "longrope" and scaling.attention_factor == 1
    assert scaling.short_factor == scaling.long_factor == tuple(factors.tolist())


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"llama.rope.scaling.type": "su"}, "rope scaling su; cufuse reads linear and yarn"),
        ({"llama.logit_scale": 0.5}, "sets llama.logit_scale = 0.5"),
        ({"llama.attention.value_length": 64}, "keys and values of different lengths"),
        ({"split.count": 2}, "one of 2 parts"),
        ({"llama.feed_forward_length": [96, 128]}, "differs from layer to layer"),
    ],
)
def test_gguf_unsupported_features(tmp_path, rng, keys, text):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(rng), "F32", keys)
    with pytest.raises(Unsupported, match=text):
        checkpoint.load(path, dtype=np.float32)


def test_gguf_unsupported_architecture_type_and_tensor(tmp_path, rng):
    tensors = gguf_tensors(rng)
    path = write_gguf(tmp_path / "a.gguf", tensors, architecture="gemma2")
    with pytest.raises(Unsupported, match="has architecture gemma2; cufuse reads llama"):
        checkpoint.load(path, dtype=np.float32)

    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    for key, value in METADATA.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, values in tensors.items():
        if name == "blk.0.ffn_up.weight":
            kind = gguf.GGMLQuantizationType.Q5_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text = "tensor blk.0.ffn_up.weight has type Q5_0; cufuse reads F32, F16, BF16, Q8_0, Q4_0, Q4_1"
    with pytest.raises(Unsupported, match=text):
        checkpoint.load(tmp_path / "t.gguf", dtype=np.float32)

    more = tensors | {"blk.0.attn_q_norm.weight": np.ones(HEAD_DIM, np.float32)}
    with pytest.raises(Unsupported, match=r"tensor blk\.0\.attn_q_norm\.weight would be left out"):
        checkpoint.load(write_gguf(tmp_path / "m.gguf", more), dtype=np.float32)


def test_gguf_missing_and_misshapen_tensors(tmp_path, rng):
    tensors = gguf_tensors(rng)
    less = {n: t for n, t in tensors.items() if n != "blk.1.attn_v.weight"}
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.attn_v\.weight is missing"):
        checkpoint.load(write_gguf(tmp_path / "a.gguf", less), dtype=np.float32)
    wrong = tensors | {"blk.0.ffn_down.weight": np.ones((DIM, DIM), np.float32)}
    text = r"ffn_down\.weight is \[64, 64\], but the model's configuration makes it \[64, 96\]"
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(write_gguf(tmp_path / "b.gguf", wrong), dtype=np.float32)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("llama.block_count", None, "has no llama.block_count"),
        ("llama.attention.head_count", 0, "head_count is 0, wanted a positive integer"),
        ("llama.embedding_length", "many", "embedding_length is 'many', wanted a number"),
        ("llama.rope.dimension_count", 33, "33 of 32 values of a head rotate"),
        ("llama.attention.head_count_kv", 3, "not a multiple of n_kv_heads = 3"),
    ],
)
def test_gguf_broken_metadata(tmp_path, rng, key, value, text):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(rng), "F32", {key: value})
    with pytest.raises(ValueError, match=text):
        checkpoint.load(path, dtype=np.float32)


def test_truncated_gguf_is_one_sentence_wherever_it_ends(tmp_path, rng):
    metadata = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": [1, 1]}
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(rng), "Q4_1", metadata)
    whole, tensors = path.read_bytes(), gguf.GGUFReader(path).tensors
    end = max(tensor.data_offset + tensor.n_bytes for tensor in tensors)
    header = min(tensor.data_offset for tensor in tensors)
    for size in [*range(4, header, 7), *rng.integers(header, end, 50), end - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="truncated"):
            checkpoint.load(path, dtype=np.float32)
    path.write_bytes(whole[:end])
    checkpoint.load(path, dtype=np.float32)


def test_truncated_gguf_of_a_vocabulary(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {}, metadata=TOKENIZER)
    whole = path.read_bytes()
    end = whole.rindex(b"gpt2") + 4
    for size in range(end - 200, end):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="truncated"):
            checkpoint.tokenizer_source(path)
    path.write_bytes(whole[:end])
    assert checkpoint.tokenizer_source(path) == TOKENIZER


@pytest.mark.parametrize(
    ("find", "replace", "text"),
    [
        # Names twice, a kind that does not exist, text that is none, counts beyond the file.
        (b"attn_k.weight", b"attn_v.weight", r"broken: .*blk\.0\.attn_v\.weight"),
        (b"ggml.tokens", b"ggml.scores", r"broken: .*tokenizer\.ggml\.scores"),
        (b"head_count\x04", b"head_count\x63", r"broken: .*99.* is not a valid"),
        (b"block_count", b"block_cou\xff\xff", r"broken: 'utf-8' codec"),
        (b"llama\x11", b"llam\xff\x11", r"general\.architecture is broken: 'utf-8' codec"),
        (b"tokens\x09\0\0\0\x08\0\0\0\x04\0", b"tokens\x09\0\0\0\x08\0\0\0\x04\x7f", "truncated"),
        (b"type\x09\0\0\0\x05\0\0\0\x04\0\0", b"type\x09\0\0\0\x05\0\0\0\x04\0\x7f", "truncated"),
    ],
)
def test_damaged_gguf_header(tmp_path, rng, find, replace, text):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(rng), metadata=TOKENIZER)
    whole = path.read_bytes()
    assert find in whole
    path.write_bytes(whole.replace(find, replace, 1))
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(path, dtype=np.float32)


@pytest.mark.parametrize(
    ("at", "value", "error", "text"),
    [
        (-12, 99, Unsupported, "unknown type .*99.*; cufuse reads F32, F16, BF16"),
        (-4, 0xFFFFFFFF, CheckpointError, "truncated|entry of tensor .* is broken"),
        (-16, 0x7FFFFFFF, CheckpointError, "truncated|is broken"),
    ],
)
def test_damaged_gguf_tensor_entry(tmp_path, rng, at, value, error, text):
    """The header ends with a tensor's sizes (8 bytes each), type (4 bytes) and place (8 bytes)."""
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(rng))
    field, whole = gguf.GGUFReader(path).tensors[-1].field, bytearray(path.read_bytes())
    end = field.offset + sum(part.nbytes for part in field.parts)
    struct.pack_into("<I", whole, end + at, value)
    path.write_bytes(whole)
    with pytest.raises(error, match=text):
        checkpoint.load(path, dtype=np.float32)


def test_not_a_gguf_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.gguf does not exist"):
        checkpoint.load(tmp_path / "no.gguf", dtype=np.float32)
    for name, data in {"empty.gguf": b"", "text.gguf": b"hello world"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CheckpointError, match="is not a GGUF file"):
            checkpoint.load(tmp_path / name, dtype=np.float32)
    (tmp_path / "old.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(Unsupported, match="GGUF version 1; cufuse reads 2 and 3"):
        checkpoint.load(tmp_path / "old.gguf", dtype=np.float32)


def test_float16_overflow_is_an_error(tmp_path, rng):
    tensors = gguf_tensors(rng)
    tensors["blk.1.ffn_norm.weight"][3] = 1e5
    path = write_gguf(tmp_path / "m.gguf", tensors)
    text = r"blk\.1\.ffn_norm\.weight has values beyond float16's 65504; load it as bfloat16"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match=text):
            checkpoint.load(path, dtype=np.float16)
    checkpoint.load(path, dtype=ml_dtypes.bfloat16)


def test_load_checks_its_arguments(tmp_path, rng):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(rng))
    with pytest.raises(TypeError, match="load: dtype is int32, wanted float32, float16 or bfloat"):
        checkpoint.load(path, dtype=np.int32)
    with pytest.raises(ValueError, match="load: kind is 'torch'"):
        checkpoint.load(path, dtype=np.float32, kind="torch")


def test_load_keeps_the_first_layers(tmp_path, rng):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(rng))
    loaded = checkpoint.load(path, dtype=np.float32, layers=1)
    assert loaded.config.n_layers == len(loaded.weights.layers) == 1


@pytest.mark.parametrize("kind", ["numpy", "twin", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_load_puts_weights_where_it_is_told(tmp_path, rng, kind):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(rng), "Q4_1")
    made = checkpoint.load(path, dtype=ml_dtypes.bfloat16, kind=kind).weights
    wanted = checkpoint.load(path, dtype=ml_dtypes.bfloat16).weights
    for (name, got), (_, array) in zip(made.rows(), wanted.rows(), strict=True):
        assert device.kind(got) == kind, name
        np.testing.assert_array_equal(to_numpy(got), array)
    assert bool(made.stacks) == (kind != "numpy")


def test_loading_never_holds_the_model_twice(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(gguf_file, "CHUNK", 1 << 12)
    tensors = gguf_tensors(rng)
    tensors["token_embd.weight"] = np.zeros((1 << 14, DIM), np.float32)
    path = write_gguf(tmp_path / "m.gguf", tensors, "F16")
    tracemalloc.start()
    made = checkpoint.load(path, dtype=np.float32).weights
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < made.size_bytes + (1 << 20)


# ---- safetensors --------------------------------------------------------------------------------

BASE = {
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": HIDDEN,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1},
    "qwen3": {},
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "qwen3_moe": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
}


def hf_tensors(rng: np.random.Generator, family: str) -> dict[str, np.ndarray]:
    """Make a decoder's tensors under the names that its family gives them."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, DIM),
        "model.norm.weight": (DIM,),
        "lm_head.weight": (VOCAB, DIM),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {
            at + "input_layernorm.weight": (DIM,),
            at + "post_attention_layernorm.weight": (DIM,),
            at + "self_attn.q_proj.weight": (q, DIM),
            at + "self_attn.k_proj.weight": (kv, DIM),
            at + "self_attn.v_proj.weight": (kv, DIM),
            at + "self_attn.o_proj.weight": (DIM, q),
        }
        if family == "qwen2":
            shapes |= {
                at + f"self_attn.{n}_proj.bias": (r,)
                for n, r in zip("qkv", (q, kv, kv), strict=True)
            }
        if family in ("qwen3", "qwen3_moe"):
            shapes |= {at + f"self_attn.{n}_norm.weight": (HEAD_DIM,) for n in "qk"}
        if family == "olmoe":
            shapes |= {
                at + f"self_attn.{n}_norm.weight": (r,) for n, r in zip("qk", (q, kv), strict=True)
            }
        if family == "mixtral":
            mlp, names, gate = "block_sparse_moe.", ("w1", "w3", "w2"), "block_sparse_moe.gate"
        else:
            mlp, names, gate = "mlp.", ("gate_proj", "up_proj", "down_proj"), "mlp.gate"
        hidden = 48 if family == "qwen3_moe" else HIDDEN
        experts = (
            [f"experts.{e}." for e in range(3)] if "experts" in str(FAMILIES[family]) else [""]
        )
        if len(experts) > 1:
            shapes[f"{at}{gate}.weight"] = (3, DIM)
        for expert in experts:
            for name, s in zip(names, [(hidden, DIM), (hidden, DIM), (DIM, hidden)], strict=True):
                shapes[f"{at}{mlp}{expert}{name}.weight"] = s
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def write_folder(folder: Path, family: str, tensors: dict, **changes: Any) -> Path:
    """Write config.json and one safetensors file."""
    folder.mkdir(exist_ok=True)
    settings = BASE | FAMILIES.get(family, {}) | {"model_type": family} | changes
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(
        {n: np.ascontiguousarray(t) for n, t in tensors.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_safetensors_families(tmp_path, rng, family):
    tensors = hf_tensors(rng, family)
    loaded = checkpoint.load(write_folder(tmp_path / "m", family, tensors), dtype=np.float32)
    made, moe = loaded.config, "experts" in str(FAMILIES[family])
    assert made == config.Config(
        name="m",
        dim=DIM,
        n_layers=LAYERS,
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_dim=48 if family == "qwen3_moe" else HIDDEN,
        vocab_size=VOCAB,
        max_seq_len=128,
        rope_theta=5000.0,
        qkv_bias=family == "qwen2",
        qk_norm={"qwen3": "head", "qwen3_moe": "head", "olmoe": "full"}.get(family, "none"),
        n_experts=3 if moe else 0,
        n_experts_per_token=2 if moe else 0,
        norm_topk_prob=family != "olmoe",
    )
    np.testing.assert_array_equal(loaded.weights.head, tensors["lm_head.weight"])
    np.testing.assert_array_equal(loaded.weights.final_norm, tensors["model.norm.weight"])
    for i, layer in enumerate(loaded.weights.layers):
        at = {n.removeprefix(f"model.layers.{i}."): t for n, t in tensors.items()}
        qkv = [at[f"self_attn.{n}_proj.weight"] for n in "qkv"]
        np.testing.assert_array_equal(layer.qkv, np.concatenate(qkv))
        if family == "qwen2":
            bias = [at[f"self_attn.{n}_proj.bias"] for n in "qkv"]
            np.testing.assert_array_equal(layer.qkv_bias, np.concatenate(bias))
        if made.qk_norm != "none":
            np.testing.assert_array_equal(layer.k_norm, at["self_attn.k_norm.weight"])
        np.testing.assert_array_equal(layer.mlp_norm, at["post_attention_layernorm.weight"])
        before = "block_sparse_moe." if family == "mixtral" else "mlp."
        names = ["w1", "w3", "w2"] if family == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
        for got, name in zip([layer.gate, layer.up, layer.down], names, strict=True):
            if moe:
                wanted = np.stack([at[f"{before}experts.{e}.{name}.weight"] for e in range(3)])
            else:
                wanted = at[f"{before}{name}.weight"]
            np.testing.assert_array_equal(got, wanted)
        if moe:
            np.testing.assert_array_equal(layer.router, at[f"{before}gate.weight"])


BERT = {
    "model_type": "bert",
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": HIDDEN,
    "vocab_size": VOCAB,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
}


def bert_tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB, DIM),
        "embeddings.position_embeddings.weight": (24, DIM),
        "embeddings.token_type_embeddings.weight": (2, DIM),
        "embeddings.LayerNorm.weight": (DIM,),
        "embeddings.LayerNorm.bias": (DIM,),
        "pooler.dense.weight": (DIM, DIM),
        "pooler.dense.bias": (DIM,),
    }
    for i in range(LAYERS):
        for name, rows, columns in [
            ("attention.self.query", DIM, DIM),
            ("attention.self.key", DIM, DIM),
            ("attention.self.value", DIM, DIM),
            ("attention.output.dense", DIM, DIM),
            ("intermediate.dense", HIDDEN, DIM),
            ("output.dense", DIM, HIDDEN),
        ]:
            shapes[f"encoder.layer.{i}.{name}.weight"] = (rows, columns)
            shapes[f"encoder.layer.{i}.{name}.bias"] = (rows,)
        for name in ("attention.output", "output"):
            shapes[f"encoder.layer.{i}.{name}.LayerNorm.weight"] = (DIM,)
            shapes[f"encoder.layer.{i}.{name}.LayerNorm.bias"] = (DIM,)
    made = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
    return made | {"embeddings.position_ids": np.arange(24)[None]}


@pytest.mark.parametrize("style", ["plain", "prefixed", "old"])
def test_safetensors_bert(tmp_path, rng, style):
    tensors = bert_tensors(rng)
    stored = tensors
    if style == "prefixed":
        stored = {f"bert.{name}": t for name, t in tensors.items()}
        stored["cls.predictions.bias"] = np.zeros(VOCAB, np.float32)
    if style == "old":
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        stored = {}
        for name, t in tensors.items():
            for new, before in old.items():
                name = name.replace(new, before)
            stored[name] = t
    folder = write_folder(tmp_path / "b", "bert", stored)
    (folder / "config.json").write_text(json.dumps(BERT))
    made, w, _ = checkpoint.load(folder, dtype=np.float32)
    preset = config.preset("minilm")
    for field in ("norm", "norm_eps", "norm_placement", "activation", "gated", "rope_theta"):
        assert getattr(made, field) == getattr(preset, field)
    assert not made.causal and not made.has_head and w.head is None and w.final_norm is None
    np.testing.assert_array_equal(w.embedding_norm, tensors["embeddings.LayerNorm.weight"])
    np.testing.assert_array_equal(
        w.position_embedding, tensors["embeddings.position_embeddings.weight"]
    )
    layer, at = w.layers[1], {n.removeprefix("encoder.layer.1."): t for n, t in tensors.items()}
    for kind, qkv in {"weight": layer.qkv, "bias": layer.qkv_bias}.items():
        wanted = [at[f"attention.self.{n}.{kind}"] for n in ("query", "key", "value")]
        np.testing.assert_array_equal(qkv, np.concatenate(wanted))
    for got, name in {
        "attn_norm": "attention.output.LayerNorm.weight",
        "attn_norm_bias": "attention.output.LayerNorm.bias",
        "mlp_norm": "output.LayerNorm.weight",
        "mlp_norm_bias": "output.LayerNorm.bias",
        "out": "attention.output.dense.weight",
        "out_bias": "attention.output.dense.bias",
        "up": "intermediate.dense.weight",
        "up_bias": "intermediate.dense.bias",
        "down": "output.dense.weight",
        "down_bias": "output.dense.bias",
    }.items():
        np.testing.assert_array_equal(getattr(layer, got), at[name])


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16], ids=["F16", "BF16"])
def test_safetensors_converts_half_types(tmp_path, rng, monkeypatch, stored):
    monkeypatch.setattr(checkpoint.hf_folder, "CHUNK", 100)
    tensors = {n: t.astype(stored) for n, t in hf_tensors(rng, "llama").items()}
    folder = write_folder(tmp_path / "m", "llama", tensors)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        made = checkpoint.load(folder, dtype=dtype).weights
        assert {array.dtype for _, array in made.named()} == {np.dtype(dtype)}
        wanted = tensors["model.embed_tokens.weight"].astype(np.float32).astype(dtype)
        np.testing.assert_array_equal(made.embedding, wanted)


def test_safetensors_shards(tmp_path, rng):
    tensors = hf_tensors(rng, "llama")
    whole = checkpoint.load(write_folder(tmp_path / "m", "llama", tensors), dtype=np.float32)
    folder = write_folder(tmp_path / "s", "llama", {})
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, kept in shards.items():
        save_file({n: tensors[n] for n in kept}, folder / file)
    for index in (True, False):  # with an index, and with all that is in the folder
        if index:
            table = {n: file for file, kept in shards.items() for n in kept}
            path = folder / "model.safetensors.index.json"
            path.write_text(json.dumps({"weight_map": table}))
        made = checkpoint.load(folder, dtype=np.float32).weights
        for (name, got), (_, wanted) in zip(made.named(), whole.weights.named(), strict=True):
            np.testing.assert_array_equal(got, wanted, err_msg=name)
        if index:
            (folder / "one.safetensors").rename(folder / "gone")
            with pytest.raises(FileNotFoundError, match=r"has no one\.safetensors"):
                checkpoint.load(folder, dtype=np.float32)
            (folder / "gone").rename(folder / "one.safetensors")
            path.write_text(json.dumps({"weight_map": {"a": "../m/model.safetensors"}}))
            with pytest.raises(CheckpointError, match="names files outside its folder"):
                checkpoint.load(folder, dtype=np.float32)
            path.unlink()


def read(tmp_path: Path, rng: np.random.Generator, family: str = "llama", **changes: Any) -> Any:
    folder = write_folder(tmp_path / "m", family, hf_tensors(rng, family), **changes)
    return checkpoint.read_config(folder)


def test_head_that_is_there_wins(tmp_path, rng):
    tensors = hf_tensors(rng, "llama")
    with pytest.warns(UserWarning, match=r"head is tied, but lm_head\.weight is there and differs"):
        made = checkpoint.load(
            write_folder(tmp_path / "a", "llama", tensors, tie_word_embeddings=True),
            dtype=np.float32,
        )
    assert not made.config.tied_embeddings
    np.testing.assert_array_equal(made.weights.head, tensors["lm_head.weight"])

    same = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    folder = write_folder(tmp_path / "b", "llama", same, tie_word_embeddings=True)
    made = checkpoint.load(folder, dtype=np.float32)
    assert made.config.tied_embeddings and made.weights.head is made.weights.embedding

    del same["lm_head.weight"]
    with pytest.warns(UserWarning, match=r"not tied, but lm_head\.weight is missing"):
        made = checkpoint.load(write_folder(tmp_path / "c", "llama", same), dtype=np.float32)
    assert made.config.tied_embeddings
    folder = write_folder(tmp_path / "d", "llama", same, tie_word_embeddings=True)
    assert checkpoint.load(folder, dtype=np.float32).config.tied_embeddings

    del same["model.embed_tokens.weight"]
    folder = write_folder(tmp_path / "e", "llama", same, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"tensor model\.embed_tokens\.weight is missing"):
        checkpoint.load(folder, dtype=np.float32)


def test_model_without_its_head_has_bare_names(tmp_path, rng):
    bare = {n.removeprefix("model."): t for n, t in hf_tensors(rng, "qwen3").items()}
    del bare["lm_head.weight"]
    folder = write_folder(tmp_path / "m", "qwen3", bare, tie_word_embeddings=True)
    made = checkpoint.load(folder, dtype=np.float32).weights
    np.testing.assert_array_equal(made.embedding, bare["embed_tokens.weight"])


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHORT, LONG = [1.0] * (HEAD_DIM // 2), [2.0] * (HEAD_DIM // 2)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"kind": "default"}, None),
        ({"kind": "linear", "factor": 2.0}, config.RopeScaling("linear", 2.0)),
        ({"kind": "dynamic", "factor": 2}, config.RopeScaling("dynamic", 2.0, 128)),
        ({"kind": "llama3"} | LLAMA3, config.RopeScaling("llama3", 32.0, 64)),
        (
            {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            config.RopeScaling("yarn", 4.0, 32),
        ),
        (
            {"kind": "yarn", "factor": 4.0, "mscale": 1.0, "truncate": False, "beta_fast": 16},
            config.RopeScaling("yarn", 4.0, 128, mscale=1.0, truncate=False, beta_fast=16.0),
        ),
        (
            {"kind": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 2.0},
            config.RopeScaling(
                "longrope", 2.0, 128, short_factor=tuple(SHORT), long_factor=tuple(LONG)
            ),
        ),
    ],
)
def test_rope_scaling_of_both_config_versions(tmp_path, rng, key, given, wanted):
    scaling = {key if name == "kind" else name: value for name, value in given.items()}
    old = read(tmp_path, rng, rope_scaling=scaling)
    assert (old.rope_scaling, old.rope_theta) == (wanted, 5000.0)
    new = read(tmp_path, rng, rope_theta=None, rope_parameters=scaling | {"rope_theta": 7000.0})
    assert (new.rope_scaling, new.rope_theta) == (wanted, 7000.0)
    nested = {"full_attention": scaling | {"rope_theta": 7000.0}}
    assert read(tmp_path, rng, rope_theta=None, rope_parameters=nested) == new


def test_rope_scaling_refusals(tmp_path, rng):
    with pytest.raises(Unsupported, match="rope type is 'mrope'; cufuse has default, linear"):
        read(tmp_path, rng, rope_scaling={"type": "mrope"})
    with pytest.raises(CheckpointError, match="rope: low_freq_factor is missing"):
        broken = {"rope_type": "llama3"} | {k: v for k, v in LLAMA3.items() if k[0] != "l"}
        read(tmp_path, rng, rope_scaling=broken)
    with pytest.raises(CheckpointError, match="short_factor and long_factor need 16 numbers"):
        read(tmp_path, rng, rope_scaling={"type": "longrope", "short_factor": [1], "factor": 2.0})
    with pytest.raises(Unsupported, match="differ between full_attention, sliding_attention"):
        kinds = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
        read(tmp_path, rng, rope_parameters=kinds)


def test_config_key_variants(tmp_path, rng):
    """v4 and v5 spell the same model differently; null is the same as absent."""
    old = read(tmp_path, rng, "qwen3", torch_dtype="bfloat16")
    new = read(
        tmp_path,
        rng,
        "qwen3",
        torch_dtype=None,
        dtype="bfloat16",
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        layer_types=["full_attention"] * LAYERS,
    )
    assert old == new
    llama = read(tmp_path, rng, head_dim=None, num_key_value_heads=None)
    assert (llama.head_dim, llama.n_kv_heads) == (DIM // HEADS, HEADS)
    assert read(tmp_path, rng, partial_rotary_factor=0.5).rotary_dim == HEAD_DIM // 2
    assert read(tmp_path, rng, hidden_act="gelu_pytorch_tanh").activation == "gelu_tanh"
    biased = read(tmp_path, rng, attention_bias=True, mlp_bias=True)
    assert biased.qkv_bias and biased.output_bias and biased.mlp_bias


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("family", "changes", "wanted"),
    [
        ("mistral", {"sliding_window": 16}, (16, 1)),
        ("mistral", {"sliding_window": None}, (None, 1)),
        ("mixtral", {"sliding_window": 16}, (16, 1)),
        ("qwen2", {"use_sliding_window": False}, (None, 1)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, (64, 1)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 9}, (None, 1)),
        ("qwen2", {"use_sliding_window": True, "layer_types": [SLIDING, FULL]}, (64, 2)),
        ("qwen3", {"use_sliding_window": True, "layer_types": [FULL, FULL]}, (None, 1)),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, (8, 1)),
    ],
)
def test_sliding_windows(tmp_path, rng, family, changes, wanted):
    made = read(tmp_path, rng, family, **changes)
    assert (made.window, made.window_every) == wanted


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        (
            "llama",
            {"model_type": "gpt_neox"},
            "model_type is 'gpt_neox'; cufuse has llama, mistral",
        ),
        ("llama", {"model_type": None}, "model_type is None"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
        ("llama", {"hidden_act": "xielu"}, "hidden_act is 'xielu'"),
        ("llama", {"sliding_window": 16}, "sets sliding_window = 16"),
        ("qwen2", {"use_sliding_window": True}, "layers 1 have a sliding window"),
        (
            "qwen3",
            {"use_sliding_window": True, "layer_types": ["linear_attention"] * 2},
            "linear_at",
        ),
        ("olmoe", {"clip_qkv": 8.0}, "sets clip_qkv = 8.0"),
        ("olmoe", {"shared_expert_intermediate_size": 8}, "sets shared_expert_intermediate_size"),
    ],
)
def test_unsupported_features(tmp_path, rng, family, changes, text):
    with pytest.raises(Unsupported, match=text):
        read(tmp_path, rng, family, **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": None}, r"m/config\.json: hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big', wanted a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', wanted a number"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', wanted true or false"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', wanted an object or null"),
        ({"num_key_value_heads": 3}, "not a multiple of n_kv_heads = 3"),
    ],
)
def test_broken_config(tmp_path, rng, changes, text):
    with pytest.raises(ValueError, match=text):
        read(tmp_path, rng, **changes)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, ()),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, ()),
        ({"mlp_only_layers": [0, 7]}, (0,)),
        ({"decoder_sparse_step": 2}, (0,)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (0, 1)),
    ],
)
def test_dense_layers_of_a_mixture(tmp_path, rng, changes, wanted):
    made = read(tmp_path, rng, "qwen3_moe", **changes)
    assert (made.dense_layers, made.dense_hidden_dim) == (wanted, HIDDEN if wanted else 0)
    assert made.hidden_dim == 48


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mlp_only_layers": 1}, "mlp_only_layers is 1, wanted layer numbers"),
        ({"mlp_only_layers": ["a"]}, r"mlp_only_layers is \['a'\], wanted layer numbers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0, wanted a positive integer"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4 of 3 experts"),
        ({"num_experts": None}, "num_experts is missing"),
    ],
)
def test_broken_config_of_a_mixture(tmp_path, rng, changes, text):
    with pytest.raises(ValueError, match=text):
        read(tmp_path, rng, "qwen3_moe", **changes)


def test_experts_are_counted_by_either_name(tmp_path, rng):
    made = read(tmp_path, rng, "qwen3_moe", num_experts=None, num_local_experts=3)
    assert made.n_experts == 3


def test_broken_folders(tmp_path, rng):
    tensors = hf_tensors(rng, "llama")
    folder = write_folder(tmp_path / "m", "llama", tensors)
    file, settings = folder / "model.safetensors", folder / "config.json"
    whole = file.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or no safe"):
            checkpoint.load(folder, dtype=np.float32)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors file"):
        checkpoint.load(folder, dtype=np.float32)
    file.write_bytes(whole)
    with pytest.raises(CheckpointError, match="is one file of a model; give its folder"):
        checkpoint.load(file, dtype=np.float32)
    text = settings.read_text()
    for wrong in (text[: len(text) // 2], "[1]"):
        settings.write_text(wrong)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            checkpoint.load(folder, dtype=np.float32)
    settings.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        checkpoint.load(folder, dtype=np.float32)


def test_broken_tensors(tmp_path, rng):
    tensors = hf_tensors(rng, "mixtral")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    less = {n: t for n, t in tensors.items() if n != name}
    with pytest.raises(CheckpointError, match=r"experts\.2\.w3\.weight is missing"):
        checkpoint.load(write_folder(tmp_path / "a", "mixtral", less), dtype=np.float32)
    wrong = tensors | {name: np.ones((HIDDEN + 1, DIM), np.float32)}
    with pytest.raises(CheckpointError, match=r"w3\.weight is \[97, 64\], but .* \[96, 64\]"):
        checkpoint.load(write_folder(tmp_path / "b", "mixtral", wrong), dtype=np.float32)
    more = tensors | {"model.layers.0.self_attn.sinks": np.ones(HEADS, np.float32)}
    with pytest.raises(Unsupported, match=r"self_attn\.sinks would be left out"):
        checkpoint.load(write_folder(tmp_path / "c", "mixtral", more), dtype=np.float32)
    eight = tensors | {name: np.zeros((HIDDEN, DIM), ml_dtypes.float8_e4m3fn)}
    with pytest.raises(Unsupported, match="has type F8_E4M3; cufuse reads F32, F16, BF16"):
        checkpoint.load(write_folder(tmp_path / "d", "mixtral", eight), dtype=np.float32)
    buffers = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    checkpoint.load(write_folder(tmp_path / "e", "mixtral", buffers), dtype=np.float32)


def test_nothing_is_read_before_everything_is_checked(tmp_path, rng, monkeypatch):
    def refuse(*_: Any) -> Any:
        raise AssertionError("read before the check")

    tensors = hf_tensors(rng, "llama")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    folder = write_folder(tmp_path / "m", "llama", tensors)
    monkeypatch.setattr(_source, "_convert", refuse)
    with pytest.raises(CheckpointError, match="missing"):
        checkpoint.load(folder, dtype=np.float32)
