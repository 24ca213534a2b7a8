"""Keys and values in 8 bits with a scale per token and head, and attention over them."""

from __future__ import annotations

import pytest
import torch

from kvsift import native
from kvsift.native import twins
from kvsift.native.coded_rows import (
    coded_width,
    decode_rows,
    decode_rows_reference,
    encode_rows,
    encode_rows_reference,
)

needs_core = pytest.mark.skipif(not native.available(), reason="the compiled core is missing")


def test_a_worked_example() -> None:
    values = torch.tensor([[2.54, -1.0, 0.006, 0.0]])  # scale 2.54 / 127 = 0.02: codes 127, -50, 0.3, 0
    rows = encode_rows(values)
    assert rows.shape == (1, 8)
    assert rows[0, :4].tolist() == [127, -50, 0, 0]
    assert rows[:, 4:].view(torch.float32).item() == pytest.approx(0.02)
    torch.testing.assert_close(decode_rows(rows, torch.float32), torch.tensor([[2.54, -1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_is_off_by_half_a_step_of_its_own_token_at_most(dtype: torch.dtype) -> None:
    loud = torch.logspace(-3, 3, 50).unsqueeze(1)  # tokens of all sizes: none spoils another
    values = (torch.randn(3, 50, 16, generator=torch.Generator().manual_seed(0)) * loud).to(dtype)
    off = (decode_rows(encode_rows(values), torch.float32) - values.float()).abs()
    step = values.float().abs().amax(-1, keepdim=True) / 127
    assert bool((off <= 0.5001 * step).all())
    assert bool((off > 0.3 * step).any())


def test_nothing_but_zeros_stays_so() -> None:
    assert not decode_rows(encode_rows(torch.zeros(2, 3, 6)), torch.float32).any()


def test_a_row_takes_half_the_bytes_and_its_scale() -> None:
    assert coded_width(128) == 132
    assert encode_rows(torch.zeros(2, 3, 5, dtype=torch.bfloat16)).shape == (2, 3, 9)  # any head_dim


def keys_and_values(head_dim: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ones, some channels of the keys being far larger than the others, as in real models."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, length, head_dim, generator=generator) for _ in range(2))
    keys[..., 3] *= 20
    return keys, values


@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 128])  # 40 and 80: blocks of 8 and 16 that a transform mixes
def test_turned_keys_lose_less_to_large_channels(head_dim: int) -> None:
    keys, _ = keys_and_values(head_dim, 70)
    off = [
        (decode_rows(encode_rows(keys, turned=t), torch.float32, turned=t) - keys).square().mean()
        for t in (False, True)
    ]
    assert off[1] < 0.7 * off[0]


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_the_core_encodes_as_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    keys, values = (each.to(dtype) for each in keys_and_values(head_dim, 300))
    rows = encode_rows(values)
    assert torch.equal(rows, encode_rows_reference(values))
    assert torch.equal(decode_rows(rows, dtype), decode_rows_reference(rows, dtype))
    turned, same = encode_rows(keys, turned=True), encode_rows_reference(keys, turned=True)
    off = (turned[..., :head_dim].int() - same[..., :head_dim].int()).abs()  # sums of other orders, rarely
    assert off.max() <= 1
    assert off.float().mean() < 1e-3
    decoded = [decode(turned, torch.float32, turned=True) for decode in (decode_rows, decode_rows_reference)]
    torch.testing.assert_close(*decoded, rtol=1e-5, atol=1e-4)
    assert torch.equal(
        decode_rows(turned[:, 7:90], dtype, turned=True), decode_rows(turned, dtype, turned=True)[:, 7:90]
    )


@needs_core
def test_what_is_not_finite_stays_so_in_its_own_token() -> None:
    keys, _ = keys_and_values(16, 3)
    keys[0, 1, 5] = torch.nan
    keys[1, 2, 7] = torch.inf
    for turned in (False, True):
        finite = decode_rows(encode_rows(keys, turned=turned), torch.float32, turned=turned).isfinite().all(-1)
        assert finite.tolist() == [[True, False, True], [True, True, False]]


@needs_core
@pytest.mark.parametrize("head_dim", [8, 40, 64, 128])
@pytest.mark.parametrize("level", native.levels() if native.available() else [""])
def test_attention_over_coded_rows_is_that_over_what_they_say(level: str, head_dim: int) -> None:
    before = native.level()
    keys, values = keys_and_values(head_dim, 700)
    rows = encode_rows(keys, turned=True), encode_rows(values)
    queries = torch.randn(6, 5, head_dim, generator=torch.Generator().manual_seed(1))
    units, spans, scale = torch.tensor([[1, 4, 9], [0, 3, -1]]), [(0, 5), (500, 700)], head_dim**-0.5
    try:
        native.use_level(level)
        for run, *arguments in (
            ("attend_dense", queries), ("attend_units", queries[:, 0].contiguous(), units, 16, spans)
        ):  # fmt: skip
            first, *others = arguments
            output, lse = getattr(native, run)(first, *rows, *others, scale)
            expected, expected_lse = getattr(twins, run)(first, *rows, *others, scale)
            torch.testing.assert_close(output, expected, rtol=0, atol=1e-3)  # queries and weights have 16 bits
            torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
        scores, expected = native.all_scores(queries[:, 0], rows[0]), twins.all_scores(queries[:, 0], rows[0])
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    finally:
        native.use_level(before)


@needs_core
def test_tokens_that_are_not_attended_may_be_anything() -> None:
    keys, values = keys_and_values(32, 40)
    rows = encode_rows(keys, turned=True), encode_rows(values)
    query = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    expected = native.attend_units(query, *rows, torch.empty(2, 0, dtype=torch.int64), 1, [(0, 33)], 0.2)
    values[:, 33:] = torch.nan
    found = native.attend_units(
        query, rows[0], encode_rows(values), torch.empty(2, 0, dtype=torch.int64), 1, [(0, 33)], 0.2
    )
    assert torch.equal(found[0], expected[0])
    values[0, 3] = torch.nan
    spoiled = native.attend_units(
        query, rows[0], encode_rows(values), torch.empty(2, 0, dtype=torch.int64), 1, [(0, 33)], 0.2
    )
    assert spoiled[0][:2].isnan().all()
    assert torch.equal(spoiled[0][2:], expected[0][2:])
