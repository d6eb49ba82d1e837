"""Mixtures of experts as Hugging Face transformers computes them: whole models, and routers.

`benchmarks/peers/torch_moe_goldens.py` wrote what is compared with.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import relative_error, to_numpy
from safetensors.numpy import load_file

import cufuse
from cufuse import checkpoint, config, device, engines, ops
from cufuse.state import State

GOLDENS = Path(__file__).resolve().parent / "data" / "moe_goldens"
FAMILIES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss")


def golden(family):
    with np.load(GOLDENS / family / "golden.npz") as stored:
        return stored["tokens"], stored["logits"]


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_gives_the_logits_of_transformers(family):
    tokens, wanted = golden(family)
    model = cufuse.load(GOLDENS / family, dtype="float32", device="cpu")
    got = model.forward(tokens[0], engine="reference")
    assert relative_error(got, wanted) < 1e-5


def check_engine(engine, family, kind):
    tokens, wanted = golden(family)
    weights = checkpoint.load(GOLDENS / family, dtype=np.float32, kind=kind).weights
    state = State(weights, capacity=tokens.shape[1])
    step, upload = engines.get(engine).step, state.upload
    got = step(weights, state, upload(tokens[:, :-1].copy()), all_logits=True)
    assert relative_error(got[0], wanted[:-1]) < 2e-5
    got = step(weights, state, upload(tokens[:, -1:].copy()))
    assert relative_error(got[0], wanted[-1]) < 2e-5


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("engine", ["unfused", "fused"])
def test_kernels_on_the_twin_give_the_logits_of_transformers(engine):
    check_engine(engine, "qwen2_moe", "twin")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["unfused", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_on_a_gpu_give_the_logits_of_transformers(engine, family):
    check_engine(engine, family, "cupy")


def test_what_the_folders_say():
    made = {family: checkpoint.read_config(GOLDENS / family) for family in FAMILIES}
    assert made["qwen2_moe"].dense_layers == (0,) and made["qwen2_moe"].dense_hidden_dim == 48
    assert made["qwen2_moe"].shared_gated and made["qwen2_moe"].shared_hidden_dim == 40
    assert made["qwen3_moe"].dense_layers == (1,) and made["qwen3_moe"].dense_hidden_dim == 40
    oss = made["gpt_oss"]
    assert oss.sinks and oss.router_bias and oss.mlp_bias and oss.router == "topk_softmax"
    assert (oss.window, oss.window_every, oss.swiglu_limit) == (6, 2, 7.0)
    preset = config.preset("gpt-oss-20b")
    same = ("norm_rounding", "swiglu_alpha", "norm_eps", "qkv_bias", "output_bias", "rope_theta")
    assert [getattr(oss, name) for name in same] == [getattr(preset, name) for name in same]


def test_rows_of_gate_and_up_take_turns():
    stored = load_file(GOLDENS / "gpt_oss" / "model.safetensors")
    loaded = checkpoint.load(GOLDENS / "gpt_oss", dtype=device.bfloat16)
    for i, layer in enumerate(loaded.weights.layers):
        at = f"model.layers.{i}."
        both, bias = (stored[f"{at}mlp.experts.gate_up_proj{end}"] for end in ("", "_bias"))
        down = stored[f"{at}mlp.experts.down_proj"]
        for got, wanted in (
            (layer.gate, both[:, :, 0::2].swapaxes(1, 2)),
            (layer.up, both[:, :, 1::2].swapaxes(1, 2)),
            (layer.gate_bias, bias[:, 0::2]),
            (layer.up_bias, bias[:, 1::2]),
            (layer.down, down.swapaxes(1, 2)),
            (layer.down_bias, stored[f"{at}mlp.experts.down_proj_bias"]),
            (layer.router, stored[f"{at}mlp.router.weight"]),
            (layer.router_bias, stored[f"{at}mlp.router.bias"]),
            (layer.sinks, stored[f"{at}self_attn.sinks"]),
        ):
            np.testing.assert_array_equal(got, wanted)


V3 = {"router": "sigmoid_topk", "groups": 8, "top_groups": 3}
ROUTERS = {
    "v2_greedy": {"renormalize": False},
    "v2_groups": {"renormalize": False, "groups": 8, "top_groups": 3},
    "v3": {"renormalize": True, **V3},
    "v3_raw": {"renormalize": False, **V3},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_choose_as_those_of_deepseek(to, name):
    with np.load(GOLDENS / "routers.npz") as stored:
        part = {key.split(".")[1]: stored[key] for key in stored if key.split(".")[0] == name}
    correction = part.get("correction")
    ids, weights = ops.moe_route(
        to(part["x"]),
        to(part["w"]),
        k=part["ids"].shape[1],
        correction=None if correction is None else to(correction),
        scale=2.5,
        **ROUTERS[name],
    )
    ids, order = np.sort(to_numpy(ids), -1), np.argsort(to_numpy(ids), -1)
    np.testing.assert_array_equal(ids, part["ids"])
    weights = np.take_along_axis(to_numpy(weights), order, -1)
    np.testing.assert_allclose(weights, part["weights"], rtol=1e-5)


def test_deepseek_is_refused_with_a_sentence(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v2"}')
    (tmp_path / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    with pytest.raises(device.Unsupported, match="model_type is 'deepseek_v2'; cufuse has llama"):
        checkpoint.read_config(tmp_path)
