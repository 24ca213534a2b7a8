"""A budget that doubled, as a user of the commands learns of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli.watched import Refused, Run

PLAN = "quest:budget=128:window=16:dense_layers=none"
GUARDED = f"{PLAN}:min_recovery=0.9"


def arguments(command: str, model: Path, text: Path) -> tuple[Any, ...]:
    source = ("--context", text, "--question", "Why?") if command == "ask" else ("--prompt-file", text)
    return command, "--model", model, *source, "--max-new-tokens", 6


def line_of(event: dict[str, Any]) -> str:
    return f"recovery {event['recovery']:.2f} < 0.9 at token {event['token']}: {event['from']} -> {event['to']}"


@pytest.mark.parametrize("command", ["ask", "generate"])
def test_a_budget_that_doubled_is_said_in_a_line_and_in_json(command: str, run: Run, model: Path, text: Path) -> None:
    given = arguments(command, model, text)
    document = run(*given, "--plan", GUARDED, "--json").document
    [events] = document["guard"]
    assert (events[0]["token"], events[0]["from"], events[0]["to"]) == (3, "budget=128", "budget=256")
    shown = run(*given, "--plan", GUARDED)
    assert all(line_of(event) in shown.out + shown.err for event in events)
    calm = run(*given, "--plan", PLAN)
    assert "recovery " not in calm.out + calm.err
    quiet = run(*given, "--plan", GUARDED, "--quiet")
    assert "recovery " not in quiet.out + quiet.err


def test_each_line_names_its_answer_where_there_are_several(run: Run, model: Path, text: Path) -> None:
    given = (*arguments("ask", model, text), "--question", "How many?")
    document = run(*given, "--plan", GUARDED, "--compare", "dense", "--json").document
    out = run(*given, "--plan", GUARDED, "--compare", "dense").out
    for number, answer in enumerate(document["answers"], 1):
        assert answer["guard"]
        assert all(f"answer {number} under {GUARDED}: {line_of(event)}" in out for event in answer["guard"])
    assert document["compare"][0]["guard"] == [[], []]


def test_lines_of_json_have_it_too(run: Run, model: Path, text: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('"Why?"\n')
    lines = run("ask", "--model", model, "--context", text, "--questions-file", questions, "--plan", GUARDED,
                "--max-new-tokens", 6).out  # fmt: skip
    assert json.loads(lines.splitlines()[0])["guard"][0]["from"] == "budget=128"


def test_without_probes_it_is_refused(refused: Refused, model: Path, text: Path) -> None:
    given = arguments("ask", model, text)
    assert "probe_every=0 takes none" in refused(*given, "--plan", GUARDED, "--probe-every", 0)


def test_a_guarded_plan_can_be_explained(run: Run, model: Path, text: Path) -> None:
    shown = run("explain", "--model", model, "--context", text, "--question", "Why?", "--plan", GUARDED,
                "--methods", "quest", "--max-new-tokens", 3, "--json")  # fmt: skip
    assert shown.document
