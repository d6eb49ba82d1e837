"""What keeps `.ci/run` honest: every kernel runs on the CPU, and without g++ nothing passes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: object, **variables: str) -> subprocess.CompletedProcess:
    """Run a command in the checkout, whatever runs this; its words come back together."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != "CXX" and not name.startswith("PYTEST_")
    }
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**kept, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def pytest_of(*arguments: object, **variables: str) -> subprocess.CompletedProcess:
    """Run pytest on a few tests, in a process of its own."""
    return run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, **variables
    )


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_kernel_that_no_test_ran_is_named(tmp_path, workers):
    ran = tmp_path / "ran"
    done = pytest_of("tests/test_argmax.py", "-m", "cpu_kernels", *workers, "--kernels-ran", ran)
    assert done.returncode == 0, done.stdout
    assert set(ran.read_text().splitlines()) == {"unfused/argmax.cu argmax"}
    judge = (sys.executable, ROOT / ".ci" / "every_kernel_ran.py", ran)
    done = run(*judge)
    assert done.returncode == 1
    assert "no test ran fused/add_layernorm.cu add_layernorm, " in done.stdout
    assert "unfused/argmax.cu" not in done.stdout
    with ran.open("a") as file:
        file.write("".join(f"{kernel}\n" for kernel in done.stdout[12:].strip().split(", ")))
    assert run(*judge).returncode == 0


def test_without_a_compiler_the_kernels_tests_fail(tmp_path):
    """They fail with a sentence, for whoever runs them, and are not skipped."""
    chosen = ("tests/test_primitives.py", "-m", "cpu_kernels", "-k", "copies_arrive")
    done = pytest_of(*chosen, PATH=str(tmp_path))
    assert done.returncode == 1, done.stdout
    assert "a C++ compiler and g++ is not there: apt install g++" in done.stdout
    assert " passed" not in done.stdout and " skipped" not in done.stdout


def test_ci_without_a_compiler_fails_at_once(tmp_path):
    """In a folder of its own: should the sentence fail to come, nothing here is touched."""
    (tmp_path / "bin").mkdir()
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    done = run(tmp_path / ".ci" / "run", PATH=str(tmp_path / "bin"))
    assert done.returncode == 1
    assert done.stdout.endswith("with g++ and it is not there: apt install g++\n")
    assert len(done.stdout.splitlines()) == 1
