"""Tokens drawn by the core, against the reference of ``engine.sampling``."""

from __future__ import annotations

from math import inf, isnan, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsift import native
from kvsift.engine.sampling import draw_by_torch
from kvsift.native.draw import draw, exclude
from kvsift.native.loader import core

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled core is missing")
SHARES = st.floats(1e-9, 1)
LIMITS = st.tuples(st.just(1.0) | SHARES, st.just(inf) | st.integers(1, 400).map(float), st.just(0.0) | SHARES)


@st.composite
def drawn_logits(draw: st.DrawFn) -> torch.Tensor:
    count = draw(st.sampled_from([1, 2, 31, 255, 256, 257, 1000, 5003]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    logits = torch.randn(count, generator=generator) * draw(st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0, 100.0]))
    if draw(st.booleans()):  # many are equal
        logits = logits.bfloat16().float()
    if draw(st.booleans()):
        logits[torch.rand(count, generator=generator) < draw(st.floats(0, 0.999))] = -inf
        logits[draw(st.integers(0, count - 1))] = 0.5
    return logits


@pytest.mark.parametrize("level", native.levels() if native.available() else [])
@given(
    logits=drawn_logits(),
    temperature=st.sampled_from([1e-320, 1e-30, 1e-4, 0.1, 0.6, 1.0, 1.7, 50.0, 1e30, 1e308]),
    noise=st.integers(0, (1 << 62) - 1),
    limits=LIMITS,
)
@settings(max_examples=300, deadline=None)
def test_tokens_are_those_of_the_reference(
    level: str, logits: torch.Tensor, temperature: float, noise: int, limits: tuple[float, float, float]
) -> None:
    numbers = torch.tensor([[temperature], *([limit] for limit in limits)], dtype=torch.float64)
    expected, best = draw_by_torch(logits[None], numbers[0], torch.tensor([noise]), numbers[1:])
    before = native.level()
    native.use_level(level)
    try:
        assert draw(logits, temperature, noise, limits) == (int(expected), float(best))
    finally:
        native.use_level(before)


@pytest.mark.parametrize("wrong", [nan, inf])
@pytest.mark.parametrize("place", [0, 40, 256, 299])
def test_a_logit_that_is_no_number_shows(wrong: float, place: int) -> None:
    logits = torch.zeros(300)
    logits[place] = wrong
    for found in (draw(logits, 1.0, 1, (0.9, 10.0, 0.0)), likeliest(logits), likeliest(logits.bfloat16())):
        assert isnan(found[1]) if isnan(wrong) else found[1] == inf


def likeliest(logits: torch.Tensor) -> tuple[int, float]:
    return core.likeliest(logits.dtype == torch.bfloat16, logits.data_ptr(), len(logits))  # type: ignore[no-any-return]


@pytest.mark.parametrize("level", native.levels() if native.available() else [])
@given(logits=drawn_logits(), short=st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_likeliest_token_is_the_first_of_equals(level: str, logits: torch.Tensor, short: bool) -> None:
    logits = logits.bfloat16() if short else logits
    before = native.level()
    native.use_level(level)
    try:
        assert likeliest(logits) == (int(logits.float().argmax()), float(logits.max()))
    finally:
        native.use_level(before)


@pytest.mark.parametrize("level", native.levels() if native.available() else [])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 100, 1000])
def test_tokens_whose_bit_is_zero_are_excluded(level: str, count: int) -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (-(-count // 32),), dtype=torch.int32)
    logits, before = torch.randn(count), native.level()
    may = (bits.repeat_interleave(32) >> torch.arange(32).repeat(len(bits)) & 1).bool()[:count]
    expected = logits.masked_fill(~may, -inf)
    native.use_level(level)
    try:
        exclude(logits, bits)
    finally:
        native.use_level(before)
    assert torch.equal(logits, expected)
