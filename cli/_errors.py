"""Errors as sentences: which exit code belongs to what went wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from cufuse import jit
from cufuse.benchmarks.verify import VerificationError
from cufuse.config import UnknownModel
from cufuse.device import Unsupported
from cufuse.generate import ContextError, KernelStopped
from cufuse.hub import PullError

RUN_FAILED, USAGE, WRONG_RESULT, NOT_AVAILABLE = 1, 2, 3, 4

_CODES: tuple[tuple[type[Exception], int], ...] = (
    (VerificationError, WRONG_RESULT),
    (ContextError, USAGE),
    (UnknownModel, NOT_AVAILABLE),
    (Unsupported, NOT_AVAILABLE),
    (FileNotFoundError, NOT_AVAILABLE),
    (jit.CompileError, RUN_FAILED),
    (jit.KernelFault, RUN_FAILED),
    (KernelStopped, RUN_FAILED),
    (PullError, RUN_FAILED),
    (ValueError, RUN_FAILED),
    (TypeError, RUN_FAILED),
    (OSError, RUN_FAILED),
    (MemoryError, RUN_FAILED),
)


class Failure(click.ClickException):
    """One sentence for the user and the exit code that goes with it."""

    def __init__(self, message: str, exit_code: int = RUN_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turn errors that speak to the user into a Failure; CUFUSE_DEBUG keeps their traceback."""
    try:
        yield
    except BrokenPipeError:
        raise  # click knows what to do when nobody reads on
    except tuple(kind for kind, _ in _CODES) as error:
        if jit.debug_level():
            raise
        code = next(code for kind, code in _CODES if isinstance(error, kind))
        raise Failure(_sentence(error), code) from error


def _sentence(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename}: no such file"
    return str(error) or type(error).__name__
