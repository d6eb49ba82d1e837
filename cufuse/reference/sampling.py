"""Argmax, and sampling with temperature, top-k, top-p and min-p.

The arithmetic is float32 additions, multiplications and divisions in a fixed order and whole
numbers, whatever the input's dtype: kernels_cu/device/sampling.cuh makes the same bits, so a seed
draws the same tokens everywhere.
"""

from __future__ import annotations

import numpy as np

from cufuse.reference.random import hash_key, hash_word

_F = np.float32


def argmax(x: np.ndarray) -> np.ndarray:
    """Return the index of each row's largest value, the lower of equal ones; -1 with a NaN."""
    v = np.asarray(x)
    v = v if v.dtype == np.float64 else v.astype(np.float32)
    return np.where(np.isnan(v).any(-1), -1, v.argmax(-1)).astype(np.int32)


def sample(
    logits: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    step: int | np.ndarray = 0,
) -> np.ndarray:
    """Draw one id per row by Gumbel-max over `kept` ids; -1 with a NaN or without any logit."""
    if temperature == 0:
        return argmax(logits)
    steps = np.broadcast_to(np.asarray(step), len(logits))
    ids = np.full(len(logits), -1, np.int32)
    for row, values in enumerate(logits):
        mask = kept(values, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        if not mask.any():
            continue
        (candidates,) = np.nonzero(mask)
        word = hash_word(candidates.astype(np.uint32), hash_key(seed, int(steps[row]), row))
        keys = scaled(values.astype(np.float32)[candidates], temperature) + gumbel(word)
        ids[row] = candidates[keys.argmax()]
    return ids


def kept(
    logits: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Tell which ids of one row [vocab] can be drawn; none with a NaN.

    The ids stand in the order (-logit, id). top_k keeps the first k of them; top_p the shortest
    beginning of what is left whose share of its probability reaches top_p; min_p those with at
    least min_p times the largest probability.
    """
    v = np.asarray(logits).astype(np.float32)
    n = len(v)
    if np.isnan(v).any():
        return np.zeros(n, bool)
    order = np.argsort(-v, kind="stable")
    count = min(top_k, n) if top_k else n
    p = probability(v, temperature)
    if top_p < 1:
        mass = (p[order[:count]] * _F(mass_scale(n))).astype(np.uint64)
        total = int(mass.sum())
        count = 1 + int(np.searchsorted(np.cumsum(mass), mass_of_share(total, share(top_p))))
    mask = np.zeros(n, bool)
    mask[order[:count]] = True
    return mask & (p >= _F(min_p)) & (v > -np.inf)


def mass_scale(n: int) -> float:
    """The unit of probability mass: sums of n of them stay below 2^62."""
    return 2.0 ** min(40, 62 - n.bit_length())


def share(top_p: float) -> int:
    """Return top_p in units of 2^-32, at least one of them; 16 of 20 equal ids are a 0.8 share."""
    return max(1, int(top_p * 2**32))


def mass_of_share(total: int, share: int) -> int:
    """Return that share of a total, rounded up."""
    return -(-total * share // 2**32)


def inverse(temperature: float) -> np.float32:
    """Return what logits are multiplied by."""
    return _F(1.0 / temperature)


def scaled(v: np.ndarray, temperature: float) -> np.ndarray:
    """Divide by the temperature; what is finite stays finite."""
    largest = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        s = v * inverse(temperature)
    return np.where(np.isfinite(v), np.clip(s, -largest, largest), s)


def probability(v: np.ndarray, temperature: float) -> np.ndarray:
    """Return probabilities relative to the largest, which is exactly 1."""
    top = v.max()
    with np.errstate(invalid="ignore", over="ignore"):
        z = np.where(v == top, _F(0), (v - top) * inverse(temperature))
    return exponential(z)


def exponential(z: np.ndarray) -> np.ndarray:
    """Return exp(z) for z <= 0 (Cody and Waite's reduction, Cephes' polynomial); 0 below -87."""
    inside = z >= _F(-87)
    z = np.where(inside, z, _F(0))
    k = np.rint(z * _F(1.44269504))
    r = (z - k * _F(0.693359375)) - k * _F(-2.12194440e-4)
    p = np.full_like(r, _F(1.9875691500e-4))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + _F(c)
    y = (p * (r * r) + r) + _F(1)
    power = ((k.astype(np.int32) + 127) << 23).view(np.float32)
    return np.where(inside, y * power, _F(0))


def gumbel(word: np.ndarray) -> np.ndarray:
    """Turn 32 random bits into -log(-log(u)), u = 1 - (word | 1) / 2^32.

    Small -log(u), which decide the draw, keep their relative precision.
    """
    survivor = np.uint32(0) - (word | np.uint32(1))  # u in units of 2^-32
    zeros = np.uint32(32) - np.frexp(survivor.astype(np.float64))[1].astype(np.uint32)
    missing = np.uint32(0) - (survivor << zeros)  # u = 2^-zeros * (1 - missing / 2^32)
    g = missing.astype(np.float32) * _F(2.0**-32)
    e = zeros.astype(np.float32) * _F(0.69314718) + _twice_atanh(g / (_F(2) - g), 15)
    # log(e) from e = 2^k f, f in [2/3, 4/3)
    bits = e.view(np.uint32)
    k = ((bits - np.uint32(0x3F2AAAAB)).view(np.int32) >> 23).astype(np.int32)
    f = (bits - (k << 23).view(np.uint32)).view(np.float32)
    s = (f - _F(1)) / (f + _F(1))
    return -(k.astype(np.float32) * _F(0.69314718) + _twice_atanh(s, 9))


def _twice_atanh(s: np.ndarray, last: int) -> np.ndarray:
    """Return 2 (s + s^3 / 3 + ... + s^last / last)."""
    square = s * s
    p = _F(1.0 / last)
    for odd in range(last - 2, 0, -2):
        p = p * square + _F(1.0 / odd)
    return _F(2) * (s * p)
