"""Progress is a line every ten seconds where stderr is a log, and nothing under --quiet; terminals execute no text."""

import sys
from itertools import count
from pathlib import Path

import pytest

from kvsift.cli import printing
from kvsift.cli.printing import ProgressBar, StrippedText, cell, plain


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six seconds between any two looks at the clock."""
    times = count(0, 6.0)
    monkeypatch.setattr(printing, "monotonic", lambda: next(times))


@pytest.mark.usefixtures("clock")
def test_a_log_gets_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as progress:
        for done in range(0, 6000, 1000):
            progress.reading(done, 8000)
        for done in range(4):
            progress.answering(done, 100, "some text")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "kvsift: reading: 2,000 of 8,000 tokens, 36 s left",
        "kvsift: reading: 4,000 of 8,000 tokens, 24 s left",
        "kvsift: answering: 2 of 100 answers, 588 s left",
    ]


@pytest.mark.usefixtures("clock")
def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(quiet=True) as progress:
        for done in range(9):
            progress.reading(done, 10)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal_leaves_stdout_to_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressBar() as progress:
        progress.loading()
        progress.reading(5, 10)
        progress.answering(1, 10, "text [/x] so\x1b[2J far")
        print("the answer")
        progress.clear()
        progress.clear()
    out, err = capsys.readouterr()
    assert out == "the answer\n"
    assert "\x1b[2J" not in err


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain [b]text[/b]\twith\nlines ü ☃ 🌲 👩‍🚀", "plain [b]text[/b]\twith\nlines ü ☃ 🌲 👩‍🚀"),
        ("\x1b[2J\x07\x00\x7f\x9b\r", "\\x1b[2J\\x07\\x00\\x7f\\x9b\\r"),
        ("a line\r\nanother", "a line\nanother"),
        ("abc\u202ecba\u2066", "abc\\u202ecba\\u2066"),
        ("no UTF-8: \udcff", "no UTF-8: \\udcff"),
    ],
)
def test_what_a_terminal_would_obey_is_written_out(given: str, shown: str, tmp_path: Path) -> None:
    assert plain(given) == shown == cell(given).plain
    (tmp_path / "shown.txt").write_text(plain(given), encoding="utf-8")


def test_white_space_at_both_ends_of_an_answer_is_not_shown() -> None:
    stripped = StrippedText()
    assert [stripped.add(piece) for piece in (" ", "\n a", " ", "", "b ", "c\n")] == ["", "a", "", "", " b", " c"]
