"""The k largest values of a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops._stream import on_stream

NORMALIZE = ("none", "sum", "softmax")


@on_stream
def topk(
    x: Array,
    k: int,
    *,
    source: Array | None = None,
    normalize: str = "none",
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
    scale: float = 1.0,
    out: tuple[Array | None, Array | None] | None = None,
    stream: Any = None,
) -> tuple[Array, Array]:
    """Return the k largest values of each row and their ids, in descending order, in one launch.

    x: [rows, n]
    k: 1 to n
    source: [rows, n], of which the values are returned that stand where x is largest; without it x
    normalize: "sum" divides the values by their sum plus 1e-20, "softmax" takes the softmax over
        the k, of x alone
    groups, top_groups: choose from those top_groups of so many equal groups that have the best
        score (DeepSeek-V2, 2024)
    group_best: 1: a group's score is its largest value, 2: the sum of its two largest
    scale: multiplies the values
    out: (values, ids)

    Returns values [rows, k] in x's dtype and ids, int32 [rows, k]. Ties go to the lower id, or
    group; a NaN counts as smaller than everything. Made for short rows (experts): a row is read k
    times. Raises ValueError for sizes and options and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind("topk", optional=("source",), x=(x, "rows n"), source=(source, "rows n"))
    checks.option("topk", "normalize", normalize, NORMALIZE)
    rows, n = bound.sizes["rows"], bound.sizes["n"]
    check_choice("topk", "n", n, k, groups, top_groups)
    if group_best not in (1, 2):
        raise ValueError(f"topk: group_best is {group_best}, wanted 1 or 2")
    if source is not None and normalize == "softmax":
        raise ValueError('topk: source has no say in normalize = "softmax"; leave one out')
    values_out, ids_out = checks.pair("topk", out)
    values = bound.output("out[0]", values_out, (rows, k))
    ids = bound.output("out[1]", ids_out, (rows, k), np.int32)
    if rows == 0:
        return values, ids
    options = {"groups": groups, "top_groups": top_groups}
    if bound.kind == "numpy":
        values[...], ids[...] = reference.topk(
            bound["x"],
            k,
            source=bound["source"],
            normalize=normalize,
            group_best=group_best,
            scale=scale,
            **options,
        )
        return values, ids
    kernel = jit.kernel("unfused/topk.cu", "topk", bound.dtype, f"Normalize::{normalize}")
    kernel.launch(
        -(-rows // 4),
        128,
        {
            "x": bound["x"],
            "source": bound["x"] if source is None else bound["source"],
            "values": values,
            "ids": ids,
            "rows": rows,
            "n": n,
            "k": k,
            **options,
            "scale": scale,
            "best_two": group_best == 2,
        },
        like=values,
        shared_bytes=4 * 4 * groups if groups > 1 else 0,
        stream=stream,
    )
    return values, ids


def check_choice(op: str, name: str, n: int, k: int, groups: int, top_groups: int) -> None:
    """Raise unless k of n, called `name`, can be chosen from the best groups."""
    checks.number(op, "k", k, 1, whole=True)
    if k > n:
        raise ValueError(f"{op}: k = {k} and there are {name} = {n} to choose from")
    checks.number(op, "groups", groups, 1, whole=True)
    checks.number(op, "top_groups", top_groups, 1, whole=True)
    if n % groups:
        raise ValueError(f"{op}: {name} = {n} is not a multiple of groups = {groups}")
    if top_groups > groups:
        raise ValueError(f"{op}: top_groups = {top_groups} and there are groups = {groups}")
    if k > top_groups * (n // groups):
        raise ValueError(
            f"{op}: k = {k} and {top_groups} groups of {n // groups} have too few to choose from"
        )
