"""What scripts add to the processes of vLLM that hold a model (``worker_extension_cls``): weights, and no attention.

Random weights come from full tensors, of which every rank takes its part: any number of ranks has the same model. Their
spread keeps attention from being uniform, as it is with vLLM's own dummy weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

attention_is_left_out = False


@register_model_loader("random_weights")
class RandomWeights(BaseModelLoader):
    """The load format of this name."""

    def download_model(self, model_config: Any) -> None:
        """No-op."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill a model."""
        model.load_weights(full_tensors(model_config.hf_config, next(model.parameters())))


def full_tensors(config: Any, like: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a Llama by their names, in the dtype and on the device of ``like``."""
    for name, shape in shapes_of(config).items():
        weight = torch.empty(shape, dtype=like.dtype, device=like.device)
        if len(shape) == 1:
            yield f"{name}.weight", weight.fill_(1)
            continue
        generator = torch.Generator(like.device).manual_seed(zlib.crc32(name.encode()))
        yield f"{name}.weight", weight.normal_(0, 0.02 if shape[1] > 2048 else 0.04, generator=generator)


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama's weights; those of norms have one dimension."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        shapes |= {f"{layer}.input_layernorm": (hidden,), f"{layer}.post_attention_layernorm": (hidden,)}
        shapes |= {f"{attention}.q_proj": (queries, hidden), f"{attention}.o_proj": (hidden, queries)}
        shapes |= {f"{attention}.k_proj": (keys, hidden), f"{attention}.v_proj": (keys, hidden)}
        shapes |= {f"{mlp}.gate_proj": (inner, hidden), f"{mlp}.up_proj": (inner, hidden)}
        shapes |= {f"{mlp}.down_proj": (hidden, inner)}
    return shapes | {"model.norm": (hidden,), "lm_head": (config.vocab_size, hidden)}


class WorkerExtension:
    """Methods of the workers, for ``LLM.collective_rpc``."""

    def leave_attention_out(self, yes: bool) -> None:
        """Prompts get no attention, by any backend, where only decoding is timed."""
        global attention_is_left_out
        from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

        attention_is_left_out, stock = yes, FlashAttentionImpl.forward
        if getattr(stock, "can_be_left_out", False):
            return

        def forward(
            self: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, metadata: Any,
            output: Tensor, *args: Any, **kwargs: Any,
        ) -> Tensor:  # fmt: skip
            if attention_is_left_out and metadata is not None and metadata.max_query_len > 1:
                return output.copy_(query.view_as(output))
            return stock(self, layer, query, key, value, cache, metadata, output, *args, **kwargs)

        forward.can_be_left_out = True  # type: ignore[attr-defined]
        FlashAttentionImpl.forward = forward
