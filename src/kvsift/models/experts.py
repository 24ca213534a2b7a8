"""The experts of a layer, of which each token gets the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsift.kernels.rms_norm import rms_norm
from kvsift.kernels.routed_experts import ExpertStacks, routed_experts, takes_stack
from kvsift.kernels.scaled_weight import ScaledStack, ScaledWeight
from kvsift.models.packed_linear import PackedExperts
from kvsift.models.projection import GatedMLP, Norm, Projection
from kvsift.models.scaled_linear import ScaledExperts
from kvsift.native.experts import Routing, mix, route
from kvsift.native.product import MAX_ROWS, normalised, takes_rows

STACKS = "gate_up_proj", "down_proj"  # of transformers' modules of experts


@dataclass(frozen=True)
class Experts:
    """Experts and their router, as Qwen3-MoE, Mixtral and GLM-4.5 have them.

    Attributes:
        router: gives a logit of each expert.
        gate_up, down: products of each expert, gated by SiLU; with ``stacks``, one of all experts.
        routing: which experts a token gets.
        bias: float32 [experts], added to the weights of experts for the choice alone (GLM-4.5), or None.
        shared: what all tokens get besides (GLM-4.5), or None.
        stacks: the weights on a GPU, or in 8-bit floats: only the few rows of a ``step`` are multiplied.
    """

    router: Projection
    gate_up: tuple[Projection, ...]
    down: tuple[Projection, ...]
    routing: Routing
    bias: Tensor | None = None
    shared: GatedMLP | None = None
    stacks: ExpertStacks | None = None

    @classmethod
    def of(cls, block: Any) -> Experts:
        """Return those of a block of transformers."""
        router, experts = block.gate, block.experts
        stacks = [] if isinstance(experts, PackedExperts) else [stack_of(experts, name) for name in STACKS]
        is_stacked = any(isinstance(stack, ScaledStack) or stack.is_cuda for stack in stacks)
        if is_stacked:
            gate_up, down = ([_flat(stack)] for stack in stacks)
        elif isinstance(experts, PackedExperts):
            gate_up = [Projection((), parts=parts) for parts in experts.gate_up.parts]
            down = [Projection((), parts=parts) for parts in experts.down.parts]
        else:
            gate_up, down = ([Projection((), weight) for weight in stack] for stack in stacks)
        bias, shared = getattr(router, "e_score_correction_bias", None), getattr(block, "shared_experts", None)
        factor = float(getattr(router, "routed_scaling_factor", 1.0))
        routing = Routing(router.top_k, bias is not None, getattr(router, "norm_topk_prob", True), factor)
        bias = None if bias is None else bias.float().contiguous()
        return cls(
            Projection((), router.weight.data), tuple(gate_up), tuple(down), routing, bias,
            None if shared is None else GatedMLP.of(shared),
            ExpertStacks(router.weight.data, *stacks, routing, bias) if is_stacked else None,
        )  # fmt: skip

    @property
    def products(self) -> tuple[Projection, ...]:
        """All products."""
        return self.router, *self.gate_up, *self.down, *(() if self.shared is None else self.shared.products)

    def step(self, x: Tensor, norm: Norm, steady: bool = False, pdl: bool = False) -> Tensor:
        """``x + experts(rms_norm(x))`` of the few rows of a fused step, steady always; see ``routed_experts``."""
        return self(x, norm, x) if self.stacks is None else routed_experts(x, norm, self.stacks, pdl=pdl)

    def add_to(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """``residual + experts(rms_norm(x))``; x [rows, hidden]."""
        return self(x, norm, residual)

    def __call__(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        """``experts(rms_norm(x))``, [rows, hidden], and the residual if there is one."""
        assert self.stacks is None, "transformers' grouped products multiply many rows"
        rows = normalised(x, norm) if takes_rows(x) and len(x) <= MAX_ROWS else rms_norm(x, *norm)
        chosen, weights = route(self.router(rows), self.routing, self.bias)  # [rows, top_k]
        outputs = x.new_empty(*chosen.shape, x.shape[1])
        every, of_pairs = outputs.view(-1, x.shape[1]), chosen.flatten()
        for expert in of_pairs.unique().tolist():
            pairs = (of_pairs == expert).nonzero().flatten()
            own = rows[pairs // self.routing.top_k]
            every[pairs] = self.down[expert](self.gate_up[expert](own, gated=True))
        mixed = mix(outputs, weights, residual)
        return mixed if self.shared is None else self.shared.add_to(mixed, rows)


def stack_of(experts: Any, name: str) -> Tensor | ScaledStack:
    """Return the weights [experts, out, in] of a module of experts."""
    weight = getattr(experts, name)
    return weight.weight if isinstance(weight, ScaledExperts) else weight.data


def not_stacked(block: Any, dtype: torch.dtype) -> str | None:
    """Why the experts of a block of transformers are not multiplied as they lie; None: they are."""
    experts = block.experts
    if isinstance(experts, PackedExperts):
        return None
    if not all(isinstance(getattr(experts, name, None), torch.nn.Parameter | ScaledExperts) for name in STACKS):
        return type(experts).__name__
    stacks = [stack_of(experts, name) for name in STACKS]
    if not all(takes_stack(stack, dtype) for stack in stacks if isinstance(stack, ScaledStack) or stack.is_cuda):
        return "other blocks of 8-bit floats than 128 inputs" if isinstance(stacks[0], ScaledStack) else "mixed dtypes"
    return None


def _flat(stack: Tensor | ScaledStack) -> Projection:
    """Return all matrices of a stack as one."""
    if isinstance(stack, Tensor):
        return Projection((), stack.flatten(0, 1))
    return Projection((), ScaledWeight(stack.values.flatten(0, 1), stack.scales.flatten(0, 1), stack.outs, stack.ins))
