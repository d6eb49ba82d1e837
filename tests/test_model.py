"""`cufuse.load` and what it returns: wrong arguments are answered before anything is run."""

from __future__ import annotations

import re

import numpy as np
import pytest

import cufuse
from cufuse import device, generate, jit
from cufuse.engines import mega
from cufuse.model import Model
from cufuse.weights import random


@pytest.fixture(scope="module")
def tiny():
    return cufuse.load("tiny", device="cpu")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"device": "gpu"}, "load: device is 'gpu', wanted cuda, cuda:1, cpu or cpu-kernels"),
        ({"device": None}, "load: device is None, wanted"),
        ({"device": 0}, "load: device is 0, wanted"),
        ({"dtype": "int8"}, "load: dtype is 'int8', wanted one of float32, float16, bfloat16"),
        ({"dtype": "no dtype"}, "load: dtype is 'no dtype', wanted"),
        ({"dtype": np.float64}, "float64'>, wanted one of"),
        ({"dtype": object()}, "load: dtype is <object"),
        ({"path_or_preset": "tinny"}, "unknown model tinny: did you mean tiny?"),
        ({"path_or_preset": ""}, "unknown model : presets are"),
        ({"path_or_preset": "no/such.gguf"}, "no/such.gguf: no such file or folder"),
    ],
)
def test_load_says_what_is_wrong(arguments, sentence):
    with pytest.raises(ValueError) as raised:
        cufuse.load(**{"path_or_preset": "tiny", "device": "cpu", **arguments})
    assert sentence in str(raised.value)


@pytest.mark.parametrize("dtype", ["float16", np.float16, np.dtype(np.float16)])
def test_load_takes_a_dtype_or_its_name(dtype):
    assert cufuse.load("tiny", device="cpu", dtype=dtype).dtype == np.float16


def test_model_shows_its_size(tiny):
    assert repr(tiny) == "<cufuse.Model tiny: 0.4 M, float32, cpu>"


@pytest.mark.parametrize("call", ["generate", "forward"])
def test_text_is_no_ids(tiny, call):
    with pytest.raises(TypeError, match=f"{call}: ids is text; .*tokenizer.encode"):
        getattr(tiny, call)("Hello")


@pytest.mark.parametrize("count", [-1, 1.5, None])
def test_generate_wants_a_count(tiny, count):
    with pytest.raises(ValueError, match=f"max_new_tokens is {count}, wanted 0 or more"):
        tiny.generate([1], max_new_tokens=count)


# ---- mega ---------------------------------------------------------------------------------------


def on_twin(name: str) -> Model:
    """Random weights as the CPU's kernels take them; nothing here runs one."""
    config = cufuse.PRESETS[name]
    return Model(random(config, dtype=np.float32).map(device.twin), None, "cpu-kernels")


@pytest.fixture(scope="module")
def dense():
    return on_twin("tiny")


def launched(model: Model, prompt: list[int], **options: object) -> list[str]:
    """The kernels that a generation launches; nothing is run, so every id drawn is 0."""
    with jit.record(dry=True) as record:
        ids = list(model.generate(prompt, **{"engine": "mega", "stop_ids": (), **options}))
    assert ids == [0] * options["max_new_tokens"]
    return [launch.kernel for launch in record.launches]


def test_mega_launches_once_a_token(dense):
    assert launched(dense, [1, 2, 3], prefill="chunked", max_new_tokens=4) == [
        "decode",  # the prompt
        "argmax",
        *["decode"] * 3,
    ]
    by_rows = launched(dense, [1, 2, 3], max_new_tokens=4)
    assert by_rows[-5:] == ["advance", "argmax", *["decode"] * 3]
    assert by_rows.count("decode") == 3
    assert launched(dense, [1], max_new_tokens=2) == ["decode", "argmax", "decode"]


def test_mega_launches_once_for_several_tokens(dense):
    for limit, launches in ((1, 0), (2, 1), (4, 1), (5, 2), (8, 3)):
        names = launched(
            dense, [7] * 5, prefill="chunked", max_new_tokens=limit, tokens_per_launch=3
        )
        assert names == ["decode", "argmax", *["decode"] * launches]


@pytest.mark.parametrize("sampling", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_mega_draws_with_filters_in_the_launch(dense, sampling):
    options = {"prefill": "chunked", "temperature": 0.7, **sampling}
    for tokens_per_launch, launches in ((1, 6), (3, 2)):
        names = launched(
            dense, [1], max_new_tokens=7, tokens_per_launch=tokens_per_launch, **options
        )
        assert names == ["decode", "sample_filtered", *["decode"] * launches]


def test_long_prompt_takes_a_launch_for_each_piece(dense, monkeypatch):
    monkeypatch.setattr(mega, "_LAUNCH_TOKENS", 4)
    names = launched(dense, [1] * 9, prefill="chunked", max_new_tokens=1)
    assert names == ["decode"] * 3 + ["argmax"]


@pytest.mark.parametrize("engine", ["unfused", "fused", "mega"])
def test_long_prompt_goes_through_rows_in_pieces(dense, monkeypatch, engine):
    monkeypatch.setattr(generate, "PREFILL_ROWS", 4)
    names = launched(dense, [1] * 10, engine=engine, max_new_tokens=1)
    assert names.count("embed") == names.count("advance") == 3 and names[-1] == "argmax"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"prefill": "columns"}, "prefill is 'columns', wanted one of rows, chunked"),
        (
            {"engine": "fused", "prefill": "chunked"},
            "engine fused reads a prompt in rows; use rows",
        ),
        ({"tokens_per_launch": 0}, "tokens_per_launch is 0, wanted 1 or more"),
        (
            {"tokens_per_launch": 1.5, "engine": "mega"},
            "tokens_per_launch is 1.5, wanted 1 or more",
        ),
        ({"engine": "fused", "tokens_per_launch": 2}, "engine fused draws one; use engine mega"),
    ],
)
def test_generate_says_what_an_engine_has_not(dense, options, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        dense.generate([1], **options)


def test_mega_refuses_a_model_before_anything_is_launched():
    made = on_twin("minilm")
    for call in (made.generate, made.forward):
        with (
            jit.record(dry=True) as record,
            pytest.raises(
                cufuse.Unsupported, match=r"engine mega: minilm has .*; use engine fused"
            ),
        ):
            call([1, 2], engine="mega")
        assert not record.launches
