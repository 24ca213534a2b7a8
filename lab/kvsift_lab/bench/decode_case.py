"""A model in the middle of decoding, without a prompt: pools of random numbers, and captured steps over them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.engine.graphs.fast_path import SPARE_TOKENS
from kvsift.engine.graphs.sequence_groups import SequenceGroup
from kvsift.engine.graphs.session import Session, round_up
from kvsift.engine.graphs.slots import Slots
from kvsift.engine.request import Request
from kvsift.engine.sequence import EngineSequence, FinishReason
from kvsift.layer.accounting import Tally
from kvsift.layer.layer_cache import DEFAULT_PAGE_SIZE
from kvsift.layer.paged_decode import rule_of
from kvsift.models.captured_step import Step
from kvsift.models.hf.adapter import origin_of
from kvsift.models.hf.model_directory import LayerKV
from kvsift.models.hf.slot_states import other_layers
from kvsift.models.hf.sparse import SparseCache, feeding, make_cache
from kvsift.models.hf.state_snapshot import NO_TOKENS
from kvsift.models.scaled_linear import Int4Linear, ScaledExperts, ScaledLinear
from kvsift.plan.placement import Placement
from kvsift.plan.plan import Plan, Rule
from kvsift.stores.kv_pool import KVPool
from kvsift.stores.page_pool import Run
from kvsift.stores.page_table import PageTable
from kvsift_lab.bench.spaced_anchors import with_spaced_anchors

DEVICE = Placement()
SPARE_PAGES = 4  # of a pool, for the scratch pages of cases, so that it does not move


@dataclass(frozen=True)
class DecodeCase:
    """Sequences of a full context that decode under one plan.

    Attributes:
        caches: of each sequence, over one pool.
        session: captured steps over that pool.
        plan: of the steps.
        dense_below: shorter contexts decode densely.
    """

    caches: Sequence[SparseCache]
    session: Session
    plan: Plan
    dense_below: int = 0

    @classmethod
    def of(
        cls, model: Any, step: Step, caches: Sequence[SparseCache], plan: Plan, capture: bool, dense_below: int = 0
    ) -> DecodeCase:
        """Return the case of a plan, with steps of its own."""
        kv = caches[0].table.kv

        def open_cache(rule: Rule | None, table: PageTable) -> SparseCache:
            cache = cache_like(caches[0], model, Plan(None, rule), table)
            cache.reserve_rows([0])  # and the scratch page
            return cache

        session = Session(kv, step, open_cache, lambda slots, rule: dense_below, capture)
        session.expect(caches[0].table.longest)
        return cls(caches, session, plan, dense_below)

    @property
    def slots(self) -> Slots:
        """Slots of the sequences."""
        return self.session.slots(len(self.caches), [rule_of(self.plan)])


class NoOutput:
    """The output of sequences whose tokens nobody needs."""

    constraint = None

    def note_prefilled(self, num_tokens: int) -> None:
        pass

    def foresee(self, logits: Tensor, ahead: int) -> int:
        raise AssertionError("steps choose tokens themselves")

    def take(self, logits: Tensor | int, probe_s: float) -> tuple[int, FinishReason]:
        raise AssertionError("no loop takes these tokens")


def filled_caches(
    model: Any, plan: Plan, context: int, batch: int, steps: int, place: Placement = DEVICE
) -> list[SparseCache]:
    """Return the caches of a batch over one pool of random numbers, with room for the steps of a sample."""
    kv, length = KVPool(), reserved(context + steps, plan)
    spare = kv.pages.allocate(SPARE_PAGES)
    caches = [make_cache(model, plan, probe_every=0, reserve=length, placement=place)]
    caches[0].run.kv, caches[0].run.table = kv, PageTable(1, kv)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode(), feeding(caches[0], "prefill"):
        model(input_ids=token, past_key_values=caches[0])  # layers allocate their pools with the first token
        caches += [cache_like(caches[0], model, plan, PageTable(1, kv)) for _ in range(batch - 1)]
        for cache in caches:
            cache.table.reserve(0, length // cache.page_size)
        for pool in kv.layers.values():
            pool.fit(exactly=True)
            pool.write_noise([Run(0, pool.keys.shape[1])])
    kv.pages.release(spare)
    return caches


def reserved(length: int, plan: Plan) -> int:
    """Return the tokens that are reserved for a sequence of a length, and for steps that are launched ahead."""
    page_size = plan.page_size or DEFAULT_PAGE_SIZE
    return round_up(-(-(length + SPARE_TOKENS) // page_size)) * page_size


def cache_like(cache: SparseCache, model: Any, plan: Plan, table: PageTable) -> SparseCache:
    """Return an empty cache over the pages of a table, beside another one."""
    made = make_cache(model, plan, probe_every=0, placement=cache.run.placement)
    made.run.kv, made.run.table = table.kv, table
    made.adopt([each.shape for each in cache.attentions], cache.attentions[0].like, NO_TOKENS, False, 1)
    made.take_states(deepcopy(other_layers(cache.layers)))
    return made


def with_anchors(plan: Plan, model: Any, count: int, path: Path) -> Plan:
    """As ``with_spaced_anchors``, for a model."""
    config, origin = model.config.get_text_config(decoder=True), origin_of(model)
    assert origin is not None
    return with_spaced_anchors(plan, origin, config.num_hidden_layers, config.num_key_value_heads, count, path)


class Decoded(NamedTuple):
    """What a decode loop took, and what came of it."""

    itl_s: list[float]  # between the tokens of the first sequence
    tallies: list[Tally]  # of each sequence
    tokens: list[list[int]]  # of each sequence

    @property
    def mean_s(self) -> float:
        """Seconds per token."""
        return fmean(self.itl_s)


def decode(case: DecodeCase, context: int, steps: int) -> Decoded:
    """Generate as the engine does, from a full context."""
    group, seqs = SequenceGroup(case.session, None), list[EngineSequence]()
    for number, cache in enumerate(case.caches):
        cache.restart_stats()
        request = Request(range(context), steps + 1, case.plan)
        seqs.append(EngineSequence(request, NoOutput(), cache=cache, token=number, num_cached=context))
        group.join(seqs[-1])
    counted, tokens, times = [seq.counters for seq in seqs], [[seq.token] for seq in seqs], [perf_counter()]
    for _ in range(steps):
        for seq, chosen, token in zip(seqs, tokens, group.step(seqs)):
            seq.token, seq.num_cached = token, seq.num_cached + 1
            chosen.append(token)
        times.append(perf_counter() - counted[0].probe_s)
    for seq in seqs:
        group.leave(seq)
    itl_s = [after - before for before, after in pairwise(times)]
    return Decoded(itl_s, [stats.phase("decode") for stats in counted], tokens)


def read_bytes(tallies: Sequence[Tally]) -> float:
    """Return the bytes of keys, values and summaries that all sequences read."""
    return sum(float(tally.kv_bytes_read) + tally.index_bytes_read for tally in tallies)


def weight_bytes(model: Any) -> int:
    """Return the bytes of the weights that a step reads: all but an input embedding, of which it looks up rows."""
    weights = list(dict(model.named_parameters()).values())  # shared ones once
    rounded = (module for module in model.modules() if isinstance(module, ScaledLinear | Int4Linear | ScaledExperts))
    weights += [each for module in rounded for each in module.buffers()]
    total = sum(weight.numel() * weight.element_size() for weight in weights)
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    return int(total - (0 if tied else embedding.numel() * embedding.element_size()))


def pool_bytes(
    config: Any, plan: Plan, context: int, batch: int, steps: int, dtype: torch.dtype, place: Placement = DEVICE
) -> int:
    """Estimate the bytes that ``filled_caches`` allocates."""
    page_size = plan.page_size or DEFAULT_PAGE_SIZE
    share = 2 / page_size if rule_of(plan) else 0.0  # of summaries, in rows of a head
    per_token = 0.0
    for layer in LayerKV.of_layers(config):
        if layer.window is None:
            stored = place.store.bytes_per_token(layer.head_dim, dtype, **dict(place.knobs))
            per_token += layer.num_kv_heads * (stored + share * layer.head_dim * dtype.itemsize)
    num_tokens = batch * reserved(context + steps, plan) + SPARE_PAGES * page_size
    return int(num_tokens * per_token)
