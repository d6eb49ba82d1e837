"""What a checkpoint file holds, whatever its format, and which arrays of ours its tensors fill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cufuse import weights
from cufuse.config import Config
from cufuse.device import Unsupported

CHUNK = 1 << 18  # elements that are converted at a time: what stays in a CPU's caches


class CheckpointError(ValueError):
    """A model file that is broken or contradicts itself; the text names the file and the tensor."""


@dataclass(frozen=True)
class Stored:
    """A tensor as a file describes it."""

    shape: tuple[int, ...]
    type: str  # "F32", "BF16", "Q4_1" …


class Source(Protocol):
    """An open checkpoint."""

    path: Path

    @property
    def supported(self) -> tuple[str, ...]:
        """The types that `chunks` reads."""
        ...

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Every tensor by its name in the file."""
        ...

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """Yield a tensor's values in order, some of them at a time."""
        ...

    def blocks(self, parts: list[Part]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (blocks, scales) of 4-bit experts, as `mxfp4.from_blocks` takes them.

        Of a gate and its up there are two pairs.
        """
        ...


@dataclass(frozen=True)
class Picked:
    """Every n-th row of each expert's matrix, or vector, of a safetensors tensor."""

    name: str
    first: int = 0
    every: int = 1
    transposed: bool = False  # each matrix is stored [in, out]

    def stored(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tensor's shape for the shape of what is picked."""
        n, rows, *rest = wanted
        return (n, *rest, rows * self.every) if self.transposed else (n, rows * self.every, *rest)

    def of(self, values: np.ndarray) -> np.ndarray:
        """Pick from some of the tensor's experts."""
        matrices = values.swapaxes(1, 2) if self.transposed else values
        return matrices[:, self.first :: self.every]


@dataclass(frozen=True)
class Part:
    """One tensor of a file; its rows follow those of the part before it."""

    name: str
    shape: tuple[int, ...]
    interleaved_heads: int = 0  # when its rows are stored for interleaved rotation: how many heads
    picked: Picked | None = None  # when it holds more than what is asked for, or the other way
    types: tuple[str, ...] = ()  # those it may have, when they are other ones than `supported`


# Array, named as in weights.shapes, or as in weights.quantized -> what fills it.
Plan = dict[str, list[Part]]


def shape(sizes: tuple[int, ...]) -> str:
    """Write a shape as messages do."""
    return "[" + ", ".join(map(str, sizes)) + "]"


def check(source: Source, plan: Plan, ignored: tuple[str, ...] = ()) -> None:
    """Compare a plan with the file before anything is read.

    Raises CheckpointError for a missing or misshapen tensor, and Unsupported for a type that is not
    read or a tensor that the plan has no place for (and whose name does not end as in `ignored`).
    """
    where = source.path.name
    used = set()
    for part in (part for parts in plan.values() for part in parts):
        stored = source.tensors.get(part.name)
        if stored is None:
            raise CheckpointError(f"{where}: tensor {part.name} is missing; download it again")
        if stored.shape != part.shape:
            raise CheckpointError(
                f"{where}: tensor {part.name} is {shape(stored.shape)}, but the model's "
                f"configuration makes it {shape(part.shape)}"
            )
        if stored.type not in (part.types or source.supported):
            raise Unsupported(
                f"{where}: tensor {part.name} has type {stored.type}; cufuse reads "
                f"{', '.join(part.types or source.supported)}"
            )
        used.add(part.name)
    left = [n for n in source.tensors if n not in used and not n.endswith(ignored)]
    if left:
        raise Unsupported(
            f"{where}: tensor {left[0]}{_others(len(left) - 1)} would be left out, and cufuse has "
            "no model with it"
        )


def _others(count: int) -> str:
    return f" (and {count} more)" if count else ""


def fill(
    source: Source, parts: list[Part], wanted: tuple[int, ...], dtype: Any, config: Config
) -> np.ndarray:
    """Read the parts of one array, converted to dtype."""
    made = np.empty(wanted, dtype)
    flat = made.reshape(-1)
    at = 0
    for part in parts:
        begin = at
        for values in source.chunks(part.name):
            values = part.picked.of(values) if part.picked else values
            target = flat[at : at + values.size]
            _convert(values.reshape(-1), target, part.name, source.path.name)
            at += values.size
        if part.interleaved_heads:
            rows = flat[begin:at].reshape(part.shape)
            rows[...] = half_split(rows, part.interleaved_heads, config.rotary_dim)
    return made


def _convert(values: np.ndarray, target: np.ndarray, name: str, where: str) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        target[...] = values.astype(target.dtype, copy=False)
    # bfloat16 and float32 reach equally far: only float16 can overflow.
    if target.dtype == np.float16 and values.dtype != np.float16 and np.isinf(target).any():
        raise CheckpointError(
            f"{where}: tensor {name} has values beyond float16's 65504; load it as bfloat16"
        )


def half_split(rows: np.ndarray, n_heads: int, rotary_dim: int) -> np.ndarray:
    """Reorder a projection's rows from interleaved to half-split rotation.

    rows: `[n_heads * head_dim, ...]`. The first rotary_dim rows of each head come in pairs
    (2t, 2t + 1) that rotate together; returned are pairs (t, t + rotary_dim / 2). Scores do not
    change: queries and keys are reordered alike.
    """
    heads = rows.reshape(n_heads, -1, *rows.shape[1:])
    turned, rest = heads[:, :rotary_dim], heads[:, rotary_dim:]
    split = np.concatenate([turned[:, 0::2], turned[:, 1::2], rest], axis=1)
    return split.reshape(rows.shape)


def decoder_plan(
    config: Config,
    names: Mapping[str, str],
    layer_names: Mapping[str, Any],
    prefix: str,
    expert_names: Mapping[str, Any] | None = None,
) -> Plan:
    """Name the tensors of a model.

    `names` holds tensors outside the layers; `layer_names` those of a layer after `prefix` (which
    takes the layer's number): one name, a tuple whose rows follow each other (q, k, v), a name with
    `{expert}`, or what is Picked; `expert_names` those that are other ones in a layer with experts.
    Names of arrays that the config does not have are passed over.
    """
    plan: Plan = {}
    with_experts = {**layer_names, **(expert_names or {})}
    for array, wanted in weights.shapes(config).items():
        if not array.startswith("layers."):
            plan[array] = [Part(names[array], wanted)]
            continue
        _, layer, field = array.split(".")
        known = with_experts if config.is_moe_layer(int(layer)) else layer_names
        before, given = prefix.format(layer=layer), known[field]
        if isinstance(given, tuple):
            heads = (config.q_dim, config.kv_dim, config.kv_dim)
            plan[array] = [
                Part(before + name, (rows, *wanted[1:]))
                for name, rows in zip(given, heads, strict=True)
            ]
        elif isinstance(given, Picked):
            plan[array] = [Part(before + given.name, given.stored(wanted), picked=given)]
        elif "{expert}" in given:
            plan[array] = [
                Part(before + given.format(expert=expert), wanted[1:])
                for expert in range(config.n_experts)
            ]
        else:
            plan[array] = [Part(before + given, wanted)]
    return plan
