"""Files whose experts have 4 bits a weight: kept as they are, and what they are worth."""

from __future__ import annotations

import json

import gguf
import ml_dtypes
import numpy as np
import pytest
from conftest import to_numpy
from safetensors.numpy import save_file
from test_checkpoint import METADATA, gguf_tensors, write_gguf

from cufuse import checkpoint, device, engines
from cufuse.checkpoint import CheckpointError
from cufuse.device import Unsupported
from cufuse.mxfp4 import Mxfp4, dequantize, quantize
from cufuse.state import State

DIM, HIDDEN, EXPERTS, LAYERS, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 96, 64, 3, 2, 41, 4, 2, 32
SETTINGS = {
    "model_type": "gpt_oss",
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": False,
}
QUANTISED = {"quantization_config": {"quant_method": "mxfp4"}}
KINDS = [
    "numpy",
    pytest.param("twin", marks=pytest.mark.cpu_kernels),
    pytest.param("cupy", marks=pytest.mark.gpu),
]


def gpt_oss_tensors(rng):
    """A tiny model in the two forms that gpt-oss has: bfloat16, and experts in blocks."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "model.embed_tokens.weight": (VOCAB, DIM),
        "model.norm.weight": (DIM,),
        "lm_head.weight": (VOCAB, DIM),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {
            at + "input_layernorm.weight": (DIM,),
            at + "post_attention_layernorm.weight": (DIM,),
            at + "self_attn.sinks": (HEADS,),
            at + "mlp.router.weight": (EXPERTS, DIM),
            at + "mlp.router.bias": (EXPERTS,),
            at + "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * HIDDEN),
            at + "mlp.experts.down_proj_bias": (EXPERTS, DIM),
        }
        for name, (rows, columns) in {
            "q_proj": (q, DIM),
            "k_proj": (kv, DIM),
            "v_proj": (kv, DIM),
            "o_proj": (DIM, q),
        }.items():
            shapes[f"{at}self_attn.{name}.weight"] = (rows, columns)
            shapes[f"{at}self_attn.{name}.bias"] = (rows,)
    rows = {
        name: (rng.standard_normal(shape) * 0.2).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    blocks = dict(rows)
    for i in range(LAYERS):
        for name, shape in {
            "gate_up_proj": (EXPERTS, 2 * HIDDEN, DIM),
            "down_proj": (EXPERTS, DIM, HIDDEN),
        }.items():
            at = f"model.layers.{i}.mlp.experts.{name}"
            bytes_, scales = quantize((rng.standard_normal(shape) * 0.2).astype(np.float32))
            blocks[at + "_blocks"], blocks[at + "_scales"] = bytes_, scales
            rows[at] = values(bytes_, scales).swapaxes(1, 2).astype(ml_dtypes.bfloat16)
    return rows, blocks


def values(blocks, scales):
    """Decode as gpt-oss's own code does: a table, even columns in the low nibbles, ldexp."""
    table = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = np.concatenate([table, -table])
    pairs = np.stack([table[blocks & 15], table[blocks >> 4]], -1)
    made = np.ldexp(pairs.reshape(*blocks.shape[:-1], 32), scales[..., None].astype(int) - 127)
    return made.reshape(*scales.shape[:-1], -1)


def write_folder(folder, tensors, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SETTINGS | changes))
    save_file(
        {n: np.ascontiguousarray(t) for n, t in tensors.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_gpt_oss_is_kept_in_four_bits(tmp_path, rng, kind):
    rows, blocks = gpt_oss_tensors(rng)
    folder = write_folder(tmp_path / "m", blocks, **QUANTISED)
    made = checkpoint.load(folder, dtype=ml_dtypes.bfloat16, kind=kind)
    assert made.config.expert_dtype == "mxfp4"
    for i, layer in enumerate(made.weights.layers):
        at = f"model.layers.{i}.mlp.experts."
        assert isinstance(layer.gate_up, Mxfp4) and isinstance(layer.down, Mxfp4)
        assert device.kind(layer.down.array) == kind and layer.gate is None and layer.up is None
        gate_up = rows[at + "gate_up_proj"].swapaxes(1, 2)
        for got, wanted in zip(
            dequantize(layer.gate_up), (gate_up[:, 0::2], gate_up[:, 1::2]), strict=True
        ):
            np.testing.assert_array_equal(to_numpy(got), wanted)
        down = rows[at + "down_proj"].swapaxes(1, 2)
        np.testing.assert_array_equal(to_numpy(dequantize(layer.down)), down)


def test_both_forms_of_gpt_oss_say_the_same(tmp_path, rng):
    rows, blocks = gpt_oss_tensors(rng)
    tokens = rng.integers(0, VOCAB, (1, 9)).astype(np.int32)
    logits = []
    for name, tensors, changes in (("rows", rows, {}), ("blocks", blocks, QUANTISED)):
        folder = write_folder(tmp_path / name, tensors, **changes)
        made = checkpoint.load(folder, dtype=np.float32).weights
        step = engines.get("reference").step
        logits.append(step(made, State(made, capacity=9), tokens, all_logits=True))
    np.testing.assert_array_equal(*logits)


def test_broken_experts_are_named(tmp_path, rng):
    _, blocks = gpt_oss_tensors(rng)
    name = "model.layers.1.mlp.experts.down_proj"
    cut = blocks | {name + "_scales": blocks[name + "_scales"][:, :-1]}
    with pytest.raises(CheckpointError, match=rf"{name}_scales is \[3, 95, 2\], but"):
        checkpoint.load(write_folder(tmp_path / "cut", cut, **QUANTISED), dtype=np.float32)
    less = {key: value for key, value in blocks.items() if key != name + "_blocks"}
    with pytest.raises(CheckpointError, match=f"{name}_blocks is missing"):
        checkpoint.load(write_folder(tmp_path / "less", less, **QUANTISED), dtype=np.float32)
    other = blocks | {name + "_blocks": blocks[name + "_blocks"].astype(np.float32)}
    with pytest.raises(Unsupported, match=f"{name}_blocks has type F32; cufuse reads U8"):
        checkpoint.load(write_folder(tmp_path / "other", other, **QUANTISED), dtype=np.float32)
    with pytest.raises(Unsupported, match=r"quantised \(gptq\)"):
        folder = write_folder(
            tmp_path / "gptq", blocks, quantization_config={"quant_method": "gptq"}
        )
        checkpoint.load(folder, dtype=np.float32)
    with pytest.raises(Unsupported, match=r"quantised \(mxfp4\)"):
        checkpoint.load(
            write_folder(tmp_path / "llama", blocks, model_type="llama", **QUANTISED),
            dtype=np.float32,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_experts_are_kept_in_four_bits(tmp_path, rng, kind):
    tensors = gguf_tensors(rng, experts=3)
    metadata = {"llama.expert_count": 3, "llama.expert_used_count": 2}
    path = write_gguf(tmp_path / "m.gguf", tensors, "MXFP4", metadata)
    made = checkpoint.load(path, dtype=np.float32, kind=kind)
    assert made.config.expert_dtype == "mxfp4"
    kind_of = gguf.GGMLQuantizationType.MXFP4
    for i, layer in enumerate(made.weights.layers):
        got = dict(zip(("gate", "up"), dequantize(layer.gate_up), strict=True)) | {
            "down": dequantize(layer.down)
        }
        for field, array in got.items():
            stored = gguf.quants.quantize(tensors[f"blk.{i}.ffn_{field}_exps.weight"], kind_of)
            np.testing.assert_array_equal(
                to_numpy(array), gguf.quants.dequantize(stored, kind_of).reshape(array.shape)
            )
    assert METADATA["llama.block_count"] == len(made.weights.layers)


def test_gguf_experts_of_several_types_are_expanded(tmp_path, rng):
    tensors = gguf_tensors(rng, experts=3)
    metadata = {"llama.expert_count": 3, "llama.expert_used_count": 2}
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (METADATA | metadata).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    kind_of = gguf.GGMLQuantizationType.MXFP4
    for name, array in tensors.items():
        if "exps" in name and "down" not in name:
            writer.add_tensor(name, gguf.quants.quantize(array, kind_of), raw_dtype=kind_of)
        else:
            writer.add_tensor(name, array)
    for step in ("header_to_file", "kv_data_to_file", "tensors_to_file"):
        getattr(writer, "write_" + step)()
    writer.close()
    made = checkpoint.load(path, dtype=np.float32)
    assert made.config.expert_dtype == "model"
    layer = made.weights.layers[0]
    np.testing.assert_array_equal(layer.down, tensors["blk.0.ffn_down_exps.weight"])
    stored = gguf.quants.quantize(tensors["blk.0.ffn_up_exps.weight"], kind_of)
    wanted = gguf.quants.dequantize(stored, kind_of).reshape(layer.up.shape)
    np.testing.assert_array_equal(layer.up, wanted)
