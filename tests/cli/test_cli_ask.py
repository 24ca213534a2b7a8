"""kvsift ask: one JSON document with every number, the same answers however a plan is spelt, and no silent dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli.watched import Outcome, Run

from kvsift import LLM

PLAN = "quest:budget=128:window=16:dense_layers=none"
COVERING = "quest:budget=2048:dense_layers=none"
KEYS = {
    "answers",
    "compare",
    "density",
    "device",
    "document_tokens",
    "dtype",
    "kv_bytes_dense",
    "kv_bytes_read",
    "model",
    "plan",
    "prompt_tokens",
    "read_density",
    "recall",
    "recovery",
    "tpot_s",
    "ttft_s",
    "visible_tokens",
}
ANSWER_KEYS = KEYS - {"answers", "compare", "device", "document_tokens", "dtype", "model", "plan", "read_density"} | {
    "question",
    "text",
    "token_ids",
}


@pytest.fixture
def ask(run: Run, model: Path, text: Path) -> Run:
    """Ask "Why?", or whatever is given, of the manual."""

    def ask(*options: object, question: tuple[str, ...] = ("Why?",)) -> Outcome:
        questions = [part for each in question for part in ("--question", each)]
        return run("ask", "--model", model, "--context", text, *questions, "--max-new-tokens", 6, *options)

    return ask


def untimed(document: Any) -> Any:
    """A document without its seconds and its memory, which depend on the machine and on what else was asked."""
    if isinstance(document, dict):
        held = ("kv_bytes", "peak_memory_bytes")
        return {k: untimed(v) for k, v in document.items() if not k.endswith("_s") and k not in held}
    return [untimed(each) for each in document] if isinstance(document, list) else document


def test_json_holds_every_number_and_stdout_nothing_else(ask: Run) -> None:
    outcome = ask("--plan", PLAN, "--compare", "dense", "--json")
    document = outcome.document
    assert outcome.err == ""
    assert document.keys() >= KEYS
    assert document["answers"][0].keys() >= ANSWER_KEYS
    assert document["plan"] == PLAN
    assert (document["model"], document["device"], document["dtype"]) == ("tiny", "cpu", "float32")
    assert document["prompt_tokens"] == 901 + len("\n\nQuestion: Why?\nAnswer:")
    assert 100 < document["visible_tokens"] <= 128
    assert document["density"] == pytest.approx(document["visible_tokens"] / document["prompt_tokens"], rel=0.01)
    assert 0 < document["kv_bytes_read"] < document["kv_bytes_dense"]
    assert 0 < document["recovery"] < 1
    assert document["tpot_s"] > 0
    assert document["ttft_s"] == pytest.approx(document["read_s"] + document["ttft_cached_s"])


def test_compare_answers_under_the_other_plan_too(ask: Run) -> None:
    document = ask("--plan", PLAN, "--compare", "dense", "--json").document
    compare = document["compare"]
    assert (compare["plan"], compare["density"], compare["recovery"]) == ("dense", 1.0, None)
    assert compare["kv_bytes_read"] == compare["kv_bytes_dense"] == document["kv_bytes_dense"]
    assert untimed(compare["answers"]) == untimed(ask("--plan", "dense", "--json").document["answers"])
    assert "compare" not in ask("--plan", PLAN, "--json").document


def test_how_the_document_was_read_is_proved_too(ask: Run) -> None:
    sifted = "prefill=quoka:budget=64:chunk=64:window=16:dense_layers=none"
    document = ask("--plan", sifted, "--compare", "dense", "--json").document
    assert 0.1 < document["read_density"] < 0.5
    assert document["compare"]["read_density"] == 1
    shown = ask("--plan", sifted).out
    assert "prefill density" in shown
    assert f"{100 * document['read_density']:.1f} %" in shown


def test_a_plan_that_read_everything_is_said_aloud(ask: Run) -> None:
    outcome = ask("--plan", "prefill=quoka:budget=2048:dense_layers=none", "--json", "--strict")
    assert outcome.code == 2
    assert "skipped nothing in prefill" in outcome.err


def test_every_question_is_answered_as_if_it_were_the_only_one(ask: Run) -> None:
    questions = ("Why?", "How many sacks of corn?")
    both = ask("--plan", PLAN, "--json", question=questions).document
    assert [answer["question"] for answer in both["answers"]] == list(questions)
    for question, answer in zip(questions, both["answers"]):
        alone = ask("--plan", PLAN, "--json", question=(question,)).document
        assert untimed(answer) == untimed(alone["answers"][0])
    assert both["kv_bytes_read"] == sum(answer["kv_bytes_read"] for answer in both["answers"])


def test_the_command_line_answers_what_the_library_answers(ask: Run, model: Path, text: Path) -> None:
    answer = LLM(model, PLAN).read(text.read_text()).ask("Why?", max_new_tokens=6)
    told = ask("--plan", PLAN, "--json").document["answers"][0]
    assert (told["text"], told["token_ids"]) == (answer.text, answer.token_ids)


@pytest.mark.parametrize(
    "content",
    [
        f"plan = '{PLAN}'\n",
        "[plan]\nmethod = 'quest'\nbudget = 128\nwindow = 16\ndense_layers = []\n",
        f"[plan]\nprefill = 'dense'\ndecode = '{PLAN}'\n",
        "[plan.decode]\nmethod = 'quest'\nbudget = 128\nwindow = 16\ndense_layers = []\n",
    ],
)
def test_a_plan_in_a_file_is_the_plan_in_text(ask: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.toml").write_text(content)
    from_file = ask("--plan", "plan.toml", "--json").document
    from_text = ask("--plan", PLAN, "--json").document
    assert from_file["plan"].removeprefix("prefill=dense,") == from_text["plan"]
    assert untimed(from_file["answers"]) == untimed(from_text["answers"])


def test_a_budget_above_the_context_is_said_aloud(ask: Run) -> None:
    outcome = ask("--plan", COVERING, "--json")
    assert outcome.document["density"] == 1
    assert outcome.err == (
        f"kvsift: WARNING: the plan {COVERING} skipped nothing in decode: every query saw its whole context. "
        "The context is shorter than the budget, or every layer is in dense_layers.\n"
    )


def test_strict_fails_when_nothing_was_skipped_and_still_answers(ask: Run) -> None:
    outcome = ask("--plan", COVERING, "--json", "--strict")
    assert outcome.code == 2
    assert '"answers"' in outcome.out
    assert outcome.err.startswith(f"kvsift: the plan {COVERING} skipped nothing in decode")
    assert outcome.err.count("\n") == 1


def test_strict_fails_for_the_compared_plan_too(ask: Run) -> None:
    assert ask("--plan", PLAN, "--compare", COVERING, "--json", "--strict").code == 2


@pytest.mark.parametrize("plan", [PLAN, "dense", "streaming_llm:budget=64:dense_layers=0"])
def test_a_plan_that_does_what_it_says_is_not_warned_about(ask: Run, plan: str) -> None:
    outcome = ask("--plan", plan, "--json", "--strict")
    assert (outcome.code, outcome.err) == (0, "")


def test_question_phase_decode_sifts_the_question(ask: Run) -> None:
    document = ask("--plan", PLAN, "--question-phase", "decode", "--json").document
    (phases,) = document["phases"]
    assert phases["prefill"]["queries"] == 0
    assert phases["decode"]["queries"] == 3 * (len("Why?\nAnswer:") + 5)


def test_without_probes_recovery_is_null(ask: Run) -> None:
    document = ask("--plan", PLAN, "--probe-every", 0, "--json").document
    assert document["recovery"] is document["recall"] is None


def test_sampling_repeats_with_its_seed(ask: Run) -> None:
    def tokens(seed: int) -> list[int]:
        document = ask("--plan", PLAN, "--temperature", 1.5, "--top-p", 0.95, "--seed", seed, "--json").document
        return document["answers"][0]["token_ids"]

    assert tokens(1) == tokens(1) != tokens(2)


def test_for_a_person_there_is_a_table_with_questions_answers_and_proof(
    ask: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    outcome = ask("--plan", PLAN, "--compare", "dense", question=("Why?", "How many sacks?"))
    assert (outcome.code, outcome.err) == (0, "")
    for shown in (
        "Why?",
        "How many sacks?",
        PLAN,
        "dense",
        "TTFT",
        "TPOT",
        "density",
        "100.0 %",
        "KV held",
    ):
        assert shown in outcome.out


def test_json_says_so_when_one_token_leaves_no_time_per_token(run: Run, model: Path, text: Path) -> None:
    command = ("ask", "--model", model, "--context", text, "--question", "Why?", "--max-new-tokens", 1)
    assert run(*command, "--json").document["tpot_s"] is None
    assert run(*command).code == 0
