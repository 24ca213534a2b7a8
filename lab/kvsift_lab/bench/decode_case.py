"""A model in the middle of decoding, without a prompt: pools of random numbers, and captured steps over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, NamedTuple

import torch

from kvsift.engine.graphs.accounting import CapturedSequence
from kvsift.engine.graphs.captured_sequences import CapturedSequences
from kvsift.engine.graphs.fast_path import SPARE_TOKENS
from kvsift.engine.graphs.session import sequence_lengths
from kvsift.engine.graphs.slots import Slots
from kvsift.layer.accounting import RunStats, Tally
from kvsift.layer.layer_cache import DEFAULT_PAGE_SIZE
from kvsift.layer.paged_decode import rule_of
from kvsift.methods.common.anchors import AnchoredMethod, AnchorMap, Reuse, write
from kvsift.models.hf.adapter import origin_of
from kvsift.models.hf.sparse import SparseCache, feeding, make_cache
from kvsift.models.step import Step
from kvsift.plan.plan import Plan, Rule
from kvsift_lab.bench.attention_variants import fill_summary


class FixedSlots:
    """Slots of one plan over shared pools, for rows that stay.

    Args:
        cache: of as many sequences.
        slots: one per sequence.
        plan: of the slots.
        dense_below: shorter contexts decode densely.
    """

    holds, steady = True, False

    def __init__(self, cache: SparseCache, slots: Slots, plan: Plan, dense_below: int = 0) -> None:
        self.cache, self.steps, self.plan, self._dense_below = cache, slots, plan, dense_below

    def slots(self, num_slots: int, rules: Any) -> Slots:
        assert num_slots == self.steps.num_slots
        return self.steps

    def captured(self, num_slots: int, rules: Any, kind: Any) -> bool:
        return num_slots == self.steps.num_slots and self.steps.captured(kind)

    def dense_below(self, slots: Slots, rule: Rule) -> int:
        return self._dense_below


def filled_cache(model: Any, plan: Plan, context: int, batch: int, steps: int) -> SparseCache:
    """Return a cache of random numbers with room for the rows of a batch and the steps of a sample."""
    page_size = plan.page_size or DEFAULT_PAGE_SIZE
    rows = sequence_lengths([context + steps + SPARE_TOKENS] * batch, page_size)
    cache = make_cache(model, plan, probe_every=0, rows=rows)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode(), feeding(cache, "prefill"):
        model(input_ids=token, past_key_values=cache)  # layers allocate their pools with the first token
        for attention in cache.attentions:
            keys, values, summaries = attention.store.pools()
            keys.normal_()
            values.normal_()
            for kind, summary_rows in summaries.items():
                fill_summary(kind, keys, values, summary_rows)
    return cache


def with_anchors(plan: Plan, model: Any, count: int, path: Path) -> Plan:
    """Let so many sparse layers, evenly spaced, select for those above, by a file that is written. Each KV head takes
    the list of another one."""
    config, origin = model.config.get_text_config(decoder=True), origin_of(model)
    assert plan.decode is not None
    assert isinstance(plan.decode.method, AnchoredMethod)
    assert origin is not None
    dense = plan.decode.budget.dense_layers
    layers = [layer for layer in range(config.num_hidden_layers) if layer not in dense]
    count = min(count, len(layers))
    anchors = [layers[number * len(layers) // count] for number in range(count)]
    heads = tuple(reversed(range(config.num_key_value_heads)))
    reuse = {
        layer: Reuse(max(anchor for anchor in anchors if anchor < layer), heads, 1.0)
        for layer in layers
        if layer not in anchors
    }
    write(path, AnchorMap.of(origin, anchors, reuse, dense, {}))
    return replace(plan, decode=replace(plan.decode, method=replace(plan.decode.method, anchors=str(path))))


def new_slots(step: Step, cache: SparseCache, plan: Plan, batch: int, capture: bool) -> Slots:
    """Return slots of a plan over the pools of a cache."""
    max_pages = cache.run.rows[0] // cache.page_size
    angles = step.angles(max_pages * cache.page_size)
    pool = torch.cuda.graph_pool_handle() if capture else None
    return Slots(step, angles, cache, [rule_of(plan)], batch, max_pages, pool)


class Decoded(NamedTuple):
    """What a decode loop took, and what came of it."""

    itl_s: list[float]  # between the tokens of the first sequence
    tallies: list[Tally]  # of each sequence
    tokens: list[list[int]]  # of each sequence

    @property
    def mean_s(self) -> float:
        """Seconds per token."""
        return fmean(self.itl_s)


def decode(slots: FixedSlots, context: int, steps: int) -> Decoded:
    """Generate through the engine's own loop from a full context."""
    rows = [
        CapturedSequence(slots.cache, number, RunStats(probe_every=0), context, steps, number, rule_of(slots.plan))
        for number in range(slots.steps.num_slots)
    ]
    captured, tokens, times = CapturedSequences(slots), [[row.token] for row in rows], [perf_counter()]
    for _ in range(steps):
        for chosen, token in zip(tokens, captured.step(rows)):
            chosen.append(token)
        times.append(perf_counter() - rows[0].stats.probe_s)
    for row in rows:
        captured.leave(row)
    itl_s = [after - before for before, after in pairwise(times)]
    return Decoded(itl_s, [row.stats.phase("decode") for row in rows], tokens)


def read_bytes(tallies: Sequence[Tally]) -> float:
    """Return the bytes of keys, values and summaries that all sequences read."""
    return sum(float(tally.kv_bytes_read) + tally.index_bytes_read for tally in tallies)


def weight_bytes(model: Any) -> int:
    """Return the bytes of the weights that a step reads: all but an input embedding, of which it looks up rows."""
    parameters = dict(model.named_parameters())  # shared weights once
    total = sum(weight.numel() * weight.element_size() for weight in parameters.values())
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    return int(total - (0 if tied else embedding.numel() * embedding.element_size()))


def pool_bytes(config: Any, plan: Plan, context: int, batch: int, steps: int, itemsize: int) -> int:
    """Estimate the bytes that ``filled_cache`` allocates."""
    page_size = plan.page_size or DEFAULT_PAGE_SIZE
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * itemsize
    num_tokens = sum(sequence_lengths([context + steps + SPARE_TOKENS] * batch, page_size))
    return int(num_tokens * per_token * (1 + (1 / page_size if rule_of(plan) else 0)))
