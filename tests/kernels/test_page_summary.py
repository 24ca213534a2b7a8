"""Page summaries: bounds stay bounds in every dtype, estimates are what they say, padding counts for nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvsift.kernels.page_summary import SUMMARIES, page_scores, summarise

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
    valid = everything(keys)
    valid[-1, 1:] = False  # a page that was just begun
    keys = keys.masked_fill(~valid[..., None], torch.nan)
    queries = torch.randn(2, 5, head_dim, generator=torch.Generator().manual_seed(seed + 1)).to(dtype).float()
    rows = summarise(kind, keys, valid)
    assert rows.dtype == dtype
    bound = score(kind, queries, rows)
    exact = torch.einsum("hqd,hptd->hqpt", queries.double(), keys.double().nan_to_num(0.0))
    largest = exact.masked_fill(~valid, -torch.inf).amax(-1)
    # what float32 may lose in a sum of that many products; the rounding of the row itself gets no allowance
    slack = SUMMARIES[kind].features(queries).abs() @ rows.float().abs().mT * torch.finfo(torch.float32).eps * head_dim
    assert bool((bound.double() >= largest - slack).all())
    assert bool(bound.isfinite().all())


def test_the_minmax_score_of_a_page_is_the_sum_of_channelwise_maxima() -> None:
    keys = draw(0, 4, 8, 16, torch.float32, 1.0)
    queries = torch.randn(2, 3, 16)
    low, high = keys.amin(2), keys.amax(2)  # [2, num_pages, head_dim]
    formula = torch.maximum(queries[:, :, None] * low[:, None], queries[:, :, None] * high[:, None]).sum(-1)
    torch.testing.assert_close(score("minmax", queries, summarise("minmax", keys, everything(keys))), formula)


def test_mean_std_is_one_deviation_above_the_mean_logit() -> None:
    keys = draw(0, 4, 8, 16, torch.float32, 1.0)
    queries = torch.randn(2, 3, 16)
    mean, std = keys.mean(2), keys.std(2, unbiased=False)
    formula = queries @ mean.mT + queries.abs() @ std.mT
    torch.testing.assert_close(
        score("mean_std", queries, summarise("mean_std", keys, everything(keys))), formula, rtol=1e-4, atol=1e-4
    )


def test_centroid_radius_is_the_centroid_and_the_farthest_token() -> None:
    keys = draw(0, 4, 8, 16, torch.float32, 1.0)
    queries = torch.randn(2, 3, 16)
    mean = keys.mean(2)
    radius = (keys - mean.unsqueeze(2)).norm(dim=-1).amax(-1)
    formula = queries @ mean.mT + queries.norm(dim=-1, keepdim=True) * radius.unsqueeze(1)
    torch.testing.assert_close(
        score("centroid_radius", queries, summarise("centroid_radius", keys, everything(keys))), formula,
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip


def test_log_mass_estimates_the_log_mean_exponential_of_gaussian_logits() -> None:
    torch.manual_seed(0)
    keys, queries = torch.randn(2, 8, 512, 64), torch.randn(2, 5, 64) / 8  # logits of variance 1
    true = torch.einsum("hqd,hptd->hqpt", queries, keys).logsumexp(-1) - torch.log(torch.tensor(512.0))
    estimate = score("log_mass", queries, summarise("log_mass", keys, everything(keys)))
    assert float((estimate - true).abs().max()) < 0.25  # 512 samples know a log mean to about 0.1


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
    assert bool(rows.isfinite().all())
    cut = summarise(kind, keys[:, 1:2, :5], torch.ones(1, 5, dtype=torch.bool))
    torch.testing.assert_close(rows[:, 1:2], cut)
    for garbage in (torch.inf, -torch.inf, 3e4):
        assert torch.equal(summarise(kind, keys.masked_fill(~valid[..., None], garbage), valid), rows)


@pytest.mark.parametrize("kind", SUMMARIES)
def test_pages_are_summarised_one_by_one(kind: str) -> None:
    keys = draw(0, 5, 8, 16, torch.bfloat16, 1.0)
    together = summarise(kind, keys, everything(keys))
    alone = torch.cat([summarise(kind, keys[:, i : i + 1], torch.ones(1, 8, dtype=torch.bool)) for i in range(5)], 1)
    assert torch.equal(together, alone)


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


def test_large_float16_keys_do_not_overflow_the_score() -> None:
    """|q| |k| head_dim exceeds 65504, the largest float16: scores must be float32 all the way."""
    keys = torch.full((2, 3, 4, 64), 1000.0, dtype=torch.float16)
    for kind in SUMMARIES:
        rows = summarise(kind, keys, everything(keys))
        assert bool(score(kind, torch.full((2, 1, 64), 30.0), rows).isfinite().all())
