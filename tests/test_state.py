"""What a decode keeps: capacity, buffers, uploads."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import to_numpy
from models import CONFIGS, small

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


def test_caches_have_whole_accesses():
    state = State(small("llama"), capacity=37)
    assert state.keys(0).shape == (1, 64, 1, 32)
    with pytest.raises(ValueError, match="38 more tokens do not fit"):
        state.check_room(38)


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
