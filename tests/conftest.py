"""One body for three kinds of arrays: NumPy (reference), CuPy (`gpu`) and the CPU twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cufuse import device, jit

DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}

# Relative L2 error that one op may have against float64 on the same inputs.
TOLERANCE = {"float32": 1e-5, "float16": 6e-4, "bfloat16": 4e-3}

KERNELS = jit.sources()
RAN: set[str] = set()  # the file and the name of every kernel that ran on the twin in this process


def pytest_addoption(parser: pytest.Parser) -> None:
    """Another seed interleaves the twin's threads differently in every test."""
    parser.addoption("--twin-seed", type=int, default=0, help="interleaves the twin's threads")
    parser.addoption(
        "--twin-share",
        type=int,
        default=1,
        help="of a test's cases on the twin run every n-th, with another seed others; no slow ones",
    )
    parser.addoption("--kernels-ran", type=Path, help="append the twin's kernels to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Note which kernels run on the twin, where the command line asks for it."""
    if not config.getoption("--kernels-ran"):
        return
    run = jit._host_run

    def noted(made: jit.Kernel, *rest: Any) -> None:
        run(made, *rest)
        if made.path.is_relative_to(KERNELS):  # and is no copy with a fault planted into it
            RAN.add(f"{made.file} {made.name}")

    jit._host_run = noted


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Add this process' kernels to the file; with xdist each worker comes here."""
    path = session.config.getoption("--kernels-ran")
    if path and RAN:
        with path.open("a") as file:
            file.write("".join(f"{kernel}\n" for kernel in sorted(RAN)))


@pytest.fixture(autouse=True)
def twin_seed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test with the seed of the command line, where it sets no other."""
    with jit.twin_seed(request.config.getoption("--twin-seed")):
        yield


def _of_share(items: list[pytest.Item], share: int, seed: int) -> list[pytest.Item]:
    """Keep every share-th case of each test on the twin, at least one."""
    cases: dict[tuple[Any, ...], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("cpu_kernels") and not item.get_closest_marker("slow"):
            cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    return [
        item for found in cases.values() for item in found[seed % min(share, len(found)) :: share]
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU the gpu tests do not run; nothing else is ever skipped."""
    share = config.getoption("--twin-share")
    if share > 1:
        kept = _of_share(items, share, config.getoption("--twin-seed"))
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    if device.gpu_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(
    params=[
        "numpy",
        pytest.param("twin", marks=pytest.mark.cpu_kernels),
        pytest.param("cupy", marks=pytest.mark.gpu),
    ]
)
def to(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Move a NumPy array to the kind of array under test."""
    return {"numpy": np.asarray, "twin": device.twin, "cupy": _to_gpu}[request.param]


@pytest.fixture(
    params=[
        pytest.param("twin", marks=pytest.mark.cpu_kernels),
        pytest.param("cupy", marks=pytest.mark.gpu),
    ]
)
def to_kernels(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Move a NumPy array to where kernels run: the twin or the GPU."""
    return {"twin": device.twin, "cupy": _to_gpu}[request.param]


def _to_gpu(x: Any) -> Any:
    import cupy

    return cupy.asarray(x)


def to_numpy(x: Any) -> np.ndarray:
    """Bring a result back to NumPy."""
    return np.asarray(x) if isinstance(x, np.ndarray) else x.get()


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random numbers; the seed is printed with a failure."""
    seed = int(np.random.SeedSequence().entropy) % 2**32  # type: ignore[arg-type]
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def poisoned(shape: tuple[int, ...], dtype: Any, to: Callable[[Any], Any]) -> Any:
    """Make an output full of NaN (or -1): an element that is not written is seen."""
    fill = -1 if np.dtype(dtype).kind in "iu" else np.nan
    return to(np.full(shape, fill, dtype))


def relative_error(got: Any, wanted: np.ndarray) -> float:
    """Return |got - wanted| / |wanted| in the L2 norm; infinite when anything is not finite."""
    g, w = to_numpy(got).astype(np.float64), np.asarray(wanted, np.float64)
    assert g.shape == w.shape, f"got {g.shape}, wanted {w.shape}"
    if not np.isfinite(g).all():
        return float("inf")
    return float(np.linalg.norm(g - w) / max(np.linalg.norm(w), 1e-30))


def assert_close(got: Any, wanted: np.ndarray, dtype: Any, factor: float = 1.0) -> None:
    """Assert the dtype and the relative error of one op against its float64 oracle."""
    assert got.dtype == np.dtype(dtype), f"dtype {got.dtype}, wanted {np.dtype(dtype)}"
    error = relative_error(got, wanted)
    limit = TOLERANCE[np.dtype(dtype).name] * factor
    if np.size(wanted) < 64:  # roundings do not average out: two of them may point the same way
        limit = max(limit, float(ml_dtypes.finfo(dtype).eps))
    assert error <= limit, f"relative error {error:.3g} over {limit:.3g}"
