"""Random numbers that depend on a counter alone; kernels_cu/device/hash.cuh makes the same bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_MASK = 2**64 - 1
_CHUNK = 1 << 15  # elements whose intermediates stay in the first cache levels


def mix64(x: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31


def hash_key(seed: int, stream: int, block: int) -> tuple[int, int]:
    """Return the two 32-bit halves of the key that tells one stream of numbers from another."""
    key = mix64(mix64(mix64(seed) ^ stream) ^ block)
    return key & 0xFFFFFFFF, key >> 32


def hash_word(i: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Return 32 random bits for each uint32 counter."""
    x = i ^ np.uint32(key[0])
    shifted = x >> np.uint32(17)
    x ^= shifted
    x *= np.uint32(0xED5AD4BB)
    np.right_shift(x, np.uint32(11), out=shifted)
    x ^= shifted
    x += np.uint32(key[1])
    x *= np.uint32(0xAC4C1B51)
    np.right_shift(x, np.uint32(15), out=shifted)
    x ^= shifted
    x *= np.uint32(0x31848BAB)
    np.right_shift(x, np.uint32(14), out=shifted)
    x ^= shifted
    return x


def hash_uniform(
    shape: tuple[int, ...],
    dtype: Any,
    *,
    seed: int,
    stream: int,
    half_width: float,
    center: float = 0.0,
) -> np.ndarray:
    """Return numbers uniform in [center - half_width, center + half_width).

    Element i depends on (seed, stream, i) alone. Values are multiples of half_width / 2^23 in
    float32, rounded to dtype.
    """
    y = np.empty(math.prod(shape), dtype)
    step = np.float32(half_width) * np.float32(2.0**-23)
    offsets = np.arange(min(_CHUNK, y.size), dtype=np.uint32)
    for begin in range(0, y.size, _CHUNK):
        part = y[begin : begin + _CHUNK]
        counter = offsets[: part.size] + np.uint32(begin & 0xFFFFFFFF)
        word = hash_word(counter, hash_key(seed, stream, begin >> 32))
        word >>= np.uint32(8)
        whole = word.view(np.int32)
        whole -= np.int32(1 << 23)
        value = whole.astype(np.float32)
        value *= step
        value += np.float32(center)
        part[...] = value
    return y.reshape(shape)
