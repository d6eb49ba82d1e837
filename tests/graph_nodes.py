"""What a captured CUDA graph launches, asked of the driver: whoever enqueued it is seen."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

_TYPES = {0: "kernel", 1: "memcpy", 2: "memset", 3: "host", 4: "graph", 5: "empty"}
_KERNEL, _GRAPH = 0, 4


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def launched(work: Callable[[], Any], stream: Any) -> list[str]:
    """Capture what `work` enqueues on a stream (not the default one) and name every node.

    Kernels of ours are named as in the source ("rmsnorm"), other kernels by their mangled name in
    angle brackets, other nodes by their type in angle brackets ("<memcpy>"). Call `work` once
    before, so that everything is compiled and allocated.
    """
    stream.begin_capture()
    try:
        work()
    finally:
        graph = stream.end_capture()
    return node_names(graph.graph)


def repeated(work: Callable[[], Any], stream: Any, out: Any) -> tuple[Any, set[bytes]]:
    """Do what `work` enqueues on a stream (not the default one) three times, and replay it three.

    out: what it writes, 16-bit values; NaN before each replay

    Returns the graph and all that `out` was.
    """
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    results = set()
    for _ in range(3):
        work()
        stream.synchronize()
        results.add(cupy.asnumpy(out.view(np.uint16)).tobytes())
    stream.begin_capture()
    try:
        work()
    finally:
        graph = stream.end_capture()
    for _ in range(3):
        out.view(np.uint16)[...] = 0xFFFF
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        results.add(cupy.asnumpy(out.view(np.uint16)).tobytes())
    return graph, results


def node_names(graph: int) -> list[str]:
    """Name the nodes of a CUgraph, child graphs' too."""
    count = ctypes.c_size_t()
    _call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    _call("cuGraphGetNodes", ctypes.c_void_p(graph), nodes, ctypes.byref(count))
    names: list[str] = []
    for node in nodes:
        kind = ctypes.c_int()
        _call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value == _KERNEL:
            names.append(_kernel_name(node))
        elif kind.value == _GRAPH:
            child = ctypes.c_void_p()
            _call("cuGraphChildGraphNodeGetGraph", ctypes.c_void_p(node), ctypes.byref(child))
            names += node_names(child.value or 0)
        else:
            names.append(f"<{_TYPES.get(kind.value, f'node type {kind.value}')}>")
    return names


def _kernel_name(node: int) -> str:
    params = _KernelParams()
    _call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(params))
    name = ctypes.c_char_p()
    if params.func:
        _call("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(params.func))
    else:
        _call("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(params.kern))
    return readable((name.value or b"").decode())


def readable(mangled: str) -> str:
    """Return the plain name of a kernel in namespace cufuse, "<mangled>" for any other."""
    found = re.match(r"_ZN6cufuse(\d+)", mangled)
    return mangled[found.end() :][: int(found[1])] if found else f"<{mangled}>"


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    error = getattr(_driver(), name)(*arguments)
    if error:
        raise RuntimeError(f"{name} failed with CUDA error {error}")
