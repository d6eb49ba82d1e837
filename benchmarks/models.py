"""Run the tests of a model: every engine verified, then timed or counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cufuse import device
from cufuse.benchmarks.prompt import ENCODER_TOKENS, Prompt
from cufuse.benchmarks.rows import Row
from cufuse.benchmarks.subject import Subject, Test


def run(
    name: str,
    *,
    where: str,
    dtype: np.dtype,
    chosen: Sequence[str],
    tests: Sequence[Test],
    repetitions: int,
    checked: bool,
    skipped: Callable[[str], None],
) -> Iterator[Row]:
    """Verify and time a model's engines; yields a row for each test and engine that can run it.

    name: a preset (random weights), or a model to load
    where: "cuda", or "cpu" to time the reference and count what the kernels would launch and move,
        or "cpu-kernels" to verify them on the CPU twin too
    chosen: the engines
    tests: an encoder cannot decode and reads prompts only, one of ENCODER_TOKENS if there is none
    skipped: told why an engine cannot run it, once for each test
    """
    subject = Subject(name, "cuda" if where == "cuda" else "cpu", dtype)
    if not subject.config.has_head:
        tests = _prompts(tests)
    for test in tests:
        test.check(subject.config)
    compared = checked and (where != "cpu" or "reference" in chosen)
    for test in tests:
        oracle = test.oracle(subject) if compared else None
        for engine in chosen:
            problem = subject.problem(engine, test.batch)
            if problem:
                skipped(problem)
            elif engine == "reference":
                yield test.in_numpy(subject, repetitions=repetitions, oracle=oracle)
            elif where == "cuda":
                yield test.on_gpu(subject, engine, repetitions=repetitions, oracle=oracle)
            else:
                row = test.counted(subject, engine)
                if oracle is not None and where == "cpu-kernels":
                    error = oracle.error(engine, device.twin, name)
                    row = dataclasses.replace(row, max_rel_err=error)
                yield row


def _prompts(tests: Sequence[Test]) -> list[Test]:
    """Keep the prompts, or put the usual one in place of what an encoder cannot do."""
    prompts: list[Test] = [test for test in tests if isinstance(test, Prompt)]
    return prompts or [Prompt(n, ENCODER_TOKENS) for n in dict.fromkeys(t.batch for t in tests)]
