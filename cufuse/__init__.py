"""Transformer and Mixture-of-Experts inference as fused CUDA kernels, without PyTorch.

model = cufuse.load("smollm2-135m")
for token in model.generate(model.tokenizer.chat("Hello")): ...

y = cufuse.ops.linear(x, w, b, activation="gelu")  # on CuPy or NumPy arrays
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cufuse.device import Unsupported

if TYPE_CHECKING:
    from cufuse import engines, ops
    from cufuse.config import PRESETS, Config, UnknownModel
    from cufuse.hub import pull
    from cufuse.model import Model, load
    from cufuse.state import State

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Config",
    "Model",
    "State",
    "UnknownModel",
    "Unsupported",
    "engines",
    "load",
    "ops",
    "pull",
]

_HOMES = {
    "PRESETS": "config",
    "Config": "config",
    "UnknownModel": "config",
    "Model": "model",
    "load": "model",
    "State": "state",
    "pull": "hub",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import cufuse` itself loads next to nothing."""
    if name in ("engines", "ops"):
        return importlib.import_module(f"cufuse.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"cufuse.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'cufuse' has no attribute {name!r}")
