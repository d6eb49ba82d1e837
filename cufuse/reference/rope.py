"""Rotary position embedding: frequencies of every scaling, the table of angles, the rotation."""

from __future__ import annotations

import math

import numpy as np

from cufuse.config import Config, RopeScaling
from cufuse.device import Unsupported
from cufuse.reference._dtype import narrow, wide

KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")


def rope_frequencies(
    theta: float,
    rotary_dim: int,
    scaling: RopeScaling | None = None,
    seq_len: int = 0,
    *,
    max_seq_len: int = 0,
) -> tuple[np.ndarray, float]:
    """Return the angle a position adds to each pair, float64 [rotary_dim / 2], and the factor of
    cos and sin.

    seq_len: how long the sequence gets; "dynamic" and "longrope" choose by it, once a sequence
    max_seq_len: the model's, where the scaling does not name an original length or a factor

    Raises Unsupported for an unknown kind of scaling.
    """
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float64) / max(rotary_dim, 1)
    plain = theta**-exponent
    if scaling is None:
        return plain, 1.0
    if scaling.kind not in KINDS:
        raise Unsupported(
            f"rope scaling {scaling.kind!r} is unknown, supported are {', '.join(KINDS)}"
        )
    original = scaling.original_max_seq_len or max_seq_len
    if scaling.kind != "linear" and original < 1:
        raise ValueError(f"rope scaling {scaling.kind} needs original_max_seq_len, got {original}")
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "dynamic":
        stretch = scaling.factor * max(seq_len, original) / original - (scaling.factor - 1)
        return (theta * stretch ** (rotary_dim / (rotary_dim - 2))) ** -exponent, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling, original), 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, theta, rotary_dim, scaling, original), _yarn_factor(scaling)
    return _longrope(plain, scaling, original, seq_len, max_seq_len)


def _llama3(plain: np.ndarray, scaling: RopeScaling, original: int) -> np.ndarray:
    """Keep high frequencies, divide low ones, blend between the two wavelengths."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = original * plain / (2 * math.pi)  # full turns within the original length
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def yarn_range(
    theta: float, rotary_dim: int, scaling: RopeScaling, original: int
) -> tuple[float, float]:
    """Return the pair indices between which YaRN goes from unscaled to scaled."""

    def index(turns: float) -> float:
        return rotary_dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, rotary_dim - 1)


def _yarn(
    plain: np.ndarray, theta: float, rotary_dim: int, scaling: RopeScaling, original: int
) -> np.ndarray:
    low, high = yarn_range(theta, rotary_dim, scaling, original)
    width = high - low if high != low else 0.001  # a step must not divide by zero
    ramp = np.clip((np.arange(len(plain)) - low) / width, 0.0, 1.0)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def _yarn_factor(scaling: RopeScaling) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def _longrope(
    plain: np.ndarray, scaling: RopeScaling, original: int, seq_len: int, max_seq_len: int
) -> tuple[np.ndarray, float]:
    chosen = scaling.long_factor if seq_len > original else scaling.short_factor
    if len(chosen) != len(plain):
        raise ValueError(
            f"rope scaling longrope has {len(chosen)} factors, wanted one for each of the "
            f"{len(plain)} pairs"
        )
    factor = scaling.attention_factor
    if factor is None:
        stretch = scaling.factor if scaling.factor > 1 else max_seq_len / original
        factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return plain / np.asarray(chosen, np.float64), factor


def rope_table(
    config: Config, n_positions: int, *, seq_len: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin of the first n_positions positions, float32 [n_positions, rotary / 2].

    Angles are taken in float64: at position 100000 a float32 angle is off by 0.004. Both carry the
    scaling's attention factor. `seq_len`: see `rope_frequencies`; n_positions when left out.
    """
    if not config.rotary_dim:
        empty = np.zeros((n_positions, 0), np.float32)
        return empty, empty.copy()
    frequencies, factor = rope_frequencies(
        float(config.rope_theta or 0.0),
        config.rotary_dim,
        config.rope_scaling,
        n_positions if seq_len is None else seq_len,
        max_seq_len=config.max_seq_len,
    )
    angles = np.arange(n_positions, dtype=np.float64)[:, None] * frequencies
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(
        np.float32
    )


def rope(
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    *,
    interleaved: bool = False,
) -> np.ndarray:
    """Rotate the first 2 * cos.shape[1] values of each head of x [rows, heads, head_dim].

    Pair t is (t, t + n_pairs), or (2t, 2t + 1) when interleaved; the other values pass through.
    cos, sin: [max_pos, n_pairs]. A row whose position is outside the table becomes NaN.
    """
    n_pairs = cos.shape[1]
    pairs = np.arange(n_pairs)
    first, second = (2 * pairs, 2 * pairs + 1) if interleaved else (pairs, pairs + n_pairs)
    positions = np.asarray(positions, np.int64)
    outside = (positions < 0) | (positions >= cos.shape[0])
    inside = np.where(outside, 0, positions)
    v = wide(x)
    if cos.shape[0] == 0:
        c = s = np.full((len(positions), 1, n_pairs), np.nan, v.dtype)
    else:
        c, s = (np.asarray(t, v.dtype)[inside][:, None, :] for t in (cos, sin))
    a, b = v[..., first], v[..., second]
    y = v.copy()
    y[..., first] = a * c - b * s
    y[..., second] = b * c + a * s
    if n_pairs:
        y[outside] = np.nan
    return narrow(y, x)
