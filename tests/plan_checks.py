"""What a plan of the decode kernel has to keep, checked without a GPU.

`check_coverage` adds up who reads and writes what, `lapped` proves from the dependencies alone that
no word is overwritten before all have read it, `simulate` runs the roles of all CTAs in any order.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise, takewhile

from cufuse import mxfp4, pack, weights
from cufuse.plan import (
    PANEL_GROUPS,
    Attend,
    AwaitChoice,
    Choose,
    Draw,
    Event,
    Fill,
    Finish,
    Gather,
    Leave,
    Multiply,
    Plan,
    Publish,
    Wait,
    Words,
)

NORMED = ("qkv", "router", "experts", "gate_up", "head")  # the finisher scales their sums
PARTIALS = 4  # panels whose sums are on their way: DecodeShape::kPartials


# ---- coverage -----------------------------------------------------------------------------------


def check_whole(what: object, spans: list[tuple[int, int]], end: int) -> None:
    """Spans make up [0, end), each value once."""
    at = 0
    for first, last in sorted(spans):
        assert first >= at, f"{what}: [{first}, {min(at, last)}) twice"
        assert first <= at, f"{what}: [{at}, {first}) not at all"
        at = last
    assert at == end, f"{what}: {at} of {end}"


def check_coverage(plan: Plan) -> None:
    """Every byte of the weights and the cache is read once a token, every output written once.

    Of the experts those that a token goes to.
    """
    c = plan.config
    for token in range(plan.n_tokens):
        check_reads(plan, token)
        check_writes(plan, token)
    order = [f"{c.name} CTA {cta}" for cta in range(plan.tile.ctas)]
    for cta, name in enumerate(order):
        filled = [(event.step, event.tile) for event in plan.filler(cta) if type(event) is Fill]
        taken = []
        for event in plan.multiplier(cta):
            if type(event) is Multiply:
                taken += [(event.step, event.tile)] * event.blocks
            elif type(event) is Attend:
                taken += [(event.step, event.tile)] * event.chunks
        assert filled == taken, f"{name} fills its ring in another order than it empties it"


def check_reads(plan: Plan, token: int) -> None:
    c = plan.config
    read = defaultdict(list)
    cache = defaultdict(list)
    for cta in range(plan.tile.ctas):
        for event in plan.filler(cta):
            if type(event) is not Fill or event.step.token != token:
                continue
            size = event.size_bytes // len(event.arrays) // event.rows
            assert event.offset % 16 == size % 16 == event.pitch % 16 == 0, "copies of 16 bytes"
            starts = [event.offset + row * event.pitch for row in range(event.rows)]
            for array in event.arrays:
                found = cache if event.step.phase == "attention" else read
                found[array] += [(start, start + size) for start in starts]
            room = plan.tile.stage_bytes
            assert event.size_bytes <= room, f"{event.size_bytes} bytes in a stage of {room}"
    for array, spans in wanted_reads(plan, token).items():
        check_spans(array, read.pop(array, []), spans)
    assert not read, f"{list(read)} nobody has asked for"
    row = c.head_dim * plan.itemsize
    position = plan.context + token
    for array, spans in cache.items():
        found = defaultdict(list)
        for first, last in spans:
            found[first // (plan.capacity * row)].append((first, last))
        for layer in range(c.n_layers):
            window = c.layer_window(layer) or 0
            first = max(position + 1 - window, 0) if window else 0
            first = first // plan.keys * plan.keys
            for head in range(c.n_kv_heads):
                at = layer * c.n_kv_heads + head
                base = (at * plan.capacity + first) * row
                its = [(a - base, b - base) for a, b in found.pop(at, [])]
                check_whole((array, layer, head), its, max(position - first, 0) * row)
        assert not found
    sees = any(
        position > (max(position + 1 - w, 0) if (w := c.layer_window(layer)) else 0)
        for layer in range(c.n_layers)
    )
    assert set(cache) == ({"k_cache", "v_cache"} if sees else set())


def wanted_reads(plan: Plan, token: int) -> dict[str, list[tuple[int, int]]]:
    """Bytes of each array that a token needs, by where weights.py puts the fields of layers."""
    c, found, itemsize = plan.config, defaultdict(list), plan.itemsize

    def packed(array: str, layer: int, n: int, k: int, *, gated: bool = False) -> None:
        size = pack.packed_size(n, k, plan.dtype, gated=gated) * itemsize
        found[array].append((layer * size, (layer + 1) * size))

    def rows(field: str, layer: int, n: int, k: int, of: tuple[int, ...] = (), all_of: int = 1):
        array, first, _ = weights.stack_place(c, field, layer, all_of * n * k)
        parts(array, first * itemsize, n * k * itemsize, of or (0,))

    def four_bits(field: str, layer: int, n: int, k: int, of: tuple[int, ...]) -> None:
        each = mxfp4.packed_bytes(1, n, k, gated=field == "gate_up")
        array, first, _ = weights.stack_place(c, field, layer, c.n_experts * each)
        parts(array, first, each, of)

    def parts(array: str, first: int, each: int, of: tuple[int, ...]) -> None:
        found[array] += [(first + i * each, first + (i + 1) * each) for i in of]

    for layer in range(c.n_layers):
        packed("qkv", layer, plan.qkv_dim, c.dim)
        packed("out", layer, c.dim, c.q_dim)
        if not c.n_experts:
            packed("gate_up", layer, c.hidden_dim, c.dim, gated=True)
            packed("down", layer, c.dim, c.hidden_dim)
        elif not c.is_moe_layer(layer):
            rows("gate", layer, c.dense_hidden_dim, c.dim)
            rows("up", layer, c.dense_hidden_dim, c.dim)
            rows("down", layer, c.dim, c.dense_hidden_dim)
        else:
            rows("router", layer, c.n_experts, c.dim)
            if c.shared_gated:
                rows("shared_router", layer, 1, c.dim)
            chosen = plan.chosen(token, layer)
            assert len(set(chosen)) == c.n_experts_per_token and list(chosen) == sorted(chosen)
            if c.expert_dtype == "mxfp4":
                four_bits("gate_up", layer, c.hidden_dim, c.dim, chosen)
                four_bits("down", layer, c.dim, c.hidden_dim, chosen)
            else:
                rows("gate", layer, c.hidden_dim, c.dim, chosen, c.n_experts)
                rows("up", layer, c.hidden_dim, c.dim, chosen, c.n_experts)
                rows("down", layer, c.dim, c.hidden_dim, chosen, c.n_experts)
            if c.shared_hidden_dim:
                rows("shared_gate", layer, c.shared_hidden_dim, c.dim)
                rows("shared_up", layer, c.shared_hidden_dim, c.dim)
                rows("shared_down", layer, c.dim, c.shared_hidden_dim)
    if plan.has_logits(token):
        packed("head", 0, c.vocab_size, c.dim)
    return found


def check_spans(what: str, spans: list[tuple[int, int]], wanted: list[tuple[int, int]]) -> None:
    """Spans make up those wanted, each byte once."""
    spans = sorted(spans)
    at = 0
    for first, last in sorted(wanted):
        behind = at
        while behind < len(spans) and spans[behind][0] < last:
            behind += 1
        its = [(a - first, b - first) for a, b in spans[at:behind]]
        assert not its or its[0][0] >= 0, f"{what}: [{spans[at][0]}, {first}) is nobody's"
        check_whole(what, its, last - first)
        at = behind
    assert at == len(spans), f"{what}: {spans[at]} is nobody's"


def check_writes(plan: Plan, token: int) -> None:
    c = plan.config
    written = defaultdict(list)
    appended = Counter()
    for cta in range(plan.tile.ctas):
        for role in (plan.multiplier, plan.finisher):
            for event in role(cta):
                if type(event) is Attend and event.appends and event.step.token == token:
                    appended[event.step.layer, plan.task(event.step, event.tile)[0]] += 1
                for words in published(event):
                    if words.tag // c.n_layers == token:
                        written[words.region, words.tag % c.n_layers].append(words[1:3])
    heads = [(layer, head) for layer in range(c.n_layers) for head in range(c.n_kv_heads)]
    assert appended == Counter(heads), "the cache's new rows"
    normed = c.qk_norm == "full"
    for layer in range(c.n_layers):
        sizes = {"qkv": plan.qkv_dim, "middle": c.dim, "x": c.dim}
        sizes["squares"] = (c.q_dim + c.kv_dim) // 16 if normed else 0
        if c.is_moe_layer(layer):
            sizes["router"] = c.n_experts + c.shared_gated
            sizes["hidden"] = c.shared_hidden_dim + c.n_experts_per_token * c.hidden_dim
        else:
            sizes["hidden"] = c.layer_hidden_dim(layer)
        for region, size in sizes.items():
            check_whole((region, layer), written.pop((region, layer), []), size)
        count = plan.split(token, layer).n_splits
        many = {"attention": c.q_dim}
        if count > 1:
            own = range(count) if ("attention", layer) not in written else range(1, count)
            many = {"attention": c.q_dim} if len(own) < count else {}
            for region, size in (("parts", c.q_dim), ("weights", c.n_heads)):
                first = own.start * size
                its = [(a - first, b - first) for a, b in written.pop((region, layer))]
                check_whole((region, layer), its, len(own) * size)
        for region, size in many.items():
            check_whole((region, layer), written.pop((region, layer)), size)
    last = c.n_layers - 1
    if plan.has_logits(token):
        kept = c.vocab_size if plan.keeps_logits(token) else 0
        check_whole("logits", written.pop(("logits", last), []), kept)
        first = plan.best(token).begin
        its = [(a - first, b - first) for a, b in written.pop(("best", last))]
        check_whole("best", its, plan.tile.ctas)
        check_whole("drawn", written.pop(("drawn", last), []), int(plan.filtered))
    for region, _ in list(written):
        assert region == "appended" and plan.n_tokens > 1, region


def published(event: Event) -> tuple[Words, ...]:
    """The words that an event writes."""
    if type(event) is Attend:
        return (*event.appended, *event.result)
    if type(event) is Draw:
        return event.result
    return event.words if type(event) is Publish else ()


# ---- lapping ------------------------------------------------------------------------------------


def units(words: Words) -> Iterator[tuple[str, int]]:
    """What is written and read as a whole: 8 values of a vector."""
    size = 8 if words.region in ("x", "middle", "qkv", "attention", "hidden", "parts") else 1
    assert words.begin % size == words.end % size == 0
    for i in range(words.begin // size, words.end // size):
        yield words.region, i


class Dependencies:
    """Which reads every write comes after, whatever the order of CTAs: a set of bits each.

    An edge goes from an event to the next one of its role, from words to who waits for them, from a
    fill to who takes it, from a choice to who waits for it and from a panel's sums to who finishes
    them. The room in the ring, in the sums' buffers and for the next choice is left out: what holds
    without it holds for any ring.
    """

    def __init__(self, plan: Plan) -> None:
        self._reads_logits = plan.filtered
        self.reads: dict[Words, int] = defaultdict(int)
        self.readers: list[str] = []
        self.writes: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        self._known: dict[tuple[str, int, int], int] = {}
        self._whole: dict[Words, int] = {}
        self._fills: dict[int, list[int]] = defaultdict(list)
        self._sums: dict[tuple, int] = {}
        self._choices: dict[int, list[int]] = defaultdict(list)
        agents = []
        for cta in range(plan.tile.ctas):
            roles = (self._fill, plan.filler), (self._multiply, plan.multiplier)
            for run, role in (*roles, (self._finish, plan.finisher)):
                agents.append(run(cta, role(cta)))
        while agents:
            left = [agent for agent in agents if next(agent, None) is not None]
            assert len(left) < len(agents) or self._moved, "the plan waits for itself"
            self._moved = False
            agents = left

    _moved = False

    def _read(self, who: str, cta: int, wanted: tuple[Words, ...], before: int) -> Iterator:
        for words in wanted:
            while words not in self._whole:
                keys = [(*unit, words.tag) for unit in units(words)]
                if all(key in self._known for key in keys):
                    whole = 0
                    for key in keys:
                        whole |= self._known[key]
                    self._whole[words] = whole
                else:
                    yield True
            before |= self._whole[words]
        if wanted:
            self._moved = True
            bit = 1 << len(self.readers)
            self.readers.append(f"the {who} of CTA {cta}")
            for words in wanted:
                self.reads[words] |= bit
            before |= bit
        return before

    def _write(self, written: tuple[Words, ...], before: int) -> None:
        self._moved = True
        for words in written:
            if words.region == "logits" and not self._reads_logits:
                continue
            for unit in units(words):
                self._known[*unit, words.tag] = before
                self.writes[unit].append((words.tag, before))

    def _fill(self, cta: int, events: Iterator[Event]) -> Iterator:
        before = 0
        for event in events:
            if type(event) is Wait:
                before = yield from self._read("filler", cta, event.words, before)
            elif type(event) is Choose:
                before = yield from self._read("choosing", cta, event.words, before)
                self._choices[cta].append(before)
            else:
                self._fills[cta].append(before)

    def _multiply(self, cta: int, events: Iterator[Event]) -> Iterator:
        before = taken = 0

        def take(n: int) -> Iterator:
            nonlocal before, taken
            taken += n
            while len(self._fills[cta]) < taken:
                yield True
            if n:
                before |= self._fills[cta][taken - 1]

        for event in events:
            if type(event) is Gather:
                before = yield from self._read("gathering", cta, event.words, before)
            elif type(event) is Multiply:
                yield from take(event.blocks)
                self._sums[cta, event.step, event.tile] = before
                self._moved = True
            elif type(event) is Attend:
                before = yield from self._read("attention", cta, event.rows, before)
                yield from take(event.chunks)
                self._write(event.appended, before)
                before = yield from self._read("merging", cta, event.others, before)
                self._write(event.result, before)
            else:
                assert type(event) is Draw
                before = yield from self._read("drawing", cta, event.words, before)
                self._write(event.result, before)

    def _finish(self, cta: int, events: Iterator[Event]) -> Iterator:
        before = 0
        for event in events:
            if type(event) is Finish:
                while (cta, event.step, event.tile) not in self._sums:
                    yield True
                before |= self._sums[cta, event.step, event.tile]
            elif type(event) is Wait:
                before = yield from self._read("finisher", cta, event.words, before)
            elif type(event) is AwaitChoice:
                while len(self._choices[cta]) < event.number:
                    yield True
                before |= self._choices[cta][event.number - 1]
            else:
                self._write(published(event), before)


def lapped(plan: Plan) -> list[str]:
    """Name who may find words overwritten that it has yet to read; nobody should."""
    made = Dependencies(plan)
    readers: dict[tuple[str, int, int], int] = defaultdict(int)
    for words, bits in made.reads.items():
        for unit in units(words):
            readers[*unit, words.tag] |= bits
    found = set()
    for (region, unit), writes in made.writes.items():
        for (tag, _), (_, reached) in pairwise(sorted(writes)):
            late = readers.get((region, unit, tag), 0) & ~reached
            while late:
                bit = late & -late
                found.add(f"{region}: {made.readers[bit.bit_length() - 1]}, tag {tag}")
                late ^= bit
    return sorted(found)


# ---- deadlock -----------------------------------------------------------------------------------


class Stuck(Exception):
    """A simulation in which nobody can go on; says who waits for what."""


class Cta:
    """What the roles of a CTA share."""

    def __init__(self) -> None:
        self.filled = 0
        self.in_flight: list[int] = []
        self.landed: set[int] = set()
        self.released: set[int] = set()
        self.barrier = 0
        self.gathered: Counter[object] = Counter()  # groups that have gathered for a step
        self.arrived: Counter[int] = Counter()  # groups that have stored the sums of a panel
        self.finished = 0
        self.made = self.left = 0  # choices, and those that the finisher has left
        self.chosen = -1  # the tag of the last one


Agent = Iterator[tuple[str, Callable[[], bool]]]


class Simulation:
    """The roles of all CTAs, where what is written last is what is there."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.random = random.Random(seed)
        self.words: dict[tuple[str, int], int] = {}
        self.agents: list[tuple[str, Agent]] = []
        self.landings: list[tuple[str, Agent]] = []
        for number in range(plan.tile.ctas):
            cta = Cta()
            self.agents.append((f"filler {number}", self.filler(number, cta)))
            for group in range(PANEL_GROUPS):
                name = f"group {group} of {number}"
                self.agents.append((name, self.group(number, cta, group)))
            self.agents.append((f"finisher {number}", self.finisher(number, cta)))
            self.landings.append((f"copies of {number}", self.land(cta)))

    # An agent yields what it waits for and how to see whether it is there.

    def wait(self, words: tuple[Words, ...]) -> Agent:
        for its in words:
            pending = list(units(its))

            def there(pending: list = pending, tag: int = its.tag) -> bool:
                pending[:] = [unit for unit in pending if self.words.get(unit) != tag]
                return not pending

            yield f"{its.region}[{its.begin}:{its.end}] of tag {its.tag}", there

    def publish(self, words: tuple[Words, ...]) -> None:
        for its in words:
            if its.region != "logits" or self.plan.filtered:
                self.words.update((unit, its.tag) for unit in units(its))

    def check_choice(self, number: int, cta: Cta, event: Finish) -> None:
        """What a finisher reads is still the choice of its layer."""
        step = event.step
        wanted = self.plan.tag(step.token, step.layer)
        reads = step.phase == "combine" or self.plan.is_routed(step, event.tile, 0)
        if reads and cta.chosen != wanted:
            raise Stuck(f"finisher {number} finds the choice of {cta.chosen}, not of {wanted}")

    def filler(self, number: int, cta: Cta) -> Agent:
        tile = self.plan.tile
        for event in self.plan.filler(number):
            if type(event) is Wait:
                yield from self.wait(event.words)
                continue
            if type(event) is Choose:
                yield from self.wait(event.words)
                yield "the choice before to be left", lambda: cta.left == cta.made
                cta.made, cta.chosen = cta.made + 1, event.words[0].tag
                continue
            i = cta.filled
            yield "room in the ring", lambda i=i: i < tile.stages or i - tile.stages in cta.released
            # The calm one everywhere: who waits for more than the kernel has to must come through.
            calm = tile.calm_window
            yield "its window", lambda i=i, calm=calm: i < calm or i - calm in cta.landed
            cta.in_flight.append(i)
            cta.filled += 1

    def land(self, cta: Cta) -> Agent:
        while True:
            yield "a copy", lambda: bool(cta.in_flight)
            i = self.random.randrange(len(cta.in_flight))
            cta.landed.add(cta.in_flight.pop(i))

    def group(self, number: int, cta: Cta, group: int) -> Agent:
        taken = panels = 0

        def sync() -> Agent:
            wanted = cta.barrier // PANEL_GROUPS * PANEL_GROUPS + PANEL_GROUPS
            cta.barrier += 1
            yield "the other groups", lambda: cta.barrier >= wanted

        def take(count: int, first: int) -> Agent:
            nonlocal taken
            for block in range(first, count, PANEL_GROUPS):
                i = taken + block
                yield f"stage {i}", lambda i=i: i in cta.landed
                cta.released.add(i)
            taken += count

        def multiply(words: tuple[Words, ...], products: list[Multiply]) -> Agent:
            """One block ahead: before x is there, and before the sums of a panel are stored."""
            nonlocal taken, panels
            unread, mine = panels, []
            for product in products:
                first = (group - product.first_group) % PANEL_GROUPS
                blocks = range(taken + first, taken + product.blocks, PANEL_GROUPS)
                if blocks:
                    mine.append((panels, blocks))
                taken += product.blocks
                panels += 1
            ahead = iter([stage for _, blocks in mine for stage in blocks])

            def take_next() -> Agent:
                if (i := next(ahead, None)) is not None:
                    yield f"stage {i}", lambda: i in cta.landed
                    cta.released.add(i)

            yield "the finisher to have read all sums", lambda: cta.finished >= unread
            yield from take_next()
            yield from sync()
            yield from self.wait(words)
            cta.gathered[products[0].step] += 1
            yield from sync()
            for panel, blocks in mine:
                for _ in blocks:
                    yield from take_next()
                if panel >= unread + PARTIALS:
                    yield "room for sums", lambda panel=panel: cta.finished + PARTIALS > panel
                cta.arrived[panel] += 1

        events = list(self.plan.multiplier(number))
        for place, event in enumerate(events):
            if type(event) is Gather:
                products = takewhile(lambda e: type(e) is Multiply, events[place + 1 :])
                yield from multiply(event.words, list(products))
            elif type(event) is Multiply:
                pass  # with what it gathers
            elif type(event) is Draw:
                yield from self.wait(event.words)
                yield from sync()
                if group == 0:
                    self.publish(event.result)
            else:
                assert type(event) is Attend
                yield from self.wait(event.rows)
                yield from sync()
                yield from take(event.chunks, group)
                yield from sync()
                if group == 0:
                    self.publish(event.appended)
                yield from self.wait(event.others)
                if group == 0:
                    self.publish(event.result)
                yield from sync()

    def finisher(self, number: int, cta: Cta) -> Agent:
        for event in self.plan.finisher(number):
            if type(event) is Finish:
                step, groups = event.step, min(self.plan.cut(event.step.phase).blocks, PANEL_GROUPS)
                if step.phase in NORMED:
                    yield "squares", lambda step=step: cta.gathered[step] == PANEL_GROUPS
                yield "sums", lambda groups=groups: cta.arrived[cta.finished] == groups
                self.check_choice(number, cta, event)
                cta.finished += 1
            elif type(event) is AwaitChoice:
                # A barrier tells even phases from odd ones, and no more.
                apart = lambda number=event.number: (cta.made - number) % 2 == 0  # noqa: E731
                yield f"choice {event.number}", apart
            elif type(event) is Leave:
                cta.left += 1
            elif type(event) is Wait:
                yield from self.wait(event.words)
            else:
                self.publish(published(event))

    def run(self, *, unfair: bool) -> None:
        """Run to the end; with `unfair` by strict priorities, so that somebody starves."""
        live = self.agents + self.landings
        self.random.shuffle(live)
        waits = {name: next(agent, None) for name, agent in live}
        working = {name for name, _ in self.agents if waits[name]}
        live = [(name, agent) for name, agent in live if waits[name]]
        while working:
            if not unfair:
                self.random.shuffle(live)
            moved = False
            for name, agent in live:
                steps = 1 << 30 if unfair else self.random.randrange(1, 20)
                while waits[name] and steps and waits[name][1]():
                    waits[name] = next(agent, None)
                    steps, moved = steps - 1, True
                if not waits[name]:
                    working.discard(name)
                if moved and unfair:
                    break
            if not moved:
                said = [f"{name} waits for {waits[name][0]}" for name in sorted(working)]
                said.sort(key=lambda text: " of tag " not in text)  # most others wait for those
                raise Stuck("; ".join(said[:20]))
            live = [(name, agent) for name, agent in live if waits[name]]


def simulate(plan: Plan, seed: int, *, unfair: bool) -> None:
    """Run all roles of all CTAs; raises Stuck when nobody can go on."""
    Simulation(plan, seed).run(unfair=unfair)
