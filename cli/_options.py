"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import click
import numpy as np

from cufuse import device, jit
from cufuse.benchmarks.rows import FORMATS
from cufuse.cli._errors import NOT_AVAILABLE, Failure
from cufuse.engines import ENGINES

device_option = click.option(
    "--device",
    "device_name",
    type=click.Choice(["auto", "cuda", "cpu", "cpu-kernels"]),
    default="auto",
    show_default=True,
    help="Where to run; auto takes the GPU if there is one. cpu-kernels runs the CUDA kernels on "
    "the CPU (needs g++): very slow, an aid for debugging them.",
)
engine_choice = click.Choice(ENGINES)


class DtypeType(click.ParamType):
    """A dtype by its full or its short name."""

    name = "dtype"
    _NAMES: ClassVar = {
        "bfloat16": device.bfloat16,
        "float16": np.dtype(np.float16),
        "float32": np.dtype(np.float32),
    }
    _SHORT: ClassVar = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

    def convert(
        self,
        value: Any,
        param: click.Parameter | None = None,
        ctx: click.Context | None = None,
    ) -> np.dtype:
        """Return the NumPy dtype."""
        name = self._SHORT.get(value, value)
        if name not in self._NAMES:
            self.fail(f"dtype is {value!r}, wanted one of {', '.join(self._NAMES)}.", param, ctx)
        return self._NAMES[name]

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Show the names in the help."""
        return f"[{'|'.join(self._NAMES)}]"


dtype_type = DtypeType()


def format_option() -> Callable[[Any], Any]:
    """Make the option that chooses how a table is written."""
    return click.option(
        "-o",
        "--output",
        "output",
        type=click.Choice(FORMATS),
        default="md",
        show_default=True,
        help="Format of the table on stdout.",
    )


def words(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> tuple[str, ...]:
    """Split comma lists of a repeatable option."""
    return tuple(word for text in value for word in text.split(",") if word)


_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?")


def numbers(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Read "1,8", "512-2048+512" or "1-16*2"."""
    if value is None:
        return None
    found: list[int] = []
    for part in value.split(","):
        match = _RANGE.fullmatch(part.strip())
        if not match:
            raise click.BadParameter(
                f"{part!r} is not a number or a range such as 512-2048+512 or 1-16*2.", ctx, param
            )
        first, last = int(match[1]), int(match[2] or match[1])
        sign, step = match[3] or "+", int(match[4] or 1)
        if last < first or step < (2 if sign == "*" else 1) or (sign == "*" and first == 0):
            raise click.BadParameter(
                f"{part!r} does not get from its start to its end.", ctx, param
            )
        while first <= last:
            found.append(first)
            first = first * step if sign == "*" else first + step
    return tuple(found)


def resolve_device(name: str) -> str:
    """Return "cuda", "cpu" or "cpu-kernels", and say on stderr what the last one is.

    A GPU or a compiler that is asked for and not there exits with 4.
    """
    if name == "auto":
        return "cuda" if device.gpu_available() else "cpu"
    if name == "cuda" and not device.gpu_available():
        raise Failure(f"--device cuda: {device.gpu_problem()}", NOT_AVAILABLE)
    if name == "cpu-kernels":
        jit.host_compiler()
        click.echo(
            "cpu-kernels: the CUDA kernels run on the CPU, thread by thread; this is very slow, an "
            "aid for debugging them.",
            err=True,
        )
    return name
