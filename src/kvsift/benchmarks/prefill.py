"""Prefill end to end: seconds to the first token in the engine, dense and by plans, on one model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvsift.engine.fast_path import SPARE_TOKENS
from kvsift.engine.memory import available_bytes
from kvsift.engine.session import row_lengths
from kvsift.errors import InputError, unknown
from kvsift.models.decoder_prefill import DecoderPrefill
from kvsift.models.decoder_step import DecoderStep
from kvsift.models.transformers import SparseCache, make_cache
from kvsift.models.transformers_random import SHAPES, random_model
from kvsift.runtime.plan import Plan
from kvsift.runtime.sequence import DEFAULT_PAGE_SIZE
from kvsift.runtime.spec import parse_plan

ROOM_SHARE = 1.25  # of the pools, with their summaries and what a chunk needs on its way
CEILING = "no attention"


@dataclass(frozen=True)
class Recipe:
    """Everything a result depends on.

    Attributes:
        shape: of the model; its weights are drawn.
        contexts: prompt tokens.
        plans: that are compared with "dense".
        chunks: tokens per forward pass; dense prefill is measured with each, plans with the last one.
        repeats: samples of each variant.
        max_seconds: no context is begun after so long.
    """

    shape: str
    contexts: tuple[int, ...]
    plans: tuple[str, ...]
    chunks: tuple[int, ...] = (2048, 8192)
    repeats: int = 3
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise unknown("shape", self.shape, SHAPES)
        if not self.contexts or not self.plans or not self.chunks:
            raise InputError("there is nothing to measure: name at least one context, plan and chunk size.")
        for plan in self.plans:
            refuse_dense(plan)


def refuse_dense(plan: str) -> None:
    """Refuse a plan that sifts nothing in prefill.

    Raises:
        InputError: with what to write instead.
    """
    rule = parse_plan(plan).prefill
    if rule is None or rule.method.unbounded:
        raise InputError(f"plan {plan!r} prefills densely; write, for instance, prefill=quoka:budget=1024.")


def head(recipe: Recipe) -> dict[str, Any]:
    """What a result file begins with."""
    return {"kind": "prefill", "recipe": asdict(recipe)}


def run(recipe: Recipe, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Iterator[dict[str, Any]]:
    """Context by context as they are measured; those left out with their reason."""
    started = perf_counter()
    model = random_model(recipe.shape, device, dtype)
    prefill = DecoderPrefill(DecoderStep(model))
    for context in sorted(recipe.contexts):
        if recipe.max_seconds is not None and perf_counter() - started > recipe.max_seconds:
            yield {"context": context, "reason": f"--max-seconds {recipe.max_seconds:g} had passed"}
            continue
        try:
            _require_room(model, context)
            yield {"context": context, "variants": _measure(recipe, model, prefill, context)}
        except (InputError, torch.OutOfMemoryError) as error:
            yield {"context": context, "reason": str(error).splitlines()[0]}
        gc.collect()


def _measure(recipe: Recipe, model: Any, prefill: DecoderPrefill, context: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(context)
    ids = torch.randint(0, model.config.vocab_size, (context,), generator=generator).to(model.device)
    timers: dict[str, Callable[[], dict[str, Any]]] = {}
    facts: dict[str, dict[str, Any]] = {}
    wanted = [("dense", f"dense, chunks of {chunk}", chunk) for chunk in recipe.chunks]
    wanted += [(plan, plan, recipe.chunks[-1]) for plan in recipe.plans]
    for plan, name, chunk in wanted:
        timers[name] = _timer(prefill, ids, chunk, partial(_new_cache, model, parse_plan(plan), context))
        facts[name] = {"name": name, "plan": plan, "chunk": chunk, "ttft_s": []}
    timers[CEILING] = _timer(prefill, ids, recipe.chunks[-1], partial(_Nothing, len(model.model.layers)))
    facts[CEILING] = {"name": CEILING, "plan": "", "chunk": recipe.chunks[-1], "ttft_s": []}
    names = list(timers)
    for number in range(recipe.repeats + 1):  # the first compiles, and is not counted
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found = timers[name]()
            seconds = found.pop("seconds")
            if number:
                facts[name]["ttft_s"].append(float(f"{seconds:.6g}"))
            facts[name] |= found
    return list(facts.values())


def _timer(
    prefill: DecoderPrefill, ids: Tensor, chunk: int, new_cache: Callable[[], Any]
) -> Callable[[], dict[str, Any]]:
    def measure() -> dict[str, Any]:
        cache = new_cache()
        _synchronize(ids.device)
        started = perf_counter()
        for start in range(0, len(ids), chunk):
            logits = prefill(ids[start : start + chunk], cache, "prefill")
        logits[0, -1].argmax().item()
        seconds = perf_counter() - started
        return {"seconds": seconds, **_counted(cache)}

    return measure


def _counted(cache: Any) -> dict[str, Any]:
    """What its prompt tokens saw."""
    if not isinstance(cache, SparseCache):
        return {}
    phase = cache.run.report()["phases"]["prefill"]
    return {key: phase[key] for key in ("density", "visible_tokens", "sparse_queries", "kv_bytes_read")}


def _new_cache(model: Any, plan: Plan, context: int) -> SparseCache:
    rows = row_lengths([context + SPARE_TOKENS], plan.page_size or DEFAULT_PAGE_SIZE)
    return make_cache(model, plan, probe_every=0, rows=rows)


class _Nothing:
    """Stands in for a cache, and answers attention with the queries: what prefill takes without any."""

    class _Layer:
        def update(self, keys: Tensor, values: Tensor) -> None:
            """Nothing is kept."""

        def attend(self, shape: Any, queries: Tensor, mask: None, sink_logit: None) -> Tensor:
            """The queries themselves."""
            return queries

    class _Run:
        decode_tokens, rope, peers, origin = 0, None, (), None

    def __init__(self, num_layers: int) -> None:
        self.layers, self.run = [self._Layer()] * num_layers, self._Run()

    def get_seq_length(self) -> int:
        """Every chunk is the first."""
        return 0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _require_room(model: Any, context: int) -> None:
    """Refuse what cannot fit, before anything is allocated."""
    free, config = available_bytes(model.device), model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
    need = context * per_token * ROOM_SHARE
    if free is not None and need > free:
        raise InputError(f"its pools need {need / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free")
