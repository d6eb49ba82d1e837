"""Text <-> ids: tokenizers of GGUF files and of tokenizer.json, chat templates, streaming."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cufuse.device import Unsupported

INSTALL_MODELS = 'pip install "cufuse[models]"'

Message = Mapping[str, Any]  # {"role": "user", "content": "…"}


class Tokenizer:
    """The tokenizer of one model.

    n_vocab: how many ids there are
    bos_id: the id that begins a text, or None; add_bos tells whether `encode` puts it there
    eos_ids: ids that end a text
    chat_template: the model's Jinja template, or None
    """

    def __init__(
        self,
        backend: Any,
        *,
        bos_id: int | None = None,
        add_bos: bool | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        template_names: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap a `tokenizers.Tokenizer`; with add_bos None its post-processor decides."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.n_vocab: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = bos_id
        first = backend.encode("").ids[:1]
        self.add_bos = bos_id is not None and (first == [bos_id] if add_bos is None else add_bos)
        self._forced_bos = add_bos is not None and bos_id is not None
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.chat_template = chat_template
        self._template_names = dict(template_names or {})
        self._special = {i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        self._bytes, self._strip_space = _token_bytes(backend)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Turn text into ids.

        special: add what the model wants around a text (a beginning-of-text id, [CLS] and [SEP])
        """
        ids = list(self._backend.encode(text, add_special_tokens=special).ids)
        if special and self._forced_bos:
            begins = ids[:1] == [self.bos_id]
            if self.add_bos and not begins:
                ids.insert(0, self.bos_id)
            elif begins and not self.add_bos:
                del ids[0]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Turn ids into text; bytes that are no UTF-8 become U+FFFD."""
        ids = [int(i) for i in ids]
        if self._bytes is None:
            return self._backend.decode(ids, skip_special_tokens=skip_special)
        raw = b"".join(self._bytes_of(i, skip_special) for i in ids)
        return self._strip(raw).decode("utf-8", "replace")

    def _bytes_of(self, token: int, skip_special: bool) -> bytes:
        if skip_special and token in self._special:
            return b""
        assert self._bytes is not None
        return self._bytes.get(token, b"")

    def _strip(self, raw: bytes) -> bytes:
        return raw[1:] if self._strip_space and raw.startswith(b" ") else raw

    def stream(self, *, skip_special: bool = True) -> Stream:
        """Return a decoder that takes one id at a time."""
        return Stream(self, skip_special)

    def chat(self, messages: str | Sequence[Message], **values: Any) -> list[int]:
        """Turn a user's text, or messages with role and content, into the ids of a chat."""
        return self.encode(self.chat_text(messages, **values), special=False)

    def chat_text(
        self, messages: str | Sequence[Message], *, answer: bool = True, **values: Any
    ) -> str:
        """Write a chat as the model's template has it.

        messages: a user's text, or messages with role and content
        answer: end where the model's answer begins
        values: further names for the template
        """
        if self.chat_template is None:
            raise Unsupported("this model has no chat template; give it plain text")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return _render(
            self.chat_template,
            {
                "messages": list(messages),
                "add_generation_prompt": answer,
                "tools": None,
                "documents": None,
                **self._template_names,
                **values,
            },
        )


class Stream:
    """Decode ids one by one; a character comes out when its last byte is there."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False
        self._ids: list[int] = []  # only for tokenizers that do not work on bytes
        self._shown = ""

    def push(self, token: int) -> str:
        """Take an id and return the text that has become certain."""
        tokenizer, token = self._tokenizer, int(token)
        if tokenizer._bytes is None:
            self._ids.append(token)
            return self._rest(final=False)
        raw = tokenizer._bytes_of(token, self._skip_special)
        if raw and not self._begun:
            raw, self._begun = tokenizer._strip(raw), True
        return self._utf8.decode(raw)

    def finish(self) -> str:
        """Return what is left; a character that stayed incomplete becomes U+FFFD."""
        if self._tokenizer._bytes is None:
            return self._rest(final=True)
        return self._utf8.decode(b"", final=True)

    def _rest(self, *, final: bool) -> str:
        text = self._tokenizer.decode(self._ids, skip_special=self._skip_special)
        if not final and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new


def load(source: str | Path | Mapping[str, Any] | None) -> Tokenizer | None:
    """Build the tokenizer of a model.

    source: what `checkpoint.load` returned: a GGUF file's metadata, a folder with tokenizer.json,
        or None, as presets with random weights have it

    Returns None for None. Raises Unsupported for a kind of tokenizer that cufuse does not have.
    """
    if source is None:
        return None
    try:
        import tokenizers
    except ImportError as error:
        raise Unsupported(
            f"text needs the tokenizers package: {INSTALL_MODELS} (token ids work without)"
        ) from error
    if isinstance(source, Mapping):
        return _from_gguf(tokenizers, source)
    return _from_folder(tokenizers, Path(source))


# ---- bytes of tokens ----------------------------------------------------------------------------


def _byte_letters() -> dict[str, int]:
    """Map the letters that byte-level BPE writes bytes as; invisible bytes move past 255."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + i): byte for i, byte in enumerate(hidden)
    }


_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _token_bytes(backend: Any) -> tuple[dict[int, bytes] | None, bool]:
    """Return the bytes of every token, and whether a text's first space is dropped.

    None for decoders that are not made of bytes, such as WordPiece's.
    """
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    added = {i: t.content.encode() for i, t in backend.get_added_tokens_decoder().items()}
    vocab = backend.get_vocab(with_added_tokens=False)
    if kinds == {"ByteLevel"}:
        letters = _byte_letters()
        plain = {}
        for text, token in vocab.items():
            known = all(letter in letters for letter in text)
            plain[token] = bytes(letters[c] for c in text) if known else text.encode()
        return plain | added, False
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "ByteFallback" in kinds:
        spaced = {token: text.replace(_SPACE, " ").encode() for text, token in vocab.items()} | {
            i: raw.replace(_SPACE.encode(), b" ") for i, raw in added.items()
        }
        for text, token in vocab.items():
            byte = _BYTE_TOKEN.fullmatch(text)
            if byte:
                spaced[token] = bytes([int(byte[1], 16)])
        return spaced, "Strip" in kinds
    return None, False


# ---- GGUF ---------------------------------------------------------------------------------------

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + _WORDS + r"|\p{N}" + _REST,
}
_PRE_TOKENIZERS = ("default", "gpt-2", "smollm", *_SPLITS)

# GGUF's kinds of tokens.
_UNKNOWN, _CONTROL, _USER = 2, 3, 4

# Control tokens that end a turn or a text, whatever the metadata calls end of text.
_END_TEXTS = {
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "</s>",
}


def _from_gguf(tokenizers: Any, metadata: Mapping[str, Any]) -> Tokenizer:
    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    model, tokens = get("model"), get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError("the GGUF file has no tokenizer.ggml.tokens; download it again")
    types = get("token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"the GGUF file has {len(tokens)} tokens and {len(types)} token types")
    if model == "gpt2":
        backend, begins = _byte_level(
            tokenizers, tokens, get("merges") or [], get("pre", "default")
        )
    elif model == "llama":
        backend = _sentencepiece(tokenizers, tokens, types, get)
        begins = True
    else:
        raise Unsupported(f"the GGUF file's tokenizer is {model}; cufuse has gpt2 and llama")

    # They are in the vocabulary already, so their ids stay.
    added = tokenizers.AddedToken
    backend.add_special_tokens(
        [
            added(t, normalized=False)
            for t, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL
        ]
    )
    backend.add_tokens(
        [added(t, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == _USER]
    )
    bos, eos = get("bos_token_id"), get("eos_token_id")
    ends = {eos, get("eot_token_id"), get("eom_token_id")}
    ends |= {
        i
        for i, (t, k) in enumerate(zip(tokens, types, strict=True))
        if k == _CONTROL and t in _END_TEXTS
    }
    names = {"bos_token": bos, "eos_token": eos, "unk_token": get("unknown_token_id")}
    return Tokenizer(
        backend,
        bos_id=bos,
        add_bos=bool(get("add_bos_token", begins)),
        eos_ids=[i for i in ends if i is not None],
        chat_template=metadata.get("tokenizer.chat_template"),
        template_names={
            name: tokens[i] if i is not None and 0 <= i < len(tokens) else ""
            for name, i in names.items()
        },
    )


def _byte_level(
    tokenizers: Any, tokens: list[str], merges: list[str], pre: str
) -> tuple[Any, bool]:
    """Build a byte-level BPE; also returns whether texts begin with bos when nothing says so."""
    if pre not in _PRE_TOKENIZERS:
        raise Unsupported(
            f"the GGUF file's pre-tokenizer is {pre}; cufuse has {', '.join(_PRE_TOKENIZERS)}"
        )
    split, models = tokenizers.pre_tokenizers, tokenizers.models
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=pre == "llama-bpe",
        )
    )
    if pre in _SPLITS:
        steps = [
            split.Split(tokenizers.Regex(_SPLITS[pre]), "isolated"),
            split.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        steps = [split.ByteLevel(add_prefix_space=False, use_regex=True)]
        if pre == "smollm":
            steps.insert(0, split.Digits(individual_digits=True))
    backend.pre_tokenizer = split.Sequence(steps)
    if pre == "qwen2":
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend, pre == "llama-bpe"


def _sentencepiece(tokenizers: Any, tokens: list[str], types: list[int], get: Any) -> Any:
    """Build SentencePiece's BPE: the pair whose joint piece scores highest is merged first.

    Every way of cutting a piece in two becomes a merge rule, ranked by the piece's score. Pieces of
    the kinds control and user-defined are matched whole and are no part of any merge.
    """
    scores = get("scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ValueError("the GGUF file has no score for each token; download it again")
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind == 1:
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocab and right in vocab:
                    ranked.append((-score, vocab[token], cut, (left, right)))
    ranked.sort()
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=vocab,
            merges=[pair for *_, pair in ranked],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = get("add_space_prefix", True)
    normal, decode = tokenizers.normalizers, tokenizers.decoders
    steps = [normal.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normal.Sequence([*steps, normal.Replace(" ", _SPACE)])
    strip = [decode.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decode.Sequence(
        [decode.Replace(_SPACE, " "), decode.ByteFallback(), decode.Fuse(), *strip]
    )
    return backend


# ---- tokenizer.json -----------------------------------------------------------------------------


def _from_folder(tokenizers: Any, folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path} is no tokenizer ({error}); download it again") from None
    settings = _json(folder / "tokenizer_config.json")
    names = {
        name: _content(settings[name])
        for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
        if settings.get(name) is not None
    }
    ends: set[int | None] = set()
    for file in ("generation_config.json", "config.json"):
        value = _json(folder / file).get("eos_token_id")
        ends |= set(value) if isinstance(value, list) else {value}
    if "eos_token" in names:
        ends.add(backend.token_to_id(names["eos_token"]))
    bos = names.get("bos_token")
    return Tokenizer(
        backend,
        bos_id=None if bos is None else backend.token_to_id(bos),
        add_bos=settings.get("add_bos_token"),
        eos_ids=[i for i in ends if isinstance(i, int)],
        chat_template=_folder_template(folder, settings),
        template_names=names,
    )


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default", next(iter(named.values()), None))
    return template


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    return value if isinstance(value, dict) else {}


def _content(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else str(token)


# ---- chat templates -----------------------------------------------------------------------------


def _render(template: str, values: Mapping[str, Any]) -> str:
    """Render a model's template: foreign code, so in Jinja's sandbox."""
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise Unsupported(f"chat templates need the jinja2 package: {INSTALL_MODELS}") from error

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    # Templates are written for these settings.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(**values)
    except (jinja2.TemplateError, TypeError, KeyError, ValueError, OverflowError) as error:
        raise ValueError(
            f"the model's chat template does not take these messages: {error}"
        ) from None
