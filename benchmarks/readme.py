"""Write the README's tables from `results/*.jsonl`: `python -m cufuse.benchmarks.readme`.

Of each case the newest row counts, and only rows measured on a GPU, those of sweeps left out.
`--check` writes nothing and exits with 1 when the README is not what the results make it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cufuse.benchmarks import rows
from cufuse.benchmarks.catalogue import cases
from cufuse.benchmarks.rows import Row
from cufuse.engines import ENGINES

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def newest(found: Sequence[Row]) -> list[Row]:
    """Keep the last row of each case and put it where its table is, engines in their order."""
    latest = {
        (r.gpu, r.op, r.sizes, r.model, r.note, r.dtype, r.batch, r.test, r.engine): r
        for r in found
        if r.gpu and r.test != rows.SWEEP
    }
    ops, engines = list(cases()), list(ENGINES)

    def place(row: Row) -> tuple[object, ...]:
        sizes = tuple(int(part) for part in (row.sizes or "0").split("x"))
        op = ops.index(row.op) if row.op in ops else len(ops)
        parameters = row.n_parameters or 0
        case = (op, sizes, parameters, row.model or "", row.dtype, row.batch or 0)
        table = rows.TABLES.index(rows.columns(row))
        tokens = [int(n) for n in re.findall(r"\d+", row.test)]
        return (row.gpu, table, *case, row.context or 0, tokens, engines.index(row.engine))

    return sorted(latest.values(), key=place)


def block(found: Sequence[Row]) -> str:
    """Return what stands between the two markers."""
    parts = []
    chosen = newest(found)
    for gpu in dict.fromkeys(row.gpu for row in chosen):
        here = [row for row in chosen if row.gpu == gpu]
        dates = sorted({row.date for row in here if row.date})
        parts.append(
            f"{gpu}, {dates[0] if len(set(dates)) == 1 else f'{dates[0]} to {dates[-1]}'}:"
        )
        parts.append(rows.markdown(here))
    return "\n\n".join(parts)


def rewrite(text: str, found: Sequence[Row]) -> str:
    """Return the README with its block replaced; raises ValueError without the markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks {BEGIN} and {END}")
    made = block(found)
    return f"{before}{begin}\n{made}{chr(10) if made else ''}{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite README.md, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when out of date")
    check = parser.parse_args(arguments).check
    path = Path(__file__).resolve().parent.parent / "README.md"
    text = path.read_text()
    made = rewrite(text, rows.load())
    if made == text:
        return 0
    if check:
        print("README.md is not up to date: python -m cufuse.benchmarks.readme", file=sys.stderr)
        return 1
    path.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
