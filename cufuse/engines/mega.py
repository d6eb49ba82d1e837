"""The whole step, embedding to the draw of the next token, in one launch."""

from __future__ import annotations

from cufuse.device import Array
from cufuse.engines import _decode, _parts
from cufuse.generate import Sampling
from cufuse.state import State
from cufuse.weights import Weights

_KERNEL = ("mega/decode.cu", "decode")


def step(weights: Weights, state: State, tokens: Array, *, all_logits: bool = False) -> Array:
    """Append tokens [1, q_len], one after the other, and return the logits of the last position."""
    n = _check(weights, state, tokens)
    ids = state.buffer("ids", (n,), "int32")
    logits = _decode.launch(
        _KERNEL, weights, state, tokens.reshape(-1), n_tokens=n, ids=ids, all_logits=all_logits
    )
    state.length += n
    return logits.reshape(1, n, -1) if all_logits else logits


def step_and_draw(
    weights: Weights, state: State, tokens: Array, sampling: Sampling, *, ids: Array
) -> Array:
    """Append tokens [1, q_len] and what is drawn behind them, len(ids) tokens in all.

    ids: int32 [n], the last of them what is drawn behind the last token; may be `tokens`
    sampling: greedy, or with a temperature and no filter (`draws` tells)

    Returns logits [1, vocab_size] of the last token.
    """
    _check(weights, state, tokens, len(ids))
    logits = _decode.launch(
        _KERNEL,
        weights,
        state,
        tokens.reshape(-1),
        n_tokens=len(ids),
        ids=ids,
        sampling=sampling,
    )
    state.length += len(ids)
    return logits


def draws(sampling: Sampling) -> bool:
    """Tell whether the kernel draws this way itself: greedy, or by temperature alone."""
    return sampling.temperature == 0 or not (sampling.top_k or sampling.top_p < 1 or sampling.min_p)


def _check(weights: Weights, state: State, tokens: Array, n: int | None = None) -> int:
    _parts.check(weights, state, tokens)
    n = tokens.shape[1] if n is None else n
    state.check_room(n)
    _decode.check("mega", state)
    return n
