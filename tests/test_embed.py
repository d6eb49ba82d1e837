"""Embedding: rows, scale, positions, token type, and ids that are no row."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import jit, ops, reference


def naive(ids, table, scale, start, position_table, token_type):
    y = np.empty((*ids.shape, table.shape[1]))
    for b in range(ids.shape[0]):
        for i in range(ids.shape[1]):
            y[b, i] = table[ids[b, i]] * scale + position_table[start[b] + i] + token_type
    return y


def case(rng, dim, dtype=np.float64):
    ids = rng.integers(0, 11, (2, 3)).astype(np.int32)
    table = rng.standard_normal((11, dim)).astype(dtype)
    positions = rng.standard_normal((9, dim)).astype(dtype)
    token_type = rng.standard_normal(dim).astype(dtype)
    return ids, table, np.array([6, 0], np.int32), positions, token_type


def test_reference_embed_is_the_plain_formula(rng):
    ids, table, start, positions, token_type = case(rng, 5)
    got = reference.embed(
        ids, table, scale=1.5, start=start, position_table=positions, token_type=token_type
    )
    np.testing.assert_array_equal(got, naive(ids, table, 1.5, start, positions, token_type))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("dim", [1, 7, 384, 2100])
def test_embed_matches_float64(to, rng, dtype, dim):
    ids, table, start, positions, token_type = case(rng, dim, dtype)
    wide = [a.astype(np.float64) for a in (table, positions, token_type)]
    wanted = naive(ids, wide[0], 2.5, start, wide[1], wide[2])
    out = poisoned((2, 3, dim), dtype, to)
    got = ops.embed(
        to(ids),
        to(table),
        scale=2.5,
        start=to(start),
        position_table=to(positions),
        token_type=to(token_type),
        out=out,
    )
    assert got is out
    assert_close(got, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 1, 3)])
def test_embed_copies_rows(to, rng, dtype, shape):
    table = rng.standard_normal((11, 64)).astype(dtype)
    ids = rng.integers(0, 11, shape).astype(np.int32)
    got = ops.embed(to(ids), to(table))
    assert got.dtype == dtype and got.shape == (*shape, 64)
    assert to_numpy(got).tobytes() == table[ids].tobytes()


def test_embed_positions_start_at_zero(to, rng):
    ids, table, _, positions, _ = case(rng, 8, np.float32)
    got = ops.embed(to(ids), to(table), position_table=to(positions))
    np.testing.assert_array_equal(to_numpy(got), table[ids] + positions[:3])


def test_embed_kernels_give_the_bits_of_numpy(to_kernels, rng):
    ids, table, start, positions, token_type = case(rng, 40, np.float16)
    options = {"start": start, "position_table": positions, "token_type": token_type}
    wanted = ops.embed(ids, table, scale=0.3, **options)
    moved = {name: to_kernels(array) for name, array in options.items()}
    got = ops.embed(to_kernels(ids), to_kernels(table), scale=0.3, **moved)
    assert to_numpy(got).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("wrong", [-1, 11, 2**31 - 1, -(2**31)])
def test_embed_makes_nan_of_ids_out_of_range(to_kernels, rng, wrong):
    table = rng.standard_normal((11, 40)).astype(np.float32)
    ids = np.array([3, wrong, 10], np.int32)
    got = to_numpy(ops.embed(to_kernels(ids), to_kernels(table)))
    np.testing.assert_array_equal(got[[0, 2]], table[[3, 10]])
    assert np.isnan(got[1]).all()
    with pytest.raises(ValueError, match=f"embed: ids holds {wrong} but table has vocab = 11"):
        ops.embed(ids, table)


@pytest.mark.parametrize("start", [-1, 7, 2**31 - 1])
def test_embed_makes_nan_of_positions_out_of_range(to_kernels, rng, start):
    ids, table, _, positions, _ = case(rng, 8, np.float32)
    starts = np.array([start, 4], np.int32)
    got = to_numpy(
        ops.embed(
            to_kernels(ids),
            to_kernels(table),
            start=to_kernels(starts),
            position_table=to_kernels(positions),
        )
    )
    known = [0 <= start + i < 9 for i in range(3)]
    np.testing.assert_array_equal(np.isnan(got[0]).all(-1), ~np.array(known))
    assert np.isfinite(got[1]).all()
    with pytest.raises(ValueError, match=r"embed: positions go from .* max_pos = 9"):
        ops.embed(ids, table, start=starts, position_table=positions)


def test_embed_of_strided_arrays(to, rng):
    table = rng.standard_normal((16, 22)).astype(np.float32)
    ids = rng.integers(0, 11, (3, 4)).astype(np.int32)
    got = ops.embed(to(ids).T, to(table)[:, ::2])
    np.testing.assert_array_equal(to_numpy(got), table[:, ::2][ids.T])
    got = ops.embed(to(ids)[:, 1], to(table)[::-1])
    np.testing.assert_array_equal(to_numpy(got), table[::-1][ids[:, 1]])


def test_embed_counts_the_rows_it_reads(to_kernels):
    table = to_kernels(np.ones((1000, 64), np.float16))
    with jit.record(dry=True) as record:
        ops.embed(to_kernels(np.zeros((2, 3), np.int32)), table)
    assert len(record.launches) == 1 and record.size_bytes == 6 * (4 + 2 * 128)
    with jit.record() as record:
        got = ops.embed(to_kernels(np.zeros((0, 3), np.int32)), table)
    assert got.shape == (0, 3, 64) and not record.launches


def test_embed_rejects_bad_arguments():
    ids, table = np.zeros((2, 3), np.int32), np.ones((5, 4), np.float32)
    with pytest.raises(TypeError, match="embed: ids has dtype int64, wanted int32"):
        ops.embed(ids.astype(np.int64), table)
    with pytest.raises(ValueError, match=r"embed: token_type is .* but table has dim = 4"):
        ops.embed(ids, table, token_type=np.ones(5, np.float32))
    with pytest.raises(TypeError, match="embed: position_table has dtype float16"):
        ops.embed(ids, table, position_table=np.ones((9, 4), np.float16))
    with pytest.raises(ValueError, match="embed: start is given without a position_table"):
        ops.embed(ids, table, start=np.zeros(2, np.int32))
    with pytest.raises(ValueError, match=r"embed: start is .* but ids has batch = 2"):
        ops.embed(ids, table, start=np.zeros(3, np.int32), position_table=np.ones((9, 4), "f4"))


@pytest.mark.gpu
def test_embed_of_a_table_beyond_2_31_elements():
    import cupy

    table = cupy.zeros((151936, 16384), np.float16)
    table[-1] = 7
    got = ops.embed(cupy.array([0, 151935], np.int32), table)
    assert float(got[0].max()) == 0 and float(got[1].min()) == 7
