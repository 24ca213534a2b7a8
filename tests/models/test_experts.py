"""Experts of transformers' blocks as steps take them: stacked with the shared ones, and one by one."""

from typing import Any

import pytest
import torch
from models.tiny import tiny
from torch import Tensor, nn

from kvsift.kernels.scaled_weight import ScaledStack, ScaledWeight
from kvsift.models.experts import STACKS, Experts, not_stacked, stack_of
from kvsift.models.quantized import put_weights

NORM = torch.full((32,), 1.25), 1e-6
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {},
    "Glm4Moe": {},
    "GptOss": {"num_local_experts": 8},
    "Qwen3Next": {
        "layer_types": ["full_attention"] * 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}  # fmt: skip


def block_of(family: str, in_8_bits: bool, **changes: Any) -> tuple[Any, Any]:
    """The last block of a family, and what it computes, with weights of its linear layers and experts rounded."""
    model = tiny(family, hidden_size=32, **{**FAMILIES[family], **changes}).requires_grad_(False)
    path = f"model.layers.{len(model.model.layers) - 1}.mlp"
    block, held = model.get_submodule(path), {}
    if family == "GptOss":
        block.experts.limit = 0.5  # so that it bites
    for name, module in block.named_modules() if in_8_bits else ():
        if isinstance(module, nn.Linear) and not name.endswith("expert_gate"):
            held[f"{path}.{name}.weight"] = weight = ScaledWeight.of(module.weight)
            module.weight.copy_(weight.expanded(torch.float32))
    for name in STACKS if in_8_bits else ():
        weight = stack_of(block.experts, name)
        held[f"{path}.experts.{name}"] = stack = ScaledStack.of(weight.contiguous())
        weight.copy_(stack.expanded(torch.float32))

    def exactly(x: Tensor) -> Tensor:
        normal = NORM[0] * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM[1])
        return x + block(normal.unsqueeze(0))[0].view(x.shape)

    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    expected = x, exactly(x)
    if held:
        put_weights(model, held)
    return model.get_submodule(path), expected


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_experts_is_the_block_of_transformers(family: str, in_8_bits: bool) -> None:
    block, (x, expected) = block_of(family, in_8_bits)
    assert not_stacked(block, torch.float32) is None
    for _ in range(2):  # the second time, weights lie behind one another already
        experts = Experts.of(block)
        assert (experts.stacks is not None) == (in_8_bits or family == "GptOss")
        torch.testing.assert_close(experts.step(x, NORM), expected, rtol=1e-4, atol=1e-4)
        if in_8_bits and family not in ("Qwen3Moe", "GptOss"):
            assert experts.stacks is not None
            shared = getattr(block, "shared_experts", None) or block.shared_expert
            of_last = experts.stacks.down.values[-1]  # type: ignore[union-attr]
            assert shared.down_proj.values.data_ptr() == of_last.data_ptr(), "nothing is stored twice"


def test_a_shared_expert_of_another_size_is_named() -> None:
    block, _ = block_of("Qwen3Next", True, shared_expert_intermediate_size=24)
    assert not_stacked(block, torch.float32) == "a shared expert of another size or format"
