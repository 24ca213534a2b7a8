"""The weights of a decoder of transformers, joined where they are read together, and the angles of its positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvsift.kernels.delta_step import DeltaNet
from kvsift.models.experts import Experts
from kvsift.models.packed_linear import PackedEmbedding
from kvsift.models.projection import GatedMLP, Norm, Projection
from kvsift.native.packed import PackedMatrix
from kvsift.types import Objections

MODEL_TYPES = (
    "llama", "mistral", "ministral", "ministral3", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text",
    "glm4_moe",
)  # fmt: skip
ROUNDED_ONCE = 1e-30  # added to weights of norms, of which it changes none: they are rounded as Gemma's (``rms_norm``)
ACTIVATIONS = {"silu": False, "gelu_pytorch_tanh": True}  # of gates -> whether that is GELU

OF_GATES: Objections = (  # to models, by whoever fuses their layers
    (lambda model: (kind := _activation(model.config)) not in ACTIVATIONS and kind,
     "{it.__class__.__name__} uses {found}, neither silu nor gelu_pytorch_tanh"),
    (lambda model: (kind := _activation(model.config)) != "silu" and _has_experts(model) and kind,
     "{it.__class__.__name__} uses {found}, and experts are gated by silu alone"),
)  # fmt: skip
OF_ROPES: Objections = (
    (lambda model: next((kind for kind in _rope_types(model) if "dynamic" in kind or kind == "longrope"), None),
     "rope_type={found} changes its angles with the length"),
)  # fmt: skip


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one decoder layer, joined where they are read together."""

    qkv: Projection
    output: Projection
    mlp: GatedMLP | Experts
    before_attention: Norm
    before_mlp: Norm
    after_attention: Norm | None  # of what attention adds (Gemma); None: it is added as it is
    after_mlp: Norm | None
    q_norm: Tensor | None  # [head_dim], of every query head
    k_norm: Tensor | None
    head_eps: float
    window: int | None  # tokens that a token sees, itself among them; None: all
    rope: int  # which of the angles rotate its heads
    gates_heads: bool = False  # a gate follows each query head, of what it attends
    net: DeltaNet | None = None  # in place of attention; ``qkv`` gives the inputs of ``kernels.delta_step``
    ba: Projection | None = None  # the last of these, where they are not in ``qkv``
    v_norm: bool = False  # values are normalised, without a weight (Gemma 4)
    values_are_keys: bool = False  # before their norm; ``qkv`` gives no values
    scale: float = 1.0  # of the layer's output
    sinks: Tensor | None = None  # float32 [num_query_heads], logits of attention besides those of tokens (gpt-oss)

    @classmethod
    def of(cls, layer: Any, gelu: bool, ropes: Sequence[str]) -> LayerWeights:
        """Return the weights of a layer, for types of layers that have angles of their own ("" alone: all have the
        same)."""
        if hasattr(layer, "linear_attn"):
            return cls._of_delta_net(layer, gelu)
        attention, mlp = layer.self_attn, layer.mlp
        q_norm, k_norm = (None if norm is None else _norm(norm) for norm in (
            getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        ))  # fmt: skip
        # Gemma: "post" norms are of what is added then, not of what the MLP reads
        adds_normalised, sinks = hasattr(layer, "pre_feedforward_layernorm"), getattr(attention, "sinks", None)
        before_mlp = layer.pre_feedforward_layernorm if adds_normalised else layer.post_attention_layernorm
        return cls(
            Projection.of(*filter(None, (attention.q_proj, attention.k_proj, attention.v_proj))),
            Projection.of(attention.o_proj),
            Experts.of(mlp) if hasattr(mlp, "experts") else GatedMLP.of(mlp, gelu),
            _norm(layer.input_layernorm),
            _norm(before_mlp),
            _norm(layer.post_attention_layernorm) if adds_normalised else None,
            _norm(layer.post_feedforward_layernorm) if adds_normalised else None,
            None if q_norm is None else q_norm[0],
            None if k_norm is None else k_norm[0],
            1e-6 if q_norm is None else q_norm[1],
            getattr(attention, "sliding_window", None),
            ropes.index(attention.layer_type) if ropes[0] else 0,
            attention.q_proj.out_features == 2 * attention.o_proj.in_features,
            v_norm=hasattr(attention, "v_norm"),
            values_are_keys=attention.v_proj is None,
            scale=float(layer.layer_scalar) if hasattr(layer, "layer_scalar") else 1.0,
            sinks=None if sinks is None else sinks.data.float(),
        )

    @classmethod
    def _of_delta_net(cls, layer: Any, gelu: bool) -> LayerWeights:
        mixer, mlp = layer.linear_attn, layer.mlp
        by_key_head = hasattr(mixer, "in_proj_qkvz")
        qkvz = [mixer.in_proj_qkvz] if by_key_head else [mixer.in_proj_qkv, mixer.in_proj_z]
        ba = [mixer.in_proj_ba] if by_key_head else [mixer.in_proj_b, mixer.in_proj_a]
        inputs, apart = Projection.of(*qkvz, *ba), None
        if inputs.weight is None and not inputs.parts:  # checkpoints have these few outputs in more bits
            inputs, apart = Projection.of(*qkvz), Projection.of(*ba)
        net = DeltaNet(
            mixer.conv1d.weight.data.squeeze(1), mixer.A_log.data, mixer.dt_bias.data, mixer.norm.weight.data,
            float(mixer.norm.variance_epsilon), mixer.num_k_heads, mixer.head_k_dim, by_key_head,
        )  # fmt: skip
        return cls(
            inputs, Projection.of(mixer.out_proj),
            Experts.of(mlp) if hasattr(mlp, "experts") else GatedMLP.of(mlp, gelu),
            _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm), None, None, None, None, 0.0, None, 0,
            net=net, ba=apart,
        )  # fmt: skip

    @property
    def products(self) -> tuple[Projection, ...]:
        """All products."""
        return self.qkv, *(() if self.ba is None else (self.ba,)), self.output, *self.mlp.products


class Decoder:
    """The weights of a model.

    Args:
        model: a causal language model for which there are no ``objections``. Weights that are read together
            are moved together; the model's own parameters become views of them, so it works on as before.

    Attributes:
        scale, softcap: of the logits of attention, see ``LayerShape``.
        embedding_scale: of what tokens are embedded as, rounded to the dtype; None: 1.
        scales_queries: queries are multiplied by factors of their positions (Ministral 3).
        norm_offset: what is added to the weights of norms (``kernels.rms_norm``).
        logit_cap: soft cap of the logits of tokens, or None.
    """

    objections: ClassVar[Objections] = (  # to models
        (lambda model: model.config.model_type not in MODEL_TYPES,
         "{it.__class__.__name__} is none of the architectures whose layers are fused"),
        *OF_GATES,
        (lambda model: "full_attention" not in (kinds := _layer_types(model.config))
         or kinds - {"full_attention", "sliding_attention"},
         "{it.__class__.__name__} has layers with neither full nor sliding attention, or none with full attention"),
        *OF_ROPES,
        (lambda model: len({*_rotary_dims(model)}) > 1, "its types of layers rotate different parts of their heads"),
        (lambda model: max(getattr(getattr(layer.mlp, "gate", None), "num_group", 1) for layer in model.model.layers)
         > 1, "its experts are chosen in groups"),
        (lambda model: any((window := getattr(layer.self_attn, "sliding_window", None)) is not None and window < 2
                           for layer in model.model.layers),
         "its windows have one token"),
    )  # fmt: skip

    @torch.inference_mode(False)  # or the model's weights would be inference tensors from now on
    @torch.no_grad()
    def __init__(self, model: Any) -> None:
        embedding, config = model.model.embed_tokens, model.config
        self.embedding: Tensor | PackedMatrix = (
            embedding.matrix if isinstance(embedding, PackedEmbedding) else embedding.weight.data
        )
        self._ropes = [prefix.removesuffix("_") for prefix in _prefixes(model)]  # types of layers, or "" alone
        gelu = ACTIVATIONS[_activation(config)]
        self.layers = [LayerWeights.of(layer, gelu, self._ropes) for layer in model.model.layers]
        self.norm = _norm(model.model.norm)
        self.head = Projection.of(model.lm_head)
        self._rotary = model.model.rotary_emb
        self.num_query_heads: int = config.num_attention_heads
        self.rotary_dims = _rotary_dims(model)  # of each rope
        self.rotary_dim = self.rotary_dims[0]
        attention = next(layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn"))
        self.head_dim: int = attention.head_dim  # of this layer, as the next one: Gemma 4 has others elsewhere
        self.num_kv_heads: int = attention.k_proj.out_features // self.head_dim
        self.scale = float(attention.scaling)
        self.softcap: float | None = config.attn_logit_softcapping if config.model_type == "gemma2" else None
        self.logit_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.norm_offset = self.norm[2] if len(self.norm) == 3 else 0.0
        self.keeps_bits: bool = all(product.keeps_bits for product in self.products)
        self.device, self.dtype = self.norm[0].device, self.norm[0].dtype
        rope = config.rope_parameters if config.model_type == "ministral3" else {}
        self._beta: float = rope.get("llama_4_scaling_beta", 0.0)
        self._original: int = rope.get("original_max_position_embeddings", 1)
        self.scales_queries = bool(self._beta)
        scale = getattr(embedding, "embed_scale", None)
        self.embedding_scale = None if scale is None else float(scale.to(self.dtype))

    @property
    def products(self) -> list[Projection]:
        """All products but those of the embedding."""
        return [*(product for layer in self.layers for product in layer.products), self.head]

    def embed(self, tokens: Tensor) -> Tensor:
        """What tokens [n] are embedded as, [n, hidden]."""
        if isinstance(self.embedding, PackedMatrix):
            rows = self.embedding.rows(tokens, self.dtype)
        else:
            rows = nn.functional.embedding(tokens, self.embedding)
        return rows if self.embedding_scale is None else rows * self.embedding_scale

    def capped(self, logits: Tensor) -> Tensor:
        """Soft-cap logits of tokens where the model does."""
        return logits if self.logit_cap is None else (logits / self.logit_cap).tanh_().mul_(self.logit_cap)

    def query_scales(self, start: int, count: int) -> Tensor:
        """Return the factors of queries at consecutive positions after their rotation, [count], where
        ``scales_queries``."""
        positions = torch.arange(start, start + count, device=self.device)
        return (1 + self._beta * torch.log(1 + torch.floor(positions / self._original))).to(self.dtype)

    def angles_of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions [n], each [ropes, n, rotary_dim], by the model's own embedding."""
        cos, sin = zip(*self.angles_of_each(positions))
        return (cos[0], sin[0]) if len(cos) == 1 else (torch.cat(cos), torch.cat(sin))

    def angles_of_each(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """As ``angles_of``, [1, n, rotary_dim] of each rope, whose parts of a head may differ."""
        places = positions.unsqueeze(0)
        if hasattr(self._rotary, "mrope_section"):
            places = places.expand(3, 1, -1)  # time, height and width: one number of a text
        of_each = [self._rotary(self.norm[0], places, *([kind] if kind else [])) for kind in self._ropes]
        if len(of_each) == 1:
            cos, sin = of_each[0]
            repeats = self.rotary_dim // cos.shape[-1]  # 2 where one half has the angles of both (gpt-oss)
            return [(cos.repeat(1, 1, repeats), sin.repeat(1, 1, repeats))]
        return of_each


def _norm(module: Any) -> Norm:
    if hasattr(module, "variance_epsilon"):
        return module.weight.data, float(module.variance_epsilon)
    offset = ROUNDED_ONCE if hasattr(module, "with_scale") else 1.0  # Gemma 4; 2 and 3
    return module.weight.data, float(module.eps), offset


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", "silu"))


def _layer_types(config: Any) -> set[str]:
    if kinds := getattr(config, "layer_types", None):
        return {*kinds}
    return {"full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"}


def _prefixes(model: Any) -> list[str]:
    """Of the attributes of the rotary embedding that belong to a type of layers."""
    rotary = model.model.rotary_emb
    return [f"{kind}_" for kind in rotary.layer_types] if hasattr(rotary, "layer_types") else [""]


def _has_experts(model: Any) -> bool:
    return any(hasattr(getattr(layer, "mlp", None), "experts") for layer in model.model.layers)


def _rope_types(model: Any) -> list[str]:
    kinds = model.model.rotary_emb.rope_type
    return [str(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])]


def _rotary_dims(model: Any) -> list[int]:
    return [2 * getattr(model.model.rotary_emb, f"{kind}inv_freq").numel() for kind in _prefixes(model)]
