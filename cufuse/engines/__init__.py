"""The engines: implementations of one signature, `step(weights, state, tokens)`.

A step appends `tokens` (int32 [batch, q_len]) to the cache and returns logits [batch, vocab_size]
of the last position ([batch, q_len, vocab_size] with `all_logits`); a model without a head returns
hidden states [batch, q_len, dim]. What it returns is overwritten by the next step.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from cufuse.device import Array
from cufuse.state import State
from cufuse.weights import Weights

ENGINES = ("reference", "unfused", "fused", "mega")


class Step(Protocol):
    """What an engine is."""

    def __call__(
        self, weights: Weights, state: State, tokens: Array, *, all_logits: bool = False
    ) -> Array: ...


def get(name: str) -> Any:
    """Return the engine of that name, a module with a `step`; raises ValueError otherwise."""
    if name not in ENGINES:
        raise ValueError(f"engine is {name!r}, wanted one of {', '.join(ENGINES)}")
    return importlib.import_module(f"cufuse.engines.{name}")
