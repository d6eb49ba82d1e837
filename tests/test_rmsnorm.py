"""RMSNorm against float64, in every dtype, rounding and odd size; and what holds for every op."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DTYPES, assert_close, poisoned, to_numpy

from cufuse import device, jit, ops, reference


def naive(x, weight, eps, offset):
    y = np.empty_like(x)
    for i, row in enumerate(x):
        mean_square = sum(v * v for v in row) / len(row)
        for j, v in enumerate(row):
            y[i, j] = v / (mean_square + eps) ** 0.5 * (offset + weight[j])
    return y


@pytest.mark.parametrize("rounding", ["cast_first", "scale_first", "one_plus"])
def test_reference_rmsnorm_is_the_plain_formula(rng, rounding):
    x, residual, weight = (rng.standard_normal(s) for s in ((3, 7), (3, 7), 7))
    got, total = reference.rmsnorm(x, weight, residual=residual, eps=1e-3, rounding=rounding)
    np.testing.assert_array_equal(total, x + residual)
    wanted = naive(total, weight, 1e-3, 1 if rounding == "one_plus" else 0)
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("rounding", ["cast_first", "scale_first", "one_plus"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 576), (2, 3, 769), (1, 3584)])
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


@pytest.mark.parametrize("rounding", ["cast_first", "one_plus"])
def test_rmsnorm_without_a_weight_multiplies_by_one(to, rng, rounding):
    x = rng.standard_normal((2, 40)).astype(np.float32)
    wanted, _ = reference.rmsnorm(x.astype(np.float64))
    assert_close(ops.rmsnorm(to(x), rounding=rounding), wanted, np.float32)


def test_rmsnorm_rejects_mismatched_weight():
    with pytest.raises(ValueError, match=r"rmsnorm: weight is \[n\] = \[5\] but x has n = 4"):
        ops.rmsnorm(np.ones((2, 4), np.float32), np.ones(5, np.float32))


# ---- how arrays lie -----------------------------------------------------------------------------

VIEWS = {
    "transposed": lambda a: a.T,
    "columns": lambda a: a[:, 2:9],
    "every second": lambda a: a[:, ::2],
    "flipped": lambda a: a[::-1, ::-1],
    "unaligned": lambda a: a.reshape(-1)[1:81].reshape(5, 16),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_rmsnorm_of_a_view_is_that_of_its_copy(to, rng, view):
    x = rng.standard_normal((8, 16)).astype(np.float32)
    wanted, _ = reference.rmsnorm(np.ascontiguousarray(view(x)).astype(np.float64))
    assert_close(ops.rmsnorm(view(to(x))), wanted, np.float32)


def test_rmsnorm_of_a_broadcast_array(to, rng):
    x = rng.standard_normal(16).astype(np.float32)
    moved = to(x)
    library = device.namespace(device.kind(moved))
    options = {"subok": True} if library is np else {}
    repeated = library.broadcast_to(moved, (4, 16), **options)
    constant = library.broadcast_to(moved[3:4], (16,), **options)
    wanted, _ = reference.rmsnorm(x[None].astype(np.float64))
    assert_close(ops.rmsnorm(repeated, constant), np.repeat(wanted * x[3], 4, 0), np.float32)


def test_rmsnorm_with_a_strided_weight(to, rng):
    x, weight = rng.standard_normal((2, 8)).astype(np.float32), np.arange(16, dtype=np.float32)
    wanted, _ = reference.rmsnorm(x.astype(np.float64), weight[::-2].astype(np.float64))
    assert_close(ops.rmsnorm(to(x), to(weight)[::-2]), wanted, np.float32)


# ---- out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [40, 3000])
def test_rmsnorm_in_place(to, rng, n):
    x = rng.standard_normal((3, n)).astype(np.float32)
    wanted, _ = reference.rmsnorm(x.astype(np.float64))
    moved = to(x.copy())
    assert ops.rmsnorm(moved, out=moved) is moved
    assert_close(moved, wanted, np.float32)


def test_rmsnorm_rejects_an_out_that_overlaps_its_inputs(to):
    memory, weight = to(np.ones((4, 8), np.float32)), to(np.ones(8, np.float32))
    with pytest.raises(ValueError, match="rmsnorm: out shares memory with x"):
        ops.rmsnorm(memory[:3], weight, out=memory[1:])
    with pytest.raises(ValueError, match="rmsnorm: out shares memory with weight"):
        ops.rmsnorm(memory[:1], memory[2], out=memory[2:3])


def test_rmsnorm_rejects_a_bad_out(to):
    x = to(np.ones((2, 4), np.float32))
    with pytest.raises(TypeError, match="rmsnorm: out has dtype float16, wanted float32"):
        ops.rmsnorm(x, out=to(np.ones((2, 4), np.float16)))
    with pytest.raises(ValueError, match=r"rmsnorm: out is \[2, 5\], wanted \[2, 4\]"):
        ops.rmsnorm(x, out=to(np.ones((2, 5), np.float32)))
    with pytest.raises(ValueError, match="rmsnorm: out has to be C-contiguous"):
        ops.rmsnorm(x, out=to(np.ones((4, 2), np.float32)).T)
    fixed = np.ones((2, 4), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="rmsnorm: out has to be C-contiguous and writable"):
        ops.rmsnorm(np.ones((2, 4), np.float32), out=fixed)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8)])
def test_rmsnorm_of_nothing_launches_nothing(to, shape):
    with jit.record() as record:
        got = ops.rmsnorm(to(np.empty(shape, np.float32)))
    assert got.shape == shape and not record.launches


# ---- dtypes and libraries -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.complex64, bool])
def test_rmsnorm_rejects_other_dtypes(to, dtype):
    with pytest.raises(TypeError, match=r"rmsnorm: x has dtype .*, wanted float16, bfloat16 or"):
        ops.rmsnorm(to(np.ones((2, 4), dtype)))


def test_rmsnorm_rejects_mixed_dtypes(to):
    with pytest.raises(TypeError, match="rmsnorm: weight has dtype float16 and x has float32"):
        ops.rmsnorm(to(np.ones((2, 4), np.float32)), to(np.ones(4, np.float16)))


def test_rmsnorm_rejects_mixed_libraries(to_kernels):
    x, weight = np.ones((2, 4), np.float32), np.ones(4, np.float32)
    with pytest.raises(TypeError, match="rmsnorm: weight is a numpy array and the others are"):
        ops.rmsnorm(to_kernels(x), weight)
    with pytest.raises(TypeError, match="rmsnorm: out is a numpy array and the inputs are"):
        ops.rmsnorm(to_kernels(x), out=x)


@pytest.mark.parametrize("x", [[[1.0, 2.0]], 3.0, "text"], ids=repr)
def test_rmsnorm_rejects_what_is_no_array(x):
    with pytest.raises(TypeError, match="rmsnorm: x: expected a NumPy or CuPy array, got"):
        ops.rmsnorm(x)


class Exchanged:
    """An array of some other library, known by one protocol only."""

    def __init__(self, array, *names):
        for name in names:
            setattr(self, name, getattr(array, name))


class Dlpack:
    """An array of some other library that speaks DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_rmsnorm_takes_dlpack_from_the_host(rng):
    x = rng.standard_normal((2, 8)).astype(np.float32)
    got = ops.rmsnorm(Dlpack(x))
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, ops.rmsnorm(x))


@pytest.mark.gpu
def test_rmsnorm_takes_the_arrays_of_other_gpu_libraries(rng):
    import cupy

    x = cupy.asarray(rng.standard_normal((2, 8)), np.float32)
    wanted = ops.rmsnorm(x).get()
    for other in (Dlpack(x), Exchanged(x, "__cuda_array_interface__")):
        got = ops.rmsnorm(other)
        assert isinstance(got, cupy.ndarray)
        np.testing.assert_array_equal(got.get(), wanted)


# ---- devices and streams ------------------------------------------------------------------------


@pytest.mark.gpu
def test_rmsnorm_runs_on_the_stream_it_is_given(rng):
    import cupy

    host = rng.standard_normal((4000, 4096)).astype(np.float32)
    x, out = cupy.asarray(host), cupy.zeros((4000, 4096), np.float32)
    wanted, _ = reference.rmsnorm(host[::500].astype(np.float64))
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)

    class Foreign:
        def __cuda_stream__(self):
            return 0, stream.ptr

    for given in (stream, stream.ptr, Foreign()):
        out.fill(0)
        cupy.cuda.Device().synchronize()
        stream.begin_capture()
        ops.rmsnorm(x, out=out, stream=given)
        graph = stream.end_capture()
        assert not out.any()  # captured, so it went nowhere else
        graph.launch(stream)
        stream.synchronize()
        assert_close(out[::500], wanted, np.float32)
    with pytest.raises(TypeError, match="stream is a str"):
        ops.rmsnorm(x, out=out, stream="default")


@pytest.mark.gpu
def test_rmsnorm_runs_where_its_arrays_are(rng):
    import cupy

    last = cupy.cuda.runtime.getDeviceCount() - 1  # the only one, or another than the current
    x = rng.standard_normal((3, 40)).astype(np.float32)
    with cupy.cuda.Device(last):
        moved = cupy.asarray(x)
    with cupy.cuda.Device(0):
        got = ops.rmsnorm(moved)
        assert cupy.cuda.runtime.getDevice() == 0
        assert got.device.id == last
        if last:
            with pytest.raises(ValueError, match=f"rmsnorm: weight is on GPU 0 .* GPU {last}"):
                ops.rmsnorm(moved, cupy.ones(40, np.float32))
    assert_close(got, reference.rmsnorm(x.astype(np.float64))[0], np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1234, 3420, 14336, 40000])
def test_rmsnorm_of_many_rows(rng, n):
    import cupy

    x = rng.standard_normal((3000, n), np.float32).astype(np.float16)
    wanted, _ = reference.rmsnorm(x[::100].astype(np.float64))
    assert_close(ops.rmsnorm(cupy.asarray(x))[::100], wanted, np.float16)


def test_rmsnorm_rows_do_not_depend_on_the_batch(to_kernels, rng):
    x = rng.standard_normal((5, 769)).astype(np.float32)
    whole = to_numpy(ops.rmsnorm(to_kernels(x)))
    for i in range(5):
        alone = to_numpy(ops.rmsnorm(to_kernels(x[i : i + 1])))
        assert alone.tobytes() == whole[i : i + 1].tobytes()


def test_rmsnorm_counts_one_launch_and_its_bytes(to_kernels):
    x, weight = to_kernels(np.ones((4, 64), np.float16)), to_kernels(np.ones(64, np.float16))
    with jit.record(dry=True) as record:
        ops.rmsnorm(x, weight)
    assert [launch.kernel for launch in record.launches] == ["rmsnorm"]
    assert record.size_bytes == 2 * (2 * 4 * 64 + 64)


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rmsnorm_does_not_depend_on_the_order_of_threads(rng, seed):
    x = device.twin(rng.standard_normal((3, 1000)).astype(np.float32))
    wanted = ops.rmsnorm(x).tobytes()
    with jit.twin_seed(seed):
        assert ops.rmsnorm(x).tobytes() == wanted
