"""The guard's decisions: what follows from probes, without a model."""

import random
from itertools import pairwise
from typing import Any

import pytest
from refusals import refused

from kvsift.plan.budget import Budget
from kvsift.plan.guard import Guard, shows_all, sizes, widened
from kvsift.plan.plan import Rule
from kvsift.plan.syntax import parse_plan

BUDGET = Budget(tokens=128, min_recovery=0.9)
START, EVERY = 1000, 4


def run(guard: Guard, recoveries: dict[int, float], start: int, stop: int, budget: Budget = BUDGET) -> list[Any]:
    """Steps of positions start to stop, one layer, whose recovery is 1 unless given; (position, sizes) of the steps
    that were probed, and what doubled."""
    found: list[Any] = []
    for position in range(start, stop):
        if widening := guard.settle(position, budget):
            found.append((widening.position, widening.before, widening.after))
        if guard.due(position, EVERY):
            guard.note(position, 2, recoveries.get(position, 1.0))
            found.append((position, sizes(guard.budget(budget))))
    return found


@pytest.mark.parametrize(
    ("low", "probed", "doubled"),
    [
        ([], [0, 4, 8], []),
        ([0], [0, 1, 4, 8], []),  # the second probe clears it
        ([0, 1], [0, 1, 2, 4, 8], [1]),  # and the doubled budget is probed at once
        ([4, 5], [0, 4, 5, 6, 8], [5]),
        ([0, 1, 2], [0, 1, 2, 3, 4, 8], [1]),  # the doubled budget needs two of its own
        ([0, 1, 2, 3], [0, 1, 2, 3, 4, 8], [1, 3]),
        ([3, 4], [0, 4, 5, 8], []),  # nobody looks at 3
        ([0, 4, 8], [0, 1, 4, 5, 8, 9], []),  # not in a row
        ([*range(10)], [*range(6)], [1, 3, 5]),  # 128, 256, 512, dense
    ],
)
def test_two_low_probes_in_a_row_double_the_budget(low: list[int], probed: list[int], doubled: list[int]) -> None:
    found = run(Guard(), {START + step: 0.89 for step in low}, START, START + 10)
    assert [event[0] - START for event in found if len(event) == 2] == probed
    assert [event[0] - START for event in found if len(event) == 3] == doubled
    steps = [128, 256, 512, "dense"]
    named = [name if name == "dense" else f"budget={name}" for name in steps]
    assert [event[1:] for event in found if len(event) == 3] == list(pairwise(named))[: len(doubled)]


def test_a_recovery_is_the_mean_over_layers_and_the_worst_is_named() -> None:
    guard = Guard()
    for position in (START, START + 1):
        assert guard.settle(position, BUDGET) is None
        for layer, recovery in ((2, 0.95), (5, 0.6), (9, 0.97)):
            assert guard.due(position, EVERY)
            guard.note(position, layer, recovery)
    assert guard.widens(BUDGET)
    widening = guard.settle(START + 2, BUDGET)
    assert widening.recovery == pytest.approx(0.84)
    assert (widening.lowest, widening.lowest_layer) == (0.6, 5)
    assert not guard.widens(BUDGET)
    assert guard.settle(START + 2, BUDGET) is None, "a probe decides once"
    assert widening.as_dict().keys() == {
        "row", "position", "recovery", "lowest", "lowest_layer", "min_recovery", "from", "to"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("size", "after"),
    [
        ({"tokens": 100}, ["budget=200", "budget=400", "budget=800", "dense"]),
        ({"ratio": 0.3}, ["ratio=0.6", "dense"]),
        ({"mass": 0.9}, ["mass=0.95", "mass=0.975", "mass=0.9875", "dense"]),
        ({"mass": 0.97, "tokens": 300}, ["budget=600:mass=0.985", "dense"]),
        ({"mass": 0.9, "tokens": 600}, ["budget=1200:mass=0.95", "budget=2400:mass=0.975", "budget=4800:mass=0.9875",
          "dense"]),
        ({"mass": 1.0}, ["dense"]),
    ],
)  # fmt: skip
def test_every_size_doubles_up_to_dense(size: dict[str, Any], after: list[str]) -> None:
    budget = Budget(**size, min_recovery=0.9)
    found = run(Guard(), dict.fromkeys(range(START, START + 99), 0.1), START, START + 99, budget)
    assert [event[2] for event in found if len(event) == 3] == after
    assert shows_all(widened(budget, 10), START)


def test_a_new_prompt_begins_with_the_budget_of_the_plan() -> None:
    guard = Guard()
    run(guard, dict.fromkeys(range(START, START + 3), 0.1), START, START + 3)
    assert guard.budget(BUDGET) == widened(BUDGET, 1)
    guard.begin(START + 3, BUDGET)
    assert guard.budget(BUDGET) == BUDGET
    assert guard.due(START + 7, 1000), "the first step after it is probed"
    guard.crop(START + 3)
    assert guard.budget(BUDGET) == widened(BUDGET, 1), "rolled back to the answer before"


@pytest.mark.parametrize("seed", range(20))
def test_what_is_rolled_back_leaves_no_trace_and_forks_go_on_alone(seed: int) -> None:
    rng = random.Random(seed)
    recoveries = {START + step: rng.choice([0.3, 0.95]) for step in range(60)}
    whole, cut = Guard(), Guard()
    expected = run(whole, recoveries, START, START + 40)
    at = START + rng.randint(0, 39)
    before = run(cut, recoveries, START, at)
    other = cut.fork()
    run(cut, {}, at, at + rng.randint(0, 20))  # drafts that were better than what follows
    cut.crop(at)
    assert before + run(cut, recoveries, at, START + 40) == expected
    assert before + run(other, recoveries, at, START + 40) == expected


def test_without_probes_nothing_is_due() -> None:
    assert not Guard().due(START, 0)


def test_dense_is_refused_as_an_object_too() -> None:
    with refused("unsupported_plan: dense sees everything, so min_recovery has nothing to widen"):
        Rule(parse_plan("both=dense").rules[0].method, Budget(min_recovery=0.5))


@pytest.mark.parametrize(
    "text",
    [
        "quest:budget=1024:min_recovery=0.9",
        "prefill=quoka:budget=1024:dense_layers=0+1,decode=oracle_tokens:ratio=0.1:min_recovery=1.0",
        "streaming_llm:budget=256:min_recovery=0.5",
    ],
)
def test_a_guarded_plan_is_spelt_as_it_is_read(text: str) -> None:
    plan = parse_plan(text)
    assert plan.is_guarded
    assert parse_plan(str(plan)) == plan
    assert plan != parse_plan(text.rpartition(":")[0])
    table = {"decode": {"method": "quest", "min_recovery": 0.9}}
    assert parse_plan(table) == parse_plan("quest:min_recovery=0.9")
