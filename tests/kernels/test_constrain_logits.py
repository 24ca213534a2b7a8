"""Logits under penalties, biases and masks: the twin against the reference, bit for bit."""

import pytest
import torch
from kernels.conftest import DEVICE, needs_triton

from kvsift.kernels.constrain_logits import IN_PROMPT, constrain_logits_reference, constrain_logits_triton

NEUTRAL = 1.0, 0.0, 0.0


def drawn(vocabulary: int, penalties: list[tuple[float, float, float]]) -> tuple[torch.Tensor, ...]:
    """What the kernel takes, for sequences of these penalties."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 8 * torch.randn(len(penalties), vocabulary, generator=generator)
    logits[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])[: min(3, vocabulary)]
    counts = torch.randint(-5, 4, logits.shape, generator=generator).clamp_min(0)
    counts += IN_PROMPT * torch.randint(2, logits.shape, generator=generator)
    bias = torch.randn(logits.shape, generator=generator) * (torch.rand(logits.shape, generator=generator) < 0.1)
    words = torch.randint(-(1 << 31), 1 << 31, (len(penalties), -(-vocabulary // 32)), generator=generator)
    case = logits, counts.to(torch.int32), torch.tensor(penalties).T.contiguous(), bias, words.to(torch.int32)
    return tuple(each.to(DEVICE) for each in case)


@needs_triton
@pytest.mark.parametrize("vocabulary", [1, 31, 259, 1024, 2100])  # below, at and across the tile and a word
def test_the_twin(vocabulary: int) -> None:
    case = drawn(vocabulary, [NEUTRAL, (1.3, 0.37, 0.2), (0.7, -0.11, 1.9)])
    found, expected = (run(*case) for run in (constrain_logits_triton, constrain_logits_reference))
    assert torch.equal(found.nan_to_num(nan=1e30), expected.nan_to_num(nan=1e30))


def test_a_sequence_without_constraints_has_its_own_logits() -> None:
    logits, counts, penalties, bias, words = drawn(300, [NEUTRAL, (2.0, 1.0, 1.0)])
    bias[0], words[0] = 0.0, -1
    found = constrain_logits_reference(logits, counts, penalties, bias, words)
    assert torch.equal(found[0].nan_to_num(), logits[0].nan_to_num())
    assert not torch.equal(found[1], logits[1])
