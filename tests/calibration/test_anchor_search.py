"""The search for anchors against every set of them."""

from itertools import combinations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from kvsift.calibration.anchor_search import Gains, best_anchors, choices, choose

SHARES = st.one_of(st.floats(0, 1), st.just(-inf))


@st.composite
def gain_tables(draw: st.DrawFn) -> list[list[float]]:
    """Of one to seven layers, some pairs of which cannot share."""
    count = draw(st.integers(1, 7))
    return [[1.0 if a == b else draw(SHARES) if a < b else -inf for b in range(count)] for a in range(count)]


def total(gains: Gains, anchors: tuple[int, ...]) -> float:
    """The sum where every layer takes the nearest anchor below; -inf if the first layer has none."""
    nearest = [max((a for a in anchors if a <= layer), default=None) for layer in range(len(gains))]
    return sum(-inf if a is None else gains[a][layer] for layer, a in enumerate(nearest))


@settings(max_examples=200)
@given(gains=gain_tables())
def test_no_set_of_as_many_anchors_gains_more(gains: list[list[float]]) -> None:
    found = best_anchors(gains)
    assert len(found) == len(gains)
    for number, anchors in enumerate(found, 1):
        best = max(total(gains, each) for each in combinations(range(len(gains)), number))
        if best == -inf:
            assert anchors == ()
            continue
        assert len(anchors) == number
        assert total(gains, anchors) == pytest.approx(best)


@settings(max_examples=100)
@given(gains=gain_tables(), least=st.floats(0, 1))
def test_the_smallest_number_leaves_no_layer_with_less(gains: list[list[float]], least: float) -> None:
    choice = choose(gains, None, least)
    assert choice.least >= least
    allowed = [[gain if gain >= least else -inf for gain in seq] for seq in gains]
    fewer = [anchors for number in range(1, len(choice.anchors)) for anchors in combinations(range(len(gains)), number)]
    assert all(total(allowed, anchors) == -inf for anchors in fewer)


@settings(max_examples=100)
@given(gains=gain_tables())
def test_every_other_layer_takes_the_best_anchor_below(gains: list[list[float]]) -> None:
    for choice in choices(gains):
        assert sorted([*choice.anchors, *choice.reuse]) == list(range(len(gains)))
        for layer, (anchor, gain) in choice.reuse.items():
            assert gain == gains[anchor][layer] == max(gains[a][layer] for a in choice.anchors if a < layer)
        assert choice.mean * len(gains) >= total(gains, choice.anchors) - 1e-9


def test_a_table_by_hand() -> None:
    """Layer 3 recovers more from 0 than from 2, the nearest."""
    gains = [[1, 0.9, 0.2, 0.8], [-inf, 1, 0.3, 0.1], [-inf, -inf, 1, 0.6], [-inf, -inf, -inf, 1]]
    two = choose(gains, 2, 0.0)
    assert two.anchors == (0, 2)
    assert two.reuse == {1: (0, 0.9), 3: (0, 0.8)}
    assert (two.mean, two.least) == (pytest.approx(3.7 / 4), 0.8)
    assert choose(gains, None, 0.85).anchors == (0, 2, 3)
    assert choose(gains, None, 0.95).anchors == (0, 1, 2, 3)


def test_numbers_of_anchors_that_cannot_be_are_refused() -> None:
    apart = [[1, -inf], [-inf, 1]]
    with refused("invalid_value"):
        choose(apart, 3, 0.0)
    with refused("invalid_value"):
        choose(apart, 1, 0.0)
