"""Tokenizers built here from a few tokens: both kinds of GGUF, tokenizer.json, chats, streams."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from cufuse import tokenizer
from cufuse.device import Unsupported

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(pre: str | None = "smollm", merges: tuple[str, ...] = (), **changes: Any) -> dict:
    """The metadata of a byte-level BPE: control tokens, all bytes, and what the merges make."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made = [merge.replace(" ", "") for merge in merges]
    tokens = [*specials, *tokenizer._byte_letters(), *made, "<tool>"]
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3] * 3 + [1] * (len(tokens) - 4) + [4],
        "merges": list(merges),
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes
    kept = {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None}
    return kept | {"tokenizer.chat_template": CHAT}


def load(metadata: Any) -> tokenizer.Tokenizer:
    made = tokenizer.load(metadata)
    assert made is not None
    return made


def test_no_source_no_tokenizer():
    assert tokenizer.load(None) is None


BYTES = load(byte_level(merges=("t h", "th e", "Ġ the", "Ã ¼")))


@given(TEXTS)
def test_any_text_comes_back(text):
    assert BYTES.decode(BYTES.encode(text)) == text


@given(st.lists(st.integers(0, BYTES.n_vocab - 1), max_size=30), st.booleans())
def test_decode_equals_the_tokenizers_package(ids, skip_special):
    wanted = BYTES._backend.decode(ids, skip_special_tokens=skip_special)
    assert BYTES.decode(ids, skip_special=skip_special) == wanted


@given(st.lists(st.integers(0, BYTES.n_vocab - 1), max_size=30))
def test_stream_equals_decode_of_any_ids(ids):
    stream = BYTES.stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == BYTES.decode(ids)


@given(TEXTS.filter(lambda text: "\N{REPLACEMENT CHARACTER}" not in text))
def test_stream_never_shows_half_a_character(text):
    stream = BYTES.stream()
    pieces = [stream.push(i) for i in BYTES.encode(text)]
    assert "".join(pieces) == text and stream.finish() == ""
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_stream_gives_up_on_half_a_character_only_at_the_end():
    stream = BYTES.stream()
    first, second, *_ = BYTES.encode("🙂")
    assert stream.push(first) == stream.push(second) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_merges_and_ids():
    ids = BYTES.encode(" the")
    assert [BYTES._backend.id_to_token(i) for i in ids] == ["Ġthe"]
    assert BYTES.decode(ids) == " the"


def tokens_of(metadata: dict, text: str) -> list[str]:
    made = load(metadata)
    return [made._backend.id_to_token(i) for i in made.encode(text)]


@pytest.mark.parametrize(
    ("pre", "digits", "contraction"),
    [
        ("llama-bpe", ["123", "4"], ["'LL"]),
        ("qwen2", ["1", "2", "3", "4"], ["'LL"]),
        ("smollm", ["1", "2", "3", "4"], ["'", "LL"]),
        ("gpt-2", ["123", "4"], ["'", "LL"]),
        ("default", ["123", "4"], ["'", "LL"]),
        (None, ["123", "4"], ["'", "LL"]),
    ],
)
def test_pre_tokenizers(pre, digits, contraction):
    metadata = byte_level(pre, ("1 2", "12 3", "L L", "' LL"), add_bos_token=False)
    assert tokens_of(metadata, "1234") == digits
    assert tokens_of(metadata, "I'LL") == ["I", *contraction]


def test_llama_bpe_takes_words_that_are_tokens_whole():
    metadata = byte_level("llama-bpe", ("a b",), add_bos_token=False)
    metadata["tokenizer.ggml.tokens"].append("xyz")  # no merge leads there
    metadata["tokenizer.ggml.token_type"].append(1)
    assert tokens_of(metadata, "xyz") == ["xyz"]
    assert tokens_of(metadata | {"tokenizer.ggml.pre": "qwen2"}, "xyz") == ["x", "y", "z"]


def test_qwen2_composes_characters():
    made = load(byte_level("qwen2"))
    assert made.decode(made.encode("u\N{COMBINING DIAERESIS}")) == "ü"


@pytest.mark.parametrize(
    ("pre", "key", "wanted"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_beginning_of_text(pre, key, wanted):
    made = load(byte_level(pre, add_bos_token=key))
    assert made.add_bos == wanted and made.bos_id == 1
    assert (made.encode("a")[0] == 1) == wanted
    assert made.encode("a", special=False) == made.encode("a")[wanted:]


def test_special_and_user_tokens_stay_whole():
    made = load(byte_level())
    ids = made.encode("a<|im_end|>b<tool>")
    assert [made._backend.id_to_token(i) for i in ids] == ["a", "<|im_end|>", "b", "<tool>"]
    assert made.decode(ids) == "ab<tool>"
    assert made.decode(ids, skip_special=False) == "a<|im_end|>b<tool>"


def test_ends_of_text():
    assert load(byte_level()).eos_ids == (0, 2)
    assert load(byte_level(eot_token_id=1)).eos_ids == (0, 1, 2)


# ---- SentencePiece ------------------------------------------------------------------------------

PIECES = [
    "a",
    "b",
    "c",
    SPACE,
    "ab",
    "bc",
    "abc",
    SPACE + "a",
    SPACE + "ab",
    "ca",
    "cab",
    "aa",
    "aaa",
]


def sentencepiece(**changes: Any) -> dict:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    # The later ones were learned later and score less, single letters least, as in real files.
    order = [*(p for p in PIECES if len(p) > 1), *(p for p in PIECES if len(p) == 1)]
    scores = [0.0] * 259 + [-float(order.index(piece)) for piece in PIECES]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    return {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None}


PIECE = load(sentencepiece())


def naive_pieces(text: str) -> list[str]:
    """SentencePiece's own loop: join the neighbours whose piece scores highest, leftmost first."""
    metadata = sentencepiece()
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    score = {piece: scores[tokens.index(piece)] for piece in PIECES}
    parts = list(SPACE + text.replace(" ", SPACE)) if text else []
    while True:
        pairs = [
            (-score[parts[i] + parts[i + 1]], i)
            for i in range(len(parts) - 1)
            if parts[i] + parts[i + 1] in score
        ]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    made = []
    for part in parts:
        made += [part] if part in score else [f"<0x{byte:02X}>" for byte in part.encode()]
    return made


@given(st.text("abc ü🙂", max_size=25))
def test_sentencepiece_equals_its_own_loop(text):
    ids = PIECE.encode(text)
    assert ids[0] == PIECE.bos_id
    assert [PIECE._backend.id_to_token(i) for i in ids[1:]] == naive_pieces(text)
    assert PIECE.decode(ids) == text
    stream = PIECE.stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == text


def test_sentencepiece_without_a_space_before_the_text():
    made = load(sentencepiece(add_space_prefix=False))
    ids = made.encode(" ab", special=False)
    assert [made._backend.id_to_token(i) for i in ids] == [SPACE + "ab"]
    assert made.decode(ids) == " ab"


@pytest.mark.parametrize(
    ("metadata", "error", "text"),
    [
        (byte_level("tekken"), Unsupported, "pre-tokenizer is tekken; cufuse has default, gpt-2"),
        (byte_level(model="bert"), Unsupported, "tokenizer is bert; cufuse has gpt2 and llama"),
        (byte_level(tokens=None), ValueError, "has no tokenizer.ggml.tokens"),
        (byte_level(token_type=[1]), ValueError, "tokens and 1 token types"),
        (sentencepiece(scores=None), ValueError, "no score for each token"),
    ],
)
def test_gguf_tokenizer_errors(metadata, error, text):
    with pytest.raises(error, match=text):
        tokenizer.load(metadata)


# ---- tokenizer.json -----------------------------------------------------------------------------


def write_folder(folder: Any, settings: dict | None = None, *, bos: bool = False) -> Any:
    vocab = {t: i for i, t in enumerate(["<s>", "</s>", *tokenizer._byte_letters()])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    if bos:
        made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    made.enable_truncation(2)
    made.enable_padding(length=8)
    made.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


TOKENS = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>"}


def test_folder(tmp_path):
    made = load(write_folder(tmp_path, TOKENS | {"chat_template": CHAT}))
    assert (made.bos_id, made.add_bos, made.eos_ids) == (0, False, (1,))
    text = "neither padded nor cut"
    assert made.decode(made.encode(text)) == text and len(made.encode(text)) == len(text)
    assert made.chat_template == CHAT


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("key", [None, False, True])
def test_folder_beginning_of_text(tmp_path, bos, key):
    settings = TOKENS if key is None else TOKENS | {"add_bos_token": key}
    made = load(write_folder(tmp_path, settings, bos=bos))
    wanted = bos if key is None else key
    assert made.add_bos == wanted
    assert made.encode("ab")[:-2] == [0] * wanted
    assert len(made.encode("ab", special=False)) == 2


def test_folder_ends_of_text(tmp_path):
    write_folder(tmp_path)
    assert load(tmp_path).eos_ids == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert load(tmp_path).eos_ids == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert load(tmp_path).eos_ids == (5, 6, 7)


def test_folder_chat_templates(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write_folder(tmp_path, {"chat_template": named})
    assert load(tmp_path).chat_text("x") == "plain"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }} from a file")
    assert load(tmp_path).chat_text("x") == "x from a file"


def test_word_pieces(tmp_path):
    words = {t: i for i, t in enumerate(["[UNK]", "[CLS]", "[SEP]", "eat", "##ing", "food"])}
    made = tokenizers.Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    made.add_special_tokens(["[CLS]", "[SEP]"])
    made.save(str(tmp_path / "tokenizer.json"))
    ours = load(tmp_path)
    ids = ours.encode("Eating food")
    assert ids == [1, 3, 4, 5, 2] and ours.decode(ids) == "eating food"
    stream = ours.stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == "eating food"


def test_broken_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="is no tokenizer"):
        tokenizer.load(tmp_path)
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        tokenizer.load(tmp_path)


# ---- chats --------------------------------------------------------------------------------------


def test_chat():
    wanted = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert BYTES.chat_text("Hi") == wanted
    assert BYTES.decode(BYTES.chat("Hi"), skip_special=False) == wanted
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert BYTES.chat_text(turns, answer=False) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    )


def test_chat_adds_no_second_beginning():
    metadata = byte_level("llama-bpe", add_bos_token=True)
    made = load(metadata | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"})
    assert made.encode("a")[0] == made.bos_id
    assert made.chat("a") == made.encode("a")


def with_template(template: str | None) -> tokenizer.Tokenizer:
    metadata = byte_level()
    del metadata["tokenizer.chat_template"]
    return load(metadata | ({"tokenizer.chat_template": template} if template else {}))


def test_chat_templates_have_what_they_expect():
    made = with_template(
        "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{{ eos_token }}{{ strftime_now('%%') }}{{ extra }}\n{% endfor %}"
    )
    turns = [{"role": "user", "content": "<ü>"}, {"role": "user", "content": "b"}]
    text = made.chat_text(turns, extra="!")
    assert text.strip() == '{"role": "user", "content": "<ü>"}<|im_end|>%!'


def test_chat_template_errors():
    with pytest.raises(Unsupported, match="has no chat template; give it plain text"):
        with_template(None).chat("Hi")
    with pytest.raises(ValueError, match="does not take these messages: roles must alternate"):
        with_template("{{ raise_exception('roles must alternate') }}").chat("Hi")
    with pytest.raises(ValueError, match="chat template does not take these messages"):
        with_template("{% if %}").chat("Hi")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__[0] }}",
        "{{ range(999999999) | list }}",
    ],
)
def test_chat_templates_stay_in_the_sandbox(attack):
    with pytest.raises(ValueError, match="chat template does not take"):
        with_template(attack).chat_text("Hi")


@pytest.mark.parametrize("missing", ["tokenizers", "jinja2"])
def test_missing_packages_are_one_sentence(monkeypatch, missing):
    made = load(byte_level())
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(Unsupported, match=r'pip install "cufuse\[models\]"'):
        made.chat("Hi") if missing == "jinja2" else tokenizer.load(byte_level())
