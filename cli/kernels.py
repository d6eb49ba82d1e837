"""`cufuse kernels`: the kernels there are, and what the compiler says of them."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np

from cufuse import config, device, jit, tiles
from cufuse import plan as plans
from cufuse.cli._cubin import threads_per_cta
from cufuse.cli._errors import NOT_AVAILABLE, RUN_FAILED, USAGE, Failure
from cufuse.cli._options import dtype_type, format_option, words

_STATIC_SHARED_BYTES = 48 * 1024
_REGISTERS_PER_SM = 65536
_REGISTERS_PER_THREAD = 255
_PLANNED_ARCH, _PLANNED_SMS = "90a", 132


@dataclass(frozen=True)
class Report:
    """One instantiation for one architecture."""

    kernel: str
    file: str
    arch: str = ""
    registers: int | None = None
    threads: int | None = None  # the most a CTA may have
    spill_bytes: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None  # static
    seconds: float | None = None
    problem: str = ""


@click.command(
    epilog="""\b
Examples:
  cufuse kernels
  cufuse kernels linear --compile --arch 90a
  cufuse kernels --plan llama-3.2-1b --context 8192
"""
)
@click.argument("pattern", required=False)
@click.option("--compile", "build", is_flag=True, help="Compile; no GPU is needed.")
@click.option(
    "--arch",
    "archs",
    multiple=True,
    callback=words,
    help=f"Architectures to compile for, comma list or repeated.  [default: {','.join(jit.ARCHS)}; "
    f"with --plan {_PLANNED_ARCH}]",
)
@click.option(
    "--plan",
    "model",
    metavar="MODEL",
    help="Print what the mega kernel does for one token of a model; no GPU is needed.",
)
@click.option(
    "--sms",
    type=click.IntRange(min=1),
    help=f"SMs of the GPU that --plan is for.  [default: {_PLANNED_SMS}, an H200's]",
)
@click.option(
    "--context",
    type=click.IntRange(min=0),
    help="Tokens in the cache before the one that --plan is for.  [default: 512]",
)
@click.option("--dtype", type=dtype_type, help="The model's, for --plan.  [default: bfloat16]")
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Compile so many at a time.")
@format_option()
def kernels(
    pattern: str | None,
    build: bool,
    archs: Sequence[str],
    model: str | None,
    sms: int | None,
    context: int | None,
    dtype: np.dtype | None,
    jobs: int | None,
    output: str,
) -> None:
    """List the kernels, compile them, or print the plan of a decode step in one launch.

    What is listed are the sample instantiations that each kernel's file names; PATTERN keeps those
    whose name or file contains it. With --compile they are built and held to a budget: no spills,
    at most 255 registers and 65536 a CTA, at most 48 KB of static shared memory; a kernel over it
    exits with 1.

    With --plan come, phase by phase, the tiles and bytes that a CTA takes in one layer, and what a
    token takes as a whole: bytes, hand-offs between CTAs, splits of the cache, shared memory.
    """
    unknown = [arch for arch in archs if arch not in jit.ARCHS]
    if unknown:
        raise click.BadParameter(
            f"{unknown[0]!r} is not one of {', '.join(jit.ARCHS)}.", param_hint="--arch"
        )
    if model is not None:
        if pattern or build or jobs or len(archs) > 1:
            raise click.UsageError("--plan goes with one --arch, --sms, --context, --dtype.")
        target = plans.target(archs[0] if archs else _PLANNED_ARCH, sms or _PLANNED_SMS)
        made = _plan(model, target, 512 if context is None else context, dtype or device.bfloat16)
        _print_plan(made, output)
        return
    if sms is not None or context is not None or dtype is not None:
        raise click.UsageError("--sms, --context and --dtype go with --plan.")
    chosen = [
        kernel
        for kernel in jit.samples()
        if not pattern or pattern in kernel.file or pattern in kernel.expression
    ]
    if not chosen:
        raise Failure(f"no kernel has {pattern!r} in its name or file", USAGE)
    if archs and not build:
        raise click.UsageError("--arch goes with --compile or --plan.")
    if not build:
        _print([Report(_name(kernel), kernel.file) for kernel in chosen], output, built=False)
        return
    reports = sorted(
        _compile_all(chosen, archs or jit.ARCHS, jobs or len(os.sched_getaffinity(0))),
        key=lambda report: (report.file, report.kernel, jit.ARCHS.index(report.arch)),
    )
    _print(reports, output, built=True)
    broken = [report for report in reports if report.problem]
    for report in broken:
        click.echo(f"{report.kernel} for sm_{report.arch}: {report.problem}", err=True)
    if broken:
        raise Failure(f"{len(broken)} of {len(reports)} compilations broke the budget", RUN_FAILED)


def _plan(model: str, target: tiles.Target, context: int, dtype: np.dtype) -> plans.Plan:
    """Plan a token of a model behind `context` others."""
    c = config.preset(model)
    problem = c.decode_problem
    if problem:
        raise Failure(f"--plan: {c.name} has {problem}, which mega does not have", NOT_AVAILABLE)
    if context >= c.max_seq_len:
        raise Failure(
            f"--plan: no token comes behind {context} others, the context of {c.name} is "
            f"{c.max_seq_len}",
            USAGE,
        )
    return plans.Plan(c, dtype, tiles.decode(c, target, dtype), context)


def _print_plan(made: plans.Plan, form: str) -> None:
    if form == "md":
        click.echo(made.text())
    elif form == "json":
        click.echo(json.dumps(made.as_dict(), indent=2))
    else:
        _print_rows([asdict(row) for row in made.rows()], form)


def _name(kernel: jit.Kernel) -> str:
    return kernel.expression.replace("cufuse::", "")


def _compile_all(chosen: Sequence[jit.Kernel], archs: Sequence[str], jobs: int) -> Iterator[Report]:
    """Compile everything on so many processes."""
    total, done = len(chosen) * len(archs), 0
    show = sys.stderr.isatty()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(compile_one, kernel, arch) for kernel in chosen for arch in archs]
        for future in as_completed(pending):
            done += 1
            if show:
                click.echo(f"\r{done} of {total} compiled", nl=done == total, err=True)
            yield future.result()


def compile_one(kernel: jit.Kernel, arch: str) -> Report:
    """Compile one instantiation and compare it with the budget."""
    try:
        made = jit.compile_offline(kernel, arch)
    except jit.CompileError as error:
        return Report(_name(kernel), kernel.file, arch, problem=str(error))
    threads = threads_per_cta(made.cubin, _name(kernel).partition("<")[0])
    return Report(
        _name(kernel),
        kernel.file,
        arch,
        registers=made.registers,
        threads=threads,
        spill_bytes=made.spill_bytes,
        stack_bytes=made.stack_bytes,
        shared_bytes=made.shared_bytes,
        seconds=round(made.seconds, 2),
        problem="; ".join(over_budget(made, threads)),
    )


def over_budget(made: jit.Compiled, threads: int) -> list[str]:
    """Say what a compiled kernel has too much of."""
    registers = min(_REGISTERS_PER_THREAD, _REGISTERS_PER_SM // threads)
    found = []
    if made.spill_bytes:
        found.append(f"{made.spill_bytes} bytes spilled")
    if made.registers > registers:
        found.append(f"{made.registers} registers, at most {registers} for {threads} threads")
    if made.shared_bytes > _STATIC_SHARED_BYTES:
        found.append(f"{made.shared_bytes} bytes of static shared memory, at most 49152")
    return found


def _print(reports: Sequence[Report], form: str, *, built: bool) -> None:
    names = list(asdict(reports[0])) if built else ["kernel", "file"]
    _print_rows([{name: asdict(report)[name] for name in names} for report in reports], form)


def _print_rows(rows: Sequence[dict[str, Any]], form: str) -> None:
    if form == "json":
        click.echo(json.dumps(rows, indent=2))
        return
    if form == "jsonl":
        for row in rows:
            click.echo(json.dumps(row))
        return
    names = list(rows[0])
    texts = [["" if value is None else str(value) for value in row.values()] for row in rows]
    if form == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([names, *texts])
        click.echo(out.getvalue(), nl=False)
        return
    for line in (names, ["---"] * len(names), *texts):
        click.echo("| " + " | ".join(text.splitlines()[0] if text else "" for text in line) + " |")
