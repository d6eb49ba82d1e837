"""`cufuse info`: what is installed, what the GPU is, what is missing and how to mend it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from cufuse import device, hub, jit
from cufuse.benchmarks import cublas

_EXTRAS = {"gguf": "models", "tokenizers": "models", "jinja2": "models", "matplotlib": "plot"}


@click.command(epilog="Example: cufuse info --json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(as_json: bool) -> None:
    """Show what is installed, and the line that mends what is missing."""
    found = collect()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    width = max(len(name) for name in found)
    for name, value in found.items():
        if name != "missing":
            click.echo(f"{name:<{width}}  {_text(value)}")
    missing: dict[str, str] = found["missing"]
    click.echo(f"{'missing':<{width}}  {'nothing' if not missing else ''}".rstrip())
    for name, cure in missing.items():
        click.echo(f"  {name}: {cure}")


def collect() -> dict[str, Any]:
    """Gather everything `cufuse info` shows, plain enough for JSON."""
    missing: dict[str, str] = {}
    found: dict[str, Any] = {
        "cufuse": _version("cufuse"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "numpy": _version("numpy"),
        "ml_dtypes": _version("ml_dtypes"),
        "cupy": None,
        "nvrtc": None,
        "cuda headers": None,
        "cublas": None,
        "gpu": [],
    }
    if importlib.util.find_spec("cupy") is None:
        missing["CuPy (no GPU without it)"] = device.INSTALL_CUPY
    else:
        found["cupy"] = device.require_cupy().__version__
        _compiler(found, missing)
        _gpus(found, missing)
    found["g++"] = _host_compiler(missing)
    found["kernels"] = str(jit.sources())
    found["cache"] = str(jit.cache_folder())
    found["models"] = [name for name in hub.PACKAGES if hub.find(name)]
    for module, extra in _EXTRAS.items():
        found[module] = _version(module)
        if found[module] is None:
            missing[module] = f'pip install "cufuse[{extra}]"'
    found["missing"] = missing
    return found


def _compiler(found: dict[str, Any], missing: dict[str, str]) -> None:
    try:
        major, minor = device.require_cupy().cuda.nvrtc.getVersion()
        found["nvrtc"] = f"{major}.{minor}"
    except Exception:  # a missing library has no exception class of its own
        missing["NVRTC (compiles the kernels)"] = device.INSTALL_CUPY
        return
    for option in jit.offline_options("80"):
        folder = Path(option.removeprefix("-I"))
        if option.startswith("-I") and (folder / "cuda_fp16.h").is_file():
            found["cuda headers"] = str(folder)
    if found["cuda headers"] is None:
        missing["CUDA headers (cuda_fp16.h)"] = device.INSTALL_CUPY


def _cublas(found: dict[str, Any], missing: dict[str, str]) -> None:
    try:
        found["cublas"] = str(cublas.version())
    except Exception:  # a missing library, a missing driver
        missing["cuBLAS (only to compare with)"] = "pip install nvidia-cublas"


def _gpus(found: dict[str, Any], missing: dict[str, str]) -> None:
    problem = device.gpu_problem()
    if problem is not None:
        cure = "; install or update the NVIDIA driver" if "InsufficientDriver" in problem else ""
        missing["GPU"] = f"{problem}{cure}; the reference engine still runs"
        return
    _cublas(found, missing)
    count = device.require_cupy().cuda.runtime.getDeviceCount()
    found["gpu"] = [asdict(device.gpu_info(gpu)) for gpu in range(count)]


def _host_compiler(missing: dict[str, str]) -> str | None:
    try:
        compiler = jit.host_compiler()
    except device.Unsupported as error:
        missing["C++ compiler (only for tests and --device cpu-kernels)"] = str(error).rsplit(
            ": ", 1
        )[-1]
        return None
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    return f"{shutil.which(compiler)} ({(done.stdout.splitlines() or [''])[0]})"


def _version(module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _text(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        return "; ".join(_text(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)
