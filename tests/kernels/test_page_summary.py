"""Page summaries: bounds stay bounds in every dtype, estimates are what they say, padding counts for nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvsift.kernels.page_summary import FP8_LARGEST, SUMMARIES, page_scores, summarise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUNDS = [kind for kind, of in SUMMARIES.items() if of.is_bound]


def draw(seed: int, num_pages: int, page_size: int, head_dim: int, dtype: torch.dtype, size: float) -> Tensor:
    """Keys with an outlier channel and an offset, as real ones have."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, num_pages, page_size, head_dim, generator=generator)
    keys[..., 0] = 20 * keys[..., 0] + 7
    return (size * keys).to(dtype)


def everything(keys: Tensor) -> Tensor:
    return torch.ones(keys.shape[1:3], dtype=torch.bool)


def score(kind: str, queries: Tensor, rows: Tensor) -> Tensor:
    """[2, num_queries, num_pages] of scaled queries [2, num_queries, head_dim]."""
    return page_scores(SUMMARIES[kind].features(queries), rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", BOUNDS)
@settings(max_examples=40)
@given(
    seed=st.integers(0, 999), page_size=st.sampled_from([1, 3, 16]), head_dim=st.sampled_from([2, 64, 80]),
    size=st.sampled_from([1e-3, 1.0, 50.0]),
)  # fmt: skip
def test_a_bound_is_never_below_the_largest_logit_of_its_page(
    kind: str, dtype: torch.dtype, seed: int, page_size: int, head_dim: int, size: float
) -> None:
    keys = draw(seed, 6, page_size, head_dim, dtype, size)
    if SUMMARIES[kind].dtype is not None:
        keys = keys.clamp(-FP8_LARGEST, FP8_LARGEST)
    valid = everything(keys)
    valid[-1, 1:] = False  # a page that was just begun
    keys = keys.masked_fill(~valid[..., None], torch.nan)
    queries = torch.randn(2, 5, head_dim, generator=torch.Generator().manual_seed(seed + 1)).to(dtype).float()
    rows = summarise(kind, keys, valid)
    assert rows.dtype == (SUMMARIES[kind].dtype or dtype)
    bound = score(kind, queries, rows)
    exact = torch.einsum("hqd,hptd->hqpt", queries.double(), keys.double().nan_to_num(0.0))
    largest = exact.masked_fill(~valid, -torch.inf).amax(-1)
    # what float32 may lose in a sum of that many products; the rounding of the row itself gets no allowance
    slack = SUMMARIES[kind].features(queries).abs() @ rows.float().abs().mT * torch.finfo(torch.float32).eps * head_dim
    assert bool((bound.double() >= largest - slack).all())
    assert bool(bound.isfinite().all())


SAYABLE = 8 * torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # by a row of minmax_fp8
SAYABLE = SAYABLE[SAYABLE.isfinite()].unique()  # ascending


def check_rounded_outward(numbers: Tensor) -> None:
    """Pages of two tokens, a number and zero: the row holds the nearest numbers around them that e4m3 has."""
    numbers = numbers.flatten()
    keys = torch.stack([numbers, torch.zeros_like(numbers)], 1)[None, :, :, None]  # [1, num_pages, 2, 1]
    rows = summarise("minmax_fp8", keys, everything(keys))[0].float() * 8  # [num_pages, 2]
    high, low = (numbers.float().clamp_min(0), numbers.float().clamp_max(0))
    above = torch.searchsorted(SAYABLE, high.clamp_max(FP8_LARGEST))
    below = torch.searchsorted(SAYABLE, low.clamp_min(-FP8_LARGEST), right=True) - 1
    assert torch.equal(rows[:, 0], SAYABLE[above])
    assert torch.equal(rows[:, 1], SAYABLE[below])
    inside = numbers.float().abs() <= FP8_LARGEST
    assert bool(((rows[:, 0] >= high) & (rows[:, 1] <= low))[inside].all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_eight_bit_rows_round_every_16_bit_number_outward_to_the_next_they_have(dtype: torch.dtype) -> None:
    """Subnormal numbers and infinity included; what lies beyond the largest is cut off there."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    check_rounded_outward(numbers[~numbers.isnan()])


@settings(max_examples=300)
@given(numbers=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_eight_bit_rows_round_float32_outward(numbers: list[float]) -> None:
    check_rounded_outward(torch.tensor(numbers))


def test_a_key_that_is_nan_shows_in_an_eight_bit_row() -> None:
    keys = torch.tensor([1.0, torch.nan]).view(1, 1, 2, 1)
    assert bool(summarise("minmax_fp8", keys, everything(keys)).float().isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [kind for kind, of in SUMMARIES.items() if of.merge is not None])
def test_merged_rows_are_the_row_of_all_the_keys(kind: str, dtype: torch.dtype) -> None:
    keys = draw(0, 32, 4, 16, dtype, 1.0)
    merge = SUMMARIES[kind].merge
    assert merge is not None
    merged = merge(summarise(kind, keys, everything(keys)).unflatten(1, (2, 16)))  # [2, 2, width]
    together = keys.reshape(2, 2, 64, 16)
    assert torch.equal(merged.float(), summarise(kind, together, everything(together)).float())


def test_scores_are_those_of_their_formulas() -> None:
    """The sum of channelwise maxima; one deviation above the mean logit; the centroid and the farthest token."""
    keys, queries = draw(0, 4, 8, 16, torch.float32, 1.0), torch.randn(2, 3, 16)
    low, high, mean, std = keys.amin(2), keys.amax(2), keys.mean(2), keys.std(2, unbiased=False)
    radius = (keys - mean.unsqueeze(2)).norm(dim=-1).amax(-1)  # [2, num_pages]
    formulas = {
        "minmax": torch.maximum(queries[:, :, None] * low[:, None], queries[:, :, None] * high[:, None]).sum(-1),
        "mean_std": queries @ mean.mT + queries.abs() @ std.mT,
        "centroid_radius": queries @ mean.mT + queries.norm(dim=-1, keepdim=True) * radius.unsqueeze(1),
    }
    for kind, expected in formulas.items():
        found = score(kind, queries, summarise(kind, keys, everything(keys)))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SUMMARIES)
def test_what_is_not_valid_counts_for_nothing(kind: str, dtype: torch.dtype) -> None:
    keys = draw(0, 3, 8, 16, dtype, 1.0)
    valid = everything(keys)
    valid[1, 5:] = False
    valid[2, 1:] = False
    poisoned = keys.masked_fill(~valid[..., None], torch.nan)
    rows = summarise(kind, poisoned, valid)
    assert rows.shape == (2, 3, SUMMARIES[kind].width(16))
    assert bool(rows.float().isfinite().all())
    cut = summarise(kind, keys[:, 1:2, :5], torch.ones(1, 5, dtype=torch.bool))
    torch.testing.assert_close(rows[:, 1:2].float(), cut.float())
    for garbage in (torch.inf, -torch.inf, 3e4):
        again = summarise(kind, keys.masked_fill(~valid[..., None], garbage), valid)
        assert torch.equal(again.float(), rows.float())


@pytest.mark.parametrize("kind", SUMMARIES)
def test_pages_are_summarised_one_by_one(kind: str) -> None:
    keys = draw(0, 5, 8, 16, torch.bfloat16, 1.0)
    together = summarise(kind, keys, everything(keys))
    alone = torch.cat([summarise(kind, keys[:, i : i + 1], torch.ones(1, 8, dtype=torch.bool)) for i in range(5)], 1)
    assert torch.equal(together.float(), alone.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_page_scores_are_at_most_twice_as_far_from_float64_as_the_formula_in_float32(dtype: torch.dtype) -> None:
    keys = draw(3, 300, 4, 80, dtype, 1.0)
    rows = summarise("minmax", keys, everything(keys))
    queries = torch.randn(2, 7, 80, generator=torch.Generator().manual_seed(1))  # group of 7
    features = SUMMARIES["minmax"].features(queries)

    def formula(dtype: torch.dtype) -> Tensor:
        high, low = rows.to(dtype).chunk(2, -1)  # [2, num_pages, head_dim]
        q = queries.to(dtype)
        return q.clamp_min(0) @ high.mT + q.clamp_max(0) @ low.mT

    exact = formula(torch.float64)
    own = (formula(torch.float32).double() - exact).norm()
    scores = page_scores(features, rows)
    assert scores.dtype == torch.float32
    assert (scores.double() - exact).norm() <= 2 * own
