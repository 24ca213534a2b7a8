"""Time to first token in the engine on one model, and attention of prefill in one layer, dense and by plans.

Keys, values and queries of a layer are random: reads and operations do not depend on them, and quality is not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvsift.errors import MissingPackage
from kvsift.kernels.attention import attention
from kvsift.layer.accounting import RunStats
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.models.forward_pass import ForwardPass
from kvsift.models.fused_step import FusedStep
from kvsift.models.hf.model_directory import choose_device
from kvsift.models.hf.sparse import SparseCache, make_cache
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan
from kvsift.types import Chunk, LayerShape
from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Bench, first_line
from kvsift_lab.bench.decode_case import pool_bytes, reserved
from kvsift_lab.bench.prefill import CEILING, PrefillLayerRecipe, PrefillRecipe, point_text
from kvsift_lab.bench.random_models import random_model
from kvsift_lab.bench.recipe import COLD_BYTES
from kvsift_lab.bench.timing import gpu_seconds, interleaved, rotated, synchronize
from kvsift_lab.numbers import digits

ROOM_SHARE = 1.25  # of the pools, with their summaries and the workspace of a chunk
COUNTERS = ("density", "visible_tokens", "sparse_queries", "kv_bytes_read")
Attend = Callable[[], Any]


@dataclass(frozen=True)
class PrefillBench(Bench):
    """Prefill of a recipe by a model."""

    recipe: PrefillRecipe
    model: Any
    kind = "prefill"

    @classmethod
    def of(cls, recipe: PrefillRecipe, dtype: torch.dtype = torch.bfloat16) -> PrefillBench:
        return cls(recipe, random_model(recipe.shape, choose_device(recipe.device), dtype, quantize=recipe.quantize))

    def environment(self) -> dict[str, Any]:
        return machine.environment(self.model.device)

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        return point_text(point)

    def measure(self, point: int) -> dict[str, Any]:
        pools = pool_bytes(self.model.config, Plan(), point, 1, 0, self.model.dtype)
        machine.require_room(self.model.device, pools * ROOM_SHARE)
        recipe, last_chunk = self.recipe, self.recipe.chunks[-1]
        variants = [(f"dense, chunks of {chunk}", "dense", chunk) for chunk in recipe.chunks]
        variants += [(plan, plan, last_chunk) for plan in recipe.plans] + [(CEILING, "", last_chunk)]
        generator = torch.Generator().manual_seed(point)
        ids = torch.randint(0, self.model.config.vocab_size, (point,), generator=generator).to(self.model.device)
        own = ForwardPass(FusedStep(self.model))
        timers = {
            name: partial(_timed, own, ids, chunk, self._new_cache(plan, point)) for name, plan, chunk in variants
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
        return partial(make_cache, self.model, parsed, probe_every=0, rows=[reserved(context, parsed)])


def _timed(own: ForwardPass, ids: Tensor, chunk: int, new_cache: Callable[[], Any]) -> tuple[float, dict[str, Any]]:
    """Seconds to the first token, and the counters of the prompt."""
    cache = new_cache()
    synchronize(ids.device)
    started = perf_counter()
    for start in range(0, len(ids), chunk):
        logits = own.prefill(ids[start : start + chunk], cache, "prefill")
    logits[0, -1].argmax().item()
    seconds = perf_counter() - started
    if not isinstance(cache, SparseCache):
        return seconds, {}
    phase = cache.run.report()["phases"]["prefill"]
    return seconds, {key: phase[key] for key in COUNTERS}


class _NoAttention:
    """A cache that stores nothing and returns the queries as attention: prefill without either."""

    class _Layer:
        def attend_new(self, queries: Tensor, *others: Any) -> Tensor:
            """Return the queries."""
            return queries

    class _Pass:
        decode_tokens, rope, peers, origin = 0, None, (), None

    def __init__(self, num_layers: int) -> None:
        self.layers, self.run = [self._Layer()] * num_layers, self._Pass()

    def get_seq_length(self) -> int:
        return 0


@dataclass(frozen=True)
class PrefillLayerBench(Bench):
    """Prefill attention of a recipe on a device."""

    recipe: PrefillLayerRecipe
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    kind = "prefill layer"

    @classmethod
    def of(cls, recipe: PrefillLayerRecipe) -> PrefillLayerBench:
        return cls(recipe, choose_device(recipe.device))

    def environment(self) -> dict[str, Any]:
        return machine.environment(self.device)

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        return point_text(point)

    def measure(self, point: int) -> dict[str, Any]:
        recipe, generator = self.recipe, torch.Generator().manual_seed(point)
        length = point if recipe.whole else point + recipe.chunk
        heads = (recipe.num_query_heads, recipe.num_kv_heads, recipe.num_kv_heads)
        q, k, v = (self._normal(length, number, generator) for number in heads)
        variants = self._dense(q, k, v, point) | {
            plan: self._layer(parse_plan(plan), q, k, v, point) for plan in recipe.plans
        }
        timers, reasons = {}, {}
        for name, attend in variants.items():
            try:
                attend()
                timers[name] = _clock(attend, self.device)
            except Exception as error:  # whatever a library raises for a shape that it does not support
                reasons[name] = first_line(error)
        samples = interleaved(timers, recipe.repeats)
        timed = [{"name": name, "samples_s": digits(seconds)} for name, seconds in samples.items()]
        failed = [{"name": name, "reason": reason} for name, reason in reasons.items()]
        # operations of exact causal attention
        pairs = point * point / 2 if recipe.whole else recipe.chunk * (point + recipe.chunk / 2)
        return {"variants": timed + failed, "flops": 4 * recipe.num_query_heads * recipe.head_dim * pairs}

    def _normal(self, length: int, heads: int, generator: torch.Generator) -> Tensor:
        shape, on_cpu = (1, length, heads, self.recipe.head_dim), self.device.type == "cpu"
        if on_cpu:
            return torch.randn(shape, generator=generator).to(self.dtype).transpose(1, 2)
        return torch.randn(shape, device=self.device, dtype=self.dtype).transpose(1, 2)

    def _layer(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, context: int) -> Attend:
        """Store, select and attend, chunk by chunk, as a layer of the engine does."""
        recipe = self.recipe  # the layer is above those that plans keep dense by default
        shape = LayerShape(2, recipe.num_query_heads, recipe.num_kv_heads, recipe.head_dim, recipe.head_dim**-0.5)
        layer = SparseAttention(shape, plan, 1, k, RunStats(0), reserve=q.shape[2])

        def attend(start: int, stop: int) -> Tensor:
            chunk = Chunk(q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], [stop - start])
            return layer.attend(chunk)

        if recipe.whole:

            def prompt() -> None:
                layer.crop(0, 0)
                for start in range(0, context, recipe.chunk):
                    attend(start, min(start + recipe.chunk, context))

            return prompt
        layer.store.append(0, k[0, :, :context], v[0, :, :context])

        def last() -> Tensor:
            layer.crop(0, context)
            return attend(context, context + recipe.chunk)

        return last

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, context: int) -> dict[str, Attend]:
        """Dense forms: on a GPU fused kernels over the whole prompt, on a CPU the forms that torch offers for a chunk
        behind a context."""
        scale = self.recipe.head_dim**-0.5
        if not self.recipe.whole:
            return dense_chunk(q[:, :, context:], k, v, scale, context)
        fused = fused_kernels(q, k, v, scale) if q.is_cuda else {}
        return fused | {"kvsift dense": self._layer(Plan(), q, k, v, context)}


def fused_kernels(q: Tensor, k: Tensor, v: Tensor, scale: float) -> dict[str, Attend]:
    """Return torch's and FlashInfer's causal attention over a whole prompt."""

    def sdpa(backend: SDPBackend) -> Attend:
        def attend() -> Tensor:
            with sdpa_kernel(backend):
                gqa = q.shape[1] > k.shape[1]
                return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)

        return attend

    def flashinfer(backend: str) -> Attend:
        def attend() -> Any:
            try:
                import flashinfer as library
            except ImportError as error:
                raise MissingPackage(f"flashinfer cannot be imported ({error})") from None
            tensors = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
            return library.single_prefill_with_kv_cache(*tensors, causal=True, sm_scale=scale, backend=backend)

        return attend

    return {
        "sdpa-flash": sdpa(SDPBackend.FLASH_ATTENTION), "sdpa-cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "flashinfer-fa3": flashinfer("fa3"), "flashinfer-fa2": flashinfer("fa2"),
    }  # fmt: skip


def dense_chunk(q: Tensor, k: Tensor, v: Tensor, scale: float, context: int) -> dict[str, Attend]:
    """Return torch's forms of causal attention of a chunk behind a context."""
    num_queries, num_kv_heads, groups = q.shape[2], k.shape[1], q.shape[1] // k.shape[1]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # as in a cache of torch
    rows = q.unflatten(1, (num_kv_heads, groups)).flatten(2, 3)[0]  # [num_kv_heads, groups * num_queries, head_dim]
    causal = torch.ones(num_queries, k.shape[2], dtype=torch.bool, device=q.device).tril(context)
    hidden = ~causal.repeat(groups, 1)[:, context:]  # inside the chunk: all queries attend to the context
    scaled = rows * scale

    def products() -> Tensor:
        logits = torch.bmm(scaled, k[0].mT)
        logits[:, :, context:].masked_fill_(hidden, -torch.inf)
        return torch.bmm(logits.softmax(-1), v[0])

    def fused() -> Tensor:
        past = attention(q, k[:, :, :context], v[:, :, :context], scale)
        own = attention(q, k[:, :, context:], v[:, :, context:], scale, causal=True)
        lse = torch.logaddexp(past.lse, own.lse)
        weights = [(part.lse - lse).exp().unsqueeze(-1) for part in (past, own)]
        return past.output * weights[0] + own.output * weights[1]

    def masked() -> Tensor:
        mask = causal.repeat(groups, 1)[None, None]
        return scaled_dot_product_attention(rows[None], k, v, attn_mask=mask, scale=scale)

    def grouped() -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=causal[None, None], scale=scale, enable_gqa=True)

    return {"bmm": products, "sdpa in two parts": fused, "sdpa, groups as rows": masked, "sdpa enable_gqa": grouped}


def _clock(attend: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    if device.type == "cuda":
        return lambda: gpu_seconds(attend)
    cold = torch.zeros(COLD_BYTES // 8, dtype=torch.int64)

    def seconds() -> float:
        cold.sum()
        started = perf_counter()
        attend()
        return perf_counter() - started

    return seconds
