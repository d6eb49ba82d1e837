"""What is too old is said before anything is compiled, and what the driver says becomes GpuInfo."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cufuse import device


@pytest.fixture
def driver(monkeypatch):
    """A made-up CuPy with one GPU; a test changes what it says."""
    properties = {
        "name": b"Some GPU",
        "major": 9,
        "minor": 0,
        "multiProcessorCount": 78,
        "sharedMemPerBlockOptin": 227 * 1024,
        "totalGlobalMem": 1 << 36,
        "l2CacheSize": 1 << 25,
    }
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda gpu: properties,
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 12090,
    )
    made = SimpleNamespace(
        cupy=SimpleNamespace(__version__="14.2.0", cuda=SimpleNamespace(runtime=runtime)),
        properties=properties,
        runtime=runtime,
    )
    monkeypatch.setattr(device, "require_cupy", lambda: made.cupy)
    for cached in (device.gpu_info, device.gpu_problem):
        monkeypatch.setattr(device, cached.__name__, cached.__wrapped__)
    return made


def test_gpu_info_is_what_the_driver_says(driver):
    assert device.gpu_problem() is None
    info = device.gpu_info(0)
    assert (info.name, info.arch, info.sm_count) == ("Some GPU", "90a", 78)
    assert (info.driver, info.cuda_runtime) == ("13.0", "12.9")


@pytest.mark.parametrize(
    "number, arch",
    [((8, 0), "80"), ((8, 6), "86"), ((10, 0), "100a"), ((11, 0), "110"), ((12, 0), "120a")],
)
def test_architectures_that_run(driver, number, arch):
    driver.properties["major"], driver.properties["minor"] = number
    assert device.gpu_info(0).arch == arch


def test_a_gpu_that_is_too_old_is_named(driver):
    driver.properties |= {"name": b"Tesla T4", "major": 7, "minor": 5}
    wanted = "Tesla T4 is sm_75; the kernels need sm_80 or newer"
    with pytest.raises(device.Unsupported, match=wanted):
        device.gpu_info(0)
    assert device.gpu_problem() == wanted


@pytest.mark.parametrize("version", ["13.6.0", "14.0.0", "14.1.1"])
def test_a_cupy_that_is_too_old_is_named(driver, version):
    driver.cupy.__version__ = version
    with pytest.raises(device.Unsupported, match=f"CuPy {version} is too old, wanted 14.2"):
        device.gpu_info(0)
    assert "pip install" in device.gpu_problem()


@pytest.mark.parametrize("version", ["14.2.0rc1", "14.10.0", "15.0.0"])
def test_newer_cupys_are_taken(driver, version):
    driver.cupy.__version__ = version
    assert device.gpu_problem() is None


def test_no_gpu_is_one_sentence(driver):
    driver.runtime.getDeviceCount = lambda: 0
    assert device.gpu_problem() == "the CUDA driver finds no GPU"

    def broken():
        raise RuntimeError("cudaErrorInsufficientDriver")

    driver.runtime.getDeviceCount = broken
    assert device.gpu_problem() == "no GPU can be used (cudaErrorInsufficientDriver)"
