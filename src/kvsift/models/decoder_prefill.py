"""Fused forward pass of a Llama-like decoder over a chunk of tokens; the cache's layers attend.

The transformers forward pass of an 8B model spends a third of its time on norms, rotation, residuals and gates between
its matrix products (H200, 8K tokens: 75 of 226 ms). Weights and roundings here are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvsift.kernels.rotary import rotate_heads
from kvsift.methods.base import Phase
from kvsift.models.decoder_step import DecoderStep
from kvsift.models.transformers_cache import SparseCache
from kvsift.threads import yield_to_others
from kvsift.types import LayerShape


class DecoderPrefill:
    """Forward pass of a whole model over tokens of one row.

    Args:
        step: its weights are used.
    """

    def __init__(self, step: DecoderStep) -> None:
        self._step = step

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, cache: SparseCache, phase: Phase) -> Tensor:
        """Store and attend the next tokens of the row that ``SparseCache.turn_to`` chose.

        Args:
            tokens: int64 [num_new].
            cache: of the model.
            phase: "decode" attends each token as if it had been generated.

        Returns:
            Logits of the last token, [1, 1, vocabulary].
        """
        assert not (phase == "decode" and cache.run.plan.wants_hidden), "queries are foreseen by transformers' modules"
        if not tokens.is_cuda:
            yield_to_others(len(tokens))
        step, decode_tokens = self._step, len(tokens) if phase == "decode" else 0
        start = cache.get_seq_length()
        cos, sin = step.angles_of(torch.arange(start, start + len(tokens), device=tokens.device))
        x = nn.functional.embedding(tokens, step.embedding)  # [num_new, hidden]
        for index, (layer, stored) in enumerate(zip(step.layers, cache.layers, strict=True)):
            queries, keys, values = rotate_heads(
                layer.qkv(x, layer.before_attention), cos, sin, step.num_query_heads, step.num_kv_heads,
                q_norm=layer.q_norm, k_norm=layer.k_norm, norm_eps=layer.head_eps,
            )  # fmt: skip
            head_dim = keys.shape[2]
            sizes = index, step.num_query_heads, step.num_kv_heads, head_dim, head_dim**-0.5
            shape = LayerShape(*sizes, rope=cache.run.rope, peers=cache.run.peers, origin=cache.run.origin)
            stored.update(keys.unsqueeze(0), values.unsqueeze(0))
            attended = stored.attend(shape, queries.unsqueeze(0), None, None, decode_tokens)
            x = layer.output.add_to(x, attended[0].transpose(0, 1).flatten(1))
            x = layer.down.add_to(x, layer.gate_up.gated(x, layer.before_mlp))
        return step.head(x[-1:], step.norm).unsqueeze(0)
