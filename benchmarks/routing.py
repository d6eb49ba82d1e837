"""Which experts tokens went to: counted from what the router chose, not assumed."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse.benchmarks import verify
from cufuse.device import Array
from cufuse.generate import Decoder
from cufuse.state import State


def distinct_experts(experts: np.ndarray) -> float:
    """Return how many experts a layer reads in a step, the mean over steps and layers.

    experts: int32 [n_steps, n_layers, batch * k], ids as the router chose them
    """
    ordered = np.sort(experts, -1)
    return float(1 + (np.diff(ordered, axis=-1) != 0).sum(-1).mean())


class RecordingState(State):
    """A State that keeps the experts of every layer, for steps that are not timed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._open: Array | None = None
        self._kept: list[np.ndarray] = []
        self._of_step: Array | None = None  # [n_tokens, n_layers, k] of kernels that write it whole

    def buffer(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> Array:
        """Return the buffer; what the layer before wrote to that of the experts is kept."""
        made = super().buffer(name, shape, dtype)
        if name == "ids" and len(shape) == 2:
            self._keep()
            self._open = made
        elif name == "experts":
            self._of_step = made
        return made

    def take(self) -> np.ndarray | None:
        """Return the experts since the last call, int32 [n_layers, batch * k]; None without any."""
        if self._of_step is not None:
            layers = [i for i in range(self.config.n_layers) if self.config.is_moe_layer(i)]
            found = np.array(verify.to_numpy(self._of_step))[-1, layers]
            self._of_step = None
            return found
        self._keep()
        kept, self._kept = self._kept, []
        return np.stack(kept) if kept else None

    def _keep(self) -> None:
        if self._open is not None:
            self._kept.append(np.array(verify.to_numpy(self._open)).reshape(-1))
            self._open = None


def observe(decoder: Decoder, n_steps: int) -> float | None:
    """Run a few steps of a decoder with a RecordingState; None where an engine keeps no ids."""
    state = decoder.state
    assert isinstance(state, RecordingState)
    state.take()
    steps = []
    for _ in range(n_steps):
        decoder.decode()
        decoder.ids()  # the step has ended
        steps.append(state.take())
    found = [step for step in steps if step is not None]
    return distinct_experts(np.stack(found)) if found else None
