"""Gated delta nets token by token: the reference is transformers' module, the twin as near to it as its dtype."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, crossed, needs_triton
from kernels.paged_cases import distance
from models.tiny import tiny
from torch import Tensor
from transformers import DynamicCache

from kvsift.kernels.delta_step import DeltaNet, delta_step, delta_step_reference, delta_step_triton
from kvsift.kernels.linear import gate_heads, gate_heads_triton
from kvsift.models.decoder import LayerWeights

PLACES = 4
SHAPES = [  # (key heads, value heads, key_dim, value_dim, taps)
    (2, 4, 16, 16, 4),  # the usual, in small
    (1, 3, 12, 24, 3),  # nothing a power of two
    (2, 2, 16, 8, 2),  # no key head shared
]
if DEVICE == "cuda":
    SHAPES.append((16, 48, 128, 128, 4))
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3Next"])
def test_the_reference_is_the_module_of_transformers(family: str, dtype: torch.dtype) -> None:
    changes = DELTA if family == "Qwen3_5" else {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16}
    model = tiny(family, **changes).to(DEVICE, dtype)
    layer, cache = model.model.layers[0], DynamicCache(config=model.config)
    torch.manual_seed(2)
    with torch.inference_mode():
        layer.linear_attn(torch.randn(2, 7, 32, device=DEVICE, dtype=dtype), cache_params=cache)
        kept = cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]
        conv, states = (torch.stack([state, *[torch.full_like(state, torch.nan)] * (PLACES - 1)]) for state in kept)
        weights = LayerWeights.of(deepcopy(layer), False, [""])
        assert weights.net is not None
        assert weights.ba is None
        for number in range(1, 7):
            x = torch.randn(2, 1, 32, device=DEVICE, dtype=dtype)
            expected = layer.linear_attn(x, cache_params=cache)[:, 0]
            inputs, step = weights.qkv(x[:, 0]), torch.tensor([number], device=DEVICE)
            qkvz, ba = inputs[:, :-12], inputs[:, -12:]
            found = weights.output(delta_step(qkvz, ba, weights.net, conv, states, step))
            close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
            torch.testing.assert_close(found, expected, **close)
            torch.testing.assert_close(states[number % PLACES], kept[1], **close)
            torch.testing.assert_close(conv[number % PLACES], kept[0], **close)


def draw(shape: tuple[int, ...], rows: int, by_key_head: bool, dtype: torch.dtype) -> dict[str, Any]:
    """A step of so many rows, whose states have room for one more."""
    (key_heads, value_heads, key_dim, value_dim, taps), made = shape, torch.Generator().manual_seed(sum(shape))
    keys, values = key_heads * key_dim, value_heads * value_dim

    def some(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=made).to(DEVICE, dtype)

    net = DeltaNet(
        some(2 * keys + values, taps), some(value_heads), 3 * some(value_heads), 1 + some(value_dim) / 4, 1e-6,
        key_heads, key_dim, by_key_head,
    )  # fmt: skip
    every = some(rows, 2 * keys + 2 * values + 2 * value_heads)
    states = torch.randn(PLACES, rows + 1, value_heads, key_dim, value_dim, generator=made).to(DEVICE)
    return {
        "qkvz": every[:, : 2 * keys + 2 * values], "ba": 9 * every[:, -2 * value_heads :], "net": net,
        "conv": some(PLACES, rows + 1, 2 * keys + values, taps), "states": states,
    }  # fmt: skip


def copied(case: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """A copy, in another dtype."""
    net = case["net"]
    wide = {name: value.clone().to(dtype or value.dtype) for name, value in case.items() if name != "net"}
    return wide | {"net": net._make(each.to(dtype) if dtype and isinstance(each, Tensor) else each for each in net)}


@needs_triton
@crossed(shape=SHAPES, rows=[1, 3], by_key_head=[False, True], dtype=DTYPES, number=[1, 2, 4, 11])
def test_the_twin_is_as_near_to_float64_as_the_reference(
    shape: tuple[int, ...], rows: int, by_key_head: bool, dtype: torch.dtype, number: int
) -> None:
    case, step = draw(shape, rows, by_key_head, dtype), torch.tensor([number], device=DEVICE)
    own, found, exact = copied(case), copied(case), copied(case, torch.float64)
    outputs = [delta_step_reference(**each, step=step) for each in (own, exact)]
    output = delta_step_triton(**found, step=step)
    floor = torch.finfo(torch.float32).eps * float(outputs[1].norm())
    assert distance(output, outputs[1]) <= 2 * max(distance(outputs[0], outputs[1]), floor)
    assert torch.equal(found["conv"], own["conv"])
    floor = torch.finfo(torch.float32).eps * float(exact["states"].norm())
    errors = [distance(each["states"], exact["states"]) for each in (found, own)]
    assert errors[0] <= 2 * max(errors[1], floor)
    untouched = [place for place in range(PLACES) if place != number % PLACES]
    for name in ("conv", "states"):
        assert torch.equal(found[name][untouched], case[name][untouched])
        assert torch.equal(found[name][:, rows], case[name][:, rows]), "a row that does not belong to the step"


@needs_triton
@pytest.mark.parametrize("by_key_head", [False, True])
def test_a_row_has_the_bits_that_it_has_alone(by_key_head: bool) -> None:
    case, step = draw(SHAPES[0], 3, by_key_head, torch.float16), torch.tensor([6], device=DEVICE)
    together, alone = copied(case), copied(case)
    output = delta_step_triton(**together, step=step)
    for row in range(3):
        one = {name: alone[name][row : row + 1] for name in ("qkvz", "ba")}
        rings = {name: alone[name][:, row : row + 1] for name in ("conv", "states")}
        assert torch.equal(delta_step_triton(**one, **rings, net=case["net"], step=step)[0], output[row])
    assert all(torch.equal(together[name], alone[name]) for name in ("conv", "states"))


@needs_triton
@crossed(heads=[(4, 16), (3, 12)], dtype=DTYPES)
def test_gates_of_heads_are_multiplied_with_what_they_attend(heads: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    attended = torch.randn(3, *heads).to(DEVICE, dtype)
    gates = torch.randn(3, heads[0], 2, heads[1]).to(DEVICE, dtype)[:, :, 1]
    exact = (attended.double() * gates.double().sigmoid()).flatten(1)
    own = (attended * gates.sigmoid()).flatten(1)
    floor = torch.finfo(torch.float32).eps * float(exact.norm())
    for found in (gate_heads(attended, gates), gate_heads_triton(attended, gates)):
        assert distance(found, exact) <= 2 * max(distance(own, exact), floor)
