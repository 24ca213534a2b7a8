"""A chunk of prompt tokens through a Llama-like decoder, elementwise work fused; attention is the cache's own.

Between its matrix products the transformers forward pass of an 8B model spends a third of its time on norms, rotation,
residuals and gates (H200, 8K tokens: 75 of 226 ms). The weights and the roundings are the same here.
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
    """Prompt tokens of one row through a whole model.

    Args:
        step: whose weights are used.
    """

    def __init__(self, step: DecoderStep) -> None:
        self._step = step

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, cache: SparseCache, phase: Phase) -> Tensor:
        """Store and attend the next tokens of the row whose turn it is.

        Args:
            tokens: int64 [num_new].
            cache: of the model.
            phase: "decode" answers each token as if it had been generated.

        Returns:
            Logits of the last one, [1, 1, vocabulary].
        """
        assert not (phase == "decode" and cache.run.plan.wants_hidden), "queries are foreseen by transformers' modules"
        yield_to_others()
        step = self._step
        cache.run.decode_tokens = len(tokens) if phase == "decode" else 0
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
            seen = stored.attend(shape, queries.unsqueeze(0), None, None)
            x = layer.output.add_to(x, seen[0].transpose(0, 1).flatten(1))
            x = layer.down.add_to(x, layer.gate_up.gated(x, layer.before_mlp))
        return step.head(x[-1:], step.norm).unsqueeze(0)
