"""Read a `struct` of a kernels_cu file into an aligned NumPy dtype: one source for a layout."""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FIELD = re.compile(
    r"^(?P<const>const\s+)?(?P<type>[A-Za-z_]\w*(?:\s+\w+)*?)(?P<const_too>\s+const)?"
    r"(?P<pointer>\s*\*\s*(?:const\s+)?(?:__restrict__\s+)?|\s+)(?P<name>\w+)$"
)
_SCALARS = {
    "bool": np.dtype(np.bool_),
    "int": np.dtype(np.int32),
    "i32": np.dtype(np.int32),
    "u32": np.dtype(np.uint32),
    "unsigned": np.dtype(np.uint32),
    "i64": np.dtype(np.int64),
    "u64": np.dtype(np.uint64),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
}
# hw.cuh's TensorMap. Its alignment is the struct's: maps stand first, where they need no padding.
_TENSOR_MAP = np.dtype("V128")
_TENSOR_MAP_ALIGNMENT = 64
_POINTER = np.dtype(np.uint64)


@dataclass(frozen=True)
class Layout:
    """A struct's fields in order, as the compiler lays them out."""

    name: str
    dtype: np.dtype
    pointers: frozenset[str]
    read_only: frozenset[str] = frozenset()  # pointers to const

    @functools.cached_property
    def alignment(self) -> int:
        """Bytes that the struct's address is a multiple of."""
        maps = _TENSOR_MAP in (kind for kind, *_ in (self.dtype.fields or {}).values())
        return _TENSOR_MAP_ALIGNMENT if maps else self.dtype.alignment

    @functools.cached_property
    def codes(self) -> dict[str, str]:
        """The `struct` module's letter for each field."""
        kinds = {name: self.dtype[name] for name in self.dtype.names or ()}
        return {
            name: "128s"
            if kind == _TENSOR_MAP
            else np.dtype(kind).char.replace("l", "q").replace("L", "Q")
            for name, kind in kinds.items()
        }

    @functools.cached_property
    def fields(self) -> tuple[tuple[str, bool], ...]:
        """Names in order, and whether each is a pointer."""
        return tuple((name, name in self.pointers) for name in self.codes)

    @functools.cached_property
    def opaque(self) -> np.dtype:
        """The struct as bytes: CuPy asks a dtype with fields for its description at each call."""
        return np.dtype((np.void, self.dtype.itemsize))

    @functools.cached_property
    def format(self) -> str:
        """What `struct.pack` writes the fields with, the compiler's padding included."""
        tail = {1: "0b", 2: "0h", 4: "0i", 8: "0q"}[self.dtype.alignment]
        made = "@" + "".join(self.codes.values()) + tail
        if self.alignment > self.dtype.alignment:
            made += f"{self.dtype.itemsize - struct.calcsize(made)}x"
        if struct.calcsize(made) != self.dtype.itemsize:
            raise ValueError(f"struct {self.name}: {made} does not pack {self.dtype}")
        return made


def _included(path: Path) -> list[Path]:
    """Return the headers of kernels_cu that a file in one of its folders includes by name."""
    names = re.findall(r'^#include "(device/[^"]+)"', path.read_text(), re.MULTILINE)
    headers = (path.parent.parent / name for name in names)
    found = []
    for header in headers:
        if header.is_file() and header not in found:
            found += [header, *_included(header)]
    return list(dict.fromkeys(found))


def _resized(dtype: np.dtype, size_bytes: int) -> np.dtype:
    fields: Any = dtype.fields or {}
    return np.dtype(
        {
            "names": list(fields),
            "formats": [kind for kind, *_ in fields.values()],
            "offsets": [at for _, at, *_ in fields.values()],
            "itemsize": size_bytes,
            "aligned": True,
        }
    )


@functools.cache
def layout(path: Path, name: str) -> Layout:
    """Return the layout of `struct name` in a kernels_cu file or a header that it includes.

    Fields are pointers and the scalars bool, int, i32, u32, unsigned, i64, u64, float, double;
    tensor maps may stand before them. Raises ValueError when the struct is missing or holds
    anything else.
    """
    found = None
    for source in (path, *_included(path)):
        text = _COMMENT.sub("", source.read_text())
        found = re.search(rf"\bstruct\s+{name}\s*\{{(.*?)\}}\s*;", text, re.DOTALL)
        if found:
            break
    if not found:
        raise ValueError(f"{path.name}: no struct {name}")
    fields: list[tuple[str, np.dtype]] = []
    pointers, read_only = set(), set()
    for declaration in filter(None, (part.strip() for part in found[1].split(";"))):
        field = _FIELD.match(" ".join(declaration.split()))
        if not field:
            raise ValueError(f"{path.name}: {name} has a field cufuse cannot read: {declaration}")
        if "*" in field["pointer"]:
            pointers.add(field["name"])
            if field["const"] or field["const_too"]:
                read_only.add(field["name"])
            fields.append((field["name"], _POINTER))
        elif field["type"] == "TensorMap" and all(kind == _TENSOR_MAP for _, kind in fields):
            fields.append((field["name"], _TENSOR_MAP))
        elif field["type"] in _SCALARS:
            fields.append((field["name"], _SCALARS[field["type"]]))
        else:
            raise ValueError(f"{path.name}: {name}.{field['name']} has type {field['type']}")
    dtype = np.dtype(fields, align=True)
    if any(kind == _TENSOR_MAP for _, kind in fields):
        size = -(-dtype.itemsize // _TENSOR_MAP_ALIGNMENT) * _TENSOR_MAP_ALIGNMENT
        dtype = _resized(dtype, size)
    return Layout(name, dtype, frozenset(pointers), frozenset(read_only))


@functools.cache
def kernel_argument(path: Path, kernel: str) -> Layout:
    """Return the layout of the one struct that `__global__ kernel` takes by value."""
    text = _COMMENT.sub("", path.read_text())
    found = re.search(
        rf"\b{kernel}\s*\(\s*const\s+(?:__grid_constant__\s+)?(\w+)(?:<[^()]*>)?\s+\w+\s*\)", text
    )
    if not found:
        raise ValueError(f"{path.name}: no __global__ {kernel}(const Struct args)")
    return layout(path, found[1])
