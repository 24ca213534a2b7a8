"""The method that docs/adding-a-method.md shows keeps the contracts like any other."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.checks import ALL_CHECKS
from contracts.harness import Check
from engine.tiny_directory import text_of, write_model
from layer.test_paged_decode import SideBySide

from kvsift import LLM, make_cache, parse_plan, sparse
from kvsift.layer.paged_decode import reason_against
from kvsift.methods.base import Method, Phase
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule

EXAMPLE = Path(__file__).parents[2] / "examples" / "page_mean.py"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.usefixtures("fewer_examples")
def test_the_documented_example_keeps_the_contracts(check: Check, phase: Phase) -> None:
    page_mean: Any = runpy.run_path(str(EXAMPLE))["PageMean"]

    def make() -> Method:
        return page_mean(page_size=4)

    check(make, phase)


def test_the_documented_example_is_captured() -> None:
    page_mean: Any = runpy.run_path(str(EXAMPLE))["PageMean"]
    plan = Plan(decode=Rule(page_mean(page_size=4), Budget(tokens=40, sinks=4, window=5, dense_layers=())))
    assert reason_against(plan) is None
    SideBySide(plan).check()


def test_a_method_of_a_script_is_a_plan_wherever_one_is_taken(tmp_path: Path) -> None:
    page_mean: Any = runpy.run_path(str(EXAMPLE))["PageMean"]
    method, rule = page_mean(), Rule(page_mean(), Budget(tokens=128, window=32))
    name = "PageMean:budget=1024"
    small = "PageMean:budget=128:window=32"
    llm, text = LLM(write_model(tmp_path), method, device="cpu"), text_of(300)
    document = llm.read(text, plan=rule)
    document.save(tmp_path / "text.kvsift")
    answers = {
        name: [
            llm.generate(text, max_new_tokens=2),
            document.ask("Why?", plan=method, max_new_tokens=2),
            llm.chat(text, plan=method).ask("Why?", max_new_tokens=2),
        ],
        small: [
            llm.generate(text, plan=rule, max_new_tokens=2),
            document.ask("Why?", max_new_tokens=2),
            llm.chat(text).ask("Why?", plan=rule, max_new_tokens=2),
            llm.open(tmp_path / "text.kvsift", plan=rule).ask("Why?", max_new_tokens=2),
        ],
    }
    assert {name: {answer.plan for answer in each} for name, each in answers.items()} == {name: {name}, small: {small}}
    stream = llm.stream(text, plan=rule, max_new_tokens=2)
    assert len(list(stream)) <= 2
    llm.check([[1, 2]], 1, rule)
    assert llm.warm_up([method, rule]).num_steps == 0
    model, ids = llm.model, {"input_ids": torch.ones(1, 300, dtype=torch.int64)}
    for plan in (method, rule):
        with sparse(model, plan) as run:
            model.generate(**ids, max_new_tokens=2)
        cache = make_cache(model, plan)
        assert run.report()["plan"] == str(cache.run.plan) == str(parse_plan(plan))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_documented_example_answers_captured_as_composed(tmp_path: Path) -> None:
    page_mean: Any = runpy.run_path(str(EXAMPLE))["PageMean"]
    plan = Plan(decode=Rule(page_mean(), Budget(tokens=256, window=32, dense_layers=())))
    directory = write_model(tmp_path, hidden_size=128, intermediate_size=256, head_dim=64, num_attention_heads=8)
    answers = []
    for path in ("captured", "composed"):
        model = LLM(directory, plan, device="cuda", dtype="float32", path=path, dense_below=0)
        answers.append(model.generate(text_of(1500), max_new_tokens=40))
    assert answers[0].path == "captured"
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].decode("density") == answers[1].decode("density")
