"""A GGUF file as transformers knows the model: its configuration, and its weights by their names there."""

from __future__ import annotations

import logging
from functools import partial
from math import isclose
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from kvsift.errors import DamagedFile, UnsupportedModel, unknown
from kvsift.gguf_file import GgufFile, GgufTensor
from kvsift.models.hf.gguf_codes import packed_experts, packed_matrix
from kvsift.models.hf.late_weight import LateWeight
from kvsift.models.packed_linear import PackedStack
from kvsift.native.memory import HugeRoom

log = logging.getLogger("kvsift")
# model_type and class of each architecture
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),  # Mistral's too, and Mixtral's, which has experts
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
NAMES_OF_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
NAMES_OF_GEMMA_LAYER = {
    **NAMES_OF_LAYER, "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
EXPERTS = "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"  # weights of all experts of a layer
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# tokens that end a turn, which the file may not name; llama.cpp looks for them likewise
ENDS = {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "</s>", "<eos>"}
CONTROL = 3  # type of a token
F32, F16 = 0, 1


class _Settings:
    """The settings of an architecture, each noted when it is read."""

    def __init__(self, file: GgufFile) -> None:
        self.architecture = str(file.settings.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise unknown(f"architecture in {file.path}:", self.architecture[:80], ARCHITECTURES)
        self._file, self._read = file, {"vocab_size", "attention.causal", "rope.scaling.finetuned"}

    def get(self, name: str, kind: type[Any] = int, default: Any = None) -> Any:
        """Return a setting as a number above 0, or as a text.

        Raises:
            InputError: if there is none and no default, or it is of another kind.
        """
        self._read.add(name)
        if default is not None and not self.has(name):
            return default
        value = self._file.settings.get(f"{self.architecture}.{name}", "nothing")
        if type(value) is not kind or (kind is not str and not 0 < value < 2**53):
            raise UnsupportedModel(
                f"{self._file.path} has {self.architecture}.{name}={value!r:.40}, which cannot be used."
            )
        return value

    def has(self, name: str) -> bool:
        """Whether the file has a setting."""
        return f"{self.architecture}.{name}" in self._file.settings

    def warn_of_unused(self) -> None:
        """Name the settings of the architecture that were not read."""
        names = {name.removeprefix(f"{self.architecture}.") for name in self._file.settings
                 if name.startswith(f"{self.architecture}.")}  # fmt: skip
        if unused := sorted(names - self._read):
            log.warning("%s has settings that kvsift does not use: %s", self._file.path, ", ".join(unused))


def config_of(file: GgufFile) -> Any:
    """Return the transformers configuration.

    Raises:
        InputError: for an unknown architecture, or one that computes something kvsift cannot take from the file.
    """
    own = _Settings(file)
    model_type, name_of_class = ARCHITECTURES[own.architecture]
    num_experts = own.get("expert_count") if own.has("expert_count") else 0
    if num_experts and own.architecture == "llama":
        model_type, name_of_class = "mixtral", "MixtralForCausalLM"
    if bool(num_experts) != (model_type in ("mixtral", "qwen3_moe")):
        raise UnsupportedModel(f"{file.path} has {num_experts} experts, which {own.architecture} does not have.")
    if "token_embd.weight" not in file.tensors:
        raise DamagedFile(f"{file.path} has no tensor token_embd.weight.")
    heads, width = own.get("attention.head_count"), own.get("embedding_length")
    head_dim = own.get("attention.key_length", default=width // heads)
    if own.get("attention.value_length", default=head_dim) != head_dim:
        raise UnsupportedModel(f"{file.path} has keys and values of different sizes, which kvsift does not run.")
    if own.get("rope.dimension_count", default=head_dim) != head_dim:
        raise UnsupportedModel(f"{file.path} rotates a part of each head, which kvsift does not read from GGUF files.")
    fields = {
        "architectures": [name_of_class],
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "num_hidden_layers": own.get("block_count"),
        "intermediate_size": own.get("feed_forward_length"),
        "max_position_embeddings": own.get("context_length"),
        "rms_norm_eps": own.get("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": _rope(file, own, head_dim),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _stored_dtype(file),
        **_tokens(file),
    }
    if num_experts:
        fields |= _experts(own, fields, num_experts)
    _require_shapes(file, fields)
    if model_type == "llama":
        fields["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        fields["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    elif own.architecture.startswith("gemma"):
        fields |= _gemma(own, fields)
    own.warn_of_unused()
    return transformers.AutoConfig.for_model(model_type, **fields)


def weights_of(file: GgufFile, config: Any, dtype: torch.dtype, stay_packed: bool) -> dict[str, LateWeight]:
    """Return the weights by their names in transformers; matrices stay packed where they are to and can."""
    gemma = config.model_type.startswith("gemma")
    names = NAMES_OF_GEMMA_LAYER if gemma else NAMES_OF_LAYER
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights, room = {}, HugeRoom()  # a step reads all matrices, and small pages would make it wait for their addresses
    for full_name, tensor in file.tensors.items():
        name, _, suffix = full_name.rpartition(".")
        layer, _, part = name.removeprefix("blk.").partition(".")
        if full_name == ROPE_FACTORS:
            continue  # part of the configuration
        target = f"model.layers.{layer}.{names[part]}" if part in names else NAMES.get(name)
        if part in EXPERTS and suffix == "weight":
            continue  # with the others of the layer
        if config.model_type in ("llama", "mixtral") and part in heads:
            tensor = _unpermuted(tensor, heads[part])
        is_norm = gemma and full_name.endswith("norm.weight")  # the file has the weight plus 1
        weights[full_name if target is None else f"{target}.{suffix}"] = LateWeight(
            tensor.shape,
            dtype,
            partial(_expanded, tensor, dtype, is_norm),
            packed_matrix(tensor, room) if stay_packed else None,
        )
    if config.model_type in ("mixtral", "qwen3_moe"):
        for number in range(config.num_hidden_layers):
            weights |= _weights_of_experts(file, number, dtype, room if stay_packed else None)
    return weights


def _weights_of_experts(file: GgufFile, layer: int, dtype: torch.dtype, room: HugeRoom | None) -> dict[str, LateWeight]:
    """Return the weights of the experts of a layer, which stay packed where there is a room for them and all can."""
    gate, up, down = (file.tensors[f"blk.{layer}.{part}.weight"] for part in EXPERTS)
    packed = [None if room is None else packed_experts(tensor, room) for tensor in (gate, up, down)]
    held: list[PackedStack | None] = [None, None]
    if (gates := packed[0]) is not None and (ups := packed[1]) is not None and (downs := packed[2]) is not None:
        held = [PackedStack(tuple(zip(gates, ups))), PackedStack(tuple(zip(downs)))]
    num_experts, inter, hidden = gate.shape
    target = f"model.layers.{layer}.mlp.experts."
    return {
        f"{target}gate_up_proj": LateWeight(
            (num_experts, 2 * inter, hidden), dtype,
            lambda: torch.cat((_expanded(gate, dtype, False), _expanded(up, dtype, False)), 1), held[0],
        ),
        f"{target}down_proj": LateWeight(down.shape, dtype, partial(_expanded, down, dtype, False), held[1]),
    }  # fmt: skip


def _expanded(tensor: GgufTensor, dtype: torch.dtype, is_one_more: bool) -> Tensor:
    """Return a tensor of a file, less 1 where the file has it one more."""
    expanded = torch.empty(len(tensor.packed), tensor.shape[-1], dtype=dtype)
    for start in range(0, len(tensor.packed), tensor.rows_at_once):
        rows = torch.from_numpy(np.require(tensor.expand(start, start + tensor.rows_at_once), requirements="W"))
        expanded[start : start + tensor.rows_at_once] = rows - 1 if is_one_more else rows
    return expanded.view(tensor.shape)


def _unpermuted(tensor: GgufTensor, num_heads: int) -> GgufTensor:
    """Return the rows of a projection in the order of transformers: the file has the two halves of each head, which
    are rotated together, interleaved. Rows are packed one by one, so that packed rows change places."""
    num_rows = len(tensor.packed) if len(tensor.shape) > 1 else tensor.shape[0]
    if num_rows % (2 * num_heads):
        return tensor  # of a shape that transformers will refuse
    order = np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
    if len(tensor.shape) > 1:
        return GgufTensor(tensor.type, tensor.shape, tensor.packed[order])
    return GgufTensor(tensor.type, tensor.shape, tensor.packed.reshape(num_rows, -1)[order].reshape(1, -1))  # a bias


def _require_shapes(file: GgufFile, fields: dict[str, Any]) -> None:
    """Refuse sizes that the weights do not have (``InputError``), before memory is allocated by them."""
    width, heads, kv_heads = (fields[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    rows = {"attn_q": heads * fields["head_dim"], "attn_k": kv_heads * fields["head_dim"]}
    if "num_experts" not in fields:
        rows["ffn_up"] = fields["intermediate_size"]
    _require(file, "token_embd.weight", fields["vocab_size"], width)
    for name, num_rows in rows.items():
        _require(file, f"blk.0.{name}.weight", num_rows, width)
    _require(file, f"blk.{fields['num_hidden_layers'] - 1}.attn_norm.weight", width)
    if num_experts := fields.get("num_experts"):
        for layer in range(fields["num_hidden_layers"]):
            for part in EXPERTS:
                sizes = fields["intermediate_size"], width
                _require(file, f"blk.{layer}.{part}.weight", num_experts, *(sizes[::-1] if "down" in part else sizes))


def _require(file: GgufFile, name: str, *shape: int) -> None:
    stored = file.tensors[name].shape if name in file.tensors else None
    if stored != shape:
        what = "none" if stored is None else list(stored)
        raise DamagedFile(f"{file.path} should have a tensor {name} of the shape {list(shape)}, and has {what}.")


def _experts(own: _Settings, fields: dict[str, Any], num_experts: int) -> dict[str, Any]:
    """Return what configurations of Mixtral and Qwen3-MoE have besides."""
    inter = own.get("expert_feed_forward_length", default=fields["intermediate_size"])
    return {
        "num_experts": num_experts,
        "num_local_experts": num_experts,
        "num_experts_per_tok": min(own.get("expert_used_count"), num_experts),
        "moe_intermediate_size": inter,
        "intermediate_size": inter,
        "norm_topk_prob": True,
    }


def _gemma(own: _Settings, fields: dict[str, Any]) -> dict[str, Any]:
    third = own.architecture == "gemma3"
    num_layers, head_dim = fields["num_hidden_layers"], fields["head_dim"]
    pattern = own.get("attention.sliding_window_pattern", default=6 if third else 2)
    types = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)]
    is_27b = num_layers == (62 if third else 46)  # these alone scale by the width, which no setting says
    caps = {name: own.get(name, float) if own.has(name) else None
            for name in ("attn_logit_softcapping", "final_logit_softcapping")}  # fmt: skip
    made = {
        **caps,
        "sliding_window": own.get("attention.sliding_window"),
        "layer_types": types,
        "query_pre_attn_scalar": fields["hidden_size"] // fields["num_attention_heads"] if is_27b else head_dim,
    }
    if third:
        local = {"rope_type": "default", "rope_theta": own.get("rope.freq_base_swa", float, 10_000.0)}
        made["rope_parameters"] = {"full_attention": fields["rope_parameters"], "sliding_attention": local}
    return made


def _rope(file: GgufFile, own: _Settings, head_dim: int) -> dict[str, Any]:
    """Return the parameters of the rotation, of layers that see every token.

    Raises:
        InputError: for a scaling that transformers computes otherwise.
    """
    rope: dict[str, Any] = {"rope_type": "default"}
    rope["rope_theta"] = own.get("rope.freq_base", float, 1e6 if own.architecture == "gemma3" else 1e4)
    kind = own.get("rope.scaling.type", str, "none")
    if ROPE_FACTORS in file.tensors:
        return rope | _llama3_rope(file, rope["rope_theta"], head_dim)
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{file.path} scales positions by {kind!r:.40}; none, linear and yarn can be read.")
    rope |= {"rope_type": kind, "factor": own.get("rope.scaling.factor", float)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = own.get("rope.scaling.original_context_length")
        if any(own.has(f"rope.scaling.{name}") for name in ("attn_factor", "yarn_log_multiplier")):
            raise UnsupportedModel(
                f"{file.path} scales attention in a way of its own with yarn, which kvsift cannot read."
            )
    return rope


def _llama3_rope(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the scaling of Llama 3.1 and later, of which the file has the divisors of the frequencies alone."""
    tensor = file.tensors[ROPE_FACTORS]
    divisors = torch.from_numpy(tensor.expand(0, len(tensor.packed)).astype(np.float64)).reshape(-1)
    factor, low, high, original = float(divisors.max()), *LLAMA3_ROPE.values()
    wavelengths = 2 * torch.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedModel(f"{file.path} divides the frequencies of positions otherwise than Llama 3 does.")
    whole = float(round(factor)) if isclose(factor, round(factor), rel_tol=1e-5) else factor
    return {"rope_type": "llama3", "factor": whole, **LLAMA3_ROPE}


def _stored_dtype(file: GgufFile) -> torch.dtype:
    """Return the dtype of a directory with these weights."""
    types = {tensor.type for tensor in file.tensors.values()}
    return torch.float32 if types == {F32} else torch.float16 if types <= {F32, F16} else torch.bfloat16


def _tokens(file: GgufFile) -> dict[str, Any]:
    """Return the special tokens of the configuration; all that end a turn are ends."""
    keys = ("bos", "padding", "eos", "eot", "eom")
    bos, padding, *named = (file.settings.get(f"tokenizer.ggml.{key}_token_id") for key in keys)
    tokens, types = (file.settings.get(f"tokenizer.ggml.{name}") or [] for name in ("tokens", "token_type"))
    ends = [number for number, (token, kind) in enumerate(zip(tokens, types)) if kind == CONTROL and token in ENDS]
    ends = list(dict.fromkeys(number for number in (*named, *ends) if number is not None))
    return {"bos_token_id": bos, "pad_token_id": padding, "eos_token_id": ends or None}
