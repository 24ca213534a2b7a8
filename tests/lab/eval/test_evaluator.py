"""Set-ups, conversations, perplexity and files: what reaches the model, and under which rule."""

import json
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.tiny_directory import CHAT_TEMPLATE, write_model
from kvsift_lab.eval.evaluator import Evaluator
from kvsift_lab.eval.recipe import EvalRecipe
from kvsift_lab.eval.results import difference, document_of, is_extended
from kvsift_lab.eval.tasks import Question, Sample
from lab.eval.samples import recipe_of, recipe_text
from refusals import refused

from kvsift.api.llm import LLM

PLANS = '"dense", "quest:budget={budget}:window=16", "streaming_llm:budget={budget}"'
NOTHING = frozenset()


def evaluator(folder: Path, model: Path, *changes: tuple[str, str]) -> Evaluator:
    return Evaluator(recipe_of(folder, ("[64, 256]", "[128]"), *changes, model=model), threads=1)


def results(asked: Evaluator) -> list[dict[str, Any]]:
    return list(asked.results(asked.recipe.jobs[0], NOTHING))


def test_plans_that_sift_in_prefill_read_the_context_themselves(model: Path, tmp_path: Path) -> None:
    plans = (PLANS, '"dense", "prefill=quoka:budget={budget}:chunk=64:window=16"')
    dense, sifted = results(evaluator(tmp_path, model, plans))
    assert dense["prefill_visible_tokens"] is None
    assert 100 < sifted["prefill_visible_tokens"] < 200


def test_a_sample_says_where_its_budget_doubled(model: Path, tmp_path: Path) -> None:
    plans = (PLANS, '"dense", "quest:budget={budget}:window=16:dense_layers=none:min_recovery=0.95"')
    dense, guarded = results(evaluator(tmp_path, model, plans))
    assert "guard" not in dense
    assert guarded["guard"][0]["from"] == "budget=128"
    assert json.loads(json.dumps(guarded)) == guarded


def test_set_ups_differ_in_the_phase_of_the_question(model: Path, tmp_path: Path) -> None:
    """Decoded, its tokens are answered under the decode rule; prefilled, only those of the answer are."""
    queries = {}
    for setup in ("question_decoded", "whole_prompt"):
        asked = evaluator(tmp_path, model, ("seed = 5", f"seed = 5\nsetup = '{setup}'"))
        seen: list[dict[str, Any]] = []
        prefill = asked.llm.feed

        def counting(cache: Any, ids: Any, *args: Any, into: Any = seen, call: Any = prefill, **kwargs: Any) -> Any:
            into.append({"count": len(ids), "phase": kwargs.get("phase", args[1] if len(args) > 1 else "prefill")})
            return call(cache, ids, *args, **kwargs)

        asked.llm.feed = counting  # type: ignore[method-assign]
        (first, *_) = results(asked)
        assert first["setup"] == setup
        queries[setup] = {each["phase"] for each in seen if each["count"] > 1}  # of contexts and questions
    assert queries == {"question_decoded": {"prefill", "decode"}, "whole_prompt": {"prefill"}}


def test_memory_is_asked_for_what_each_plan_needs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freeing = "both=keydiff:budget={budget}:window=16:evict=true"
    asked = evaluator(tmp_path, model, (PLANS, f'"dense", "{freeing}"'))
    plans, check = [], asked.llm.check
    monkeypatch.setattr(asked.llm, "check", lambda ids, most, plan: plans.append(plan) or check(ids, most, plan))
    results(asked)
    assert {str(plan).partition(":")[0] for plan in plans} == {"dense", "both=keydiff"}


def test_sparse_prefill_reads_the_question_under_the_prefill_rule(model: Path, tmp_path: Path) -> None:
    plans = (PLANS, '"prefill=quoka:budget={budget}:chunk=64:window=16"')
    (sifted,) = results(evaluator(tmp_path, model, plans, ("seed = 5", "seed = 5\nsetup = 'sparse_prefill'")))
    assert sifted["setup"] == "sparse_prefill"
    assert sifted["density"] == 1  # the answer is decoded densely


def test_a_method_that_learns_from_the_prompt_reads_all_of_it_where_all_is_prefilled(
    model: Path, tmp_path: Path
) -> None:
    plans = (PLANS, '"snapkv:budget={budget}:window=16"')
    asked = evaluator(tmp_path, model, plans, ("seed = 5", "seed = 5\nsetup = 'whole_prompt'"))
    row = asked.recipe.rows[0]
    document = asked._document(asked.contexts.sample(asked.recipe.jobs[0]))
    ids = list(range(3, 50))
    assert asked._document_for(document, ids, row).num_tokens == len(ids) - 1
    decoded = evaluator(tmp_path, model, plans)
    assert decoded._document_for(document, ids, row) is document


def test_what_is_done_is_not_asked_again(model: Path, tmp_path: Path) -> None:
    asked = evaluator(tmp_path, model, ('"passkey", "key_value"', '"key_value"'))
    every = results(asked)
    done = frozenset((each["plan"], each["question"]) for each in every[::2])
    rest = list(asked.results(asked.recipe.jobs[0], done))
    assert [(each["plan"], each["question"]) for each in rest] == [(e["plan"], e["question"]) for e in every[1::2]]
    assert [each["answer"] for each in rest] == [each["answer"] for each in every[1::2]]


@pytest.fixture
def talk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Evaluator, Sample]:
    """A conversation of three turns."""
    asked = evaluator(tmp_path, model, (PLANS, '"dense"'))
    context = asked.contexts.sample(asked.recipe.jobs[0])
    questions = tuple(Question(f"Turn {n}?", "x", 0.1 * n, max_new_tokens=3) for n in range(3))
    sample = Sample("passkey", context.context, context.context_ids, questions, in_turn=True)
    monkeypatch.setattr(asked.contexts, "sample", lambda job: sample)
    return asked, sample


def test_turns_follow_the_questions_and_answers_before_them(
    talk: tuple[Evaluator, Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, sample = talk
    prompts = []
    check = asked.llm.check
    monkeypatch.setattr(asked.llm, "check", lambda ids, *more: prompts.append(ids[0]) or check(ids, *more))
    answers = results(asked)
    tokenizer = asked.llm.tokenizer
    said = [tokenizer.decode(ids[len(sample.context_ids) :]) for ids in prompts]
    assert said[0] == "\n\nQuestion: Turn 0?\nAnswer:"
    assert said[1] == f"{said[0]} {answers[0]['answer']}\n\n\nQuestion: Turn 1?\nAnswer:"
    assert said[2] == f"{said[1]} {answers[1]['answer']}\n\n\nQuestion: Turn 2?\nAnswer:"


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE], ids=["no template", "a chat template"])
def test_perplexity_is_that_of_one_forward_pass_when_nothing_is_hidden(
    template: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", chat_template=template)
    asked = evaluator(tmp_path, model, (PLANS, '"dense", "quest:budget={budget}:window=16"'))
    ids = asked.contexts.sample(asked.recipe.jobs[0]).context_ids
    sample = Sample("passkey", "", ids[:600], (), targets=ids[600:620])
    monkeypatch.setattr(asked.contexts, "sample", lambda job: sample)
    dense, quest = results(asked)
    with torch.inference_mode():
        logits = asked.llm.model(input_ids=torch.tensor([ids[:620]])).logits[0].float().log_softmax(-1)
    expected = -sum(float(logits[at - 1, ids[at]]) for at in range(600, 620)) / 20
    assert dense["nll"] == pytest.approx(expected, rel=1e-3)
    assert dense["score"] == pytest.approx(exp(-dense["nll"]), rel=1e-5)
    assert quest["nll"] != dense["nll"]
    assert dense["kl"] == pytest.approx(0.0, abs=1e-6)
    assert dense["agreement"] == 1.0
    assert quest["kl"] > 1e-3
    assert 0 <= quest["agreement"] <= 1
    assert quest["sparse_layer_visible_tokens"] <= 128
    assert (dense["questions"], dense["question"]) == (1, 0)


def test_two_files_of_one_name_are_refused(model: Path, tmp_path: Path) -> None:
    files = ""
    for task in ("vt", "qa_1"):
        (tmp_path / task).mkdir()
        (tmp_path / task / "validation.jsonl").write_text("{}\n")
        files += f"[[files]]\nkind = 'longbench'\npath = '{tmp_path / task / 'validation.jsonl'}'\n"
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text(model=model) + files)
    with refused("invalid_value: 'validation'"):
        EvalRecipe.load(path)


def test_files_of_plans_are_part_of_a_recipe(model: Path, tmp_path: Path) -> None:
    anchors = tmp_path / "anchors.json"
    anchors.write_text((Path(__file__).parents[3] / "lab/recipes/anchors.json").read_text())
    plans = (PLANS, f'"dense", "sketch:budget={{budget}}:anchors={anchors}"')
    recipe = recipe_of(tmp_path, ("[64, 256]", "[128]"), plans, model=model)
    first = document_of(recipe)
    anchors.write_text(anchors.read_text() + "\n")
    second = document_of(recipe)
    assert list(first["digests"]) == [str(anchors)]
    assert not is_extended(first, second)
    assert "digests" in difference(first, second)
    assert is_extended({**first, "digests": {}}, second), "older results have none"


def test_a_model_with_a_chat_template_is_asked_in_its_own_format(tmp_path: Path) -> None:
    chat = write_model(tmp_path / "chat", chat_template=CHAT_TEMPLATE)
    asked = evaluator(tmp_path, chat, (PLANS, '"dense"'))
    sample = asked.contexts.sample(asked.recipe.jobs[0])
    question = Question("Which?", "x", 0.5, answer_prefix=" It is")
    ids = asked._prompt(asked._document(sample), sample, question, asked.recipe.rows[0])
    text = LLM(chat, "dense").tokenizer.decode(ids)
    assert text.endswith("Which?\n[assistant]  It is")
    assert text.startswith("<bos>[user] ")


def test_a_chat_model_that_answers_in_a_sentence_is_not_scored_0_throughout(tmp_path: Path) -> None:
    models = {"contains": write_model(tmp_path / "chat", chat_template=CHAT_TEMPLATE), "exact": write_model(tmp_path)}
    for scorer, model in models.items():
        asked = evaluator(tmp_path, model, (PLANS, '"dense"'))
        job = asked.recipe.jobs[0]
        sample = asked.contexts.sample(job)
        asked.contexts.sample = lambda job, sample=sample: sample  # type: ignore[method-assign, misc]
        document, expected = asked._document(sample), sample.questions[0].answer
        sentence = document.ask("Which?", max_new_tokens=1)
        object.__setattr__(sentence, "text", f"The pass key is: {expected}.")
        document.go_on = lambda *args, answer=sentence, **how: answer  # type: ignore[assignment, misc]
        asked._document = lambda sample, document=document: document  # type: ignore[method-assign, misc]
        (result,) = asked.results(job, NOTHING)
        assert (result["scorer"], result["score"]) == (scorer, float(scorer == "contains"))
