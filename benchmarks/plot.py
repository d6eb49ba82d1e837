"""Draw rows: tokens a second of every engine, or microseconds of every op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cufuse.benchmarks.rows import Row
from cufuse.device import Unsupported


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a bar chart of the rows; the format follows from the file's name.

    Raises Unsupported without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported('--plot needs matplotlib: pip install "cufuse[plot]"') from error
    panels: list[tuple[str, list[Row], Callable[[Row], float | None]]] = [
        ("us in a CUDA graph", [r for r in rows if r.op and r.ms_per_step_graph], _us),
        ("us", [r for r in rows if r.op and not r.ms_per_step_graph and r.ms_per_step], _us),
        ("tokens/s", [r for r in rows if r.model and r.tok_s], lambda r: r.tok_s),
    ]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        raise ValueError("bench: no row has a time to draw")
    bars = sum(len(chosen) for _, chosen, _ in panels)
    figure = Figure(figsize=(9, 0.35 * bars + 1.2 * len(panels)), layout="constrained")
    ratios = [len(chosen) + 1 for _, chosen, _ in panels]
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=ratios)
    engines = list(dict.fromkeys(row.engine for row in rows))
    for axis, (title, chosen, value) in zip(axes[:, 0], panels, strict=True):
        labels = [f"{_label(row)}, {row.engine}" for row in chosen]
        colors = [f"C{engines.index(row.engine)}" for row in chosen]
        drawn = axis.barh(range(len(chosen)), [value(row) or 0.0 for row in chosen], color=colors)
        axis.bar_label(drawn, fmt="%.4g", padding=3)
        axis.set_yticks(range(len(chosen)), labels)
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.set_xlabel(title)
    if rows[0].gpu:
        figure.suptitle(rows[0].gpu)
    figure.savefig(path)


def _us(row: Row) -> float | None:
    ms = row.ms_per_step_graph or row.ms_per_step
    return None if ms is None else ms * 1e3


def _label(row: Row) -> str:
    if row.op:
        return f"{row.op} {row.sizes} {row.dtype}"
    return f"{row.model} {row.dtype} b{row.batch} {row.test}"
