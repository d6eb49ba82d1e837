"""Traces: what a buffer says, what is written of it, and a step of the twin from end to end."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import _to_gpu
from models import louder

from cufuse import config as configs
from cufuse import device, engines, jit, plan, tiles, trace, weights
from cufuse.cli import main
from cufuse.config import PRESETS, Config
from cufuse.engines import _decode
from cufuse.state import State

LAYOUT = trace.layout()
CAPACITY = LAYOUT.words - LAYOUT.head
SMALLEST = Config(
    name="smallest",
    dim=32,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_dim=16,
    hidden_dim=40,
    vocab_size=67,
    max_seq_len=64,
)
MIXTURE = dataclasses.replace(SMALLEST, name="mixture", n_experts=4, n_experts_per_token=2)
WALKS = {
    "one MLP": plan.walk(SMALLEST),
    "experts": plan.walk(MIXTURE),
    "both": plan.walk(
        dataclasses.replace(MIXTURE, n_layers=3, dense_layers=(1,), dense_hidden_dim=48)
    ),
}
WALK = WALKS["one MLP"]


@pytest.mark.parametrize(
    "name",
    ["smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b", "olmoe-1b-7b", "gpt-oss-20b"],
)
def test_no_register_is_spilled_for_a_trace(name):
    """On the GPU that traces are made for; what they cost would not be what they show."""
    c = configs.preset(name)
    tile = tiles.decode(c, plan.target("90a", 132), device.bfloat16)
    values = _decode.template(c, device.bfloat16, tile, trace=True)
    assert (
        jit.compile_offline(jit.kernel("mega/decode.cu", "decode", *values), "90a").spill_bytes == 0
    )


# ---- a buffer that a GPU could have written -----------------------------------------------------

CYCLES_PER_US = 1700
Span = tuple[str, float, float]  # activity, begin and end in microseconds


def next_phase(us: float) -> Span:
    return ("next phase", us, us)


class Writer:
    """Writes rows as the kernel does: SMs' clocks stand apart, the timer moves in steps."""

    def __init__(self, ctas: int, rng: np.random.Generator, *, timer_step_ns: int = 32) -> None:
        self.buffer = np.zeros((ctas, len(LAYOUT.roles), LAYOUT.words), np.uint64)
        self.zero = rng.integers(1 << 20, 1 << 44, ctas)  # an SM's clock at time 0
        self.timer_step_ns = timer_step_ns
        for cta in range(ctas):
            for role in LAYOUT.roles:
                self.row(cta, role, [])

    def cycles(self, cta: int, us: float) -> int:
        return int(self.zero[cta]) + round(us * CYCLES_PER_US)

    def timer(self, us: float) -> int:
        ns = 1_700_000_000_000_000_000 + round(us * 1e3)
        return ns // self.timer_step_ns * self.timer_step_ns

    def row(self, cta: int, role: str, spans: list[Span], begin=0.0, end=1000.0) -> None:
        """Those past the row's end are counted only."""
        words = self.buffer[cta, LAYOUT.roles.index(role)]
        words[0] = len(spans)
        words[1], words[2] = self.timer(begin), self.cycles(cta, begin)
        words[3], words[4] = self.timer(end), self.cycles(cta, end)
        for i, (name, *us) in enumerate(spans[:CAPACITY]):
            since, until = (self.cycles(cta, at) for at in us)
            low = until << LAYOUT.activity_bits | LAYOUT.activities.index(name)
            words[LAYOUT.head + i] = (until - since) << 32 | low % (1 << 32)


def test_clocks_of_different_sms_are_aligned(rng):
    """The same moments on eight SMs come out the same, to a fraction of the timer's step."""
    writer = Writer(8, rng, timer_step_ns=1024)
    begins = rng.uniform(0, 5, 8)
    for cta in range(8):
        for role, late in zip(LAYOUT.roles, (0.0, 0.21, 0.77), strict=True):
            writer.row(
                cta,
                role,
                [("finishing", 400.0, 401.5)],
                begins[cta] + late,
                900 + begins[cta] - late,
            )
    made = trace.decode(writer.buffer, walk=WALK)
    assert made.spans.size == 8 * len(LAYOUT.roles)
    ends_apart = made.spans["end_us"].max() - made.spans["end_us"].min()
    assert ends_apart < 1.1
    assert 0 < made.clock_error_us < 0.5
    assert made.spans["end_us"] - made.spans["begin_us"] == pytest.approx(1.5, abs=0.01)
    assert made.roles.min() == 0 and made.us == pytest.approx(900 - begins.min(), abs=8)


def test_spans_nest_and_know_their_phase(rng):
    writer = Writer(2, rng)
    # Written when nothing waits: what is inside comes first.
    spans = [
        next_phase(1.0),
        ("waiting for weights", 3.0, 4.5),
        ("waiting for sums", 5.0, 5.5),
        ("waiting for activations", 1.0, 2.0),
        ("multiplying", 2.0, 8.0),
        next_phase(9.0),
        ("attending", 10.0, 11.0),
        ("merging", 11.0, 12.0),
    ]
    writer.row(1, "multiplier", spans)
    made = trace.decode(writer.buffer, walk=WALK)
    names = [LAYOUT.activities[a] for a in made.spans["activity"]]
    assert names == [
        "waiting for activations",
        "multiplying",
        "waiting for weights",
        "waiting for sums",
        "attending",
        "merging",
    ]
    assert set(made.spans["cta"]) == {1}
    assert made.spans["phase"].tolist() == [0, 0, 0, 0, 1, 1]
    assert made.spans["own_us"] == pytest.approx([1.0, 4.0, 1.5, 0.5, 1.0, 1.0], abs=0.01)
    assert made.phases["phase"].tolist() == [0, 1]
    assert made.phases["begin_us"] == pytest.approx([1.0, 9.0], abs=0.1)
    assert made.phases["end_us"] == pytest.approx([9.0, 1000.0], abs=0.1)
    assert (made.phase(0), made.phase(4), made.phase(5)) == (
        "layer 0 qkv",
        "layer 0 down",
        "head",
    )
    assert made.problem is None


def test_only_the_span_around_loses_what_is_inside(rng):
    """Three deep, with a common begin and a common end."""
    writer = Writer(1, rng)
    spans = [
        ("waiting for sums", 6.0, 8.0),
        ("merging", 4.0, 8.0),
        ("waiting for weights", 1.0, 3.0),
        ("multiplying", 1.0, 10.0),
    ]
    writer.row(0, "multiplier", spans)
    made = trace.decode(writer.buffer, walk=WALK)
    names = [LAYOUT.activities[a] for a in made.spans["activity"]]
    assert names == ["multiplying", "waiting for weights", "merging", "waiting for sums"]
    assert made.spans["own_us"] == pytest.approx([3.0, 2.0, 2.0, 2.0], abs=0.01)


@pytest.mark.parametrize("wraps_at_us", [0.0, 300.0, 450.0, 700.0])
def test_a_clock_that_wraps_is_unwrapped(rng, wraps_at_us):
    """The bits of the clock that a span has begin anew: before, in and after it."""
    writer = Writer(2, rng)
    turn = 1 << LAYOUT.clock_bits
    writer.zero[1] = 5 * turn - round(wraps_at_us * CYCLES_PER_US)
    spans = [next_phase(100.0), ("multiplying", 400.0, 500.0), next_phase(600.0)]
    for cta in range(2):
        for role in LAYOUT.roles:
            writer.row(cta, role, spans)
    made = trace.decode(writer.buffer, walk=WALK)
    assert made.spans["cta"].tolist().count(1) == len(LAYOUT.roles)
    assert made.spans["begin_us"] == pytest.approx(400.0, abs=0.1)
    assert made.spans["end_us"] == pytest.approx(500.0, abs=0.1)
    assert made.phases["begin_us"][made.phases["cta"] == 1].tolist() == pytest.approx(
        [100.0, 600.0] * len(LAYOUT.roles), abs=0.1
    )
    assert made.problem is None


def test_a_launch_in_which_the_clock_comes_round_is_a_problem(rng):
    writer = Writer(2, rng)
    turn_us = (1 << LAYOUT.clock_bits) / CYCLES_PER_US
    writer.row(1, "filler", [], 0.0, turn_us - 1)
    assert trace.decode(writer.buffer, walk=WALK).problem is None
    writer.row(1, "filler", [], 0.0, turn_us + 1)
    made = trace.decode(writer.buffer, walk=WALK)
    assert re.match(r"a role took \d+ cycles and the clock of a span tells", made.problem or "")


def test_spans_beyond_the_row_are_counted(rng):
    writer = Writer(1, rng)
    writer.row(0, "finisher", [("finishing", 1.0, 1.5)] * (CAPACITY + 100))
    made = trace.decode(writer.buffer, walk=WALK)
    assert made.spans.size == CAPACITY
    assert made.dropped == 100
    assert f"100 spans are missing: a role has room for {CAPACITY}" in (made.problem or "")


def test_a_buffer_that_no_traced_launch_wrote_is_refused(rng):
    writer = Writer(2, rng)
    with pytest.raises(ValueError, match=r"the buffer is \[2, 1, 8192\], wanted \[ctas, 3, 8192\]"):
        trace.decode(writer.buffer[:, :1], walk=WALK)
    with pytest.raises(ValueError, match="of CTA 0 did not come to its end"):
        trace.decode(np.zeros_like(writer.buffer), walk=WALK)
    writer.buffer[1, LAYOUT.roles.index("finisher"), 4] = 0
    with pytest.raises(ValueError, match="the finisher of CTA 1 did not come to its end"):
        trace.decode(writer.buffer, walk=WALK)
    writer = Writer(2, rng)
    row = writer.buffer[0, LAYOUT.roles.index("filler")]
    row[0], row[LAYOUT.head] = 1, len(LAYOUT.activities)
    with pytest.raises(ValueError, match="the kernel and this cufuse differ"):
        trace.decode(writer.buffer, walk=WALK)


# ---- what is made of it -------------------------------------------------------------------------


@pytest.fixture(params=WALKS)
def layers(rng, request):
    """Some layers on three CTAs: a phase takes 10 us, and CTA i ends it i us late."""
    writer, walk = Writer(3, rng), WALKS[request.param]
    end = 10.0 * len(walk) + 40
    for cta in range(3):
        multiplier, finisher, filler = [], [], []
        for number, (_, phase) in enumerate(walk):
            at = 10.0 * number
            attends = phase == "attention"
            work = "attending" if attends else "multiplying"
            for spans in (multiplier, finisher, filler):
                spans.append(next_phase(at))
            multiplier += [
                ("waiting for activations", at, at + 3),
                (work, at + 3, at + 5 + cta),
            ]
            if attends:
                multiplier.append(("merging", at + 5 + cta, at + 6 + cta))
            else:
                finisher.append(("finishing", at + 5 + cta, at + 6 + cta))
            filler.append(("waiting for room", at + 1, at + 2))
        writer.row(cta, "multiplier", multiplier, 0.0, end)
        writer.row(cta, "finisher", finisher, 0.0, end)
        writer.row(cta, "filler", filler, 0.0, end)
    return trace.decode(writer.buffer, name="some layers", walk=walk)


def test_shares_add_up_to_the_role(layers):
    shares, phases = trace.shares(layers), len(layers.walk)
    for role in LAYOUT.roles:
        assert sum(s.percent for s in shares if s.role == role) == pytest.approx(100)
    found = {(s.role, s.activity): s.us for s in shares}
    attention = sum(phase == "attention" for _, phase in layers.walk)
    assert found["multiplier", "waiting for activations"] == pytest.approx(3 * phases, abs=0.1)
    assert found["multiplier", "multiplying"] == pytest.approx(3 * (phases - attention), abs=0.1)
    assert found["filler", "other"] == pytest.approx(9 * phases + 40, abs=0.1)


def kinds(walk) -> list[str]:
    """The phases that a walk comes through, as they are listed."""
    there = {phase for _, phase in walk}
    return [phase for phase in (*plan.PHASES, plan.HEAD) if phase in there]


def test_phases_tell_skew_and_hand_off(layers):
    phases = trace.phases(layers)
    assert [p.name for p in phases] == kinds(layers.walk)
    for p in phases:
        assert p.skew_us == pytest.approx(2, abs=0.1)
        assert p.late_us == pytest.approx(1, abs=0.1)
        count = sum(phase == p.name for _, phase in layers.walk)
        # The first one of all begins with the step.
        wanted = 10 - 2 / count if p.name == "qkv" else 10
        assert p.us == pytest.approx(wanted, abs=0.1)
    assert [p.hand_off_us for p in phases[:-1]] == pytest.approx([5] * (len(phases) - 1), abs=0.1)
    assert phases[-1].hand_off_us is None


def test_summary_names_everything(layers):
    text = trace.summary(layers)
    assert re.match(r"some layers: [12]\d0\.\d us, 3 CTAs, clocks aligned to 0\.\d\d us\n", text)
    for word in (*LAYOUT.roles, *kinds(layers.walk), "waiting for activations", "other"):
        assert re.search(rf"^\|.* {word} \|", text, re.MULTILINE), word
    assert ("experts" in text) == any(phase == "experts" for _, phase in layers.walk)


def check_chrome(found, ctas: int) -> None:
    """What the Trace Event Format asks for, and that slices of a thread nest."""
    events = found["traceEvents"]
    named = [e for e in events if e["ph"] == "M"]
    for kind, count in (("process_name", ctas), ("thread_name", ctas * len(LAYOUT.roles))):
        assert sum(e["name"] == kind for e in named) == count
    complete = [e for e in events if e["ph"] == "X"]
    assert len(named) + len(complete) == len(events) and complete
    assert [e["ts"] for e in complete] == sorted(e["ts"] for e in complete)
    names = {*LAYOUT.activities, plan.HEAD}
    stacks: dict[tuple[int, int], list[float]] = {}
    for e in complete:
        assert e["name"] in names or re.fullmatch(r"layer \d+ \w+", e["name"])
        for key in ("ts", "dur"):
            assert type(e[key]) in (int, float) and e[key] >= 0
        assert 0 <= e["pid"] < ctas and 0 <= e["tid"] < len(LAYOUT.roles)
        stack = stacks.setdefault((e["pid"], e["tid"]), [])
        while stack and stack[-1] <= e["ts"] + 1e-6:
            stack.pop()
        end = e["ts"] + e["dur"]
        assert not stack or end <= stack[-1] + 2e-3
        stack.append(end)


def test_chrome_json_is_what_perfetto_reads(layers, tmp_path):
    path = tmp_path / "trace.json"
    trace.write(layers, path)
    found = json.loads(path.read_text())
    check_chrome(found, 3)
    assert found["otherData"]["traced"] == "some layers"
    names = [e["name"] for e in found["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
    for layer, phase in layers.walk[:-1]:
        assert names.count(f"layer {layer} {phase}") == len(LAYOUT.roles)
    assert names.count(plan.HEAD) == len(LAYOUT.roles)
    assert names.count("attending") == sum(phase == "attention" for _, phase in layers.walk)


def test_raster_shows_the_inner_span(rng):
    writer = Writer(2, rng)
    spans = [("waiting for weights", 500.0, 600.0), ("multiplying", 100.0, 900.0)]
    writer.row(1, "multiplier", spans)
    made = trace.decode(writer.buffer, walk=WALK)
    grid = trace.raster(made, LAYOUT.roles.index("multiplier"), 10)
    nothing, multiplying = -1, LAYOUT.activities.index("multiplying")
    assert (grid[0] == nothing).all()
    assert grid[1, 0] == nothing and grid[1, 9] == nothing
    assert grid[1, 2] == multiplying and grid[1, 7] == multiplying
    assert grid[1, 5] == LAYOUT.activities.index("waiting for weights")


def test_picture(layers, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "trace.png"
    trace.draw(layers, path)
    assert path.read_bytes().startswith(b"\x89PNG")


# ---- one source ---------------------------------------------------------------------------------


def test_every_activity_has_a_colour():
    assert set(trace.COLORS) == set(LAYOUT.activities) - {"next phase"}


def test_phases_are_those_that_the_kernel_walks_through():
    device_text = (jit.sources() / "device" / "decode_role.cuh").read_text()
    mlp = tuple(re.search(r"enum class MlpPhase \{ (.+) \};", device_text)[1].split(", "))
    text = (jit.sources() / "mega" / "decode.cu").read_text()
    called = re.findall(r"^ +(?:(?:if|for) .*)?role\.(?:template )?(\w+)[(<]", text, re.MULTILINE)
    walked = [name for name in called if name not in {"n", "begin", "is_dense", "end"}]
    before, dense = plan.PHASES[:3], plan.layer_phases(SMALLEST, 0)[3:]
    assert walked == [*before, "mlp", "down", "combine", *dense, plan.HEAD]
    assert (*before, *mlp, "down") == plan.PHASES
    assert (*before, *mlp[:3]) == plan.layer_phases(MIXTURE, 0) and (*mlp[3:], "down") == dense
    both = dataclasses.replace(MIXTURE, n_layers=2, dense_layers=(0,), dense_hidden_dim=8)
    assert plan.layer_phases(both, 0) == (*plan.PHASES[:3], *plan.PHASES[6:])
    assert plan.layer_phases(both, 1) == plan.PHASES[:6]


# ---- a step -------------------------------------------------------------------------------------


def traced_and_not(config, to) -> tuple[trace.Trace, int, int]:
    """Trace a step of a small model, and run the same step without."""
    made = louder(weights.random(config, dtype=np.float32, kind="numpy")).map(to)
    state = State(made, capacity=20)
    trace.fill_cache(state, 19)
    stepper = trace.Stepper(engines.get("mega").step_and_draw, made, state)
    found, token = stepper.trace(config.name, warm_up=0)
    stepper.enqueue(traced=False)
    return found, token, stepper.token()


def check_step(found: trace.Trace, config: Config) -> None:
    assert found.problem is None
    inside = {(s["role"], LAYOUT.activities[s["activity"]]) for s in found.spans}
    for role, activity in (
        ("multiplier", "waiting for activations"),
        ("multiplier", "gathering"),
        ("multiplier", "multiplying"),
        ("multiplier", "attending"),
        ("finisher", "finishing"),
    ):
        assert (LAYOUT.roles.index(role), activity) in inside
    assert found.walk == plan.walk(config)
    assert found.phases.size == found.ctas * len(LAYOUT.roles) * len(found.walk)
    assert [p.name for p in trace.phases(found)] == kinds(found.walk)


SMALL_MODELS = pytest.mark.parametrize(
    "config", [SMALLEST, MIXTURE], ids=lambda config: config.name
)


@pytest.mark.slow
@pytest.mark.cpu_kernels
@SMALL_MODELS
def test_the_twin_draws_the_same_token_traced(config):
    found, traced, plain = traced_and_not(config, device.twin)
    assert traced == plain
    check_step(found, config)


@pytest.mark.gpu
@SMALL_MODELS
def test_a_gpu_draws_the_same_token_traced(config):
    found, traced, plain = traced_and_not(config, _to_gpu)
    assert traced == plain
    check_step(found, config)
    assert found.clock_error_us < 5


@pytest.mark.gpu
def test_traced_steps_are_timed():
    made = weights.random(PRESETS["tiny"], dtype=device.bfloat16, kind="cupy")
    state = State(made, capacity=40)
    trace.fill_cache(state, 39)
    stepper = trace.Stepper(engines.get("mega").step_and_draw, made, state)
    untraced_us, traced_us = stepper.cost(5)
    assert 1 < untraced_us < 1e5 and 1 < traced_us < 1e5


# ---- the command --------------------------------------------------------------------------------


def run(*arguments: str):
    return CliRunner().invoke(main, ["trace", *arguments])


@pytest.mark.slow
@pytest.mark.cpu_kernels
@SMALL_MODELS
def test_command_writes_a_timeline(config, monkeypatch, tmp_path):
    monkeypatch.setitem(PRESETS, config.name, dataclasses.replace(config, n_layers=2))
    path = tmp_path / "trace.json"
    arguments = (config.name, "-o", str(path), "--layers", "1", "--context", "5")
    result = run(*arguments, "--dtype", "fp32", "--device", "cpu-kernels")
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    ctas = int(re.search(r"(\d+) CTAs", result.stdout)[1])  # type: ignore[index]
    check_chrome(found, ctas)
    assert found["otherData"]["traced"] == f"{config.name} (1 layers), float32, 5 in the cache"
    assert "| multiplier | waiting for activations |" in result.stdout
    for phase in kinds(plan.walk(config)):
        assert f"| {phase} |" in result.stdout
    assert f"wrote {path}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "sentence"),
    [
        (("tinny",), 4, "unknown model tinny: did you mean tiny"),
        (("tiny", "--context", "512"), 2, "512 tokens in the cache and one more do not fit"),
        (("tiny", "--context", "-1"), 2, "--context"),
        (("tiny", "--layers", "0"), 2, "--layers"),
        (("tiny", "--dtype", "int8"), 2, "wanted one of bfloat16"),
        (("tiny", "-o", "no-folder/x.json"), 2, "there is no folder no-folder"),
        (("tiny", "--png", "no-folder/x.png"), 2, "there is no folder no-folder"),
        (("minilm",), 4, "minilm has layernorm"),
        ((), 2, "Missing argument 'MODEL'"),
    ],
)
@pytest.mark.cpu_kernels
def test_wrong_input(arguments, exit_code, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments, "--device", "cpu-kernels")
    assert result.exit_code == exit_code, result.output
    assert sentence in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == "" and not (tmp_path / "trace.json").exists()


def test_gpu_that_is_not_there_exits_4(monkeypatch):
    monkeypatch.setattr(device, "gpu_problem", lambda: "the CUDA driver finds no GPU")
    result = run("tiny")
    assert result.exit_code == 4
    assert "--device cuda: the CUDA driver finds no GPU" in result.stderr


@pytest.mark.cpu_kernels
def test_png_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("tiny", "--png", str(tmp_path / "x.png"), "--device", "cpu-kernels")
    assert result.exit_code == 4
    assert 'pip install "cufuse[plot]"' in result.stderr


def test_spans_that_are_missing_fail_the_command(monkeypatch, tmp_path):
    """The timeline is written all the same."""
    made = dataclasses.replace(
        trace.decode(Writer(1, np.random.default_rng(0)).buffer, walk=WALK), dropped=7
    )
    monkeypatch.setattr(trace.Stepper, "trace", lambda self, name: (made, 3))
    path = tmp_path / "trace.json"
    arguments = ("tiny", "-o", str(path), "--layers", "1", "--context", "1")
    result = run(*arguments, "--device", "cpu-kernels")
    assert result.exit_code == 1
    assert "7 spans are missing" in result.stderr and path.exists()
