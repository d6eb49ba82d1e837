"""What every op checks before it launches: library, device, dtype, named dimensions, aliasing."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cufuse import device
from cufuse.device import Array

_INTEGERS = (int, np.integer)
_NUMBERS = (int, float, np.number)


@dataclass
class Bound:
    """The arrays of a call, checked and contiguous, and the sizes of their dimensions."""

    op: str
    kind: str = "numpy"
    dtype: Any = None  # the common dtype of the floating arrays
    lead: tuple[int, ...] = ()  # the leading dimensions that "..." stands for
    sizes: dict[str, int] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    like: Array = None  # any array of the call: tells kind and device

    def __getitem__(self, name: str) -> Array:
        return self.arrays.get(name)

    @property
    def rows(self) -> int:
        """The product of the leading dimensions."""
        return math.prod(self.lead)

    def output(
        self,
        name: str,
        out: Any,
        shape: tuple[int, ...],
        dtype: Any = None,
        *,
        may_alias: Collection[str] = (),
    ) -> Array:
        """Allocate an output, or check the caller's: shape, dtype, device, contiguity, aliasing.

        `may_alias` names inputs that `out` may be, whole and in place; any other overlap raises.
        """
        dtype = np.dtype(self.dtype if dtype is None else dtype)
        if out is None:
            return device.empty(shape, dtype, self.like)
        where = f"{self.op}: {name}"
        kind = _kind(self.op, name, out)
        if kind != self.kind:
            raise TypeError(f"{where} is a {kind} array and the inputs are {self.kind} arrays")
        if device.device_id(out) != device.device_id(self.like):
            raise ValueError(f"{where} is on GPU {device.device_id(out)}, not with the inputs")
        if out.dtype != dtype:
            raise TypeError(f"{where} has dtype {out.dtype}, wanted {dtype}")
        if tuple(out.shape) != tuple(shape):
            raise ValueError(f"{where} is {_shape(out.shape)}, wanted {_shape(shape)}")
        if not out.flags.c_contiguous or not getattr(out.flags, "writeable", True):
            raise ValueError(f"{where} has to be C-contiguous and writable")
        begin, end = device.span(out)  # arrays of one call are on one device
        for other, array in self.arrays.items():
            if array is None:
                continue
            first, last = device.span(array)
            if max(begin, first) >= min(end, last):
                continue
            whole = begin == first and out.nbytes == array.nbytes
            if not whole or other not in may_alias:
                raise ValueError(f"{where} shares memory with {other}; give it memory of its own")
        return out


def bind(
    op: str,
    *,
    strided: Collection[str] = (),
    optional: Collection[str] = (),
    may_be_packed: Collection[str] = (),
    **specs: tuple[Any, ...],
) -> Bound:
    """Bind named dimensions to sizes and check library, device and dtype of all arrays of a call.

    Each spec is `(array, "m k")` or `(array, "m k", dtype)`. Names bind to sizes, a number is
    itself, a leading `...` takes any number of dimensions (the same for all arrays that have it).
    Without a dtype an array is floating (fp16, bf16 or fp32) and all such arrays share one dtype.
    An array named in `optional` may be None and is left out. Arrays come back C-contiguous; those
    named in `strided` only need a contiguous last dimension. One named in `may_be_packed` may be a
    `pack.Packed`: its dimensions are those of the weight, what comes back is its flat array. Raises
    TypeError for libraries and dtypes, ValueError for sizes.
    """
    bound = Bound(op)
    float_name = lead_name = place = None
    for name, (raw, dims, *rest) in specs.items():
        if raw is None and name in optional:
            bound.arrays[name] = None
            continue
        is_packed = name in may_be_packed and hasattr(raw, "array")
        array = raw.array if is_packed else raw
        if bound.like is None or type(array) is not type(bound.like):
            try:
                array = device.as_array(array)
                kind = device.kind(array)
            except TypeError as error:
                raise _not_an_array(op, name, error) from None
            if bound.like is None:
                bound.kind, bound.like, place = kind, array, device.device_id(array)
            elif kind != bound.kind:
                raise TypeError(
                    f"{op}: {name} is a {kind} array and the others are {bound.kind} arrays; "
                    "move one of them (cupy.asarray, cupy.asnumpy)"
                )
        if device.device_id(array) != place:
            raise ValueError(
                f"{op}: {name} is on GPU {device.device_id(array)} and the others are on GPU "
                f"{place}"
            )
        dtype = array.dtype
        if rest:
            if dtype != rest[0]:
                raise TypeError(f"{op}: {name} has dtype {dtype}, wanted {np.dtype(rest[0])}")
        elif float_name is None:
            if dtype not in device.FLOAT_DTYPES:
                raise _not_floating(op, name, dtype)
            float_name, bound.dtype = name, dtype
        elif dtype != bound.dtype:
            if dtype not in device.FLOAT_DTYPES:
                raise _not_floating(op, name, dtype)
            raise TypeError(
                f"{op}: {name} has dtype {dtype} and {float_name} has {bound.dtype}; cast one of "
                "them"
            )
        has_lead, names = _names(dims)
        shape = raw.shape if is_packed else array.shape
        skipped = len(shape) - len(names)
        if has_lead:
            lead = shape[:skipped]
            if skipped < 0:
                raise ValueError(_ndim_message(op, name, dims, shape))
            if lead_name is None:
                lead_name, bound.lead = name, lead
            elif lead != bound.lead:
                raise ValueError(
                    f"{op}: {name} is {_shape(shape)} and its leading dimensions differ from "
                    f"those of {lead_name}, {_shape(bound.lead)}"
                )
        elif skipped:
            raise ValueError(_ndim_message(op, name, dims, shape))
        for dim, size in zip(names, shape[skipped:], strict=True):
            wanted = dim if isinstance(dim, int) else bound.sizes.setdefault(dim, size)
            if size != wanted:
                raise ValueError(_size_message(op, name, dims, shape, dim, wanted, specs))
        bound.arrays[name] = array if array.flags.c_contiguous else _packed(array, name in strided)
    return bound


@functools.cache
def _names(dims: str) -> tuple[bool, tuple[str | int, ...]]:
    """Split "... m 3" into whether it has leading dimensions, and ("m", 3)."""
    words = dims.split()
    lead = words[:1] == ["..."]
    return lead, tuple(int(word) if word.isdigit() else word for word in words[lead:])


def option(op: str, name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raise ValueError unless value is one of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{op}: {name} is {value!r}, wanted one of {', '.join(map(str, allowed))}")


def number(op: str, name: str, value: Any, low: float, *, whole: bool = False) -> None:
    """Raise TypeError unless value is a number (an integer if `whole`), ValueError below `low`."""
    if not isinstance(value, _INTEGERS if whole else _NUMBERS):
        wanted = "an integer" if whole else "a number"
        raise TypeError(f"{op}: {name} is {value!r}, wanted {wanted} of at least {low}")
    if not value >= low:
        raise ValueError(f"{op}: {name} is {value!r}, wanted at least {low}")


def pair(op: str, out: Any) -> tuple[Any, Any]:
    """Return the two arrays of `out`, or two Nones; raises TypeError when it is no pair."""
    if out is None:
        return None, None
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError(f"{op}: out is a {type(out).__name__}, wanted a pair of arrays or None")
    return out[0], out[1]


def _packed(array: Array, strided: bool) -> Array:
    """Copy a non-contiguous array unless a kernel can read it as it lies."""
    itemsize = array.dtype.itemsize
    readable = (
        array.ndim > 0
        and array.strides[-1] == itemsize
        and all(s >= 0 and s % itemsize == 0 for s in array.strides)
        and all(s > 0 or n == 1 for s, n in zip(array.strides, array.shape, strict=True))
    )
    if strided and readable:
        return array
    if device.kind(array) == "cupy":
        with device.on_device_of(array):
            return device.require_cupy().ascontiguousarray(array)
    return np.ascontiguousarray(array).view(type(array))


def _kind(op: str, name: str, array: Any) -> str:
    try:
        return device.kind(array)
    except TypeError as error:
        raise _not_an_array(op, name, error) from None


def _not_floating(op: str, name: str, dtype: Any) -> TypeError:
    return TypeError(f"{op}: {name} has dtype {dtype}, wanted float16, bfloat16 or float32")


def _not_an_array(op: str, name: str, error: TypeError) -> TypeError:
    return TypeError(f"{op}: {name}: {error}; make one (numpy.asarray, cupy.asarray)")


def _shape(shape: Collection[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _size_message(
    op: str,
    name: str,
    dims: str,
    shape: Collection[int],
    dim: str | int,
    wanted: int,
    specs: dict[str, tuple[Any, ...]],
) -> str:
    """Name the array that bound a dimension first."""
    earlier = [n for n, (raw, d, *_) in specs.items() if raw is not None and dim in _names(d)[1]]
    origin = f"{earlier[0]} has" if isinstance(dim, str) else "wanted"
    return f"{op}: {name} is [{dims}] = {_shape(shape)} but {origin} {dim} = {wanted}"


def _ndim_message(op: str, name: str, dims: str, shape: Collection[int]) -> str:
    return f"{op}: {name} is {_shape(shape)}, wanted [{', '.join(dims.split())}]"
