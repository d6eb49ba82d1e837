"""A model's files -> its Config and Weights: GGUF files and folders of safetensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cufuse import device, mxfp4, weights
from cufuse.checkpoint import gguf_file, hf_folder
from cufuse.checkpoint._source import CheckpointError, Plan, check, fill, half_split
from cufuse.checkpoint.gguf_file import GgufFile
from cufuse.checkpoint.hf_folder import HfFolder
from cufuse.config import Config
from cufuse.device import Array
from cufuse.mxfp4 import Mxfp4
from cufuse.upcycle import Upcycle
from cufuse.weights import Weights

__all__ = ["Checkpoint", "CheckpointError", "half_split", "load", "read_config", "tokenizer_source"]

TokenizerSource = Any  # a GGUF file's metadata, a model's folder, or None


class Checkpoint(NamedTuple):
    """A loaded model; tokenizer_source is what `tokenizer.load` takes."""

    config: Config
    weights: Weights
    tokenizer_source: TokenizerSource


def load(
    path: str | Path,
    *,
    dtype: Any,
    kind: str = "numpy",
    gpu: int = 0,
    layers: int | None = None,
    upcycle: Upcycle | None = None,
) -> Checkpoint:
    """Load a model from a GGUF file or from a folder with config.json and safetensors files.

    dtype: what the weights are converted to: float32, float16 or bfloat16 (float64 with NumPy)
    kind: where they go: "numpy", "twin" or "cupy"
    gpu: number of the GPU for "cupy"
    layers: keep only the first ones
    upcycle: make a mixture of experts of the dense model

    One array at a time is converted and moved, and packed where `weights` says so. Returns (config,
    weights, tokenizer_source). Raises FileNotFoundError, CheckpointError for a broken file, and
    Unsupported for a model or feature that cufuse does not have, or a GGUF file without the gguf
    package; then nothing stays loaded.
    """
    dtype = np.dtype(dtype)
    if dtype not in device.FLOAT_DTYPES and not (dtype == np.float64 and kind == "numpy"):
        raise TypeError(f"load: dtype is {dtype}, wanted float32, float16 or bfloat16")
    source = _open(path)
    config, plan, ignored = _describe(source)
    check(source, plan, ignored)
    if layers is not None:
        config = config.cut(layers)
    if upcycle is None:
        with _target(kind, gpu) as move:
            made = weights.assemble(config, _arrays(source, plan, config, dtype, move))
    else:
        on_host = _arrays(source, plan, config, dtype, lambda array: array)
        made = assemble(config, on_host, kind=kind, gpu=gpu, upcycle=upcycle)
    return Checkpoint(made.config, made, _tokenizer_source(source))


def assemble(
    config: Config,
    arrays: Iterable[tuple[str, Any]],
    *,
    kind: str,
    gpu: int = 0,
    upcycle: Upcycle | None = None,
) -> Weights:
    """Move NumPy arrays, made one by one, to where kernels run; upcycled first if asked for."""
    if upcycle is not None:
        config, arrays = upcycle.config(config), upcycle.arrays(config, arrays)
    with _target(kind, gpu) as move:
        return weights.assemble(config, ((name, move(array)) for name, array in arrays))


def _arrays(
    source: GgufFile | HfFolder,
    plan: Plan,
    config: Config,
    dtype: np.dtype,
    move: Callable[[np.ndarray], Array],
) -> Iterator[tuple[str, Array | Mxfp4]]:
    """Yield every array that `weights.assemble` asks for, read, converted and moved."""
    packed = weights.quantized(config)
    for name in packed:
        pairs = [(move(blocks), move(scales)) for blocks, scales in source.blocks(plan[name])]
        up = pairs[1] if len(pairs) == 2 else None
        yield name, mxfp4.from_blocks(*pairs[0], up=up, dtype=dtype)
        del pairs, up
    replaced = {part for parts in packed.values() for part in parts}
    for name, wanted in weights.shapes(config).items():
        if name not in replaced:
            yield (
                name,
                move(fill(source, plan[name], wanted, weights.dtype_of(name, dtype), config)),
            )


def read_config(path: str | Path) -> Config:
    """Read a model's sizes and choices without loading its weights; raises as `load` does."""
    return _describe(_open(path))[0]


def tokenizer_source(path: str | Path) -> TokenizerSource:
    """Return what `tokenizer.load` needs: a GGUF file's metadata or a folder; None without one."""
    return _tokenizer_source(_open(path))


def _open(path: str | Path) -> GgufFile | HfFolder:
    path = Path(path)
    if path.is_dir():
        return HfFolder(path.resolve())
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give a GGUF file or a model's folder")
    with path.open("rb") as file:
        magic = file.read(len(gguf_file.MAGIC))
    if magic == gguf_file.MAGIC:
        return GgufFile(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is one file of a model; give its folder, {path.parent}")
    raise CheckpointError(f"{path} is not a GGUF file; give one, or a folder with config.json")


def _describe(source: GgufFile | HfFolder) -> tuple[Config, Plan, tuple[str, ...]]:
    if isinstance(source, GgufFile):
        config = gguf_file.read_config(source)
        return config, gguf_file.read_plan(source, config), (gguf_file.ROPE_FACTORS,)
    config = hf_folder.read_config(source)
    return config, hf_folder.read_plan(source, config), hf_folder.ignored(source, config)


def _tokenizer_source(source: GgufFile | HfFolder) -> TokenizerSource:
    if isinstance(source, GgufFile):
        kept = source.metadata.under("tokenizer.")
        return kept if "tokenizer.ggml.model" in kept else None
    return source.path if (source.path / "tokenizer.json").is_file() else None


@contextlib.contextmanager
def _target(kind: str, gpu: int) -> Any:
    """Yield the function that moves a NumPy array to where the weights go."""
    if kind == "numpy":
        yield lambda array: array
    elif kind == "twin":
        yield device.twin
    elif kind == "cupy":
        cupy = device.require_cupy()
        problem = device.gpu_problem()
        if problem:
            raise device.Unsupported(f"load: {problem}")

        def move(array: np.ndarray) -> Array:
            return cupy.asarray(array)

        with cupy.cuda.Device(gpu):
            yield move
    else:
        raise ValueError(f'load: kind is {kind!r}, wanted "numpy", "twin" or "cupy"')
