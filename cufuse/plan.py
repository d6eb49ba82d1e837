"""What a decode kernel does, as data: no GPU is needed to print it or to test it.

`Plan` is kernels_cu/device/decode_roles.cuh in Python: its methods `filler`, `multiplier` and
`finisher` list what the roles of a CTA do, event by event, in the order of their code there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from cufuse import pack, tiles
from cufuse.config import Config
from cufuse.tiles import DecodeTile, Target

PANEL_ROWS = 16
PANEL_GROUPS = 4  # of warps, that take the blocks of a panel or the chunks of a cache in turn
READ_SPLITS = 2  # so many splits are merged by their readers; of more, the first makes one
APPEND_SLOTS = 2  # places that say that a row is in the cache, taken in turn
BEST_SLOTS = 2  # places of what was drawn, taken in turn
PHASES = ("qkv", "attention", "output", "router", "experts", "combine", "gate_up", "down")  # of any
HEAD = "head"  # behind the last layer's


# Shared memory that a CTA can have: CUDA C++ Programming Guide, compute capabilities.
_SHARED_KB = {"80": 163, "86": 99, "89": 99, "90a": 227, "100a": 227, "120a": 99}


def target(arch: str, sm_count: int) -> Target:
    """Return what tiles are chosen by for a GPU that need not be there."""
    return Target(arch, sm_count, _SHARED_KB[arch] * 1024)


# ---- rules --------------------------------------------------------------------------------------


def layer_phases(c: Config, layer: int) -> tuple[str, ...]:
    """Return the phases of a layer in their order."""
    mlp = ("router", "experts", "combine") if c.is_moe_layer(layer) else ("gate_up", "down")
    return ("qkv", "attention", "output", *mlp)


def walk(c: Config) -> tuple[tuple[int, str], ...]:
    """Return the phases of a token in their order, each with its layer; the head has the last."""
    layers = ((i, phase) for i in range(c.n_layers) for phase in layer_phases(c, i))
    return (*layers, (c.n_layers - 1, HEAD))


class CacheSplit(NamedTuple):
    """How attention cuts the keys in the cache, as split_cache in decode_role.cuh."""

    first: int  # key that the query sees
    last: int  # behind the last one
    first_chunk: int  # of the sequence
    end_chunk: int
    chunks: int  # of a split
    n_splits: int

    def part(self, index: int) -> range:
        """Chunks of one split."""
        begin = self.first_chunk + index * self.chunks
        return range(begin, max(min(begin + self.chunks, self.end_chunk), begin))


def split_cache(
    position: int, window: int, *, keys: int, split_chunks: int, most_splits: int
) -> CacheSplit:
    """Cut what lies before `position` into splits of whole chunks of `keys`; window 0: none."""
    first = max(position + 1 - window, 0) if window > 0 else 0
    first_chunk, end_chunk = first // keys, -(-position // keys)
    chunks = max(end_chunk - first_chunk, 1)
    count = min(-(-chunks // split_chunks), most_splits)
    each = -(-chunks // count)
    return CacheSplit(first, position, first_chunk, end_chunk, each, -(-chunks // each))


class PanelCut(NamedTuple):
    """How a panel of 16 rows is cut along K into blocks, a stage each: PanelShape in panels.cuh."""

    tiles: int  # of 512 bytes
    blocks: int
    block_tiles: int
    last_tiles: int
    quarter_tiles: int
    chains: int  # of sums that make a row

    @property
    def size_bytes(self) -> int:
        """Bytes of a panel."""
        return self.tiles * 512

    def block_bytes(self, block: int) -> int:
        """Bytes of one block."""
        return (self.block_tiles if block + 1 < self.blocks else self.last_tiles) * 512


def cut_panel(k: int, itemsize: int, stage_bytes: int) -> PanelCut:
    """Cut a panel of 16 rows of k values."""
    n = -(-k // (64 // itemsize)) * 2
    blocks = -(-n // (stage_bytes // 512))
    block_tiles = _even(-(-n // blocks))
    quarter = _even(-(-block_tiles // 4))
    chains = 4 * min(blocks, PANEL_GROUPS)
    return PanelCut(n, blocks, block_tiles, n - (blocks - 1) * block_tiles, quarter, chains)


def first_tile(cta: int, turn: int, ctas: int) -> int:
    """The first tile of a CTA where tile 0 goes to CTA `turn`; its next ones are `ctas` apart."""
    return (cta - turn) % ctas


def _even(n: int) -> int:
    return n + n % 2


# ---- events -------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A phase of a layer (or the head, whose layer is the last) of a token."""

    token: int  # of the launch
    layer: int
    phase: str
    tiles: int
    turn: int  # the CTA that has tile 0


class Words(NamedTuple):
    """Values [begin, end) of what CTAs hand to each other, as they are in one step.

    Of "parts" a value is [split, q_dim], of "weights" [split, n_heads], of "best" [slot, ctas] and
    of "appended" [slot, layers, kv_heads]; "logits" are values of the model's output, and "drawn"
    is an id.
    """

    region: str
    begin: int
    end: int
    tag: int  # token * n_layers + layer of who wrote them


class Wait(NamedTuple):
    """Look at words until they are those that are wanted."""

    words: tuple[Words, ...]


class Publish(NamedTuple):
    """Write words."""

    words: tuple[Words, ...]


class Fill(NamedTuple):
    """Copy bytes of arrays of the model or of its cache to the ring's next stage."""

    step: Step
    tile: int
    arrays: tuple[str, ...]  # fields of DecodeArgs
    offset: int  # bytes, the same in each
    size_bytes: int  # of all


class Gather(NamedTuple):
    """All groups look at words, which become the x of a product."""

    words: tuple[Words, ...]


class Multiply(NamedTuple):
    """A panel: block b goes to group (b + first_group) % 4."""

    step: Step
    tile: int
    blocks: int
    first_group: int


class Attend(NamedTuple):
    """A split of a KV head: chunk c, a stage with its keys and values, goes to group c % 4."""

    step: Step
    tile: int
    rows: tuple[Words, ...]  # queries; of the first split also the new key and value
    chunks: int
    appends: bool  # the new key and value to the cache
    appended: tuple[Words, ...]
    others: tuple[Words, ...]  # splits that this one merges
    result: tuple[Words, ...]


class Draw(NamedTuple):
    """All groups look at words, and draw from the logits behind them."""

    words: tuple[Words, ...]
    result: tuple[Words, ...]


class Finish(NamedTuple):
    """Add the partial sums of a panel."""

    step: Step
    tile: int


Event = Wait | Publish | Fill | Gather | Multiply | Attend | Draw | Finish


# ---- the plan -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhaseRow:
    """A line of the printed plan: one phase, per layer."""

    phase: str
    layers: int  # that have it so
    tiles: int
    splits: int | None  # of a KV head's cache
    tiles_min: int  # of a CTA
    tiles_max: int
    bytes_min: int  # of a CTA in one layer
    bytes_mean: int
    bytes_max: int
    hand_offs: int


@dataclass(frozen=True)
class Plan:
    """A launch of the decode kernel for tokens behind `context` others."""

    config: Config
    dtype: Any
    tile: DecodeTile
    context: int  # tokens in the cache before the launch
    n_tokens: int = 1
    n_given: int = 1  # tokens of the launch that are not drawn in it
    all_logits: bool = False
    filtered: bool = False  # CTA 0 draws, from what top-k, top-p and min-p leave

    # ---- sizes

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return int(np.dtype(self.dtype).itemsize)

    @property
    def qkv_dim(self) -> int:
        """Rows of the projection to queries, keys and values."""
        return self.config.q_dim + 2 * self.config.kv_dim

    @property
    def keys(self) -> int:
        """Keys of a chunk of the cache."""
        return tiles.cache_keys(self.config, self.dtype, self.tile)

    @property
    def capacity(self) -> int:
        """Keys that the cache has room for: a multiple of 128."""
        return -(-(self.context + self.n_tokens) // 128) * 128

    def product(self, phase: str) -> tuple[str, int, int, bool]:
        """A phase's array of weights, their rows and columns, and whether they are gated."""
        c = self.config
        return {
            "qkv": ("qkv", self.qkv_dim, c.dim, False),
            "output": ("out", c.dim, c.q_dim, False),
            "gate_up": ("gate_up", c.hidden_dim, c.dim, True),
            "down": ("down", c.dim, c.hidden_dim, False),
            "head": ("head", c.vocab_size, c.dim, False),
        }[phase]

    def panels(self, phase: str) -> int:
        """Panels of a product."""
        _, n, _, gated = self.product(phase)
        return -(-n // (PANEL_ROWS // 2 if gated else PANEL_ROWS))

    def cut(self, phase: str) -> PanelCut:
        """How a product's panels are cut into stages."""
        return cut_panel(self.product(phase)[2], self.itemsize, self.tile.stage_bytes)

    def split(self, token: int, layer: int) -> CacheSplit:
        """How the cache is cut for a token of the launch."""
        return split_cache(
            self.context + token,
            self.config.layer_window(layer) or 0,
            keys=self.keys,
            split_chunks=self.tile.split_chunks,
            most_splits=tiles.most_splits(self.config),
        )

    # ---- the walk over phases, and who has which tile

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """All phases of the launch; round robin goes on from each to the next."""
        found, turn = [], 0

        def add(token: int, layer: int, phase: str, count: int) -> None:
            nonlocal turn
            found.append(Step(token, layer, phase, count, turn))
            turn = (turn + count) % self.tile.ctas

        for token in range(self.n_tokens):
            for layer in range(self.config.n_layers):
                for phase in layer_phases(self.config, layer):
                    attends = phase == "attention"
                    count = (
                        self.config.n_kv_heads * self.split(token, layer).n_splits
                        if attends
                        else self.panels(phase)
                    )
                    add(token, layer, phase, count)
            if self.has_logits(token):
                add(token, self.config.n_layers - 1, "head", self.panels("head"))
        return tuple(found)

    def has_logits(self, token: int) -> bool:
        """Tell whether the head follows a token."""
        return self.all_logits or token + 1 >= self.n_given

    def keeps_logits(self, token: int) -> bool:
        """Tell whether a token's logits are stored and not only drawn from."""
        return self.all_logits or self.filtered or token + 1 == self.n_tokens

    def tiles_of(self, step: Step, cta: int) -> range:
        """The tiles of a CTA, in its order: of attention the last first.

        Splits other than the first wait for nothing, so no CTA waits for one of its own.
        """
        mine = range(first_tile(cta, step.turn, self.tile.ctas), step.tiles, self.tile.ctas)
        return mine[::-1] if step.phase == "attention" else mine

    def task(self, step: Step, tile: int) -> tuple[int, int]:
        """The KV head and the split of a tile of attention."""
        return tile % self.config.n_kv_heads, tile // self.config.n_kv_heads

    # ---- bytes

    def fills(self, step: Step, tile: int) -> Iterator[Fill]:
        """What of the weights or the cache a tile reads, stage by stage."""
        if step.phase == "attention":
            yield from self._cache_fills(step, tile)
            return
        array, n, k, gated = self.product(step.phase)
        cut = self.cut(step.phase)
        matrix = pack.packed_size(n, k, self.dtype, gated=gated) * self.itemsize
        offset = (step.layer if array != "head" else 0) * matrix + tile * cut.size_bytes
        for block in range(cut.blocks):
            size = cut.block_bytes(block)
            yield Fill(step, tile, (array,), offset, size)
            offset += size

    def _cache_fills(self, step: Step, tile: int) -> Iterator[Fill]:
        c = self.config
        head, part = self.task(step, tile)
        row_bytes = c.head_dim * self.itemsize
        position = self.context + step.token
        for chunk in self.split(step.token, step.layer).part(part):
            row = (step.layer * c.n_kv_heads + head) * self.capacity + chunk * self.keys
            count = min(position - chunk * self.keys, self.keys)
            yield Fill(step, tile, ("k_cache", "v_cache"), row * row_bytes, 2 * count * row_bytes)

    def tile_bytes(self, step: Step, tile: int) -> int:
        """Bytes that a tile streams."""
        if step.phase != "attention":
            return self.cut(step.phase).size_bytes
        chunks = self.split(step.token, step.layer).part(self.task(step, tile)[1])
        keys = min(chunks.stop * self.keys, self.context + step.token) - chunks.start * self.keys
        return 2 * max(keys, 0) * self.config.head_dim * self.itemsize

    def cta_bytes(self, step: Step) -> list[int]:
        """Bytes that each CTA streams in a phase."""
        ctas = range(self.tile.ctas)
        if step.phase == "attention":
            return [sum(self.tile_bytes(step, t) for t in self.tiles_of(step, cta)) for cta in ctas]
        return [len(self.tiles_of(step, cta)) * self.tile_bytes(step, 0) for cta in ctas]

    # ---- words between CTAs

    def tag(self, token: int, layer: int) -> int:
        """What tells the words of a step from others of the same place."""
        return token * self.config.n_layers + layer

    def best(self, token: int) -> Words:
        """What every CTA found likeliest behind a token."""
        begin = token % BEST_SLOTS * self.tile.ctas
        return Words(
            "best", begin, begin + self.tile.ctas, self.tag(token, self.config.n_layers - 1)
        )

    def drawn(self, token: int) -> Words:
        """What is looked at to know what was drawn behind a token."""
        best = self.best(token)
        return Words("drawn", 0, 1, best.tag) if self.filtered else best

    def embeds(self, token: int) -> tuple[Words, ...]:
        """What a CTA waits for to know a token: Role::token."""
        return (self.drawn(token - 1),) if token and self.has_logits(token - 1) else ()

    def follows(self, token: int) -> tuple[Words, ...]:
        """What a CTA waits for before it begins with a token: Multiplier::follow."""
        if not token or self.has_logits(token - 1):
            return self.embeds(token)
        c = self.config
        return (Words("x", 0, c.dim, self.tag(token - 1, c.n_layers - 1)),)

    def append_wanted(self, step: Step, tile: int) -> tuple[Words, ...]:
        """What a CTA waits for before it reads rows that this launch appended."""
        head, part = self.task(step, tile)
        end = self.split(step.token, step.layer).part(part).stop
        if step.token == 0 or end * self.keys <= self.context:
            return ()
        return (self._appended(step.token - 1, step.layer, head),)

    def _appended(self, token: int, layer: int, head: int) -> Words:
        c = self.config
        at = (token % APPEND_SLOTS * c.n_layers + layer) * c.n_kv_heads + head
        return Words("appended", at, at + 1, self.tag(token, layer))

    def _residual(self, step: Step, tile: int) -> tuple[Words, ...]:
        """What the sums of a panel are added to."""
        if step.phase == "output" and step.layer > 0:
            region, tag = "x", self.tag(step.token, step.layer - 1)
        elif step.phase == "down":
            region, tag = "middle", self.tag(step.token, step.layer)
        else:
            return ()
        return (Words(region, *self._rows(step, tile), tag),)

    def _rows(self, step: Step, tile: int) -> tuple[int, int]:
        """Rows of the output that a panel makes."""
        _, n, _, gated = self.product(step.phase)
        rows = PANEL_ROWS // 2 if gated else PANEL_ROWS
        return tile * rows, min((tile + 1) * rows, n)

    def _x(self, step: Step) -> tuple[Words, ...]:
        """What a product multiplies, where it comes from other CTAs."""
        c, tag = self.config, self.tag(step.token, step.layer)
        if step.phase == "qkv":
            return (Words("x", 0, c.dim, tag - 1),) if step.layer else self.follows(step.token)
        if step.phase == "output":
            count = self.split(step.token, step.layer).n_splits
            if not _readers_merge(count):
                return (Words("attention", 0, c.q_dim, tag),)
            return (
                Words("parts", 0, count * c.q_dim, tag),
                Words("weights", 0, count * c.n_heads, tag),
            )
        if step.phase == "gate_up":
            return (Words("middle", 0, c.dim, tag),)
        if step.phase == "down":
            return (Words("hidden", 0, c.hidden_dim, tag),)
        return (Words("x", 0, c.dim, tag),)

    def _product(self, step: Step, tile: int) -> tuple[Words, ...]:
        """What a panel hands on."""
        if step.phase == "head" and not self.keeps_logits(step.token):
            return ()
        region = {"output": "middle", "gate_up": "hidden", "down": "x", "head": "logits"}
        return (
            Words(
                region.get(step.phase, step.phase),
                *self._rows(step, tile),
                self.tag(step.token, step.layer),
            ),
        )

    def _attend(self, step: Step, tile: int) -> Attend:
        c, tag = self.config, self.tag(step.token, step.layer)
        head, part = self.task(step, tile)
        split = self.split(step.token, step.layer)
        group = c.n_heads // c.n_kv_heads
        width = group * c.head_dim
        rows = [Words("qkv", head * width, (head + 1) * width, tag)]
        if part == 0:
            for first in (c.q_dim, c.q_dim + c.kv_dim):
                at = first + head * c.head_dim
                rows.append(Words("qkv", at, at + c.head_dim, tag))

        def of(index: int) -> tuple[Words, ...]:
            at, query = index * c.q_dim + head * width, index * c.n_heads + head * group
            return (
                Words("parts", at, at + width, tag),
                Words("weights", query, query + group, tag),
            )

        merged = part == 0 and not _readers_merge(split.n_splits)
        others = [words for i in range(1, split.n_splits) for words in of(i)] if merged else []
        result = (Words("attention", head * width, (head + 1) * width, tag),)
        says = part == 0 and self.n_tokens > 1
        return Attend(
            step,
            tile,
            tuple(rows),
            len(split.part(part)),
            part == 0,
            (self._appended(step.token, step.layer, head),) if says else (),
            tuple(others),
            result if merged else of(part),
        )

    # ---- what the roles of a CTA do

    def filler(self, cta: int) -> Iterator[Event]:
        """List what fills the ring of a CTA."""
        for step in self.steps:
            for tile in self.tiles_of(step, cta):
                if step.phase == "attention" and (words := self.append_wanted(step, tile)):
                    yield Wait(words)
                yield from self.fills(step, tile)

    def multiplier(self, cta: int) -> Iterator[Event]:
        """List what gathers, multiplies and attends. A CTA without a tile does not read either.

        Every group of warps takes its first block of a phase before it gathers.
        """
        panels = 0
        for step in self.steps:
            mine = self.tiles_of(step, cta)
            if step.phase == "attention":
                yield from (self._attend(step, tile) for tile in mine)
            elif mine:
                yield Gather(self._x(step))
                blocks = self.cut(step.phase).blocks
                for tile in mine:
                    yield Multiply(step, tile, blocks, panels * blocks % PANEL_GROUPS)
                    panels += 1
                if step.phase == "head" and self.filtered and cta == 0:
                    best, drawn = self.best(step.token), self.drawn(step.token)
                    logits = Words("logits", 0, self.config.vocab_size, best.tag)
                    yield Draw((best, logits), (drawn,))

    def finisher(self, cta: int) -> Iterator[Event]:
        """List what finishes sums and hands them on."""
        for step in self.steps:
            if step.phase == "attention":
                continue
            mine = self.tiles_of(step, cta)
            if mine and step.phase == "output" and step.layer == 0:
                yield Wait(self.embeds(step.token))
            if step.phase == "head" and self.filtered:
                yield Wait(self.embeds(step.token))  # before it overwrites the logits
            for tile in mine:
                yield Finish(step, tile)
                yield Wait(self._residual(step, tile))
                yield Publish(self._product(step, tile))
            if step.phase == "head":
                words = self.best(step.token)
                yield Publish((words._replace(begin=words.begin + cta, end=words.begin + cta + 1),))
                if cta == 0:
                    yield Wait((self.drawn(step.token),))

    # ---- in print

    def hand_offs(self, step: Step) -> int:
        """How often a phase waits for other CTAs, one after the other."""
        if step.phase != "attention":
            return 1
        return 1 + (self.split(step.token, step.layer).n_splits > READ_SPLITS)

    def rows(self) -> list[PhaseRow]:
        """One row a phase of the first token; layers that differ have rows of their own."""
        same: dict[tuple[str, int], list[Step]] = {}
        for step in self.steps:
            if step.token == 0:
                same.setdefault((step.phase, step.tiles), []).append(step)
        ctas = self.tile.ctas
        found = []
        for (phase, count), steps in same.items():
            loads = [load for step in steps for load in self.cta_bytes(step)]
            splits = count // self.config.n_kv_heads if phase == "attention" else None
            found.append(
                PhaseRow(
                    phase,
                    len(steps),
                    count,
                    splits,
                    count // ctas,
                    -(-count // ctas),
                    min(loads),
                    round(sum(loads) / len(loads)),
                    max(loads),
                    self.hand_offs(steps[0]),
                )
            )
        order = (*PHASES, HEAD)
        return sorted(found, key=lambda row: order.index(row.phase))

    def totals(self) -> dict[str, Any]:
        """What the launch's first token takes as a whole."""
        steps = [step for step in self.steps if step.token == 0]
        loads = [sum(of) for of in zip(*map(self.cta_bytes, steps), strict=True)]
        cache = sum(sum(self.cta_bytes(step)) for step in steps if step.phase == "attention")
        shared = tiles.decode_shared(self.config, self.dtype, self.tile)
        return {
            "model": self.config.name,
            "dtype": np.dtype(self.dtype).name,
            "context": self.context,
            **asdict(self.tile),
            "launches": 1,
            "hand_offs": sum(self.hand_offs(step) for step in steps),
            "weight_bytes": sum(loads) - cache,
            "cache_bytes": cache,
            "cta_bytes": {
                "min": min(loads),
                "mean": round(sum(loads) / len(loads)),
                "max": max(loads),
            },
            "shared_bytes": {"total": sum(shared.values()), **shared},
            "words": tiles.decode_regions(self.config, self.dtype, self.tile),
        }

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON has it."""
        return {**self.totals(), "phases": [asdict(row) for row in self.rows()]}

    def text(self) -> str:
        """The plan as a table and some lines below it."""
        names = (
            "phase",
            "layers",
            "tiles",
            "splits",
            "tiles a CTA",
            "KB a CTA",
            "mean",
            "hand-offs",
        )
        table = [
            (
                row.phase,
                str(row.layers),
                str(row.tiles),
                "" if row.splits is None else str(row.splits),
                _range(row.tiles_min, row.tiles_max),
                _range(row.bytes_min / 1024, row.bytes_max / 1024),
                f"{row.bytes_mean / 1024:.1f}",
                str(row.hand_offs),
            )
            for row in self.rows()
        ]
        lines = [
            "| " + " | ".join(row) + " |" for row in (names, tuple("---" for _ in names), *table)
        ]
        t, tile = self.totals(), self.tile
        load, shared = t["cta_bytes"], dict(t["shared_bytes"])
        total = shared.pop("total")
        over = 100 * (load["max"] / load["mean"] - 1)
        lines += [
            "",
            f"a token: {(t['weight_bytes'] + t['cache_bytes']) / 1e6:.1f} MB, weights "
            f"{t['weight_bytes'] / 1e6:.1f} and cache {t['cache_bytes'] / 1e6:.1f}; "
            f"{t['launches']} launch, {t['hand_offs']} hand-offs",
            f"a CTA of {tile.ctas}: {load['min'] / 1e6:.2f} to {load['max'] / 1e6:.2f} MB, the most"
            f" {over:.1f} % above the mean",
            f"ring: {tile.stages} stages of {tile.stage_bytes} bytes, {tile.window} on their way, "
            f"{tile.calm_window} from qkv to output ({tile.copies} copies)",
            f"cache: chunks of {self.keys} keys, splits of {tile.split_chunks} chunks or more, up "
            f"to {READ_SPLITS} merged by their readers",
            f"shared memory: {total} bytes: "
            + ", ".join(f"{name} {size}" for name, size in shared.items() if size),
            f"between CTAs: {8 * sum(t['words'].values())} bytes: "
            + ", ".join(f"{name} {8 * size}" for name, size in t["words"].items()),
        ]
        return "\n".join(lines)


def _readers_merge(splits: int) -> bool:
    return 1 < splits <= READ_SPLITS


def _range(low: float, high: float) -> str:
    low_text, high_text = (f"{v:.1f}" if isinstance(v, float) else str(v) for v in (low, high))
    return low_text if low_text == high_text else f"{low_text} to {high_text}"
