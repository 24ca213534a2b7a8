"""kvsift chat at a terminal and in a pipe: answers, commands, interrupts, exit codes."""

import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli.terminal import Terminal
from cli.watched import Outcome, Refused, Run

from kvsift.api.passages import Passages
from kvsift.cli.chat import NO_TERMINAL, is_command
from kvsift.cli.conversation import ChatContext, strongest
from kvsift.errors import InputError

FACT = "The access code of the north warehouse is 48213."
QUESTION = "What is the access code of the north warehouse?"
PLAN = "quest:budget=128:window=32:dense_layers=none"
Piped = Callable[..., Outcome]


@pytest.fixture(scope="module")
def manual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of about 2,080 tokens, with a fact in line 41."""
    lines = [f"The {n}th mill by the river grinds {n * 37 % 101} sacks of corn on every day." for n in range(80)]
    path = tmp_path_factory.mktemp("manual") / "manual.txt"
    path.write_text("\n".join([*lines[:40], FACT, *lines[40:]]) + "\n")
    return path


@pytest.fixture
def piped(run: Run, monkeypatch: pytest.MonkeyPatch) -> Piped:
    """Run kvsift chat over lines of a pipe."""

    def piped(lines: str | bytes, *arguments: object) -> Outcome:
        data = lines.encode() if isinstance(lines, str) else lines
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))  # strict, as Python opens it
        return run("chat", *arguments, "--threads", "1")

    return piped


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def terminal(*arguments: object, **settings: int) -> Terminal:
        opened.append(Terminal(tmp_path, "chat", *arguments, **settings))
        return opened[-1]

    yield terminal
    for each in opened:
        each.close()


def test_a_pipe_is_answered_line_by_line_and_stdout_has_the_answers_alone(piped: Piped, manual: Path) -> None:
    done = piped(f"\ufeff{QUESTION}\n\n  \r\n{QUESTION}\r\n", "--context", manual, "--plan", PLAN)
    assert (done.code, done.out) == (0, "48213\n48213\n")
    warning, *asked, first, again, second = done.err.splitlines()
    assert [*asked, again] == 2 * [f"> {QUESTION}"], "a log has questions beside their numbers"
    assert "kvsift chat Qwen/Qwen3-4B" in warning
    assert "copies planted facts" in warning
    assert " ms per token, density " in first
    assert ", 0 of 2," in first
    assert ", 2,048 of 2," in second, "whole chunks of 512 tokens"


def test_lines_that_are_refused_leave_the_others_and_end_in_exit_code_2(piped: Piped, model: Path) -> None:
    lines = b"/plam\n/undo\n/passages\nnot UTF-8: \xff\n/save\n/save 'a\n/passages 0\n/context -\nWho?\n/plan qest\n"
    done = piped(lines, model, "--max-new-tokens", "3", "--quiet")
    assert done.code == 2
    refusals = done.err.splitlines()
    for says, line in zip(
        ["did you mean '/plan'? Known: /context", "no turn to undo", "no context", "", "name of one file",
         "close the quotation", "1 or more", "Name files", "did you mean 'quest'?"], refusals, strict=True,
    ):  # fmt: skip
        assert line.startswith("kvsift: ")
        assert says in line
    assert len(done.out.splitlines()) >= 1, "the question between them is answered"
    assert "\x1b" not in done.out + done.err


def test_nothing_on_stdin_is_no_error(piped: Piped, run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert piped("", model) == Outcome(0, "", "")
    monkeypatch.setattr(sys, "stdin", None)
    assert run("chat", model).code == 0
    assert piped("/quit\n/undo\n", model) == Outcome(0, "", "> /quit\n"), "nothing after it is read"


def test_a_plan_changes_with_the_next_turns(piped: Piped, model: Path, text: Path) -> None:
    lines = f"/plan\nWho?\n/plan {PLAN}\nWho?\n/plan snapkv:budget=128:window=32:evict=true\n/plan\nWho?\n"
    done = piped(lines, model, "--context", text, "--plan", "dense", "--max-new-tokens", "4")
    assert done.code == 0, done.err
    shown = [line for line in done.out.splitlines() if line.startswith(("plan: ", "Every turn"))]
    assert shown[0] == "plan: dense"
    assert shown[1].startswith("plan: quest:budget=128")
    assert shown[2] == shown[4]
    assert "snapkv" in shown[2]
    first, second, third = (line for line in done.err.splitlines() if "density" in line)
    assert "density 100.0 %" in first
    assert "density 100.0 %" not in second
    assert ", 0 of" not in second
    assert ", 0 of" in third
    assert sum(line.startswith("Every turn reads the whole conversation: ") for line in shown) == 1


def test_passages_are_lines_of_the_context_and_the_strongest_come_first(piped: Piped, manual: Path) -> None:
    done = piped(f"{QUESTION}\n/passages 4\n/undo\n/passages\n", "--context", manual, "--plan", PLAN)
    answer, meaning, *lines, others, removed = done.out.splitlines()
    assert answer == "48213"
    assert meaning == "lines that were selected, each with the share of the steps, heads and layers that did:"
    assert next(line for line in lines if line.startswith("line 41, ")).endswith("warehouse is 48213.")
    shares = [int(line.split(", ")[1].partition(" ")[0]) for line in lines]
    assert len(shares) == 4
    assert shares == sorted(shares, reverse=True)
    assert "other lines were read less; /passages " in others
    assert removed == f"removed: {QUESTION}"
    assert done.code == 2
    assert "no answer has passages" in done.err


def test_a_conversation_is_saved_whole_and_replaces_a_file_only_when_asked_twice(
    piped: Piped, manual: Path, tmp_path: Path
) -> None:
    kept, other = tmp_path / "my chat.md", tmp_path / "other.md"
    kept.write_text("mine")
    save = f"/save '{kept}'"
    done = piped(f"/save {other}\n{QUESTION}\n{save}\n/help\n{save}\n/save no/chat.md\n", "--context", manual)
    assert kept.read_text() == "mine", "a command between the two is no second ask"
    assert not other.exists()
    assert done.err.count("exists. Give the command again to replace it") == 2
    assert "nothing to save yet" in done.err
    assert "the directory no does not exist" in done.err
    done = piped(f"{QUESTION}\n{save}\n{save}\n/save --force '{kept}'\n/save {other}\n", "--context", manual)
    assert done.out.count("1 turn\n") == 3
    text = kept.read_text()
    assert text.startswith(f"# Chat with `embedded`, about `{manual}`\n\n> {QUESTION}\n\n48213\n\n*")
    assert other.read_text() == text
    assert {path.name for path in tmp_path.iterdir()} == {"my chat.md", "other.md"}


def test_another_context_begins_a_new_conversation(piped: Piped, manual: Path, tmp_path: Path) -> None:
    (tmp_path / "ship.txt").write_text("The captain of the ship Aurora is Elena Voss.\n")
    question = "Who is the captain of the ship Aurora?"
    done = piped(f"{QUESTION}\n/context ship.txt\n{question}\n/undo\n/undo\n/context none.txt\n/context\n",
                 "--context", manual)  # fmt: skip
    out = done.out.splitlines()
    assert out[:3] == ["48213", out[1], "Elena Voss"]
    assert out[1].startswith("context: ship.txt, ")
    assert out[4] == out[1], "a file that is missing changes nothing"
    assert "no turn to undo" in done.err
    assert "none.txt does not exist" in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--plan", "qest:budget=9"), "did you mean 'quest'?"),
        (("--context", "none.txt"), "the context file none.txt does not exist."),
        (("--temperature", "-1"), "temperature"),
        (("--max-new-tokens", "5000"), "length is 4096 tokens"),
        (("--system", "Be brief."), "chat template"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    refused: Refused, model: Path, arguments: tuple[str, ...], says: str
) -> None:
    assert says in refused("chat", model, *arguments)


def test_a_context_from_a_pipe_needs_a_terminal_for_questions(
    refused: Refused, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_terminal() -> int:
        raise InputError(NO_TERMINAL)

    monkeypatch.setattr("kvsift.cli.chat.open_terminal", no_terminal)
    assert "no terminal to type questions at" in refused("chat", model, "--context", "-")


def test_a_terminal_of_40_columns(terminals: Callable[..., Terminal], manual: Path) -> None:
    chat = terminals("--context", manual, "--plan", PLAN)
    chat.until(r"Ctrl-D leaves\.\n+> $")
    chat.type(f"{QUESTION}\r")
    answered = chat.until(r"prompt\s+tokens\s+cached\n> $")
    assert re.search("[\r\n]48213\n", answered)
    assert "\x1b[2m" in chat.raw, "the numbers are dim"
    chat.type("/help\r")
    listed = chat.until(r"stops\s+an\s+answer\n> $")
    chat.type("/passages 1\r")
    listed += chat.until(r"lists all\.\n")
    assert max(map(len, listed.splitlines())) <= 40
    chat.type("\x1b[A\x1b[A\r")  # the line before the last one
    chat.until(r"stops\s+an\s+answer\n> $")
    chat.type("\x04")
    assert chat.end() == 0


def test_ctrl_c_stops_an_answer_and_keeps_the_chat(
    terminals: Callable[..., Terminal], model: Path, text: Path, tmp_path: Path
) -> None:
    chat = terminals(model, "--context", text, "--max-new-tokens", "3000", columns=100)
    chat.until(r"Ctrl-D leaves\.\n> $")
    chat.type("Who?\r")
    chat.until(r"Who\?\n[^\n]*\S{5}")
    chat.type("\x03\x03\x03")
    chat.until(r"stopped\n(> )?(\n\(Ctrl-D or /quit leaves\.\)\n> )?$")  # the last may come at the prompt
    chat.interrupt_until(r"Ctrl-D or /quit leaves")
    chat.type("/save chat.md\r")
    chat.until(r"saved: chat\.md, 1 turn\n> $")
    assert "> Who?\n" in (tmp_path / "chat.md").read_text()
    assert (tmp_path / "chat.md").read_text().endswith("*stopped*\n")
    chat.type("/undo\r")
    chat.until(r"removed: Who\?\n> $")
    chat.type("When?\r")
    chat.until(r"When\?\n[^\n]*\S{5}")
    chat.type("\x03")
    chat.until(r"stopped\n> $")
    chat.type("/quit\r")
    assert chat.end() == 0
    assert "Traceback" not in chat.text


def test_lines_of_several_files_are_counted_in_each() -> None:
    context = ChatContext([("a.txt", "\n\none\ntwo\n"), ("b.txt", "three\n\nfour " + "x" * 700 + "\n")])
    text = context.text

    def places(word: str) -> list[tuple[str, int]]:
        return [(place.file, place.line) for place in context.places(text.index(word), text.index(word) + len(word))]

    assert (places("one"), places("two"), places("three"), places("four")) == (
        [("a.txt", 3)], [("a.txt", 4)], [("b.txt", 1)], [("b.txt", 3)]
    )  # fmt: skip
    assert [(place.file, place.line) for place in context.places(0, len(text))] == [
        ("a.txt", 3), ("a.txt", 4), ("b.txt", 1), *[("b.txt", 3)] * 3
    ]  # fmt: skip
    assert ChatContext([("a.txt", "\n\none")]).places(2, 5)[0].line == 3
    assert ChatContext().text == ""


def test_the_line_with_the_largest_share_is_the_strongest() -> None:
    context = ChatContext([("a.txt", "one two\nthree four\nfive")])
    found = strongest(context, Passages(23, [(0, 3, 0.25), (4, 12, 0.5), (19, 23, 0.75)], {}))
    assert [(line.place.line, line.share, line.at) for line in found] == [(3, 0.75, 19), (1, 0.5, 4), (2, 0.5, 8)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [("/help", True), (" /plan dense ", True), ("/", True), ("/etc/passwd: who?", False), ("a /help", False)],
)
def test_a_path_is_no_command(line: str, expected: bool) -> None:
    assert is_command(line) == expected


def test_exact_turns_are_those_of_dense_attention_and_have_no_passages(piped: Piped, manual: Path) -> None:
    lines = f"{QUESTION}\n/passages\n"
    dense = piped(lines, "--context", manual, "--plan", "dense", "--quiet")
    done = piped(lines, "--context", manual, "--plan", PLAN, "--exact", "--quiet")
    assert done.out.splitlines()[0] == dense.out.splitlines()[0] == "48213"
    assert done.code == 2
    assert "exact answers read everything" in done.err
