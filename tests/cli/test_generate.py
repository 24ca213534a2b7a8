"""kvsift generate: the text goes on, on stdout and nothing else there."""

import json
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from cli.watched import Outcome, Refused, Run

from kvsift import LLM
from kvsift.api.answer import Answer

PLAN = "quest:budget=128:window=16:dense_layers=none"


@pytest.fixture
def generate(run: Run, model: Path) -> Run:
    def generate(*options: object) -> Outcome:
        return run("generate", "--model", model, "--plan", PLAN, "--max-new-tokens", 8, *options)

    return generate


def test_json_is_one_document_with_the_text_and_its_numbers(generate: Run, model: Path, text: Path) -> None:
    outcome = generate("--prompt-file", text, "--json")
    answer = LLM(model, PLAN).generate(text.read_text(), max_new_tokens=8)
    document = outcome.document
    assert outcome.err == ""
    assert (document["text"], document["token_ids"]) == (answer.text, answer.token_ids)
    assert document["token_ids"] == generate("--prompt", text.read_text(), "--json").document["token_ids"]
    assert document["prompt_tokens"] == 901
    assert 0 < document["density"] < 0.2
    assert document["plan"] == PLAN


def test_for_a_person_stdout_is_the_text_and_stderr_the_proof(generate: Run, text: Path) -> None:
    expected = json.loads(generate("--prompt-file", text, "--json").out)["text"]
    outcome = generate("--prompt-file", text)
    assert outcome.code == 0
    assert outcome.out == expected + "\n"
    assert "density" in outcome.err


def test_a_length_that_is_none_is_refused(refused: Refused, model: Path) -> None:
    assert "dense_below='never' must be a whole number, 0 or more, or 'auto'" in refused(
        "generate", "--model", model, "--prompt", "Once", "--dense-below", "never"
    )


def test_generate_says_why_it_ended(generate: Run, text: Path) -> None:
    assert generate("--prompt-file", text, "--json").document["finish_reason"] == "length"
    outcome = generate("--prompt-file", text)
    assert "[cut after 8 tokens]" in outcome.err
    assert "TTFT (document cached)" not in outcome.err
    assert generate("--prompt-file", text, "--quiet").err == "[cut after 8 tokens]\n"


def test_text_for_a_terminal_has_no_escapes_and_for_a_file_is_as_it_is(
    generate: Run, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stream(llm: LLM, prompt: str, **options: Any) -> Answer:
        options["on_text"]("a\x1b[2J[/b]")
        return answer(llm, prompt, max_new_tokens=2)

    answer = LLM.generate
    monkeypatch.setattr(LLM, "generate", stream)
    assert generate("--prompt-file", text).out == "a\x1b[2J[/b]\n"
    monkeypatch.setattr("kvsift.cli.generate.to_terminal", lambda: True)
    assert generate("--prompt-file", text).out == "a\\x1b[2J[/b]\n"


def test_the_text_may_go_to_a_file_and_come_from_stdin(
    generate: Run, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate("--prompt-file", text, "--json").document["text"]
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(text.read_bytes())))
    assert generate("--prompt-file", "-", "--out", "text.txt").out == ""
    assert Path("text.txt").read_text() == expected
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(text.read_bytes())))
    assert generate("--prompt", "-", "--json").document["text"] == expected
    generate("--prompt-file", text, "--out", "text.json", "--json")
    assert json.loads(Path("text.json").read_text())["text"] == expected


def test_the_text_is_json_under_a_schema(generate: Run, text: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [12, {"a": null}]}')
    outcome = generate("--prompt-file", text, "--schema", schema, "--json", "--max-new-tokens", 20)
    assert json.loads(outcome.document["text"]) in (12, {"a": None})
