"""The plan of the decode kernel: it covers a model, is balanced, and nobody is lapped or stuck."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import plan_checks
import pytest
from click.testing import CliRunner
from conftest import to_numpy
from plan_checks import Stuck, check_coverage, lapped, simulate

from cufuse import config, jit, mxfp4, plan, tiles
from cufuse.cli import main
from cufuse.config import Config
from cufuse.engines import _decode
from cufuse.plan import AwaitChoice, Choose, Finish, Gather, Leave, Plan, Publish, Wait, Words
from cufuse.tiles import DecodeTile

bfloat16 = np.dtype(ml_dtypes.bfloat16)
HOPPER = plan.target("90a", 132)

MIXTURES = ("tiny-moe", "olmoe-1b-7b", "qwen3-30b-a3b")
FOUR_BITS = "gpt-oss-20b"
DENSE = ("tiny", "smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")
# Odd sizes: K that is no whole tile, a last panel of half its rows, three layers with a window on
# every second, a vocabulary that is no multiple of 16, more KV heads than some grids have CTAs.
SMALL = {
    "window": dataclasses.replace(
        config.preset("tiny"), dim=72, hidden_dim=88, n_heads=6, head_dim=48, n_layers=3,
        vocab_size=507, window=40, window_every=2,
    ),
    "narrow": dataclasses.replace(config.preset("tiny"), hidden_dim=64, vocab_size=512),
    "many heads": dataclasses.replace(
        config.preset("tiny"), dim=40, n_heads=12, n_kv_heads=12, head_dim=16, n_layers=1,
        hidden_dim=232, vocab_size=401,
    ),
    # One layer has fewer tiles than a grid of 50 has CTAs, the head more.
    "wide head": dataclasses.replace(
        config.preset("tiny"), hidden_dim=64, n_layers=1, vocab_size=1024
    ),
}  # fmt: skip
# A norm over all heads; biases, clamps and a router with a bias; a shared expert with a gate and
# parts of K narrower than it, of more logits than panels of the experts alone; groups, sigmoids, a
# dense layer among others and experts of which no CTA of some grids has any; 4-bit experts whose
# rows are no whole tiles, around a dense layer.
MIXED = {
    "full norm": dataclasses.replace(
        config.preset("tiny-moe"),
        dim=72,
        hidden_dim=40,
        n_heads=6,
        n_kv_heads=2,
        head_dim=16,
        vocab_size=507,
        n_experts=6,
    ),
    "biased": dataclasses.replace(
        config.preset("tiny-moe"),
        dim=40,
        hidden_dim=88,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        vocab_size=401,
        n_layers=3,
        n_experts=3,
        n_experts_per_token=1,
        router="topk_softmax",
        router_bias=True,
        mlp_bias=True,
        swiglu_limit=7.0,
        qk_norm="none",
        window=40,
        window_every=2,
    ),
    "shared": dataclasses.replace(
        config.preset("tiny-moe"),
        dim=64,
        hidden_dim=96,
        vocab_size=507,
        n_experts=16,
        n_experts_per_token=2,
        shared_hidden_dim=240,
        shared_gated=True,
        qk_norm="none",
    ),
    "groups": dataclasses.replace(
        config.preset("tiny-moe"),
        dim=48,
        hidden_dim=8,
        vocab_size=800,
        n_layers=4,
        n_experts=12,
        n_experts_per_token=3,
        router="sigmoid_topk",
        router_correction=True,
        router_groups=4,
        router_top_groups=2,
        routed_scale=2.5,
        shared_hidden_dim=16,
        dense_layers=(0, 2),
        dense_hidden_dim=104,
        qk_norm="none",
    ),
    "4 bits": dataclasses.replace(
        config.preset("tiny-moe"),
        dim=96,
        hidden_dim=160,
        n_layers=3,
        vocab_size=507,
        n_experts=5,
        n_experts_per_token=2,
        expert_dtype="mxfp4",
        dense_layers=(1,),
        dense_hidden_dim=72,
    ),
    "all chosen": dataclasses.replace(
        config.preset("tiny-moe"),
        n_layers=1,
        hidden_dim=24,
        n_experts=4,
        n_experts_per_token=4,
        vocab_size=401,
    ),
}
SMALL |= MIXED
CONTEXTS = (0, 1, 63, 64, 65, 511, 8191, 32768)


def on_hopper(c: Config, context: int, kind=Plan, **options) -> Plan:
    return kind(c, bfloat16, tiles.decode(c, HOPPER, bfloat16), context, **options)


def small(name: str, ctas: int, context: int, kind=Plan, dtype=bfloat16, **options) -> Plan:
    tile = DecodeTile(ctas, 6, 2048 * np.dtype(dtype).itemsize, 2, 1, "bulk", 1)
    return kind(SMALL[name], np.dtype(dtype), tile, context, **options)


# ---- coverage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("ctas", [1, 5, 31])
@pytest.mark.parametrize("name", SMALL)
def test_every_byte_is_read_once_and_every_row_written_once(name, ctas, context):
    check_coverage(small(name, ctas, context))


@pytest.mark.parametrize("context", [0, 64, 511, 8191])
@pytest.mark.parametrize("name", [*DENSE, *MIXTURES, FOUR_BITS])
def test_presets_are_covered(name, context):
    check_coverage(on_hopper(config.preset(name).cut(1), context))


@pytest.mark.parametrize(
    "options",
    [{}, {"n_given": 2}, {"n_given": 2, "all_logits": True}, {"n_given": 2, "filtered": True}],
)
def test_every_token_of_a_launch_is_covered(options):
    check_coverage(small("window", 7, 63, dtype=np.float32, n_tokens=3, **options))


class TileTwice(Plan):
    """CTA 0 takes a tile of its neighbour too."""

    def tiles_of(self, step, cta):
        mine = super().tiles_of(step, cta)
        return (*mine, *super().tiles_of(step, 1)) if cta == 0 and step.phase == "down" else mine


class TileLost(Plan):
    """CTA 0 forgets its last tile."""

    def tiles_of(self, step, cta):
        mine = super().tiles_of(step, cta)
        return mine[:-1] if cta == 0 and step.phase == "gate_up" else mine


class WrongSplit(Plan):
    """Every split begins with the last chunk of the one before."""

    def split(self, token, layer):
        found = super().split(token, layer)
        return found._replace(first_chunk=max(found.first_chunk - 1, 0))


class AscendingFills(Plan):
    """The ring is filled in another order than it is emptied."""

    def filler(self, cta):
        return iter(sorted(super().filler(cta), key=lambda fill: (fill.step, fill.tile)))


@pytest.mark.parametrize(
    "kind, says",
    [
        (TileTwice, r"down: .* twice"),
        (TileLost, r"gate_up: .* not at all"),
        (WrongSplit, "k_cache"),
        (AscendingFills, "in another order"),
    ],
)
def test_a_plan_that_does_not_cover_is_found(kind, says):
    check_coverage(small("window", 5, 511))
    with pytest.raises(AssertionError, match=says):
        check_coverage(small("window", 5, 511, kind=kind))


# ---- balance ------------------------------------------------------------------------------------

# By how much the CTA with the most bytes may be above the mean of 132, at context 512. The layers
# of SmolLM2 are 2.5 rounds of tiles there: the extra tiles go to the same CTAs again and again.
OVER_THE_MEAN = {
    "smollm2-135m": 0.45,
    "qwen3-0.6b": 0.02,
    "llama-3.2-1b": 0.015,
    "llama-3.1-8b": 0.01,
}


class StartsAnew(Plan):
    """Every phase begins with CTA 0."""

    @functools.cached_property
    def steps(self):
        return tuple(step._replace(turn=0) for step in Plan.steps.func(self))


def over_the_mean(made: Plan) -> float:
    load = made.totals()["cta_bytes"]
    return load["max"] / load["mean"] - 1


@pytest.mark.parametrize("name", OVER_THE_MEAN)
def test_ctas_have_about_as_many_bytes(name):
    c = config.preset(name)
    assert over_the_mean(on_hopper(c, 512)) < OVER_THE_MEAN[name]
    tile = tiles.decode(c, HOPPER, bfloat16)
    assert over_the_mean(StartsAnew(c, bfloat16, tile, 512)) > OVER_THE_MEAN[name]


@pytest.mark.parametrize("context", [0, 511, 8191])
@pytest.mark.parametrize("name", [*DENSE, *MIXTURES, FOUR_BITS])
def test_ctas_have_as_many_tiles_a_token_but_for_one(name, context):
    made = on_hopper(config.preset(name), context)
    counts = [
        sum(len(made.tiles_of(step, cta)) for step in made.steps) for cta in range(made.tile.ctas)
    ]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == sum(step.tiles for step in made.steps)


# ---- nobody is lapped ---------------------------------------------------------------------------

DRAWN = {"n_tokens": 3}
GIVEN = {"n_tokens": 3, "n_given": 3}
SCORED = {"n_tokens": 3, "n_given": 3, "all_logits": True}
FILTERED = {"n_tokens": 4, "n_given": 2, "filtered": True}
LAUNCHES = pytest.mark.parametrize(
    "options",
    [DRAWN, GIVEN, SCORED, FILTERED],
    ids=["drawn", "given", "scored", "filtered"],
)


@LAUNCHES
@pytest.mark.parametrize("context", [0, 64, 511])
@pytest.mark.parametrize("ctas", [2, 5, 24])
@pytest.mark.parametrize("name", SMALL)
def test_no_words_are_overwritten_before_all_have_read_them(name, ctas, context, options):
    assert lapped(small(name, ctas, context, **options)) == []


@LAUNCHES
@pytest.mark.parametrize("context", [511])
@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_no_words_of_presets_are_overwritten_before_all_have_read_them(name, context, options):
    assert lapped(on_hopper(config.preset(name).cut(2), context, **options)) == []


def test_the_place_of_what_was_appended_is_not_taken_too_early():
    assert lapped(small("narrow", 5, 511, **DRAWN)) == []


@pytest.mark.parametrize("options", [GIVEN, SCORED], ids=["given", "scored"])
def test_a_given_token_does_not_lap_the_one_before(options):
    assert lapped(small("wide head", 50, 0, **options)) == []


class IdleReads(Plan):
    """A CTA without a tile gathers all the same, and publishes nothing."""

    def multiplier(self, cta):
        for step in self.steps:
            if step.phase == "gate_up" and not self.tiles_of(step, cta):
                yield Gather(self._x(step))
            yield from (event for event in super().multiplier(cta) if event_step(event) == step)


def event_step(event):
    """The step of an event that has one."""
    return getattr(event, "step", None)


def test_a_reader_that_publishes_nothing_is_found():
    assert any("middle" in who for who in lapped(small("narrow", 24, 0, kind=IdleReads, **DRAWN)))


def test_a_cta_without_a_panel_of_the_head_is_found():
    made = small("narrow", 200, 0, **DRAWN)  # with 32 panels
    assert any("best" in who for who in lapped(made))


class LooksLate(Plan):
    """A CTA looks for an id when it has said what it found behind the next token."""

    def finisher(self, cta):
        for event in super().finisher(cta):
            yield event
            if cta == 1 and type(event) is Publish and "best" in (w.region for w in event.words):
                yield Wait(self.embeds(event.words[0].tag // self.config.n_layers))


def test_one_place_for_the_id_is_enough_only_if_all_look_in_time():
    assert lapped(small("narrow", 5, 0, **FILTERED)) == []
    assert any("drawn" in who for who in lapped(small("narrow", 5, 0, LooksLate, **FILTERED)))


class OverwritesEarly(Plan):
    """A token that is drawn does not wait for the draw."""

    def embeds(self, token):
        return ()


def test_logits_that_are_overwritten_too_early_are_found():
    assert lapped(small("wide head", 50, 0, **FILTERED)) == []
    made = small("wide head", 50, 0, OverwritesEarly, **FILTERED)
    assert any("logits" in who for who in lapped(made))


class OnePlace(Plan):
    """All tokens say in one place that a row is in the cache."""

    def _appended(self, token, layer, head):
        found = super()._appended(token, layer, head)
        at = layer * self.config.n_kv_heads + head
        return found._replace(begin=at, end=at + 1)


class GivenAtOnce(Plan):
    """A given token does not wait for the one before."""

    def follows(self, token):
        return () if token < self.n_given else self.embeds(token)

    embeds_anyway = Plan.embeds

    def embeds(self, token):
        return () if token < self.n_given else self.embeds_anyway(token)


def test_one_place_for_what_was_appended_is_found():
    assert any("appended" in who for who in lapped(small("narrow", 5, 511, OnePlace, **DRAWN)))


@pytest.mark.parametrize("options", [GIVEN, SCORED], ids=["given", "scored"])
def test_given_tokens_at_once_are_found(options):
    assert any(
        "middle" in who or "x:" in who
        for who in lapped(small("wide head", 50, 0, GivenAtOnce, **options))
    )


# ---- nobody is stuck ----------------------------------------------------------------------------


@pytest.mark.parametrize("unfair", [False, True], ids=["any order", "unfair"])
@LAUNCHES
@pytest.mark.parametrize("context", [0, 64, 300])
@pytest.mark.parametrize("ctas", [1, 3, 7])
@pytest.mark.parametrize("name", SMALL)
def test_roles_come_to_an_end_in_any_order(name, ctas, context, options, unfair):
    for seed in range(2):
        simulate(small(name, ctas, context, **options), seed, unfair=unfair)


class Ascending(Plan):
    """A CTA goes through its splits from the first on, which waits for the others."""

    def tiles_of(self, step, cta):
        mine = super().tiles_of(step, cta)
        return mine[::-1] if step.phase == "attention" else mine


def stuck(made: Plan, seeds: int = 40) -> str:
    """What the first simulation that gets stuck says."""
    for seed in range(seeds):
        try:
            simulate(made, seed, unfair=True)
        except Stuck as error:
            return str(error)
    return ""


def test_splits_in_ascending_order_wait_for_themselves():
    assert stuck(small("narrow", 2, 300)) == ""
    assert "parts" in stuck(small("narrow", 2, 300, kind=Ascending), 1)
    with pytest.raises(AssertionError, match="waits for itself"):
        lapped(small("narrow", 2, 300, kind=Ascending))


def test_a_simulation_finds_who_is_lapped():
    assert "middle" in stuck(small("narrow", 24, 0, IdleReads, n_tokens=2))
    assert "appended" in stuck(small("narrow", 16, 200, OnePlace, **DRAWN))


class AwaitsEarly(Plan):
    """A finisher waits for the choice before what is shared, of which the ring is full."""

    def finisher(self, cta):
        events, first = [], None
        for event in super().finisher(cta):
            if type(event) is Finish and event.step.phase == "experts" and first is None:
                first = len(events)
            if type(event) is AwaitChoice and first is not None:
                events.insert(first, event)
            else:
                events.append(event)
            if type(event) in (Leave, AwaitChoice):
                first = None
        return iter(events)


def test_what_is_shared_waits_for_no_choice():
    assert stuck(small("shared", 1, 0)) == ""
    assert "room in the ring" in stuck(small("shared", 1, 0, AwaitsEarly), 1)


class NeverLeaves(Plan):
    """A finisher does not say that it needs a choice no more."""

    def finisher(self, cta):
        return (event for event in super().finisher(cta) if type(event) is not Leave)


def test_a_choice_that_is_never_left_is_found():
    assert "the choice before to be left" in stuck(small("full norm", 3, 0, NeverLeaves), 1)


class TakesPartForNobody(Plan):
    """A CTA without any of the experts looks at the router's logits, and publishes nothing."""

    def filler(self, cta):
        yield from super().filler(cta)
        for step in self.steps:
            if step.phase == "router" and cta == self.tile.ctas - 1:
                tag = self.tag(step.token, step.layer)
                yield Choose((Words("router", 0, self.router_logits, tag),))


def test_who_looks_at_logits_and_has_no_part_in_what_follows_is_found():
    assert lapped(small("groups", 50, 0, **DRAWN)) == []
    made = small("groups", 50, 0, TakesPartForNobody, **DRAWN)
    assert any("router" in who for who in lapped(made))


class LostStage(Plan):
    """One stage is never filled."""

    def filler(self, cta):
        events = list(super().filler(cta))
        return iter(events[:-1] if cta == 1 else events)


def test_a_stage_that_is_never_filled_is_found():
    assert "stage" in stuck(small("narrow", 5, 64, kind=LostStage), 1)


# ---- the kernel says the same -------------------------------------------------------------------

POSITIONS = sorted(
    {0, 1, 2, *(64 * n + i for n in (1, 2, 4, 8, 17, 128) for i in (-1, 0, 1)), 32768}
)
WINDOWS = (0, 1, 40, 64, 128, 4096)
SHAPES = {
    "tiny": (config.preset("tiny"), np.float32, DecodeTile(4, 6, 8192, 2, 1, "bulk", 2)),
    "full norm": (SMALL["full norm"], np.float32, DecodeTile(4, 6, 8192, 2, 1, "bulk", 2)),
    "shared": (SMALL["shared"], bfloat16, DecodeTile(3, 7, 4096, 3, 2, "bulk", 1)),
    "groups": (SMALL["groups"], np.float16, DecodeTile(5, 7, 4096, 3, 2, "bulk", 1)),
    "4 bits": (SMALL["4 bits"], np.float32, DecodeTile(4, 6, 8192, 2, 1, "bulk", 2)),
    "gpt-oss": (config.preset(FOUR_BITS), bfloat16, None),
    "olmoe": (config.preset("olmoe-1b-7b"), bfloat16, None),
    "mixtral": (config.preset("mixtral-8x7b"), bfloat16, None),
    "window": (SMALL["window"], bfloat16, DecodeTile(3, 7, 4096, 3, 2, "bulk", 1)),
    "many heads": (SMALL["many heads"], np.float16, DecodeTile(24, 7, 8192, 2, 2, "bulk", 4)),
    "llama": (config.preset("llama-3.2-1b"), bfloat16, None),
    "qwen": (config.preset("qwen3-0.6b"), bfloat16, None),
}


PRODUCTS = [*(p for p in plan.PHASES if p != "attention"), plan.HEAD]


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("name", SHAPES)
def test_kernel_has_the_same_sizes_and_cuts(to_kernels, name):
    c, dtype, tile = SHAPES[name]
    tile = tile or tiles.decode(c, HOPPER, dtype)
    made = Plan(c, np.dtype(dtype), tile, 0)
    asked = [(position, window) for position in POSITIONS for window in WINDOWS]
    outs = {
        "sizes": np.full(7, -1, np.int32),
        "regions": np.full(14, -1, np.int32),
        "panels": np.full(len(PRODUCTS), -1, np.int32),
        "cuts": np.full((len(PRODUCTS), len(plan.PanelCut._fields)), -1, np.int32),
        "positions": np.array([position for position, _ in asked], np.int32),
        "windows": np.array([window for _, window in asked], np.int32),
        "splits": np.full((len(asked), 6), -1, np.int32),
    }
    args = {field: to_kernels(array) for field, array in outs.items()}
    kernel = jit.kernel(
        "decode_plan.cu",
        "decode_plan",
        *_decode.template(c, np.dtype(dtype), tile),
        root=Path(__file__).parent / "twin" / "primitives",
    )
    kernel.launch(1, 32, {**args, "n": len(asked)}, like=args["sizes"])
    got = {field: to_numpy(array).tolist() for field, array in args.items()}

    assert got["sizes"] == [
        tiles.decode_shared_bytes(c, dtype, tile),
        tiles.DECODE_THREADS,
        made.keys,
        tiles.most_splits(c),
        plan.READ_SPLITS,
        plan.PANEL_GROUPS,
        plan_checks.PARTIALS,
    ]
    regions = tiles.decode_regions(c, dtype, tile).values()
    assert got["regions"] == [0, *np.cumsum(list(regions)).tolist()]
    assert got["regions"][-1] == tiles.decode_words(c, dtype, tile)
    there = {phase for _, phase in plan.walk(c)}
    for i, phase in enumerate(PRODUCTS):
        if phase in there:
            assert got["panels"][i] == made.panels(phase), phase
            assert got["cuts"][i] == list(made.cut(phase)), phase
    assert got["splits"] == [
        list(
            plan.split_cache(
                position,
                window,
                keys=made.keys,
                split_chunks=tile.split_chunks,
                most_splits=tiles.most_splits(c),
            )
        )
        for position, window in asked
    ]


def test_panels_are_cut_as_they_are_packed():
    for k in (8, 40, 72, 576, 1024, 2048, 5120, 14336, 17408):
        for itemsize in (2, 4):
            for stage_bytes in (4096, 8192, 16384):
                cut = plan.cut_panel(k, itemsize, stage_bytes)
                sizes = [cut.block_bytes(block) for block in range(cut.blocks)]
                assert sum(sizes) == cut.size_bytes >= 16 * k * itemsize
                assert max(sizes) <= stage_bytes and min(sizes) > 0
                assert 4 * cut.quarter_tiles >= cut.block_tiles


def test_panels_of_4_bits_are_cut_as_they_are_packed():
    for k in (32, 96, 2080, 2880):
        for parts in (1, 3):
            cut = plan.cut_mxfp4(k, 4096, parts)
            sizes = [cut.block_bytes(block) for block in range(cut.blocks)]
            assert sum(sizes) == cut.size_bytes == parts * mxfp4.packed_bytes(1, 16, k)
            assert max(sizes) <= 4096 and min(sizes) > 0
            assert 4 * cut.quarter_tiles >= cut.block_tiles


# ---- in print -----------------------------------------------------------------------------------


def test_plan_in_print():
    made = on_hopper(config.preset("llama-3.2-1b"), 512)
    found = json.loads(json.dumps(made.as_dict()))
    assert found["launches"] == 1 and found["hand_offs"] == 16 * 5 + 1
    rows = {row["phase"]: row for row in found["phases"]}
    assert list(rows) == [*plan.layer_phases(config.preset("llama-3.2-1b"), 0), plan.HEAD]
    assert rows["qkv"]["tiles"] == 3072 // 16 and rows["head"]["tiles"] == 128256 // 16
    weights = sum(
        row["tiles"] * row["layers"] * made.cut(phase).size_bytes
        for phase, row in rows.items()
        if phase != "attention"
    )
    assert found["weight_bytes"] == weights
    assert found["cache_bytes"] == 16 * 2 * 512 * 512 * 2
    mean = found["cta_bytes"]["mean"]
    assert math.isclose(132 * mean, weights + found["cache_bytes"], rel_tol=1e-6)
    shared = found["shared_bytes"]
    assert sum(shared.values()) == 2 * shared["total"]
    text = made.text()
    assert "81 hand-offs" in text and "| gate_up | 16 | 1024 |" in text


def test_layers_with_a_window_have_a_row_of_their_own():
    made = small("window", 5, 511)
    rows = [row for row in made.rows() if row.phase == "attention"]
    assert [(row.layers, row.splits) for row in sorted(rows, key=lambda row: row.layers)] == [
        (1, made.split(0, 1).n_splits),
        (2, made.split(0, 0).n_splits),
    ]


def kernels_plan(*arguments: str):
    return CliRunner().invoke(main, ["kernels", "--plan", *arguments])


def test_kernels_prints_a_plan():
    c = config.preset("qwen3-0.6b")
    made = on_hopper(c, 512)
    assert kernels_plan(c.name).stdout == made.text() + "\n"
    assert json.loads(kernels_plan(c.name, "-o", "json").stdout) == made.as_dict()
    lines = kernels_plan(c.name, "-o", "jsonl").stdout.splitlines()
    assert [json.loads(line) for line in lines] == made.as_dict()["phases"]
    head, *rows = kernels_plan(c.name, "-o", "csv").stdout.splitlines()
    assert head.startswith("phase,layers,tiles,") and len(rows) == 6


def test_kernels_plans_for_another_gpu_context_and_dtype():
    arguments = ("--arch", "86", "--sms", "84", "--context", "100", "--dtype", "fp16", "-o", "json")
    found = json.loads(kernels_plan("tiny", *arguments).stdout)
    target = plan.target("86", 84)
    c = config.preset("tiny")
    made = Plan(c, np.dtype(np.float16), tiles.decode(c, target, np.dtype(np.float16)), 100)
    assert found == made.as_dict()
    assert found["shared_bytes"]["total"] <= target.shared_bytes


@pytest.mark.parametrize(
    "arguments, code, says",
    [
        (["tinny"], 4, "did you mean tiny"),
        (["minilm"], 4, "minilm has layernorm"),
        (["tiny", "--context", "512"], 2, "the context of tiny is 512"),
        (["tiny", "--arch", "80,90a"], 2, "one --arch"),
        (["tiny", "--compile"], 2, "--plan goes with"),
        (["tiny", "--arch", "77"], 2, "'77' is not one of"),
    ],
)
def test_kernels_says_what_cannot_be_planned(arguments, code, says):
    result = kernels_plan(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert says in result.stderr and "Traceback" not in result.stderr


def test_options_of_a_plan_want_a_plan():
    result = CliRunner().invoke(main, ["kernels", "--context", "3"])
    assert result.exit_code == 2 and "go with --plan" in result.stderr
