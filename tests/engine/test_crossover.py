"""The length from which on skipping pays, from two lengths and straight lines."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from engine.tiny_directory import text_of

from kvsift.api.llm import LLM
from kvsift.engine.graphs.crossover import LEAST, NEVER, HostCrossover, crossover_length
from kvsift.engine.graphs.session import round_up
from kvsift.layer.paged_decode import rule_of
from kvsift.plan.syntax import parse_plan


@pytest.mark.parametrize(
    ("dense", "sparse", "length"),
    [
        ((1.0, 4.0), (2.0, 2.0), 2000),  # dense grows by 1 per 1000 tokens, sparse does not
        ((1.0, 4.0), (2.0, 2.3), 1000 + round(1000 / 0.9)),
        ((1.0, 4.0), (0.2, 0.2), 200),
        ((4.0, 13.0), (0.5, 0.5), 0),
        ((1.0, 1.0), (2.0, 2.0), NEVER),
        ((1.0, 1.0), (0.5, 0.5), 0),
        ((1.0, 2.0), (2.0, 4.0), NEVER),
    ],
)
def test_lines_meet_where_they_meet(dense: tuple[float, float], sparse: tuple[float, float], length: int) -> None:
    assert crossover_length({1000: (dense[0], sparse[0]), 4000: (dense[1], sparse[1])}) == length
    assert crossover_length({4000: (dense[1], sparse[1]), 1000: (dense[0], sparse[0])}) == length


def test_capacities_come_in_few_sizes_and_waste_little() -> None:
    sizes = {pages: round_up(pages) for pages in range(1, 20_000)}
    assert all(pages <= size <= max(pages * 17 / 16, pages + 8) for pages, size in sizes.items())
    assert len({size for pages, size in sizes.items() if 8192 < pages <= 16384}) == 16
    assert round_up(8192 + 4) == 8192 + 512


QUEST = "quest:budget=128:window=16:dense_layers=none"


class FakeSteps:
    """Dense steps take a microsecond per token, and sparse ones as long at any length."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sparse_s: float) -> None:
        self.timed: list[tuple[int, int]] = []
        self._sparse_s = sparse_s
        monkeypatch.setattr(HostCrossover, "_times", self._times)

    def _times(self, rule: object, lengths: tuple[int, int], model: object) -> dict[int, tuple[float, float]]:
        self.timed.append(lengths)
        return {length: (1e-6 * length, self._sparse_s) for length in lengths}


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch, measured_crossover: Callable[..., int]) -> None:
    monkeypatch.setattr(HostCrossover, "of", measured_crossover)


@pytest.mark.usefixtures("measures")
def test_steps_are_timed_at_longer_contexts_only_while_dense_ones_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, rule = FakeSteps(monkeypatch, sparse_s=5e-3), rule_of(parse_plan(QUEST))
    crossings = HostCrossover(lambda plan, length: pytest.fail("the steps are not run"))
    below = [crossings.of(rule, length, None) for length in (LEAST, 1500, 2000, 3000, 9000, 100_000, 1500)]
    assert below == [LEAST + 1, 2049, 2049, 4097, 5000, 5000, 5000]
    assert steps.timed == [(1024, 2048), (2048, 4096), (4096, 8192)]
    assert crossings.of(rule_of(parse_plan("quest:budget=4096")), 8192, None) == 8193  # twice its budget


@pytest.mark.usefixtures("measures")
def test_threads_measure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, crossings = FakeSteps(monkeypatch, sparse_s=1e-4), HostCrossover(lambda plan, length: None)
    threads = [Thread(target=crossings.of, args=(rule_of(parse_plan(QUEST)), 5000, None)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert steps.timed == [(1024, 2048)]


@pytest.mark.usefixtures("measures")
def test_short_contexts_are_dense_on_a_cpu_where_that_is_faster(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = FakeSteps(monkeypatch, sparse_s=1.5e-3)
    texts, how = [text_of(1490), text_of(300)], {"max_new_tokens": 30}
    with LLM(llama, QUEST, probe_every=0) as llm, LLM(llama, "dense", dense_below=0) as dense:
        long, short = llm.generate(texts, **how)
        asked = [llm.read(text).ask(" And?", **how) for text in texts]
        expected = [answer.token_ids for answer in dense.generate(texts, **how)]
        assert 0 < long.decode("sparse_queries") < 3 * 30  # it becomes sparse at 1,500 tokens
        assert [answer.dense_below for answer in (long, short)] == [1500, 1500]
        assert asked[0].decode("sparse_queries") > 0
        assert asked[1].decode("density") == 1
        assert steps.timed == [(1024, 2048)]
        assert short.token_ids == expected[1]
        assert long.token_ids[:8] == expected[0][:8]
        for options in ({"passages": True}, {"exact": True}, {"plan": QUEST + ":min_context=200"}):
            answer = llm.generate(texts[1], **how, **options)
            assert str(answer.plan) == options.get("plan", QUEST)
            assert answer.dense_below == {"passages": 0, "exact": 0}.get(next(iter(options)), 1500), options


@pytest.mark.parametrize(
    "options", [{"dense_below": 0}, {"deterministic": True}, {"path": "composed"}, {"plan": "oracle_tokens:budget=128"}]
)
@pytest.mark.usefixtures("measures")
def test_nothing_is_measured_where_steps_must_not_depend_on_it(
    options: dict[str, Any], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = FakeSteps(monkeypatch, sparse_s=1.0)
    with LLM(llama, **{"plan": QUEST, **options}) as llm:
        answer = llm.generate(text_of(1300), max_new_tokens=3)
    assert (steps.timed, answer.dense_below) == ([], 0)


@pytest.mark.parametrize("placement", ["device", "host", "split"])
@pytest.mark.usefixtures("measures")
def test_steps_of_a_model_are_timed_without_a_trace(placement: str, llama: Path) -> None:
    with LLM(llama, QUEST, placement=placement, device="cpu") as llm:
        before = llm.generate(text_of(900), max_new_tokens=8).token_ids
        torch.manual_seed(3)
        plan = llm.executed_plan(parse_plan(QUEST), 1500)
        drawn = torch.rand(1)
        after = llm.generate(text_of(900), max_new_tokens=8).token_ids
        llm.loop.check()
    torch.manual_seed(3)
    assert torch.rand(1) == drawn
    assert rule_of(plan).budget.min_context >= LEAST
    assert before == after
