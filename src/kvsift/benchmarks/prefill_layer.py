"""Attention of prefill in one layer: a whole prompt, or one chunk behind a context, against dense kernels.

Keys, values and queries are random, so that nothing is said about quality; what is read and computed does not depend on
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvsift.benchmarks.prefill import refuse_dense
from kvsift.benchmarks.timing import gpu_seconds, interleaved
from kvsift.errors import InputError
from kvsift.kernels.attention import attention
from kvsift.runtime.plan import Plan
from kvsift.runtime.sequence import SparseAttention
from kvsift.runtime.spec import parse_plan
from kvsift.runtime.stats import RunStats
from kvsift.types import Chunk, LayerShape

COLD_BYTES = 192 << 20  # read between two samples on a CPU: the next layer finds its keys in memory, not in the cache


@dataclass(frozen=True)
class Recipe:
    """Everything a result depends on.

    Attributes:
        num_query_heads, num_kv_heads, head_dim: of the layer.
        contexts: prompt tokens, or tokens in front of the chunk.
        plans: that are compared.
        chunk: tokens per forward pass.
        whole: time all chunks of the prompt; else the one behind it alone.
        repeats: samples of each variant.
    """

    contexts: tuple[int, ...]
    plans: tuple[str, ...]
    chunk: int
    whole: bool
    num_query_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    repeats: int = 5

    def __post_init__(self) -> None:
        if not self.contexts or not self.plans:
            raise InputError("there is nothing to measure: name at least one context and plan.")
        if self.num_query_heads % self.num_kv_heads:
            raise InputError(
                f"{self.num_query_heads} query heads must be a multiple of the KV heads, {self.num_kv_heads}."
            )
        for plan in self.plans:
            refuse_dense(plan)

    @property
    def shape(self) -> LayerShape:
        """A layer above those that plans keep dense by default."""
        return LayerShape(2, self.num_query_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5)


def head(recipe: Recipe) -> dict[str, Any]:
    """What a result file begins with."""
    return {"kind": "prefill layer", "recipe": asdict(recipe)}


@torch.inference_mode()
def run(recipe: Recipe, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Iterator[dict[str, Any]]:
    """Context by context as they are measured."""
    for context in sorted(recipe.contexts):
        generator = torch.Generator().manual_seed(context)
        length = context if recipe.whole else context + recipe.chunk
        heads = (recipe.num_query_heads, recipe.num_kv_heads, recipe.num_kv_heads)
        q, k, v = (_normal(length, number, recipe.head_dim, generator, device, dtype) for number in heads)
        variants = _dense(recipe, q, k, v, context) | {
            plan: _sifted(recipe, parse_plan(plan), q, k, v, context) for plan in recipe.plans
        }
        timers, failed = {}, {}
        for name, attend in variants.items():
            try:
                attend()
                timers[name] = _clock(attend, device)
            except Exception as error:  # whatever a library that cannot do this shape raises
                failed[name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        samples = interleaved(timers, recipe.repeats)
        yield {
            "context": context,
            "variants": [
                {"name": name, "samples_s": [float(f"{s:.5g}") for s in each]} for name, each in samples.items()
            ]
            + [{"name": name, "reason": reason} for name, reason in failed.items()],
            "flops": _flops(recipe, context),
        }


def _normal(
    length: int, heads: int, head_dim: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> Tensor:
    if device.type == "cpu":
        return torch.randn(1, length, heads, head_dim, generator=generator).to(dtype).transpose(1, 2)
    return torch.randn(1, length, heads, head_dim, device=device, dtype=dtype).transpose(1, 2)


def _sifted(recipe: Recipe, plan: Plan, q: Tensor, k: Tensor, v: Tensor, context: int) -> Callable[[], Any]:
    """Store, choose and attend, chunk by chunk, as a layer of the engine does."""
    layer = SparseAttention(recipe.shape, plan, 1, k, RunStats(0), reserve=q.shape[2])

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


def _dense(recipe: Recipe, q: Tensor, k: Tensor, v: Tensor, context: int) -> dict[str, Callable[[], Any]]:
    """Dense forms on these tensors: on a GPU fused kernels over the whole prompt, on a CPU the forms that torch offers
    for a chunk behind a context."""
    groups, scale = recipe.num_query_heads // recipe.num_kv_heads, recipe.shape.scale
    if not recipe.whole:
        return _dense_chunk(q[:, :, context:], k, v, groups, scale, context)
    found: dict[str, Callable[[], Any]] = {}
    if not q.is_cuda:
        return {"kvsift dense": _sifted(recipe, Plan(), q, k, v, context)}
    for name, backend in (("sdpa-flash", SDPBackend.FLASH_ATTENTION), ("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION)):

        def sdpa(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=groups > 1)

        found[name] = sdpa
    for backend_name in ("fa3", "fa2"):

        def flashinfer(backend_name: str = backend_name) -> Any:
            try:
                import flashinfer as library
            except ImportError as error:
                raise InputError(f"flashinfer cannot be imported ({error})") from None
            tensors = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
            return library.single_prefill_with_kv_cache(*tensors, causal=True, sm_scale=scale, backend=backend_name)

        found[f"flashinfer-{backend_name}"] = flashinfer
    return found | {"kvsift dense": _sifted(recipe, Plan(), q, k, v, context)}


def _dense_chunk(
    q: Tensor, k: Tensor, v: Tensor, groups: int, scale: float, context: int
) -> dict[str, Callable[[], Any]]:
    num_queries, num_kv_heads = q.shape[2], k.shape[1]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # a cache of torch's own would hold them so
    rows = q.unflatten(1, (num_kv_heads, groups)).flatten(2, 3)[0]  # [num_kv_heads, groups * num_queries, head_dim]
    seen = torch.ones(num_queries, k.shape[2], dtype=torch.bool, device=q.device).tril(context)
    hidden = ~seen.repeat(groups, 1)[:, context:]  # of the chunk itself: the past is seen by all
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
        mask = seen.repeat(groups, 1)[None, None]
        return scaled_dot_product_attention(rows[None], k, v, attn_mask=mask, scale=scale)

    def grouped() -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=seen[None, None], scale=scale, enable_gqa=True)

    return {"bmm": products, "sdpa in two parts": fused, "sdpa, groups as rows": masked, "sdpa enable_gqa": grouped}


def _flops(recipe: Recipe, context: int) -> float:
    """Operations of exact causal attention."""
    pairs = context * context / 2 if recipe.whole else recipe.chunk * (context + recipe.chunk / 2)
    return 4 * recipe.num_query_heads * recipe.head_dim * pairs


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
