"""Does it hold? Very many decode steps, every token compared, beside a GPU that is busy otherwise.

    python -m cufuse.benchmarks.soak llama-3.2-1b --steps 100000

Writes a number of tokens greedily behind a prompt, goes back to the prompt and writes them again,
and again: every pass has to draw the ids of the first one, which `fused` has to draw as well. A
kernel on a second stream keeps taking SMs and memory from it. Exits with 3 when a token is another
one, and with 1 when a kernel gave up.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import click
import numpy as np

from cufuse import device, engines, ops, weights
from cufuse.benchmarks.subject import ids as prompt_ids
from cufuse.config import preset
from cufuse.generate import Sampling
from cufuse.state import State

_REPORT_SECONDS = 10.0


class Pass:
    """The same tokens behind the same prompt, each time anew; on a GPU as one CUDA graph."""

    def __init__(self, made: weights.Weights, engine: str, context: int, n_tokens: int) -> None:
        self.weights = made
        self.engine = engines.get(engine)
        self.n_tokens = n_tokens
        self.state = State(made, capacity=context + n_tokens)
        self.drawn = device.empty((n_tokens,), np.int32, self.state.tokens)
        prompt = prompt_ids(made.config, 1, context)
        logits = engines.get("fused").step(made, self.state, self.state.upload(prompt))
        ops.argmax(logits, out=self.state.tokens.reshape(-1))
        self.start = self.state.start.copy()
        self.first = self.state.tokens.copy()
        self.context = context

    def run(self) -> None:
        """Write the tokens; their ids go to `drawn`."""
        state = self.state
        state.start[...] = self.start
        state.tokens[...] = self.first
        state.length = self.context
        for i in range(self.n_tokens):
            self.engine.step_and_draw(
                self.weights, state, state.tokens, Sampling(), ids=state.tokens.reshape(-1)
            )
            self.drawn[i : i + 1] = state.tokens.reshape(-1)


def soak(
    name: str, *, engine: str, steps: int, context: int, n_tokens: int, dtype: Any, kind: str
) -> int:
    """Run the passes; returns how many of the steps drew another id than the first pass."""
    made = weights.random(preset(name), seed=0, dtype=dtype, kind=kind)
    wanted = Pass(made, "fused", context, n_tokens)
    wanted.run()
    under_test = Pass(made, engine, context, n_tokens)
    under_test.run()
    on_gpu = device.is_gpu(under_test.drawn)
    graph: Any = None
    stream: Any = None
    other: Any = None
    busy: Any = None
    if on_gpu:
        cupy = device.require_cupy()
        cupy.cuda.runtime.deviceSynchronize()
        stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        stream.begin_capture()
        with stream:
            under_test.run()
        graph = stream.end_capture()
        busy = cupy.zeros((1 << 24,), cupy.float32)
    wrong = done = 0
    begin = said = time.monotonic()
    while done < steps:
        if on_gpu:
            with other:
                busy += 1
            graph.launch(stream)
            stream.synchronize()
        else:
            under_test.run()
        under_test.state.check_fault()
        wrong += int((under_test.drawn != wanted.drawn).sum())
        done += n_tokens
        if time.monotonic() - said > _REPORT_SECONDS:
            said = time.monotonic()
            click.echo(f"{done} steps, {wrong} wrong, {said - begin:.0f} s")
    click.echo(f"{name} {engine}: {done} steps, {wrong} wrong, {time.monotonic() - begin:.0f} s")
    return wrong


@click.command(help=__doc__)
@click.argument("model")
@click.option("--engine", default="mega", show_default=True)
@click.option("--steps", default=100_000, show_default=True)
@click.option("--context", default=96, show_default=True, help="Tokens of the prompt.")
@click.option("-n", "--tokens", default=64, show_default=True, help="Tokens of a pass.")
@click.option("--device", "kind", type=click.Choice(["cuda", "cpu-kernels"]), default="cuda")
def main(model: str, engine: str, steps: int, context: int, tokens: int, kind: str) -> None:
    """Run from the command line."""
    wrong = soak(
        model,
        engine=engine,
        steps=steps,
        context=context,
        n_tokens=tokens,
        dtype=device.bfloat16,
        kind="cupy" if kind == "cuda" else "twin",
    )
    sys.exit(3 if wrong else 0)


if __name__ == "__main__":
    main()
