"""Benchmarks: verified before timed, the same tables without a GPU, rows that say all."""

from __future__ import annotations

import json
import resource
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import DTYPES
from graph_nodes import readable

import cufuse.reference
from cufuse import benchmarks, device, generate, ops
from cufuse.benchmarks import prompt, readme, rows, subject, timing, verify
from cufuse.benchmarks.catalogue import cases
from cufuse.benchmarks.decode import Decode
from cufuse.benchmarks.prompt import Prompt
from cufuse.benchmarks.rows import Row
from cufuse.benchmarks.subject import Oracle, Piece, Subject
from cufuse.cli import main
from cufuse.engines import mega as mega_engine

CASES = cases()


def bench(*arguments: str):
    return CliRunner().invoke(main, ["bench", *arguments])


def found(result) -> list[dict]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


# ---- verification -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("engine", ["unfused", "fused"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("twin", marks=pytest.mark.cpu_kernels),
        pytest.param("cupy", marks=pytest.mark.gpu),
    ],
)
def test_kernels_of_a_case_verify(name, engine, kind):
    case = CASES[name](CASES[name].small_size, np.dtype(np.float32))
    assert 0 <= case.verify(case.arrays(kind), engine) < 1e-5


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_reference_of_a_case_verifies(name, dtype):
    case = CASES[name](CASES[name].small_size, np.dtype(dtype))
    assert case.verify(case.arrays("numpy"), "reference") <= case.limit("reference")


def test_a_case_is_found_by_its_file():
    files = {path.stem: path.read_text() for path in Path(benchmarks.__path__[0]).glob("*.py")}
    assert {name for name, text in files.items() if "(Case):" in text} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_one_wrong_element_is_caught(name):
    case = CASES[name](CASES[name].small_size, np.dtype(np.float32))
    arrays = case.arrays("numpy")

    def wrong(a):
        case.reference(a)
        list(a[out] for out in case.outputs())[-1][-1, -1] *= 1.01

    case.fused = wrong
    with pytest.raises(verify.VerificationError, match=f"{name} .*, fused, float32"):
        case.verify(arrays, "fused")


@pytest.mark.parametrize("name", CASES)
def test_an_element_nobody_writes_is_caught(name):
    case = CASES[name](CASES[name].small_size, np.dtype(np.float32))
    case.fused = lambda a: None
    with pytest.raises(verify.VerificationError):
        case.verify(case.arrays("numpy"), "fused")


def test_wrong_expert_is_caught():
    case = CASES["moe_route"](CASES["moe_route"].small_size, np.dtype(np.float32))
    arrays = case.arrays("numpy")

    def wrong(a):
        case.reference(a)
        a["ids"][0, 1] = next(i for i in range(16) if i not in a["ids"][0])

    case.fused = wrong
    with pytest.raises(verify.VerificationError):
        case.verify(arrays, "fused")


@pytest.mark.parametrize("name", ["linear", "decode", "prompt"])
def test_wrong_result_exits_3(monkeypatch, name):
    right = cufuse.reference.linear

    def wrong(x, *rest, **options):
        y = right(x, *rest, **options)
        return y if y.dtype == np.float64 else (y * np.float32(1.2)).astype(y.dtype)

    monkeypatch.setattr(cufuse.reference, "linear", wrong)
    where = {
        "linear": ("linear", "--size", "2x24x16"),
        "decode": ("decode", "-m", "tiny", "-d", "8", "-n", "2"),
        "prompt": ("decode", "-m", "minilm", "-p", "8"),
    }
    arguments = (*where[name], "--device", "cpu", "-e", "reference", "-r", "1")
    result = bench(*arguments)
    assert result.exit_code == 3, result.output
    assert "it was not timed" in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""
    assert bench(*arguments, "--no-verify").exit_code == 0


def test_engine_error_is_seen(rng):
    """An engine that answers with noise does not pass for the model."""
    oracle = Decode(2, 4).oracle(Subject("tiny", "cpu", np.dtype(np.float32)))
    assert oracle.error("reference", np.asarray, "tiny") < 1e-5
    oracle._wanted[-1] = oracle._wanted[-1] + 0.01 * rng.standard_normal(oracle._wanted[-1].shape)
    with pytest.raises(verify.VerificationError, match="tiny cut to 2 layers, reference"):
        oracle.error("reference", np.asarray, "tiny")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_without_hidden_states_is_judged_by_logits(monkeypatch, rng, dtype):
    """The same oracle: its hidden states go through the head where the engine's have to."""
    oracle = Prompt(1, 21).oracle(Subject("tiny", "cpu", np.dtype(dtype)))
    monkeypatch.setattr(subject, "_has_head_inside", lambda engine: True)
    limit = {"float32": 1e-5, "bfloat16": 4e-2}[dtype]
    assert 0 < oracle.error("reference", np.asarray, "tiny") < limit
    (piece, *_) = oracle._pieces
    at = subject._some_of(piece)[3]
    oracle._wanted[0][0, at] = rng.standard_normal(oracle._wanted[0].shape[-1])
    with pytest.raises(verify.VerificationError, match="tiny cut to 2 layers, reference"):
        oracle.error("reference", np.asarray, "tiny")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("twin", marks=[pytest.mark.cpu_kernels, pytest.mark.slow]),
        pytest.param("cupy", marks=pytest.mark.gpu),
    ],
)
def test_mega_verifies(monkeypatch, kind):
    monkeypatch.setattr(subject, "CUT_LAYERS", 1)
    cut = Subject("tiny", "cpu", np.dtype(np.float32)).cut
    oracle = Oracle(cut, 1, [Piece(2, every_position=True), Piece(1)])
    upload = device.twin if kind == "twin" else device.require_cupy().asarray
    assert 0 < oracle.error("mega", upload, "tiny") < 1e-5


@pytest.mark.parametrize("model", ["tiny", "tiny-moe", "minilm"])
@pytest.mark.parametrize("engine", ["unfused", "fused"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("twin", marks=[pytest.mark.cpu_kernels, pytest.mark.slow]),
        pytest.param("cupy", marks=pytest.mark.gpu),
    ],
)
def test_kernels_of_a_prompt_verify(monkeypatch, model, engine, kind):
    """In pieces of 17 and 6 for decoders: the second begins behind a filled cache."""
    monkeypatch.setattr(prompt, "_CHECKED_TOKENS", 17)
    oracle = Prompt(2, 23).oracle(Subject(model, "cpu", np.dtype(np.float32)))
    upload = device.twin if kind == "twin" else device.require_cupy().asarray
    assert oracle.error(engine, upload, model) < 1e-5


@pytest.mark.parametrize("model", ["tiny", "minilm"])
def test_one_wrong_position_of_a_prompt_is_caught(model):
    oracle = Prompt(2, 33).oracle(Subject(model, "cpu", np.dtype(np.float32)))
    assert oracle._wanted[0].shape == (2, 33, oracle._cut.config.dim)
    oracle._wanted[0][1, 7] *= 1.01
    with pytest.raises(verify.VerificationError, match=f"{model} cut to 2 layers, reference"):
        oracle.error("reference", np.asarray, model)


def test_a_mixture_may_send_few_rows_to_another_expert():
    errors = np.full(100, 0.01)
    errors[:20] = 0.3
    assert verify.model_error(errors, mixture=False) == 0.3
    assert verify.model_error(errors, mixture=True) == pytest.approx(0.015)
    errors[:30] = 0.3
    assert verify.model_error(errors, mixture=True) == pytest.approx(0.3)
    errors[:] = 0.01
    errors[3] = 1.0  # a row that has nothing to do with the model
    assert verify.model_error(errors, mixture=True) > verify.MODEL_LIMIT["bfloat16"]
    errors[3] = np.inf
    assert verify.model_error(errors, mixture=True) == np.inf


@pytest.mark.parametrize(("size", "count"), [(1, 16), (5, 16), (16, 16), (4000, 16)])
def test_sample_holds_both_ends(rng, size, count):
    chosen = verify.sample(size, count, rng)
    assert len(chosen) == len(set(chosen.tolist())) == min(size, count)
    assert chosen[0] == 0 and chosen[-1] == size - 1


# ---- the tables without a GPU -------------------------------------------------------------------


def test_ops_table_counts_launches_and_bytes():
    result = bench("linear", "--device", "cpu", "--size", "4x64x32", "-r", "1", "-o", "jsonl")
    made = {row["engine"]: row for row in found(result)}
    assert set(made) == {"reference", "unfused", "fused"}
    assert made["unfused"]["launches_per_token"] == 3
    assert made["fused"]["launches_per_token"] == 1
    needed = 2 * (4 * 32 + 64 * 32 + 64 + 4 * 64)
    assert made["fused"]["moved_bytes"] == needed
    assert made["unfused"]["moved_bytes"] == needed + 2 * 4 * 4 * 64  # two intermediates, twice
    assert made["reference"]["ms_per_step"] > 0 and made["reference"]["max_rel_err"] < 4e-3
    assert "launches and bytes are counted" in result.stderr


@pytest.mark.cpu_kernels
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("linear", "--size", "3x24x16"), id="op"),
        pytest.param(("-m", "tiny", "-d", "8", "-n", "2"), id="decode", marks=pytest.mark.slow),
    ],
)
def test_kernels_on_the_cpu_are_checked_and_not_timed(arguments):
    engines = ("-e", "reference,unfused,fused")
    result = bench(*arguments, *engines, "--device", "cpu-kernels", "-r", "1", "-o", "jsonl")
    made = {row["engine"]: row for row in found(result)}
    assert set(made) == {"reference", "unfused", "fused"}
    for engine in ("unfused", "fused"):
        assert 0 < made[engine]["max_rel_err"] < 4e-2 and made[engine]["launches_per_token"] > 0
        assert made[engine]["ms_per_step"] is None
    assert "results are checked" in result.stderr and "very slow" in result.stderr


@pytest.mark.cpu_kernels
@pytest.mark.parametrize(
    "arguments", [("linear", "--size", "3x24x16"), ("-m", "tiny", "-p5", "-n0")]
)
def test_kernel_on_the_cpu_beyond_the_limit_exits_3(monkeypatch, arguments):
    for limits in (verify.OP_LIMIT, verify.MODEL_LIMIT):
        monkeypatch.setitem(limits, "bfloat16", 1e-9)
    assert bench(*arguments, "--device", "cpu-kernels", "-e", "fused", "-r", "1").exit_code == 3


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_decode_table_has_a_row_for_each_engine(model):
    result = bench(
        "--model", model, "--device", "cpu", "-d", "8", "-n", "2", "-r", "1", "-o", "jsonl"
    )
    made = {row["engine"]: row for row in found(result)}
    assert set(made) == {"reference", "unfused", "fused", "mega"}
    assert made["mega"]["launches_per_token"] == 1
    assert 0 < made["mega"]["moved_bytes"] <= made["fused"]["moved_bytes"]
    assert made["fused"]["launches_per_token"] < made["unfused"]["launches_per_token"] / 2
    assert 0 < made["fused"]["moved_bytes"] < made["unfused"]["moved_bytes"]
    assert made["reference"]["tok_s"] > 0 and made["reference"]["test"] == "tg2 @ d8"


def test_prompts_are_added_behind_the_decode_rows(monkeypatch):
    monkeypatch.setattr(generate, "PREFILL_ROWS", 16)
    monkeypatch.setattr(mega_engine, "_LAUNCH_TOKENS", 8)
    arguments = ("decode", "-m", "tiny", "--device", "cpu", "-d", "8", "-n", "2", "-r", "1")
    made = found(bench(*arguments, "-p", "8,12", "-b", "2", "-o", "jsonl"))
    assert [row["test"] for row in made] == ["tg2 @ d8"] * 3 + ["pp8"] * 3 + ["pp12"] * 3
    rows_of = {(row["test"], row["engine"]): row for row in made}
    for engine in ("unfused", "fused"):
        once, twice = (rows_of[test, engine] for test in ("pp8", "pp12"))
        assert twice["launches_per_token"] > 1.5 * once["launches_per_token"]
        assert twice["moved_bytes"] > once["moved_bytes"] > 0
    timed = rows_of["pp12", "reference"]
    assert timed["tok_s"] == pytest.approx(1e3 * 2 * 12 / timed["samples"][0])
    assert timed["batch"] == 2 and timed["context"] == 0 and timed["max_rel_err"] < 4e-2
    only = found(bench(*arguments, "-p", "8", "-n", "0", "-e", "fused", "-o", "jsonl"))
    assert [row["test"] for row in only] == ["pp8"]
    (mega,) = found(bench(*arguments, "-p", "12", "-n", "0", "-e", "mega", "-o", "jsonl"))
    assert mega["launches_per_token"] == 2  # a piece is one
    table = bench(*arguments, "-p", "8", "-n", "0", "-e", "fused").stdout.splitlines()
    assert table[0].endswith("| ms | ms in graph | t/s | GB/s | max err |")


def test_encoder_has_prompt_rows_only():
    arguments = ("-m", "minilm", "--device", "cpu", "-r", "1", "-o", "jsonl")
    made = found(bench(*arguments))
    assert [(row["test"], row["engine"]) for row in made] == [
        ("pp128", "reference"),
        ("pp128", "unfused"),
        ("pp128", "fused"),
    ]
    assert made[0]["max_rel_err"] < 4e-2
    assert 0 < made[2]["launches_per_token"] < made[1]["launches_per_token"]
    chosen = found(bench(*arguments, "-p", "8,16", "-e", "fused"))
    assert [row["test"] for row in chosen] == ["pp8", "pp16"]


@pytest.mark.parametrize("model", ["gpt-oss-20b", "qwen3-30b-a3b", "mixtral-8x7b"])
def test_counting_a_large_model_takes_no_memory(model):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = bench(
        "-m", model, "--device", "cpu", "-e", "unfused,fused", "-p", "512", "-o", "jsonl"
    )
    made = found(result)
    assert len(made) == 4 and all(row["moved_bytes"] > 1e9 for row in made)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KB


def test_large_model_is_counted_whole_and_timed_cut(monkeypatch):
    monkeypatch.setattr(subject, "REFERENCE_PARAMETERS", 1000)
    monkeypatch.setattr(subject, "CUT_LAYERS", 1)
    result = bench("-m", "tiny", "--device", "cpu", "-d", "8", "-n", "2", "-r", "1", "-o", "jsonl")
    made = {row["engine"]: row for row in found(result)}
    assert made["reference"]["note"] == "1 of 2 layers"
    assert made["fused"]["note"] is None


def test_rows_have_all_fields():
    result = bench(
        "decode",
        "-m",
        "tiny",
        "--device",
        "cpu",
        "-d",
        "8",
        "-n",
        "2",
        "-r",
        "2",
        "-b",
        "1,2",
        "-e",
        "reference",
        "-o",
        "json",
    )
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert [row["batch"] for row in made] == [1, 2]
    fields = (
        "test model engine dtype batch context ms_per_step tok_s gbps pct_ceiling "
        "launches_per_token max_rel_err gpu date commit command samples std"
    )
    assert set(fields.split()) <= set(made[0])
    assert made[0]["command"].startswith("cufuse bench decode -m tiny")
    assert made[0]["dtype"] == "bfloat16" and len(made[0]["date"]) == 10


def test_csv_and_markdown():
    common = ("linear", "--device", "cpu", "--size", "2x24x16", "-e", "fused")
    lines = bench(*common, "-o", "csv", "-oe", "md").stdout.splitlines()
    assert lines[0].startswith("test,engine,dtype,op,sizes") and len(lines) == 2
    table = bench(*common).stdout.splitlines()
    assert table[0].startswith("| op | sizes | dtype | variant | launches | MB moved |")
    assert table[2].startswith("| linear | 2 x 24 x 16 | bfloat16 | fused | 1 |")


def test_rows_are_saved(monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "results_folder", lambda: tmp_path / "results")
    arguments = ("linear", "--device", "cpu", "--size", "2x24x16", "-e", "fused", "--save")
    arguments += ("--commit", "abc1234")
    for _ in range(2):
        assert bench(*arguments).exit_code == 0
    (path,) = (tmp_path / "results").iterdir()
    kept = rows.load(tmp_path / "results")
    assert path.suffix == ".jsonl" and len(kept) == 2
    assert kept[0].commit == "abc1234" and kept[0].op == "linear" and kept[0].sizes == "2 x 24 x 16"


def test_rows_of_peers_are_not_ours(tmp_path):
    ours = Row("op", "fused", "bfloat16", op="linear", sizes="1 x 2 x 3")
    rows.save([replace(ours, date="2026-01-02")], tmp_path)
    peer = {"peer": "torch", "mode": "compile", "test": "pp512", "ms": 1.0}
    (tmp_path / "2026-01-02-peers.jsonl").write_text(json.dumps(peer) + "\n")
    assert [row.op for row in rows.load(tmp_path)] == ["linear"]


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    result = bench("linear", "--device", "cpu", "--size", "2x24x16", "-r", "1", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("no-such-op",), 2, "'no-such-op' is not one of ops, decode, gated_linear"),
        (("linear", "--size", "4x4"), 2, "wanted mxnxk"),
        (("linear", "--size", "a"), 2, "numbers such as"),
        (("decode", "--size", "1x1x1"), 2, "--size needs the name of one op"),
        (("decode", "-e", "turbo"), 2, "'turbo' is not one of"),
        (("-m", "minilm", "-e", "mega"), 4, "engine mega: minilm has layernorm; use engine fused"),
        (("-m", "tiny", "-e", "mega", "-b", "2"), 4, "the batch is 2, wanted 1; use engine fused"),
        (("decode", "--dtype", "int4"), 2, "wanted one of bfloat16"),
        (("decode", "-b", "0"), 2, "at least 1 sequence"),
        (("decode", "-m", "tiny", "-d", "512"), 2, "do not fit the context of tiny, 512"),
        (("decode", "-m", "tinny"), 4, "did you mean tiny"),
        (("decode", "-p", "0"), 2, "at least 1 token"),
        (("decode", "-n", "0"), 2, "add --prompt"),
        (("decode", "-m", "tiny", "-p", "513"), 2, "does not fit the context of tiny, 512"),
    ],
)
def test_wrong_input(arguments, code, sentence):
    result = bench(*arguments, "--device", "cpu")
    assert result.exit_code == code, result.output
    assert sentence in result.stderr and "Traceback" not in result.stderr


def test_gpu_that_is_not_there_exits_4(monkeypatch):
    monkeypatch.setattr(device, "gpu_problem", lambda: "the CUDA driver finds no GPU")
    result = bench("--device", "cuda")
    assert result.exit_code == 4 and "finds no GPU" in result.stderr


# ---- README -------------------------------------------------------------------------------------


def measured(**changes) -> Row:
    row = Row(
        "tg8 @ d16",
        "fused",
        "bfloat16",
        model="tiny",
        batch=1,
        context=16,
        tok_s=100.0,
        tok_s_std=1.0,
        gpu="NVIDIA X",
        date="2026-01-02",
    )
    return replace(row, **changes)


def test_readme_takes_the_newest_row_of_each_case():
    kept = [
        measured(tok_s=1.0),
        measured(engine="unfused"),
        measured(tok_s=2.0),
        measured(gpu=None),
    ]
    chosen = readme.newest(kept)
    assert [(row.engine, row.tok_s) for row in chosen] == [("unfused", 100.0), ("fused", 2.0)]
    text = readme.rewrite(f"a\n{readme.BEGIN}\nold\n{readme.END}\nb\n", kept)
    assert text.startswith(f"a\n{readme.BEGIN}\nNVIDIA X, 2026-01-02:\n\n| model |")
    assert text.endswith(f"|\n{readme.END}\nb\n") and "old" not in text
    assert readme.rewrite(text, kept) == text


def test_readme_keeps_a_table_together():
    kept = [measured(model=model, test=test) for model in "ab" for test in ("pp512", "pp64", "tg8")]
    chosen = [(row.test, row.model) for row in readme.newest(kept)]
    assert chosen[:2] == [("tg8", "a"), ("tg8", "b")]
    assert chosen[2:] == [("pp64", "a"), ("pp512", "a"), ("pp64", "b"), ("pp512", "b")]


def test_readme_without_markers_is_an_error():
    with pytest.raises(ValueError, match="lacks"):
        readme.rewrite("nothing here", [])


def test_readme_is_up_to_date():
    path = Path(__file__).resolve().parent.parent / "README.md"
    assert readme.rewrite(path.read_text(), rows.load()) == path.read_text()


# ---- timing -------------------------------------------------------------------------------------


def test_cpu_timing_stops_at_its_budget():
    calls = []
    time = timing.on_cpu(calls.append, repetitions=3)
    assert len(time.samples) == 3 and len(calls) == 4
    assert timing.on_cpu(calls.append, repetitions=9, budget_ms=-1).samples.__len__() == 1


def test_kernel_names_are_read_from_mangled_ones():
    assert readable("_ZN6cufuse7rmsnormI13__nv_bfloat16EEvT_") == "rmsnorm"
    assert readable("_ZN4cupy3addEv") == "<_ZN4cupy3addEv>"
    assert readable("cupy_add__int") == "<cupy_add__int>"


@pytest.mark.cpu_kernels
def test_read_kernel_reads_every_word():
    """The last vector decides whether the sum is the value that is stored."""
    from cufuse import jit

    for count in (1, 255, 1024, 2500):
        data = device.twin(np.zeros(count * 4, np.uint32))
        data[-1] = 0x5EED5EED
        sink = device.twin(np.zeros(1, np.uint32))
        jit.kernel("unfused/read.cu", "read", 4).launch(
            2, 256, {"data": data, "sink": sink, "count": count, "never": 0x5EED5EED}, like=data
        )
        assert sink[0] == 0x5EED5EED


@pytest.mark.cpu_kernels
def test_pause_takes_its_time():
    from cufuse import jit

    begin = time.perf_counter()
    jit.kernel("unfused/pause.cu", "pause").launch(1, 32, {"ns": 10**8}, like=device.twin([0]))
    assert 0.1 <= time.perf_counter() - begin < 30


@pytest.mark.gpu
def test_gpu_rows_of_an_op_quote_one_time():
    size = ("--size", "256x1024x1024", "--size", "8x1024x1024")
    made = found(bench("linear", *size, "-e", "fused", "-r", "2", "-o", "jsonl"))
    large, small = made
    assert large["tflops"] == pytest.approx(2 * 256 * 1024**2 / large["ms_alone"] / 1e9)
    assert small["gbps"] == pytest.approx(small["moved_bytes"] / small["ms_per_step_graph"] / 1e6)
    for row in made:
        quoted = row["ms_alone"] if row["tflops"] else row["ms_per_step_graph"]
        assert np.median(row["samples"]) == pytest.approx(quoted)
        assert 0 < row["x_cublas"] < 100 and 0 < row["max_rel_err"] < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "engines"),
    [("tiny", "unfused,fused,mega"), ("tiny-moe", "fused"), ("minilm", "fused")],
)
def test_gpu_rows_of_a_prompt(monkeypatch, model, engines):
    monkeypatch.setattr(generate, "PREFILL_ROWS", 64)
    arguments = ("-m", model, "-n", "0", "-p", "150", "-e", engines, "-r", "2", "-o", "jsonl")
    made = found(bench("decode", *arguments))
    assert [row["engine"] for row in made] == engines.split(",")
    for row in made:
        assert row["test"] == "pp150" and row["launches_per_token"] > 0
        assert 0 < row["ms_per_step_graph"] < 2 * row["ms_per_step"]
        assert np.median(row["samples"]) == pytest.approx(row["ms_per_step_graph"])
        assert 0 < row["max_rel_err"] < 4e-2


@pytest.mark.gpu
def test_graph_nodes_see_every_launch():
    import cupy
    from graph_nodes import launched

    x = cupy.ones((2, 64), cupy.float32)
    y, z = cupy.empty_like(x), cupy.empty_like(x)
    stream = cupy.cuda.Stream(non_blocking=True)

    def work() -> None:
        ops.rmsnorm(x, out=y)
        cupy.add(x, y, out=z)

    with stream:
        work()
        names = launched(work, stream)
    assert names[0] == "rmsnorm" and len(names) == 2 and names[1].startswith("<")


@pytest.mark.gpu
def test_gpu_times_are_plausible():
    import cupy

    from cufuse.benchmarks import ceilings

    speed = ceilings.read_gbps()
    assert 100 < speed < 20000
    x = [cupy.ones((64, 4096), cupy.float32) for _ in range(4)]
    run = lambda i: ops.rmsnorm(x[i], out=x[i])  # noqa: E731
    assert 0 < timing.in_graph(run, 4).median <= timing.plain(run, 4).median * 1.5
    assert 0 < timing.alone(run, 4).median < timing.plain(run, 4).median * 1.5


@pytest.mark.gpu
def test_a_call_behind_a_pause_is_timed_without_the_host():
    import cupy

    x = cupy.ones((64, 4096), cupy.float32)

    def run(i):
        time.sleep(2e-3)
        ops.rmsnorm(x, out=x)

    assert timing.alone(run, 1, repetitions=1).median < 1
