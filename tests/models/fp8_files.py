"""Directories of tiny models whose linear weights are 8-bit floats, as their tools write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvsift.kernels.scaled_weight import FP8, ScaledWeight

BLOCK = 128
Tensors = dict[str, Tensor]


def compressed_tensors(strategy: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **weights},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def transformers_fp8(block: list[int] | None) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": block,
        "modules_to_not_convert": ["lm_head"],
    }


FORMATS: dict[str, dict[str, Any]] = {
    "channel": compressed_tensors("channel"),
    "tensor": compressed_tensors("tensor"),
    "group": compressed_tensors("group", group_size=BLOCK),
    "block": compressed_tensors("block", block_structure="128x128"),
    "transformers": transformers_fp8([BLOCK, BLOCK]),
    "transformers-tensor": transformers_fp8(None),
}


def write_fp8(directory: Path, name: str, change: Callable[[dict[str, Any], Tensors], None] | None = None) -> Tensors:
    """Round the linear weights of a directory to a format of ``FORMATS``, in place.

    Args:
        directory: of a model.
        name: of the format.
        change: is given configuration and tensors before they are written.

    Returns:
        All weights as they are now, in float32.
    """
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    config["quantization_config"] = json.loads(json.dumps(FORMATS[name]))
    suffix = "weight_scale_inv" if name.startswith("transformers") else "weight_scale"
    stored, exact = dict(tensors), {key: tensor.float() for key, tensor in tensors.items()}
    for key, weight in tensors.items():
        if key.endswith("_proj.weight"):
            rounded = _rounded(weight.float(), name)
            scales = rounded.scales.reshape(1) if name.endswith("tensor") else rounded.scales
            stored |= {key: rounded.values, key.removesuffix("weight") + suffix: scales}
            exact[key] = rounded.expanded(torch.float32)
    if change is not None:
        change(config, stored)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return exact


def _rounded(weight: Tensor, name: str) -> ScaledWeight:
    num_out, num_in = weight.shape
    outs = 1 if name in ("channel", "group") else num_out if name.endswith("tensor") else BLOCK
    ins = num_in if name == "channel" or name.endswith("tensor") else BLOCK
    scales = torch.empty(-(-num_out // outs), -(-num_in // ins))
    for row, rows in enumerate(weight.split(outs)):
        for column, part in enumerate(rows.split(ins, 1)):
            scales[row, column] = part.abs().max() / 448
    every = ScaledWeight(torch.ones(num_out, num_in).to(FP8), scales, outs, ins).expanded(torch.float32)
    return ScaledWeight((weight / every).to(FP8), scales, outs, ins)
