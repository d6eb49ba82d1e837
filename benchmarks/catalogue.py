"""The ops that are benchmarked, by name: every Case in this folder."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from cufuse import benchmarks
from cufuse.benchmarks.case import Case


@functools.cache
def cases() -> dict[str, type[Case]]:
    """Find the cases; each stands in a file with its name."""
    for module in pkgutil.iter_modules(benchmarks.__path__, f"{benchmarks.__name__}."):
        importlib.import_module(module.name)
    return {case.name: case for case in sorted(Case.__subclasses__(), key=lambda case: case.name)}
