"""Random draws: the same in every process, different in every layer and at every position, fair to every unit."""

import json
import os
import subprocess
import sys

import torch
from contracts.harness import SHAPE, Asked, Runner, draw_tokens, spy

from kvsift.methods.random import Random
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.types import Candidates, LayerShape

DRAW = """
import torch
from kvsift.methods.random import Random
from kvsift.types import Candidates, LayerShape
shape = LayerShape(layer=3, num_query_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
scores = Random(seed=7).score(None, shape, torch.zeros(4, 1, 8), 1234, Candidates(2, 50, 16), None)
print(scores.flatten().tolist())
"""


def drawn(seed: int, layer: int = 2) -> list[Asked]:
    method = Random(page_size=4, seed=seed)
    asked = spy(method)
    plan = Plan(decode=Rule(method, Budget(tokens=40, sinks=4, window=4, dense_layers=())))
    runner = Runner(plan, shape=SHAPE._replace(layer=layer))
    runner.feed_all(draw_tokens(220, 0), 200, range(200, 220))
    return asked


def test_the_draw_is_the_same_in_every_process() -> None:
    elsewhere = subprocess.run(
        [sys.executable, "-c", DRAW], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    ).stdout  # fmt: skip
    shape = LayerShape(layer=3, num_query_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
    here = Random(seed=7).score(None, shape, torch.zeros(4, 1, 8), 1234, Candidates(2, 50, 16), None)  # type: ignore[arg-type]
    assert json.loads(elsewhere) == here.flatten().tolist()
    assert here.numel() >= 100


def test_the_draw_does_not_touch_the_global_generator() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    drawn(0)
    assert torch.equal(torch.rand(3), expected)


def test_seed_layer_and_position_each_change_the_draw() -> None:
    once, again = drawn(0), drawn(0)
    for first, second in zip(once, again):
        assert torch.equal(first.selection.units, second.selection.units)
    for other in (drawn(1), drawn(0, layer=3), once[1:]):
        assert any(not torch.equal(a.selection.units, b.selection.units) for a, b in zip(once, other))


def test_heads_draw_for_themselves() -> None:
    assert any(not torch.equal(*asked.selection.units) for asked in drawn(0))


def test_every_unit_has_the_same_chance() -> None:
    counts = torch.zeros(60)
    for seed in range(30):
        for asked in drawn(seed):
            units = asked.selection.units
            counts += torch.bincount(units[units < 49].flatten(), minlength=60)
    offered = counts[1:49]  # units 1 to 48 are candidates at all of the 20 steps
    mean, spread = offered.mean(), offered.std()
    assert float(spread) < 2 * float(mean.sqrt()), "units are not drawn with equal chance"
    assert bool((offered > 0).all())
