"""A .cu file and template values -> a Kernel: the only file that compiles or launches.

GPU arrays: CuPy's RawModule over NVRTC, cached on disk by CuPy. Twin arrays: the same file built by
g++ against `kernels_cu/host/`, cached beside it. `compile_offline` builds for any architecture
without a GPU, with the very options that CuPy uses.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import io
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cufuse import device, structs
from cufuse.device import Array

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

OPTIONS = ("-std=c++17", "--fmad=false")
HOST_FLAGS = (
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-w",
    "-fPIC",
    "-DCUFUSE_HOST=1",
    "-g1",
    "-gdwarf-4",  # addr2line mistakes the files of version 5
)
# g++ then calls us at every access to memory; the functions that it calls are in host/memory.cpp.
HOST_CHECK_FLAGS = ("-fsanitize=thread",)
# A kernel's library names no other: it finds what it needs in the runtime's, which is loaded first
# and brings C and C++ along. g++'s own functions for HOST_CHECK_FLAGS stay out, and a build is
# done in 0.20 s of CPU time instead of 0.27.
HOST_LINK_FLAGS = ("-shared", "-nostdlib")
# Its thread-local variables are named by kernels that may be loaded after it has used them.
HOST_RUNTIME_FLAGS = ("-O2", "-shared", "-pthread", "-ftls-model=initial-exec")
ARCHS = ("80", "86", "89", "90a", "100a", "120a")
MAX_CLUSTER = 8  # what every GPU with clusters can have

_CPP_TYPES = {
    np.dtype(np.float32): "float",
    np.dtype(np.float16): "cufuse::half",
    device.bfloat16: "cufuse::bfloat16",
    np.dtype(np.int32): "int",
    np.dtype(np.int64): "long long",
}


class CompileError(RuntimeError):
    """A kernel did not compile; the text is the compiler's and points into kernels_cu."""


class KernelFault(RuntimeError):
    """A kernel on the CPU twin hung or broke a rule of the hardware."""


@functools.cache
def sources() -> Path:
    """Return the kernels_cu folder: inside the package, or one folder up in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "kernels_cu", here.parent / "kernels_cu"):
        if (folder / "device" / "hw.cuh").is_file():
            return folder
    raise RuntimeError("cufuse is installed without its kernels_cu folder; reinstall it")


# ---- what was launched --------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """One launch: its kernel, its shape and the global-memory bytes it has to move."""

    kernel: str
    grid: tuple[int, ...]
    block: int
    size_bytes: int


@dataclass
class Record:
    """The launches made inside `with record()`."""

    dry: bool = False
    launches: list[Launch] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """All global-memory bytes counted."""
        return sum(launch.size_bytes for launch in self.launches)


_record: contextvars.ContextVar[Record | None] = contextvars.ContextVar("record", default=None)


@contextlib.contextmanager
def record(*, dry: bool = False) -> Iterator[Record]:
    """Collect every launch made in the block; `dry` counts without compiling or running."""
    made = Record(dry)
    token = _record.set(made)
    try:
        yield made
    finally:
        _record.reset(token)


@contextlib.contextmanager
def unrecorded() -> Iterator[bool]:
    """Leave the block's launches out of the record; yields whether they run (it is not dry)."""
    outer = _record.get()
    dry = outer is not None and outer.dry
    with record(dry=dry):
        yield not dry


def debug_level() -> int:
    """Read CUFUSE_DEBUG: 1 names each compile, 2 each launch, 3 the source, 4 the SASS."""
    value = os.environ.get("CUFUSE_DEBUG", "0")
    return int(value) if value.isdigit() else 1


def _log(text: str) -> None:
    print(f"cufuse: {text}", file=sys.stderr)


# ---- kernels ------------------------------------------------------------------------------------


def cpp(value: Any) -> str:
    """Write a template argument in C++: dtype, bool, int, or an enumerator such as "Act::gelu"."""
    if isinstance(value, str):
        return f"cufuse::{value}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return _CPP_TYPES[np.dtype(value)]


@dataclass(frozen=True)
class Kernel:
    """One instantiation of a `__global__` function that takes one struct by value."""

    file: str
    name: str
    template: tuple[Any, ...]
    root: Path | None = None  # the folder of `file`, where that is not kernels_cu

    @property
    def path(self) -> Path:
        """Where its source lies."""
        return (self.root or sources()) / self.file

    @functools.cached_property
    def expression(self) -> str:
        """The kernel as C++ names it."""
        arguments = ", ".join(cpp(value) for value in self.template)
        return f"cufuse::{self.name}" + (f"<{arguments}>" if self.template else "")

    @functools.cached_property
    def argument(self) -> structs.Layout:
        """The layout of its argument struct."""
        return structs.kernel_argument(self.path, self.name)

    def launch(
        self,
        grid: int | Sequence[int],
        block: int,
        args: Mapping[str, Any],
        *,
        like: Array,
        shared_bytes: int = 0,
        stream: Any = None,
        cooperative: bool = False,
        cluster: int = 1,
        through: Sequence[Array] = (),
        size_bytes: int | None = None,
    ) -> None:
        """Launch on like's device, asynchronously on `stream` (the current one when None).

        `args` holds exactly the fields of the kernel's struct: arrays (or None) for pointers,
        numbers for scalars, the bytes of tensor_map.py for maps. `cluster` CTAs that follow each
        other in the grid's first dimension share their shared memory (sm_90 and later). `through`
        holds the arrays that the kernel reaches by addresses in other arrays: the twin lets it
        touch no others. `size_bytes` is what the launch has to read and write in global memory,
        all arrays once unless said otherwise.
        Bad field names raise TypeError.
        """
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
        # The compiler may read neighbours in one access, as far as 16 bytes.
        shared_bytes = -(-shared_bytes // 16) * 16
        if min(grid) < 1:
            raise ValueError(f"{self.name}: grid {grid} is empty; guard empty input in the op")
        if not 1 <= cluster <= MAX_CLUSTER or grid[0] % cluster:
            raise ValueError(
                f"{self.name}: clusters of {cluster} CTAs in a grid of {grid}; take 1 to "
                f"{MAX_CLUSTER}, a divisor of the grid's first dimension"
            )
        packed = self._pack(args)
        recorded, debug = _record.get(), debug_level()
        if recorded is not None or debug >= 2:
            if size_bytes is None:
                arrays = self.argument.pointers.intersection(args)
                size_bytes = sum(args[name].nbytes for name in arrays if args[name] is not None)
            size_bytes = int(size_bytes)
            if recorded is not None:
                recorded.launches.append(Launch(self.name, grid, block, size_bytes))
                if recorded.dry:
                    return
        if device.kind(like) == "twin":
            _host_run(self, grid, block, packed, args, shared_bytes, cooperative, cluster, through)
            return
        with device.on_device_of(like):
            self._launch_gpu(
                device.device_id(like),
                grid,
                block,
                packed,
                shared_bytes,
                stream,
                cooperative,
                cluster,
                size_bytes if debug >= 2 else None,
            )

    def _pack(self, args: Mapping[str, Any]) -> np.ndarray:
        """Write the fields into the struct's bytes, as one element that CuPy passes by value."""
        layout = self.argument
        if args.keys() != layout.codes.keys():
            wrong = sorted(set(args).symmetric_difference(layout.codes))
            raise TypeError(f"{self.name}: fields {wrong} do not match struct {layout.name}")
        values = [
            (0 if args[name] is None else device.address(args[name])) if pointer else args[name]
            for name, pointer in layout.fields
        ]
        made = struct.pack(layout.format, *values)
        if layout.alignment <= 16:
            return np.frombuffer(made, layout.opaque)
        room = np.empty(len(made) + layout.alignment, np.uint8)
        at = -room.ctypes.data % layout.alignment
        room[at : at + len(made)] = np.frombuffer(made, np.uint8)
        return room[at : at + len(made)].view(layout.opaque)

    def _launch_gpu(
        self,
        gpu: int,
        grid: tuple[int, ...],
        block: int,
        packed: np.ndarray,
        shared_bytes: int,
        stream: Any,
        cooperative: bool,
        cluster: int,
        logged_bytes: int | None,
    ) -> None:
        """Launch on the current device; with logged_bytes, log the time and the speed."""
        cupy = device.require_cupy()
        function = _gpu_function(self, gpu, cooperative)
        if shared_bytes:
            _allow_shared(self, gpu, cooperative, shared_bytes)
        if cooperative and cluster == 1:
            _check_resident(self, gpu, grid, block, shared_bytes)
        on = device.as_stream(stream)
        logs = logged_bytes is not None and not on.is_capturing()
        if logs:
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(on)
        if cluster == 1:
            function(grid, (block,), (packed,), shared_mem=shared_bytes, stream=on)
        else:
            info = device.gpu_info(gpu)
            if int(info.arch.rstrip("af")) < 90:
                raise device.Unsupported(
                    f"{self.name} needs clusters of CTAs, which sm_{info.arch} has not: sm_90 and "
                    "later have them"
                )
            _launch_cluster(
                function, grid, block, packed, shared_bytes, on.ptr, cooperative, cluster
            )
        if logs and logged_bytes is not None:
            end.record(on)
            end.synchronize()
            ms = cupy.cuda.get_elapsed_time(start, end)
            _log(
                f"{self.expression} grid {grid} block {block}: {ms * 1e3:.1f} us, "
                f"{logged_bytes / ms / 1e6:.0f} GB/s"
            )


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: a number, and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("n_attributes", ctypes.c_uint),
    )


_COOPERATIVE, _CLUSTER = 2, 4  # CUlaunchAttributeID


def _launch_cluster(
    function: Any,
    grid: tuple[int, ...],
    block: int,
    packed: np.ndarray,
    shared_bytes: int,
    stream: int,
    cooperative: bool,
    cluster: int,
) -> None:
    """Launch through the driver: CuPy knows of no clusters."""
    attributes = (_LaunchAttribute * 2)()
    attributes[0].id = _CLUSTER
    attributes[0].value[:3] = (cluster, 1, 1)
    attributes[1].id = _COOPERATIVE
    attributes[1].value[0] = 1
    config = _LaunchConfig(
        (ctypes.c_uint * 3)(*grid, *(1,) * (3 - len(grid))),
        (ctypes.c_uint * 3)(block, 1, 1),
        shared_bytes,
        stream,
        attributes,
        2 if cooperative else 1,
    )
    arguments = (ctypes.c_void_p * 1)(packed.ctypes.data)
    error = _driver().cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(function.ptr), arguments, None
    )
    if error:
        raise RuntimeError(
            f"launch of {grid} CTAs of {block} threads in clusters of {cluster} with "
            f"{shared_bytes} bytes of shared memory: CUDA error {error}"
        )


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@functools.cache
def kernel(file: str, name: str, *template: Any, root: Path | None = None) -> Kernel:
    """Return the instantiation `name<template...>` of a kernels_cu file; compiled when used.

    `root` is another folder of sources; they include the headers of kernels_cu all the same.
    """
    return Kernel(file, name, template, root)


# ---- GPU ----------------------------------------------------------------------------------------


@functools.cache
def digest() -> str:
    """Hash every header of kernels_cu: CuPy's disk cache does not see what a source includes."""
    state = hashlib.sha256()
    for path in sorted(sources().rglob("*.cuh")):
        state.update(path.name.encode() + b"\0" + path.read_bytes())
    return state.hexdigest()[:32]


@functools.cache
def source_text(file: str, root: Path | None = None) -> str:
    """Return what is handed to NVRTC: the headers' digest, then the file under its own name."""
    folder = root or sources()
    body = (folder / file).read_text()
    return f'// headers {digest()}\n#line 1 "{folder.name}/{file}"\n{body}'


def options(arch: str) -> tuple[str, ...]:
    """Return the options we pass to NVRTC; CuPy puts its own around them."""
    return (*OPTIONS, f"-I{sources()}", f"-arch=sm_{arch}")


@functools.cache
def _gpu_function(made: Kernel, gpu: int, cooperative: bool) -> Any:
    cupy = device.require_cupy()
    arch = device.gpu_info(gpu).arch
    code = source_text(made.file, made.root)
    if debug_level() >= 3:
        _log(code)
    begin = time.perf_counter()
    module = cupy.RawModule(
        code=code,
        options=options(arch),
        name_expressions=(made.expression,),
        enable_cooperative_groups=cooperative,
    )
    try:
        function = module.get_function(made.expression).kernel
    except cupy.cuda.compiler.CompileException as error:
        raise CompileError(f"{made.expression} for sm_{arch}: {error}") from error
    if debug_level() >= 1:
        _log(f"compiled {made.expression} for sm_{arch} in {time.perf_counter() - begin:.2f} s")
    if debug_level() >= 4:
        _log(_sass(compile_offline(made, arch).cubin))
    return function


def _sass(cubin: bytes) -> str:
    tool = shutil.which("cuobjdump")
    if tool is None:
        return "no cuobjdump on the PATH to show the SASS with"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        # CuPy drops the last byte, a zero, and the tool then finds the ELF file too short.
        file.write(cubin.ljust(-(-len(cubin) // 8) * 8, b"\0"))
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True).stdout


@functools.cache
def _allow_shared(made: Kernel, gpu: int, cooperative: bool, shared_bytes: int) -> None:
    """Raise the function's limit of dynamic shared memory; what it has statically counts too."""
    driver = device.require_cupy().cuda.driver
    pointer = _gpu_function(made, gpu, cooperative).ptr
    needed = shared_bytes + driver.funcGetAttribute(1, pointer)  # SHARED_SIZE_BYTES
    limit = device.gpu_info(gpu).shared_bytes_per_block
    if needed > limit:
        raise device.Unsupported(
            f"{made.name} needs {needed} bytes of shared memory and this GPU has {limit}"
        )
    if needed > 48 * 1024:
        driver.funcSetAttribute(pointer, 8, shared_bytes)  # MAX_DYNAMIC_SHARED_SIZE_BYTES


def _check_resident(
    made: Kernel, gpu: int, grid: tuple[int, ...], block: int, shared_bytes: int
) -> None:
    """Raise Unsupported for a grid whose CTAs cannot all run at once: CuPy would shrink it."""
    most = _resident(made, gpu, block, shared_bytes)
    if math.prod(grid) > most:
        raise device.Unsupported(
            f"{made.name}: a grid of {math.prod(grid)} CTAs that wait for each other, with {block} "
            f"threads and {shared_bytes} bytes of shared memory each, and only {most} fit on this "
            "GPU at once"
        )


@functools.cache
def _resident(made: Kernel, gpu: int, block: int, shared_bytes: int) -> int:
    """CTAs of a cooperative launch that the GPU holds at once."""
    pointer = _gpu_function(made, gpu, True).ptr
    driver = device.require_cupy().cuda.driver
    per_sm = driver.occupancyMaxActiveBlocksPerMultiprocessor(pointer, block, shared_bytes)
    return per_sm * device.gpu_info(gpu).sm_count


# ---- without a GPU ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one instantiation."""

    expression: str
    arch: str
    cubin: bytes
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    seconds: float
    remarks: tuple[str, ...] = ()  # of ptxas on wgmma that it had to wait for or to serialize


def offline_options(arch: str) -> tuple[str, ...]:
    """Return all options of a compile for sm_`arch`, ours with CuPy's around them.

    CuPy names the plain architecture after ours; of the two NVRTC keeps the suffixed one.
    """
    device.require_cupy()
    from cupy._core import core

    return (
        *core.assemble_cupy_compiler_options(options(arch)),
        "-ftz=true",
        f"-arch=sm_{arch.rstrip('af')}",
        "--device-as-default-execution-space",
    )


def compile_offline(made: Kernel, arch: str) -> Compiled:
    """Compile one instantiation for sm_`arch` without a GPU and read ptxas' report.

    Raises CompileError with NVRTC's text.
    """
    compiler = device.require_cupy().cuda.compiler
    log = io.StringIO()
    begin = time.perf_counter()
    program = compiler._NVRTCProgram(
        source_text(made.file, made.root),
        made.file,
        name_expressions=(made.expression,),
        method="cubin",
    )
    try:
        cubin, names = program.compile((*offline_options(arch), "--ptxas-options=-v"), log)
    except compiler.CompileException as error:
        raise CompileError(f"{made.expression} for sm_{arch}: {error}") from error
    seconds = time.perf_counter() - begin
    # The report has a paragraph for each kernel of the file; plain ones come with every template.
    paragraphs = log.getvalue().split("Compiling entry function '")
    report = next(text for text in paragraphs if text.startswith(f"{names[made.expression]}'"))

    def number(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, report))

    return Compiled(
        made.expression,
        arch,
        cubin,
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=number(r"(\d+) bytes smem"),
        seconds=seconds,
        remarks=tuple(re.findall(r"^ptxas \w+ *: (\(C\d+\) .*)$", log.getvalue(), re.MULTILINE)),
    )


_INSTANTIATE = re.compile(r"^// instantiate: (\w+)(?:<(.*)>)?$", re.MULTILINE)
_WORDS = {
    "float": np.dtype(np.float32),
    "half": np.dtype(np.float16),
    "bfloat16": device.bfloat16,
    "int": np.dtype(np.int32),
    "true": True,
    "false": False,
}


def samples(root: Path | None = None) -> list[Kernel]:
    """Return the instantiations named by the `// instantiate:` lines of all .cu files."""
    found = []
    folder = root or sources()
    for path in sorted(folder.rglob("*.cu")):
        file = path.relative_to(folder).as_posix()
        lines = _INSTANTIATE.findall(path.read_text())
        if not lines:
            raise ValueError(f"{folder.name}/{file} has no `// instantiate:` line")
        for name, arguments in lines:
            found.append(kernel(file, name, *_template_values(arguments), root=root))
    return found


def _template_values(text: str) -> list[Any]:
    """Read C++ template arguments; those of a type in between become its text."""
    words, depth = [""], 0
    for letter in text:
        depth += (letter == "<") - (letter == ">")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return [_template_value(word.strip()) for word in words] if text else []


def _template_value(word: str) -> Any:
    if word.endswith(">"):
        name, _, arguments = word[:-1].partition("<")
        return f"{name}<{', '.join(map(cpp, _template_values(arguments)))}>"
    return _WORDS[word] if word in _WORDS else int(word) if word.lstrip("-").isdigit() else word


# ---- the CPU twin -------------------------------------------------------------------------------

# NVRTC knows printf by itself.
_HOST_HEADER = """\
#include <cstdio>
#include "host/hw.cuh"
"""
_HOST_MAIN = """
#include "{file}"

template <typename Args>
static void call(void (*kernel)(const Args), const void* bytes) {{
  kernel(*static_cast<const Args*>(bytes));
}}
template <typename Args>
constexpr unsigned long long size_of(void (*)(const Args)) {{
  return sizeof(Args);
}}

constexpr auto kernel = {expression};
extern "C" void cufuse_thread(const void* bytes) {{
  call(kernel, bytes);
  cufuse::host::thread_ends();
}}
extern "C" unsigned long long cufuse_argument_bytes() {{ return size_of(kernel); }}
"""


def host_compiler() -> str:
    """Return the C++ compiler of the CPU twin; raises Unsupported if there is none."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise device.Unsupported(
            f"the CPU twin needs a C++ compiler and {compiler} is not there: apt install g++"
        )
    return compiler


def cache_folder() -> Path:
    """Return the user's cache folder of cufuse (CUFUSE_CACHE_DIR, XDG_CACHE_HOME or ~/.cache)."""
    base = os.environ.get("CUFUSE_CACHE_DIR")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cufuse"


@functools.cache
def _host_digest() -> str:
    state = hashlib.sha256(digest().encode())
    for path in _host_runtime_sources():
        state.update(path.read_bytes())
    version = subprocess.run([host_compiler(), "--version"], capture_output=True, text=True).stdout
    flags = (
        *HOST_FLAGS,
        *HOST_CHECK_FLAGS,
        *HOST_LINK_FLAGS,
        *HOST_RUNTIME_FLAGS,
        *_host_target(),
    )
    state.update(" ".join((version, *flags, _HOST_HEADER)).encode())
    return state.hexdigest()


def _host_runtime_sources() -> list[Path]:
    return sorted((sources() / "host").glob("*.cpp"))


@functools.cache
def _host_target() -> tuple[str, ...]:
    """Use the hardware's fused multiply-add where there is one; fmaf in software is slow."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    return ("-mfma",) if re.search(r"^flags\s*:.*\bfma\b", flags, re.MULTILINE) else ()


@functools.cache
def _host_folder() -> Path:
    """Return where this compiler's builds of these headers lie."""
    folder = cache_folder() / "twin" / _host_digest()[:40]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _only_builder(target: Path) -> Iterator[None]:
    """Let one process build the target while the others wait (where the system can lock files)."""
    if fcntl is None:
        yield
        return
    lock = target.with_name(target.name + ".lock")
    with open(lock, "w") as file:
        with contextlib.suppress(OSError):  # a file system without locks: build twice
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def twin_check() -> bool:
    """Read CUFUSE_TWIN_CHECK: 0 leaves out the twin's watch over races and array bounds."""
    return os.environ.get("CUFUSE_TWIN_CHECK", "1") != "0"


def _host_build(target: Path, text: str, *arguments: str) -> Path:
    """Compile C++ text into the target unless it is there; it appears whole or not at all."""
    if target.exists():
        return target
    with _only_builder(target), tempfile.TemporaryDirectory(dir=target.parent) as work:
        if target.exists():
            return target
        source, built = Path(work) / "twin.cpp", Path(work) / target.name
        source.write_text(text)
        command = [host_compiler(), *HOST_FLAGS, *_host_target(), f"-I{sources()}"]
        done = subprocess.run(
            [*command, *arguments, str(source), "-o", str(built)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise CompileError(f"{target.name} on the CPU: {done.stderr[:4000]}")
        built.replace(target)
    return target


@functools.cache
def _host_header(check: bool) -> Path:
    """Precompile the twin's header, which stands in front of every kernel."""
    header = _host_folder() / ("twin-check.hpp" if check else "twin.hpp")
    if not header.exists():
        header.write_text(_HOST_HEADER)  # read where the precompiled one does not fit
    flags = HOST_CHECK_FLAGS if check else ()
    precompiled = header.with_name(header.name + ".gch")
    _host_build(precompiled, _HOST_HEADER, *flags, "-x", "c++-header")
    return header


@functools.cache
def _host_runtime() -> Any:
    """Build and load what runs a grid on the CPU; kernels find its functions by name."""
    text = "".join(f'#include "host/{path.name}"\n' for path in _host_runtime_sources())
    library = _host_build(_host_folder() / "runtime.so", text, *HOST_RUNTIME_FLAGS)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _host_library(made: Kernel, check: bool) -> Any:
    _host_runtime()
    file = made.file if made.root is None else made.path
    text = _HOST_MAIN.format(file=file, expression=made.expression)
    state = hashlib.sha256("\0".join((text, made.path.read_text())).encode())
    state.update(" ".join(HOST_CHECK_FLAGS).encode() if check else b"")
    library = _host_folder() / f"{made.name}-{state.hexdigest()[:40]}.so"
    begin = time.perf_counter()
    if not library.exists():
        flags = HOST_CHECK_FLAGS if check else ()
        _host_build(
            library,
            text,
            *flags,
            "-include",
            str(_host_header(check)),
            *HOST_LINK_FLAGS,
        )
        if debug_level() >= 1:
            _log(f"compiled {made.expression} for the CPU in {time.perf_counter() - begin:.2f} s")
    return ctypes.CDLL(str(library))


_PLACE = re.compile(r"<at ([0-9a-f]+) ([0-9a-f]+)>")


def _with_places(message: str, library: str, root: Path | None) -> str:
    """Put file and line where the runtime named addresses of the kernel's library.

    root: where the kernel's file lies, if it is not kernels_cu
    """
    found = {address for pair in _PLACE.findall(message) for address in pair if address != "0"}
    addresses = sorted(found)
    tool = shutil.which("addr2line")
    if not addresses or tool is None:
        return _PLACE.sub(r"at +0x\1", message)
    # -a opens each answer with its address; -i gives the innermost inlined function first.
    command = [tool, "-a", "-i", "-e", library, *addresses]
    text = subprocess.run(command, capture_output=True, text=True).stdout
    places: dict[int, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("0x"):
            frames = places.setdefault(int(line, 16), [])
        elif not line.startswith("??"):
            frames.append(line.split(" (")[0])

    def place(match: re.Match[str]) -> str:
        addresses = [int(word, 16) for word in match.groups()]
        frames = [frame for address in addresses for frame in places.get(address, [])]
        for frame in frames:
            if root is not None and frame.startswith(f"{root}/"):
                return f"at {root.name}/{frame[len(f'{root}/') :]}"
            # A precompiled header names the checkout that it was built in.
            inside = frame.rpartition("kernels_cu/")[2]
            if not inside.startswith(("host/", "/")):
                return f"at kernels_cu/{inside}"
        return f"at +0x{match[1]}"

    return _PLACE.sub(place, message)


_seed: contextvars.ContextVar[int] = contextvars.ContextVar("seed", default=0)


@contextlib.contextmanager
def twin_seed(seed: int) -> Iterator[None]:
    """Interleave the twin's threads differently inside the block."""
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


class _HostArray(ctypes.Structure):
    """Array of host/fibers.cuh."""

    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("size_bytes", ctypes.c_ulonglong),
        ("read_only", ctypes.c_int),
        ("name", ctypes.c_char_p),
    )


def _host_arrays(made: Kernel, args: Mapping[str, Any], through: Sequence[Array]) -> Any:
    """Return the memory that a launch may touch."""
    layout = made.argument
    named = [(n, args[n], n in layout.read_only) for n in layout.codes if n in layout.pointers]
    named += [(f"through[{i}]", array, False) for i, array in enumerate(through)]
    found = []
    for name, array, read_only in named:
        if array is None or not array.size:
            continue
        begin, end = np.lib.array_utils.byte_bounds(array)
        found.append(_HostArray(begin, end - begin, read_only, name.encode()))
    return (_HostArray * len(found))(*found)


def _host_run(
    made: Kernel,
    grid: tuple[int, ...],
    block: int,
    packed: np.ndarray,
    args: Mapping[str, Any],
    shared_bytes: int,
    cooperative: bool,
    cluster: int,
    through: Sequence[Array],
) -> None:
    check = twin_check()
    library = _host_library(made, check)
    if packed.nbytes != library.cufuse_argument_bytes():
        raise KernelFault(
            f"{made.name} on the CPU twin: the struct has {library.cufuse_argument_bytes()} bytes, "
            f"Python packed {packed.nbytes}"
        )
    sizes = (ctypes.c_uint * 3)(*grid, *(1,) * (3 - len(grid)))
    arrays = _host_arrays(made, args, through)
    message = ctypes.create_string_buffer(1 << 16)
    failed = _host_runtime().cufuse_run(
        library.cufuse_thread,
        ctypes.c_void_p(packed.ctypes.data),
        ctypes.c_ulonglong(packed.nbytes),
        sizes,
        ctypes.c_uint(block),
        ctypes.c_uint(cluster),
        ctypes.c_ulonglong(shared_bytes),
        ctypes.c_int(cooperative),
        arrays,
        ctypes.c_uint(len(arrays)),
        ctypes.c_ulonglong(_seed.get()),
        ctypes.c_double(float(os.environ.get("CUFUSE_TWIN_SECONDS", "60"))),
        ctypes.c_ulonglong(int(os.environ.get("CUFUSE_TWIN_STEPS", "4000000"))),
        ctypes.c_int(check),
        message,
        ctypes.c_ulonglong(len(message)),
    )
    if failed:
        device.SCRATCH.forget_twins()
        text = _with_places(message.value.decode(), library._name, made.root)
        raise KernelFault(f"{made.name} on the CPU twin: {text}")
