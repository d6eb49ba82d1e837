"""How far a result is from float64, and how far it may be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cufuse.device import Array

# Largest relative L2 error of a row, by dtype: of one op, and of the logits behind two layers.
OP_LIMIT = {"float32": 1e-5, "float16": 6e-4, "bfloat16": 4e-3}
MODEL_LIMIT = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}


class VerificationError(Exception):
    """A result that was about to be timed is wrong; says which and by how much."""


def to_numpy(x: Array) -> np.ndarray:
    """Bring an array to the host as a plain NumPy array."""
    return np.asarray(x).view(np.ndarray) if isinstance(x, np.ndarray) else x.get()


def poison(x: Array) -> None:
    """Fill an output with NaN (or -1), so that an element nobody writes is seen."""
    if isinstance(x, np.ndarray):
        x.view(np.uint8)[...] = 0xFF
    else:
        x.data.memset(0xFF, x.nbytes)


def row_errors(got: Any, wanted: Any) -> np.ndarray:
    """Return the relative L2 error of each row; infinite when anything is not finite."""
    got = np.asarray(got, np.float64).reshape(-1, np.shape(got)[-1])
    wanted = np.asarray(wanted, np.float64).reshape(got.shape)
    if not np.isfinite(got).all():
        return np.full(len(got), math.inf)
    distance = np.linalg.norm(got - wanted, axis=-1)
    return distance / np.maximum(np.linalg.norm(wanted, axis=-1), 1e-30)


def row_error(got: Any, wanted: Any) -> float:
    """Return the largest relative L2 error of a row; infinite when anything is not finite."""
    return float(row_errors(got, wanted).max(initial=0.0))


def model_error(errors: np.ndarray, *, mixture: bool) -> float:
    """Judge a model by the errors of its rows: by the largest one, unless it is a mixture.

    Where two experts are nearly as likely, rounding chooses between them and the row differs by
    what an expert adds (a third of Mixtral's). So three rows of four count, and the others may be
    20 times as far off: within the limits of 16-bit dtypes a row of zeros or noise still is not.
    """
    largest = float(errors.max())
    if not mixture or not math.isfinite(largest):
        return largest
    return max(float(np.quantile(errors, 0.75, method="lower")), largest / 20)


def require(what: str, error: float, limit: float) -> float:
    """Return the error if it is within the limit, else raise VerificationError."""
    if not error <= limit:
        raise VerificationError(
            f"{what}: relative error {error:.3g} against float64, at most {limit:.3g} is right; "
            "it was not timed"
        )
    return error


def sample(size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Choose up to count indices below size: the first, the last, and random ones between."""
    if size <= count:
        return np.arange(size)
    inner = rng.choice(size - 2, count - 2, replace=False) + 1
    return np.concatenate(([0], np.sort(inner), [size - 1]))
