"""The page: one file, every number from the samples, for eyes and for screen readers."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from eval_runner.samples import recipe_of, sample

from kvsift.eval.fingerprint import document_of
from kvsift.eval.page import page
from kvsift.eval.page.lines import Level, Point, Series, line_chart
from kvsift.eval.summary import tables_of

VOID = {"meta", "br", "hr", "img", "input", "link"}


@pytest.fixture
def result(tmp_path: Path) -> dict[str, Any]:
    """Two lengths, all rows, scores that differ."""
    document = document_of(recipe_of(tmp_path, ("[700]", "[700, 1400]")))
    samples = [
        sample(
            row["plan"],
            row["budget"],
            float((place + number) % 3 > 0),
            task=task,
            length=length,
            question=number,
            depth=0.05 + 0.3 * number,
            sparse_layer_visible_tokens=row["budget"] and row["budget"] - 8.0,
            visible_tokens=float(length),
        )
        for task in ("passkey", "key_value")
        for length in (700, 1400)
        for number in range(3)
        for place, row in enumerate(document["rows"])
    ]
    session = {"started": "2026-01-01", "workers": 3, "machine": "an <odd> machine", "commit": "0" * 40}
    session["versions"] = {"torch": "2.12"}
    tables = tables_of(document, samples, [])
    return {"recipe": document, "rows": document["rows"], "samples": samples, "sessions": [session], **tables}


@pytest.fixture
def text(result: dict[str, Any]) -> str:
    return page([("mine & yours", result)])


class Balance(HTMLParser):
    """Complains about an element that is closed out of turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.open += [] if tag in VOID else [tag]

    def handle_startendtag(self, tag: str, attributes: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(text: str) -> None:
    assert text.startswith("<!doctype html>")
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(", text)
    balance = Balance()
    balance.feed(text)
    assert balance.open == []


def test_what_comes_from_outside_is_escaped(text: str) -> None:
    assert "mine &amp; yours" in text
    assert "an &lt;odd&gt; machine" in text
    assert "<odd>" not in text


def test_light_and_dark_have_the_same_colours_to_choose_from(text: str) -> None:
    light, dark = text.split("@media (prefers-color-scheme:dark)")
    names = re.compile(r"(--[a-z0-9]+):")
    assert set(names.findall(light)) == set(names.findall(dark.split("}}")[0]))
    assert set(re.findall(r"var\((--[a-z0-9]+)\)", text)) <= set(names.findall(light))


def test_every_drawing_says_what_it_shows(text: str) -> None:
    drawings = re.findall(r'<svg[^>]*role="img">.*?</svg>', text, flags=re.DOTALL)
    assert len(drawings) >= 4 + 2 * 5 + 2 * 2  # charts, heat maps of two tasks, two measures at two budgets
    for drawing in drawings:
        tree = ElementTree.fromstring(drawing)
        assert tree.find("title").text
        assert tree.find("desc").text
    assert "Score of passkey, 1,400 tokens" in text


def test_every_cell_stands_in_the_tables(text: str, result: dict[str, Any]) -> None:
    for cell in result["cells"]:
        assert f"<td>{cell['score']:.3f}</td><td>{cell['low']:.2f} to {cell['high']:.2f}</td>" in text
    assert "3 contexts were worked on at a time, which slows each." in text
    assert text.count("<caption>700 tokens; peak memory of a process 1.00 GiB</caption>") == 1


def test_heat_maps_hold_means_by_length_and_depth(result: dict[str, Any]) -> None:
    plan = result["rows"][1]["plan"]
    own = [s for s in result["samples"] if (s["task"], s["plan"], s["length"]) == ("passkey", plan, 700)]
    text = page([("x", result)])
    for each in own:
        share = f"{10 * int(each['depth'] * 10)}-{10 * int(each['depth'] * 10) + 10} %"
        assert f"700 tokens, depth {share}: {each['score']:.2f} of 1" in text


def test_warnings_and_what_is_missing_stand_first(result: dict[str, Any]) -> None:
    result["warnings"], result["left_out"] = ["something unequal"], [{"task": "passkey", "length": 700, "seed": 9}]
    text = page([("x", result)])
    assert text.index("something unequal") < text.index("Quality against visible tokens")
    assert "1 contexts are not finished" in text


def test_a_run_that_has_nothing_yet_has_a_page(result: dict[str, Any]) -> None:
    empty = {**result, "samples": [], "cells": [], "chance": [], "warnings": []}
    assert "Nothing has been asked yet." in page([("x", empty)])


def test_points_stand_where_their_numbers_say() -> None:
    series = Series("s", [Point(64, 0.0, 0.0, 0.2), Point(256, 1.0, 0.8, 1.0), Point(128, 0.5, 0.4, 0.6)], 0)
    tree = ElementTree.fromstring(line_chart("t", "x", "y", [series], [Level("dense", 0.75)], logarithmic=True))
    spots = [(float(c.get("cx")), float(c.get("cy"))) for c in tree.iter("circle")]
    (low, high, middle) = spots
    assert low[1] > middle[1] > high[1]  # y grows downwards
    assert middle[0] - low[0] == pytest.approx(high[0] - middle[0], abs=0.2)  # a doubling is a doubling
    assert middle[1] == pytest.approx((low[1] + high[1]) / 2, abs=0.2)
    line = tree.find("polyline").get("points").split()
    assert [float(point.split(",")[0]) for point in line] == sorted(spot[0] for spot in spots)
    assert "dense" in "".join(tree.itertext())
