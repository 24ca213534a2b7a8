"""Directories of models whose linear weights have 8 or 4 bits, as their tools write them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvsift.kernels.scaled_weight import FP8
from kvsift.models import quantized

BLOCK, GROUP = 128, 64  # of 8-bit floats, of whole numbers
LINEAR = tuple(
    f"{name}.weight" for name in ("_proj", ".in_proj_qkv", ".in_proj_z", ".in_proj_qkvz", ".w1", ".w2", ".w3")
)
Tensors = dict[str, Tensor]
Change = Callable[[dict[str, Any], Tensors], None]


def compressed(spelling: str, bits: int, strategy: str, symmetric: bool = True, **weights: Any) -> dict[str, Any]:
    kind = "float" if spelling == "float-quantized" else "int"
    own = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, **weights}
    group = {"targets": ["Linear"], "weights": own, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": spelling, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None}  # fmt: skip


def transformers_fp8(block: list[int] | None) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block,
            "modules_to_not_convert": ["lm_head"]}  # fmt: skip


FP8_FORMATS = {
    "fp8-channel": compressed("float-quantized", 8, "channel"),
    "fp8-tensor": compressed("float-quantized", 8, "tensor"),
    "fp8-group": compressed("float-quantized", 8, "group", group_size=BLOCK),
    "fp8-block": compressed("float-quantized", 8, "block", block_structure="128x128"),
    "fp8-transformers": transformers_fp8([BLOCK, BLOCK]),
    "fp8-transformers-tensor": transformers_fp8(None),
}
INT4_FORMATS = {
    "int4": compressed("pack-quantized", 4, "group", group_size=GROUP),
    "int4-channel": compressed("pack-quantized", 4, "channel"),
    "int4-zeros": compressed("pack-quantized", 4, "group", False, group_size=GROUP),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
}
INT8_FORMATS = {
    "int8-channel": compressed("int-quantized", 8, "channel"),
    "int8-tensor": compressed("int-quantized", 8, "tensor"),
    "int8-zeros": compressed("int-quantized", 8, "group", False, group_size=GROUP),
    "int8-packed": compressed("pack-quantized", 8, "channel"),
    "int8-packed-zeros": compressed("pack-quantized", 8, "group", False, group_size=GROUP),
    "gptq-int8": {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False, "sym": True},
}
FORMATS: dict[str, dict[str, Any]] = {**FP8_FORMATS, **INT4_FORMATS, **INT8_FORMATS}


def write_quantized(directory: Path, name: str, change: Change | None = None, **settings: Any) -> Tensors:
    """Round the linear weights of a directory to a format of ``FORMATS``, in place.

    Args:
        directory: of a model.
        name: of the format.
        change: is given configuration and tensors before they are written.
        settings: of the format that are to be others, such as ``group_size``.

    Returns:
        All weights as they are now, in float32.
    """
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    config["quantization_config"] = given = json.loads(json.dumps(FORMATS[name]))
    groups = given.get("config_groups")
    how = given if groups is None else groups["group_0"]["weights"]
    how |= settings
    stored, exact = dict(tensors), {key: tensor.float() for key, tensor in tensors.items()}
    for key, weight in tensors.items():
        if key.endswith(LINEAR):
            layer = key.removesuffix(".weight")
            parts, exact[key] = (_floats if name in FP8_FORMATS else _whole_numbers)(weight.float(), name, how)
            del stored[key]
            stored |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    if change is not None:
        change(config, stored)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return exact


def write_float4(directory: Path, change: Change | None = None) -> Tensors:
    """Replace the experts of a directory of gpt-oss, in place, by random ones in MXFP4.

    Returns:
        These experts as transformers reads them, in float32.
    """
    config, stored = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    exact, draw = dict[str, Tensor](), torch.Generator().manual_seed(0)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, num_in, num_out = stored.pop(name).shape
        blocks = torch.randint(256, (experts, num_out, num_in // 32, 16), dtype=torch.uint8, generator=draw)
        scales = torch.randint(119, 124, (experts, num_out, num_in // 32), dtype=torch.uint8, generator=draw)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        exact[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    if change is not None:
        change(config, stored)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return exact


def _floats(weight: Tensor, name: str, how: dict[str, Any]) -> tuple[Tensors, Tensor]:
    num_out, num_in = weight.shape
    outs = 1 if name in ("fp8-channel", "fp8-group") else num_out if name.endswith("tensor") else BLOCK
    ins = num_in if name == "fp8-channel" or name.endswith("tensor") else BLOCK
    scales = torch.empty(-(-num_out // outs), -(-num_in // ins))
    for row, rows in enumerate(weight.split(outs)):
        for column, part in enumerate(rows.split(ins, 1)):
            scales[row, column] = part.abs().max() / 448
    every = scales.repeat_interleave(outs, 0)[:num_out].repeat_interleave(ins, 1)[:, :num_in]
    values = (weight / every).to(FP8)
    suffix = "weight_scale_inv" if name.startswith("fp8-transformers") else "weight_scale"
    return {"weight": values, suffix: scales.reshape(1) if name.endswith("tensor") else scales}, values.float() * every


def _whole_numbers(weight: Tensor, name: str, how: dict[str, Any]) -> tuple[Tensors, Tensor]:
    num_out, num_in = weight.shape
    bits = how.get("num_bits") or how["bits"]
    ins, centre = how.get("group_size") or num_in, 1 << bits - 1
    groups = weight.unflatten(1, (-1, ins))  # [out, groups, ins]
    if name.endswith("tensor"):
        scales = (groups.abs().amax() / (centre - 1)).expand(num_out, 1)
    elif how.get("symmetric") or how.get("sym"):
        scales = groups.abs().amax(2) / (centre - 1)
    else:
        scales = (groups.amax(2).clamp_min(0) - groups.amin(2).clamp_max(0)) / (2 * centre - 1)
    scales = scales.bfloat16().half().float()
    zeros = torch.full_like(scales, centre)
    if not (how.get("symmetric") or how.get("sym")):
        zeros = (-groups.amin(2) / scales).round().clamp(1, 2 * centre - 1)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 2 * centre - 1)
    exact = ((codes - zeros[..., None]) * scales[..., None]).flatten(1)
    return stored_as(name, codes.flatten(1).int(), scales, zeros.int(), bits), exact


def stored_as(name: str, codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensors:
    """The tensors of codes [out, in], scales and zeros [out, groups], in a format of whole numbers."""
    if name == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": words(codes.t(), 4, order),
            "qzeros": words(zeros.t(), 4, order),
            "scales": scales.t().half(),
        }
    if name.startswith("gptq"):
        points = words(zeros.t() - (0 if name == "gptq_v2" else 1), bits)
        groups = torch.arange(codes.shape[1], dtype=torch.int32) // (codes.shape[1] // scales.shape[1])
        return {"qweight": words(codes, bits).t(), "qzeros": points, "scales": scales.t().half(), "g_idx": groups}
    scales = scales[:1].reshape(1) if name.endswith("tensor") else scales
    if name in ("int8-channel", "int8-tensor", "int8-zeros"):
        parts = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales.bfloat16()}
        return parts | ({"weight_zero_point": (zeros - 128).to(torch.int8)} if name.endswith("zeros") else {})
    parts = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(codes.shape),
    }
    return parts | ({"weight_zero_point": words(zeros.t(), bits).t()} if name.endswith("zeros") else {})


def stay_everywhere(monkeypatch: pytest.MonkeyPatch, stays: bool) -> None:
    """Let weights of every format stay on every device, or be expanded on all."""
    for name, known in quantized.FORMATS.items():
        monkeypatch.setitem(quantized.FORMATS, name, replace(known, stays=lambda device, dtype: stays))


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [..., n * bits / 32] of codes [..., n]; the i-th lowest of a word is the one at ``order[i]``; padded."""
    per_word = 32 // bits
    codes = nn.functional.pad(codes.long(), (0, -codes.shape[-1] % per_word)).unflatten(-1, (-1, per_word))
    places = range(per_word) if order is None else order
    whole = torch.stack([codes[..., place] << bits * number for number, place in enumerate(places)]).sum(0)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()
