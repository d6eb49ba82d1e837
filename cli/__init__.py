"""The command line: `cufuse bench`, `generate`, `info`, `kernels`, `pull`, `trace`.

Results go to stdout, progress and notes to stderr. Exit codes: 0 done, 1 failed while running,
2 wrong usage, 3 a benchmarked result was wrong, 4 the device or the model is not available.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

from cufuse.cli._errors import translated

COMMANDS = ("bench", "generate", "info", "kernels", "pull", "trace")


class Commands(click.Group):
    """The commands, each imported when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import `cli/<name>.py`, whose command has the same name."""
        if name not in COMMANDS:
            return None
        return getattr(importlib.import_module(f"cufuse.cli.{name}"), name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; a name that does not exist is answered with the nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(error.message + hint, ctx) from error

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Keep the command line as it was given; benchmark rows say how they were made."""
        given = list(args)
        ctx = super().make_context(info_name, args, parent, **extra)
        ctx.meta["cufuse.arguments"] = given
        return ctx

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error meant for the user becomes a sentence and an exit code."""
        with translated():
            return super().invoke(ctx)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with `cufuse info`, then `cufuse bench`.",
)
@click.version_option(package_name="cufuse", message="cufuse %(version)s")
def main() -> None:
    """Transformer and Mixture-of-Experts inference as fused CUDA kernels, without PyTorch."""
