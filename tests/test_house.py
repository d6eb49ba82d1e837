"""The walls of the house: who imports whom, where PTX may stand, what must not be there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cufuse import jit

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels_cu"

# From the top floor down; a module may import its own floor and those below.
FLOORS = (
    ("cli",),
    ("benchmarks",),
    ("model", "__init__"),
    ("engines",),
    ("ops", "generate", "plan", "trace"),
    (
        "jit",
        "tiles",
        "pack",
        "mxfp4",
        "weights",
        "state",
        "checkpoint",
        "upcycle",
        "tokenizer",
        "hub",
    ),
    ("tensor_map",),
    ("device", "checks", "structs", "reference", "config"),
)
FLOOR = {name: i for i, names in enumerate(FLOORS) for name in names}


def modules() -> list[tuple[str, Path]]:
    """Every Python module of the product with the unit it belongs to."""
    found = []
    for folder, prefix in (("cufuse", None), ("cli", "cli"), ("benchmarks", "benchmarks")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if "peers" not in parts:
                found.append((prefix or parts[0], path))
    return found


def imported(path: Path) -> set[str]:
    """The units of cufuse that a module imports."""
    units = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "cufuse":
            units.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cufuse."):
            units.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            units.update(a.name.split(".")[1] for a in node.names if a.name.startswith("cufuse."))
    return units


def test_every_module_has_a_floor():
    assert {unit for unit, _ in modules()} - set(FLOOR) == set()


@pytest.mark.parametrize("unit, path", modules(), ids=lambda value: str(value)[-30:])
def test_imports_go_down(unit, path):
    if path == ROOT / "cufuse" / "__init__.py":
        return  # the public names, imported when first used
    above = {name for name in imported(path) if FLOOR.get(name, 99) < FLOOR[unit]}
    assert not above, f"{path.name} on the floor of {unit} imports {sorted(above)} from above"


def test_kernels_include_only_device():
    for path in KERNELS.rglob("*.cu*"):
        folder = path.parent.name
        allowed = ("device/", "host/") if folder in ("device", "host") else ("device/",)
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
            assert name.startswith(allowed), f"{path.name} includes {name}"
            assert name.endswith(".cuh"), f"{path.name} includes {name}, which is compiled"


def test_device_files_hold_no_kernel():
    for path in (KERNELS / "device").glob("*.cuh"):
        assert "__global__" not in path.read_text(), path.name


def test_only_hw_has_inline_ptx():
    for path in KERNELS.rglob("*.cu*"):
        if path.parent.name == "host" or path.name == "hw.cuh":
            continue
        assert not re.search(r"\basm\b", path.read_text()), path.name


def test_ptx_that_touches_memory_says_so():
    text = (KERNELS / "device" / "hw.cuh").read_text()
    for block in re.findall(r"asm volatile\((.*?)\);", text, re.DOTALL):
        if re.search(r'"(ld|st|red|atom|cp\.|mbarrier|fence|bar|ldmatrix|wgmma)', block):
            assert '"memory"' in block, block


def test_no_torch():
    for path in ROOT.rglob("*.py"):
        inside = path.relative_to(ROOT).parts
        if inside[0] not in ("cufuse", "cli", "tests", "benchmarks") or "peers" in inside:
            continue
        assert not re.search(r"^\s*(import|from) torch", path.read_text(), re.MULTILINE), path


def test_peers_stand_beside_the_product():
    """They run without it, and a wheel does not hold them."""
    folder = ROOT / "benchmarks" / "peers"
    assert list(folder.glob("*.py")) and not (folder / "__init__.py").exists()
    for path in folder.glob("*.py"):
        assert not imported(path) and path.stem.startswith("torch_"), path
    for _, path in modules():
        assert not re.search(r"^\s*(import|from) .*\bpeers\b", path.read_text(), re.MULTILINE), path


def test_every_kernel_names_sample_instantiations():
    files = {path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.cu")}
    assert {kernel.file for kernel in jit.samples()} == files


def test_no_literal_sm_count():
    for path in [*KERNELS.rglob("*.cu*"), *(ROOT / "cufuse").rglob("*.py")]:
        assert not re.search(r"(?<!%)\b132\b", path.read_text()), path


def test_import_needs_no_gpu_library_and_no_models_extra():
    code = (
        "import sys, cufuse; "
        "print([m for m in ('cupy', 'gguf', 'tokenizers', 'jinja2', 'click') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_folder_of_kernels_is_installed():
    import tomllib

    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for path in sorted(p for p in KERNELS.rglob("*.cu*") if p.is_file()):
        package = ".".join(("cufuse", *path.relative_to(ROOT).parent.parts))
        assert package in tools["packages"], f"pyproject.toml: packages lacks {package}"
        kinds = tools["package-data"][package]
        assert f"*{path.suffix}" in kinds, f"pyproject.toml: {package} lacks *{path.suffix}"
