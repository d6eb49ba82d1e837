"""The engines: implementations of one signature, `step(weights, state, tokens)`.

A step appends `tokens` (int32 [batch, q_len]) to the cache and returns logits [batch, vocab_size]
of the last position ([batch, q_len, vocab_size] with `all_logits`); a model without a head returns
hidden states [batch, q_len, dim]. What it returns is overwritten by the next step.

An engine may also have `step_and_draw`; `check`, which raises for what it cannot run; `prefill`,
for many rows of a prompt, where its step takes one token after the other; and `piece_rows`, where
its step wants a prompt in other pieces than `generate.piece_rows` says.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

from cufuse import generate
from cufuse.device import Array
from cufuse.state import State
from cufuse.weights import Weights

ENGINES = ("reference", "unfused", "fused", "mega")
PREFILLS = ("rows", "chunked")


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


def check(name: str, weights: Weights, *, batch: int = 1) -> None:
    """Raise Unsupported, naming what is missing, when an engine cannot run a model or a batch."""
    if hasattr(get(name), "check"):
        get(name).check(weights, batch=batch)


def functions(
    name: str,
    *,
    prefill: str = "rows",
    tokens_per_launch: int = 1,
) -> dict[str, Any]:
    """Return what `generate.Decoder` takes of an engine: functions by the names of its arguments.

    prefill: how a prompt is read: "rows", many tokens at once, or "chunked", one after the other
        in a launch for each piece, with the bits of the steps that follow
    tokens_per_launch: tokens that a launch is to draw

    Raises ValueError for what the engine does not have.
    """
    engine = get(name)
    if prefill not in PREFILLS:
        raise ValueError(f"prefill is {prefill!r}, wanted one of {', '.join(PREFILLS)}")
    by_token = hasattr(engine, "prefill")
    if prefill == "chunked" and not by_token:
        raise ValueError(
            f"prefill is 'chunked' and engine {name} reads a prompt in rows; use rows, or engine "
            "mega"
        )
    if tokens_per_launch > 1 and not by_token:
        raise ValueError(
            f"tokens_per_launch is {tokens_per_launch}, wanted 1: engine {name} draws one; use "
            "engine mega"
        )
    in_rows = by_token and prefill == "rows"
    return {
        "step": engine.step,
        "prefill": engine.prefill if in_rows else engine.step,
        "piece_rows": generate.piece_rows if in_rows else piece_rows(name),
        "step_and_draw": getattr(engine, "step_and_draw", None),
    }


def piece_rows(name: str) -> Callable[[State], int]:
    """Return what tells the tokens of a sequence that one call of an engine's step is to take."""
    return getattr(get(name), "piece_rows", generate.piece_rows)
