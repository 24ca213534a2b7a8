"""The search for a plan: against what trying everything would find, where times and distances are known; where it was
stopped, it goes on; and layers that share selections are found in a model that is built so."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
import torch
from engine.tiny_directory import text_of, write_model
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from kvsift import LLM
from kvsift.api.document import Document
from kvsift.calibration.fidelity import DecodedText, FidelityScorer, Scores
from kvsift.calibration.tune import Notebook, Target, Tuner, smoothed
from kvsift.methods.common.anchors import read
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan
from kvsift.texts.calibration import windows

NUM_TEXTS, SCORED, CONTEXT = 8, 256, 4096
NOWHERE = Path("nowhere.json")


class KnownTuner(Tuner):
    """A tuner whose times and distances are given; counts what is scored.

    Args:
        times: seconds per token of a plan.
        kl: of a plan.
    """

    def __init__(self, times: Callable[[str], float], kl: Callable[[str], float], notebook: Notebook) -> None:
        texts = [DecodedText(range(CONTEXT + SCORED), CONTEXT) for _ in range(NUM_TEXTS)]
        super().__init__(None, texts, CONTEXT, notebook, NOWHERE, lambda what, done, total: None)  # type: ignore[arg-type]
        self.known_times, self.known_kl, self.scored = times, kl, Counter[str]()

    def _times(self, plans: Sequence[str]) -> dict[str, float]:
        return {plan: self.known_times(plan) for plan in plans}

    def _score(self, plan: str, tokens: int) -> Scores:
        self.scored[plan] = tokens
        spread = [self.known_kl(plan) * factor for factor in (0.94, 0.96, 0.98, 1.0, 1.0, 1.02, 1.04, 1.06)]
        return Scores(tokens, spread, [1 - each for each in spread], spread, [float("nan")] * NUM_TEXTS)

    def _with_anchors(self, chosen, *_):  # type: ignore[no-untyped-def]
        return chosen


def budget_of(plan: str) -> int:
    rule = parse_plan(plan).decode
    return rule.budget.tokens or 0 if rule is not None else CONTEXT


def nothing_kept() -> Notebook:
    return Notebook(None, {})


@given(st.integers(0, 10_000), st.floats(0.001, 0.5))
def test_the_fastest_plan_that_meets_the_target_is_found(seed: int, target: float) -> None:
    def known(plan: str, what: str) -> float:
        return Random(f"{seed} {what} {plan.partition(':budget')[0]} {plan.partition('dense_layers')[1]}").random()

    times = lambda plan: 1 + known(plan, "time") + budget_of(plan) / 1e4  # noqa: E731
    kl = lambda plan: 40 * known(plan, "kl") / budget_of(plan)  # noqa: E731
    tuner = KnownTuner(times, kl, nothing_kept())
    found = tuner.search(Target("kl", target), None)
    tried = [each["plan"] for each in found["candidates"] if each["plan"] != "dense"]
    good = [plan for plan in tried if 1.02 * kl(plan) <= target]
    assert found["interval"] == found["kl_interval"]
    if found["plan"] == "dense":
        assert not good
    else:
        assert kl(found["plan"]) <= target
        assert times(found["plan"]) <= min(map(times, good), default=9.0) + 1e-9
        assert found["tokens"] == NUM_TEXTS * SCORED
    far = [plan for plan in tuner.scored if kl(plan) > 1.2 * target]
    assert all(tuner.scored[plan] < SCORED for plan in far)  # a few tokens tell


def test_budgets_below_one_that_is_sure_to_miss_are_not_scored() -> None:
    tuner = KnownTuner(budget_of, lambda plan: 40 / budget_of(plan), nothing_kept())
    found = tuner.search(Target("kl", 0.03), None)
    assert budget_of(found["plan"]) == 1536
    assert {budget_of(plan) for plan in tuner.scored} == {512, 1024, 1536, 2048}


def test_of_the_plans_that_are_fast_enough_the_closest_to_dense_is_found() -> None:
    times, kl = lambda plan: budget_of(plan) / 1e5, lambda plan: 100 / budget_of(plan)
    found = KnownTuner(times, kl, nothing_kept()).search(Target("kl", 0.001), 0.006)
    assert budget_of(found["plan"]) == 512
    assert not found["met"]
    assert found["tokens"] == NUM_TEXTS * SCORED


def test_where_no_plan_meets_the_target_dense_does() -> None:
    found = KnownTuner(budget_of, lambda plan: 1.0, nothing_kept()).search(Target("agreement", 0.97), None)
    assert (found["plan"], found["met"]) == ("dense", True)
    assert (found["agreement"], found["interval"]) == (1.0, (1.0, 1.0))


def test_a_budget_between_those_that_were_tried_is_found() -> None:
    kl = lambda plan: 0.01 if budget_of(plan) >= 700 else 0.03  # noqa: E731
    found = KnownTuner(budget_of, kl, nothing_kept()).search(Target("kl", 0.02), None)
    assert budget_of(found["plan"]) == 768


@pytest.mark.parametrize("text", ["kl", "kl=0", "kl=x", "kl=inf", "agreement=1.2", "recall=0.9", "0.02"])
def test_targets_without_meaning_are_refused(text: str) -> None:
    with refused("invalid_value"):
        Target.of(text)


def test_times_of_a_method_never_fall_with_the_budget() -> None:
    assert smoothed([128, 256, 512], [3.0, 2.0, 1.0], [128, 512]) == [2.0, 2.0]
    assert smoothed([100, 200, 300], [1.0, 2.2, 3.1], [100, 150, 300]) == pytest.approx([1.05, 1.575, 3.15])
    assert smoothed([128, 256], [2.0, 1.0], [128, 256]) == [2.0, 1.0]


def test_a_plan_that_is_too_far_on_every_text_is_left_though_one_makes_the_bound_wide() -> None:
    nothing = [float("nan")] * NUM_TEXTS
    far = [0.05] * (NUM_TEXTS - 1) + [3.0]
    close = [0.019, *far[1:]]
    target = Target("kl", 0.02)
    assert target.misses(Scores(16, far, nothing, nothing, nothing))
    assert not target.misses(Scores(16, close, nothing, nothing, nothing))
    assert Target("agreement", 0.97).misses(Scores(16, nothing, [0.9] * NUM_TEXTS, nothing, nothing))
    assert not target.misses(Scores(16, far[-3:], nothing, nothing, nothing))  # too few to tell


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = write_model(tmp_path_factory.mktemp("models") / "tiny")
    return LLM(directory, "dense", device="cpu", dtype="float32", dense_below=0, probe_every=0)


class Stopped(Exception):
    pass


def test_a_search_that_was_stopped_goes_on_where_it_was(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = windows(llm, {"text": text_of(4000)}, 512, 8, NUM_TEXTS, 0)
    measured = Counter[str]()
    score, itl_s = FidelityScorer.score, "kvsift.api.document.Document.itl_s"

    def timed(document: object, plan: object, num_tokens: int) -> list[float]:
        measured[str(plan)] += 1
        if sum(measured.values()) == 20:
            raise Stopped
        return [0.001, 0.002]

    def scored(scorer: FidelityScorer, plan: Plan, tokens: int) -> Scores:
        if [*map(parse_plan, notebook.scores)] not in ([], [plan]) and not measured["stopped"]:
            measured["stopped"] = 1
            raise Stopped
        return score(scorer, plan, tokens)

    monkeypatch.setattr(itl_s, timed)
    monkeypatch.setattr(FidelityScorer, "score", scored)
    results, stops = [], 0
    while not results:
        notebook = Notebook(tmp_path / "measured.json", {"texts": "these"})
        tuner = Tuner(llm, texts, 600, notebook, tmp_path / "anchors.json", lambda what, done, total: None)
        try:
            results.append(tuner.search(Target("kl", 1e-9), None))
        except Stopped:
            stops += 1
    assert stops == 2
    counts = [count for plan, count in measured.items() if plan != "stopped"]
    assert max(counts) <= 2 * 3  # three rounds, and what was not yet written when it was stopped
    assert results[0]["plan"] == "dense"
    assert Notebook(tmp_path / "measured.json", {"texts": "others"}).times == {}
    notebook.remove()
    assert not [*tmp_path.iterdir()]


def test_layers_that_select_alike_are_found_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alike, apart = (
        LLM(write_model(tmp_path / name), "dense", device="cpu", dtype="float32", dense_below=0, probe_every=0)
        for name in ("alike", "apart")
    )
    with torch.no_grad():
        for llm in (alike, apart):
            for layer in llm.model.model.layers:  # what layers add hardly changes what the next one selects
                layer.self_attn.o_proj.weight *= 0.05
                layer.mlp.down_proj.weight *= 0.05
                layer.self_attn.q_proj.weight *= 8
        first, *others = alike.model.model.layers
        for layer in others:
            for name in ("q_proj", "k_proj"):
                getattr(layer.self_attn, name).weight.copy_(getattr(first.self_attn, name).weight)

    def itl_s(document: Document, plan: Plan, num_tokens: int) -> list[float]:
        path = getattr(plan.decode and plan.decode.method, "anchors", None)
        return [1 - 0.1 * (len(read("anchors", path).reuse) if path else 0)]

    monkeypatch.setattr(Document, "itl_s", itl_s)
    monkeypatch.setattr("kvsift.calibration.tune.METHODS", ("sketch",))
    monkeypatch.setattr("kvsift.calibration.tune.LAYERS", (":dense_layers=none",))
    found = {}
    for llm in (alike, apart):
        texts = windows(llm, {"text": text_of(4000)}, 512, 32, NUM_TEXTS, 0)
        path = tmp_path / f"{llm.directory.name}.json"
        tuner = Tuner(llm, texts, 512, nothing_kept(), path, lambda what, done, total: None)
        dense_kl = FidelityScorer(llm, texts).score(parse_plan("sketch:budget=256:dense_layers=none"), 32).kl
        found[llm.directory.name] = tuner.search(Target("kl", 2 * fmean(dense_kl)), None)["plan"]
    assert "anchors" not in found["apart"]
    path = found["alike"].partition("anchors=")[2]
    assert read("anchors", path).anchors == (0,)
    assert sorted(read("anchors", path).reuse) == [1, 2]
    tuner.remove_anchors()
    assert not [*tmp_path.glob("*apart.json")]


def test_pieces_of_texts_have_one_length_and_scored_ends_of_their_own(llm: LLM) -> None:
    texts = {"long": text_of(9000), "short": text_of(2500)}
    pieces = windows(llm, texts, 1000, 100, NUM_TEXTS, 3)
    assert {(piece.start, len(piece.ids)) for piece in pieces} == {(1000, 1100)}
    assert all(piece.ids[0] == llm.tokenizer.bos_token_id for piece in pieces)
    ends = [tuple(piece.ids[piece.start :]) for piece in pieces]
    assert len({*ends}) == NUM_TEXTS
    assert pieces == windows(llm, texts, 1000, 100, NUM_TEXTS, 3)
    assert pieces != windows(llm, texts, 1000, 100, NUM_TEXTS, 4)


def test_short_texts_are_scored_at_shorter_contexts_or_refused(llm: LLM) -> None:
    pieces = windows(llm, {"text": text_of(1500)}, 4096, 100, NUM_TEXTS, 0)
    assert 512 <= pieces[0].start <= 700
    with refused("too_short: 800"):
        windows(llm, {"text": text_of(800)}, 4096, 100, NUM_TEXTS, 0)
