"""Model: weights, tokenizer and engines behind three methods."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cufuse import checkpoint, engines, hub
from cufuse import config as configs
from cufuse import device as devices
from cufuse import generate as loop
from cufuse import tokenizer as tokenizers
from cufuse import upcycle as upcycles
from cufuse import weights as weights_module
from cufuse.config import Config
from cufuse.device import Array
from cufuse.state import State
from cufuse.tokenizer import Tokenizer
from cufuse.weights import Weights

_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_KINDS = {"cuda": "cupy", "cpu": "numpy", "cpu-kernels": "twin"}


class Model:
    """A model that is ready to run. Made by `cufuse.load`."""

    def __init__(self, weights: Weights, tokenizer: Tokenizer | None, where: str) -> None:
        self.weights = weights
        self.tokenizer = tokenizer
        self.device = where

    @property
    def config(self) -> Config:
        """Sizes and choices."""
        return self.weights.config

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the weights and activations."""
        return np.dtype(self.weights.dtype)

    def __repr__(self) -> str:
        millions = self.config.n_parameters / 1e6
        return f"<cufuse.Model {self.config.name}: {millions:.1f} M, {self.dtype}, {self.device}>"

    def generate(
        self,
        ids: Sequence[int],
        *,
        engine: str = "fused",
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop_ids: Collection[int] | None = None,
        graph: bool = True,
        prefill: str = "rows",
        tokens_per_launch: int = 1,
    ) -> Iterator[int]:
        """Yield the ids that follow a prompt, one by one.

        ids: the prompt's ids, [n]
        engine: "reference", "unfused", "fused" or "mega"
        temperature: 0 takes the likeliest; top_k, top_p and min_p as in `ops.sample`
        stop_ids: generation ends behind one of them; the tokenizer's when left out
        graph: replay a CUDA graph of the step (GPU only)
        prefill: how mega reads the prompt: "rows", through the kernels of fused, which is faster,
            or "chunked", token after token in its own, so that ids do not depend on where a prompt
            ends and generation begins
        tokens_per_launch: how many tokens a launch of mega makes; ids then come so many at a time

        Returns an iterator of at most max_new_tokens ids, fewer at the end of the context. The same
        seed gives the same ids. Raises ValueError for ids, engine or sampling out of range and
        Unsupported for what the engine cannot run, before anything is launched.
        """
        if stop_ids is None:
            stop_ids = self.tokenizer.eos_ids if self.tokenizer else ()
        sampling = loop.Sampling(temperature, top_k, top_p, min_p, seed)
        sampling.check()
        functions = engines.functions(
            self._engine(engine), prefill=prefill, tokens_per_launch=tokens_per_launch
        )
        return loop.generate(
            weights=self.weights,
            ids=ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_ids=stop_ids,
            graph=graph,
            tokens_per_launch=tokens_per_launch,
            **functions,
        )

    def forward(self, ids: Sequence[int], *, engine: str = "fused") -> Array:
        """Return the logits of every position of a prompt.

        ids: [n]

        Returns [n, vocab_size] (for an encoder the hidden states, [n, dim]) in the model's dtype, a
        CuPy array on "cuda" and else a NumPy array. Raises ValueError as `generate`, and
        KernelStopped.
        """
        c = self.config
        prompt = loop.check_ids("forward", ids, c.vocab_size)
        if len(prompt) > c.max_seq_len:
            raise loop.ContextError(
                f"forward: {len(prompt)} tokens are more than the context of {c.name}, "
                f"{c.max_seq_len}; shorten them"
            )
        state = self.state(len(prompt))
        step = engines.get(self._engine(engine)).step
        with devices.on_device_of(state.tokens):
            logits = step(self.weights, state, state.upload(prompt[None]), all_logits=True)[0]
            state.check_fault()
        return logits

    def state(self, capacity: int, *, batch: int = 1) -> State:
        """Make an empty KV cache of `capacity` tokens for `batch` sequences."""
        return State(self.weights, batch=batch, capacity=capacity)

    def _engine(self, name: str) -> str:
        engines.get(name)
        engines.check(name, self.weights)
        if name == "reference" and self.device != "cpu":
            raise devices.Unsupported(
                f"the reference engine runs on the CPU and the model is on {self.device}; load it "
                'with device="cpu"'
            )
        return name


def load(
    path_or_preset: str | Path,
    *,
    device: str = "cuda",
    dtype: Any = None,
    seed: int | None = None,
    upcycle: tuple[int, int] | None = None,
    split_experts: int | None = None,
) -> Model:
    """Load a model from a file or folder, a pulled model by name, or a preset with random weights.

    On a GPU the matrices of a decoder are packed as they are loaded, one after the other: all
    engines read that one copy.

    path_or_preset: a GGUF file, a folder with config.json and safetensors, the name of a model that
        was pulled ("smollm2-135m"), or a preset ("tiny-moe"; `cufuse.config.PRESETS`)
    device: "cuda", "cuda:1", "cpu", or "cpu-kernels" to run the kernels on the CPU: very slow, an
        aid for debugging them that needs g++
    dtype: "float32", "float16" or "bfloat16"; float32 on "cpu" and bfloat16 elsewhere if left out
    seed: random weights of a preset with this seed, even when real ones were pulled
    upcycle: (experts, experts a token): make a mixture of a dense model, each expert a copy of its
        MLP with the hidden units in another order
    split_experts: make a mixture by cutting the hidden units into so many experts, all of which
        every token goes to

    Returns a Model. Raises UnknownModel (a ValueError), FileNotFoundError, cufuse.Unsupported, or
    ValueError for a damaged file.
    """
    mixture = upcycles.choose(upcycle, split_experts, seed or 0)
    kind, gpu = _place(device)
    chosen = _dtype(dtype, kind)
    name = str(path_or_preset)
    if seed is None:
        path = hub.find(name)
        if path is not None:
            loaded = checkpoint.load(path, dtype=chosen, kind=kind, gpu=gpu, upcycle=mixture)
            return Model(loaded.weights, tokenizers.load(loaded.tokenizer_source), device)
        if name in hub.PACKAGES:
            raise NotPulled(
                f"{name} is not on this machine: run `cufuse pull {name}` (random weights of its "
                "shape come from cufuse.load with a seed)"
            )
    config = configs.preset(name)
    if mixture is not None:
        arrays = weights_module.random_arrays(config, seed=seed or 0, dtype=chosen)
        made = checkpoint.assemble(config, arrays, kind=kind, gpu=gpu, upcycle=mixture)
        return Model(made, None, device)
    weights = weights_module.random(config, seed=seed or 0, dtype=chosen, kind=kind, gpu=gpu)
    return Model(weights, None, device)


class NotPulled(configs.UnknownModel):
    """The weights of a known model have to be pulled first."""


def _place(name: str) -> tuple[str, int]:
    """Turn "cuda:1" into an array kind and a GPU number; raises when there is no such GPU."""
    base, _, number = str(name).partition(":")
    if base not in _KINDS or (number and not (base == "cuda" and number.isdigit())):
        raise ValueError(f"load: device is {name!r}, wanted cuda, cuda:1, cpu or cpu-kernels")
    if base == "cuda":
        problem = devices.gpu_problem()
        if problem:
            raise devices.Unsupported(f'device="cuda": {problem}; use device="cpu"')
        count = devices.require_cupy().cuda.runtime.getDeviceCount()
        if int(number or 0) >= count:
            raise devices.Unsupported(f"device={name!r}: this machine has {count} GPU(s)")
    return _KINDS[base], int(number or 0)


def _dtype(dtype: Any, kind: str) -> np.dtype:
    if dtype is None:
        return np.dtype(np.float32 if kind == "numpy" else ml_dtypes.bfloat16)
    try:
        found = np.dtype(_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        found = None
    if found not in devices.FLOAT_DTYPES:
        raise ValueError(f"load: dtype is {dtype!r}, wanted one of {', '.join(_DTYPES)}")
    return found
