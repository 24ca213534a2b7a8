"""The experts of a layer, of which each token gets the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsift.kernels.rms_norm import rms_norm
from kvsift.kernels.routed_experts import Clamps, ExpertStacks, routed_experts, takes_stack
from kvsift.kernels.scaled_weight import FP8, ScaledStack, ScaledWeight
from kvsift.models.packed_linear import PackedExperts
from kvsift.models.projection import GatedMLP, Norm, Projection, whole_of
from kvsift.models.scaled_linear import ScaledExperts, ScaledLinear
from kvsift.native.experts import Routing, mix, route
from kvsift.native.product import MAX_ROWS, normalised, takes_rows

STACKS = "gate_up_proj", "down_proj"  # of transformers' modules of experts
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # of those of shared experts


@dataclass(frozen=True)
class Experts:
    """Experts and their router, as Qwen3-MoE, Mixtral, GLM-4.5 and gpt-oss have them.

    Attributes:
        router: gives a logit of each expert.
        gate_up, down: products of each expert, gated by SiLU; with ``stacks``, one of all experts.
        routing: which experts a token gets.
        bias: float32 [experts], added to the weights of experts for the choice alone (GLM-4.5), or None.
        shared: what all tokens get besides (GLM-4.5), or None.
        shared_gate: gives a logit, by whose sigmoid that is multiplied (Qwen3-Next), or None.
        stacks: the weights on a GPU, in 8-bit floats, or with biases, with those of ``shared`` at their ends, which is
            None then: only the few rows of a ``step`` are multiplied.
    """

    router: Projection
    gate_up: tuple[Projection, ...]
    down: tuple[Projection, ...]
    routing: Routing
    bias: Tensor | None = None
    shared: GatedMLP | None = None
    shared_gate: Projection | None = None
    stacks: ExpertStacks | None = None

    @classmethod
    def of(cls, block: Any) -> Experts:
        """Return those of a block of transformers. Weights of a shared expert and its gate are moved behind the others
        where they are stacked; the block's own parameters become views of them."""
        experts, has_bias = block.experts, hasattr(block.experts, "gate_up_proj_bias")
        router = block.router if has_bias else block.gate
        if getattr(experts, "is_transposed", False):
            _lay_by_output(experts)
        stacks = [] if isinstance(experts, PackedExperts) else [stack_of(experts, name) for name in STACKS]
        is_stacked = has_bias or any(isinstance(stack, ScaledStack) or stack.is_cuda for stack in stacks)
        if is_stacked:
            gate_up, down = ([_flat(stack)] for stack in stacks)
        elif isinstance(experts, PackedExperts):
            gate_up = [Projection((), parts=parts) for parts in experts.gate_up.parts]
            down = [Projection((), parts=parts) for parts in experts.down.parts]
        else:
            gate_up = [Projection((), weight) for weight in experts.gate_up_proj.data]
            down = [Projection((), weight) for weight in experts.down_proj.data]
        bias, shared, gate = getattr(router, "e_score_correction_bias", None), *_shared(block)
        factor = float(getattr(router, "routed_scaling_factor", 1.0))
        routing = Routing(router.top_k, bias is not None, getattr(router, "norm_topk_prob", True), factor)
        bias = None if bias is None else bias.float().contiguous()
        logits, products = router.weight.data, (tuple(gate_up), tuple(down))
        if not is_stacked:
            return cls(
                Projection((), logits), *products, routing, bias, None if shared is None else GatedMLP.of(shared),
                None if gate is None else Projection.of(gate),
            )  # fmt: skip
        if gate is not None:
            logits = _joined(router.weight, [gate.weight])
        first, second = stacks if shared is None else [_with_shared(experts, shared, name) for name in STACKS]
        every = ExpertStacks(
            logits, first, second, routing, bias, shared is not None, gate is not None, *_biases(router, experts)
        )
        return cls(Projection((), logits), *products, routing, bias, stacks=every)

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
        if self.shared is None or self.shared_gate is None:
            return mixed if self.shared is None else self.shared.add_to(mixed, rows)
        outputs = self.shared.down(self.shared.gate_up(rows, gated=True))
        return mixed + self.shared_gate(rows).sigmoid() * outputs


def stack_of(experts: Any, name: str) -> Tensor | ScaledStack:
    """Return the weights [experts, out, in] of a module of experts."""
    weight = getattr(experts, name)
    if isinstance(weight, ScaledExperts):
        return weight.weight
    data: Tensor = weight.data
    return data.mT if getattr(experts, "is_transposed", False) else data


def _lay_by_output(experts: Any) -> None:
    """Let the weights of a module that has them as [experts, in, out] lie as [experts, out, in] in the same memory,
    which the module's own parameters become views of."""
    for name in STACKS:
        parameter = getattr(experts, name)
        if isinstance(parameter, ScaledExperts) or parameter.stride(1) == 1:
            continue
        for matrix in parameter.data:
            matrix.view(-1).copy_(matrix.t().flatten())
        parameter.data = parameter.data.view(parameter.mT.shape).mT


def _biases(router: Any, experts: Any) -> tuple[Tensor, Tensor, Tensor, Clamps] | tuple[()]:
    """The last arguments of ``ExpertStacks``, of gpt-oss alone."""
    if not hasattr(experts, "gate_up_proj_bias"):
        return ()
    clamps = Clamps(float(experts.alpha), float(experts.limit))
    return router.bias.data, experts.gate_up_proj_bias.data, experts.down_proj_bias.data, clamps


def not_stacked(block: Any, dtype: torch.dtype) -> str | None:
    """Why the experts of a block of transformers are not multiplied as they lie; None: they are."""
    experts = block.experts
    if isinstance(experts, PackedExperts):
        return None
    if not all(isinstance(getattr(experts, name, None), torch.nn.Parameter | ScaledExperts) for name in STACKS):
        return type(experts).__name__
    stacks = [stack_of(experts, name) for name in STACKS]
    on_host = not any(isinstance(stack, ScaledStack) or stack.is_cuda for stack in stacks)
    if on_host:
        return None
    if not all(takes_stack(stack, dtype) for stack in stacks):
        return "other blocks of 8-bit floats than 128 inputs" if isinstance(stacks[0], ScaledStack) else "mixed dtypes"
    if (shared := _shared(block)[0]) is not None and not all(
        _joins(getattr(experts, name), [getattr(shared, part) for part in PARTS[name]]) for name in STACKS
    ):
        return "a shared expert of another size or format"
    return None


def _shared(block: Any) -> tuple[Any, Any]:
    """The module of a shared expert and that of its gate, or None."""
    shared = getattr(block, "shared_experts", None)  # GLM-4.5
    return (shared, None) if shared is not None else (
        getattr(block, "shared_expert", None), getattr(block, "shared_expert_gate", None)  # Qwen3-Next
    )  # fmt: skip


def _joins(stack: Any, modules: Sequence[Any]) -> bool:
    """Whether the weights of these linear layers are those of one more expert."""
    rows, ins = sum(module.out_features for module in modules), modules[0].in_features
    if not isinstance(stack, ScaledExperts):
        plain = all(type(module) is torch.nn.Linear and module.bias is None for module in modules)
        return plain and stack.shape[1:] == (rows, ins) and all(each.weight.dtype == stack.dtype for each in modules)
    return stack.values.shape[1:] == (rows, ins) and all(
        isinstance(each, ScaledLinear) and each.bias is None and each.outs % stack.outs == 0
        and each.out_features % stack.outs == 0 and each.scales.shape[1] == stack.scales.shape[2]
        for each in modules
    )  # fmt: skip


def _with_shared(experts: Any, shared: Any, name: str) -> Tensor | ScaledStack:
    """The stack of a module of experts, with a shared one as the last."""
    stack, modules = getattr(experts, name), [getattr(shared, part) for part in PARTS[name]]
    if not isinstance(stack, ScaledExperts):
        return _joined(stack, [module.weight for module in modules])
    for module in modules:
        module.refine(stack.outs)
    values = _joined(stack.values, [module.values for module in modules])
    scales = _joined(stack.scales, [module.scales for module in modules])
    return ScaledStack(values.view(FP8), scales, stack.outs, stack.ins)


def _joined(stack: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Return [n + 1, ...], a stack [n, ...] and matrices whose rows are those of one more; all become views of it."""
    parts, width = [stack, *matrices], stack.shape[-1]
    flat = [part.data.reshape(-1, width) for part in parts]
    whole = whole_of(flat)
    if whole is None:
        whole = torch.cat(flat)
        for part, own in zip(parts, whole.split([len(each) for each in flat])):
            part.data = own.view(part.shape)
    return whole.view(-1, *stack.shape[1:])


def _flat(stack: Tensor | ScaledStack) -> Projection:
    """Return all matrices of a stack as one."""
    if isinstance(stack, Tensor):
        return Projection((), stack.flatten(0, 1))
    return Projection((), ScaledWeight(stack.values.flatten(0, 1), stack.scales.flatten(0, 1), stack.outs, stack.ins))
