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

import click

from cufuse import jit
from cufuse.cli._cubin import threads_per_cta
from cufuse.cli._errors import RUN_FAILED, USAGE, Failure
from cufuse.cli._options import format_option, words

_STATIC_SHARED_BYTES = 48 * 1024
_REGISTERS_PER_SM = 65536
_REGISTERS_PER_THREAD = 255


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
"""
)
@click.argument("pattern", required=False)
@click.option("--compile", "build", is_flag=True, help="Compile; no GPU is needed.")
@click.option(
    "--arch",
    "archs",
    multiple=True,
    callback=words,
    help=f"Architectures to compile for, comma list or repeated.  [default: {','.join(jit.ARCHS)}]",
)
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Compile so many at a time.")
@format_option()
def kernels(
    pattern: str | None, build: bool, archs: Sequence[str], jobs: int | None, output: str
) -> None:
    """List the kernels, or compile them.

    What is listed are the sample instantiations that each kernel's file names; PATTERN keeps those
    whose name or file contains it. With --compile they are built and held to a budget: no spills,
    at most 255 registers and 65536 a CTA, at most 48 KB of static shared memory; a kernel over it
    exits with 1.
    """
    chosen = [
        kernel
        for kernel in jit.samples()
        if not pattern or pattern in kernel.file or pattern in kernel.expression
    ]
    if not chosen:
        raise Failure(f"no kernel has {pattern!r} in its name or file", USAGE)
    unknown = [arch for arch in archs if arch not in jit.ARCHS]
    if unknown:
        raise click.BadParameter(
            f"{unknown[0]!r} is not one of {', '.join(jit.ARCHS)}.", param_hint="--arch"
        )
    if archs and not build:
        raise click.UsageError("--arch goes with --compile.")
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
    rows = [[asdict(report)[name] for name in names] for report in reports]
    if form == "json":
        click.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
        return
    if form == "jsonl":
        for row in rows:
            click.echo(json.dumps(dict(zip(names, row, strict=True))))
        return
    texts = [["" if value is None else str(value) for value in row] for row in rows]
    if form == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([names, *texts])
        click.echo(out.getvalue(), nl=False)
        return
    for row in (names, ["---"] * len(names), *texts):
        click.echo("| " + " | ".join(text.splitlines()[0] if text else "" for text in row) + " |")
