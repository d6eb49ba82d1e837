"""What a cubin says of its kernel that the compiler's report leaves out."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_MAX_THREADS = 0x05  # EIATTR_MAX_THREADS: x, y, z of __launch_bounds__
_SIZED = 0x04  # the attribute's value is so many bytes that follow
_LARGEST_CTA = 1024


def threads_per_cta(cubin: bytes, kernel: str) -> int:
    """Return the most threads a CTA of a kernel may have: its __launch_bounds__, or 1024.

    kernel: its name without namespace and template arguments; a cubin also holds the kernels of
        the file that are no templates
    """
    mangled = f"{len(kernel)}{kernel}"
    most = [
        x * y * z
        for name, data in _sections(cubin)
        if name.startswith(".nv.info.") and mangled in name
        for attribute, value in _attributes(data)
        if attribute == _MAX_THREADS
        for x, y, z in [struct.unpack("<III", value[:12])]
    ]
    return max(most, default=_LARGEST_CTA)


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of every section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_bytes) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, size in headers:
        if kind != 8:  # SHT_NOBITS has no bytes in the file
            begin = names + name
            yield elf[begin : elf.index(b"\0", begin)].decode(), elf[offset : offset + size]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the attributes of a .nv.info section that have a sized value."""
    at = 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield attribute, data[at : at + size]
            at += size
