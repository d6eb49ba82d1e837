"""Layouts read from sources against what the C++ compiler says."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from cufuse import device, jit, structs

SOURCE = """
// struct Wrong { int commented_out; };
template <typename T>
struct MixedArgs {
  const T* __restrict__ x;  // [rows, n]; a comment with int y;
  int n;
  i64 rows;
  bool flag;
  float eps;
  T* const y;
  unsigned long_name;
};

template <typename T>
__global__ void __launch_bounds__(32) mixed(const __grid_constant__ MixedArgs<T> args) {}
struct Odd { int values[3]; };
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "mixed.cu"
    path.write_text(SOURCE)
    return path


def test_layout_is_the_compilers(source):
    layout = structs.kernel_argument(source, "mixed")
    offsets = {name: layout.dtype.fields[name][1] for name in layout.dtype.names}
    assert offsets == {
        "x": 0,
        "n": 8,
        "rows": 16,
        "flag": 24,
        "eps": 28,
        "y": 32,
        "long_name": 40,
    }
    assert layout.dtype.itemsize == 48
    assert layout.pointers == {"x", "y"}


def test_format_packs_what_the_dtype_reads(source):
    layout = structs.kernel_argument(source, "mixed")
    packed = struct.pack(layout.format, 2**40, -3, 2**33, True, 0.5, 7, 2**31)
    read = np.frombuffer(packed, layout.dtype)[0]
    assert read["x"] == 2**40 and read["n"] == -3 and read["rows"] == 2**33
    assert read["flag"] and read["eps"] == 0.5 and read["y"] == 7 and read["long_name"] == 2**31


@pytest.mark.parametrize("value", [0.1, 2, np.float64(0.1), np.float32(0.1)], ids=repr)
def test_any_number_fits_a_float_field(source, value):
    layout = structs.kernel_argument(source, "mixed")
    packed = struct.pack(layout.format, 0, 0, 0, False, value, 0, 0)
    assert np.frombuffer(packed, layout.dtype)[0]["eps"] == np.float32(value)


def test_every_kernel_has_a_readable_argument():
    for kernel in jit.samples():
        assert struct.calcsize(kernel.argument.format) == kernel.argument.dtype.itemsize


def test_unreadable_field_is_named(source):
    with pytest.raises(ValueError, match=r"Odd has a field cufuse cannot read: int values\[3\]"):
        structs.layout(source, "Odd")
    with pytest.raises(ValueError, match="no struct Missing"):
        structs.layout(source, "Missing")


def test_wrong_field_names_raise():
    start = device.twin(np.zeros(1, np.int32))
    with pytest.raises(TypeError, match=r"advance: fields \['batch', 'lots'\] do not match"):
        jit.kernel("unfused/advance.cu", "advance").launch(
            1, 32, {"start": start, "lots": 1, "n": 1}, like=start
        )
