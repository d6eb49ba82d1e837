"""Does a real model say the same? Every engine against float64 over the stored weights.

    python -m cufuse.benchmarks.fidelity smollm2-135m

For three prompts the reference engine writes 64 tokens greedily. In float32 every engine has to
write the same ids. In bfloat16 and float16 every engine reads those ids (teacher forcing), as one
prompt (mega in one launch) and token by token, and its logits are compared with float64 over the
same rounded weights. Where another token comes first, the two likeliest tokens of float64 have to
be closer than twice the largest error of a logit; and that error has to be at most twice that of
the reference engine in the same dtype, which rounds behind every operation as eager frameworks do.
Exits with 3 when one of these does not hold.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import click
import numpy as np

from cufuse import device, engines
from cufuse.benchmarks.verify import to_numpy
from cufuse.generate import Decoder
from cufuse.model import Model, load
from cufuse.state import State
from cufuse.weights import Weights

PROMPTS = (
    "What is the capital of France?",
    "Write two short sentences about the sea.",
    "Explain why the sky is blue to a child.",
)


@dataclass(frozen=True)
class Fidelity:
    """How an engine's logits differ from float64 over all positions of all prompts."""

    engine: str
    dtype: str
    way: str  # "prompt" or "token by token"
    largest: float  # max |difference| of a logit
    divergence: float  # mean KL(float64 || engine), nats
    agreement: float  # share of positions where the same token comes first
    outside: int  # misses whose float64 margin is not below twice the largest difference


def reference_ids(made: Model, prompt: list[int], n_tokens: int) -> list[int]:
    """Write n_tokens greedily with the reference engine in float32."""
    return list(made.generate(prompt, engine="reference", max_new_tokens=n_tokens, stop_ids=()))


def exact_logits(weights: Weights, ids: list[int]) -> np.ndarray:
    """Return float64 logits [n, vocab] over the weights as they are stored."""
    exact = weights.map(lambda a: to_numpy(a).astype(np.float64))
    tokens = np.asarray(ids, np.int32)[None]
    state = State(exact, capacity=len(ids))
    return engines.get("reference").step(exact, state, tokens, all_logits=True)[0]


def engine_logits(made: Model, engine: str, ids: list[int], n_prompt: int, way: str) -> np.ndarray:
    """Return an engine's logits [n, vocab] of given ids, as one prompt or token by token."""
    if way == "prompt":
        return to_numpy(made.forward(ids, engine=engine)).astype(np.float64)
    step = engines.get(engine).step
    state = made.state(len(ids))
    tokens = np.asarray(ids, np.int32)[None]
    with device.on_device_of(state.tokens):
        pieces = []
        for begin, end in [(0, n_prompt), *((i, i + 1) for i in range(n_prompt, len(ids)))]:
            piece = state.upload(np.ascontiguousarray(tokens[:, begin:end]))
            logits = step(made.weights, state, piece, all_logits=True)
            # The next step overwrites what this one returned.
            pieces.append(to_numpy(logits)[0].astype(np.float64))
        state.check_fault()
    return np.concatenate(pieces)


def compare(
    engine: str, dtype: str, way: str, pairs: list[tuple[np.ndarray, np.ndarray]]
) -> Fidelity:
    """Judge an engine's logits (second of each pair) by the exact ones (first)."""
    wanted = np.concatenate([pair[0] for pair in pairs])
    got = np.concatenate([pair[1] for pair in pairs])
    difference = float(np.abs(got - wanted).max()) if np.isfinite(got).all() else float("inf")
    misses = got.argmax(-1) != wanted.argmax(-1)
    best = np.sort(wanted, -1)[:, -2:]
    margin = best[:, 1] - best[:, 0]
    p, log_p, log_q = _probabilities(wanted, got)
    return Fidelity(
        engine,
        dtype,
        way,
        difference,
        float((p * (log_p - log_q)).sum(-1).mean()),
        float(1 - misses.mean()),
        int((misses & ~(margin < 2 * difference)).sum()),
    )


def _probabilities(wanted: np.ndarray, got: np.ndarray) -> tuple[np.ndarray, ...]:
    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    log_p = log_softmax(wanted)
    return np.exp(log_p), log_p, log_softmax(got)


def greedy_ids(made: Model, engine: str, prompt: list[int], n_tokens: int) -> list[int]:
    """Write n_tokens greedily, as `Model.generate` does, past every stop id."""
    state = made.state(len(prompt) + n_tokens)
    decoder = Decoder(weights=made.weights, state=state, **engines.functions(engine))
    decoder.prefill(np.asarray(prompt, np.int32)[None])
    for _ in range(n_tokens - 1):
        decoder.decode()
    return [int(decoder.ids(i)[0]) for i in range(n_tokens)]


def run(name: str, where: str, n_tokens: int) -> Iterator[str]:
    """Yield the lines of the report; the last one is "right" or says what is wrong."""
    host = load(name, device="cpu", dtype="float32")
    if host.tokenizer is None:
        raise device.Unsupported(f"fidelity: {name} has no tokenizer; name a model with one")
    prompts = [host.tokenizer.chat(text) for text in PROMPTS]
    written = [reference_ids(host, prompt, n_tokens) for prompt in prompts]
    yield f"{name}: {host.tokenizer.decode(written[0]).splitlines()[0]!r}"
    wrong: list[str] = []

    made = load(name, device=where, dtype="float32")
    kernels = []
    for engine in engines.ENGINES[1:]:
        try:
            engines.check(engine, made.weights)
        except device.Unsupported as error:
            yield f"{error}: not judged"
            continue
        kernels.append(engine)
        pairs = zip(prompts, written, strict=True)
        same = [greedy_ids(made, engine, prompt, n_tokens) == ids for prompt, ids in pairs]
        yield f"{engine} float32: the same {n_tokens} ids in {sum(same)} of {len(same)} prompts"
        wrong += [] if all(same) else [f"{engine} float32 writes other ids"]

    yield "| engine | dtype | way | max logit error | KL | top-1 | misses outside the margin |"
    yield "|---|---|---|---|---|---|---|"
    for dtype in ("bfloat16", "float16"):
        made = load(name, device=where, dtype=dtype)
        texts = [prompt + ids for prompt, ids in zip(prompts, written, strict=True)]
        exact = [exact_logits(made.weights, ids) for ids in texts]
        rounding = Model(made.weights.map(to_numpy), None, "cpu")
        allowed = float("inf")
        for engine, way in (
            ("reference", "prompt"),
            *((engine, way) for engine in kernels for way in ("prompt", "token by token")),
        ):
            judged = rounding if engine == "reference" else made
            got = [
                engine_logits(judged, engine, ids, len(prompt), way)
                for prompt, ids in zip(prompts, texts, strict=True)
            ]
            found = compare(engine, dtype, way, list(zip(exact, got, strict=True)))
            yield (
                f"| {engine} | {dtype} | {way} | {found.largest:.3f} | "
                f"{found.divergence:.1e} | {found.agreement:.1%} | {found.outside} |"
            )
            if engine == "reference":
                allowed = 2 * found.largest
            if found.outside:
                wrong.append(f"{engine} {dtype} {way}: {found.outside} misses")
            if not found.largest <= allowed:
                wrong.append(f"{engine} {dtype} {way}: a logit is {found.largest:.3f} off")
    yield "wrong: " + "; ".join(wrong) if wrong else "right"


@click.command()
@click.argument("model")
@click.option("--device", "where", default="cuda", show_default=True, help="cuda or cpu.")
@click.option("-n", "--n-tokens", default=64, show_default=True, help="Tokens to write.")
def main(model: str, where: str, n_tokens: int) -> None:
    """Compare every engine on a real MODEL with float64; exits with 3 when one is wrong."""
    line = ""
    for line in run(model, where, n_tokens):
        click.echo(line)
    sys.exit(0 if line == "right" else 3)


if __name__ == "__main__":
    main()
