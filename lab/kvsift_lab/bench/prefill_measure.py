"""Time to first token in the engine, dense and by plans, on one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvsift.engine.fast_path import SPARE_TOKENS
from kvsift.engine.session import row_lengths
from kvsift.layer.layer_cache import DEFAULT_PAGE_SIZE
from kvsift.models.decoder_prefill import DecoderPrefill
from kvsift.models.decoder_step import DecoderStep
from kvsift.models.transformers import SparseCache, make_cache
from kvsift.models.transformers_load import choose_device
from kvsift.models.transformers_random import random_model
from kvsift.plan.syntax import parse_plan
from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Bench
from kvsift_lab.bench.prefill import PrefillRecipe
from kvsift_lab.bench.prefill_report import CEILING, point_text
from kvsift_lab.bench.timing import digits, rotated, synchronize

ROOM_SHARE = 1.25  # of the pools, with their summaries and the workspace of a chunk
COUNTERS = ("density", "visible_tokens", "sparse_queries", "kv_bytes_read")


@dataclass(frozen=True)
class PrefillBench(Bench):
    """Prefill of a recipe by a model."""

    recipe: PrefillRecipe
    model: Any
    kind = "prefill"

    @classmethod
    def of(cls, recipe: PrefillRecipe, dtype: torch.dtype = torch.bfloat16) -> PrefillBench:
        return cls(recipe, random_model(recipe.shape, choose_device(recipe.device), dtype))

    def environment(self) -> dict[str, Any]:
        return machine.environment(self.model.device)

    def points(self) -> Sequence[int]:
        return sorted(self.recipe.contexts)

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        return point_text(point)

    def measure(self, point: int) -> dict[str, Any]:
        self._require_room(point)
        recipe, last_chunk = self.recipe, self.recipe.chunks[-1]
        variants = [(f"dense, chunks of {chunk}", "dense", chunk) for chunk in recipe.chunks]
        variants += [(plan, plan, last_chunk) for plan in recipe.plans] + [(CEILING, "", last_chunk)]
        generator = torch.Generator().manual_seed(point)
        ids = torch.randint(0, self.model.config.vocab_size, (point,), generator=generator).to(self.model.device)
        prefill = DecoderPrefill(DecoderStep(self.model))
        timers = {
            name: partial(_timed, prefill, ids, chunk, self._new_cache(plan, point)) for name, plan, chunk in variants
        }
        facts: dict[str, dict[str, Any]] = {
            name: {"name": name, "plan": plan, "chunk": chunk, "ttft_s": []} for name, plan, chunk in variants
        }
        for number in range(recipe.repeats + 1):  # the first round compiles, and does not count
            for name in rotated(list(timers), number):
                seconds, counters = timers[name]()
                facts[name]["ttft_s"] += digits([seconds], 6) if number else []
                facts[name] |= counters
        return {"variants": list(facts.values())}

    def _new_cache(self, plan: str, context: int) -> Callable[[], Any]:
        """Return what makes a cache of a plan; of "", one without attention."""
        if not plan:
            return partial(_NoAttention, len(self.model.model.layers))
        parsed = parse_plan(plan)
        rows = row_lengths([context + SPARE_TOKENS], parsed.page_size or DEFAULT_PAGE_SIZE)
        return partial(make_cache, self.model, parsed, probe_every=0, rows=rows)

    def _require_room(self, context: int) -> None:
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * self.model.dtype.itemsize
        machine.require_room(self.model.device, context * per_token * ROOM_SHARE)


def _timed(
    prefill: DecoderPrefill, ids: Tensor, chunk: int, new_cache: Callable[[], Any]
) -> tuple[float, dict[str, Any]]:
    """Seconds to the first token, and the counters of the prompt."""
    cache = new_cache()
    synchronize(ids.device)
    started = perf_counter()
    for start in range(0, len(ids), chunk):
        logits = prefill(ids[start : start + chunk], cache, "prefill")
    logits[0, -1].argmax().item()
    seconds = perf_counter() - started
    if not isinstance(cache, SparseCache):
        return seconds, {}
    phase = cache.run.report()["phases"]["prefill"]
    return seconds, {key: phase[key] for key in COUNTERS}


class _NoAttention:
    """A cache that stores nothing and returns the queries as attention: prefill without either."""

    class _Layer:
        def update(self, keys: Tensor, values: Tensor) -> None:
            """Store nothing."""

        def attend(self, shape: Any, queries: Tensor, *others: Any) -> Tensor:
            """Return the queries."""
            return queries

    class _Pass:
        decode_tokens, rope, peers, origin = 0, None, (), None

    def __init__(self, num_layers: int) -> None:
        self.layers, self.run = [self._Layer()] * num_layers, self._Pass()

    def get_seq_length(self) -> int:
        return 0
