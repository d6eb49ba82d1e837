"""The next token, drawn from logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width
from cufuse.ops.argmax import argmax, best_of_rows, split_rows
from cufuse.reference import sampling

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6


@on_stream
def sample(
    logits: Array,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    step: int | Array = 0,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Draw one id per row: temperature, then top-k, top-p and min-p, then the draw, in one launch.

    logits: [rows, vocab]
    temperature: 0 takes the likeliest id, as `argmax`
    top_k: keep the k largest logits, of equal ones the lower ids; 0 keeps all
    top_p: keep the fewest ids, likeliest first, whose share of what top_k left reaches top_p
    min_p: keep ids with at least min_p times the largest probability
    seed, step: the draw depends on (seed, step, row, id) alone. `step` is an int or an int32
        [rows] array on the logits' device, so that a captured CUDA graph draws anew
    out: [rows] int32

    Returns [rows] int32; -1 for a row that holds a NaN or, at a temperature above 0, nothing above
    -inf. The noise is added to logit / temperature in float32, and all libraries draw the same
    ids. top_p is of Holtzman et al. 2019, min_p of Nguyen et al. 2024; the draw is the largest of
    the logits with Gumbel noise on them (Maddison et al. 2014). Raises ValueError for sizes and
    options, TypeError for dtypes or mixed libraries.
    """
    steps = None if isinstance(step, int | np.integer) else step
    bound = checks.bind(
        "sample", optional=("step",), logits=(logits, "rows vocab"), step=(steps, "rows", np.int32)
    )
    check_options(temperature, top_k, top_p, min_p, seed, 0 if steps is not None else step)
    rows, n = bound.sizes["rows"], bound.sizes["vocab"]
    ids = bound.output("out", out, (rows,), np.int32)
    if ids.size == 0:
        return ids
    if n == 0:
        raise ValueError("sample: logits has vocab = 0; there is nothing to draw from")
    if temperature == 0:
        return argmax(bound["logits"], out=ids, stream=stream)
    if bound.kind == "numpy":
        ids[...] = reference.sample(
            bound["logits"],
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            step=step if steps is None else bound["step"],
        )
        return ids
    per_access = width(n, bound["logits"])
    args = {
        "logits": bound["logits"],
        "steps": bound["step"],
        "ids": ids,
        "seed": seed,
        "step": step if steps is None else 0,
        "n": n,
        "inverse_temperature": sampling.inverse(temperature),
    }
    filters = filters_of(n, top_k=top_k, top_p=top_p, min_p=min_p)
    if filters:
        grid, block = rows, 1024
        args.update(filters)
    else:
        splits, per_cta = split_rows(rows, n, per_access)
        grid, block = rows * splits, 256
        args["scratch"] = best_of_rows(rows, ids, stream)
        args["splits"], args["per_cta"] = splits, per_cta
    name = "sample_filtered" if filters else "sample"
    kernel = jit.kernel("fused/sample.cu", name, bound.dtype, per_access)
    size_bytes = bound["logits"].nbytes + ids.nbytes
    kernel.launch(grid, block, args, like=ids, stream=stream, size_bytes=size_bytes)
    return ids


def filters_of(n: int, *, top_k: int, top_p: float, min_p: float) -> dict[str, Any]:
    """Return Filters of device/filters.cuh for n logits, without the temperature; {} for none."""
    if not (0 < top_k < n or top_p < 1 or min_p > 0):
        return {}
    return {
        "top_k": min(top_k, n) if top_k else n,
        "share": sampling.share(top_p) if top_p < 1 else 2**32,
        "min_p": min_p,
        "mass_scale": sampling.mass_scale(n),
    }


def check_options(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int, step: int = 0
) -> None:
    """Raise ValueError for an option out of range, TypeError for one that is no number."""
    for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        if not isinstance(value, int | float | np.number):
            raise TypeError(f"sample: {name} is {value!r}, wanted a number")
    for name, value in (("top_k", top_k), ("seed", seed), ("step", step)):
        if not isinstance(value, int | np.integer):
            raise TypeError(f"sample: {name} is {value!r}, wanted an integer")
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise ValueError(
            f"sample: temperature is {temperature}, wanted 0 or {MIN_TEMPERATURE} to "
            f"{MAX_TEMPERATURE:g}"
        )
    if top_k < 0:
        raise ValueError(f"sample: top_k is {top_k}, wanted 0 (all) or a count")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if not 0 <= value <= 1:
            raise ValueError(f"sample: {name} is {value}, wanted 0 to 1")
    for name, value, bits in (("seed", seed, 64), ("step", step, 31)):
        if not 0 <= value < 2**bits:
            raise ValueError(f"sample: {name} is {value}, wanted 0 <= {name} < 2^{bits}")
