"""Sketches of pages: what they hold, and how near their estimates are."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvsift import native
from kvsift.kernels.page_summary import row_format, summarise
from kvsift.kernels.sketch import SKETCHES, estimated_logits, sketch_rows, sketch_rows_reference, unpack
from kvsift.native.sketch_format import SketchLayout, random_rotation

CPU = torch.device("cpu")


def draw(heads: int, pages: int, page_size: int, head_dim: int, seed: int = 0) -> Tensor:
    """Keys whose pages differ more than the tokens of a page do."""
    generator = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(heads, pages, 1, head_dim, generator=generator)
    return means + torch.randn(heads, pages, page_size, head_dim, generator=generator)


def estimates(queries: Tensor, keys: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    rows = sketch_rows(bits, keys, torch.zeros_like(keys))
    return estimated_logits(queries, unpack(rows, SketchLayout(bits, keys.shape[3], keys.shape[2])), bits)


def exact(queries: Tensor, keys: Tensor) -> Tensor:
    grouped = queries.unflatten(0, (len(keys), -1)).flatten(1, 2)
    return (grouped @ keys.flatten(1, 2).mT).view(*queries.shape[:2], -1)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 192, 256])
def test_a_rotation_keeps_lengths_and_spreads_every_channel(head_dim: int) -> None:
    matrix = random_rotation(head_dim, CPU)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(head_dim), atol=2e-6, rtol=0)
    assert float(matrix.abs().max()) <= 2 / math.sqrt(head_dim), "some channel stays by itself"
    assert float((matrix > 0).float().mean(1).sub(0.5).abs().max()) <= 0.5


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize(("head_dim", "page_size"), [(128, 16), (64, 16), (80, 32), (24, 4), (128, 5)])
def test_estimates_have_no_bias_and_the_stated_variance(bits: int, head_dim: int, page_size: int) -> None:
    keys = draw(2, 8192 // page_size, page_size, head_dim)
    queries = torch.randn(8, 2, head_dim, generator=torch.Generator().manual_seed(1)) / math.sqrt(head_dim)
    logits, variance = estimates(queries, keys, bits)
    errors = logits - exact(queries, keys)
    deviation = float(variance.mean()) ** 0.5
    assert abs(float(errors.mean())) < 0.03 * deviation + 0.002
    assert 0.75 < float(errors.var() / variance.mean()) < 1.35, "in narrow heads channels are no more Gaussian"
    assert deviation < {1: 0.8, 2: 0.4}[bits]


@pytest.mark.parametrize("bits", [1, 2])
def test_the_variance_makes_up_for_what_noise_does_to_an_exponential(bits: int) -> None:
    queries = torch.randn(16, 1, 128, generator=torch.Generator().manual_seed(3))
    keys, queries = draw(1, 2048, 16, 128), 2.5 * queries / math.sqrt(128)
    logits, variance = estimates(queries, keys, bits)
    true = exact(queries, keys).logsumexp(-1)
    overstated = (logits.logsumexp(-1) - true).mean()
    assert abs(float(((logits - variance / 2).logsumexp(-1) - true).mean())) < 0.5 * float(overstated)


@pytest.mark.parametrize("bits", [1, 2])
def test_a_page_of_one_key_is_estimated_from_its_mean(bits: int) -> None:
    keys = draw(2, 12, 1, 64).expand(-1, -1, 16, -1)
    queries = torch.randn(4, 1, 64)
    logits, _ = estimates(queries, keys, bits)
    step = float(keys.abs().max()) / 7  # of a mean: at most half of it is missed of each channel
    assert float((logits - exact(queries, keys)).abs().max()) < step * math.sqrt(64)


def test_codes_are_the_signs_of_rotated_differences_from_the_mean() -> None:
    keys, layout = draw(2, 3, 16, 80), SketchLayout(1, 80, 16)
    rows = sketch_rows(1, keys, keys)
    assert rows.shape == (2, 3, layout.width)
    parts = unpack(rows, layout)
    residual = keys @ random_rotation(80, CPU) - parts.key_means.unsqueeze(2)
    assert torch.equal(parts.codes.view(2, 3, 16, 80) > 0, residual >= 0)
    torch.testing.assert_close(parts.value_means, keys.mean(2), atol=float(keys.mean(2).abs().max()) / 13, rtol=0)


@pytest.mark.parametrize("kind", SKETCHES)
def test_slots_without_a_token_hold_anything(kind: str) -> None:
    keys, values = draw(2, 3, 8, 32), draw(2, 3, 8, 32, seed=1)
    valid = torch.arange(8) < torch.tensor([8, 5, 1]).unsqueeze(1)
    poisoned = [tensor.masked_fill(~valid.unsqueeze(-1), torch.nan) for tensor in (keys, values)]
    rows = summarise(kind, poisoned[0], valid, poisoned[1])
    assert rows.shape[2] == row_format(kind, 32, 8)[0]
    layout = SketchLayout(SKETCHES[kind], 32, 8)
    parts = unpack(rows, layout)
    assert all(bool(tensor.isfinite().all()) for tensor in parts)
    short = unpack(sketch_rows(layout.bits, keys[:, 1:2, :5], values[:, 1:2, :5]), replace(layout, page_size=5))
    for whole, cut in (
        (parts.key_means[:, 1], short.key_means[:, 0]),
        (parts.value_means[:, 1], short.value_means[:, 0]),
    ):
        assert torch.equal(whole, cut)
    assert torch.equal(parts.factors.view(2, 3, 8)[:, 1, :5], short.factors)
    assert not parts.factors.view(2, 3, 8)[:, 1, 5:].any()


@pytest.mark.skipif(not native.available(), reason="the compiled core is missing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "head_dim", "page_size"), [(1, 128, 16), (2, 128, 16), (1, 80, 5), (2, 24, 32)])
def test_the_compiled_core_writes_the_same_rows_up_to_rounding(
    bits: int, head_dim: int, page_size: int, dtype: torch.dtype
) -> None:
    keys, values = (draw(3, 70, page_size, head_dim, seed).to(dtype) for seed in (0, 1))
    layout, valid = SketchLayout(bits, head_dim, page_size), torch.arange(70 * page_size).view(70, page_size) % 7 > 1
    valid[:, 0] = True
    poisoned = keys.masked_fill(~valid.unsqueeze(-1), torch.nan)
    for given, there in ((keys, None), (poisoned, valid), (poisoned[:, 5:9], valid[5:9])):
        own = values[:, 5:9] if given.shape[1] == 4 else values
        found, expected = (
            native.sketch_rows(layout, given, own, there),
            sketch_rows_reference(layout, given, own, there),
        )
        assert float((found != expected).float().mean()) < 2e-3
        parts, others = unpack(found, layout), unpack(expected, layout)
        assert float((parts.codes != others.codes).float().mean()) < 2e-3
        assert float(((parts.factors - others.factors).abs() > 2e-3 * others.factors).float().mean()) < 5e-3
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            assert torch.equal(native.sketch_rows(layout, given, own, there), found), "threads change the rows"
        finally:
            torch.set_num_threads(threads)
