"""Sampling: repeatable from its seed alone, faithful to the distribution it says it draws from."""

from __future__ import annotations

from collections import Counter
from math import inf, nan
from pathlib import Path

import pytest
import torch
from engine.tiny_directory import text_of

from kvsift import LLM, InputError, Sampling
from kvsift.engine.sampling import likeliest

CPU = torch.device("cpu")
SHARES = torch.tensor([0.1, 0.4, 0.2, 0.3])


def draws(sampling: Sampling, count: int, logits: torch.Tensor | None = None) -> list[int]:
    choose = sampling.chooser(CPU)
    return [choose(SHARES.log() if logits is None else logits) for _ in range(count)]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draws(Sampling(), 3) == [1, 1, 1]


def test_one_seed_draws_the_same_whatever_the_global_generator() -> None:
    torch.manual_seed(1)
    first = draws(Sampling(1.0, seed=7), 50)
    torch.manual_seed(2)
    assert draws(Sampling(1.0, seed=7), 50) == first
    assert draws(Sampling(1.0, seed=8), 50) != first


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    draws(Sampling(1.0), 10)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_tokens_come_as_often_as_they_are_likely() -> None:
    counts = Counter(draws(Sampling(1.0), 4000))
    for token, share in enumerate(SHARES.tolist()):
        assert counts[token] / 4000 == pytest.approx(share, abs=0.03)  # 4 standard errors


def test_temperature_sharpens_and_flattens() -> None:
    expected = SHARES**2 / (SHARES**2).sum()
    counts = Counter(draws(Sampling(0.5), 4000))
    assert counts[1] / 4000 == pytest.approx(float(expected[1]), abs=0.032)


def test_top_p_draws_from_the_fewest_tokens_that_reach_it() -> None:
    counts = Counter(draws(Sampling(1.0, top_p=0.65), 4000))  # 0.4 and 0.3 reach it
    assert set(counts) == {1, 3}
    assert counts[1] / 4000 == pytest.approx(4 / 7, abs=0.032)


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_p=1e-9), Sampling(1e-3), Sampling(1e-300), Sampling(5e-324)])
def test_the_limit_of_each_knob_is_greedy(sampling: Sampling) -> None:
    assert set(draws(sampling, 20)) == {1}
    wide = 100 * torch.randn(50, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert set(draws(sampling, 20, wide)) == {int(wide.argmax())}


def test_a_sampled_answer_repeats_and_another_seed_differs(llama: Path) -> None:
    llm = LLM(llama, "dense")

    def tokens(seed: int) -> list[int]:
        return llm.generate(text_of(200), max_new_tokens=16, sampling=Sampling(1.0, 0.9, seed)).token_ids

    first = tokens(3)
    torch.manual_seed(99)
    assert tokens(3) == first
    assert tokens(4) != first


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": nan},
        {"temperature": inf},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": nan},
        {"seed": -1},
        {"seed": 10**30},
    ],
)
def test_a_knob_out_of_range_is_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(bad))}=.* must be"):
        Sampling(**bad)


@pytest.mark.parametrize("vocabulary", [256, 4096, 37, 1000])  # in 256 parts, in more, not divisible
def test_the_likeliest_token_is_the_first_of_the_largest_logits(vocabulary: int) -> None:
    logits = torch.randint(0, 5, (3, vocabulary), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(likeliest(logits), logits.argmax(-1))
