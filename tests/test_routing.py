"""How a benchmark counts the experts that a step reads."""

from __future__ import annotations

import secrets

import numpy as np
import pytest

import cufuse
from cufuse.benchmarks import routing
from cufuse.engines import functions
from cufuse.generate import Decoder


def test_distinct_experts_equal_a_count_by_sets():
    seed = secrets.randbits(32)
    experts = np.random.default_rng(seed).integers(0, 7, (3, 5, 6)).astype(np.int32)
    wanted = np.mean([len(set(row)) for row in experts.reshape(-1, 6).tolist()])
    assert routing.distinct_experts(experts) == pytest.approx(wanted), seed


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("engine", ["unfused", "mega"])
def test_a_step_of_one_token_reads_k_experts(engine):
    model = cufuse.load("tiny-moe", device="cpu-kernels", dtype="float32", seed=3)
    state = routing.RecordingState(model.weights, batch=1, capacity=8)
    decoder = Decoder(weights=model.weights, state=state, graph=False, **functions(engine))
    assert routing.observe(decoder, 2) == model.config.n_experts_per_token
