"""Softmax against float64: row lengths, sinks, live entries."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import ops, reference

FP32, FP16, BF16 = DTYPES.values()


def test_float64_reference_matches_loops(rng):
    x = rng.standard_normal((2, 3, 2, 5))
    sinks = rng.standard_normal(3)
    start = np.array([1, 9])
    got = reference.softmax(x, sinks=sinks, start=start)
    for b, h, i in np.ndindex(2, 3, 2):
        live = min(int(start[b]) + 2, 5)
        e = np.exp(x[b, h, i, :live])
        np.testing.assert_allclose(got[b, h, i, :live], e / (e.sum() + np.exp(sinks[h])))
        assert (got[b, h, i, live:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 64), (2, 2, 1234), (2, 2400)])
def test_softmax_matches_float64(to, rng, dtype, shape):
    x = (3 * rng.standard_normal(shape)).astype(dtype)
    out = poisoned(shape, dtype, to)
    got = ops.softmax(to(x), out=out)
    assert got is out
    assert_close(got, reference.softmax(x.astype(np.float64)), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8192, 50257, 131072])
def test_softmax_of_long_rows(rng, n):
    import cupy

    x = rng.standard_normal((33, n)).astype(BF16)
    assert_close(ops.softmax(cupy.asarray(x)), reference.softmax(x.astype(np.float64)), BF16)


@pytest.mark.parametrize("n", [7, 64])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_sinks_and_live_entries(to, rng, dtype, n):
    x = rng.standard_normal((2, 3, 2, n)).astype(dtype)
    sinks = rng.standard_normal(3).astype(dtype)
    start, lengths = np.array([1, n - 2], np.int32), np.array([n + 5, 0], np.int32)
    for options in (
        {"sinks": sinks},
        {"start": start},
        {"lengths": lengths},
        {"sinks": sinks, "start": start},
    ):
        wide = {name: o.astype(np.float64) if name == "sinks" else o for name, o in options.items()}
        wanted = reference.softmax(x.astype(np.float64), **wide)
        poison = x.copy()
        live = n if "start" not in options else int(start[0]) + 2
        poison[0, :, :, live:] = np.nan
        if "lengths" in options:
            poison[1] = np.nan
        moved = {name: to(o) for name, o in options.items()}
        assert_close(ops.softmax(to(poison), **moved), wanted, dtype)


def test_softmax_in_place_and_of_views(to, rng):
    x = rng.standard_normal((6, 40)).astype(np.float32)
    wanted = reference.softmax(x.astype(np.float64))
    for view in (to(x.T.copy()).T, np.flip(to(x[:, ::-1].copy()), 1)):
        assert_close(ops.softmax(view), wanted, FP32)
    assert_close(ops.softmax(to(x)[:, 3:10]), reference.softmax(x[:, 3:10]), FP32)
    given = to(x)
    assert ops.softmax(given, out=given) is given
    assert_close(given, wanted, FP32)


def test_extreme_rows(to):
    infinity = np.inf
    x = np.array(
        [[-infinity] * 4, [1e30, 1e30, -infinity, -1e30], [-3e38, -infinity, -3e38, -3e38]],
        np.float32,
    )
    got = to_numpy(ops.softmax(to(x)))
    np.testing.assert_allclose(
        got, [[0, 0, 0, 0], [0.5, 0.5, 0, 0], [1 / 3, 0, 1 / 3, 1 / 3]], rtol=1e-6
    )
    x[0, 2] = np.nan
    assert np.isnan(to_numpy(ops.softmax(to(x)))[0, 2])


def test_softmax_of_nothing(to):
    assert ops.softmax(to(np.zeros((0, 5), np.float32))).shape == (0, 5)
    assert ops.softmax(to(np.zeros((5, 0), np.float32))).shape == (5, 0)


def test_softmax_rejects_wrong_arrays():
    x = np.zeros((2, 3, 4, 5), np.float32)
    with pytest.raises(TypeError, match="softmax: x has dtype float64"):
        ops.softmax(x.astype(np.float64))
    with pytest.raises(ValueError, match=r"sinks is \[heads\] = \[4\] but x has heads = 3"):
        ops.softmax(x, sinks=np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="softmax: x is "):
        ops.softmax(x[0], start=np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="out shares memory with x"):
        ops.softmax(x[0], out=x.reshape(-1)[5 : 5 + 60].reshape(3, 4, 5))
