"""A decode step of a decoder of Llama's or Gemma's shape, in a handful of launches per layer and without the host.
Layers may be gated delta nets, or attend a window.

The weights are those of the transformers model. Everything that changes from step to step is on the device, so the
step can be captured in a CUDA graph; transformers' own modules (``path="composed"``) are the specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvsift.kernels.append import append_sketches
from kvsift.kernels.delta_step import delta_step
from kvsift.kernels.linear import gate_heads
from kvsift.kernels.rms_norm import rms_norm
from kvsift.kernels.rotary_append import qkv_rotary_append
from kvsift.kernels.sketch import SKETCHES
from kvsift.layer.paged_decode import DecodeBatch, DecodeLayer, StepMode
from kvsift.models.decoder import OF_GATES, OF_ROPES, Decoder, LayerWeights
from kvsift.models.experts import not_stacked
from kvsift.models.hf.experts import take_experts
from kvsift.models.hf.slot_states import SlotStates
from kvsift.models.projection import GatedMLP
from kvsift.types import LayerShape, Objections

MODEL_TYPES = ("llama", "mistral", "ministral3", "qwen2", "qwen3")
ROUTED_TYPES = ("glm4_moe", "gpt_oss", "mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text")  # with experts
HYBRID_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # with gated delta nets
GEMMA_TYPES = ("gemma2", "gemma3_text", "gemma4_text")
WINDOW_TYPES = ("gpt_oss", "ministral", *GEMMA_TYPES)  # with sliding windows
OTHER_LAYERS = dict.fromkeys(HYBRID_TYPES, "linear_attention") | dict.fromkeys(WINDOW_TYPES, "sliding_attention")
MOST_DIM = 128  # of a head of these: a state is in the registers of one program
TABLE_CHUNK = 1 << 16  # positions whose angles are computed at once, in float32
SCALE_COLUMNS = 16  # of factors of queries behind the angles, so that rows of these stay aligned


class FusedStep(Decoder):
    """A ``Step`` of fused launches.

    Args:
        model: a causal language model for which there are no ``objections``, see ``Decoder``.
    """

    objections: ClassVar[Objections] = (  # to models
        (lambda model: model.config.model_type not in MODEL_TYPES + ROUTED_TYPES + HYBRID_TYPES + WINDOW_TYPES,
         "{it.__class__.__name__} is none of the architectures whose steps are fused"),
        *OF_GATES,
        (lambda model: getattr(model.config, "hidden_size_per_layer_input", 0),
         "each of its layers has an embedding of its own ({found} numbers of a token)"),
        (lambda model: getattr(model.config, "num_kv_shared_layers", 0),
         "{found} of its layers attend what others have stored"),
        (lambda model: getattr(model.config, "enable_moe_block", False), "its layers have experts beside an MLP"),
        (lambda model: _layer_types(model) - {"full_attention", OTHER_LAYERS.get(model.config.model_type)}
         or "full_attention" not in _layer_types(model)
         or (model.config.model_type in {"mistral", "ministral3", *ROUTED_TYPES} - {*WINDOW_TYPES}
             and getattr(model.config, "sliding_window", None) is not None),
         "{it.__class__.__name__} has layers without full attention"),
        (lambda model: (dtype := model.model.norm.weight.dtype) != model.dtype and dtype,
         "its norms are {found}, and its other weights {it.dtype}"),
        *OF_ROPES,
        (lambda model: (most := max(getattr(model.config, f"linear_{kind}_head_dim", 0) for kind in ("key", "value")))
         > MOST_DIM and most,
         "{it.__class__.__name__} has linear heads of {found} numbers, more than a program holds"),
        (lambda model: max(getattr(getattr(layer.mlp, "gate", None), "num_group", 1) for layer in model.model.layers)
         > 1, "its experts are chosen in groups"),
        (lambda model: next(filter(None, (not_stacked(layer.mlp, model.dtype) for layer in model.model.layers
                                          if hasattr(layer.mlp, "experts"))), None),
         "the weights of its experts are not multiplied as they lie ({found})"),
    )  # fmt: skip
    few_rows: ClassVar[Objections] = (  # to models, whose steps are fused, of prompts
        (lambda model: model.config.model_type in ROUTED_TYPES,
         "the experts of {it.__class__.__name__} multiply many rows by grouped products of transformers"),
    )  # fmt: skip
    one_by_one: ClassVar[Objections] = (  # to fusing passes over several tokens of a sequence
        (lambda model: model.config.model_type in OTHER_LAYERS,
         "{it.__class__.__name__} has layers with windows or states, which take one token at a time"),
    )  # fmt: skip
    writes_states = True

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        if self.device.type == "cuda" and model.config.model_type in ROUTED_TYPES:
            take_experts(model)  # prompts, and steps that are not captured
        self.shape = LayerShape(  # with a window
            -1, self.num_query_heads, self.num_kv_heads, self.head_dim, self.scale, self.softcap
        )  # fmt: skip
        self.pdl = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (9, 0)

    @torch.inference_mode()
    def angles(self, num_positions: int) -> Tensor:
        """Return cosines and sines of the last position of each length, from 0 (which has none) to ``num_positions``,
        [num_positions + 1, 2, rotary_dim], by the model's own embedding; side by side those of each rope, then the
        factors of queries where the model ``scales_queries``."""
        parts = []
        for start in range(-1, num_positions, TABLE_CHUNK):
            stop = min(start + TABLE_CHUNK, num_positions)
            each = self.angles_of_each(torch.arange(start, stop, device=self.device))
            columns = [torch.stack((cos[0], sin[0]), 1) for cos, sin in each]
            if self.scales_queries:
                factors = self.query_scales(start, stop - start).nan_to_num(neginf=0.0)  # of no position
                columns.append(factors.view(-1, 1, 1).expand(-1, 2, SCALE_COLUMNS))
            parts.append(torch.cat(columns, 2))
        return torch.cat(parts)

    def __call__(
        self, tokens: Tensor, angles: Tensor, batch: DecodeBatch, attention: Sequence[DecodeLayer],
        summaries: Sequence[Mapping[str, Tensor]], states: SlotStates, mode: StepMode,
        watched: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the logits after one more token per sequence; ``angles`` is what the method of this name returns."""
        steady, windows = batch.block > 0, states.windows(batch)
        *of_ropes, rest = angles.split([*self.rotary_dims, angles.shape[2] - sum(self.rotary_dims)], 2)
        query_scales = rest[:, 0, 0] if self.scales_queries else None
        x = self.embed(tokens)  # [batch, hidden]
        paged = iter(zip(attention, summaries, strict=True))
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(x, layer.before_attention, steady=steady, pdl=self.pdl)
            behind_one = self.pdl  # kernel, and not two
            if layer.net is not None:
                heads = self._feed_states(layer, x, qkv, states, index, steady)
            else:
                append = partial(
                    qkv_rotary_append, qkv, of_ropes[layer.rope], batch.lengths, num_query_heads=self.num_query_heads,
                    q_norm=layer.q_norm, k_norm=layer.k_norm, norm_eps=layer.head_eps, norm_offset=self.norm_offset,
                    gated=layer.gates_heads, v_norm=layer.v_norm, values_are_keys=layer.values_are_keys,
                    query_scales=query_scales, pdl=self.pdl,
                )  # fmt: skip
                if layer.window is not None:
                    ring, places = windows[index]
                    queries = append(kv=ring.newest(places), summaries={})
                    shape = self.shape._replace(num_kv_heads=ring.num_kv_heads, head_dim=ring.head_dim)
                    attended = ring.attend(shape, queries, places, batch, layer.sinks, early=self.pdl)
                else:
                    attend, pools = next(paged)
                    rows = {kind: pool for kind, pool in pools.items() if kind not in SKETCHES}
                    queries = append(kv=attend.kv, summaries=rows)
                    if watched is not None:
                        watched.append(queries)
                    attend.sink_logit = layer.sinks
                    attended, behind_one = attend.attend(queries, mode, early=self.pdl), self.pdl and mode != "mixed"
                if layer.gates_heads:
                    of_heads = qkv[:, : 2 * attended[0].numel()].unflatten(1, (len(attended[0]), 2, -1))
                    heads, behind_one = gate_heads(attended, of_heads[:, :, 1], pdl=behind_one), self.pdl
                else:
                    heads = attended.flatten(1)
            how: dict[str, Any] = {"steady": steady, "pdl": self.pdl}
            if layer.after_attention is None or layer.after_mlp is None:
                x = layer.output(heads, residual=x, steady=steady, pdl=behind_one)
                x = layer.mlp.step(x, layer.before_mlp, **how)
            else:
                assert isinstance(layer.mlp, GatedMLP)
                added = layer.output(heads, steady=steady, pdl=behind_one)
                x = rms_norm(added, *layer.after_attention, residual=x, pdl=self.pdl)
                added = layer.mlp.step(x, layer.before_mlp, adds=False, **how)
                x = rms_norm(added, *layer.after_mlp, residual=x, scale=layer.scale, pdl=self.pdl)
        written = [(layer.kv, pools) for layer, pools in zip(attention, summaries)]
        append_sketches(written, batch.space, pdl=self.pdl)
        return self.capped(self.head(x, self.norm, steady=steady, pdl=self.pdl))

    def _feed_states(
        self, layer: LayerWeights, x: Tensor, inputs: Tensor, states: SlotStates, index: int, steady: bool
    ) -> Tensor:
        """The output of the heads of a gated delta net, [batch, value_heads * value_dim]."""
        assert layer.net is not None
        if layer.ba is None:
            count = 2 * layer.net.value_heads
            qkvz, ba = inputs[:, :-count], inputs[:, -count:]
        else:
            qkvz, ba = inputs, layer.ba(x, layer.before_attention, steady=steady, pdl=self.pdl)
        conv, recurrent = states.rings(index)
        return delta_step(qkvz, ba, layer.net, conv, recurrent, states.step, pdl=self.pdl)


def _layer_types(model: Any) -> set[str]:
    return set(getattr(model.config, "layer_types", None) or ["full_attention"])
