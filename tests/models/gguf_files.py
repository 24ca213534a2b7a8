"""GGUF files of tiny models, written with the ``gguf`` package: its names of tensors and its quantisation."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from models.tiny import tiny
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

from kvsift.gguf_file import GgufTensor
from kvsift.models.hf.gguf_codes import packed_matrix
from kvsift.models.packed_linear import PackedStack
from kvsift.models.quantized import Held, put_weights
from kvsift.native.packed import PackedMatrix

SPECIAL = ("<bos>", "<eos>", "<pad>")
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
ARCHITECTURES = {"Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "Gemma2": "gemma2",
                 "Gemma3": "gemma3", "Mixtral": "llama", "Qwen3Moe": "qwen3moe"}  # fmt: skip
MODEL = {"vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "pad_token_id": 2}


def write_gguf(
    path: Path, family: str = "Llama", kind: GGMLQuantizationType = GGMLQuantizationType.F32, *,
    settings: dict[str, Any] | None = None, split: int = 0, **changes: Any,
) -> PreTrainedModel:  # fmt: skip
    """Write a random model with a token per byte and one for "th", and return it with the weights that the file has.

    Args:
        kind: of its matrices.
        settings: more of them.
        split: tensors in a part; 0: one file.
        changes: of the configuration.
    """
    if family.startswith("Gemma"):  # as the files of the real ones: no setting says otherwise
        pattern = 6 if family == "Gemma3" else 2
        types = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(pattern)]
        changes = {"num_hidden_layers": pattern, "layer_types": types, "query_pre_attn_scalar": 16, **changes}
        changes |= {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    if family == "Qwen3Moe":
        changes = {"norm_topk_prob": True, "moe_intermediate_size": 32, **changes}
    model = tiny(family, **{**MODEL, **changes})
    config, architecture = model.config, ARCHITECTURES[family]
    writer = GGUFWriter(path, architecture, split_max_tensors=split)
    _write_settings(writer, family, config)
    _write_tokenizer(writer)
    for name, value in (settings or {}).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    with torch.no_grad():
        for full_name, weight in model.named_parameters():  # those that are tied once
            name, suffix = full_name.rsplit(".", 1)
            if suffix in ("gate_up_proj", "down_proj"):
                _write_experts(writer, name.split(".")[2], suffix, weight, kind)
                continue
            values = weight.numpy().copy()
            heads = 0
            if architecture == "llama" and name.endswith(("q_proj", "k_proj")):
                heads = config.num_attention_heads if name.endswith("q_proj") else config.num_key_value_heads
                values = interleaved(values, heads)
            if family.startswith("Gemma") and name.endswith("norm"):
                values = values + 1
            packed, own = values, GGMLQuantizationType.F32
            if values.ndim > 1 and kind != own and not name.endswith("mlp.gate"):
                packed, own = gguf.quantize(values, kind), kind
                back = gguf.dequantize(packed, kind)
                weight.copy_(torch.from_numpy(separated(back, heads) if heads else back))
            writer.add_tensor(f"{names.get_name(name)}.{suffix}", packed, raw_dtype=own)
    _close(writer)
    return model


def _write_experts(
    writer: GGUFWriter, layer: str, suffix: str, weight: torch.Tensor, kind: GGMLQuantizationType
) -> None:
    """Write weights of experts [experts, out, in], and round them to what the file has."""
    parts = ["down"] if suffix == "down_proj" else ["gate", "up"]
    for part, values in zip(parts, weight.chunk(len(parts), 1)):
        packed, own = values.numpy().copy(), GGMLQuantizationType.F32
        if kind != own:
            packed, own = gguf.quantize(packed, kind), kind
            values.copy_(torch.from_numpy(gguf.dequantize(packed, kind)))
        writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", packed, raw_dtype=own)


def pack_model(model: PreTrainedModel, kind: GGMLQuantizationType) -> PreTrainedModel:
    """Pack the matrices of a model in place, as if they had been read from a file; not those of routers."""
    weights: dict[str, Held] = {}
    for name, weight in model.named_parameters():
        values = weight.detach().float()
        if weight.dim() == 3:
            parts = [each.chunk(2 if name.endswith("gate_up_proj") else 1) for each in values]
            weights[name] = PackedStack(tuple(tuple(_packed(part, kind) for part in own) for own in parts))
        elif weight.dim() == 2 and not name.endswith("mlp.gate.weight"):
            weights[name] = _packed(values, kind)
    put_weights(model, weights)
    return model


def _packed(values: torch.Tensor, kind: GGMLQuantizationType) -> PackedMatrix:
    matrix = packed_matrix(packed_tensor(values.numpy(), kind))
    assert matrix is not None
    return matrix


def packed_tensor(values: np.ndarray, kind: GGMLQuantizationType) -> GgufTensor:
    """Return a matrix as one of a file."""
    return GgufTensor(kind.value, values.shape, gguf.quantize(values, kind))


def interleaved(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as Llama's files have them: the halves of each head take turns."""
    return values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def separated(values: np.ndarray, num_heads: int) -> np.ndarray:
    return values.reshape(num_heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_tensors(path: Path, tensors: dict[str, tuple[np.ndarray, GGMLQuantizationType]]) -> Path:
    """Write packed tensors without a model."""
    writer = GGUFWriter(path, "llama")
    for name, (packed, kind) in tensors.items():
        writer.add_tensor(name, packed, raw_dtype=kind)
    _close(writer)
    return path


def _close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_settings(writer: GGUFWriter, family: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else config.hidden_size // 4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if family.startswith("Gemma"):
        writer.add_sliding_window(config.sliding_window)
    if family in ("Mixtral", "Qwen3Moe"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if family == "Qwen3Moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "Gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _write_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
