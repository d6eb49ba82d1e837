"""`cufuse bench`: what fusion does to single ops, to a decode step and to a prompt."""

from __future__ import annotations

import difflib
import importlib.util
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from cufuse import device
from cufuse.benchmarks import case, models
from cufuse.benchmarks.catalogue import cases
from cufuse.benchmarks.decode import Decode
from cufuse.benchmarks.prompt import Prompt
from cufuse.benchmarks.rows import FORMATS, Row, Writer, save, stamp
from cufuse.benchmarks.sweep import OPS, Sweep, report, shapes
from cufuse.cli._errors import NOT_AVAILABLE, USAGE, Failure
from cufuse.cli._options import (
    device_option,
    dtype_type,
    engine_choice,
    format_option,
    numbers,
    resolve_device,
    words,
)
from cufuse.config import PRESETS
from cufuse.engines import ENGINES

_GPU_MODELS = ("llama-3.2-1b", "olmoe-1b-7b")
_CPU_MODELS = ("tiny", "tiny-moe")


def _engines(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> tuple[str, ...]:
    return tuple(engine_choice.convert(word, param, ctx) for word in words(ctx, param, value))


def _dtypes(
    ctx: click.Context, param: click.Parameter, value: Sequence[str]
) -> tuple[np.dtype, ...]:
    return tuple(dtype_type.convert(word, param, ctx) for word in words(ctx, param, value))


@click.command(
    epilog="""\b
Examples:
  cufuse bench                                   both tables
  cufuse bench linear --size 1x4096x4096         one op, one size
  cufuse bench decode --model qwen3-0.6b -d 512-2048+512 -o jsonl
  cufuse bench decode --model llama-3.2-1b -p 512,2048 -n 0
  cufuse bench linear --sweep --size 512x4096x4096 --size 512x2048x8192
"""
)
@click.argument("name", required=False)
@click.option(
    "-m",
    "--model",
    "model_names",
    multiple=True,
    callback=words,
    help="Presets or model files, comma list or repeated.  [default: llama-3.2-1b,olmoe-1b-7b; "
    "without a GPU tiny,tiny-moe]",
)
@click.option(
    "-e",
    "--engine",
    "engine_names",
    multiple=True,
    callback=_engines,
    help="Engines, comma list or repeated.  [default: all]",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    callback=_dtypes,
    help="bfloat16, float16, float32, comma list or repeated.  [default: bfloat16]",
)
@click.option(
    "-b",
    "--batch",
    default="1",
    show_default=True,
    callback=numbers,
    help="Sequences decoded at once: 1,8 or 1-8*2.",
)
@click.option(
    "-d",
    "--context",
    callback=numbers,
    help="Tokens in the cache: 512,2048 or 512-2048+512.  [default: 512; without a GPU 128]",
)
@click.option(
    "-n",
    "--n-tokens",
    type=click.IntRange(min=0),
    help="Tokens to decode; 0 for none.  [default: 128; without a GPU 16]",
)
@click.option(
    "-p",
    "--prompt",
    callback=numbers,
    help="Prompts to process too, in tokens: 512 or 128,512.  [default: none; of an encoder, which "
    "does nothing else, 128]",
)
@click.option(
    "-r",
    "--repetitions",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Samples to take.",
)
@click.option("--size", "sizes", multiple=True, help="Sizes of the op NAME, such as 1x4096x4096.")
@click.option(
    "--sweep",
    "sweeps",
    is_flag=True,
    help="Time every tile that linear or gated_linear could take on an sm_90a GPU, on the sizes of "
    "the benchmark and of two models or on --size, and print the table of tiles.py that follows.",
)
@device_option
@format_option()
@click.option(
    "-oe", "--output-error", "second", type=click.Choice(FORMATS), help="Also print to stderr."
)
@click.option("--save", "keep", is_flag=True, help="Append the rows to benchmarks/results.")
@click.option("--commit", help="Commit to note in the rows.  [default: what git says]")
@click.option("--no-verify", is_flag=True, help="Time without checking the results first.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help='Draw the rows into an image file (needs "cufuse[plot]").',
)
@click.pass_context
def bench(
    ctx: click.Context,
    name: str | None,
    model_names: Sequence[str],
    engine_names: Sequence[str],
    dtypes: Sequence[np.dtype],
    batch: Sequence[int],
    context: Sequence[int] | None,
    n_tokens: int | None,
    prompt: Sequence[int] | None,
    repetitions: int,
    sizes: Sequence[str],
    sweeps: bool,
    device_name: str,
    output: str,
    second: str | None,
    keep: bool,
    commit: str | None,
    no_verify: bool,
    plot: Path | None,
) -> None:
    """Measure what kernel fusion does.

    NAME is `ops`, `decode` or one op; left out, both tables are made, with --model only the second.
    Its tests are named as in llama-bench: tg128 @ d512 decodes 128 tokens behind 512 in the cache,
    pp512 processes a prompt of 512. Every result is checked against float64 before it is timed; a
    wrong one exits with 3. Without a GPU launches and bytes are counted and the NumPy reference is
    timed; with --device cpu-kernels the kernels are checked as well. What mega cannot run is left
    out with a line on stderr: it takes decoders and one sequence.

    With --sweep every tile has a row, timed alone, and the tile that is chosen and the fastest one
    say so; the fitted table follows the rows, on stderr unless they are Markdown.
    """
    if sweeps:
        _check_sweep(name, dtypes, bool(engine_names), plot)
    where = resolve_device(device_name)
    chosen = tuple(engine_names) or ENGINES
    kinds = list(dtypes) or [device.bfloat16]
    ops = _ops(name, sizes, kinds, where, bool(model_names), sweeps)
    on_gpu = where == "cuda"
    if min(batch) < 1:
        raise click.BadParameter("a batch has at least 1 sequence", ctx, param_hint="--batch")
    if prompt and min(prompt) < 1:
        raise click.BadParameter("a prompt has at least 1 token", ctx, param_hint="--prompt")
    n = (128 if on_gpu else 16) if n_tokens is None else n_tokens
    depths = context or ((512,) if on_gpu else (128,))
    tests = [Decode(b, n, d) for b in batch for d in depths if n] + [
        Prompt(b, p) for b in batch for p in prompt or ()
    ]
    if not tests and name in (None, "decode"):
        raise click.UsageError("-n 0 leaves nothing to measure of a model; add --prompt.")
    if plot:
        _check_plot(plot)
    _announce(where)
    common: dict[str, Any] = {"repetitions": repetitions, "checked": not no_verify}
    sweep = None
    if sweeps and name:
        _check_warpgroups(where)
        sweep = Sweep(name, log=lambda line: click.echo(line, err=True), **common)
    skipped: list[str] = []

    def skip(why: str) -> None:
        if why not in skipped:
            skipped.append(why)
            click.echo(f"{why}; left out", err=True)

    def rows() -> Iterator[Row]:
        if sweep:
            yield from sweep.rows(ops)
            return
        for one in ops:
            if on_gpu:
                yield from case.run_on_gpu(one, chosen, **common)
            else:
                yield from case.run_on_cpu(one, chosen, where=where, **common)
        if name not in (None, "decode"):
            return
        for model in model_names or (_GPU_MODELS if on_gpu else _CPU_MODELS):
            for dtype in kinds:
                yield from models.run(
                    model,
                    where=where,
                    dtype=dtype,
                    chosen=chosen,
                    tests=tests,
                    skipped=skip,
                    **common,
                )

    made: list[Row] = []
    writers = [Writer(output, click.echo)]
    if second:
        writers.append(Writer(second, lambda line: click.echo(line, err=True)))
    mark = stamp(_command(ctx), commit)
    try:
        for row in rows():
            made.append(mark(row))
            for writer in writers:
                writer.write(made[-1])
            sys.stdout.flush()
            if keep:  # at once: a run that is ended halfway has measured something
                file = save(made[-1:])
    finally:
        for writer in writers:
            writer.close()
        if keep and made:
            click.echo(f"rows appended to {file}", err=True)
    if not made and skipped:
        raise Failure(f"nothing to measure: {skipped[-1]}", NOT_AVAILABLE)
    if not made:
        raise Failure(f"nothing to measure with engine {', '.join(chosen)} on {where}", USAGE)
    if sweep:
        click.echo(f"\n{report(sweep.measured, sweep.target)}", err=output != "md")
    if plot:
        from cufuse.benchmarks.plot import draw

        draw(made, plot)
        click.echo(f"plot written to {plot}", err=True)


def _ops(
    name: str | None,
    sizes: Sequence[str],
    kinds: Sequence[np.dtype],
    where: str,
    has_models: bool,
    sweeps: bool,
) -> list[case.Case]:
    """Choose the ops to run."""
    if name is not None and name not in ("ops", "decode", *cases()):
        raise click.BadParameter(_unknown(name), param_hint="NAME")
    if has_models and name not in (None, "decode"):
        raise click.UsageError(f"--model goes with decode, not with {name}.")
    if sizes and name not in cases():
        raise click.UsageError("--size needs the name of one op.")
    if name == "decode" or (name is None and has_models):
        return []
    classes = [cases()[name]] if name in cases() else cases().values()
    made = []
    for kind in classes:
        standard = {
            "cuda": kind.gpu_sizes,
            "cpu": kind.cpu_sizes,
            "cpu-kernels": (kind.small_size,),
        }[where]
        if sweeps:
            standard = tuple(shapes(kind.name))
        try:
            wanted = [case.parse_sizes(text) for text in sizes] or standard
            made += [kind(size, dtype) for dtype in kinds for size in wanted]
            for one in made if sweeps else ():
                if one.size["k"] % 8:
                    raise ValueError(f"k is {one.size['k']}, wanted a multiple of 8 for --sweep")
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--size") from error
    return made


def _check_sweep(
    name: str | None, dtypes: Sequence[np.dtype], has_engines: bool, plot: Path | None
) -> None:
    """Refuse what a sweep does not know."""
    if name not in OPS:
        raise click.UsageError(f"--sweep needs the name {' or '.join(OPS)}.")
    if has_engines or plot:
        raise click.UsageError(
            f"--sweep times tiles of one kernel; {'--plot' if plot else '--engine'} does not go "
            "with it."
        )
    if any(dtype.itemsize != 2 for dtype in dtypes):
        raise click.UsageError(
            "--sweep is for bfloat16 and float16: warpgroups multiply no others."
        )


def _check_warpgroups(where: str) -> None:
    """Raise Failure where no warpgroups multiply."""
    why = device.gpu_problem() if where != "cuda" else None
    if where == "cuda":
        gpu = device.gpu_info()
        if gpu.arch == "90a":
            return
        why = f"{gpu.name} is sm_{gpu.arch}"
    raise Failure(
        f"--sweep needs a GPU of sm_90a: {why or f'--device {where} is none'}", NOT_AVAILABLE
    )


def _unknown(name: str) -> str:
    """Say what NAME can be: the nearest, or how a model is named."""
    known = ("ops", "decode", *cases())
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"{name!r} does not exist. Did you mean {near[0]!r}?"
    hint = f" A model is measured with --model {name}." if name in PRESETS else ""
    return f"{name!r} is not one of {', '.join(known)}.{hint}"


def _check_plot(plot: Path) -> None:
    """Find out before anything is measured that the plot cannot be drawn."""
    if not plot.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {plot.parent}.", param_hint="--plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise Failure('--plot needs matplotlib: pip install "cufuse[plot]"', NOT_AVAILABLE)


def _announce(where: str) -> None:
    """Say on stderr what the numbers are about."""
    if where == "cpu-kernels":
        click.echo(
            "Launches and bytes are counted and results are checked; only the NumPy reference is "
            "timed.",
            err=True,
        )
        return
    if where == "cpu":
        problem = device.gpu_problem()
        why = problem[0].upper() + problem[1:] if problem else "On the CPU"
        click.echo(
            f"{why}; launches and bytes are counted, and only the NumPy reference is timed.",
            err=True,
        )
        return
    gpu = device.gpu_info()
    cupy = device.require_cupy()
    click.echo(
        f"{gpu.name}, sm_{gpu.arch}, {gpu.sm_count} SMs, {gpu.memory_bytes / 2**30:.0f} GiB, "
        f"driver for CUDA {gpu.driver}, CUDA {gpu.cuda_runtime}, CuPy {cupy.__version__}",
        err=True,
    )


def _command(ctx: click.Context) -> str:
    return shlex.join(["cufuse", *ctx.find_root().meta.get("cufuse.arguments", ())])
