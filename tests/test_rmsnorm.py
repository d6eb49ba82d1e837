"""RMSNorm against float64, in every dtype, rounding and odd size."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned

from cufuse import ops, reference


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("rounding", ["cast_first", "scale_first", "one_plus"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 576), (2, 3, 769)])
def test_rmsnorm_matches_float64(to, rng, dtype, rounding, shape):
    x = rng.standard_normal(shape).astype(dtype)
    weight = rng.uniform(0.5, 1.5, shape[-1]).astype(dtype)
    wanted, _ = reference.rmsnorm(
        x.astype(np.float64), weight.astype(np.float64), eps=1e-5, rounding=rounding
    )
    out = poisoned(shape, dtype, to)
    got = ops.rmsnorm(to(x), to(weight), rounding=rounding, out=out)
    assert got is out
    assert_close(got, wanted, dtype)


def test_rmsnorm_rejects_mismatched_weight():
    with pytest.raises(ValueError, match=r"rmsnorm: weight is \[n\] = \[5\] but x has n = 4"):
        ops.rmsnorm(np.ones((2, 4), np.float32), np.ones(5, np.float32))
