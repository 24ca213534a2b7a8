"""Oracles: nothing with the same budget recovers more attention, and mass budgets hold what they promise."""

import pytest
import torch
from contracts.harness import Case, revealing_tokens, visible_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvsift.methods.oracle import OraclePages, OracleTokens
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.types import LayerShape


def true_weights(case: Case, shape: LayerShape | None = None) -> Tensor:
    """Exact attention weights of the last token, [num_query_heads, num_tokens] float64."""
    own_shape, tokens = revealing_tokens(case.length, case.seed)
    shape = shape or own_shape
    keys = tokens.keys.double().repeat_interleave(shape.group_size, 0)
    return (tokens.queries[:, -1:].double() @ keys.mT * own_shape.scale).squeeze(1).softmax(-1)


def seen_by_last(plan: Plan, case: Case) -> Tensor:
    return visible_tokens(plan, case, "decode")[0][:, -1]


def mass_case(mass: float, seed: int, length: int = 90, **budget: object) -> Case:
    return Case(length - 1, 1, Budget(mass=mass, dense_layers=(), **{"sinks": 2, "window": 3, **budget}), seed)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(mass=st.floats(0.01, 0.999), seed=st.integers(0, 999))
def test_the_chosen_tokens_recover_the_mass_that_was_asked_for_and_not_one_token_more(mass: float, seed: int) -> None:
    case = mass_case(mass, seed)
    plan = Plan(decode=Rule(OracleTokens(heads="query"), case.budget))
    weights, seen = true_weights(case), seen_by_last(plan, case)
    for head in range(4):
        recovered = float(weights[head, seen[head]].sum())
        assert recovered >= mass - 1e-5
        chosen = seen[head].clone()
        chosen[:2] = chosen[-3:] = False  # sinks and window are not up for choice
        if bool(chosen.any()):
            assert recovered - float(weights[head, chosen].min()) < mass + 1e-5, "one token less would have done"


@settings(max_examples=20)
@given(mass=st.floats(0.01, 0.999), seed=st.integers(0, 999))
def test_heads_that_share_recover_the_mass_on_average(mass: float, seed: int) -> None:
    case = mass_case(mass, seed)
    plan = Plan(decode=Rule(OracleTokens(), case.budget))
    weights, seen = true_weights(case), seen_by_last(plan, case)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    recovered = (weights * seen).sum(-1).view(2, 2).mean(1)
    assert bool((recovered >= mass - 1e-5).all())


@settings(max_examples=20)
@given(masses=st.tuples(st.floats(0.01, 0.999), st.floats(0.01, 0.999)), seed=st.integers(0, 999))
def test_more_mass_shows_all_that_less_mass_shows(masses: tuple[float, float], seed: int) -> None:
    less, more = (
        seen_by_last(Plan(decode=Rule(OracleTokens(), case.budget)), case)
        for case in (mass_case(mass, seed) for mass in sorted(masses))
    )
    assert bool((more | ~less).all())


def test_a_token_budget_beside_mass_is_a_ceiling() -> None:
    flat = mass_case(0.99, 0)
    assert int(seen_by_last(Plan(decode=Rule(OracleTokens(), flat.budget)), flat).sum(-1).min()) > 40
    capped = mass_case(0.99, 0, tokens=20)
    assert int(seen_by_last(Plan(decode=Rule(OracleTokens(), capped.budget)), capped).sum(-1).max()) == 20


def test_mass_counts_what_soft_capping_leaves_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capped logits are flatter: as many tokens as uncapped ones ask for would hold less than the mass."""
    case = mass_case(0.8, 1, sinks=1, window=1)
    shape, tokens = revealing_tokens(case.length, case.seed)
    sharp = tokens._replace(queries=8 * tokens.queries)
    capped = shape._replace(softcap=2.0)
    monkeypatch.setattr("contracts.harness.revealing_tokens", lambda *_: (capped, sharp))
    seen = seen_by_last(Plan(decode=Rule(OracleTokens(heads="query"), case.budget)), case)
    keys = sharp.keys.double().repeat_interleave(2, 0)
    logits = 2.0 * torch.tanh(sharp.queries[:, -1:].double() @ keys.mT * shape.scale / 2.0)
    recovered = (logits.squeeze(1).softmax(-1) * seen).sum(-1)
    assert bool((recovered >= 0.8 - 1e-5).all())


@settings(max_examples=20)
@given(seed=st.integers(0, 999), tokens=st.integers(8, 60))
def test_oracle_tokens_recover_the_most_that_so_many_tokens_can(seed: int, tokens: int) -> None:
    case = Case(89, 1, Budget(tokens=tokens, sinks=2, window=3, dense_layers=()), seed)
    seen = seen_by_last(Plan(decode=Rule(OracleTokens(heads="query"), case.budget)), case)
    weights = true_weights(case)
    best = weights[:, 2:-3].topk(tokens - 5).values.sum(-1) + weights[:, :2].sum(-1) + weights[:, -3:].sum(-1)
    torch.testing.assert_close((weights * seen).sum(-1), best)


def test_oracle_pages_are_those_of_the_largest_logits() -> None:
    case = Case(95, 1, Budget(tokens=24, sinks=0, window=1, dense_layers=()), 4)
    seen = seen_by_last(Plan(decode=Rule(OraclePages(page_size=4, heads="query"), case.budget)), case)
    best = true_weights(case)[:, :92].view(4, -1, 4).amax(-1).topk(5).indices  # the 24th page is the query's own
    expected = torch.zeros(4, 24, dtype=torch.bool).scatter_(1, best, True)
    expected[:, -1] = True
    assert torch.equal(seen, expected.repeat_interleave(4, 1))
