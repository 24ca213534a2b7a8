"""The page: one file, every number from the samples, for eyes and for screen readers."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from kvsift_lab.eval.page import page
from kvsift_lab.eval.page.charts import ChartPoint, Level, Series, line_chart
from kvsift_lab.eval.page.means import headline, means_of
from kvsift_lab.eval.page.pareto import front_of
from kvsift_lab.eval.results import document_of
from kvsift_lab.eval.summary import tables_of
from lab.eval.samples import Tags, recipe_of, sample
from refusals import refused


@pytest.fixture
def result(tmp_path: Path) -> dict[str, Any]:
    """Two lengths, all rows, scores that differ."""
    return two_lengths(tmp_path)


def two_lengths(folder: Path) -> dict[str, Any]:
    return result_of(document_of(recipe_of(folder, ("[700]", "[700, 1400]"))))


def result_of(document: dict[str, Any], lengths: tuple[int, ...] = (700, 1400), questions: int = 3) -> dict[str, Any]:
    """Samples of every row."""
    samples = [
        sample(
            row["plan"],
            row["budget"],
            float((place + number) % 3 > 0),
            task=task,
            length=length,
            question=number,
            depth=(number + 0.5) / questions,
            references=[f"answer {number}"],
            sparse_layer_visible_tokens=row["budget"] and row["budget"] - 8.0,
            visible_tokens=float(length),
        )
        for task in ("passkey", "key_value")
        for length in lengths
        for number in range(questions)
        for place, row in enumerate(document["rows"])
    ]
    session = {"started": "2026-01-01", "workers": 3, "machine": "an <odd> machine", "commit": "0" * 40}
    session["versions"] = {"torch": "2.12"}
    tables = tables_of(document, samples, [])
    return {"recipe": document, "rows": document["rows"], "samples": samples, "sessions": [session], **tables}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its page, drawn once: charts take most of a second."""
    return page([("mine & yours", two_lengths(tmp_path_factory.mktemp("recipe")))])


def test_the_page_needs_nothing_else(text: str) -> None:
    assert text.startswith("<!doctype html>")
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(", text)
    tags = Tags()
    tags.feed(text)
    assert tags.open == []


def test_what_comes_from_outside_is_escaped(text: str) -> None:
    assert "mine &amp; yours" in text
    assert "an &lt;odd&gt; machine" in text
    assert "<odd>" not in text


def test_every_drawing_says_what_it_shows(text: str) -> None:
    drawings = re.findall(r'<svg[^>]*role="img">.*?</svg>', text, flags=re.DOTALL)
    assert len(drawings) == 4 + 2  # the score against tokens by task and length, against time by length
    for drawing in drawings:
        tree = ElementTree.fromstring(drawing)
        assert tree.find("title").text
        assert tree.find("desc").text
    assert "Score of passkey, 1,400 tokens" in text


def test_every_cell_stands_in_the_tables(text: str, result: dict[str, Any]) -> None:
    for cell in result["cells"]:
        assert f"<td>{cell['score']:.3f}</td><td>{cell['low']:.2f} to {cell['high']:.2f}</td>" in text
    assert "3 contexts ran at a time, which slows each." in text
    assert "Peak memory of a process: 1.00 GiB." in text


def section_of(text: str, title: str) -> str:
    """One part of the page; empty if it has none of that title."""
    return text.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0]


def test_depth_maps_hold_means_by_length_and_depth(tmp_path: Path) -> None:
    document = document_of(recipe_of(tmp_path, ("[700]", "[700, 1400]")))
    result = result_of(document, questions=5)
    row = result["rows"][1]
    text = page([("x", result)])
    own = [s for s in result["samples"] if (s["task"], s["plan"], s["length"]) == ("passkey", row["plan"], 700)]
    for each in own:
        start = 20 * int(each["depth"] * 5)
        assert f"{row['name']}, {row['budget']}, 700 tokens, {start}-{start + 20} %: {each['score']:.3f}" in text
    maps = section_of(text, "Score by depth")
    assert maps.count("<table>") == 2, "one per task, not one per plan"


def test_the_page_opens_with_one_line_of_result(result: dict[str, Any]) -> None:
    for each in result["samples"]:
        each["score"] = {"dense": 1.0}.get(each["plan"], 0.75 if "budget=256" in each["plan"] else 0.5)
    tables = tables_of(result["recipe"], result["samples"], [])
    text = page([("x", {**result, **tables})])
    line = "quest at 256 tokens: mean 0.750, 75 % of dense&#39;s 1.000."
    assert f"<p class=lead>{line}</p>" in text
    assert text.count("75 %") >= 3, "and percent of dense stands in the tables"


def test_without_dense_the_line_says_so(result: dict[str, Any]) -> None:
    means = [each for each in means_of(result) if not each.is_dense]
    assert headline(result, means).endswith("; dense is not in the recipe.")
    assert headline(result, []) == "No plan has answered every task yet."


def test_where_dense_answers_nothing_right_no_plan_is_praised(result: dict[str, Any]) -> None:
    for each in result["samples"]:
        each["score"] = 0.0
    tables = tables_of(result["recipe"], result["samples"], [])
    text = page([("x", {**result, **tables})])
    assert "<p class=lead>Dense is not measurably better than chance in any task" in text
    assert "<li>passkey at 700, passkey at 1,400" in text
    assert "Pareto front" not in text


def timed(result: dict[str, Any], scores: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Names have a score and milliseconds per token."""
    names = {row["plan"]: row["name"] for row in result["rows"]}
    for each in result["samples"]:
        each["score"], tpot_ms = scores[names[each["plan"]]]
        each["tpot_s"] = tpot_ms / 1e3
    return {**result, **tables_of(result["recipe"], result["samples"], [])}


def test_the_pareto_front_is_what_no_plan_beats_in_score_and_time(result: dict[str, Any]) -> None:
    result = timed(result, {"dense": (1.0, 8.0), "quest": (0.9, 4.0), "streaming_llm": (0.1, 6.0)})
    means = [each for each in means_of(result) if each.length == 700]
    assert [each.label for each in front_of(means)] == ["quest, 64", "dense"]
    text = section_of(page([("x", result)]), "Quality against time per token")
    assert "Pareto front: quest, 64 (4.00 ms, 0.900), dense (8.00 ms, 1.000)" in text
    assert "quest, 64 takes 50 % of dense&#39;s time." in text
    assert "quest, 256: 0.900 at 4.00 ms" in text


def test_memory_is_a_bar_per_plan_and_per_budget_where_that_changes_it(result: dict[str, Any]) -> None:
    for each in result["samples"]:
        each["kv_bytes"] = (each["budget"] << 20) if "streaming" in each["plan"] else 512 << 20
    memory = section_of(page([("x", result)]), "Memory")
    names = re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td><td class="bar"', memory)
    expected = [("dense", "512.0", "100 %"), ("quest", "512.0", "100 %")]
    expected += [("streaming_llm, 64", "64.0", "12 %"), ("streaming_llm, 256", "256.0", "50 %")]
    assert names == expected * 2  # lengths


def test_a_shared_prefill_is_no_time_of_a_plan(result: dict[str, Any]) -> None:
    times = section_of(page([("x", result)]), "Times")
    assert "context read" not in times
    by_plan, _, prefill = times.partition("<h3>Prefill of the contexts</h3>")
    assert "1.00" not in by_plan
    rows = re.findall(r'<th scope="row">(.*?)</th><td class="text">(.*?)</td><td>(\d+)</td><td>(.*?)</td>', prefill)
    assert rows == [
        (f"{length} tokens", "dense, quest, streaming_llm", "2", "1.00") for length in ("700", "1,400")
    ]  # one context of each task


def many_plans(folder: Path) -> dict[str, Any]:
    """Twenty, all with one setting in common."""
    knobs = [f'"quest:page_size=8:budget={{budget}}:window=16:min_context={least}"' for least in range(20)]
    return result_of(document_of(recipe_of(folder, ('"quest:budget={budget}:window=16"', ", ".join(knobs)))), (700,))


def test_twenty_plans_have_a_named_row_each_instead_of_a_legend(tmp_path: Path) -> None:
    result = many_plans(tmp_path)
    text = page([("x", result)])
    quality = section_of(text, "Quality against visible tokens").partition("Every number")[0]
    assert "<svg" not in quality
    assert "class=legend" not in quality
    for row in result["rows"]:
        assert quality.count(f">{row['name'].replace(':page_size=8', '').replace(':', ':<wbr>')}") >= 1
    marks = re.findall(r'<td class="dot" title="(.*?) to (.*?), 3 samples">', quality)
    assert len(marks) == 2 * len(result["rows"]), "an interval each"


def test_a_result_of_recall_alone_is_refused_in_a_sentence(result: dict[str, Any]) -> None:
    del result["cells"]
    with refused("wrong_file"):
        page([("x", result)])


def marks_of(chart: str) -> dict[str, tuple[float, float]]:
    """The places of round marks, by their hints."""
    groups = [group for group in ElementTree.fromstring(chart).iter("g") if group.find("title") is not None]
    starts = {group.find("title").text: group.find(".//path").get("d").split()[1:3] for group in groups}
    return {hint: (float(x), float(y)) for hint, (x, y) in starts.items()}


def test_warnings_and_what_is_missing_stand_first(result: dict[str, Any]) -> None:
    result["warnings"], result["left_out"] = ["something unequal"], [{"task": "passkey", "length": 700, "seed": 9}]
    text = page([("x", result)])
    assert text.index("something unequal") < text.index("Quality against visible tokens")
    assert "1 contexts are not finished" in text


def test_a_run_that_has_nothing_yet_has_a_page(result: dict[str, Any]) -> None:
    empty = {**result, "samples": [], "cells": [], "chance": [], "unsolved": [], "warnings": []}
    assert "There is no sample yet." in page([("x", empty)])


def test_points_stand_where_their_numbers_say() -> None:
    points = [ChartPoint(64, 0.0, 0.0, 0.2), ChartPoint(256, 1.0, 0.8, 1.0), ChartPoint(128, 0.5, 0.4, 0.6)]
    chart = line_chart("t", "x", "y", [Series("s", points, 0)], [Level("dense", 0.75)])
    marks = marks_of(chart)
    low, middle, high = (marks[f"s: {p.y:.2f} ({p.low:.2f} to {p.high:.2f}) at {p.x}"] for p in sorted(points))
    assert low[1] > middle[1] > high[1]  # y grows downwards
    assert middle[0] - low[0] == pytest.approx(high[0] - middle[0], abs=0.2)  # a doubling is a doubling
    assert middle[1] == pytest.approx((low[1] + high[1]) / 2, abs=0.2)
    assert "dense: 0.75" in chart
