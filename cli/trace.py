"""`cufuse trace`: what every SM does when in one step of the mega kernel."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

import cufuse
from cufuse import engines
from cufuse import trace as traces
from cufuse import weights as weights_module
from cufuse.benchmarks.subject import first_layers
from cufuse.cli._errors import RUN_FAILED, WRONG_RESULT, Failure
from cufuse.cli._options import dtype_type, resolve_device
from cufuse.generate import ContextError
from cufuse.state import State
from cufuse.weights import Weights

_MOST_COST_PERCENT = 3.0


@click.command(
    epilog="""\b
Examples:
  cufuse trace llama-3.2-1b -o trace.json --png trace.png
  cufuse trace llama-3.1-8b --layers 4 --context 8192
  cufuse trace tiny --layers 1 --context 40 --device cpu-kernels
"""
)
@click.argument("model")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default="trace.json",
    show_default=True,
    help="Where the timeline goes: Chrome trace JSON, which https://ui.perfetto.dev opens.",
)
@click.option(
    "--png",
    type=click.Path(dir_okay=False, path_type=Path),
    help='Draw it too, SM by time (needs "cufuse[plot]").',
)
@click.option(
    "--context",
    type=click.IntRange(min=0),
    help="Tokens in the cache, random ones.  [default: 512, or what the model has room for]",
)
@click.option("--dtype", type=dtype_type, default="bfloat16", show_default=True)
@click.option("--layers", type=click.IntRange(min=1), help="Keep so many layers of the model.")
@click.option(
    "--device",
    "device_name",
    type=click.Choice(["cuda", "cpu-kernels"]),
    default="cuda",
    show_default=True,
    help="Where to run. cpu-kernels runs the CUDA kernel on the CPU (needs g++): very slow, and "
    "its times are the CPU's.",
)
def trace(
    model: str,
    output: Path,
    png: Path | None,
    context: int | None,
    dtype: np.dtype,
    layers: int | None,
    device_name: str,
) -> None:
    """Write down what every SM does when, in one decode step of MODEL.

    MODEL is a preset (with random weights) or a model file. The step is one launch of the mega
    kernel, greedy, behind a cache of random numbers, compiled to note what its roles do when: wait
    for weights or for activations of other SMs, compute, store. On stdout comes what each role
    spends on what, how far apart the SMs end a phase and what it takes to hand on; on a GPU also
    what tracing costs.
    """
    where = resolve_device(device_name)
    for path, option in ((output, "--output"), (png, "--png")):
        if path is not None and not path.absolute().parent.is_dir():
            raise click.BadParameter(f"there is no folder {path.parent}.", param_hint=option)
    if png is not None:
        traces.require_matplotlib()
    weights = _load(model, where, dtype, layers)
    c = weights.config
    if context is None:
        context = min(512, c.max_seq_len - 1)
    if context >= c.max_seq_len:
        raise ContextError(
            f"trace: {context} tokens in the cache and one more do not fit the context of "
            f"{c.name}, {c.max_seq_len}"
        )
    engines.check("mega", weights)
    state = State(weights, capacity=context + 1)
    traces.fill_cache(state, context)
    stepper = traces.Stepper(engines.get("mega").step_and_draw, weights, state)
    made, token = stepper.trace(traces.describe(c, dtype, context))
    traces.write(made, output)
    if png is not None:
        traces.draw(made, png)
    click.echo(
        f"wrote {output}, which https://ui.perfetto.dev opens; the step drew token {token}",
        err=True,
    )
    click.echo(traces.summary(made))
    if where == "cuda":
        _report_cost(stepper, token)
    if made.problem:
        raise Failure(f"trace: {made.problem}", RUN_FAILED)


def _load(name: str, where: str, dtype: np.dtype, layers: int | None) -> Weights:
    """Make a preset's weights, or load a model; the first layers of it where that was asked for."""
    if name in cufuse.PRESETS:
        config = cufuse.PRESETS[name]
        return weights_module.random(
            config if layers is None else config.cut(layers),
            dtype=dtype,
            kind="cupy" if where == "cuda" else "twin",
        )
    weights = cufuse.load(name, device=where, dtype=dtype).weights
    return weights if layers is None else first_layers(weights, layers)


def _report_cost(stepper: traces.Stepper, token: int) -> None:
    """Say what tracing costs, and that it changed nothing."""
    stepper.enqueue(traced=False)
    plain = stepper.token()
    if plain != token:
        raise Failure(
            f"trace: the traced step drew {token} and the same step without tracing {plain}",
            WRONG_RESULT,
        )
    untraced_us, traced_us = stepper.cost()
    percent = 100 * (traced_us / untraced_us - 1)
    note = "" if percent < _MOST_COST_PERCENT else f", more than {_MOST_COST_PERCENT:.0f} %"
    click.echo(
        f"\nA step takes {untraced_us:.1f} us and traced {traced_us:.1f} us: {percent:+.1f} %{note}"
    )
