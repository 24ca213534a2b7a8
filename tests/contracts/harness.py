"""Runs a method the way the product runs it, through SparseAttention, so that contracts see what a user would see."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from kvsift.errors import InputError
from kvsift.kernels.coded_pages import codes_of, scales_of
from kvsift.layer.accounting import RunStats
from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.methods import method_class
from kvsift.methods.base import Method, Phase
from kvsift.plan.budget import Budget
from kvsift.plan.placement import PlacementSpec
from kvsift.plan.plan import Plan, Rule
from kvsift.stores.kv_pool import KVPool
from kvsift.stores.page_pool import PagePool, Run
from kvsift.stores.page_table import PageTable
from kvsift.types import Candidates, Chunk, KVReader, LayerShape, Limit, Rope, Selection

MethodFactory = Callable[[], Method]
Check = Callable[[MethodFactory, Phase], None]

ROPE = Rope(torch.tensor([1.0, 0.3, 0.1]))  # the last two numbers of a head do not turn
SHAPE = LayerShape(layer=2, num_query_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, rope=ROPE)
# Knobs that say how large a unit or a segment is, where a method has them.
SMALL = {"page_size": 4, "block": 8, "chunk": 32, "segment": 48, "queries": 5, "channels": 3, "rank": 3, "local": 40}
SMALL |= {"full_choice": False}  # a single layer is one that chooses, and would see everything
AS_IT_IS = {("retrieval_attention", "block")}  # 0 is no block, and 64 tokens the least


def small(name: str, **knobs: Any) -> MethodFactory:
    """A catalogued method with its defaults, except that units are small so that short contexts hold many."""
    cls = method_class(name)
    names = {field.name for field in fields(cls)} & SMALL.keys()
    sizes = {knob: SMALL[knob] for knob in SMALL if knob in names and (name, knob) not in AS_IT_IS}
    try:
        cls(**{**sizes, **knobs})
    except InputError:  # of a method of tokens that reads pages only with some other knob
        sizes.pop("page_size", None)
    return lambda: cls(**{**sizes, **knobs})


class Tokens(NamedTuple):
    """What one sequence brings to one layer."""

    queries: Tensor  # [num_query_heads, num_tokens, head_dim]
    keys: Tensor  # [num_kv_heads, num_tokens, head_dim]
    values: Tensor  # [num_kv_heads, num_tokens, head_dim]

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    def part(self, start: int, stop: int | None = None) -> Tokens:
        return Tokens(*(tensor[:, start:stop] for tensor in self))

    def then(self, other: Tokens) -> Tokens:
        return Tokens(*(torch.cat(pair, 1) for pair in zip(self, other)))


def draw_tokens(length: int, seed: int, shape: LayerShape = SHAPE) -> Tokens:
    """Random tokens whose queries are sharp enough for a changed selection to show in the output."""
    generator = torch.Generator().manual_seed(seed)
    heads = (shape.num_query_heads, shape.num_kv_heads, shape.num_kv_heads)
    drawn = [torch.randn(num_heads, length, shape.head_dim, generator=generator) for num_heads in heads]
    return Tokens(3 * drawn[0], drawn[1], drawn[2])


def turn(vectors: Tensor, positions: Tensor) -> Tensor:
    """RoPE by complex numbers: pair i of [num_heads, t, d] turns by position * ROPE.inv_freq[i]."""
    pairs = len(ROPE.inv_freq)
    turned = vectors.double().clone()
    numbers = torch.complex(turned[..., :pairs], turned[..., pairs : 2 * pairs])
    numbers = numbers * torch.exp(1j * positions[:, None].double() * ROPE.inv_freq.double())
    turned[..., :pairs], turned[..., pairs : 2 * pairs] = numbers.real, numbers.imag
    return turned.float()


def revealing_tokens(length: int, seed: int) -> tuple[LayerShape, Tokens]:
    """Tokens whose values are unit vectors: the output of a query *is* its row of attention weights."""
    rope = Rope(ROPE.inv_freq[: length // 2])
    shape = SHAPE._replace(head_dim=length, scale=length**-0.5, rope=rope)
    tokens = draw_tokens(length, seed, shape)
    mild = tokens.queries / 3  # no weight underflows to 0
    return shape, Tokens(mild, tokens.keys, torch.eye(length).expand(shape.num_kv_heads, -1, -1))


def phase_plan(method: Method, budget: Budget, phase: Phase) -> Plan:
    rule = Rule(method, budget)
    return Plan(prefill=rule) if phase == "prefill" else Plan(decode=rule)


DEFAULT_PLACE = "device"  # of a runner


class Runner:
    """A SparseAttention in which every slot that holds no token is NaN whenever anything is read."""

    def __init__(
        self, plan: Plan, num_rows: int = 1, shape: LayerShape = SHAPE, scattered: bool = False,
        messages: LayerMessages | None = None, placement: PlacementSpec | None = None, table: PageTable | None = None,
    ) -> None:  # fmt: skip
        placement = DEFAULT_PLACE if placement is None else placement
        self.stats = RunStats(probe_every=0)
        self.shape = shape
        if scattered:
            table = scattered_table(num_rows)
        like = torch.empty(0)
        self.attention = SparseAttention(shape, plan, num_rows, like, self.stats, 0, messages, placement, table)
        self.store: Any = self.attention.store
        append = self.store.append

        def append_then_poison(row: int, keys: Tensor, values: Tensor) -> None:
            append(row, keys, values)
            poison(self.store)

        self.store.append = append_then_poison

    def feed(
        self, *rows: Tokens | None, decode_tokens: int = 0, padding: int = 0, padded_with: float = torch.nan
    ) -> list[Tensor]:
        """One call with the next tokens of every row (None: none); outputs per row, padding cut off."""
        empty = draw_tokens(0, 0, self.shape)
        given = [empty if row is None else row for row in rows]
        lengths = [row.length for row in given]
        width = max(lengths) + padding
        padded = [
            torch.stack(
                [torch.nn.functional.pad(row[i], (0, 0, 0, width - row.length), value=padded_with) for row in given]
            )
            for i in range(3)
        ]
        output = self.attention.attend(Chunk(*padded, lengths), decode_tokens)
        assert output.shape == padded[0].shape
        for row, length in enumerate(lengths):
            assert not output[row, :, length:].any(), "padding is answered with something else than 0"
            assert not output[row, :, :length].isnan().any(), "NaN reached an answer"
        return [output[row, :, :length] for row, length in enumerate(lengths)]

    def feed_all(
        self, tokens: Tokens, prompt: int, cuts: Iterable[int] = (), start: int = 0, padding: int = 0,
        padded_with: float = torch.nan,
    ) -> Tensor:  # fmt: skip
        """The tokens of a single row from ``start`` on, in calls that end at ``cuts``; those from position ``prompt``
        on are generated ones."""
        stops = sorted({cut for cut in cuts if start < cut < tokens.length} | {start, tokens.length})
        outputs = [tokens.queries[:, :0]]
        for first, last in pairwise(stops):
            generated = max(last - max(first, prompt), 0)
            outputs += self.feed(
                tokens.part(first, last), decode_tokens=generated, padding=padding, padded_with=padded_with
            )
        return torch.cat(outputs, 1)

    def crop(self, row: int, length: int) -> None:
        self.attention.crop(row, length)
        poison(self.store)

    def fork(self, sources: Sequence[int]) -> None:
        self.attention.fork(sources)
        poison(self.store)

    def state(self, row: int = 0) -> Any:
        """What the decode rule remembers about a row."""
        return self.attention._states.of("decode", row)

    def summaries(self, row: int = 0) -> dict[str, Tensor]:
        """Packed rows of all pages of a row, by kind; in float32, because torch cannot compare 8-bit tensors."""
        num_pages = -(-self.store.lengths[row] // self.store.page_size)
        reader = self.store.reader(row)
        return {kind: reader.summary(kind, slice(0, num_pages)).float().clone() for kind in self.store.summaries}


class Stack:
    """Layers of one model, each with tokens of its own; a call takes all of them, one after the other."""

    def __init__(
        self, plan: Plan, num_rows: int = 1, layers: Sequence[int] = (2, 3, 5), peers: Sequence[int] = ()
    ) -> None:
        messages, table = LayerMessages(), PageTable(num_rows)
        shapes = [SHAPE._replace(layer=layer, peers=tuple(peers)) for layer in layers]
        self.layers = [Runner(plan, num_rows, shape, messages=messages, table=table) for shape in shapes]

    def feed(self, *rows: Tokens | None, decode_tokens: int = 0) -> list[Tensor]:
        """Outputs of every layer for each row, [num_layers, num_query_heads, num_new, head_dim]. A layer's queries are
        the row's, rolled along the channels, so that layers differ."""
        outputs = []
        for number, layer in enumerate(self.layers):
            own = [None if row is None else row._replace(queries=row.queries.roll(number, -1)) for row in rows]
            outputs.append(layer.feed(*own, decode_tokens=decode_tokens))
        return [torch.stack(of_row) for of_row in zip(*outputs)]

    def fork(self, sources: Sequence[int]) -> None:
        for layer in self.layers:
            layer.fork(sources)

    def crop(self, row: int, length: int) -> None:
        for layer in self.layers:
            layer.crop(row, length)


def answers(plan: Plan, tokens: Tokens, prompt: int, cuts: Iterable[int] | None = None, **how: Any) -> Tensor:
    """Outputs of one sequence that runs alone; by default the prompt in one call, then token by token."""
    steps = range(prompt, tokens.length) if cuts is None else cuts
    return Runner(plan, **how).feed_all(tokens, prompt, steps)


@torch.inference_mode()
def poison(*stores: Any) -> None:
    """Fill every slot that holds no token of these stores, and every summary that belongs to no page, with NaN."""
    paged = [store for given in stores for store in (given.row_stores if given.evicts else [given])]
    for pool in {id(store.pool): store.pool for store in paged}.values():
        written = torch.zeros(pool.keys.shape[1], pool.page_size, dtype=torch.bool)
        for store in (store for store in paged if store.pool is pool):
            for row, length in enumerate(store.lengths):
                pages = [page for run in store.table.runs(row) for page in range(*run)]
                for index, page in enumerate(pages):
                    written[page, : max(length - index * pool.page_size, 0)] = True
        for tensor in (pool.keys, pool.values):
            if pool.by_page:
                codes = codes_of(tensor)
                codes.masked_fill_(~written[..., None], 127)
                scales_of(codes).masked_fill_(~written, torch.nan)
                continue
            # all bits of a coded row's scale: NaN
            tensor.masked_fill_(~written[..., None], -1 if tensor.dtype == torch.int8 else torch.nan)
        for summary in pool.summaries.values():
            bytes_or_numbers = 255 if summary.dtype == torch.uint8 else torch.nan  # 255 twice: a half that is NaN
            summary[:, (~written.any(1)).nonzero().flatten()] = bytes_or_numbers  # 8-bit pools know no masked_fill


class ScatteredPool(PagePool):
    """Hands pages out in a shuffled order, so that hardly any two neighbours in a sequence are neighbours in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(0)

    def allocate(self, count: int, after: int | None = None) -> list[Run]:
        pages = [Run(page, page + 1) for run in super().allocate(count, after) for page in range(*run)]
        self._random.shuffle(pages)
        return pages


def scattered_table(num_rows: int) -> PageTable:
    """A table over a pool of its own that scatters pages."""
    return PageTable(num_rows, KVPool(ScatteredPool()))


class Asked(NamedTuple):
    """One question to a method, and its answer."""

    start: int
    num_queries: int
    candidates: Candidates
    limit: Limit
    selection: Selection


def spy(method: Method, instead: Callable[..., Selection] | None = None) -> list[Asked]:
    """Record every question to this object of a method; ``instead`` answers in its place, given its own answerer."""
    asked: list[Asked] = []
    answer = method.select

    def select(
        state: Any,
        shape: LayerShape,
        queries: Tensor,
        start: int,
        candidates: Candidates,
        limit: Limit,
        reader: KVReader,
    ) -> Selection:
        arguments = (state, shape, queries, start, candidates, limit, reader)
        selection = answer(*arguments) if instead is None else instead(answer, *arguments)
        asked.append(Asked(start, queries.shape[1], candidates, limit, selection))
        return selection

    object.__setattr__(method, "select", select)
    return asked


def spy_scores(method: Method) -> list[Tensor]:
    """Record every answer to ``score``, of methods that have one."""
    scores: list[Tensor] = []
    score = getattr(method, "score", None)
    if callable(score):

        def scoring(*given: Any) -> Tensor:
            scores.append(score(*given))
            return scores[-1]

        object.__setattr__(method, "score", scoring)
    return scores


@dataclass(frozen=True)
class Case:
    """A sequence and the budget it runs under."""

    prompt: int
    decode: int
    budget: Budget
    seed: int

    @property
    def length(self) -> int:
        return self.prompt + self.decode

    @property
    def tokens(self) -> Tokens:
        return draw_tokens(self.length, self.seed)


SIZES = ("tokens", "ratio", "mass")


@st.composite
def cases(draw: st.DrawFn, method: Method, phase: Phase, sizes: Sequence[str] = SIZES) -> Case:
    """Sequences from one token to several segments, most of them long, under budgets that leave room for few units."""
    unit, segment = method.unit_size, method.segment_size
    if phase == "prefill":
        longest = 3 * segment + 3 * unit
        prompt = draw(st.one_of(st.integers(longest - segment, longest), st.integers(1, longest)))
        decode = 0
    else:
        prompt = draw(st.one_of(st.integers(60, 90), st.integers(1, 90)))
        decode = draw(st.integers(1, 8))
    sinks = draw(st.integers(0, 2 * unit + 1))
    window = draw(st.integers(1 if phase == "prefill" else 0, 3 * unit))
    units = draw(st.integers(1, 5))
    budget = Budget(
        sinks=sinks, dense_layers=(), tokens=least_tokens(method, sinks, window, units),
        window=window if method.traits.selects else Budget().window,  # others fill their budget with window
    )  # fmt: skip
    size = draw(st.sampled_from([size for size in sizes if size != "mass" or takes_mass(method, phase)]))
    if size == "ratio":
        budget = replace(budget, tokens=None, ratio=draw(st.sampled_from([0.1, 0.4, 0.8])))
    if size == "mass":
        tokens = draw(st.sampled_from([None, budget.tokens]))
        budget = replace(budget, tokens=tokens, mass=draw(st.sampled_from([0.3, 0.7, 0.95])))
    return Case(prompt, decode, budget, draw(st.integers(0, 999)))


def examples(count: int) -> settings:
    """So many examples, or KVSIFT_EXAMPLES times as many."""
    return settings(max_examples=max(3, round(count * float(os.environ.get("KVSIFT_EXAMPLES", "1")))))


def takes_mass(method: Method, phase: Phase) -> bool:
    """Whether a budget may ask for a share of attention."""
    try:
        phase_plan(method, Budget(mass=0.5), phase)
    except InputError:
        return False
    return True


def least_tokens(method: Method, sinks: int, window: int, units: int = 1) -> int:
    """The smallest token budget that leaves room for some units: all that is forced, rounded up, comes on top."""
    if not method.traits.selects:
        return sinks + units
    unit = method.unit_size
    always = -(-sinks // unit) * unit + (window + unit - 1 if window else 0)
    return always + units * unit


def visible_tokens(plan: Plan, case: Case, phase: Phase) -> tuple[Tensor, Runner]:
    """Which tokens each query of a phase really saw, read off its attention weights: bool [num_query_heads,
    num_queries, num_tokens]. Asks nobody."""
    shape, tokens = revealing_tokens(case.length, case.seed)
    runner = Runner(plan, shape=shape)
    weights = runner.feed_all(tokens, case.prompt, range(case.prompt, case.length))
    return (weights[:, case.prompt :] if phase == "decode" else weights[:, : case.prompt]) > 0, runner


def assert_same_answer(answer: Tensor, expected: Tensor, why: str) -> None:
    """Equal but for the order of summation in float32; where keys are codes, also for queries rounded to 16 bits."""
    atol = 2e-5 if DEFAULT_PLACE == "device" else 1e-3
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=atol, msg=lambda text: f"{why}\n{text}")


def calls(length: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive calls of ``size`` tokens."""
    for start in range(0, length, size):
        yield start, min(start + size, length)
