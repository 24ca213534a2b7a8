"""Every method under a guard: the plan's answer until the budget doubles, and the dense one once it is dense."""

from dataclasses import replace

import pytest
import torch
from contracts.harness import Runner, Stack, assert_same_answer, draw_tokens, small

from kvsift.errors import InputError
from kvsift.layer.guards import Guards
from kvsift.layer.layer_messages import LayerMessages
from kvsift.methods import catalogue, method_class
from kvsift.methods.base import Method
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule

LENGTH, PROMPT = 120, 100
BUDGET = Budget(tokens=40, sinks=4, window=4, dense_layers=())
NAMES = [name for name in catalogue() if "decode" in method_class(name).phases and name not in ("dense", "verify")]


def budget_of(method: Method, min_recovery: float | None = None) -> Budget:
    return replace(BUDGET, window=BUDGET.window if method.traits.selects else 64, min_recovery=min_recovery)


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_the_plan_and_at_last_the_dense_ones(name: str) -> None:
    method, tokens = small(name)(), draw_tokens(LENGTH, 0)
    try:
        plan = Plan(decode=Rule(method, budget_of(method, 1.0)))
    except InputError:
        assert not method.traits.keeps_all
        return
    outputs, stats = {}, {}
    for kind, chosen in {
        "guarded": plan, "plain": Plan(decode=Rule(method, budget_of(method))), "dense": Plan()
    }.items():  # fmt: skip
        runner = Runner(chosen)
        runner.stats.probe_every = 16
        outputs[kind] = runner.feed_all(tokens, PROMPT, range(PROMPT, LENGTH))[:, PROMPT:]
        stats[kind] = runner.stats.widenings
    assert stats["plain"] == stats["dense"] == []
    assert [(each.before, each.after) for each in stats["guarded"]] == [
        ("budget=40", "budget=80"), ("budget=80", "dense")
    ]  # fmt: skip
    first, last = (each.position + 1 - PROMPT for each in stats["guarded"])
    assert_same_answer(outputs["guarded"][:, :first], outputs["plain"][:, :first], "another budget than the plan's")
    assert torch.equal(outputs["guarded"][:, last:], outputs["dense"][:, last:])
    assert not torch.equal(outputs["plain"][:, last:], outputs["dense"][:, last:])


@pytest.mark.parametrize(
    "size", [{"layer_budgets": "pyramid"}, {"head_budgets": "adaptive"}, {"tokens": None, "ratio": 0.3}]
)
def test_other_ways_to_divide_a_budget_widen_too(size: dict[str, object]) -> None:
    budget = replace(BUDGET, **size, min_recovery=1.0)  # type: ignore[arg-type]
    plan, tokens = Plan(decode=Rule(small("oracle_tokens")(), budget)), draw_tokens(LENGTH, 0)
    peers, guards, messages = (2, 3, 5), Guards(), LayerMessages()
    shapes = [Stack(Plan()).layers[0].shape._replace(layer=layer, peers=peers) for layer in peers]
    runners = [Runner(plan, shape=shape) for shape in shapes]
    for runner in runners:
        runner.stats.probe_every, runner.attention.guards, runner.attention.messages = 16, guards, messages
    for start in (0, *range(PROMPT, LENGTH)):
        stop = PROMPT if start == 0 else start + 1
        for runner in runners:
            answer = runner.feed(tokens.part(start, stop), decode_tokens=int(start > 0))[0]
    dense = Runner(Plan(), shape=shapes[0]).feed_all(tokens, PROMPT, range(PROMPT, LENGTH))
    assert torch.equal(answer[:, -1], dense[:, -1])
    events = [each for runner in runners for each in runner.stats.widenings]
    assert [each.after for each in events][-1] == "dense"
    assert all(each.before != each.after for each in events)
    assert runners[0].stats.widenings == events, "the first layer of the next step decides for all"


def test_a_fork_of_the_rows_is_carried_out_once_for_all_layers() -> None:
    plan, guards = Plan(decode=Rule(small("quest")(), budget_of(small("quest")(), 1.0))), Guards()
    shapes = [Stack(Plan()).layers[0].shape._replace(layer=layer) for layer in (2, 3)]
    runners = [Runner(plan, 2, shape=shape) for shape in shapes]
    for runner in runners:
        runner.stats.probe_every, runner.attention.guards = 16, guards
    rows = [draw_tokens(PROMPT, seed) for seed in (1, 2)]
    for runner in runners:
        runner.feed(*rows)
    for step in range(3):
        for runner in runners:  # the second row is fed a token less
            runner.feed(draw_tokens(1, step), draw_tokens(1, step) if step else None, decode_tokens=1)
    levels = [guards.of(row).budget(plan.decode.budget).tokens for row in (0, 1)]  # type: ignore[union-attr]
    assert levels == [80, 40]
    for runner in runners:
        runner.fork([1, 0, 0])
    assert [guards.of(row).budget(plan.decode.budget).tokens for row in (0, 1, 2)] == [40, 80, 80]  # type: ignore[union-attr]
    assert guards.of(1) is not guards.of(2)


def test_only_probes_are_paid_for() -> None:
    """A guard that is content probes as often as a plan without one."""
    tokens, method = draw_tokens(LENGTH, 0), small("quest")()
    probes = []
    for least in (None, 1e-9):
        runner = Runner(Plan(decode=Rule(method, budget_of(method, least))))
        runner.stats.probe_every = 3
        runner.feed_all(tokens, PROMPT, range(PROMPT, LENGTH))
        probes.append(runner.stats.tally(2, "decode").probes)
    assert probes == [7, 7]
