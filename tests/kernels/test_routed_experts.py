"""A layer of experts in four launches: choices, gates and mixtures as near to float64 as the reference."""

from typing import Any

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, crossed, needs_triton
from kernels.paged_cases import distance
from torch import Tensor

from kvsift.kernels.float4_stack import (
    MOST_EXPONENT,
    Float4Stack,
    expand_float4_reference,
    expand_float4_triton,
)
from kvsift.kernels.routed_experts import (
    Clamps,
    ExpertStacks,
    choose_experts_reference,
    choose_experts_triton,
    choose_tiling,
    gate_experts_reference,
    gate_experts_triton,
    mix_experts_reference,
    mix_experts_triton,
    takes_stack,
)
from kvsift.kernels.scaled_weight import FP8, ScaledStack
from kvsift.kernels.streamed_experts import streams_experts
from kvsift.native.experts import Routing

SIZES = [(8, 2, 300, 40), (33, 3, 256, 24), (6, 6, 64, 256)]  # (experts, top_k, hidden, inter)
KINDS = ["plain", "output", "block", "float4"]
ROWS = [1, 3]
if DEVICE == "cuda":
    ROWS += [8, 9]
    SIZES += [(128, 8, 2048, 768), (512, 10, 2048, 512), (8, 4, 2880, 360)]


def stack(experts: int, num_out: int, num_in: int, kind: str, dtype: torch.dtype, draw: torch.Generator) -> Any:
    if kind == "float4":
        how: dict[str, Any] = {"dtype": torch.uint8, "generator": draw, "device": DEVICE}
        codes = torch.randint(256, (experts, num_out, num_in // 2), **how)
        return Float4Stack.of_codes(codes, torch.randint(119, 124, (experts, num_out, num_in // 32), **how))
    weight = torch.empty(experts, num_out, num_in, dtype=dtype, device=DEVICE).normal_(generator=draw)
    weight /= num_in**0.5
    if kind == "plain":
        return weight
    outs, ins = (1, num_in) if kind == "output" else (128, 128)
    scales = torch.rand(experts, -(-num_out // outs), -(-num_in // ins), generator=draw, device=DEVICE) + 0.5
    return ScaledStack(weight.to(FP8), scales, outs, ins)


def drawn(
    size: tuple[int, int, int, int], rows: int, dtype: torch.dtype, kind: str = "plain", shared: str = "none",
    sigmoid: bool = False, biased: bool = False,
) -> tuple[Tensor, tuple[Tensor, float], ExpertStacks]:  # fmt: skip
    (experts, top_k, hidden, inter), draw = size, torch.Generator().manual_seed(rows)
    x = torch.randn(rows, hidden, generator=draw).to(DEVICE, dtype)
    norm = (torch.rand(hidden, generator=draw) + 0.5).to(DEVICE, dtype), 1e-6
    router = torch.randn(experts + (shared == "gated"), hidden, generator=draw) / hidden**0.5
    bias = torch.randn(experts, generator=draw).to(DEVICE) if sigmoid else None
    every = experts + (shared != "none")
    kinds, biases = (kind, dtype, torch.Generator(DEVICE).manual_seed(rows)), list[Any]()
    if biased:  # and clamped where a tenth of the gates are
        widths = (experts,), (every, 2 * inter), (every, hidden)
        biases = [torch.randn(width, generator=draw).to(DEVICE, dtype) for width in widths] + [Clamps(1.702, 1.5)]
    return x, norm, ExpertStacks(
        router.to(DEVICE, dtype), stack(every, 2 * inter, hidden, *kinds), stack(every, hidden, inter, *kinds),
        Routing(top_k, sigmoid, normalised=not sigmoid or top_k > 2, factor=2.5 if sigmoid else 1.0), bias,
        shared != "none", shared == "gated", *biases,
    )  # fmt: skip


def in_float64(stacks: ExpertStacks, chosen: Tensor) -> tuple[ExpertStacks, Tensor]:
    """Only the experts that rows have, as all of them would take tens of gigabytes, and their numbers among these."""
    ids, places = chosen.long().unique(return_inverse=True)

    def wide(stack: Any) -> Tensor:
        if isinstance(stack, Tensor):
            return stack[ids].double()
        of_ids = stack.of_experts(ids)
        if isinstance(of_ids, Float4Stack):
            return of_ids.expanded(torch.float64)
        scales = of_ids.scales.double().repeat_interleave(of_ids.outs, 1)[:, : stack.shape[1]]
        return of_ids.values.double() * scales.repeat_interleave(of_ids.ins, 2)[..., : stack.shape[2]]

    biases = (None if each is None else each[ids].double() for each in (stacks.gate_up_bias, stacks.down_bias))
    return ExpertStacks(
        stacks.router.double(), wide(stacks.gate_up), wide(stacks.down), stacks.routing, stacks.bias, stacks.shared,
        stacks.gated, None, *biases, stacks.clamps,
    ), places  # fmt: skip


@needs_triton
@crossed(
    size=SIZES, rows=[1, 3], dtype=DTYPES, shared=["none", "plain", "gated"], routed=["softmax", "sigmoid", "biased"]
)  # fmt: skip
def test_rows_get_the_experts_of_the_reference(
    size: tuple[int, int, int, int], rows: int, dtype: torch.dtype, shared: str, routed: str
) -> None:
    shared = "plain" if routed == "biased" else shared  # a gate has no bias
    x, norm, stacks = drawn(size, rows, dtype, shared=shared, sigmoid=routed == "sigmoid", biased=routed == "biased")
    normal, chosen, weights = choose_experts_reference(x, norm, stacks)
    # two logits may be rounded to neighbours; with biases they are larger, up to 4, and so are the steps between these
    steps = (3 if routed == "biased" else 1) * (2e-2 if dtype == torch.bfloat16 else 2e-3)
    logits = torch.nn.functional.linear(normal.double(), stacks.router.double())
    if stacks.router_bias is not None:
        logits += stacks.router_bias.double()
    for _ in range(2):  # the second time with what the first one has left
        found = choose_experts_triton(x, norm, stacks)
        assert all(len(set(ids)) == stacks.per_row for ids in found[1].tolist())
        of_found, of_chosen = (
            logits.gather(1, ids.long().clamp(max=logits.shape[1] - 1)) for ids in (found[1], chosen)
        )
        torch.testing.assert_close(of_found, of_chosen, rtol=0, atol=steps if dtype != torch.float32 else 1e-6)
        assert torch.equal(found[1] == size[0], chosen == size[0])  # the shared one
        torch.testing.assert_close(found[0], normal)
        torch.testing.assert_close(found[2], weights, rtol=steps, atol=1e-6)


@needs_triton
@pytest.mark.parametrize("sigmoid", [False, True])
def test_the_first_of_equal_experts_is_chosen_whatever_the_logits(sigmoid: bool) -> None:
    x, norm, stacks = drawn((20, 4, 64, 16), 2, torch.float16, sigmoid=sigmoid)
    stacks.router[5:] = stacks.router[5]
    if stacks.bias is not None:
        stacks.bias.fill_(-2.0)
    chosen = choose_experts_reference(x, norm, stacks)[1]
    assert torch.equal(choose_experts_triton(x, norm, stacks)[1], chosen)
    stacks.router[:] = float("nan")  # as of a row that is only there to capture a step
    chosen = choose_experts_triton(x, norm, stacks)[1]
    assert chosen.min() >= 0
    assert chosen.max() < 20


@needs_triton
@crossed(size=SIZES, rows=ROWS, dtype=DTYPES, kind=KINDS, biased=[False, True])
def test_experts_are_gated_and_mixed(
    size: tuple[int, int, int, int], rows: int, dtype: torch.dtype, kind: str, biased: bool
) -> None:
    if kind != "plain" and dtype == torch.float32:
        dtype = torch.float16
    if kind == "float4":  # in whole blocks
        size = *size[:2], -(-size[2] // 32) * 32, -(-size[3] // 32) * 32
    x, norm, stacks = drawn(size, rows, dtype, kind, shared="plain", biased=biased)
    assert all(takes_stack(each, dtype) for each in (stacks.gate_up, stacks.down))
    normal, chosen, weights = choose_experts_reference(x, norm, stacks)
    wide, places = in_float64(stacks, chosen)
    exact = gate_experts_reference(normal.double(), places, wide)
    heads = gate_experts_reference(normal, chosen, stacks)
    plain = distance(heads, exact)
    assert distance(gate_experts_triton(normal, chosen, stacks), exact) <= max(2 * plain, 1e-6)
    exact = mix_experts_reference(heads.double(), places, weights.double(), x.double(), wide)
    plain = distance(mix_experts_reference(heads, chosen, weights, x, stacks), exact)
    assert distance(mix_experts_triton(heads, chosen, weights, x, stacks), exact) <= max(2 * plain, 1e-6)


@needs_triton
def test_4_bit_floats_of_all_exponents_are_expanded_exactly() -> None:
    exponents = torch.arange(1, MOST_EXPONENT + 1, dtype=torch.uint8).view(2, -1, 2)
    codes = torch.arange(32 * exponents.numel() // 2).to(torch.uint8).view(*exponents.shape[:2], -1)  # all bytes
    weights = Float4Stack.of_codes(codes.to(DEVICE), exponents.to(DEVICE))
    assert torch.equal(expand_float4_triton(weights, torch.float32), expand_float4_reference(weights, torch.float32))


@needs_triton
@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("size", SIZES[1:4:2])
def test_a_row_has_the_same_bits_alone_and_beside_others(size: tuple[int, int, int, int], kind: str) -> None:
    x, norm, stacks = drawn(size, 5, torch.float16, kind, shared="gated")
    normal, chosen, weights = choose_experts_triton(x, norm, stacks)
    mixed = mix_experts_triton(gate_experts_triton(normal, chosen, stacks), chosen, weights, x, stacks)
    alone = choose_experts_triton(x[2:3], norm, stacks)
    heads = gate_experts_triton(*alone[:2], stacks)
    assert torch.equal(mix_experts_triton(heads, *alone[1:], x[2:3], stacks)[0], mixed[2])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 11])
@pytest.mark.parametrize("alike", [False, True])  # all rows have the same experts
@pytest.mark.parametrize("kind", ["output", "block"])
@pytest.mark.parametrize("size", [(128, 8, 2048, 768), (5, 2, 384, 136), (64, 10, 5120, 512), (16, 1, 128, 128)])
def test_experts_that_are_read_once_give_what_those_of_each_row_give(
    size: tuple[int, int, int, int], kind: str, alike: bool, rows: int
) -> None:
    x, norm, stacks = drawn(size, rows, torch.bfloat16, kind, shared="plain")
    normal, chosen, weights = choose_experts_triton(x, norm, stacks)
    if alike:
        chosen = chosen[:1].repeat(rows, 1)
    assert streams_experts(normal, chosen, stacks.gate_up)
    heads = gate_experts_triton(normal, chosen, stacks, pdl=True)
    by_rows = gate_experts_triton(normal, chosen, stacks, tiling=choose_tiling(stacks.gate_up, True))
    torch.testing.assert_close(heads, by_rows, rtol=2e-2, atol=1e-2)
    if size[3] % 128 == 0:
        assert streams_experts(heads.flatten(0, 1), chosen, stacks.down)
    mixed = mix_experts_triton(heads, chosen, weights, x, stacks, pdl=True)
    tiling = choose_tiling(stacks.down, False)
    torch.testing.assert_close(
        mixed, mix_experts_triton(heads, chosen, weights, x, stacks, tiling=tiling), rtol=2e-2, atol=1e-2
    )
