"""The twin's bits beside those that an H200 answered, and how far both are from float64."""

from __future__ import annotations

import json
from pathlib import Path

import bits
import numpy as np
import pytest

STORED = Path(__file__).resolve().parent / "data" / "h200_bits.json"


@pytest.fixture
def stored():
    """What the GPU answered."""
    if not STORED.is_file():
        pytest.fail(
            f"there is no {STORED}, to compare with what a GPU answers: make it on an H200 with "
            "`python -P tests/bits.py --write tests/data/h200_bits.json`"
        )
    return json.loads(STORED.read_text())


def differences(found, wanted):
    """Say in a sentence for each answer that differs where the stored values are others."""
    assert found.keys() == wanted.keys(), f"{STORED} holds other kernels; make it anew"
    said = []
    for name, here in found.items():
        there = wanted[name]
        if here != there:
            pairs = zip(here["sample"].split(), there["sample"].split(), strict=False)
            values = [f"{a} instead of {b}" for a, b in pairs if a != b]
            said.append(f"{name} {here['shape']}: {', '.join(values) or 'not in the sample'}")
    return said


@pytest.mark.parametrize("group", bits.EXACT)
def test_bits_are_those_of_the_gpu(to_kernels, stored, group):
    assert not differences(bits.exact(group, to_kernels), stored["exact"][group])


@pytest.mark.parametrize("group", bits.ROUNDED)
def test_differences_from_float64_are_within_the_bound(to_kernels, stored, group):
    bound = bits.BOUNDS[group]
    found = bits.rounded(group, to_kernels)
    assert found.keys() == stored["rounded"][group].keys(), f"{STORED}: make it anew"
    assert {name: value for name, value in found.items() if not value <= bound} == {}
    over = {name: v for name, v in stored["rounded"][group].items() if not v <= bound}
    assert over == {}, f"the stored GPU is further than {bound} from float64"


def test_one_bit_is_seen():
    x = np.linspace(0, 1, 100, dtype=np.float32)
    other = x.copy()
    other.view(np.uint32)[1] ^= 1
    wanted = {"a": bits.answer(x)}
    assert differences({"a": bits.answer(x.copy())}, wanted) == []
    assert differences({"a": bits.answer(other)}, wanted) == ["a float32 [100]: not in the sample"]
    other.view(np.uint32)[-1] ^= 1
    found = differences({"a": bits.answer(other)}, wanted)
    assert found == ["a float32 [100]: 3f800001 instead of 3f800000"]
    assert differences({"a": bits.answer(x.reshape(4, 25))}, wanted) != []


def test_float_nans_are_alike_and_zeros_are_not():
    nans = np.array([0x7F800001, 0xFFC00000, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert len(set(bits.as_words(nans).tolist())) == 1
    assert bits.answer(np.float32([0.0])) != bits.answer(np.float32([-0.0]))
