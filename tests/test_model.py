"""`cufuse.load` and what it returns: wrong arguments are answered before anything is run."""

from __future__ import annotations

import numpy as np
import pytest

import cufuse


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
