"""What a decode keeps: capacity, buffers, uploads."""

from __future__ import annotations

import re

import numpy as np
import pytest
from conftest import to_numpy
from models import CONFIGS, small

from cufuse import jit
from cufuse import state as state_module
from cufuse.state import State


def test_capacity_is_checked():
    weights = small("llama")
    for capacity in (0, CONFIGS["llama"].max_seq_len + 1):
        with pytest.raises(ValueError, match=f"capacity is {capacity} tokens, wanted 1 to 96"):
            State(weights, capacity=capacity)
    with pytest.raises(ValueError, match="batch is 0"):
        State(weights, batch=0, capacity=4)


def test_buffers_keep_their_memory():
    state = State(small("llama"), capacity=4)
    large = state.buffer("x", (4, 8))
    assert np.shares_memory(large, state.buffer("x", (2, 3)))
    assert not np.shares_memory(large, state.buffer("y", (4, 8)))
    assert not np.shares_memory(large, state.buffer("x", (4, 8), "int32"))
    larger = state.buffer("x", (5, 8))
    assert not np.shares_memory(large, larger)  # a captured step still writes to the old block


def test_reset_forgets_tokens(to):
    state = State(small("llama").map(to), capacity=8)
    state.advance(3)
    assert state.length == 3 and int(to_numpy(state.start)[0]) == 3
    state.reset()
    assert state.length == 0 and int(to_numpy(state.start)[0]) == 0


@pytest.mark.parametrize(("batch", "n"), [(1, 1), (3, 1), (1, 130), (3, 50)])
def test_positions_follow_the_start(to, batch, n):
    state = State(small("llama").map(to), batch=batch, capacity=8)
    start = np.arange(batch, dtype=np.int32) * 7 + 2
    state.start[...] = to(start)
    got = state.positions(n)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(to_numpy(got), (start[:, None] + np.arange(n)).ravel())


def test_caches_have_whole_accesses():
    state = State(small("llama"), capacity=37)
    assert state.keys(0).shape == (1, 128, 1, 32)
    with pytest.raises(ValueError, match="38 more tokens do not fit"):
        state.check_room(38)


@pytest.mark.parametrize("batch, tokens_per_launch", [(1, 1), (3, 1), (1, 5), (40, 1)])
def test_draws_and_control_words_lie_in_one_array(batch, tokens_per_launch):
    made = small("llama")
    state = State(made, batch=batch, capacity=4, tokens_per_launch=tokens_per_launch)
    state.ids[...] = np.arange(state.ids.size).reshape(tokens_per_launch, batch)
    assert (state.tokens.ravel() == state.ids[-1]).all() and not state.control.any()
    state.control[1] = 2
    copy = state.drawn.copy()
    state.drawn.fill(0)
    assert (state.ids_in(copy).ravel() == np.arange(state.ids.size)).all()
    assert "gave up waiting" in str(state.stopped(copy)) and state.stopped(state.drawn) is None
    with pytest.raises(ValueError, match="tokens_per_launch is 0, wanted at least 1"):
        State(made, capacity=4, tokens_per_launch=0)


def test_control_words_are_those_of_the_kernels():
    text = (jit.sources() / "device" / "decode_shape.cuh").read_text()
    constants = dict(re.findall(r"constexpr int kControl(\w+) = (\d+);", text))
    assert int(constants["Words"]) == state_module._CONTROL_WORDS
    assert int(constants["Fault"]) == state_module._FAULT


@pytest.mark.gpu
def test_upload_on_a_busy_stream_keeps_the_data(rng):
    import cupy

    from cufuse import ops

    state = State(small("llama").map(cupy.asarray), capacity=8)
    x = cupy.asarray(rng.standard_normal((4096, 4096)).astype(np.float32))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(8):
            ops.matmul(x, x)  # milliseconds of work before the copies can start
        host = [np.arange(i, i + 40, dtype=np.int32) for i in range(50)]
        made = [state.upload(array) for array in host]
        wanted = [array.copy() for array in host]
        for array in host:
            array.fill(-1)
        stream.synchronize()
    for got, array in zip(made, wanted, strict=True):
        np.testing.assert_array_equal(got.get(), array)
