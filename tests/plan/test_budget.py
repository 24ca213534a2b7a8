"""The budget: what is always visible, what may be chosen, how much, and what it refuses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from kvsift.plan.budget import DEFAULT_TOKENS, Budget


@st.composite
def budgets(draw: st.DrawFn, unit_size: int, **fixed: object) -> Budget:
    sinks, window = draw(st.integers(0, 40)), draw(st.integers(0, 80))
    least = -(-sinks // unit_size) * unit_size + window + 2 * unit_size
    sizes: list[dict[str, object]] = [
        {"tokens": least + draw(st.integers(0, 300))},
        {"ratio": draw(st.floats(0.01, 1.0))},
        {"mass": draw(st.floats(0.01, 1.0))},
    ]
    return Budget(**{"sinks": sinks, "window": window, **draw(st.sampled_from(sizes)), **fixed})  # type: ignore[arg-type]


units = st.sampled_from([1, 4, 16])


@given(data=st.data(), unit_size=units, start=st.integers(0, 700))
def test_a_decode_query_sees_no_more_than_its_budget_however_units_round(
    data: st.DataObject, unit_size: int, start: int
) -> None:
    budget = data.draw(budgets(unit_size))
    sinks_stop, window_start = budget.always(start, unit_size)
    candidates = budget.candidates(start, unit_size)
    assert 0 <= sinks_stop <= window_start
    assert sinks_stop % unit_size == window_start % unit_size == 0
    assert candidates.unit_size == unit_size
    assert candidates.tokens == slice(sinks_stop, window_start), "sinks, candidates and window leave gaps or overlap"
    assert sinks_stop >= min(budget.sinks, window_start)
    if budget.window:
        assert window_start <= max(start + 1 - budget.window, 0)
    assert max(start + 1 - window_start, 0) < budget.window + unit_size
    chosen = min(budget.units(start, unit_size), candidates.count)
    always = min(sinks_stop, start + 1) + max(start + 1 - window_start, 0)
    if budget.tokens is not None and chosen < candidates.count:
        assert chosen >= 1
        assert always + chosen * unit_size <= budget.tokens
    if budget.ratio is not None and budget.tokens is None and chosen < candidates.count:
        assert chosen >= 1
        assert chosen == 1 or always + chosen * unit_size <= math.ceil(budget.ratio * (start + 1))


@given(data=st.data(), unit_size=units, start=st.integers(0, 700), more=st.integers(1, 200))
def test_a_larger_budget_never_selects_less(data: st.DataObject, unit_size: int, start: int, more: int) -> None:
    small = data.draw(budgets(unit_size))
    if small.tokens is None:
        return
    large = Budget(tokens=small.tokens + more, sinks=small.sinks, window=small.window)
    assert large.units(start, unit_size) >= small.units(start, unit_size)


@pytest.mark.parametrize("window", [0, 1, 16, 20])
@pytest.mark.parametrize("context", [1, 15, 16, 17, 100, 112])  # below, at and across the page
def test_a_budget_of_the_context_selects_every_unit(window: int, context: int) -> None:
    for budget in (Budget(tokens=context, window=window, sinks=0), Budget(ratio=1.0, window=window, sinks=0)):
        assert budget.units(context - 1, 16) >= budget.candidates(context - 1, 16).count


def test_1024_tokens_unless_told() -> None:
    assert Budget().tokens == DEFAULT_TOKENS == 1024
    assert Budget(ratio=0.1).tokens is None
    assert Budget(mass=0.9).tokens is None
    assert Budget(mass=0.9, tokens=512).tokens == 512


@pytest.mark.parametrize(
    ("ratio", "context", "limit"), [(0.25, 100, 25), (0.25, 101, 26), (1.0, 77, 77), (0.001, 5, 1)]
)
def test_a_ratio_is_rounded_up(ratio: float, context: int, limit: int) -> None:
    assert Budget(ratio=ratio).limit(context) == limit


@pytest.mark.parametrize("name", ["tokens", "sinks", "window", "min_context"])
@pytest.mark.parametrize("value", [-1, 1.5, 8.0, "8", True, math.nan])
def test_a_count_must_be_a_whole_number(name: str, value: object) -> None:
    spelt = "budget" if name == "tokens" else name
    with refused(f"invalid_value: {spelt}"):
        Budget(**{name: value})  # type: ignore[arg-type]


def test_a_budget_of_nothing_is_refused() -> None:
    with refused("invalid_value: budget=0"):
        Budget(tokens=0)


@pytest.mark.parametrize("name", ["ratio", "mass", "min_recovery"])
@pytest.mark.parametrize("value", [0, -0.1, 1.01, math.nan, math.inf, "0.5", True])
def test_a_share_is_more_than_0_and_at_most_1(name: str, value: object) -> None:
    with refused(f"invalid_value: {name}"):
        Budget(**{name: value})  # type: ignore[arg-type]


def test_a_budget_and_a_ratio_say_the_same_thing_twice() -> None:
    with refused("conflict: budget=512"):
        Budget(tokens=512, ratio=0.5)


@pytest.mark.parametrize("layers", [(0, -1), (0, 1.5), ("0",)])
def test_dense_layers_are_layer_numbers(layers: tuple[object, ...]) -> None:
    with refused(f"invalid_value: dense_layers={layers[-1]!r}"):
        Budget(dense_layers=layers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "sinks", "window", "unit_size", "least"),
    [
        (64, 4, 64, 1, 69),
        (96, 4, 64, 16, 111),  # sinks fill a page, the window up to 15 tokens more
        (15, 0, 0, 16, 16),  # no window: the page being filled competes
    ],
)
def test_a_budget_that_can_never_select_is_refused_with_the_least_that_can(
    tokens: int, sinks: int, window: int, unit_size: int, least: int
) -> None:
    with refused(f"invalid_value: budget={tokens}"):
        Budget(tokens=tokens, sinks=sinks, window=window).check(unit_size, selects=True)
    Budget(tokens=least, sinks=sinks, window=window).check(unit_size, selects=True)
