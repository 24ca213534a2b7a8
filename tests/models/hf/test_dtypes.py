"""Sixteen-bit models: kvsift is no further from float32 than twice what eager attention in the same dtype is."""

import pytest
import torch
from models.tiny import CACHED, FAMILIES, SPARSE, assert_sparse, covered, greedy, logits, prompt, ragged, tiny

import kvsift

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


@pytest.mark.parametrize("family", FAMILIES)
@dtypes
def test_logits_are_as_near_to_float32_as_those_of_eager_attention(family: str, dtype: torch.dtype) -> None:
    batch = ragged(90, 61)
    real = batch["attention_mask"].bool()
    exact = logits(tiny(family), **batch)[real]
    model = tiny(family).to(dtype)
    eager = logits(model, **batch)[real]
    with covered(model):
        ours = logits(model, **batch)[real]
    assert ours.dtype == dtype
    # the median over tokens: now and then a rounding sends a token to another expert
    far, near = ((answer.float() - exact).norm(dim=-1).median() for answer in (ours, eager))
    assert far <= 2 * near


@pytest.mark.parametrize("family", CACHED)
@dtypes
def test_a_sparse_run_of_a_padded_batch_stays_finite(family: str, dtype: torch.dtype) -> None:
    model = tiny(family).to(dtype)
    with kvsift.sparse(model, SPARSE) as run:
        first = greedy(model, **ragged(150, 121), num_new=3)
        assert first.shape == (2, 3)
        logits_alone = logits(model, prompt(121, seed=1))
    assert torch.isfinite(logits_alone).all()
    assert_sparse(run)
