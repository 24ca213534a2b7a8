"""Tokens drawn by one launch, against torch."""

from __future__ import annotations

from math import inf, isnan, nan

import pytest
import torch

from kvsift.engine.sampling import draw_by_torch
from kvsift.kernels.draw_tokens import draw_tokens, draws

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LIMITS = [  # top_p, top_k, min_p of a sequence
    (1.0, inf, 0.0), (0.9037, inf, 0.0), (0.3019, inf, 0.0), (1e-9, inf, 0.0), (0.999999, inf, 0.0), (1.0, 1.0, 0.0),
    (1.0, 40.0, 0.0), (0.8071, 20.0, 0.0), (1.0, inf, 0.05), (1.0, inf, 1.0), (0.9533, 50.0, 0.01),
    (0.5057, 100_000.0, 1e-9),
]  # fmt: skip
TEMPERATURES = [0.0, 1e-320, 1e-30, 0.1, 0.6, 1.0, 1.7, 50.0, 1e30, 1e308]


@pytest.mark.parametrize("vocabulary", [1, 5, 31, 1000, 8191, 49152, 128256, 262144])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 100.0])
@pytest.mark.parametrize("rounded", [False, True])  # many are equal
def test_tokens_are_those_of_torch(vocabulary: int, spread: float, rounded: bool) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    rows = [(temperature, limits) for temperature in TEMPERATURES for limits in LIMITS]
    logits = torch.randn(len(rows), vocabulary, generator=generator) * spread
    if rounded:
        logits = logits.bfloat16().float()
    excluded = torch.rand(logits.shape, generator=generator) < torch.rand(len(rows), 1, generator=generator) - 0.3
    excluded[torch.arange(len(rows)), torch.randint(vocabulary, (len(rows),), generator=generator)] = False
    logits = logits.masked_fill(excluded, -inf).cuda()
    temperature = torch.tensor([temperature for temperature, _ in rows], dtype=torch.float64, device="cuda")
    limits = torch.tensor([limits for _, limits in rows], dtype=torch.float64, device="cuda").T.contiguous()
    noise = torch.randint(1 << 62, (len(rows),), generator=generator).cuda()
    assert draws(logits)
    for given in (limits, None):
        tokens, best = draw_tokens(logits, temperature, noise, given)
        expected = draw_by_torch(logits, temperature, noise, given)
        wrong = (tokens != expected[0]).nonzero().flatten().tolist()
        assert [(*rows[row], int(tokens[row]), int(expected[0][row])) for row in wrong] == []
        assert torch.equal(best, expected[1])
    alone = [draw_tokens(logits[[row]], temperature[[row]], noise[[row]], limits[:, [row]])[0] for row in range(20)]
    assert torch.equal(torch.cat(alone), draw_tokens(logits, temperature, noise, limits)[0][:20])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_as_good(dtype: torch.dtype) -> None:
    logits = torch.randn(12, 49_152, device="cuda").mul_(3).to(dtype)
    temperature = torch.linspace(0, 1.5, 12, dtype=torch.float64, device="cuda")
    limits = torch.tensor(LIMITS, dtype=torch.float64, device="cuda").T.contiguous()
    noise = torch.arange(12, device="cuda")
    for given in (limits, None):
        found = draw_tokens(logits, temperature, noise, given)
        assert all(map(torch.equal, found, draw_tokens(logits.float(), temperature, noise, given)))


@pytest.mark.parametrize("wrong", [nan, inf])
@pytest.mark.parametrize("place", [0, 40, 20_000, 29_999])
def test_a_logit_that_is_no_number_shows(wrong: float, place: int) -> None:
    logits = torch.zeros(1, 30_000, device="cuda")
    logits[0, place] = wrong
    ones = torch.ones(1, dtype=torch.float64, device="cuda")
    limits = torch.tensor([[0.9], [10.0], [0.0]], dtype=torch.float64, device="cuda")
    for temperature in (0 * ones, ones):
        best = float(draw_tokens(logits, temperature, torch.ones(1, dtype=torch.int64, device="cuda"), limits)[1])
        assert isnan(best) if isnan(wrong) else best == inf
