"""Whole decode steps of the compiled core, of a model that is little but attention: what a layer takes where no Python
is between layers, and one token follows another."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import cast

import torch

from kvsift.models.forward_pass import ForwardPass
from kvsift.models.fused_step import FusedStep
from kvsift.models.hf.sparse import SparseCache
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan
from kvsift.stores.paged import PagedStore, note_tokens
from kvsift_lab.bench.decode_case import cache_like, filled_caches
from kvsift_lab.bench.host import HostRecipe
from kvsift_lab.bench.host_timing import WARM_UP_ROUNDS
from kvsift_lab.bench.random_models import llama_of

LAYERS = 8  # whose sketches are more than a cache holds from 32K tokens on
SINKS = 4
NARROW = 64  # numbers of a hidden state: matrices are small
NOTHING, DENSE, QUEST, SKETCH = "step, 64 tokens", "step, dense", "step, quest", "step, sketch"


def step_plans(recipe: HostRecipe) -> dict[str, Plan]:
    """Return the plans of steps that select, by the names of their variants."""
    size = recipe.page_size
    plans = {QUEST: f"quest:budget={recipe.budget}", SKETCH: f"sketch:budget={recipe.sketch_tokens + SINKS + size}"}
    always = f"page_size={size}:sinks={SINKS}:window={size}:dense_layers=none"
    return {name: parse_plan(f"{plan}:{always}") for name, plan in plans.items()}


def step_variants(recipe: HostRecipe, context: int) -> Iterator[tuple[str, partial[None]]]:
    """Return what runs a step over the whole pages of a context, dense and by each plan, over pools of random numbers;
    and over 64 tokens, which is what a layer takes beside its attention.

    Raises:
        InputError: if a budget is too small for its plan.
    """
    context -= context % recipe.page_size  # a step gives a cache its next page where the last one is full
    sizes = {
        "vocab_size": NARROW, "hidden_size": NARROW, "intermediate_size": NARROW, "num_hidden_layers": LAYERS,
        "num_attention_heads": recipe.num_query_heads, "num_key_value_heads": recipe.num_kv_heads,
        "head_dim": recipe.head_dim,
    }  # fmt: skip
    with torch.inference_mode(False):  # points are measured in that mode, and its tensors could not be a model's
        model = llama_of(sizes, torch.device("cpu"), torch.bfloat16)
    model_pass = ForwardPass(FusedStep(model))
    steps = 2 * recipe.repeats + WARM_UP_ROUNDS
    caches = {name: filled_caches(model, plan, context, 1, steps)[0] for name, plan in step_plans(recipe).items()}
    short = filled_caches(model, Plan(), 64, 1, steps)[0]
    dense = cache_like(caches[QUEST], model, Plan(), caches[QUEST].table)
    for name, cache in {NOTHING: short, DENSE: dense, **caches}.items():
        length = 64 if cache is short else context
        note_tokens([cast(PagedStore, each.store) for each in cache.attentions], length)
        for layer in cache.layers:
            layer.columns = length
        yield name, partial(_step, model_pass, cache)


def _step(model_pass: ForwardPass, cache: SparseCache) -> None:
    """Decode a token by the compiled core."""
    assert model_pass.native is not None
    logits = model_pass.native(torch.zeros(1, dtype=torch.int64), [cache])
    assert logits is not None, "the step is composed"
