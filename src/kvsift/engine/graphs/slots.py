"""Slots of sequences that decode together: static buffers, the step over them, and its CUDA graphs.

A slot is assigned to a sequence of a cache or idle. An idle slot decodes a padding token at position 0 of a scratch
page in every step, so that a batch of three can run as one of four.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.collector import collector_off
from kvsift.engine.graphs.feeds import (
    IDLE,
    NO_PAGES,
    Assignment,
    Block,
    Feed,
    PageNumbers,
    Shift,
    drafts_at,
    feeds_of_blocks,
    feeds_of_sequences,
    uploaded,
)
from kvsift.engine.graphs.slot_constraints import SlotConstraints
from kvsift.engine.sampling import NO_TOKEN, Choice, ConstrainedChooser, draw_by_torch, likeliest
from kvsift.kernels.block_pages import BlockPages
from kvsift.kernels.draw_tokens import draw_tokens, draws
from kvsift.kernels.page_summary import row_twin
from kvsift.kernels.sketch import SKETCHES
from kvsift.kernels.summarise_slots import summarise_slots
from kvsift.layer.paged_decode import ALWAYS, DecodeBatch, DecodeLayer, StepMode, unit_size_of
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.methods.common.anchors import AnchoredMethod
from kvsift.models.captured_step import Step
from kvsift.models.hf.slot_states import SlotStates
from kvsift.models.hf.sparse import SparseCache
from kvsift.plan.plan import Rule

Constraints = Mapping[int, tuple[ConstrainedChooser, Sequence[int]]]  # by slot, each with the drafts before its token


class StepKind(NamedTuple):
    """The properties that a CUDA graph is captured for.

    Attributes:
        mode: mode of attention.
        choice: how tokens are chosen; None: they are not, and the logits are kept.
        constrained: logits are changed before (``SlotConstraints``), and tokens chosen by ``Slots.choose``, in a graph
            of its own: meanwhile the host makes masks.
    """

    mode: StepMode
    choice: Choice | None = "greedy"
    constrained: bool = False

    @property
    def forward(self) -> StepKind:
        """The step that ``Slots.run`` launches."""
        return StepKind(self.mode, None) if self.constrained else self


class CapturedStep(NamedTuple):
    """A step, and what its last replay has computed."""

    cuda_graph: torch.cuda.CUDAGraph | None  # None: the step runs without one
    queries: list[Tensor]  # [slots, num_query_heads, head_dim] in each layer


class SlotBatch(DecodeBatch):
    """A batch in which idle slots keep their length."""

    def __init__(self, table: Tensor, page_size: int, rules: Sequence[Rule | None], block: int) -> None:
        unit_size = unit_size_of(rules, page_size)
        super().__init__(table, [1] * len(table), page_size, [None] * len(table), unit_size=unit_size, block=block)
        self.capacity = self.need([None if rule is None else rule.budget for rule in rules])
        self.state = torch.tensor([[1], [0]], dtype=torch.int32, device=table.device).repeat(1, len(table))
        self.lengths, self.growth = self.state


class Slots:
    """Buffers and CUDA graphs of ``num_slots`` sequences.

    Args:
        step: step of the model.
        angles: rotary angles of all positions.
        cache: cache of all sequences; its pools must not move while this object is in use.
        rules: decode rules that sequences may have, all of one method; None is dense.
        num_slots: sequences side by side.
        max_pages: most pages of a sequence.
        pool: memory that CUDA graphs share; None runs steps without any.
        block: unless 0, so many slots are consecutive tokens of one sequence (``layer.paged_decode.DecodeBatch``). All
            are dense then, and write the summaries of the pages that they fill.
        states: what layers without pages keep, of as many slots; by default in memory of its own.

    Attributes:
        tokens: int64 [slots], the next to feed.
        results: int64 [2 + 2 * layers, slots], the tokens; the largest logits, as bits of float64; ``counted``.
        counted: int64 [2 * layers, slots], the visible tokens of each layer's lists since ``assign``; the shares of
            attention that were estimated in each layer since then (``DecodeLayer``).
    """

    def __init__(
        self, step: Step, angles: Tensor, cache: SparseCache, rules: Sequence[Rule | None], num_slots: int,
        max_pages: int, pool: Any, block: int = 0, states: SlotStates | None = None,
    ) -> None:  # fmt: skip
        device = angles.device
        attentions, page_size = cache.attentions, cache.page_size
        self._step, self._angles, self._attentions, self._pool = step, angles, attentions, pool
        self._scratch = cache.table.reserve_scratch()
        self._table = torch.full((num_slots, max_pages), self._scratch, dtype=torch.int32, device=device)
        self._placed: list[PageNumbers] = [NO_PAGES] * num_slots  # in the table
        self.batch = SlotBatch(self._table, page_size, rules, block)
        self.results = torch.zeros(2 + 2 * len(attentions), num_slots, dtype=torch.int64, device=device)
        self.tokens, self._best, self.counted = self.results[0], self.results[1].view(torch.float64), self.results[2:]
        self._dense_below = torch.full((len(attentions), num_slots), ALWAYS, dtype=torch.int32, device=device)
        per_layer = zip(attentions, self._dense_below, *self.counted.unflatten(0, (2, -1)))
        layers: dict[int, DecodeLayer] = {}
        for attention, *views in per_layer:
            layers[attention.shape.layer] = _layer(attention, self.batch, rules, layers, *views)
        self.layers = list(layers.values())
        self._summaries = [attention.store.pools().summaries for attention in attentions]
        self._states = SlotStates(cache.layers, num_slots, step.writes_states) if states is None else states
        self._knobs = torch.zeros(4, num_slots, dtype=torch.float64, device=device)  # temperature, limits
        self._drawn = torch.zeros(num_slots, dtype=torch.int64, device=device)  # random numbers of the step
        self._noise = torch.zeros(0, num_slots, dtype=torch.int64, device=device)  # of steps to come, where some draw
        self._captured: dict[StepKind, CapturedStep] = {}  # by ``StepKind.forward``
        self._choosing: dict[Choice, torch.cuda.CUDAGraph | None] = {}  # of constrained steps
        self._kept: Tensor | None = None  # logits of steps that keep them, float32 [slots, vocabulary]
        self._constraints: SlotConstraints | None = None
        self._ruled: tuple[object, object] | None = None  # budgets, and lengths below which sequences are dense
        self._known_knobs: list[tuple[float, ...]] = []  # on the device

    @property
    def num_slots(self) -> int:
        return len(self.tokens)

    @property
    def dtype(self) -> torch.dtype:
        """That of the model's keys, whatever they are stored in."""
        return self._attentions[0].like.dtype

    @property
    def over_bus(self) -> bool:
        """Whether steps read keys and values in host memory from a device."""
        return any(attention.store.is_remote for attention in self._attentions)

    def captured(self, kind: StepKind) -> bool:
        """Return whether a step of this kind is captured."""
        return kind.forward in self._captured and (not kind.constrained or kind.choice in self._choosing)

    def sparse_mode(self, rule: Rule | None) -> StepMode:
        """Return the mode of a step whose sequences have this rule and are not dense."""
        has_dense = rule and any(layer.method and rule.budget.is_dense(layer.shape) for layer in self.layers)
        return "mixed" if has_dense else "sparse"

    def prepare(self, kind: StepKind) -> None:
        """Capture a step of this kind unless it is captured. The step is run, so no slot stays assigned."""
        if self.captured(kind):
            return
        self.assign([], 0)
        if kind.forward not in self._captured:
            queries: list[Tensor] = []
            cuda_graph = self._capture(lambda: self._run(kind.forward, []), lambda: self._run(kind.forward, queries))
            self._captured[kind.forward] = CapturedStep(cuda_graph, queries)
        if not kind.constrained:
            return
        if self._kept is None:  # there are no graphs, so nothing has run
            self._run(kind.forward, [])
        assert self._kept is not None
        if self._constraints is None:
            self._constraints = SlotConstraints(self._kept, self.batch.block)
        assert kind.choice is not None
        choose = partial(self._choose_constrained, kind.choice)
        self._choosing[kind.choice] = self._capture(choose, choose)

    def _capture(self, warm: Callable[[], object], run: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
        """Capture what ``run`` launches, after runs of ``warm``; None where there are no graphs."""
        if self._pool is None:
            return None
        with on_device(self.tokens.device), collector_off():
            warm_up(warm)
            cuda_graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(cuda_graph, pool=self._pool):
                run()
        return cuda_graph

    @torch.inference_mode()
    def assign(self, seqs: Sequence[Assignment], steps: int, shift: Shift | None = None) -> None:
        """Assign slot i to ``seqs[i]`` for at most so many steps; the other slots are idle."""
        free = self.num_slots - len(seqs)
        self._assign_rules(seqs, free)
        self._states.begin()
        for slot, seq in enumerate(seqs):
            if seq.cache is not None:
                self._states.load(slot, seq.cache.layers, seq.length)
        for slot in range(self.num_slots):
            self._place(slot, seqs[slot].pages if slot < len(seqs) else NO_PAGES)
        self._feed(feeds_of_sequences(seqs, self.num_slots, steps + (0 if shift is None else shift.most)))
        self._constrain({slot: (seq.constraint, seq.length) for slot, seq in enumerate(seqs)})
        if shift is not None:
            self.batch.lengths.add_(shift.ahead)
            self.tokens.copy_(shift.tokens)
            if len(self._noise):
                number = torch.arange(steps, device=shift.ahead.device).unsqueeze(1)
                self._noise = self._noise.gather(0, number + shift.ahead)

    @torch.inference_mode()
    def assign_blocks(self, blocks: Mapping[int, Block], steps: int = 1, drafted: Tensor | None = None) -> None:
        """Assign consecutive slots to the tokens of each block, from the slot of its place on; other slots are idle.

        A block that is shorter than its slots repeats its last token at the same position, which changes nothing.

        Args:
            blocks: blocks by place.
            steps: more than one if each block has one token: each later step feeds the token that the one before has
                chosen.
            drafted: int64 [number], tokens on the device; ``drafts_at`` of a place there may stand for a token.
        """
        size = self.batch.block
        for slot in range(self.num_slots):
            block = blocks.get(slot // size)
            self._place(slot, NO_PAGES if block is None else block.pages)
        self._feed(feeds_of_blocks(blocks, self.num_slots, size, steps), drafted)
        every = ((place * size + slot, block) for place, block in blocks.items() for slot in range(size))
        self._constrain({slot: (block.constraint, block.length) for slot, block in every})

    def _constrain(self, seqs: Mapping[int, tuple[ConstrainedChooser | None, int]]) -> None:
        """Assign the constraints of slots, each with the tokens cached of its sequence."""
        held = {slot: (constraint, length) for slot, (constraint, length) in seqs.items() if constraint is not None}
        if held:
            assert self._constraints is not None, "a constrained step is prepared first"
            self._constraints.assign(held)

    def _place(self, slot: int, pages: PageNumbers) -> None:
        """Write the pages of a slot into the table, unless they are there."""
        if pages is not self._placed[slot]:
            held = pages[: self._table.shape[1]]
            self._table[slot].fill_(self._scratch)
            self._table[slot, : len(held)] = held if isinstance(held, Tensor) else torch.tensor(held, dtype=torch.int32)
            self._placed[slot] = pages

    def _feed(self, fed_and_noise: tuple[Sequence[Feed], Tensor | None], drafted: Tensor | None = None) -> None:
        """Set what each slot feeds, without waiting for the device and in few launches, since it waits meanwhile.

        Args:
            fed_and_noise: what each slot is fed; random numbers, int64 [steps, slots], None where no token is drawn.
            drafted: int64, tokens on the device.
        """
        feeds, noise = fed_and_noise
        others = 0 if drafted is None else len(drafted)
        numbers = torch.tensor([
            [feed.length for feed in feeds],
            [feed is not IDLE for feed in feeds],
            [max(feed.token, 0) for feed in feeds],
            [drafts_at(feed.token) if feed.token < 0 else others + slot for slot, feed in enumerate(feeds)],
        ])  # fmt: skip
        fed = uploaded(numbers if noise is None else torch.cat([numbers, noise]), self.tokens.device)
        self.batch.state.copy_(fed[:2])
        self.results.zero_()
        if drafted is None:
            self.tokens.copy_(fed[2])
        else:
            torch.index_select(torch.cat([drafted, fed[2]]), 0, fed[3], out=self.tokens)
        self._noise = fed[4:]
        knobs: list[tuple[float, ...]] = [(feed.sampling.temperature, *feed.sampling.limits) for feed in feeds]
        if knobs != self._known_knobs:
            self._knobs.copy_(uploaded(torch.tensor(knobs, dtype=torch.float64), self.tokens.device).T)
            self._known_knobs = knobs

    def _assign_rules(self, seqs: Sequence[Assignment], free: int) -> None:
        budgets = [None if seq.rule is None else seq.rule.budget for seq in seqs]
        below = [
            [min(ALWAYS, seq.dense_below_in(layer.shape)) for seq in seqs] + [ALWAYS] * free for layer in self.layers
        ]
        if (budgets, below) == self._ruled:
            return
        need = self.batch.need(budgets)
        assert need <= self.batch.capacity, "lists are too short for these budgets: pass their rules to Slots"
        self.batch.set_budgets(budgets + [None] * free)
        self._dense_below.copy_(torch.tensor(below, dtype=torch.int32))
        self._ruled = budgets, below

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        """Make a slot idle; steps already launched still run it."""
        self._place(slot, NO_PAGES)
        self.batch.lengths[slot].fill_(1)
        self.batch.state[1, slot].fill_(0)

    @torch.inference_mode()
    def save(self, slot: int, cache: SparseCache, length: int) -> None:
        """Return what layers without pages keep of the sequence in a slot to its cache (``SlotStates.save``)."""
        self._states.save(slot, cache.layers, length)

    @torch.inference_mode()
    def run(self, kind: StepKind, number: int) -> CapturedStep:
        """Launch a step, the ``number``-th since sequences were assigned; ``tokens`` are then the next ones, or once
        ``choose`` has chosen them."""
        captured = self._captured[kind.forward]
        if not kind.constrained:
            self._use_noise(kind.choice, number)
        queries: list[Tensor] = []
        self._states.launch()  # even if it fails: states may have changed in some layers
        with on_device(self.tokens.device):
            if captured.cuda_graph is not None:
                captured.cuda_graph.replay()
                return captured
            self._run(kind.forward, queries)
        return CapturedStep(None, queries)

    @torch.inference_mode()
    def choose(self, kind: StepKind, number: int, constraints: Constraints) -> None:
        """Choose the tokens of a constrained step that was launched.

        Args:
            kind: kind of the step.
            number: its number.
            constraints: those of the slots whose tokens are needed.
        """
        assert self._constraints is not None, "the step was prepared"
        assert kind.choice is not None
        vocabulary = self._constraints.vocabulary
        masks = {slot: each.mask(drafts, vocabulary) for slot, (each, drafts) in constraints.items()}
        self._constraints.mask({slot: bits for slot, bits in masks.items() if bits is not None})
        self._use_noise(kind.choice, number)
        cuda_graph = self._choosing[kind.choice]
        with on_device(self.tokens.device):
            if cuda_graph is not None:
                cuda_graph.replay()
            else:
                self._choose_constrained(kind.choice)

    @torch.inference_mode()
    def repeat_first(self) -> None:
        """Feed all slots of a block the next token of its first one: the others repeat that, and only the first has the
        constraints of what comes next."""
        of_blocks = self.tokens.view(-1, self.batch.block)
        of_blocks[:, 1:] = of_blocks[:, :1].clone()

    def _use_noise(self, choice: Choice | None, number: int) -> None:
        if choice not in (None, "greedy") and len(self._noise):  # else nobody draws
            self._drawn.copy_(self._noise[number])

    @torch.inference_mode()
    def logits(self, tokens: Sequence[Sequence[int]], kind: StepKind) -> Tensor:
        """Feed known tokens to the sequences in the first slots, a token of each in every step, by steps that keep
        their logits: those after each token, float32 [steps, sequences, vocabulary]."""
        found = []
        for column in uploaded(torch.tensor(tokens), self.tokens.device):
            self.tokens[: len(column)] = column
            self.run(kind, 0)
            assert self._kept is not None
            found.append(self._kept[: len(column)].clone())  # the next step writes over it
        return torch.stack(found)

    @torch.inference_mode()
    def _run(self, kind: StepKind, queries: list[Tensor]) -> None:
        self.batch.advance()
        self._states.keep()
        written = self._written(kind.mode)
        logits = self._step(
            self.tokens, self._angles, self.batch, self.layers, written, self._states, kind.mode, watched=queries
        )  # fmt: skip
        if self.batch.block > 1 and any(map(row_twin, self._summaries[0])):
            self._summarise()
        if kind.choice is not None:
            self._choose(kind.choice, logits)
            return
        if self._kept is None:
            self._kept = torch.empty_like(logits, dtype=torch.float32)
        self._kept.copy_(logits)

    @torch.inference_mode()
    def _choose_constrained(self, choice: Choice) -> None:
        assert self._constraints is not None
        assert self._kept is not None
        self._choose(choice, self._constraints.apply(self._kept, self.tokens))

    def _choose(self, choice: Choice, logits: Tensor) -> None:
        """Choose the next tokens from logits [slots, vocabulary]."""
        given = logits, self._knobs[0], self._drawn, self._knobs[1:] if choice == "nucleus" else None
        if draws(logits):  # at temperature 0, too, since that is one launch
            draw_tokens(*given, out=(self.tokens, self._best))
            return
        tokens, best = likeliest(logits)[::-1] if choice == "greedy" else draw_by_torch(*given)
        self.tokens.copy_(tokens)
        self._best.copy_(best)

    def _written(self, mode: StepMode) -> Sequence[Mapping[str, Tensor]]:
        """The summaries that a step writes, of each layer."""
        if mode != "dense":
            return self._summaries
        # without blocks they are read once contexts are long, and written then (``CapturedSequence``)
        kinds = {kind for kind in self._summaries[0] if kind in SKETCHES} if self.batch.block else set()
        if self.batch.block == 1:
            kinds |= {kind for kind in self._summaries[0] if row_twin(kind) is not None}
        return [{kind: rows for kind, rows in pools.items() if kind in kinds} for pools in self._summaries]

    def _summarise(self) -> None:
        """Write the summaries of the pages that the tokens of this step have filled, sketches apart."""
        page_size, position = self.batch.page_size, self.batch.lengths.long() - 1
        page = self._table.gather(1, (position // page_size).unsqueeze(1)).squeeze(1)
        slots, pages = page * page_size + position % page_size, BlockPages(page_size, page_size, 1)
        for layer, summaries in zip(self.layers, self._summaries):
            for kind, rows in summaries.items():
                if row_twin(kind) is not None:  # drafts go without others
                    summarise_slots(kind, slots, layer.kv.keys, layer.kv.values, rows, pages)


def tokens_of(results: Tensor) -> list[int]:
    """Return the tokens of a step by slot, of ``Slots.results`` on the host; ``NO_TOKEN`` where none can be chosen."""
    best = results[1].view(torch.float64)
    return [token if isfinite(logit) else NO_TOKEN for token, logit in zip(results[0].tolist(), best.tolist())]


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device current: kernels are launched and steps captured there, and it need not be the model's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def warm_up(run: Callable[[], object]) -> None:
    """Run a function twice beside the main stream, as capturing needs it: kernels are compiled, libraries set up.

    Raises:
        RuntimeError: if the second run makes the host wait, which cannot be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    torch.cuda.current_stream().wait_stream(stream)


def _layer(
    attention: SparseAttention, batch: DecodeBatch, rules: Sequence[Rule | None], lower: Mapping[int, DecodeLayer],
    below: Tensor, visible: Tensor, estimated: Tensor,
) -> DecodeLayer:  # fmt: skip
    """A layer above ``lower``, which are given by their true indices."""
    shape, (keys, values, summaries) = attention.shape, attention.store.pools()
    methods = [rule.method for rule in rules if rule is not None and not rule.budget.is_dense(shape)]
    assert all(method == methods[0] for method in methods), "sequences of one batch rank pages by one method"
    if not methods:
        return DecodeLayer(shape, batch, keys, values)
    method = methods[0]
    reuse = method.new_state(shape) if isinstance(method, AnchoredMethod) else None
    memory, heads = (None, ()) if reuse is None else (lower[reuse.anchor].memory, reuse.heads)
    summary = summaries[method.summaries[0]] if reuse is None else None
    return DecodeLayer(
        shape, batch, keys, values, summary, method, dense_below=below, visible=visible, estimated=estimated,
        memory=memory, heads=heads,
    )  # fmt: skip
