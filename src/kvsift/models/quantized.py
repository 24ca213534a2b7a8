"""Linear weights of 8 or 4 bits: where each format stays as it is, how plain weights are rounded to it, and which
modules take the places of plain ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvsift.errors import UnsupportedModel
from kvsift.kernels.int4_weight import Int4Weight
from kvsift.kernels.scaled_weight import ScaledStack, ScaledWeight, keeps_fp8
from kvsift.kernels.triton_shim import HAVE_TRITON
from kvsift.models.packed_linear import PackedEmbedding, PackedExperts, PackedLinear, PackedStack, can_stay_packed
from kvsift.models.scaled_linear import Int4Linear, ScaledExperts, ScaledLinear
from kvsift.native.packed import CENTRE, PACKED_INS, PackedCodes, PackedMatrix

QUANTIZE = "fp8", "fp8_head", "int8", "int4"  # what plain weights can be rounded to
GROUP, LEAST_SCALE = 32, 2.0**-24  # inputs of a group, as measured; the smallest float16 above 0
ROUNDED_AT_ONCE = 1 << 18  # numbers: larger temporary arrays leave holes in the process's memory
Held = ScaledWeight | ScaledStack | Int4Weight | PackedMatrix | PackedStack
EXPERTS = "gate_up_proj", "up_proj", "down_proj"  # parameters of transformers' modules of experts


def _keeps_mxfp4(device: torch.device, dtype: torch.dtype) -> bool:
    return HAVE_TRITON and device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def _keeps_int4(device: torch.device, dtype: torch.dtype) -> bool:
    return _keeps_mxfp4(device, dtype) or can_stay_packed(device, dtype)


@dataclass(frozen=True)
class Format:
    """Weights of few bits.

    Attributes:
        bits: bits of a weight.
        held_bits: the same with scales and zero points, at most.
        stays: device and dtype of rows -> whether weights stay so.
        where: they stay, in words.
    """

    bits: int
    held_bits: float
    stays: Callable[[torch.device, torch.dtype], bool]
    where: str


ON_CPU = "CPUs with the compiled core, in bfloat16 or float32"
FORMATS = {
    "fp8": Format(8, 8, keeps_fp8, "NVIDIA GPUs of compute capability 8.9 or higher, in bfloat16 or float16"),
    "mxfp4": Format(4, 4.25, _keeps_mxfp4, "NVIDIA GPUs, in bfloat16 or float16"),
    "int8": Format(8, 9, can_stay_packed, ON_CPU),
    "int4": Format(4, 5, _keeps_int4, f"NVIDIA GPUs, in bfloat16 or float16, and on {ON_CPU}"),
}


@dataclass(frozen=True)
class GroupedCodes:
    """A matrix [out, in] of whole numbers with scales: weight [o, i] is ``(codes[o, i] - zeros[o, g]) * scales[o, g]``,
    where g is the group of input i.

    Attributes:
        codes: uint8 [out, in].
        scales: [out, groups], floating point.
        zeros: int16 [out, groups], or None: all are half of the codes, 8 or 128.
        bits: bits of a code, 4 or 8.
        order: int64 [in], the group of each input; None: groups of equal size follow one another.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    order: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, bits: int) -> GroupedCodes:
        """Return the nearest codes of a weight [out, in] in groups of 32 inputs: of 4 bits with zero points, so that
        they reach from the smallest weight of a group to the largest, of 8 bits without."""
        num_out, num_in = weight.shape
        shape, device = (num_out, num_in // GROUP), weight.device
        codes = torch.empty(weight.shape, dtype=torch.uint8, device=device)
        scales = torch.empty(shape, dtype=torch.float16, device=device)
        zeros, last = torch.full(shape, 1 << bits - 1, dtype=torch.int16, device=device), (1 << bits) - 1
        step = max(1, ROUNDED_AT_ONCE // num_in)
        for rows in (slice(start, start + step) for start in range(0, num_out, step)):
            groups = weight[rows].float().unflatten(1, (-1, GROUP))
            low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
            widths = (high - low) / last if bits == 4 else torch.maximum(-low, high) / (last // 2)
            scales[rows] = widths.clamp_min(LEAST_SCALE)
            each = scales[rows].float()
            if bits == 4:
                zeros[rows] = (low / -each).round().to(torch.int16)
            codes[rows] = ((groups / each.unsqueeze(2)).round() + zeros[rows].unsqueeze(2)).clamp(0, last).flatten(1)
        return cls(codes, scales, zeros if bits == 4 else None, bits)

    @property
    def ins(self) -> int:
        """Inputs of a group."""
        return self.codes.shape[1] // self.scales.shape[1]

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], rounded to a dtype once."""
        groups = self.order
        if groups is None:
            groups = torch.arange(self.codes.shape[1], device=self.codes.device) // self.ins
        wide = torch.promote_types(dtype, torch.float32)
        zeros = 1 << self.bits - 1 if self.zeros is None else self.zeros[:, groups]
        return ((self.codes.to(torch.int16) - zeros).to(wide) * self.scales.to(wide)[:, groups]).to(dtype)

    def held(self, device: torch.device, dtype: torch.dtype) -> Int4Weight | PackedMatrix | None:
        """Return the weight as products on a device take it; None where float16 does not hold its scales."""
        if can_stay_packed(device, dtype):
            return self.packed()
        zeros = None if self.zeros is None else self.zeros.to(torch.uint8)
        return Int4Weight.of(self.codes, self.scales, zeros, self.ins)

    def packed(self) -> PackedMatrix | None:
        """Return the matrix of the compiled core: each of its blocks has the scale of its group, and the weight of the
        middle code as minimum; None where float16 does not hold them."""
        centre, repeats = 1 << self.bits - 1, self.ins // PACKED_INS
        scales, minima = self.scales.float(), None
        if self.zeros is not None:
            minima = (scales * (centre - self.zeros)).repeat_interleave(repeats, 1).numpy()
        table = (np.arange(16) - centre + CENTRE).astype(np.uint8) if self.bits == 4 else None
        blocks = scales.repeat_interleave(repeats, 1).numpy()
        return PackedMatrix.of([PackedCodes(self.codes.numpy(), blocks, minima, table)])


def put_weights(model: nn.Module, weights: Mapping[str, Held]) -> None:
    """Replace the modules whose weights have these names, and the head of a tied embedding; linear layers keep their
    biases.

    Raises:
        InputError: naming a module that cannot have such a weight.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_id = {id(parameters[name]): weight for name, weight in weights.items() if name in parameters}
    for name, module in list(model.named_modules()):
        weight = by_id.get(id(module._parameters.get("weight")))
        if weight is not None:
            model.set_submodule(name, _module_of(name, module, weight))
        stacks = {each: by_id.get(id(module._parameters.get(each))) for each in EXPERTS}
        gate_up, down = stacks["gate_up_proj"], stacks["down_proj"]
        if isinstance(gate_up, PackedStack) and isinstance(down, PackedStack):
            model.set_submodule(name, PackedExperts(gate_up, down, module.gate_up_proj.dtype))
        _put_experts(module, {each: stack for each, stack in stacks.items() if isinstance(stack, ScaledStack)})


def _put_experts(experts: nn.Module, weights: Mapping[str, ScaledStack]) -> None:
    for name, weight in weights.items():
        del experts._parameters[name]
        setattr(experts, name, ScaledExperts(weight))


def _module_of(name: str, module: nn.Module, weight: Held) -> nn.Module:
    if isinstance(module, nn.Linear):
        if isinstance(weight, PackedMatrix):
            return PackedLinear(weight, module.bias, module.weight.dtype)
        return (Int4Linear if isinstance(weight, Int4Weight) else ScaledLinear)(weight, module.bias)  # type: ignore[arg-type]
    if isinstance(module, nn.Embedding) and isinstance(weight, PackedMatrix):
        return PackedEmbedding(weight, module.weight.dtype, getattr(module, "embed_scale", None))
    raise UnsupportedModel(
        f"{name} has quantised weights, and is a {type(module).__name__}. Only linear layers can have them here."
    )


def round_linears(model: Any, device: torch.device, dtype: torch.dtype, quantize: str) -> None:
    """Round the weights of all linear layers of a transformers model that have several outputs to one of ``QUANTIZE``,
    one by one on the device, and those of experts to fp8; an embedding that has been tied to the head stays. Where they
    cannot stay so, they are expanded again."""
    name = quantize.removesuffix("_head")
    kept, stays = None if quantize != name else model.get_output_embeddings(), FORMATS[name].stays(device, dtype)
    for path, module in list(model.named_modules()):
        if name == "fp8" and hasattr(module, "has_gate"):
            _round_experts(module, device, dtype, stays)
        if not isinstance(module, nn.Linear) or module is kept or module.out_features == 1:  # a gate
            continue
        plain, held = module.weight.detach().to(device), None
        weight = ScaledWeight.of(plain) if name == "fp8" else GroupedCodes.of(plain, FORMATS[name].bits)
        if stays:
            held = weight if isinstance(weight, ScaledWeight) else weight.held(device, dtype)
        if held is None:
            module.weight = nn.Parameter(weight.expanded(dtype), requires_grad=False)
        else:
            model.set_submodule(path, _module_of(path, module, held))
    if stays and device.type == "cpu":
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # no view of the file, which would keep all of it in memory


def _round_experts(experts: Any, device: torch.device, dtype: torch.dtype, stays: bool) -> None:
    """Round the experts of a layer to 8-bit floats, with a scale per output."""
    for name in EXPERTS:
        if (parameter := experts._parameters.get(name)) is None:
            continue
        plain = parameter.detach().to(device)
        weight = ScaledStack.of((plain.mT if experts.is_transposed else plain).contiguous())
        if stays:
            _put_experts(experts, {name: weight})
        else:
            expanded = weight.expanded(dtype)
            parameter.data = (expanded.mT if experts.is_transposed else expanded).contiguous()
