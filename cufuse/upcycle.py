"""A mixture of experts made from a dense model, tensor by tensor: copied experts or cut ones."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from cufuse import weights
from cufuse.config import Config
from cufuse.device import Unsupported


@dataclass(frozen=True)
class Upcycle:
    """How the dense MLPs become experts.

    n_experts: how many a layer gets
    top_k: how many a token goes to
    split: cut the hidden units into the experts instead of copying all of them; top_k is n_experts
    seed: of the routers and of the order of the hidden units
    """

    n_experts: int
    top_k: int
    split: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(
                f"upcycle: a token goes to {self.top_k} of {self.n_experts} experts, "
                "wanted 1 <= top <= experts"
            )
        if self.split and self.top_k != self.n_experts:
            raise ValueError("upcycle: experts that are cut need every one, top = experts")

    def config(self, dense: Config) -> Config:
        """Return the mixture's Config.

        Raises Unsupported for a mixture, an encoder or an MLP without a gate, and ValueError when
        the hidden units cannot be cut evenly.
        """
        reasons = {
            "is a mixture of experts already": dense.n_experts > 0,
            "is an encoder": not dense.has_head or not dense.causal,
            "has an MLP without a gate": not dense.gated,
        }
        for reason, applies in reasons.items():
            if applies:
                raise Unsupported(f"upcycle: {dense.name} {reason}; take a dense decoder")
        hidden_dim = dense.hidden_dim
        if self.split:
            if hidden_dim % self.n_experts:
                raise ValueError(
                    f"upcycle: hidden_dim = {hidden_dim} of {dense.name} is not a multiple of "
                    f"{self.n_experts} experts"
                )
            hidden_dim //= self.n_experts
        return dataclasses.replace(
            dense,
            hidden_dim=hidden_dim,
            n_experts=self.n_experts,
            n_experts_per_token=self.top_k,
            router="softmax_topk",
            norm_topk_prob=not self.split,
        )

    def arrays(
        self, dense: Config, arrays: Iterable[tuple[str, np.ndarray]]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the mixture's NumPy arrays by name, each made when it is asked for.

        arrays: those of the dense model, row by row, named as in `weights.shapes`

        Copied experts compute the same function and their weights sum to 1. Cut experts weigh
        1 / n_experts each, so their down projections are multiplied by n_experts, which is exact
        for powers of two; for other counts it rounds once in the dtype of the weights.
        """
        for name, array in arrays:
            prefix, _, field = name.rpartition(".")
            if field == "up":  # every MLP has one; the router goes with it
                yield f"{prefix}.router", self._router(f"{prefix}.router", dense.dim, array.dtype)
            if field in ("gate", "up", "gate_bias", "up_bias", "down", "down_bias"):
                array = self._experts(prefix, field, array, dense.hidden_dim)
            yield name, array

    def _router(self, name: str, dim: int, dtype: np.dtype) -> np.ndarray:
        if self.split:
            return np.zeros((self.n_experts, dim), dtype)
        # A deviation of dim^-0.5 gives logits of about 1 behind a norm.
        half_width = math.sqrt(3.0 / dim)
        shape = (self.n_experts, dim)
        made = weights.hash_uniform(
            shape, np.float32, seed=self.seed, tensor=f"upcycle.{name}", half_width=half_width
        )
        return made.astype(dtype)

    def _experts(self, prefix: str, field: str, array: np.ndarray, hidden_dim: int) -> np.ndarray:
        if field == "down_bias":  # the weights of the experts sum to 1
            return np.repeat(array[None], self.n_experts, 0)
        order = self._order(prefix, hidden_dim)
        if field != "down":
            return array[order]
        made = np.ascontiguousarray(np.moveaxis(array[:, order], 1, 0))
        return (made * np.float32(self.n_experts)).astype(array.dtype) if self.split else made

    def _order(self, prefix: str, hidden_dim: int) -> np.ndarray:
        """Return the hidden units of each expert, [n_experts, units]."""
        rows = 1 if self.split else self.n_experts
        keys = weights.hash_uniform(
            (rows, hidden_dim),
            np.float32,
            seed=self.seed,
            tensor=f"upcycle.{prefix}.order",
            half_width=1.0,
        )
        return np.argsort(keys, -1, kind="stable").reshape(self.n_experts, -1)


def parse(text: str) -> tuple[int, int]:
    """Read "8:2" as (experts, experts a token); raises ValueError."""
    found = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    if not found:
        raise ValueError(f"upcycle: {text!r} is not EXPERTS:TOP, such as 8:2")
    return int(found[1]), int(found[2])


def choose(
    upcycle: tuple[int, int] | None, split_experts: int | None, seed: int = 0
) -> Upcycle | None:
    """Turn the two options of `cufuse.load` into an Upcycle; raises ValueError for both."""
    if upcycle is not None and split_experts is not None:
        raise ValueError("upcycle and split_experts exclude each other; give one")
    if split_experts is not None:
        return Upcycle(split_experts, split_experts, split=True, seed=seed)
    return None if upcycle is None else Upcycle(*upcycle, seed=seed)
