"""kvsift explain: what it prints and writes, and what it refuses before anything is loaded."""

import os
from errno import ENOSPC
from pathlib import Path

import pytest
from cli.watched import Refused, Run

ASKED = "How many sacks?"
QUEST = "quest:budget=96:page_size=8:window=16:dense_layers=none"


def test_text_for_people(run: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    how = ["explain", "--model", model, "--context", text, "--question", ASKED, "--plan", QUEST, "--max-new-tokens", 3]
    outcome = run(*how, "--methods", "quest:page_size=8, streaming_llm")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0].startswith(f"{ASKED}  (tiny, {QUEST}")
    titles = [
        "document most read",
        "what methods would have read, with budget=96",
        "by layer and head",
        "layers and heads",
    ]
    places = [next(index for index, line in enumerate(lines) if title in line) for title in titles]
    assert places == sorted(places)
    rows = [line for line in lines if " visible)" in line]
    assert len(rows) == 3 * 4, "a row per layer and head"
    table = lines[places[1] : places[2]]
    compared = [line.split("│")[1].strip() for line in table if line.startswith("│")]
    assert compared == ["oracle_tokens", "quest:page_size=8", "streaming_llm"]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_page_that_cannot_be_written_loses_no_output(
    run: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    how = ["explain", "--model", model, "--context", text, "--question", ASKED, "--plan", QUEST, "--methods", "none"]
    how += ["--max-new-tokens", 2, *form]
    alone = run(*how, "--html", "other.html")

    def full(file: int) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    outcome = run(*how, "--html", "page.html")
    assert outcome.code == 2
    assert alone.out.startswith(outcome.out)
    assert outcome.out
    assert "page.html is not written: the disk is full." in outcome.err
    assert not list(Path().glob("page.html*"))


def test_json_says_it_all(run: Run, model: Path, text: Path) -> None:
    document = run(
        "explain", "--model", model, "--context", text, "--question", ASKED, "--plan", "dense", "--budget", 128,
        "--methods", "none", "--json", "--max-new-tokens", 2, "--passage-tokens", 100, "--context-tokens", 500,
    ).document  # fmt: skip
    assert document["question"] == ASKED
    assert document["plan"] == "dense"
    sizes = [each["stop"] - each["start"] for each in document["passages"]]
    assert all(50 < size <= 100 for size in sizes[1:-2])
    assert 500 < sum(sizes) < 560, "so much of the text, and the question"
    assert [each["name"] for each in document["choices"]] == ["oracle_tokens"]
    assert document["choices"][0]["visible_tokens"] == 128
    assert len(document["readings"]) == 3
    for reading in document["readings"]:
        assert [len(row) for row in reading["mass"]] == [len(sizes)] * 4
        assert all(sum(row) == pytest.approx(1) for row in reading["mass"])


def test_several_tokens_in_text_json_and_on_the_page(run: Run, model: Path, text: Path) -> None:
    how = ["explain", "--model", model, "--context", text, "--question", ASKED, "--plan", QUEST, "--methods", "none"]
    how += ["--max-new-tokens", 3]
    outcome = run(*how, "--token", "0,2", "--html", "page.html")
    assert outcome.out.count("parts of the document most read") == 2
    assert outcome.out.count("page.html") == 1
    html = Path("page.html").read_text()
    assert 'id="t0"' in html
    assert 'id="t2"' in html
    documents = [run(*how, "--token", token, "--json").document for token in ("0-1", "all", "1")]
    assert [each["token"] for each in documents[0]] == [0, 1]
    assert [each["token"] for each in documents[1]] == [0, 1, 2]
    assert documents[2] == documents[0][1], "one token is one object"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--token", 32], "token=32 is not among the tokens that may be generated: 0 to 31. Raise max_new_tokens"),
        (["--token", "2-1"], "--token 2-1: write a token such as 2, several as 0,2, a range as 0-3, or all."),
        (["--token", "-1"], "--token -1: write a token such as 2"),
        (["--token", "0,"], "--token 0,: write a token such as 2"),
        (["--methods", "quest,"], "--methods quest,: a name is missing; write for instance quest,loki, or none."),
        (["--budget", 5000], "the prompt has 936 tokens and all of them fit the budget"),
        (["--html", "nowhere/page.html"], "--html nowhere/page.html: the directory nowhere does not exist."),
    ],
)
def test_refused(refused: Refused, model: Path, text: Path, options: list[object], message: str) -> None:
    said = refused("explain", "--model", model, "--context", text, "--question", ASKED, *options)
    assert message in said


def test_an_answer_that_ends_early_says_which_tokens_it_has(run: Run) -> None:
    outcome = run("explain", "--context-tokens", 800, "--token", 20, "--methods", "none")
    assert outcome.code == 2
    assert outcome.err == "kvsift: the answer has no token 20; its tokens are: 0 ' v', 1 'el', 2 'vet', 3 ' canyon'.\n"


def test_escapes_and_markup_of_a_context_are_printed_as_they_are(
    run: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    Path("hostile.txt").write_text(f"{text.read_text()[:200]} \x1b]0;mine\x07\x1b[2J[/INST] {text.read_text()[200:]}")
    outcome = run(
        "explain", "--model", model, "--context", "hostile.txt", "--question", "Who[/x]?\x1b[2J", "--plan", "dense",
        "--methods", "none", "--passage-tokens", 500, "--max-new-tokens", 2,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert not set("\x1b\x07") & set(outcome.out)
    assert "Who[/x]?\\x1b[2J" in outcome.out
