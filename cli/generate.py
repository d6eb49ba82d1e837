"""`cufuse generate`: text from a model, as it is made."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Any

import click
import numpy as np

import cufuse
from cufuse import upcycle as upcycles
from cufuse.cli._errors import NOT_AVAILABLE, Failure
from cufuse.cli._options import device_option, dtype_type, engine_choice, resolve_device
from cufuse.engines import PREFILLS, functions
from cufuse.generate import Sampling

if TYPE_CHECKING:
    from cufuse.config import Config
    from cufuse.model import Model


@click.command(
    epilog="""\b
Examples:
  cufuse generate --model smollm2-135m "What is the capital of France?"
  echo "Once upon a time" | cufuse generate --model model.gguf --raw --temperature 0.8
  cufuse generate --model smollm2-135m --upcycle 8:2 "What is the capital of France?"
  cufuse generate --model tiny --ids 1,2,3
  cufuse generate --model llama-3.2-1b --engine mega --ids 1,2,3
  cufuse generate --model tiny --ids 1,2,3 -n 2 --device cpu-kernels
"""
)
@click.argument("prompt", required=False)
@click.option(
    "-m",
    "--model",
    "name",
    default="smollm2-135m",
    show_default=True,
    help="A GGUF file, a folder with safetensors, a pulled model or a preset (random weights).",
)
@click.option(
    "-e",
    "--engine",
    type=engine_choice,
    help="How a step is run.  [default: fused; on the CPU reference]",
)
@click.option(
    "--prefill",
    type=click.Choice(PREFILLS),
    default="rows",
    show_default=True,
    help="How the prompt is read: many rows at once, or (mega) token after token in one launch, "
    "with the bits of the tokens that follow; rows reads the weights once for many tokens.",
)
@click.option(
    "--tokens-per-launch",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Tokens that a launch of mega makes; they are printed so many at a time.",
)
@click.option(
    "--upcycle",
    metavar="EXPERTS:TOP",
    help="Make a mixture of a dense model: copies of every MLP, of which a token takes TOP.",
)
@click.option(
    "--split-experts",
    type=click.IntRange(min=1),
    help="Make a mixture of a dense model: cut every MLP into so many experts and take all.",
)
@device_option
@click.option("--dtype", type=dtype_type, help="[default: bfloat16; on the CPU float32]")
@click.option(
    "-n",
    "--max-new-tokens",
    type=click.IntRange(min=0),
    default=128,
    show_default=True,
    help="Stop after so many tokens.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0 takes the likeliest token.",
)
@click.option(
    "--top-k",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Draw from so many likeliest tokens; 0 from all.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Draw from the likeliest that make up this much.",
)
@click.option(
    "--min-p",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Leave out what is less likely than this part of the likeliest.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draw."
)
@click.option(
    "--chat/--raw",
    default=None,
    help="Put the prompt into the model's chat template, or take it as it is.  [default: chat if "
    "the model has a template]",
)
@click.option("--ids", "as_ids", is_flag=True, help="PROMPT is token ids; print ids, no text.")
@click.option("-v", "--verbose", is_flag=True, help="Print timings to stderr at the end.")
def generate(
    prompt: str | None,
    name: str,
    engine: str | None,
    prefill: str,
    tokens_per_launch: int,
    upcycle: str | None,
    split_experts: int | None,
    device_name: str,
    dtype: np.dtype | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    chat: bool | None,
    as_ids: bool,
    verbose: bool,
) -> None:
    """Print what a model says to PROMPT, as it comes.

    Without PROMPT, or with -, the prompt is read from standard input.
    """
    where = resolve_device(device_name)
    engine = engine or ("reference" if where == "cpu" else "fused")
    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    try:
        sampling.check()
        pair = None if upcycle is None else upcycles.parse(upcycle)
        upcycles.choose(pair, split_experts)
        functions(engine, prefill=prefill, tokens_per_launch=tokens_per_launch)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    text = _prompt(prompt)
    begin = time.perf_counter()
    model = _load(name, where, dtype, pair, split_experts)
    loaded = time.perf_counter()
    ids = _ids(model, text, chat, as_ids)
    tokens = model.generate(
        ids,
        engine=engine,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        prefill=prefill,
        tokens_per_launch=tokens_per_launch,
    )
    times = [time.perf_counter()]
    stream = None if as_ids or model.tokenizer is None else model.tokenizer.stream()
    try:
        for token in tokens:
            times.append(time.perf_counter())
            separator = " " if len(times) > 2 else ""
            _write(f"{separator}{token}" if stream is None else stream.push(token))
        if stream is not None:
            _write(stream.finish())
    except BaseException:
        _write("\n" if len(times) > 1 else "")  # what is there ends in a line of its own
        raise
    _write("\n")
    if verbose:
        _report(begin, loaded, times, len(ids))


def _prompt(text: str | None) -> str:
    if text is None or text == "-":
        if text is None and sys.stdin.isatty():
            raise click.UsageError("Missing argument 'PROMPT'.")
        text = sys.stdin.read().rstrip("\n")
    if not text:
        raise click.UsageError("The prompt is empty.")
    return text


def _load(
    name: str,
    where: str,
    dtype: np.dtype | None,
    upcycle: tuple[int, int] | None,
    split_experts: int | None,
) -> Model:
    if name in cufuse.PRESETS:
        _check_head(name, cufuse.PRESETS[name])  # before anybody pulls it
    model = cufuse.load(
        name, device=where, dtype=dtype, upcycle=upcycle, split_experts=split_experts
    )
    _check_head(name, model.config)
    return model


def _check_head(name: str, config: Config) -> None:
    if not config.has_head:
        raise Failure(
            f"{name} is an encoder and has no next token; take another model", NOT_AVAILABLE
        )


def _ids(model: Model, text: str, chat: bool | None, as_ids: bool) -> list[int]:
    """Turn the prompt into ids."""
    if as_ids:
        if not re.fullmatch(r"\s*\d+([\s,]+\d+)*\s*", text):
            raise click.BadParameter(
                "with --ids the prompt is numbers such as 1,2,3.", param_hint="PROMPT"
            )
        ids = [int(word) for word in re.split(r"[\s,]+", text.strip())]
        wrong = [token for token in ids if token >= model.config.vocab_size]
        if wrong:
            raise click.BadParameter(
                f"id {wrong[0]} is outside the vocabulary of {model.config.vocab_size}.",
                param_hint="PROMPT",
            )
        return ids
    tokenizer: Any = model.tokenizer
    if tokenizer is None:
        raise click.UsageError(
            f"{model.config.name} has random weights and no tokenizer; give ids, such as "
            "--ids 1,2,3, or a model with one."
        )
    if chat and tokenizer.chat_template is None:
        raise click.UsageError(f"{model.config.name} has no chat template; use --raw.")
    if chat is None:
        chat = tokenizer.chat_template is not None
    return tokenizer.chat(text) if chat else tokenizer.encode(text)


def _write(text: str) -> None:
    if text:
        click.echo(text, nl=False)
        sys.stdout.flush()


def _report(begin: float, loaded: float, times: list[float], n_prompt: int) -> None:
    """Print what took how long; the first token's time is the prompt's, compiling included."""
    made = len(times) - 1
    prompt_s = times[1] - times[0] if made else 0.0
    decode_s = times[-1] - times[1] if made > 1 else 0.0
    lines = [
        ("total duration", _duration(time.perf_counter() - begin)),
        ("load duration", _duration(loaded - begin)),
        ("prompt eval count", f"{n_prompt} token(s)"),
        ("prompt eval duration", _duration(prompt_s)),
        ("prompt eval rate", _rate(n_prompt, prompt_s)),
        ("eval count", f"{made} token(s)"),
        ("eval duration", _duration(decode_s)),
        ("eval rate", _rate(made - 1, decode_s)),
    ]
    for title, value in lines:
        click.echo(f"{title + ':':<22}{value}", err=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.3f}s" if seconds >= 1 else f"{seconds * 1e3:.3f}ms"


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.2f} tokens/s" if count > 0 and seconds > 0 else "-"
