"""The whole step, embedding to the draw of the next token, in one launch."""

from __future__ import annotations

from cufuse.device import Array
from cufuse.engines import _decode, _parts, fused
from cufuse.generate import Sampling
from cufuse.state import State
from cufuse.weights import Weights

_KERNEL = ("mega/decode.cu", "decode")
_LAUNCH_TOKENS = 512  # of a prompt: the GPU is nobody else's while a launch takes them


def piece_rows(state: State) -> int:
    """Return how many tokens of a prompt one call of `step`, a launch, takes."""
    return _LAUNCH_TOKENS


def prefill(weights: Weights, state: State, tokens: Array, *, all_logits: bool = False) -> Array:
    """Append tokens [1, q_len], many rows at once as in `fused`; `step` takes them one by one."""
    # A single one has the same bits in `fused`, in kernels that nothing else here needs.
    function = step if tokens.shape[1] == 1 else fused.step
    return function(weights, state, tokens, all_logits=all_logits)


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
    weights: Weights,
    state: State,
    tokens: Array,
    sampling: Sampling,
    *,
    ids: Array,
    trace: Array = None,
) -> Array:
    """Append tokens [1, q_len] and what is drawn behind them, len(ids) tokens in all.

    ids: int32 [n], the last of them what is drawn behind the last token; may be `tokens`
    sampling: how they are drawn, with the ids that `Sampling.draw` would draw
    trace: from `trace.allocate`; the kernel writes there what it does when

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
        trace=trace,
    )
    state.length += len(ids)
    return logits


def check(weights: Weights, *, batch: int = 1) -> None:
    """Raise Unsupported for a model, a batch or a GPU that `step` would not run with.

    Launches nothing.
    """
    _decode.check("mega", weights, batch=batch)


def _check(weights: Weights, state: State, tokens: Array, n: int | None = None) -> int:
    _parts.check(weights, state, tokens)
    n = tokens.shape[1] if n is None else n
    state.check_room(n)
    check(weights, batch=state.batch)
    return n
