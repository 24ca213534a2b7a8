"""Linear layers of the same input, joined into one: their weights share one storage and take one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kvsift.kernels.int4_weight import CENTRE, Int4Weight
from kvsift.kernels.linear import linear
from kvsift.kernels.rms_norm import rms_norm
from kvsift.kernels.scaled_weight import FP8, ScaledWeight, shared_outs
from kvsift.kernels.skinny_product import Weight, takes_weight
from kvsift.kernels.triton_shim import runs_on_triton
from kvsift.models.packed_linear import PackedLinear
from kvsift.models.scaled_linear import Int4Linear, ScaledLinear
from kvsift.native.packed import PackedMatrix, packed_product
from kvsift.native.product import MAX_ROWS, Norm, product, takes_product

MOST_ROWS = 2048  # of a gated MLP at once: what is between its products takes more memory than all else of a chunk


@dataclass(frozen=True)
class Projection:
    """Linear modules of one input; their outputs are concatenated.

    Attributes:
        modules: linear layers of one input.
        weight: [out of all, in] if all are plain ``nn.Linear``, ``ScaledLinear`` or ``Int4Linear``; their own weights
            are views of it. Else None.
        bias: [out of all], if they have biases.
        parts: the matrices if all are ``PackedLinear``. Without weight and parts the modules are called one by one
            (weights that other libraries quantised, or some that are packed and some plain).
    """

    modules: tuple[nn.Module, ...]
    weight: Weight | None = None
    bias: Tensor | None = None
    parts: tuple[PackedMatrix, ...] = ()

    @classmethod
    def of(cls, *modules: nn.Module) -> Projection:
        """Move the modules' parameters into one storage, which they share; nothing is stored twice."""
        kinds = {type(module) for module in modules}
        if len(kinds) > 1 or not kinds <= {nn.Linear, PackedLinear, ScaledLinear, Int4Linear}:
            return cls(modules)
        biases = [module.bias for module in modules]
        if len({bias is None for bias in biases}) > 1:
            return cls(modules)
        bias = None if biases[0] is None else _joined([bias for bias in biases if isinstance(bias, nn.Parameter)])
        if kinds == {PackedLinear}:
            return cls(modules, None, bias, tuple(module.matrix for module in modules))  # type: ignore[misc]
        if kinds != {nn.Linear}:
            if len({(module.ins, getattr(module, "outs", 1) == 1) for module in modules}) > 1:
                return cls(modules)
            join = _joined_scaled if kinds == {ScaledLinear} else _joined_int4
            return cls(modules, join(modules), bias)  # type: ignore[arg-type]
        return cls(modules, _joined([module.weight for module in modules]), bias)  # type: ignore[misc]

    @cached_property
    def in_core(self) -> bool:
        """Whether the compiled core multiplies few rows with the weight; packed ones, any number of rows."""
        weight = self.weight
        return bool(self.parts) or (isinstance(weight, Tensor) and takes_product(weight[:1], weight))

    @property
    def num_out(self) -> int:
        """Outputs of all modules."""
        return sum(module.out_features for module in self.modules)  # type: ignore[misc]

    @property
    def keeps_bits(self) -> bool:
        """Whether a row of a steady product of up to 32 rows has the same bits whatever their number (packed weights:
        of every product)."""
        weight = self.weight
        if isinstance(weight, ScaledWeight | Int4Weight):
            return runs_on_triton(weight.scales) and takes_weight(weight, torch.bfloat16)
        if weight is None or not weight.is_cuda:
            return self.in_core
        return runs_on_triton(weight) and takes_weight(weight, weight.dtype)

    def __call__(
        self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None, steady: bool = False,
        pdl: bool = False, gated: bool = False, gelu: bool = False,
    ) -> Tensor:  # fmt: skip
        """``residual + rms_norm(x) @ weight.T + bias``; x [rows, in] -> [rows, out of all]; or with ``gated``
        ``silu(gate) * up`` of the two modules, [rows, inter], and with ``gelu`` GELU by tanh in place of SiLU."""
        few = isinstance(self.weight, Tensor) and self.in_core and 0 < x.shape[0] <= MAX_ROWS
        if gated and (self.bias is not None or not (self.parts or few or self.weight is not None)):
            gate, up = self(x, norm, steady=steady).chunk(2, -1)
            return (nn.functional.gelu(gate, approximate="tanh") if gelu else nn.functional.silu(gate)) * up
        if self.parts:
            return packed_product(x, self.parts, self.bias, norm=norm, residual=residual, gated=gated, gelu=gelu)
        if few:
            assert isinstance(self.weight, Tensor)
            return product(x, self.weight, self.bias, norm=norm, residual=residual, gated=gated, gelu=gelu)
        if self.weight is not None:
            how = {"norm": norm, "residual": residual, "gated": gated, "gelu": gelu, "steady": steady, "pdl": pdl}
            return linear(x, self.weight, self.bias, **how)  # type: ignore[arg-type]
        x = x if norm is None else rms_norm(x, *norm)
        outputs = [module(x) for module in self.modules]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        return output if residual is None else residual + output

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + x @ weight.T``, in place where the weights allow it; many rows."""
        weight = self.weight
        if not isinstance(weight, Tensor) or self.bias is not None or (self.in_core and 0 < x.shape[0] <= MAX_ROWS):
            return self(x, residual=residual)
        return residual.addmm_(x, weight.t())


@dataclass(frozen=True)
class GatedMLP:
    """``down(act(gate(x)) * up(x))``, where act is SiLU or GELU by tanh."""

    gate_up: Projection
    down: Projection
    gelu: bool = False

    @property
    def products(self) -> tuple[Projection, ...]:
        """All products."""
        return self.gate_up, self.down

    @classmethod
    def of(cls, mlp: Any, gelu: bool = False) -> GatedMLP:
        """Return that of a module of transformers."""
        return cls(Projection.of(mlp.gate_proj, mlp.up_proj), Projection.of(mlp.down_proj), gelu)

    def add_to(self, residual: Tensor, x: Tensor, norm: Norm | None = None) -> Tensor:
        """``residual + mlp(rms_norm(x))``, or of x as it is; x [rows, hidden].
        The residual is overwritten where weights allow it."""
        if len(x) <= MOST_ROWS:
            return self.down.add_to(residual, self.gate_up(x, norm, gated=True, gelu=self.gelu))
        for first in range(0, len(x), MOST_ROWS):
            rows = slice(first, first + MOST_ROWS)
            sums = self.add_to(residual[rows], x[rows], norm)
            if sums.data_ptr() != residual[rows].data_ptr():
                residual[rows] = sums
        return residual

    def step(self, x: Tensor, norm: Norm, steady: bool = False, pdl: bool = False, adds: bool = True) -> Tensor:
        """``x + mlp(rms_norm(x))`` of the few rows of a fused step, or without x if it ``adds`` nothing; see
        ``linear``."""
        heads = self.gate_up(x, norm, steady=steady, pdl=pdl, gated=True, gelu=self.gelu)
        return self.down(heads, residual=x if adds else None, steady=steady, pdl=pdl)

    def __call__(self, x: Tensor, norm: Norm) -> Tensor:
        """``mlp(rms_norm(x))``, [rows, hidden]."""
        return self.down(self.gate_up(x, norm, gated=True, gelu=self.gelu))


def _joined_scaled(modules: Sequence[ScaledLinear]) -> ScaledWeight:
    """Return one weight of the modules' rows, in order; theirs become views of it."""
    outs = shared_outs([module.weight for module in modules])
    for module in modules:
        module.refine(outs)
    values, scales = _joined([module.values for module in modules]), _joined([module.scales for module in modules])
    return ScaledWeight(values.view(FP8), scales, outs, modules[0].ins)


def _joined_int4(modules: Sequence[Int4Linear]) -> Int4Weight:
    """As ``_joined_scaled``; zero points that some have are given to all."""
    if any(module.zeros is not None for module in modules):
        for module in modules:
            if module.zeros is None:
                module.zeros = torch.full(module.scales.shape, CENTRE, dtype=torch.uint8, device=module.codes.device)
    codes, scales = _joined([module.codes for module in modules]), _joined([module.scales for module in modules])
    zeros = [module.zeros for module in modules if module.zeros is not None]
    return Int4Weight(codes, scales, _joined(zeros) if zeros else None, modules[0].ins)


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """Return one tensor of the parameters' rows, in order; the parameters become views of it."""
    first, rows = parameters[0], [len(parameter) for parameter in parameters]
    if len(parameters) == 1:
        return first.data
    whole = whole_of(parameters)
    if whole is None:
        whole = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(parameters, whole.split(rows)):
            parameter.data = part
    return whole


def whole_of(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor that the parameters are consecutive views of, if they were joined before."""
    first = parameters[0]
    start = first.storage_offset()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or parameter.storage_offset() != start or not parameter.is_contiguous():
            return None
        start += parameter.numel()
    rows = sum(len(parameter) for parameter in parameters)
    return first.data.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
