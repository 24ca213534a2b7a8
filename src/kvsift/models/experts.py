"""The experts of a layer, of which each token gets the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvsift.kernels.rms_norm import rms_norm
from kvsift.models.packed_linear import PackedExperts
from kvsift.models.projection import GatedMLP, Norm, Projection
from kvsift.native.experts import Routing, mix, route
from kvsift.native.product import MAX_ROWS, normalised, takes_rows


@dataclass(frozen=True)
class Experts:
    """Experts and their router, as Qwen3-MoE, Mixtral and GLM-4.5 have them.

    Attributes:
        router: gives a logit of each expert.
        gate_up, down: products of each expert, gated by SiLU.
        routing: which experts a token gets.
        bias: float32 [experts], added to the weights of experts for the choice alone (GLM-4.5), or None.
        shared: what all tokens get besides (GLM-4.5), or None.
    """

    router: Projection
    gate_up: tuple[Projection, ...]
    down: tuple[Projection, ...]
    routing: Routing
    bias: Tensor | None = None
    shared: GatedMLP | None = None

    @classmethod
    def of(cls, block: Any) -> Experts:
        """Return those of a block of transformers."""
        router, experts = block.gate, block.experts
        if isinstance(experts, PackedExperts):
            gate_up = [Projection((), parts=parts) for parts in experts.gate_up.parts]
            down = [Projection((), parts=parts) for parts in experts.down.parts]
        else:
            gate_up = [Projection((), weight) for weight in experts.gate_up_proj.data]
            down = [Projection((), weight) for weight in experts.down_proj.data]
        bias, shared = getattr(router, "e_score_correction_bias", None), getattr(block, "shared_experts", None)
        factor = float(getattr(router, "routed_scaling_factor", 1.0))
        routing = Routing(router.top_k, bias is not None, getattr(router, "norm_topk_prob", True), factor)
        return cls(
            Projection((), router.weight.data), tuple(gate_up), tuple(down), routing,
            None if bias is None else bias.float().contiguous(), None if shared is None else GatedMLP.of(shared),
        )  # fmt: skip

    @property
    def products(self) -> tuple[Projection, ...]:
        """All products."""
        return self.router, *self.gate_up, *self.down, *(() if self.shared is None else self.shared.products)

    def add_to(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """``residual + experts(rms_norm(x))``; x [rows, hidden]."""
        return self(x, norm, residual)

    def __call__(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        """``experts(rms_norm(x))``, [rows, hidden], and the residual if there is one."""
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
