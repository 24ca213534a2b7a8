"""Sampling: repeatable from its seed alone, faithful to the distribution it says it draws from."""

from collections import Counter
from math import inf, nan
from typing import Any

import pytest
import torch
from refusals import refused
from transformers import RepetitionPenaltyLogitsProcessor

from kvsift import Sampling
from kvsift.engine.sampling import ConstrainedChooser, draw, gumbel, likeliest

CPU = torch.device("cpu")
SHARES = torch.tensor([0.1, 0.4, 0.2, 0.3])


def draws(sampling: Sampling, count: int, logits: torch.Tensor | None = None) -> list[int]:
    choose = sampling.chooser(CPU)
    return [choose(SHARES.log() if logits is None else logits) for _ in range(count)]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draws(Sampling(), 3) == [1, 1, 1]


def test_one_seed_draws_the_same_whatever_the_global_generator_and_leaves_it_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = draws(Sampling(1.0, seed=7), 50)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert draws(Sampling(1.0, seed=7), 50) == first
    assert draws(Sampling(1.0, seed=8), 50) != first


def test_100_000_draws_are_of_their_distribution() -> None:
    """Chi-square with 6 degrees of freedom: beyond 22.5 in one of a thousand runs, and the seed is fixed."""
    count, shares = 100_000, torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01], dtype=torch.float64)
    one = torch.ones(count, dtype=torch.float64)
    tokens, _ = draw(shares.log().float().expand(count, -1), one, Sampling(1.0, seed=5).noise(count))
    found = tokens.bincount(minlength=len(shares)).double()
    assert float(((found - count * shares) ** 2 / (count * shares)).sum()) < 22.5


def test_the_noise_of_neighbouring_tokens_and_numbers_is_independent() -> None:
    noise = gumbel(torch.arange(400).unsqueeze(1), torch.arange(500))
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(1.645, abs=0.05)
    along_tokens = torch.corrcoef(torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()]))[0, 1]
    along_numbers = torch.corrcoef(torch.stack([noise[:-1].flatten(), noise[1:].flatten()]))[0, 1]
    assert abs(float(along_tokens)) < 0.02
    assert abs(float(along_numbers)) < 0.02


def test_nearly_the_same_logits_draw_the_same_tokens() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    near = logits + 0.05 * torch.randn(1000, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(1.0, seed=2)
    pairs = list(zip(draws(sampling, 400, logits), draws(sampling, 400, near)))
    assert sum(a == b for a, b in pairs) > 370
    assert len({a for a, _ in pairs}) > 100


def test_what_will_be_drawn_can_be_foreseen() -> None:
    choose, logits = Sampling(1.0, seed=3).chooser(CPU), SHARES.log()
    foreseen = [choose.foresee(logits, ahead) for ahead in range(600)]
    assert [choose(logits) for _ in range(600)] == foreseen


def test_temperature_sharpens_and_flattens() -> None:
    expected = SHARES**2 / (SHARES**2).sum()
    counts = Counter(draws(Sampling(0.5), 4000))
    assert counts[1] / 4000 == pytest.approx(float(expected[1]), abs=0.032)


def test_top_p_draws_from_the_fewest_tokens_that_reach_it() -> None:
    counts = Counter(draws(Sampling(1.0, top_p=0.65), 4000))  # 0.4 and 0.3 reach it
    assert set(counts) == {1, 3}
    assert counts[1] / 4000 == pytest.approx(4 / 7, abs=0.032)


def test_top_k_and_min_p_draw_from_the_likeliest_tokens() -> None:
    assert set(draws(Sampling(1.0, top_k=2), 400)) == {1, 3}
    assert set(draws(Sampling(1.0, min_p=0.7), 400)) == {1, 3}  # of 0.4, which is the largest, 0.3 is 0.75
    assert set(draws(Sampling(1.0, min_p=1.0), 40)) == {1}
    # of the two that top_k leaves the first has 4/7
    assert set(draws(Sampling(1.0, top_p=0.57, top_k=2), 400)) == {1}


def penalised(sampling: Sampling, logits: list[float], prompt: list[int], answer: list[int]) -> list[float]:
    """The logits from which a token is chosen after the prompt and these tokens of the answer."""
    choose = ConstrainedChooser(sampling, prompt, 10, CPU)
    for token in answer:
        choose(torch.zeros(len(logits)), token)
    found: list[float] = choose._changed(torch.tensor(logits), len(prompt) + len(answer)).tolist()
    return found


def test_penalties_and_bias_change_logits_as_openai_and_transformers_do() -> None:
    logits, prompt, answer = [1.0, -1.0, 2.0, 3.0, 0.5], [0, 1, 1], [2, 2, 3]
    assert penalised(Sampling(frequency_penalty=0.5), logits, prompt, answer) == [1.0, -1.0, 1.0, 2.5, 0.5]
    assert penalised(Sampling(presence_penalty=0.5), logits, prompt, answer) == [1.0, -1.0, 1.5, 2.5, 0.5]
    assert penalised(Sampling(repetition_penalty=2.0), logits, prompt, answer) == [0.5, -2.0, 1.0, 1.5, 0.5]
    assert penalised(Sampling(logit_bias={4: 3.0, 0: -100.0}), logits, prompt, answer) == [-99.0, -1.0, 2.0, 3.0, 3.5]
    stock = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([prompt + answer]), torch.tensor([logits]))
    assert stock[0].tolist() == [0.5, -2.0, 1.0, 1.5, 0.5]


def test_a_sequence_draws_what_it_draws_alone() -> None:
    """Sorted beside sequences that have a top_p, unsorted without."""
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    temperature = torch.tensor([0.8, 1.0, 0.0], dtype=torch.float64)
    samplings = Sampling(), Sampling(top_p=0.5, top_k=300, min_p=0.01), Sampling()
    limits = torch.tensor([sampling.limits for sampling in samplings], dtype=torch.float64).T
    for seed in range(200):
        noise = Sampling(1.0, seed=seed).noise(3)
        together, _ = draw(logits, temperature, noise, limits)
        assert torch.equal(draw(logits, temperature, noise)[0][[0, 2]], together[[0, 2]])
        one = slice(1, 2)
        assert torch.equal(draw(logits[one], temperature[one], noise[one], limits[:, one])[0], together[one])


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_p=1e-9), Sampling(1e-3), Sampling(1e-300), Sampling(5e-324)])
def test_the_limit_of_each_knob_is_greedy(sampling: Sampling) -> None:
    assert set(draws(sampling, 20)) == {1}
    wide = 100 * torch.randn(50, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert set(draws(sampling, 20, wide)) == {int(wide.argmax())}


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": nan},
        {"temperature": "1"},
        {"temperature": inf},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": nan},
        {"top_p": None},
        {"top_k": -1},
        {"top_k": 1.5},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"frequency_penalty": inf},
        {"presence_penalty": "1"},
        {"repetition_penalty": 0},
        {"logit_bias": [3]},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {3: nan}},
        {"seed": -1},
        {"seed": 1.5},
        {"seed": 10**30},
    ],
)
def test_a_knob_out_of_range_is_refused_by_name(bad: dict[str, Any]) -> None:
    with refused(f"invalid_value: {next(iter(bad))}"):
        Sampling(**bad)


@pytest.mark.parametrize("vocabulary", [256, 4096, 37, 1000])  # in 256 parts, in more, not divisible
def test_the_likeliest_token_is_the_first_of_the_largest_logits(vocabulary: int) -> None:
    logits = torch.randint(0, 5, (3, vocabulary), generator=torch.Generator().manual_seed(0)).float()
    best, tokens = likeliest(logits)
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(best, logits.amax(-1))


def test_answers_that_begin_at_seeds_side_by_side_share_no_seed() -> None:
    seeds = [Sampling(1.0, seed=seed).nth(number).seed for seed in range(40) for number in range(25)]
    assert len(set(seeds)) == len(seeds)
    assert Sampling(0.7, 0.9, 3).nth(0) == Sampling(0.7, 0.9, 3)
    assert Sampling(0.7, 0.9, 3).nth(5).top_p == 0.9


def test_what_chooses_makes_nothing_on_its_device_before_the_first_token() -> None:
    assert Sampling(temperature=0.8).chooser(torch.device("cuda"))  # whether there is one or not
