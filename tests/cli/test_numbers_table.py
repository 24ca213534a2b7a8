"""Tables of plans on terminals of any width: nothing is cut off, and neither words nor numbers are broken."""

import re

import pytest
from cli.watched import Run
from rich.console import Console

from kvsift.cli.numbers_table import _index, print_columns

PLANS = ["dense", "quest:budget=2048", "sketch:budget=1024:dense_layers=none", "snapkv:budget=128", "tova:budget=64"]
LABELS = ["", "TTFT (document cached)", "visible tokens (sparse layers)"]
CELL = "51.7 %, 2 of 5 layers dense, elegant-notebook"
COLUMNS = [[plan, CELL, CELL] for plan in PLANS]


def table_of(width: int, count: int) -> list[list[list[str]]]:
    """The lines of each column, of each group of columns that are side by side."""
    console = Console(width=width, record=True, highlight=False)
    print_columns(console, LABELS, COLUMNS[:count])
    groups: list[list[str]] = []
    for line in console.export_text().splitlines():
        assert len(line) <= width
        if line[0] == "┏":
            groups.append([])
        assert not groups[-1] or len(line) == len(groups[-1][0]), "all edges are there"
        groups[-1].append(line)
    return [
        [
            [part.strip() for part in column]
            for column in zip(*(re.split("[┃│]", line)[1:-1] for line in group if line[0] in "┃│"))
        ]
        for group in groups
    ]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("width", [24, 32, 40, 80, 81, 120, 300])
def test_every_plan_and_label_is_there_whole(width: int, count: int) -> None:
    groups = table_of(width, count)
    shown = ["".join(lines).replace(" ", "") for group in groups for lines in group[1:]]
    assert shown == [plan + 2 * CELL.replace(" ", "") for plan in PLANS[:count]]
    for labels, *_ in groups:
        assert "".join(labels).replace(" ", "") == "".join(LABELS).replace(" ", "")


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_word_and_no_number_is_broken_at_40_columns_or_80(width: int, count: int) -> None:
    for labels, *columns in table_of(width, count):
        assert " ".join(labels).split() == " ".join(LABELS).split()
        for lines in columns:
            start = next(index for index, line in enumerate(lines) if line.startswith(CELL[:6]))
            head = [line for line in lines[:start] if line]
            assert "".join(head) in PLANS
            assert all(line.endswith(":") for line in head[:-1]), "a plan goes on after a colon"
            assert " ".join(lines[start:]).split() == 2 * CELL.split()


def test_plans_in_the_first_column_continue_after_a_colon_or_a_comma() -> None:
    plan = "prefill=quoka:budget=1024:chunk=512,decode=sketch:budget=1024:dense_layers=none"
    console = Console(width=40, record=True, highlight=False)
    print_columns(console, ["plan", plan, "dense"], [["ms", "1.02", "4.10"]])
    lines = [re.split("[┃│]", line)[1].strip() for line in console.export_text().splitlines() if line[0] == "│"]
    assert lines.pop() == "dense"
    assert "".join(lines) == plan
    assert all(line.endswith((":", ",")) for line in lines[:-1])


@pytest.mark.parametrize("columns", [40, 80])
def test_what_there_is_is_listed_without_breaking_words(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    wide: dict[tuple[str, ...], list[str]] = {}
    commands = ("methods",), ("methods", "quest"), ("doctor", "--device", "cpu")
    for width in (300, columns):
        monkeypatch.setenv("COLUMNS", str(width))
        for command in commands:
            out = run(*command).out
            assert max(map(len, out.splitlines())) <= width
            words = sorted(re.sub("[─-╿]", " ", out).split())
            if command[0] == "methods":
                assert wide.setdefault(command, words) == words
            else:
                assert {"GiB", "available", "compiled", "soft-capped", "transformers"} <= set(words)


def test_kinds_are_counted_by_layer_or_by_head() -> None:
    assert _index({}) == ""
    assert _index({0: [{"indexes": [{"kind": "flat"}]}], 1: [{"indexes": [{"kind": "flat"}]}]}) == "flat in 2 layers"
    auto = {"kind": "auto", "heads": ["graph", "flat_int8"]}
    assert (
        _index({0: [{"indexes": [auto]}], 1: [{"indexes": [auto]}]}) == "graph in 2 KV heads, flat_int8 in 2 KV heads"
    )


def test_what_audits_found_is_said() -> None:
    rows = {0: [{"indexes": [{"kind": "graph"}], "audits": {"found": [0.9, 1.0]}}], 1: [{"audits": {"found": []}}]}
    assert _index(rows) == "graph in 1 layers, 95.0 % of a scan's keys found in 2 audits"
