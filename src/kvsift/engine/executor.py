"""What the loop does with a model: caches, prefill, decode steps and memory of its sequences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvsift.engine.graphs.block_groups import BlockGroup
from kvsift.engine.graphs.sequence_groups import Group, SequenceGroup
from kvsift.engine.graphs.session import STEADY_SLOTS
from kvsift.engine.memory import available_bytes, kv_bytes, stored_tokens, summary_share, unpaged_bytes
from kvsift.engine.model_runner import ModelRunner
from kvsift.engine.prefill_sharing import prefill_key
from kvsift.engine.schedule import OPEN_SEQUENCES
from kvsift.engine.sequence import EngineSequence
from kvsift.engine.speculative.decoder import Proposal
from kvsift.engine.speculative.exact_step import Checked
from kvsift.errors import InputError
from kvsift.layer.layer_cache import DEFAULT_PAGE_SIZE
from kvsift.layer.paged_decode import rule_of
from kvsift.methods.base import Phase
from kvsift.models.captured_step import NO_STEP
from kvsift.models.forward_pass import MAX_SEQUENCES, ForwardPass
from kvsift.models.hf.cache import SparseCache
from kvsift.models.hf.slot_states import empty_states
from kvsift.models.hf.state_snapshot import NO_TOKENS, StateSnapshot
from kvsift.native.shapes import NOT_FINITE
from kvsift.plan.capabilities import reason
from kvsift.plan.plan import Plan, Rule
from kvsift.stores.kv_pool import KVPool
from kvsift.stores.page_pool import Run
from kvsift.stores.page_table import SPARE_PAGES, PageTable
from kvsift.types import LayerShape

FREE_SHARE = 0.8  # of the free memory that sequences may take: a pool that grows is copied layer by layer
ROOM_BEHIND_DOCUMENTS = 256  # tokens, so that most questions move no pool
GroupKind = type[BlockGroup] | type[SequenceGroup]


class Executor:
    """What the loop does with a model.

    Args:
        runner: runner of the model.
        max_seqs: most sequences that decode in one step.

    Attributes:
        page_size: tokens of a page that sequences share.
        steady: no bit of an answer may depend on other sequences.
    """

    page_size = DEFAULT_PAGE_SIZE

    def __init__(self, runner: ModelRunner, max_seqs: int = 8) -> None:
        self._max_seqs = max_seqs
        self._runner, self.steady = runner, runner.deterministic
        self._shapes: list[LayerShape] = []  # of kvsift's layers, once a cache has attended something
        self._like = torch.empty(0)  # as their keys
        self._states: dict[int, Any] = {}  # layers without pages, of no sequence
        self._groups: list[Group[Any]] = []  # of sequences that take captured steps
        self._pools = dict[int, KVPool]()  # by page size, of sequences whose pages are not of the loop's size

    @property
    def splits_freely(self) -> bool:
        """Whether the bits of a prompt do not depend on how it is cut into chunks."""
        return self._runner.device.type != "cuda" or self._runner.deterministic

    @property
    def most_prefilled(self) -> int:
        """Tokens of a chunk where the bits of a prompt may depend on its chunks; 0, the loop's own, elsewhere."""
        return 0 if self.splits_freely else self._runner.chunk_size

    def reason_apart(self, seq: EngineSequence) -> str | None:
        """Why a sequence has a pool of its own; None if its pages are in that of all sequences."""
        return self._runner.reason_apart(seq.request.plan)

    def open(self, seq: EngineSequence, table: PageTable | None) -> SparseCache:
        """An empty cache of one sequence, over the pages of ``table`` if there is one."""
        request = seq.request
        cache = self._runner.new_cache(request.plan, len(request.ids) + _room_behind(seq), length=request.length)
        if table is None and (kv := self._pool_of(request.plan)) is not None:
            table = PageTable(1, kv)
        cache.run.kv, cache.run.table = None if table is None else table.kv, table
        self.begin(seq, cache)
        return cache

    def _pool_of(self, plan: Plan) -> KVPool | None:
        """The pool that sequences of a plan share beside the loop's, so that they take captured steps together; it
        stays for later ones."""
        page_size = plan.page_size or self.page_size
        apart = page_size == self.page_size or self.steady or self._runner.place.in_host_memory
        if apart or any(rule.evicts for rule in plan.rules) or self._runner.reason_uncaptured(plan) is not None:
            return None
        return self._pools.setdefault(page_size, KVPool())

    def _busy_pools(self) -> dict[int, KVPool]:
        return {size: pool for size, pool in self._pools.items() if pool.pages.num_used > len(self.runs(pool))}

    def begin(self, seq: EngineSequence, cache: SparseCache) -> None:
        """Set up a cache for the answer of a sequence."""
        if seq.decoder is not None:
            cache.run.exact, cache.stats.probe_every = "dense", 0

    def forks(self, cache: SparseCache) -> bool:
        """Whether ``fork`` can copy a cache."""
        return self._runner.reason_apart(cache.run.plan) is None

    def fork(self, cache: SparseCache, seq: EngineSequence) -> SparseCache:
        """A cache for a sequence that begins with the tokens of a pinned prefix, whose full pages it shares."""
        forked = self._runner.new_cache(cache.run.plan, seq.request.length + 1, length=seq.request.length)
        forked.run.kv, forked.run.table = cache.table.kv, PageTable(1, cache.table.kv)
        forked.begin_at_mark(cache)
        return forked

    def rewind(self, cache: SparseCache) -> bool:
        """Remove what follows the tokens of a pinned prefix, if that is possible; returns whether it was."""
        cache.run.exact = ""
        cache.stats.probe_every = self._runner.probe_every
        cache.restart_stats()
        if not cache.can_rewind:
            return False
        cache.rewind()
        return True

    def fail(self) -> None:
        """Forget all captured steps and pools, after a fault."""
        self._groups.clear()
        self._pools.clear()

    def decode_sequences(self, seqs: Sequence[EngineSequence]) -> Sequence[Tensor | int]:
        """Feed the next token of each sequence of a group: logits [vocabulary] of each, or the token that was
        chosen."""
        if seqs[0].group is not None:
            group: Group[Any] = seqs[0].group
            return group.step(seqs)
        own, caches = self._forward_pass, [seq.cache for seq in seqs if seq.cache is not None]
        if own is None or caches[0].run.plan.wants_hidden:
            return [self._decode(cache, seq.token) for seq, cache in zip(seqs, caches)]
        return list(own.decode(torch.tensor([seq.token for seq in seqs], device=self._runner.device), caches)[:, 0])

    def adopt(
        self, cache: SparseCache, state: StateSnapshot, stale: bool, grid: int, sealed: Sequence[Any]
    ) -> None:  # fmt: skip
        """Begin with the tokens of a snapshot, whose pages the cache's table has adopted; ``stale``: some of them lack
        summaries; ``sealed``: by the cache that has read them."""
        cache.adopt(self._shapes, self._like, state, stale, grid, sealed)

    @torch.inference_mode()
    def fill_from_source(self, seq: EngineSequence) -> None:
        """Let the source of a sequence fill its cache."""
        assert seq.source is not None
        assert seq.cache is not None
        seq.source(seq.cache)
        self._remember(seq.cache)

    def root(self, seq: EngineSequence) -> bytes:
        """Name of what the keys of a prompt depend on, besides its tokens."""
        request = seq.request
        return repr((request.salt, prefill_key(request.plan), self._runner.rotation(request.length))).encode()

    def prefill(self, seq: EngineSequence, ids: Sequence[int], pause: Callable[[], bool] | None = None) -> Tensor:
        """Store and attend tokens of a sequence's prompt; logits [vocabulary] of the last one.

        ``pause`` may be called at any time, and may decode other sequences; it returns whether it has.
        """
        cache = seq.cache
        assert cache is not None
        phase: Phase = "prefill" if seq.decode_from is None or seq.num_cached < seq.decode_from else "decode"
        start = seq.num_cached

        def score(logits: Tensor) -> None:
            nonlocal start
            assert seq.score is not None
            seq.score(start, logits)
            start += len(logits)

        scores = None if seq.score is None else score
        logits: Tensor = self._runner.feed(cache, ids, phase=phase, pause=pause, score=scores)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # what others are owed is measured
        self._remember(cache)
        return logits[0, -1]

    def _remember(self, cache: SparseCache) -> None:
        """Keep what caches of other sequences are made with."""
        if attentions := cache.attentions:
            self._shapes, self._like = [attention.shape for attention in attentions], attentions[0].like
            self._states = self._states or empty_states(cache.layers)

    def most_verified(self, seq: EngineSequence) -> int:
        return MAX_SEQUENCES if seq.group is None else seq.group.most_verified(seq)

    def is_ahead(self, seq: EngineSequence) -> bool:
        return seq.group is not None and seq.group.is_ahead(seq)

    def check(self, seqs: Sequence[EngineSequence], proposals: Sequence[Proposal]) -> Checked:
        if seqs[0].group is not None:
            checked: Checked = seqs[0].group.check(seqs, proposals)
            return checked
        started = perf_counter()
        proposed = [
            self._drafts(seq, proposal.drafts) if proposal.drafts else proposal.tokens
            for seq, proposal in zip(seqs, proposals)
        ]
        drafted = perf_counter()
        following = [self._verify(seq, tokens) for seq, tokens in zip(seqs, proposed)]
        return Checked(proposed, following, drafted - started, perf_counter() - drafted)

    def _drafts(self, seq: EngineSequence, count: int) -> list[int]:
        cache, token, drafts = seq.cache, seq.token, list[int]()
        assert cache is not None
        cache.run.exact, state = "", cache.snapshot(seq.num_cached)
        assert state is not None
        try:
            for ahead in range(count):
                logits = self._decode(cache, token)
                drafts.append(token := seq.output.foresee(logits, ahead))
                if token in seq.request.ending_tokens:
                    break
        except InputError as error:
            if str(error) != NOT_FINITE:
                raise  # else the verification finds what is wrong with the token, and says which one it is
        finally:
            cache.run.exact = "dense"
            cache.return_to(state)
        return drafts

    def _verify(self, seq: EngineSequence, tokens: Sequence[int]) -> Sequence[Tensor]:
        assert seq.cache is not None
        assert seq.decoder is not None
        seq.cache.run.exact = "dense" if seq.decoder.is_paused else "learning"
        if tokens and tokens[-1] in seq.request.ending_tokens:
            tokens = tokens[:-1]  # what would follow it is of no use
        seq.fed = [seq.token, *tokens]
        seq.before = seq.cache.snapshot(seq.num_cached) if tokens and seq.cache.has_states else None
        if self._forward_pass is not None:
            return list(self._forward_pass.verify(torch.tensor(seq.fed), seq.cache))
        logits = list[Tensor]()
        self._runner.feed(seq.cache, seq.fed, phase="decode", score=logits.extend)
        return logits

    def undo(self, seq: EngineSequence) -> None:
        if seq.group is not None or seq.cache is None:
            return
        if not seq.cache.has_states:
            seq.cache.undo(seq.num_cached)
        elif seq.before is not None and (kept := seq.num_cached - seq.before.length) < len(seq.fed):
            seq.cache.return_to(seq.before)  # and on, by those that were accepted
            seq.cache.run.exact = "dense"
            self._runner.feed(seq.cache, seq.fed[:kept], phase="decode")
        seq.before = None

    def _decode(self, cache: SparseCache, token: int) -> Tensor:
        """Feed a generated token of one sequence; logits [vocabulary]."""
        if self._forward_pass is None or cache.run.plan.wants_hidden:  # by transformers' modules
            logits: Tensor = self._runner.feed(cache, [token], phase="decode")[0, -1]
            return logits
        return self._forward_pass.decode(torch.tensor([token], device=self._runner.device), [cache])[0, 0]

    def groups(self, seqs: Sequence[EngineSequence]) -> Sequence[Sequence[EngineSequence]]:
        """Sequences that one pass decodes together, of all that decode; some may wait for the next step. New ones begin
        in their order, and have a ``path`` then: one that cannot begin is the first without."""
        for seq in seqs:
            if not seq.path:
                self._begin_steps(seq)
        captured = [[seq for seq in seqs if seq.group is group] for group in self._groups]
        parts = [group.parts(present) for group, present in zip(self._groups, captured) if present]
        others, joined = [seq for seq in seqs if seq.group is None], list[EngineSequence]()
        if self._forward_pass is not None and self._forward_pass.joins:
            plans = [seq.request.plan for seq in others]
            joins = [plan.can_undo and not plan.wants_hidden for plan in plans]
            joined = [seq for seq, is_joined in zip(others, joins) if is_joined and seq.decoder is None]
        groups = [joined[first : first + MAX_SEQUENCES] for first in range(0, len(joined), MAX_SEQUENCES)]
        return [*chain(*parts), *groups, *([seq] for seq in others if seq not in joined)]

    def _begin_steps(self, seq: EngineSequence) -> None:
        """Decide which steps a sequence takes, and let it join others in captured ones."""
        assert seq.cache is not None
        if why := self._reason_sequence_uncaptured(seq):
            too = why if seq.observer is not None else self._reason_composed(seq.cache, why)
            seq.path = "native" if too is None else "composed: " + "; ".join(dict.fromkeys([why, too]))
            return
        rotation, kv = seq.cache.rotation, seq.cache.table.kv
        kind = BlockGroup if self._takes_blocks(seq) else SequenceGroup
        present = [kv, *self._pools.values()]
        self._groups = [group for group in self._groups if any(map(group.serves, present))]
        fit: list[Group[Any]] = [each for each in self._groups if isinstance(each, kind) and each.takes(seq, rotation)]
        group = fit[0] if fit else self._new_group(kind, kv, rotation)
        try:
            group.join(seq)
        except BaseException:
            group.forget(seq)
            raise
        seq.group, seq.path = group, self._runner.fast_path.name

    def _new_group(self, kind: GroupKind, kv: KVPool, rotation: int | None) -> Group[Any]:
        steady = self.steady and kind is SequenceGroup
        runner, open_cache = self._runner, partial(self._open_cache, rotation)
        session = runner.fast_path.over_pool(runner.model, kv, open_cache, rotation, steady)
        if steady:
            session.expect(self.longest or 1)
        most = STEADY_SLOTS if kind is BlockGroup or steady else OPEN_SEQUENCES * self._max_seqs
        self._groups.append(kind(session, rotation, most))
        return self._groups[-1]

    @property
    def longest(self) -> int | None:
        """Pages of the longest sequence that the model has positions for; None: they are unlimited."""
        positions = self._runner.directory.max_positions
        return None if positions is None else positions // self.page_size + SPARE_PAGES

    def prepare(self, kv: KVPool, plan: Plan, exact_plan: Plan, num_seqs: int) -> int:
        """Capture the steps that up to so many sequences under a plan will take over a pool; returns how many. Exact
        ones have the other plan."""
        most, count = kv.pages.num_pages, 0
        empty = [group for group in self._groups if group.serves(kv) and not group.seqs]
        in_blocks = self._runner.fast_path.takes_blocks(Plan(), False, self._runner.model)
        kinds: list[GroupKind] = [BlockGroup] if in_blocks else [SequenceGroup]
        kinds += [SequenceGroup] if in_blocks and rule_of(plan) is not None else []
        for kind in kinds if empty else ():
            rule = rule_of(exact_plan if kind is BlockGroup else plan)
            fit = [group for group in empty if isinstance(group, kind) and group.may_prepare(rule)]
            group = fit[0] if fit else self._new_group(kind, kv, empty[0].rotation)
            count += group.prepare(rule, num_seqs, min(most, self.longest or most))
        return count

    def _takes_blocks(self, seq: EngineSequence) -> bool:
        return self._runner.fast_path.takes_blocks(seq.request.plan, seq.decoder is not None, self._runner.model)

    def _reason_sequence_uncaptured(self, seq: EngineSequence) -> str | None:
        """Why the steps of a sequence are not captured; None: they are."""
        if seq.observer is not None:
            return "what is selected is recorded"
        if seq.decoder is not None and not self._takes_blocks(seq):
            return "drafts are verified"
        if seq.request.logprobs is not None:
            return "probabilities are kept"
        return self._runner.reason_uncaptured(seq.request.plan)

    def _reason_composed(self, cache: SparseCache, uncaptured: str) -> str | None:
        """Why steps that are not captured, for a reason that may suffice, are not native either; None: they are."""
        if self._runner.device.type != "cpu":
            return uncaptured
        if self._forward_pass is None:
            return reason(self._runner.model, self._runner.fast_path.not_fused, NO_STEP) or uncaptured
        return self._forward_pass.reason_composed(cache)

    def _open_cache(self, rotation: int | None, rule: Rule | None, table: PageTable) -> SparseCache:
        """An empty cache over the pages of a table, whose keys are rotated so, for captured steps under a rule."""
        cache = self._runner.new_cache(Plan(None, rule), 0)
        cache.run.kv, cache.run.table = table.kv, table
        cache.rotation = rotation
        cache.adopt(self._shapes, self._like, NO_TOKENS, False, self._runner.chunk_size)
        cache.take_states(self._states)
        cache.reserve_rows([0])  # and the scratch page
        return cache

    def recall(self, seq: EngineSequence) -> None:
        """Let a sequence that takes captured steps go on from its ``num_cached`` tokens, whatever was launched for
        it."""
        seq.group.recall()

    def leave(self, seq: EngineSequence) -> None:
        """Count what a sequence has done in captured steps: it ends."""
        if seq.group is None:
            return
        launched = seq.group.leave(seq)
        if seq.prefix is not None and seq.cache is not None:  # which goes on without what was written ahead
            written, stale = (seq.num_cached, None) if launched is None else (launched.written, launched.stale_from)
            seq.cache.advance(0, written, seq.num_cached, stale)

    def release(self, kv: KVPool) -> None:
        """Let go of the tensors of a pool, which is about to grow; sequences go on as after ``recall``."""
        self._pools = self._busy_pools()
        for group in self._groups:
            group.release(kv)

    def runs(self, kv: KVPool) -> Sequence[Run]:
        """Pages of a pool that the model keeps for itself."""
        return [run for group in self._groups for run in group.runs(kv)]

    @property
    def holds_pool(self) -> bool:
        """Whether steps are captured over the pool, so that it should stay while no sequence needs it."""
        return bool(self._groups)

    def forget(self) -> None:
        """Drop captured steps that no sequence takes."""
        self._groups = [group for group in self._groups if group.seqs]
        self._pools = self._busy_pools()

    def spare(self, kv: KVPool) -> int:
        """Pages to allocate besides those that a pool has to grow to, so that it grows rarely."""
        room = self.room(kv) if self._runner.fast_path.enabled else 0
        return min(kv.pages.num_pages // 2, (room or 0) // 4)

    def pages_of(self, seq: EngineSequence) -> int:
        """The most pages' worth of memory that a sequence needs."""
        num_layers, length = len(self._runner.directory.full_layers), len(seq.request.ids) + _room_behind(seq)
        return -(-stored_tokens(seq.request.plan, num_layers, length, self._runner.chunk_size) // self.page_size)

    def room(self, kv: KVPool) -> int | None:
        """Pages for which there is memory beside a pool; None if unknown."""
        runner = self._runner
        device = torch.device("cpu") if runner.place.in_host_memory else runner.device
        free = available_bytes(device)
        if free is None:
            return None
        idle = [pool for size, pool in self._pools.items() if size not in self._busy_pools()]
        free += sum(layer.num_bytes for pool in idle for layer in pool.layers.values())
        if device.type == "cuda":  # torch gives back what it has reserved before it asks for more
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if device == runner.device:  # else the states of the next sequence are elsewhere
            longest = runner.directory.max_positions or sys.maxsize
            free -= unpaged_bytes(runner.directory, runner.dtype, longest, captured=runner.fast_path.enabled)
        stored = kv_bytes(runner.directory, runner.dtype, self.page_size, runner.place)
        page_bytes = stored * (1 + summary_share(runner.place))
        present = sum(pool.num_bytes / max(pool.keys.shape[1], 1) for pool in kv.layers.values())  # with all summaries
        return int(FREE_SHARE * max(free, 0) / max(page_bytes, present, 1))

    @cached_property
    def _forward_pass(self) -> ForwardPass | None:
        return self._runner.fast_path.forward_pass(self._runner.model)


def _room_behind(seq: EngineSequence) -> int:
    """Tokens for which there is to be room behind the prompt of a sequence."""
    return seq.request.max_new_tokens if seq.pins is None else max(seq.request.max_new_tokens, ROOM_BEHIND_DOCUMENTS)
