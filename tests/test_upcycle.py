"""A mixture made from a dense model computes what the dense model computes."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from click.testing import CliRunner
from models import CONFIGS

import cufuse
from cufuse import checkpoint, config, device, upcycle, weights
from cufuse.cli import main
from cufuse.model import Model

MIXTURES = [{"upcycle": (8, 2)}, {"upcycle": (3, 1)}, {"split_experts": 8}, {"split_experts": 1}]


def error(got, wanted) -> float:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def prompt(vocab_size: int, n: int = 11) -> list[int]:
    return np.random.default_rng(secrets.randbits(64)).integers(0, vocab_size, n).tolist()


@pytest.mark.parametrize("options", MIXTURES)
def test_logits_and_ids_are_those_of_the_dense_model(options):
    seed = secrets.randbits(32)
    dense = cufuse.load("tiny", device="cpu", seed=seed)
    mixture = cufuse.load("tiny", device="cpu", seed=seed, **options)
    ids = prompt(dense.config.vocab_size)
    logits = [m.forward(ids, engine="reference") for m in (mixture, dense)]
    assert error(*logits) < 1e-5, (seed, ids)
    made = [list(m.generate(ids, engine="reference", max_new_tokens=6)) for m in (mixture, dense)]
    assert made[0] == made[1], (seed, ids)


@pytest.mark.parametrize("name", ["llama", "interleaved", "qwen3", "mistral"])
@pytest.mark.parametrize("split", [False, True])
def test_other_shapes(name, split):
    dense, seed = CONFIGS[name], secrets.randbits(32)
    change = upcycle.Upcycle(8, 8 if split else 2, split=split, seed=seed)
    options = {"seed": seed, "dtype": np.float32}
    made = checkpoint.assemble(
        dense, weights.random_arrays(dense, **options), kind="numpy", upcycle=change
    )
    ids = prompt(dense.vocab_size)
    models = (Model(made, None, "cpu"), Model(weights.random(dense, **options), None, "cpu"))
    assert error(*(m.forward(ids, engine="reference") for m in models)) < 1e-5, (seed, ids)


def test_experts_differ_and_the_seed_decides():
    dense = config.preset("tiny")

    def arrays(seed):
        change = upcycle.Upcycle(4, 2, seed=seed)
        return dict(change.arrays(dense, weights.random_arrays(dense, dtype=np.float32)))

    first, again, other = arrays(1), arrays(1), arrays(2)
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
    gate = first["layers.0.gate"]
    assert not np.array_equal(gate[0], gate[1])
    assert not np.array_equal(gate, other["layers.0.gate"])
    x = np.random.default_rng(secrets.randbits(64)).standard_normal((64, dense.dim))
    chosen = np.argmax(x @ first["layers.0.router"].T, -1)
    assert len(set(chosen.tolist())) > 1


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("engine", ["unfused", "fused"])
def test_kernels_on_the_cpu(engine):
    seed = secrets.randbits(32)
    dense = cufuse.load("tiny", device="cpu", seed=seed)
    mixture = cufuse.load("tiny", device="cpu-kernels", dtype="float32", seed=seed, upcycle=(4, 2))
    ids = prompt(dense.config.vocab_size, 3)
    wanted = dense.forward(ids, engine="reference")
    assert error(mixture.forward(ids, engine=engine), wanted) < 1e-4, (seed, ids)


@pytest.mark.parametrize(
    ("model", "options", "kind", "sentence"),
    [
        ("tiny", {"upcycle": (2, 3)}, ValueError, "3 of 2 experts"),
        ("tiny", {"upcycle": (2, 0)}, ValueError, "0 of 2 experts"),
        ("tiny", {"split_experts": 7}, ValueError, "not a multiple of 7 experts"),
        ("tiny", {"upcycle": (8, 2), "split_experts": 8}, ValueError, "exclude each other"),
        ("tiny-moe", {"upcycle": (8, 2)}, device.Unsupported, "mixture of experts already"),
        ("minilm", {"split_experts": 8}, device.Unsupported, "is an encoder"),
    ],
)
def test_load_says_what_is_wrong(model, options, kind, sentence):
    with pytest.raises(kind, match=sentence):
        cufuse.load(model, device="cpu", seed=0, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--upcycle", "8-2"], "is not EXPERTS:TOP"),
        (["--upcycle", "2:3"], "3 of 2 experts"),
        (["--upcycle", "8:2", "--split-experts", "8"], "exclude each other"),
    ],
)
def test_command_line_says_what_is_wrong(options, sentence):
    command = ["generate", "--model", "tiny", "--device", "cpu", "--ids", "1,2", *options]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2 and sentence in result.stderr
