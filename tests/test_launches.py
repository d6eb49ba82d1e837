"""Between ids in and ids out only our kernels run: the driver says what was enqueued."""

from __future__ import annotations

import numpy as np
import pytest
from graph_nodes import launched
from models import CONFIGS, small

from cufuse import engines, jit, ops
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
    assert np.isin(["embed", "argmax", "advance"], names).all()
