"""The compiler: options, records, faults of the CPU twin."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from cufuse import device, jit


def test_options_are_those_cupy_builds(monkeypatch):
    """Stop CuPy where it hands options to NVRTC and compare with the offline compile's."""
    import cupy
    from cupy.cuda import compiler

    seen = []

    class Program:
        def __init__(self, *args, **options):
            pass

        def compile(self, options, log=None):
            seen.append(tuple(options))
            raise InterruptedError

    monkeypatch.setattr(compiler, "_NVRTCProgram", Program)
    monkeypatch.setattr(compiler, "_preprocess", lambda *args: "")
    monkeypatch.setattr(compiler, "_get_arch", lambda: "90")
    monkeypatch.setattr(
        compiler, "_get_arch_for_options_for_nvrtc", lambda arch=None: ("-arch=sm_90", "cubin")
    )
    monkeypatch.setattr(compiler, "_kernel_cache_backend", Empty())
    with pytest.raises(InterruptedError):
        cupy._core.core.compile_with_cache(
            "", jit.options("90a"), name_expressions=("cufuse::advance",)
        )
    assert seen == [jit.offline_options("90a")]


class Empty:
    """A kernel cache that holds nothing."""

    def load(self, name):
        return None


def test_record_counts_launches_and_bytes():
    from cufuse import ops

    x = device.twin(np.ones((4, 8), np.float32))
    with jit.record(dry=True) as record:
        y = ops.rmsnorm(x)
    assert [launch.kernel for launch in record.launches] == ["rmsnorm"]
    assert record.size_bytes == x.nbytes + y.nbytes
    with jit.record() as outer:
        pass
    assert outer.launches == []


def test_twin_of_another_kernel_file_names_the_compilers_words():
    with pytest.raises(ValueError, match="no __global__ missing"):
        jit.kernel("unfused/advance.cu", "missing").argument  # noqa: B018


def test_every_dtype_has_a_cpp_name():
    assert jit.cpp(np.float32) == "float"
    assert jit.cpp("Act::gelu") == "cufuse::Act::gelu"
    assert jit.cpp(True) == "true" and jit.cpp(7) == "7"
    with pytest.raises(KeyError):
        jit.cpp(np.complex64)


def test_compile_error_points_into_kernels_cu(monkeypatch):
    whole = jit.source_text("unfused/advance.cu")
    monkeypatch.setattr(jit, "source_text", lambda *_: whole + "int broken = nonsense;")
    with pytest.raises(jit.CompileError, match=r"kernels_cu/unfused/advance\.cu\(\d+\).*nonsense"):
        jit.compile_offline(jit.kernel("unfused/advance.cu", "advance"), "80")


def test_one_builds_while_others_wait(monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        f"echo once >>{tmp_path}/log\nsleep 0.2\n"
        'for target; do :; done\necho built >"$target"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    target = tmp_path / "kernel.so"
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: jit._host_build(target, "int x;"), range(4)))
    assert built == [target] * 4 and target.read_text() == "built\n"
    assert (tmp_path / "log").read_text() == "once\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compiler", "kernel.so", "log"]


def test_a_failed_build_leaves_nothing_behind(tmp_path):
    with pytest.raises(jit.CompileError, match="nonsense"):
        jit._host_build(tmp_path / "broken.so", "int x = nonsense;", "-shared")
    assert not list(tmp_path.iterdir())


def test_static_shared_memory_counts_towards_the_limit(monkeypatch):
    # 227 KiB less what the kernel has statically is what a launch can ask for.
    limit, static, allowed = 227 * 1024, 1040, []
    driver = SimpleNamespace(
        funcGetAttribute=lambda attribute, pointer: static,
        funcSetAttribute=lambda pointer, attribute, value: allowed.append(value),
    )
    cupy = SimpleNamespace(cuda=SimpleNamespace(driver=driver))
    monkeypatch.setattr(device, "require_cupy", lambda: cupy)
    monkeypatch.setattr(
        device, "gpu_info", lambda gpu: SimpleNamespace(shared_bytes_per_block=limit)
    )
    monkeypatch.setattr(jit, "_gpu_function", lambda *args: SimpleNamespace(ptr=0))
    allow = jit._allow_shared.__wrapped__
    kernel = jit.kernel("unfused/advance.cu", "advance")
    allow(kernel, 0, False, limit - static)
    assert allowed == [limit - static]
    with pytest.raises(device.Unsupported, match=f"advance needs {limit + 1} bytes .* {limit}"):
        allow(kernel, 0, False, limit - static + 1)
    allow(kernel, 0, False, 48 * 1024 - static)
    assert len(allowed) == 1


def test_a_grid_that_is_not_resident_is_refused(monkeypatch):
    """CuPy would shrink it, and its CTAs would wait for those that are not there."""
    asked = []

    def blocks(pointer, block, shared_bytes):
        asked.append((pointer, block, shared_bytes))
        return 2

    driver = SimpleNamespace(occupancyMaxActiveBlocksPerMultiprocessor=blocks)
    cupy = SimpleNamespace(cuda=SimpleNamespace(driver=driver))
    monkeypatch.setattr(device, "require_cupy", lambda: cupy)
    monkeypatch.setattr(device, "gpu_info", lambda gpu: SimpleNamespace(sm_count=66))
    monkeypatch.setattr(jit, "_gpu_function", lambda *args: SimpleNamespace(ptr=7))
    monkeypatch.setattr(jit, "_resident", functools.cache(jit._resident.__wrapped__))
    kernel = jit.kernel("unfused/advance.cu", "advance")
    for grid in ((132,), (11, 12)):
        jit._check_resident(kernel, 0, grid, 576, 200_000)
    assert asked == [(7, 576, 200_000)]  # once for each shape
    sentence = "advance: a grid of 133 CTAs .* 576 threads and 200000 bytes .* only 132 fit"
    with pytest.raises(device.Unsupported, match=sentence):
        jit._check_resident(kernel, 0, (133,), 576, 200_000)


@pytest.mark.gpu
def test_a_second_process_compiles_nothing(tmp_path):
    code = (
        "import cupy, cufuse; x = cupy.ones(64, cupy.float32); "
        "print(cufuse.ops.activation(x, 'gelu').get()[0])"
    )
    kept = []
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "CUPY_CACHE_DIR": str(tmp_path)},
            check=True,
            capture_output=True,
        )
        kept.append({(path.name, path.stat().st_mtime_ns) for path in tmp_path.rglob("*.cubin")})
    assert kept[0] and kept[1] == kept[0]


def test_a_fault_leaves_no_counters_behind(monkeypatch):
    from cufuse import ops

    x = device.twin(np.arange(2000, dtype=np.float32)[None])
    wanted = int(np.asarray(ops.argmax(x))[0])
    best = device.SCRATCH.get("best of rows", 8, x)
    best[...] = 0xFF  # as if a launch had ended between its counting and its clearing
    monkeypatch.setenv("CUFUSE_TWIN_SECONDS", "0")
    with pytest.raises(jit.KernelFault, match="hangs"):
        ops.softmax(device.twin(np.ones((64, 4096), np.float32)))
    monkeypatch.delenv("CUFUSE_TWIN_SECONDS")
    assert int(np.asarray(ops.argmax(x))[0]) == wanted


@pytest.mark.cpu_kernels
def test_kernel_prints_on_the_cpu(tmp_path, capfd):
    (tmp_path / "say.cu").write_text(
        '#include "device/hw.cuh"\nnamespace cufuse {\n'
        "struct SayArgs {\n  int* x;  // [1]\n};\n"
        "__global__ void say(const SayArgs args) {\n"
        '  printf("thread %d: %d\\n", threadIdx.x, *args.x);\n}\n'
        "}\n"
    )
    x = device.twin(np.array([42], np.int32))
    jit.kernel("say.cu", "say", root=tmp_path).launch(1, 2, {"x": x}, like=x)
    ctypes.CDLL(None).fflush(None)
    assert sorted(capfd.readouterr().out.splitlines()) == ["thread 0: 42", "thread 1: 42"]
