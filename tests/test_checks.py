"""What ops refuse before they launch: memory that two arrays of a call share."""

from __future__ import annotations

import numpy as np
import pytest

from cufuse import checks, ops


def test_an_output_may_not_lie_in_a_strided_input(to):
    # A cache seen through strides reaches further than its own bytes.
    memory = to(np.ones((64, 2, 8), np.float32))
    view = memory[:, 0]
    bound = checks.bind("op", strided=("x",), x=(view, "m n"))
    for first in (0, 31, 32, 63):
        out = memory.reshape(-1, 8)[first * 2 :][:1]
        with pytest.raises(ValueError, match="op: out shares memory with x"):
            bound.output("out", out, (1, 8))
    assert bound.output("out", memory.reshape(-1, 8)[-1:], (1, 8)) is not None


def test_an_input_that_an_output_may_be_is_taken_whole(to):
    x = to(np.ones((4, 8), np.float32))
    bound = checks.bind("op", x=(x, "m n"))
    assert bound.output("out", x, (4, 8), may_alias=("x",)) is x
    for out in (x[:2], x[1:]):
        with pytest.raises(ValueError, match="out shares memory with x"):
            bound.output("out", out, out.shape, may_alias=("x",))


def test_keys_and_values_want_a_cache_each(to):
    cache = to(np.zeros((1, 1, 4, 8), np.float32))
    start = to(np.zeros(1, np.int32))
    k = to(np.ones((1, 1, 1, 8), np.float32))
    with pytest.raises(ValueError, match="append: v_cache is k_cache; give it memory of its own"):
        ops.append(k, k, start, cache, cache)
    qkv = to(np.ones((1, 1, 24), np.float32))
    options = {"start": start, "k_cache": cache, "v_cache": cache, "n_heads": 1}
    with pytest.raises(ValueError, match="rope_append: v_cache is k_cache"):
        ops.rope_append(qkv, **options)
    w = to(np.ones((24, 24), np.float32))
    with pytest.raises(ValueError, match="qkv_rope_append: v_cache is k_cache"):
        ops.qkv_rope_append(qkv, w, **options)


def test_caches_side_by_side_in_one_array_are_two(to):
    # [batch, k or v, ...]: their strides interlock
    both = to(np.zeros((2, 2, 1, 4, 8), np.float32))
    k = to(np.ones((2, 1, 1, 8), np.float32))
    ops.append(k, k, to(np.zeros(2, np.int32)), both[:, 0], both[:, 1])
    assert float(both.sum()) == 2 * 2 * 8
