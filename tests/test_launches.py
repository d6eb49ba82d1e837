"""Between ids in and ids out only our kernels run: the driver says what was enqueued."""

from __future__ import annotations

import numpy as np
import pytest
from graph_nodes import launched
from models import CONFIGS, small

from cufuse import engines, jit, ops
from cufuse.generate import Sampling
from cufuse.state import State


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("engine", ["unfused", "fused"])
@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.causal])
def test_a_step_launches_only_our_kernels(engine, name, batch):
    import cupy

    weights = small(name).map(cupy.asarray)
    state = State(weights, batch=batch, capacity=8)
    step = engines.get(engine).step
    stream = cupy.cuda.Stream(non_blocking=True)

    def token() -> None:
        logits = step(weights, state, state.tokens)
        ops.argmax(logits, out=state.tokens.reshape(-1))

    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        token()  # compiles and allocates
        with jit.record() as record:
            names = launched(token, stream)
    assert sorted(names) == sorted(launch.kernel for launch in record.launches)
    assert not [name for name in names if name.startswith("<")]
    by_phases = engine == "fused" and batch == 1 and weights.config.decode_problem is None
    wanted = ["decode_phase", "argmax"] if by_phases else ["embed", "argmax", "advance"]
    assert np.isin(wanted, names).all()


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("engine", ["unfused", "fused"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_piece_of_a_prompt_launches_only_our_kernels(engine, name, batch):
    """Nothing comes from the host either: a captured piece is replayed behind other tokens."""
    import cupy

    weights = small(name).map(cupy.asarray)
    state = State(weights, batch=batch, capacity=40)
    tokens = cupy.zeros((batch, 19), np.int32)
    step = engines.get(engine).step
    stream = cupy.cuda.Stream(non_blocking=True)

    def piece() -> None:
        step(weights, state, tokens)

    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        piece()  # compiles and allocates
        if not weights.config.causal:
            state.reset()
        with jit.record() as record:
            names = launched(piece, stream)
    assert sorted(names) == sorted(launch.kernel for launch in record.launches)


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8), Sampling(0.8, 9, 0.9, 0.01)])
@pytest.mark.parametrize("tokens_per_launch", [1, 4])
@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if c.decode_problem is None])
def test_mega_is_one_launch_and_nothing_else(name, tokens_per_launch, sampling):
    import cupy

    weights = small(name).map(cupy.asarray)
    state = State(weights, capacity=16, tokens_per_launch=tokens_per_launch)
    step_and_draw = engines.get("mega").step_and_draw
    ids = state.ids.reshape(-1)
    stream = cupy.cuda.Stream(non_blocking=True)

    def tokens() -> None:
        step_and_draw(weights, state, state.tokens, sampling, ids=ids)

    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        tokens()  # packs, compiles and allocates
        assert launched(tokens, stream) == ["decode"]
