"""What a decode kernel does, as data: no GPU is needed to print it or to test it.

`Plan` is kernels_cu/device/decode_roles.cuh in Python: its methods `filler`, `multiplier` and
`finisher` list what the roles of a CTA do, event by event, in the order of their code there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from cufuse import reference, tiles
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

    tiles: int  # of one part
    blocks: int  # of all parts
    block_tiles: int
    last_tiles: int  # of a part's last block
    quarter_tiles: int
    chains: int  # of sums that make a row
    parts: int  # of K, each cut for itself
    tile_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of a panel."""
        return self.parts * self.part_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes of one part of it."""
        return self.tiles * self.tile_bytes

    @property
    def part_blocks(self) -> int:
        """Blocks of one part."""
        return self.blocks // self.parts

    def block_bytes(self, block: int) -> int:
        """Bytes of one block."""
        last = (block + 1) % self.part_blocks == 0
        return (self.last_tiles if last else self.block_tiles) * self.tile_bytes


def cut_panel(k: int, itemsize: int, stage_bytes: int) -> PanelCut:
    """Cut a panel of 16 packed rows of k values."""
    n = -(-k // (64 // itemsize)) * 2
    blocks = -(-n // (stage_bytes // 512))
    return _cut(tiles.PartCut.of(n, blocks, _even(-(-n // blocks))))


def cut_rows(k: int, itemsize: int, stage_bytes: int, parts: int = 1) -> PanelCut:
    """Cut a panel of 16 rows that lie in memory row by row, of k values in each part."""
    return _cut(tiles.rows_cut(k, itemsize, stage_bytes), parts)


def cut_mxfp4(k: int, stage_bytes: int, parts: int = 1) -> PanelCut:
    """Cut a panel of 16 rows of 4-bit weights, of k values in each part."""
    cut = _cut(tiles.mxfp4_cut(k, stage_bytes), parts)
    return cut._replace(
        quarter_tiles=-(-cut.block_tiles // 4), tile_bytes=reference.MXFP4_TILE_BYTES
    )


def _cut(part: tiles.PartCut, parts: int = 1) -> PanelCut:
    blocks, quarter = parts * part.blocks, _even(-(-part.block_tiles // 4))
    chains = 4 * min(blocks, PANEL_GROUPS)
    return PanelCut(
        part.tiles, blocks, part.block_tiles, part.last_tiles, quarter, chains, parts, 512
    )


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
    is an id. Of "router" a value is an expert's logit, and of "squares" a sum over 16 rows of qkv.
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
    rows: int = 1  # of each
    pitch: int = 0  # bytes from a row to the next


class Choose(NamedTuple):
    """Look at logits, wait until what was chosen before is left, and choose a layer's experts."""

    words: tuple[Words, ...]


class AwaitChoice(NamedTuple):
    """Wait until the filler has chosen for the number-th time."""

    number: int


class Leave(NamedTuple):
    """Say that nothing is needed any more of what was chosen last."""


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


# What the values are that a product hands on.
_MAKES = {
    "qkv": "qkv",
    "output": "middle",
    "router": "router",
    "experts": "hidden",
    "combine": "x",
    "gate_up": "hidden",
    "down": "x",
    HEAD: "logits",
}


Event = (
    Wait
    | Publish
    | Fill
    | Choose
    | AwaitChoice
    | Leave
    | Gather
    | Multiply
    | Attend
    | Draw
    | Finish
)


# ---- the plan -----------------------------------------------------------------------------------


Layout = Literal["packed", "rows", "mxfp4"]


class Product(NamedTuple):
    """The matrix of a phase."""

    arrays: tuple[str, ...]  # fields of DecodeArgs
    n: int  # values that come out
    k: int
    gated: bool = False  # a gate and an up make a value
    parts: int = 1  # of k
    layout: Layout = "packed"

    @property
    def panel_rows(self) -> int:
        """Values that a panel makes."""
        return PANEL_ROWS // 2 if self.gated else PANEL_ROWS


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
    experts: tuple[tuple[int, ...], ...] = ()  # that every token goes to, of each layer

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

    def product(self, phase: str) -> Product:
        """What a phase multiplies with."""
        c = self.config
        mixture, four_bits = c.n_experts > 0, c.expert_dtype == "mxfp4"
        columns, part = tiles.expert_columns(c)
        hidden, down = (c.dense_hidden_dim, "dense_down") if mixture else (c.hidden_dim, "down")
        dense: Layout = "rows" if mixture else "packed"
        experts: Layout = "mxfp4" if four_bits else "rows"
        gate_up = ("gate_up4",) if four_bits else ("gate", "up")
        last = ("down4",) if four_bits else ("shared_down", "down")
        return {
            "qkv": Product(("qkv",), self.qkv_dim, c.dim),
            "output": Product(("out",), c.dim, c.q_dim),
            "router": Product(("router",), self.router_logits, c.dim, layout="rows"),
            "experts": Product(gate_up, columns, c.dim, gated=True, layout=experts),
            "combine": Product(last, c.dim, columns, parts=columns // part, layout=experts),
            "gate_up": Product(
                ("gate", "up") if mixture else ("gate_up",), hidden, c.dim, True, 1, dense
            ),
            "down": Product((down,), c.dim, hidden, layout=dense),
            HEAD: Product(("head",), c.vocab_size, c.dim),
        }[phase]

    @property
    def router_logits(self) -> int:
        """Values that a router makes: of each expert, and of the shared one where it has a gate."""
        return self.config.n_experts + self.config.shared_gated

    def panels(self, phase: str) -> int:
        """Panels of a product."""
        product = self.product(phase)
        return -(-product.n // product.panel_rows)

    @functools.cached_property
    def _cuts(self) -> dict[str, PanelCut]:
        return {}

    def cut(self, phase: str) -> PanelCut:
        """How a product's panels are cut into stages."""
        if phase not in self._cuts:
            product, stage_bytes = self.product(phase), self.tile.stage_bytes
            k = product.k // product.parts
            if product.layout == "mxfp4":
                cut = cut_mxfp4(k, stage_bytes, product.parts)
            elif product.layout == "rows":
                cut = cut_rows(k, self.itemsize, stage_bytes, product.parts)
            else:
                cut = cut_panel(k, self.itemsize, stage_bytes)
            self._cuts[phase] = cut
        return self._cuts[phase]

    def chosen(self, token: int, layer: int) -> tuple[int, ...]:
        """The experts that a token goes to, ascending: `experts`, or some that lie far apart."""
        c = self.config
        if not c.is_moe_layer(layer):
            return ()
        if self.experts:
            return tuple(sorted(self.experts[layer]))
        apart = c.n_experts // c.n_experts_per_token
        first = token + layer
        return tuple(
            sorted((first + i * apart) % c.n_experts for i in range(c.n_experts_per_token))
        )

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
                add(token, self.config.n_layers - 1, HEAD, self.panels(HEAD))
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
        product, cut = self.product(step.phase), self.cut(step.phase)
        for part in range(product.parts):
            if product.layout == "rows":
                yield from self._row_fills(step, tile, part)
                continue
            offset = self._panels_before(step, tile, part) * cut.part_bytes
            for block in range(cut.part_blocks):
                yield Fill(step, tile, product.arrays, offset, cut.block_bytes(block))
                offset += cut.block_bytes(block)

    def _panels_before(self, step: Step, tile: int, part: int) -> int:
        """Panels before a part of one, where they lie one behind the other."""
        count = self.panels(step.phase)
        if self.product(step.phase).layout == "packed":
            return (step.layer if step.phase != HEAD else 0) * count + tile
        # Of 4-bit experts: each has its own, of which `tile` is one of a chosen expert's.
        c = self.config
        chosen, slot = self.chosen(step.token, step.layer), part
        if step.phase == "experts":
            count //= len(chosen)
            slot, tile = divmod(tile, count)
        mixtures = sum(c.is_moe_layer(layer) for layer in range(step.layer))
        return (mixtures * c.n_experts + chosen[slot]) * count + tile

    def _row_fills(self, step: Step, tile: int, part: int) -> Iterator[Fill]:
        """The blocks of a part of a panel whose weights lie in rows."""
        product, cut = self.product(step.phase), self.cut(step.phase)
        arrays, row, column, pitch = self._rows_place(step, tile, part)
        rows, tile_columns = self._panel_rows(product, tile), 32 // self.itemsize
        columns = product.k // product.parts
        for block in range(cut.part_blocks):
            first = block * cut.block_tiles * tile_columns
            end = min(first + cut.block_bytes(block) // 512 * tile_columns, columns)
            offset = (row * pitch + column + first) * self.itemsize
            size = len(arrays) * rows * (end - first) * self.itemsize
            yield Fill(step, tile, arrays, offset, size, rows, pitch * self.itemsize)

    def _panel_rows(self, product: Product, tile: int) -> int:
        """Rows of one matrix that a panel reads."""
        return min(product.panel_rows, product.n - tile * product.panel_rows)

    def _rows_place(
        self, step: Step, tile: int, part: int
    ) -> tuple[tuple[str, ...], int, int, int]:
        """Arrays, first row and column, and columns of a row: the `Place` of decode_filler.cuh."""
        c = self.config
        product = self.product(step.phase)
        mixtures = sum(c.is_moe_layer(layer) for layer in range(step.layer))
        dense, first = step.layer - mixtures, tile * product.panel_rows
        if step.phase == "router":
            return product.arrays, mixtures * self.router_logits + first, 0, c.dim
        if step.phase == "down":
            return product.arrays, dense * c.dim + first, 0, c.dense_hidden_dim
        if step.phase == "combine":
            width = product.k // product.parts
            slot, column = divmod(part * width - c.shared_hidden_dim, c.hidden_dim)
            if slot < 0:
                at = mixtures * c.dim + first, part * width
                return ("shared_down",), *at, c.shared_hidden_dim
            expert = mixtures * c.n_experts + self.chosen(step.token, step.layer)[slot]
            return ("down",), expert * c.dim + first, column, c.hidden_dim
        before = dense * c.dense_hidden_dim
        if c.expert_dtype != "mxfp4":
            before += mixtures * (c.n_experts * c.hidden_dim + c.shared_hidden_dim)
        if step.phase == "experts":
            slot, row = divmod(first - c.shared_hidden_dim, c.hidden_dim)
            chosen = self.chosen(step.token, step.layer)
            if first < c.shared_hidden_dim:
                first += c.n_experts * c.hidden_dim
            else:
                first = chosen[slot] * c.hidden_dim + row
        return product.arrays, before + first, 0, c.dim

    def is_routed(self, step: Step, tile: int, part: int) -> bool:
        """Tell whether a part of a tile is of a chosen expert."""
        product, shared = self.product(step.phase), self.config.shared_hidden_dim
        if step.phase == "experts":
            return tile * product.panel_rows >= shared
        return step.phase == "combine" and part * (product.k // product.parts) >= shared

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
            product = self.product(step.phase)
            if product.layout != "rows":
                return self.cut(step.phase).size_bytes
            matrices = 2 if product.gated else 1
            return matrices * self._panel_rows(product, tile) * product.k * self.itemsize
        chunks = self.split(step.token, step.layer).part(self.task(step, tile)[1])
        keys = min(chunks.stop * self.keys, self.context + step.token) - chunks.start * self.keys
        return 2 * max(keys, 0) * self.config.head_dim * self.itemsize

    def cta_bytes(self, step: Step) -> list[int]:
        """Bytes that each CTA streams in a phase."""
        ctas = range(self.tile.ctas)
        if step.phase == "attention":
            return [sum(self.tile_bytes(step, t) for t in self.tiles_of(step, cta)) for cta in ctas]
        # All are as large as the first but the last one of all.
        size, last = (self.tile_bytes(step, tile) for tile in (0, step.tiles - 1))
        mine = [self.tiles_of(step, cta) for cta in ctas]
        return [len(of) * size + (last - size) * (step.tiles - 1 in of) for of in mine]

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
        elif step.phase in ("combine", "down"):
            region, tag = "middle", self.tag(step.token, step.layer)
        else:
            return ()
        return (Words(region, *self._rows(step, tile), tag),)

    def _rows(self, step: Step, tile: int) -> tuple[int, int]:
        """Rows of the output that a panel makes."""
        product = self.product(step.phase)
        rows = product.panel_rows
        return tile * rows, min((tile + 1) * rows, product.n)

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
        if step.phase in ("router", "experts", "gate_up"):
            return (Words("middle", 0, c.dim, tag),)
        if step.phase in ("combine", "down"):
            return (Words("hidden", 0, self.product(step.phase).k, tag),)
        return (Words("x", 0, c.dim, tag),)

    def _product(self, step: Step, tile: int) -> tuple[Words, ...]:
        """What a panel hands on."""
        if step.phase == HEAD and not self.keeps_logits(step.token):
            return ()
        tag = self.tag(step.token, step.layer)
        made = Words(_MAKES[step.phase], *self._rows(step, tile), tag)
        if step.phase == "qkv" and made.end <= self._squared:
            return (made, Words("squares", tile, tile + 1, tag))
        return (made,)

    @property
    def _squared(self) -> int:
        """Rows of qkv that a norm over all queries, or all keys, is of."""
        c = self.config
        return c.q_dim + c.kv_dim if c.qk_norm == "full" else 0

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
        if self._squared:
            end = self._squared if part == 0 else c.q_dim  # the keys' come behind the queries'
            rows.append(Words("squares", 0, end // PANEL_ROWS, tag))

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
        """List what fills the ring of a CTA, and chooses experts for it."""
        for place, step in enumerate(self.steps):
            mine = self.tiles_of(step, cta)
            if step.phase == "experts":
                yield from self._experts(step, mine, self._takes_part(place, cta))
                continue
            for tile in mine:
                if step.phase == "attention" and (words := self.append_wanted(step, tile)):
                    yield Wait(words)
                yield from self.fills(step, tile)

    def _experts(self, step: Step, mine: range, takes_part: bool) -> Iterator[Event]:
        """Fill what is shared, choose, fill what was chosen."""
        shared = [tile for tile in mine if not self.is_routed(step, tile, 0)]
        for tile in shared:
            yield from self.fills(step, tile)
        if takes_part:
            tag = self.tag(step.token, step.layer)
            yield Choose((Words("router", 0, self.config.n_experts, tag),))
        for tile in mine[len(shared) :]:
            yield from self.fills(step, tile)

    def _takes_part(self, place: int, cta: int) -> bool:
        """Tell whether a CTA has a tile of the experts, or of the combine that comes next."""
        return any(self.tiles_of(step, cta) for step in self.steps[place : place + 2])

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
                if step.phase == HEAD and self.filtered and cta == 0:
                    best, drawn = self.best(step.token), self.drawn(step.token)
                    logits = Words("logits", 0, self.config.vocab_size, best.tag)
                    yield Draw((best, logits), (drawn,))

    def finisher(self, cta: int) -> Iterator[Event]:
        """List what finishes sums and hands them on."""
        choices = left = 0
        for place, step in enumerate(self.steps):
            if step.phase == "attention":
                continue
            mine = self.tiles_of(step, cta)
            if step.phase == "router" and left != choices:
                left = choices
                yield Leave()
            asks = step.phase == "experts" and self._takes_part(place, cta)
            if asks and mine and self.config.shared_gated and not self.is_routed(step, mine[0], 0):
                n, tag = self.config.n_experts, self.tag(step.token, step.layer)
                yield Wait((Words("router", n, n + 1, tag),))
            if mine and step.phase == "output" and step.layer == 0:
                yield Wait(self.embeds(step.token))
            if step.phase == HEAD and self.filtered:
                yield Wait(self.embeds(step.token))  # before it overwrites the logits
            for tile in mine:
                if asks and self.is_routed(step, tile, 0):
                    asks, choices = False, choices + 1
                    yield AwaitChoice(choices)
                yield Finish(step, tile)
                yield Wait(self._residual(step, tile))
                yield Publish(self._product(step, tile))
            if asks:
                choices += 1
                yield AwaitChoice(choices)
            if step.phase == HEAD:
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
            **({"experts": self._experts_of_layers()} if self.config.n_experts else {}),
        }

    def _experts_of_layers(self) -> list[tuple[int, ...]]:
        return [self.chosen(0, layer) for layer in range(self.config.n_layers)]

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
            *self._mixture_lines(),
            f"ring: {tile.stages} stages of {tile.stage_bytes} bytes, {tile.window} on their way, "
            f"{tile.calm_window} from qkv to output ({tile.copies} copies)",
            f"cache: chunks of {self.keys} keys, splits of {tile.split_chunks} chunks or more, up "
            f"to {READ_SPLITS} merged by their readers",
            f"shared memory: {total} bytes: "
            + ", ".join(f"{name} {size}" for name, size in shared.items() if size),
            f"between CTAs: {8 * sum(t['words'].values())} bytes: "
            + ", ".join(f"{name} {8 * size}" for name, size in t["words"].items() if size),
        ]
        return "\n".join(lines)

    def _mixture_lines(self) -> list[str]:
        """A line about the experts, of a mixture."""
        c = self.config
        if not c.n_experts:
            return []
        some, shared = "of the plan" if self.experts else "far apart", ""
        if c.shared_hidden_dim:
            shared = f" and a shared one of {c.shared_hidden_dim}"
        return [
            f"experts: {c.n_experts_per_token} of {c.n_experts} a layer, those {some}, of width "
            f"{c.hidden_dim}{shared}"
        ]


def _readers_merge(splits: int) -> bool:
    return 1 < splits <= READ_SPLITS


def _range(low: float, high: float) -> str:
    low_text, high_text = (f"{v:.1f}" if isinstance(v, float) else str(v) for v in (low, high))
    return low_text if low_text == high_text else f"{low_text} to {high_text}"
