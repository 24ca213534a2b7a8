"""Distances from dense decoding: of texts side by side, those of each alone; and what is known about them."""

from __future__ import annotations

from math import inf, isnan

import pytest
import torch
from engine.tiny_directory import text_of, write_model
from kvsift_lab.eval.fidelity import fidelity, predictions

from kvsift import LLM
from kvsift.api.document import Document
from kvsift.calibration.fidelity import DecodedText, FidelityScorer, bounds, t_quantile
from kvsift.engine.graphs import fast_path
from kvsift.engine.graphs.fast_path import FastPath
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan

LENGTH, SCORED, NUM_TEXTS = 300, 12, 10  # more texts than one pass decodes
PLAN = "sketch:budget=128:dense_layers=none"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = write_model(tmp_path_factory.mktemp("models") / "tiny")
    return LLM(directory, "dense", device="cpu", dtype="float32", probe_every=4)


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[DecodedText]:
    ids = llm.encode(text_of(4000))
    return [DecodedText(ids[at : at + LENGTH], LENGTH - SCORED) for at in range(0, NUM_TEXTS * LENGTH, LENGTH)]


@pytest.fixture(scope="module")
def scorer(llm: LLM, texts: list[DecodedText]) -> FidelityScorer:
    return FidelityScorer(llm, texts)


def alone(llm: LLM, text: DecodedText, plan: str) -> tuple[torch.Tensor, list[int]]:
    """Log-probabilities in place of the scored tokens, and these."""
    before, targets = list(text.ids[: text.start - 1]), list(text.ids[text.start :])
    document = Document(llm, before, lambda question: before, Plan())
    return predictions(llm, document, text.ids[text.start - 1], targets, parse_plan(plan))[0], targets


def test_texts_side_by_side_are_as_far_from_dense_as_alone(
    llm: LLM, texts: list[DecodedText], scorer: FidelityScorer
) -> None:
    scores = scorer.score(parse_plan(PLAN))
    assert scores.tokens == SCORED
    for number, text in enumerate(texts):
        (predicted, targets), (dense, _) = alone(llm, text, PLAN), alone(llm, text, "dense")
        expected = fidelity(predicted, dense, targets)
        assert scores.kl[number] == pytest.approx(expected.kl, rel=1e-3, abs=1e-7)
        assert scores.agreement[number] == pytest.approx(expected.agreement)
        assert scores.nll[number] == pytest.approx(expected.nll, rel=1e-5)
    assert min(scores.kl) > 0
    assert 0 < min(scores.recovery) <= max(scores.recovery) <= 1


def test_more_tokens_of_a_plan_go_on_from_those_before(scorer: FidelityScorer) -> None:
    whole = scorer.score(parse_plan(PLAN))
    scorer.score(Plan(), 2)  # another plan between
    assert scorer.score(parse_plan(PLAN), 5).tokens == 5
    again = scorer.score(parse_plan(PLAN))
    assert again.tokens == whole.tokens
    for measure in ("kl", "agreement", "nll", "recovery"):
        assert getattr(again, measure) == pytest.approx(getattr(whole, measure), rel=1e-4)


@pytest.mark.parametrize("plan", ["dense", "quest:budget=128:dense_layers=1", "sketch:budget=64:window=16:page_size=8"])
def test_the_steps_that_answers_take_on_a_gpu_score_as_composed_ones(
    llm: LLM, texts: list[DecodedText], plan: str
) -> None:
    steps, composed = (
        FidelityScorer(
            LLM(llm.directory.path, "dense", device="cpu", dtype="float32", probe_every=0, dense_below=0, path=path),
            texts[:3],
        )
        for path in ("eager", "composed")
    )
    expected = composed.score(parse_plan(plan))
    for tokens in (5, SCORED):  # the later go on from the first
        found = steps.score(parse_plan(plan), tokens)
    assert found.kl == pytest.approx(expected.kl, rel=1e-3, abs=1e-7)
    assert found.nll == pytest.approx(expected.nll, rel=1e-4)
    assert max(expected.kl) > 0 or plan == "dense"


def test_steps_of_many_tokens_are_captured(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "fixed_slots", lambda step, cache, num_slots, pages, capture: capture)
    cache, path = Document(llm, [1, 2, 3], lambda question: [], Plan()).prefill(Plan()), FastPath("auto", llm.device, 0)
    captured = [path.for_tokens(llm.model, [cache], number) for number in (16, 48, 256)]
    assert captured == [False, True, True]


def test_probed_texts_are_decoded_in_composed_steps(llm: LLM, texts: list[DecodedText]) -> None:
    probed = LLM(llm.directory.path, "dense", device="cpu", dtype="float32", probe_every=4, path="eager")
    assert 0 < min(FidelityScorer(probed, texts[:2]).score(parse_plan(PLAN)).recovery) <= 1


def test_dense_is_no_way_from_itself(scorer: FidelityScorer) -> None:
    scores = scorer.score(Plan())
    assert max(scores.kl) < 1e-9
    assert set(scores.agreement) == {1.0}


def test_recovery_is_unknown_where_nothing_was_probed(llm: LLM, texts: list[DecodedText]) -> None:
    silent = LLM(llm.directory.path, "dense", device="cpu", dtype="float32", probe_every=0)
    assert all(map(isnan, FidelityScorer(silent, texts[:2]).score(parse_plan(PLAN), 4).recovery))


@pytest.mark.parametrize(("level", "freedom", "expected"), [(0.9, 7, 1.4149), (0.975, 7, 2.3646), (0.9, 23, 1.3195)])
def test_quantiles_are_those_of_tables(level: float, freedom: int, expected: float) -> None:
    assert t_quantile(level, freedom) == pytest.approx(expected, rel=5e-3)


def test_bounds_hold_as_often_as_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2000, 8, generator=generator)
    above = sum(bounds(draw.tolist())[1] >= 0 for draw in draws)
    assert 0.88 < above / len(draws) < 0.92
    assert bounds([0.5]) == (-inf, inf)


@pytest.mark.parametrize("method", ["dense", "sketch", "quest", "decode=less_is_more", "snapkv", "infinigen"])
def test_known_tokens_are_predicted_by_own_layers_as_by_those_of_transformers(
    method: str, llm: LLM, texts: list[DecodedText], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = method if method == "dense" else f"{method}:budget=64:sinks=4:window=8:dense_layers=none"
    own, _ = alone(llm, texts[0], plan)
    monkeypatch.setattr(FastPath, "forward_pass", lambda *_: None)
    theirs, _ = alone(llm, texts[0], plan)
    torch.testing.assert_close(own, theirs, atol=1e-4, rtol=1e-4)
