"""A model in the middle of decoding, without a prompt: pools full of random numbers, and captured steps over them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from time import perf_counter
from typing import Any

import torch

from kvsift.benchmarks.attention_point import fill_summary
from kvsift.engine.counting import Row
from kvsift.engine.decode_loop import DecodeLoop
from kvsift.engine.fast_path import SPARE_TOKENS
from kvsift.engine.session import row_lengths
from kvsift.engine.slots import Slots, Step
from kvsift.engine.transcript import Request, Transcript
from kvsift.models.transformers import SparseCache, feeding, make_cache
from kvsift.runtime.paged_decode import rule_of
from kvsift.runtime.plan import Plan
from kvsift.runtime.sequence import DEFAULT_PAGE_SIZE, SparseAttention
from kvsift.runtime.stats import RunStats, Tally


class Host:
    """Steps of one plan over pools that others share, as a decode loop wants them.

    Args:
        slots: one per sequence.
        plan: of the slots.
        dense_below: contexts shorter than this are shown in full.
    """

    def __init__(self, slots: Slots, plan: Plan, dense_below: int = 0) -> None:
        self.steps, self.plan, self._dense_below = slots, plan, dense_below

    def slots(self, num_slots: int) -> Slots:
        assert num_slots == self.steps.num_slots
        return self.steps

    def knows(self, num_slots: int, kind: Any) -> bool:
        return num_slots == self.steps.num_slots and self.steps.knows(kind)

    def dense_below(self, slots: Slots) -> int:
        return self._dense_below


def filled_cache(model: Any, plan: Plan, context: int, batch: int, steps: int) -> SparseCache:
    """A cache with room for so many rows of this context and the steps to come, all of it random."""
    page_size = plan.page_size or DEFAULT_PAGE_SIZE
    rows = row_lengths([context + steps + SPARE_TOKENS] * batch, page_size)
    cache = make_cache(model, plan, probe_every=0, rows=rows)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode(), feeding(cache, "prefill"):
        model(input_ids=token, past_key_values=cache)  # its layers make their pools with the first token
        for attention in cache.attentions:
            store = attention.store
            store.keys.normal_()
            store.values.normal_()
            for kind, rows_of in store.summaries.items():
                fill_summary(kind, store.keys, rows_of)
    return cache


def new_slots(step: Step, cache: SparseCache, plan: Plan, batch: int, capture: bool) -> Slots:
    """Slots of a plan over the pools of a cache. A dense plan keeps no summaries, here neither."""
    attentions = cache.attentions
    if rule_of(plan) is None:
        attentions = [_without_summaries(attention) for attention in attentions]
    max_pages = len(attentions[0].store.table.planned(0))
    angles = step.angles(max_pages * attentions[0].store.page_size)
    pool = torch.cuda.graph_pool_handle() if capture else None
    return Slots(step, angles, attentions, plan, batch, max_pages, pool)


def decode(host: Host, context: int, steps: int) -> tuple[float, list[Tally]]:
    """Generate through the engine's own loop from a full context.

    Returns:
        Mean seconds per token, and what each sequence was counted.
    """
    rows = [_row(number, context, steps) for number in range(host.steps.num_slots)]
    for _ in DecodeLoop(host, rows, rule_of(host.plan)):
        pass
    times = rows[0].transcript.itl_s
    return sum(times) / len(times), [row.stats.phase("decode") for row in rows]


def read_bytes(tallies: Sequence[Tally]) -> float:
    """Bytes of keys, values and summaries that a step read, all sequences together."""
    return sum(float(tally.kv_bytes_read) + tally.index_bytes_read for tally in tallies)


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that a step reads: all but an input embedding, of which it looks up rows."""
    parameters = dict(model.named_parameters())  # shared ones once
    total = sum(weight.numel() * weight.element_size() for weight in parameters.values())
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    return int(total - (0 if tied else embedding.numel() * embedding.element_size()))


def _row(number: int, context: int, steps: int) -> Row:
    transcript = Transcript(Request([0], steps + 1), tokenizer=None)  # its text is asked for by nobody
    transcript.take(number, perf_counter())
    return Row(number, transcript, RunStats(probe_every=0), context)


def _without_summaries(attention: SparseAttention) -> SparseAttention:
    dense = copy(attention)
    dense.store = copy(attention.store)
    dense.store.summaries = {}
    return dense


def pool_bytes(config: Any, plan: Plan, context: int, batch: int, steps: int, itemsize: int) -> int:
    """About what ``filled_cache`` allocates."""
    page_size = plan.page_size or DEFAULT_PAGE_SIZE
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * itemsize
    num_tokens = sum(row_lengths([context + steps + SPARE_TOKENS] * batch, page_size))
    return int(num_tokens * per_token * (1 + (1 / page_size if rule_of(plan) else 0)))
