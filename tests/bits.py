"""Kernels whose answers are compared, bit by bit, between the CPU twin and a GPU.

    python -P tests/bits.py --write tests/data/h200_bits.json

runs them on this machine's GPU and stores what they answer; `test_bits.py` compares. EXACT holds
kernels of additions, multiplications, fma, conversions and integer work: every machine has to
answer the same bits. ROUNDED holds kernels with mma or approximations: every machine has to stay
within the bound that stands there. All inputs come from hashes, so that they too are the same
everywhere.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cufuse import device, jit, ops, reference
from cufuse.device import Array
from cufuse.reference import random as counter

PRIMITIVES = Path(__file__).resolve().parent / "twin" / "primitives"
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
To = Callable[[np.ndarray], Array]
_SAMPLE = 12  # values of an answer that are stored beside its digest


# ---- inputs -------------------------------------------------------------------------------------


def uniform(shape: tuple[int, ...], dtype: Any, stream: int, half_width: float = 1.0) -> np.ndarray:
    """Return numbers in [-half_width, half_width)."""
    return counter.hash_uniform(shape, dtype, seed=9, stream=stream, half_width=half_width)


def words(n: int, stream: int) -> np.ndarray:
    """Return uint32 [n], any of them as likely: as floats, every exponent and every kind of NaN."""
    return counter.hash_word(np.arange(n, dtype=np.uint32), counter.hash_key(9, stream, 0))


def whole(shape: tuple[int, ...], stream: int, below: int) -> np.ndarray:
    """Return int32 from 0 to below - 1."""
    return (words(math.prod(shape), stream) % np.uint32(below)).astype(np.int32).reshape(shape)


def hard_floats() -> np.ndarray:
    """Return float32 zeros, subnormals, their neighbours, infinities and NaNs of several kinds."""
    magnitudes = [0, 1, 2, 0x3FFFFF, 0x7FFFFF, 0x800000, 0x800001, 0xFFFFFF, 0x1000000, 0x34000000]
    magnitudes += [0x3F800000, 0x3F800001, 0x7F7FFFFF, 0x7F7FFFFE, 0x7F800000]
    magnitudes += [0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    bits = np.array(magnitudes, np.uint32)
    return np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)


def halfway(dtype: Any, every: int) -> np.ndarray:
    """Return float32 numbers halfway between neighbours of a narrow dtype, and their neighbours.

    every: take one of so many pairs, beside the smallest and the largest
    """
    bits = np.arange(2 ** (8 * np.dtype(dtype).itemsize - 1), dtype=np.uint32)
    values = bits.astype(f"u{np.dtype(dtype).itemsize}").view(dtype).astype(np.float64)
    values = values[np.isfinite(values)]
    between = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    chosen = np.concatenate([between[:70], between[70:-70:every], between[-70:]]).view(np.uint32)
    around = np.concatenate([chosen, chosen - np.uint32(1), chosen + np.uint32(1)])
    return np.concatenate([around, around | np.uint32(1 << 31)]).view(np.float32)


def launch(file: str, *template: Any, block: int, grid: int, like: Array, **args: Any) -> None:
    """Run a small kernel of tests/twin/primitives; its name is its file's, or "file.cu:name"."""
    file, _, name = file.partition(":")
    made = jit.kernel(f"{file}.cu", name or file, *template, root=PRIMITIVES)
    made.launch(grid, block, args, like=like)


# ---- one right answer ---------------------------------------------------------------------------

Answers = Iterator[tuple[str, Array]]


def elementwise(to: To) -> Answers:
    """Yield sums and products of arrays, and of an array and a row."""
    for name, dtype in DTYPES.items():
        hard = hard_floats().astype(dtype)
        a = np.concatenate([np.repeat(hard, len(hard)), uniform((760,), dtype, 1)]).reshape(-1, 8)
        b = np.concatenate([np.tile(hard, len(hard)), uniform((760,), dtype, 2, 1e3)]).reshape(
            -1, 8
        )
        for op in (ops.add, ops.mul):
            yield f"{op.__name__} {name}", op(to(a), to(b))
            yield (
                f"{op.__name__} row {name}",
                op(to(uniform((5, 130), dtype, 3)), to(a.ravel()[:130])),
            )


def arithmetic(to: To) -> Answers:
    """Yield a + b, a - b, a b and fma(a, b, c) of all kinds of floats."""
    hard = hard_floats()
    a, b = np.repeat(hard, len(hard)), np.tile(hard, len(hard))
    c = np.resize(hard[::-1], len(a))
    pairs = [(a, b, c), tuple(words(4096, s).view(np.float32) for s in (11, 12, 13))]
    pairs += [tuple(uniform((4096,), np.float32, s, w) for s, w in ((14, 1), (15, 1), (16, 1e-7)))]
    x, y, z = (np.concatenate(column) for column in zip(*pairs, strict=True))
    out = to(np.zeros((len(x), 4), np.float32))
    args = {"a": to(x), "b": to(y), "c": to(z), "out": out, "n": len(x)}
    launch("arithmetic:float_arithmetic", block=128, grid=-(-len(x) // 128), like=out, **args)
    yield "sum, difference, product, fma", out


def integers(to: To) -> Answers:
    """Yield hashes, order keys and ranks, and floats rounded to integers and back."""
    a = np.concatenate([hard_floats().view(np.uint32), words(2000, 21)])
    out = to(np.zeros((len(a), 8), np.uint64))
    args = {"a": to(a), "b": to(words(len(a), 22)), "out": out, "n": len(a)}
    launch("arithmetic:integer_arithmetic", block=128, grid=-(-len(a) // 128), like=out, **args)
    yield "hashes and keys", out
    small = np.arange(-9, 10, dtype=np.float32) / 2
    x = np.concatenate(
        [small, uniform((900,), np.float32, 23, 2.0**30), uniform((81,), np.float32, 24, 99)]
    )
    high = words(len(x), 25).astype(np.uint64) << np.uint64(32)
    wide = (high | words(len(x), 26)) >> (words(len(x), 27) % np.uint32(64)).astype(np.uint64)
    rounded = to(np.zeros((len(x), 3), np.int64))
    floats = to(np.zeros((len(x), 4), np.float32))
    args = {"x": to(x), "whole": to(wide), "rounded": rounded, "wide": floats, "n": len(x)}
    launch("arithmetic:integer_conversions", block=128, grid=-(-len(x) // 128), like=out, **args)
    yield "floats to integers", rounded
    yield "integers to floats", floats


def conversions(to: To) -> Answers:
    """Yield float32 rounded to 16 and 8 bits, and every 16- and 8-bit value widened."""
    for name, dtype in list(DTYPES.items())[1:]:
        x = np.concatenate([hard_floats(), words(5000, 31).view(np.float32), halfway(dtype, 23)])
        every = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(dtype)
        narrow, wide = to(np.zeros(x.size, dtype)), to(np.zeros(65536, np.float32))
        args = {"x": to(x), "narrow": narrow, "every": to(every), "wide": wide, "n": x.size}
        launch("convert", dtype, block=256, grid=16, like=wide, **args)
        yield f"to {name}", to_numpy(narrow).view(np.uint16)  # which NaN is part of the answer
        yield f"from {name}", wide
    for name in ("e4m3", "e5m2"):
        dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[name]
        x = np.concatenate([hard_floats(), words(5000, 32).view(np.float32), halfway(dtype, 1)])
        bits, wide = to(np.zeros(x.size, np.uint8)), to(np.zeros(256, np.float32))
        every = to(np.arange(256, dtype=np.uint32).astype(np.uint8))
        args = {"x": to(x), "bits": bits, "narrow": every, "wide": wide, "n": x.size}
        launch("convert_fp8", name, block=128, grid=-(-x.size // 128), like=wide, **args)
        yield f"to {name}", bits
        yield f"from {name}", wide


def moved(to: To) -> Answers:
    """Yield what embed, rope, append and advance write."""
    for name, dtype in DTYPES.items():
        ids, table = whole((3, 5), 41, 50), uniform((50, 72), dtype, 42)
        start = np.array([0, 3, 30], np.int32)
        places, kind = uniform((40, 72), dtype, 43), uniform((72,), dtype, 44)
        yield (
            f"embed {name}",
            ops.embed(
                to(ids),
                to(table),
                scale=3.7,
                start=to(start),
                position_table=to(places),
                token_type=to(kind),
            ),
        )
        cos, sin = (to(uniform((40, 12), np.float32, s)) for s in (45, 46))
        x, positions = uniform((6, 3, 40), dtype, 47), whole((6,), 48, 40)
        for interleaved in (False, True):
            turned = ops.rope(to(x), cos, sin, to(positions), interleaved=interleaved)
            yield f"rope {'interleaved ' if interleaved else ''}{name}", turned
        caches = [to(np.zeros((3, 2, 40, 40), dtype)) for _ in range(2)]
        qkv, first = uniform((3, 4, 8 * 40), dtype, 49), to(start)
        yield (
            f"rope_append {name}",
            ops.rope_append(
                to(qkv),
                start=first,
                k_cache=caches[0],
                v_cache=caches[1],
                n_heads=4,
                cos=cos,
                sin=sin,
            ),
        )
        for kind_of, cache in zip(("keys", "values"), caches, strict=True):
            yield f"rope_append's {kind_of} {name}", cache
        k, v = (to(uniform((3, 4, 2, 40), dtype, s)) for s in (50, 51))
        ops.append(k, v, first, *caches)
        yield f"append {name}", caches[0]


def chosen(to: To) -> Answers:
    """Yield the ids and values that argmax and topk choose, ties among them, and hashed numbers."""
    for name, dtype in DTYPES.items():
        x = uniform((7, 1031), dtype, 61)
        x[2] = np.round(x[2].astype(np.float32) * 4).astype(dtype)  # many ties
        x[3, 77], x[4, 5] = np.nan, np.inf
        yield f"argmax {name}", ops.argmax(to(x))
        values, ids = ops.topk(to(x[:, :130]), 9)
        yield f"topk {name}", values
        yield f"topk's ids {name}", ids
        y = to(np.zeros(999, dtype))
        args = {"y": y, "count": 999, "seed": 5, "stream": 2**63 + 7}
        made = jit.kernel("unfused/hash_uniform.cu", "hash_uniform", dtype)
        scale = {"step": float(np.float32(0.7) / np.float32(2**23)), "center": 0.125}
        made.launch(1, 256, args | scale, like=y)
        yield f"hash_uniform {name}", y


def products(to: To) -> Answers:
    """Yield products of a few rows, summed by fma in a fixed order, and all float32 ones."""
    for name, dtype in DTYPES.items():
        k = 712
        x, w = uniform((5, k), dtype, 71), uniform((23, k), dtype, 72)
        b, residual = uniform((23,), dtype, 73), uniform((5, 23), dtype, 74)
        yield (
            f"linear {name}",
            ops.linear(to(x), to(w), to(b), activation="relu2", residual=to(residual)),
        )
        yield f"matmul {name}", ops.matmul(to(x[:1]), to(w))
        yield (
            f"gated_linear {name}",
            ops.gated_linear(to(x), to(w), to(w[::-1].copy()), activation="relu"),
        )
        yield f"router_logits {name}", ops.router_logits(to(x), to(w), to(b))
        ids, experts = whole((5, 3), 75, 4), uniform((4, 19, k), dtype, 76)
        made = ops.expert_matmul(to(x), to(ids), to(experts))
        yield f"expert_matmul {name}", made
        weights = uniform((5, 3), np.float32, 77)
        yield (
            f"combine {name}",
            ops.combine(made, to(ids), to(weights), to(uniform((5, 19), dtype, 78))),
        )
        q, keys = uniform((2, 3, 4, 72), dtype, 79), uniform((2, 150, 2, 72), dtype, 80)
        yield f"scores {name}", ops.scores(to(q), to(keys))
        p = uniform((2, 4, 3, 150), dtype, 81)
        yield f"values {name}", ops.values(to(p), to(keys))
    x, w = uniform((70, 130), np.float32, 82), uniform((90, 130), np.float32, 83)
    yield "linear of 70 rows float32", ops.linear(to(x), to(w))
    a, b = (words(n, s).view(np.int8).reshape(-1, 32) for n, s in ((128, 84), (64, 85)))
    out = to(whole((16, 8), 86, 2000))
    launch("mma_s8", block=32, grid=1, like=out, a=to(a), b=to(b), out=out)
    yield "mma of int8", out


EXACT = {
    made.__name__: made
    for made in (elementwise, arithmetic, integers, conversions, moved, chosen, products)
}


# ---- mma and approximations ---------------------------------------------------------------------

# What every machine computed, its float64 value, and what a difference is relative to: an array, or
# None for the L2 norm of each row.
Compared = Iterator[tuple[str, Array, np.ndarray, np.ndarray | None]]

# The largest difference from float64. Functions: 4 units in the last place, where CUDA promises 2.
# mma: products are exact; a tensor core adds them after cutting off what lies below the largest's
# last bits, for 8-bit floats 13 bits of it. 16-bit results: the rounding of the result, twice for
# attention, whose probabilities are rounded too.
BOUNDS = {
    "functions": 2.0**-21,
    "mma_16bit": 2.0**-20,
    "mma_fp8": 2.0**-12,
    "float32": 3e-6,
    "float16": 6e-4,
    "bfloat16": 4e-3,
}


def functions(to: To) -> Compared:
    """Yield rsqrt, exp, tanh and erf."""
    x = np.concatenate([uniform((3000,), np.float32, 101, 10.0), uniform((999,), np.float32, 102)])
    out = to(np.zeros((4, len(x)), np.float32))
    launch(
        "approximations", block=128, grid=-(-len(x) // 128), like=out, x=to(x), out=out, n=len(x)
    )
    double = np.float64
    scaled = np.float32(0.4) * x
    wanted = [
        1 / np.sqrt((x * x + np.float32(1e-5)).astype(double)),
        np.exp((np.float32(8) * x).astype(double)),
        np.tanh(x.astype(double)),
        np.array([math.erf(v) for v in scaled.tolist()]),
    ]
    for i, name in enumerate(("rsqrtf", "expf", "tanhf", "erff")):
        yield name, out[i], wanted[i], np.abs(wanted[i])


def mma_16bit(to: To) -> Compared:
    """Yield one tensor-core product of 16-bit floats."""
    for name, dtype in list(DTYPES.items())[1:]:
        a, b = uniform((16, 16), dtype, 111), uniform((8, 16), dtype, 112)
        yield _mma(to, f"mma of {name}", "mma_16bit", (dtype,), a, b)


def mma_fp8(to: To) -> Compared:
    """Yield one tensor-core product of 8-bit floats."""
    types = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    for left, right in (("e4m3", "e4m3"), ("e5m2", "e4m3")):
        a, b = uniform((16, 32), types[left], 113), uniform((8, 32), types[right], 114)
        yield _mma(to, f"mma of {left} and {right}", "mma_fp8", (left, right), a, b)


def _mma(to: To, name: str, file: str, template: tuple, a: np.ndarray, b: np.ndarray) -> Any:
    c = uniform((16, 8), np.float32, 115)
    out = to(c.copy())
    packed = {"a": to(a.view(np.uint32)), "b": to(b.view(np.uint32))}
    launch(file, *template, block=32, grid=1, like=out, out=out, **packed)
    a, b = a.astype(np.float64), b.astype(np.float64)
    return name, out, c + a @ b.T, np.abs(c) + np.abs(a) @ np.abs(b.T)


def _ops(to: To, name: str) -> Compared:
    dtype = DTYPES[name]

    def both(op: str, *arrays: np.ndarray, **options: str) -> Any:
        got = getattr(ops, op)(*(to(array) for array in arrays), **options)
        wide = [a.astype(np.float64) if a.dtype == dtype else a for a in arrays]
        wanted = getattr(reference, op)(*wide, **options)
        if isinstance(wanted, tuple):  # a norm returns its sum too
            wanted = wanted[0]
        what = " ".join([op, *options.values()])
        return f"{what} {name}", got, wanted, None

    x, weight = uniform((5, 520), dtype, 121, 3.0), uniform((520,), dtype, 122)
    yield both("rmsnorm", x, weight)
    yield both("layernorm", x, weight, weight)
    yield both("softmax", x)
    for activation in ("gelu", "gelu_tanh", "silu", "quick_gelu"):
        yield both("activation", x, kind=activation)
    many, w = uniform((70, 136), dtype, 123), uniform((90, 136), dtype, 124)
    yield both("linear", many, w)
    yield both("gated_linear", many, w, w[::-1].copy())
    for q_len in (1, 33):
        q = uniform((2, q_len, 4, 64), dtype, 125, 2.0)
        k, v = (uniform((2, 150, 2, 64), dtype, stream, 2.0) for stream in (126, 127))
        what, *rest = both("attention", q, k, v)
        yield (f"{what} of {q_len}", *rest)
    logits = uniform((16, 520), dtype, 128)
    _, weights = ops.moe_route(to(x), to(logits), k=3)
    _, wanted = reference.moe_route(x.astype(np.float64), logits.astype(np.float64), k=3)
    yield f"moe_route's weights {name}", weights, wanted, None


def _of(name: str) -> Callable[[To], Compared]:
    return lambda to: _ops(to, name)


ROUNDED: dict[str, Callable[[To], Compared]] = {
    "functions": functions,
    "mma_16bit": mma_16bit,
    "mma_fp8": mma_fp8,
    **{name: _of(name) for name in DTYPES},
}


# ---- what is stored -----------------------------------------------------------------------------


def to_numpy(x: Array) -> np.ndarray:
    """Bring an array to the host as a plain NumPy array."""
    return np.ascontiguousarray(x.view(np.ndarray) if isinstance(x, np.ndarray) else x.get())


def as_words(x: np.ndarray) -> np.ndarray:
    """Return the bits of an array, flat. A float NaN is any NaN: a GPU has one, a CPU passes on."""
    made = x.view(f"u{x.dtype.itemsize}").copy()
    if x.dtype.kind not in "iu":
        made[np.isnan(x.astype(np.float32))] = np.uint64(2 ** (8 * x.dtype.itemsize - 1) - 1)
    return made.ravel()


def places(size: int) -> np.ndarray:
    """Return the indices of the stored values."""
    return np.unique(np.linspace(0, size - 1, _SAMPLE).astype(int))


def answer(x: Array) -> dict[str, str]:
    """Describe an exact answer: its shape, the digest of its bits, and a few values in hex."""
    made = to_numpy(x)
    bits = as_words(made)
    return {
        "shape": f"{made.dtype} {list(made.shape)}",
        "sha256": hashlib.sha256(bits.tobytes()).hexdigest(),
        "sample": " ".join(f"{int(bits[i]):x}" for i in places(bits.size)),
    }


def difference(got: Array, wanted: np.ndarray, scale: np.ndarray | None) -> float:
    """Return the largest difference from float64, relative to scale or to each row's L2 norm."""
    made = to_numpy(got).astype(np.float64)
    if not np.isfinite(made).all():
        return math.inf
    if scale is not None:
        return float((np.abs(made - wanted) / scale).max())
    rows, right = made.reshape(-1, made.shape[-1]), np.reshape(wanted, (-1, made.shape[-1]))
    distance = np.linalg.norm(rows - right, axis=-1)
    return float((distance / np.linalg.norm(right, axis=-1)).max())


def exact(group: str, to: To) -> dict[str, dict[str, str]]:
    """Run a group of EXACT and describe its answers."""
    with np.errstate(invalid="ignore", over="ignore"):  # the inputs hold all kinds of floats
        return {name: answer(x) for name, x in EXACT[group](to)}


def rounded(group: str, to: To) -> dict[str, float]:
    """Run a group of ROUNDED; returns each kernel's largest difference from float64."""
    return {name: difference(*rest) for name, *rest in ROUNDED[group](to)}


def collect(to: To) -> dict[str, Any]:
    """Run everything."""
    return {
        "exact": {group: exact(group, to) for group in EXACT},
        "rounded": {group: rounded(group, to) for group in ROUNDED},
    }


def main() -> None:
    """Run everything on a GPU, or on the twin to see that it runs, and print or store it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu-kernels"])
    parser.add_argument("--write", type=Path, help="file to store the answers in, as JSON")
    options = parser.parse_args()
    if options.device == "cuda":
        problem = device.gpu_problem()
        if problem:
            sys.exit(f"--device cuda: {problem}")
        info = device.gpu_info()
        made = (
            f"{info.name}, sm_{info.arch}, driver for CUDA {info.driver}, CUDA {info.cuda_runtime}"
        )
        found = collect(device.require_cupy().asarray)
    else:
        made, found = "the CPU twin", collect(device.twin)
    text = json.dumps({"made on": made, **found}, indent=1) + "\n"
    if options.write is None:
        print(text, end="")
    else:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(text)
        worst = {group: max(of.values()) for group, of in found["rounded"].items()}
        print(f"{options.write}: {made}; largest differences from float64: {worst}")


if __name__ == "__main__":
    main()
