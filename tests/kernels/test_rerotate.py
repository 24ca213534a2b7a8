"""Queries turned to other positions are those that the model would have made there."""

import pytest
import torch
from refusals import refused
from torch import Tensor

from kvsift.kernels.rerotate import rerotate
from kvsift.types import Rope

HEADS, TOKENS, DIM = 2, 5, 16


def rope(rotary_dim: int, interleaved: bool) -> Rope:
    return Rope(5e5 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim), interleaved)


def rotated(plain: Tensor, positions: Tensor, of: Rope) -> Tensor:
    """By the definition, pair by pair, in float64."""
    out = plain.double().clone()
    count = len(of.inv_freq)
    for pair, frequency in enumerate(of.inv_freq.double()):
        a, b = (2 * pair, 2 * pair + 1) if of.interleaved else (pair, pair + count)
        angle = positions.double() * frequency
        out[..., a] = plain[..., a] * angle.cos() - plain[..., b] * angle.sin()
        out[..., b] = plain[..., b] * angle.cos() + plain[..., a] * angle.sin()
    return out


@pytest.fixture
def plain() -> Tensor:
    return torch.randn(HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("rotary_dim", [DIM, 10])  # 10: partial rotary
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_turned_query_is_the_query_made_there(plain: Tensor, rotary_dim: int, interleaved: bool) -> None:
    of = rope(rotary_dim, interleaved)
    here, there = torch.tensor([0, 7, 100, 70_000, 131_071]), torch.tensor([131_072, 0, 131_500, 131_583, 131_072])
    turned = rerotate(rotated(plain, here, of).float(), here, there, of)
    torch.testing.assert_close(turned.double(), rotated(plain, there, of), rtol=0, atol=2e-6)
    assert torch.equal(turned[..., rotary_dim:], plain.float()[..., rotary_dim:])


def test_there_and_back_changes_nothing_but_the_last_digits(plain: Tensor) -> None:
    of, queries = rope(DIM, False), plain.float()
    here, there = torch.arange(TOKENS), torch.full((TOKENS,), 1_000_000)
    back = rerotate(rerotate(queries, here, there, of), there, here, of)
    torch.testing.assert_close(back, queries, rtol=0, atol=1e-6)
    assert torch.equal(rerotate(queries, there, there, of), queries)


def test_low_precision_is_rounded_once(plain: Tensor) -> None:
    of, queries = rope(DIM, True), plain.bfloat16()
    here, there = torch.arange(TOKENS), torch.arange(TOKENS) + 5000
    exact = rerotate(queries.float(), here, there, of)
    assert torch.equal(rerotate(queries, here, there, of), exact.bfloat16())


def test_what_does_not_fit_is_refused(plain: Tensor) -> None:
    positions = torch.arange(TOKENS)
    with refused("invalid_tensor"):
        rerotate(plain, positions[1:], positions[1:], rope(DIM, False))
    with refused("invalid_tensor"):
        rerotate(plain, positions, positions, rope(32, False))
