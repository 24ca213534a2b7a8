"""A decode step of a Llama-like decoder, in a handful of launches per layer and without the host.

The weights are those of the transformers model. Everything that changes from step to step is on the device, so the
step can be captured in a CUDA graph; transformers' own modules (``path="composed"``) are the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvsift.kernels.append import append_sketches
from kvsift.kernels.rotary_append import qkv_rotary_append
from kvsift.kernels.sketch import SKETCHES
from kvsift.layer.paged_decode import DecodeBatch, DecodeLayer, StepMode
from kvsift.models.hf.slot_states import SlotStates
from kvsift.models.packed_linear import PackedEmbedding
from kvsift.models.projection import Norm, Projection
from kvsift.native.packed import PackedMatrix
from kvsift.types import Objections

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
TABLE_CHUNK = 1 << 16  # positions whose angles are computed at once, in float32


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one decoder layer, joined where they are read together."""

    qkv: Projection
    output: Projection
    gate_up: Projection
    down: Projection
    before_attention: Norm
    before_mlp: Norm
    q_norm: Tensor | None  # [head_dim], of every query head
    k_norm: Tensor | None
    head_eps: float

    @classmethod
    def of(cls, layer: Any) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        return cls(
            Projection.of(attention.q_proj, attention.k_proj, attention.v_proj),
            Projection.of(attention.o_proj),
            Projection.of(mlp.gate_proj, mlp.up_proj),
            Projection.of(mlp.down_proj),
            _norm(layer.input_layernorm),
            _norm(layer.post_attention_layernorm),
            None if q_norm is None else q_norm.weight.data,
            None if k_norm is None else k_norm.weight.data,
            1e-6 if q_norm is None else float(q_norm.variance_epsilon),
        )


class FusedStep:
    """A ``Step`` of fused launches.

    Args:
        model: a causal language model for which there are no ``objections``. Weights that are read together
            are moved together; the model's own parameters become views of them, so it works on as before.
    """

    objections: ClassVar[Objections] = (  # to models
        (lambda model: model.config.model_type not in MODEL_TYPES,
         "{it.__class__.__name__} is none of the architectures whose steps are fused"),
        (lambda model: getattr(model.config, "hidden_act", "silu") != "silu",
         "{it.__class__.__name__} uses {it.config.hidden_act}, not silu"),
        (lambda model: set(getattr(model.config, "layer_types", None) or ["full_attention"]) != {"full_attention"}
         or (model.config.model_type == "mistral" and model.config.sliding_window is not None),
         "{it.__class__.__name__} has layers without full attention"),
        (lambda model: "dynamic" in (kind := str(model.model.rotary_emb.rope_type)) or kind == "longrope",
         "rope_type={it.model.rotary_emb.rope_type} changes its angles with the length"),
        (lambda model: 2 * model.model.rotary_emb.inv_freq.numel() != (
            getattr(config := model.config, "head_dim", None) or config.hidden_size // config.num_attention_heads),
         "its rotary embedding covers only part of a head"),
    )  # fmt: skip

    @torch.inference_mode(False)  # or the model's weights would be inference tensors from now on
    @torch.no_grad()
    def __init__(self, model: Any) -> None:
        embedding = model.model.embed_tokens
        self.embedding: Tensor | PackedMatrix = (
            embedding.matrix if isinstance(embedding, PackedEmbedding) else embedding.weight.data
        )
        self.layers = [LayerWeights.of(layer) for layer in model.model.layers]
        self.norm = _norm(model.model.norm)
        self.head = Projection.of(model.lm_head)
        self._rotary = model.model.rotary_emb
        self.num_query_heads: int = model.config.num_attention_heads
        self.num_kv_heads: int = model.config.num_key_value_heads
        products = [each for layer in self.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        self.keeps_bits: bool = all(product.keeps_bits for product in [*products, self.head])
        self.device, self.dtype = self.norm[0].device, self.norm[0].dtype
        self.embed: Callable[[Tensor], Tensor] = (  # tokens [n] -> [n, hidden]
            partial(self.embedding.rows, dtype=self.dtype)
            if isinstance(self.embedding, PackedMatrix)
            else partial(nn.functional.embedding, weight=self.embedding)
        )
        self.pdl = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (9, 0)

    @torch.inference_mode()
    def angles(self, num_positions: int) -> Tensor:
        """Return cosines and sines of all positions, [num_positions, 2, head_dim], by the model's own embedding."""
        parts = []
        for start in range(0, num_positions, TABLE_CHUNK):
            stop = min(start + TABLE_CHUNK, num_positions)
            parts.append(torch.stack(self.angles_of(torch.arange(start, stop, device=self.device)), 1))
        return torch.cat(parts)

    def angles_of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions [n], each [n, head_dim]."""
        cos, sin = self._rotary(self.norm[0], positions.unsqueeze(0))
        return cos[0], sin[0]

    def __call__(
        self, tokens: Tensor, angles: Tensor, batch: DecodeBatch, attention: Sequence[DecodeLayer],
        summaries: Sequence[Mapping[str, Tensor]], states: SlotStates, mode: StepMode,
        watched: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the logits after one more token per sequence; ``angles`` is [positions, 2, head_dim]."""
        cos, sin = angles.index_select(0, batch.lengths - 1).unbind(1)  # [batch, head_dim]
        steady = batch.block > 0
        x = self.embed(tokens)  # [batch, hidden]
        for layer, attend, pools in zip(self.layers, attention, summaries, strict=True):
            queries = qkv_rotary_append(
                layer.qkv(x, layer.before_attention, steady=steady, pdl=self.pdl), cos, sin, attend.kv,
                {kind: pool for kind, pool in pools.items() if kind not in SKETCHES},
                num_query_heads=self.num_query_heads, q_norm=layer.q_norm, k_norm=layer.k_norm,
                norm_eps=layer.head_eps, pdl=self.pdl,
            )  # fmt: skip
            if watched is not None:
                watched.append(queries)
            heads = attend.attend(queries, mode, early=self.pdl).flatten(1)
            behind_one = self.pdl and mode != "mixed"  # kernel, and not two
            x = layer.output(heads, residual=x, steady=steady, pdl=behind_one)
            heads = layer.gate_up(x, layer.before_mlp, steady=steady, pdl=self.pdl, gated=True)
            x = layer.down(heads, residual=x, steady=steady, pdl=self.pdl)
        written = [(layer.kv, pools) for layer, pools in zip(attention, summaries)]
        append_sketches(written, batch.space, filled=batch.block > 1)
        return self.head(x, self.norm, steady=steady, pdl=self.pdl).float()


def _norm(module: Any) -> Norm:
    return module.weight.data, float(module.variance_epsilon)
