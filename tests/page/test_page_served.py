"""The page of ``kvsift serve`` with the embedded model, from a document to the conversation that is saved."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page.page_actions import add_text, ask, is_in_sight, wait_for_answer
from server.serving import Served

from kvsift.server.sample_document import FACTS, sample

pytestmark = pytest.mark.page
PLANS = "sketch:budget=256", "quest:budget=512:dense_layers=none"
NEEDLE = "The number of the green locker is 7351."
CAPTAIN = "Who is the captain of the ship Aurora?"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = "--plan", PLANS[0], "--allow-plan", PLANS[1], "--threads", "1", "--device", "cpu", "--dense-below", "0"
    served = Served(tmp_path_factory.mktemp("page"), *options)
    yield served
    served.stop()


@pytest.fixture
def page(served: Served, open_page: Callable[..., Any]) -> Any:
    page = open_page(served.url)
    page.set_default_timeout(60_000)
    page.locator("#send:enabled").wait_for()
    return page


def hidden_in_prose(fact: str) -> str:
    """Part of the sample, with another fact in it."""
    paragraphs = sample()["text"].split("\n\n")[:40]
    paragraphs[15] += f" {fact}"
    return "\n\n".join(paragraphs)


def figures(answer: Any) -> dict[str, str]:
    return dict(line.split("\n") for line in answer.locator(".figures div").all_inner_texts())


def marked(page: Any, words: str) -> list[float]:
    """Strengths of the marks on words of the text."""
    return page.locator("#text mark").evaluate_all(
        """(marks, words) => {
        const text = document.getElementById("text");
        const start = text.textContent.indexOf(words);
        const range = document.createRange();
        return marks.filter((mark) => {
          range.setStart(text, 0);
          range.setEndBefore(mark);
          const place = range.toString().length;
          return place < start + words.length && place + mark.textContent.length > start;
        }).map((mark) => Number(mark.className.match(/m(\\d)/)[1])); }""",
        words,
    )


def test_the_sample_is_read_asked_and_compared(page: Any, tmp_path: Path) -> None:
    about = page.locator("#about")
    about.wait_for()
    assert "16 million parameters" in about.inner_text()
    page.get_by_role("button", name="Load the sample document").click()
    state = page.locator("#documents li .soft").last
    page.locator("#documents progress[value]").wait_for()
    assert re.fullmatch(r"[\d,]+ of 6,857 tokens(, .+ left)?", state.inner_text())
    page.locator("#documents progress").wait_for(state="hidden")
    assert state.inner_text() == "6,857 tokens"
    assert page.locator("#text").evaluate("element => element.textContent") == sample()["text"]

    page.get_by_role("button", name="What is the password for the archive?").click()
    page.locator(".answer .figures div").first.wait_for()
    first = page.locator(".answer").first
    assert first.locator(".body").inner_text().strip() == "velvet canyon"
    found = figures(first)
    assert re.fullmatch(r"[\d.]+ ms", found["per token"])
    assert re.fullmatch(r"6,\d\d\d of 6,\d\d\d tokens", found["cached"])
    assert 0 < int(found["density"].removesuffix(" %")) < 60
    assert page.locator("mark.here").count() > 0
    assert is_in_sight(page, "mark.here")
    page.get_by_label("Layers", exact=True).select_option("Layer 3")
    assert "velvet canyon" in page.locator("#text div:has(mark.here)").first.inner_text()
    assert max(marked(page, "velvet canyon")) == 5

    page.get_by_role("button", name="Ask again").click()
    page.locator(".answer").nth(1).locator(".figures div").first.wait_for()
    wait_for_answer(page)
    second = page.locator(".answer").nth(1)
    assert figures(second)["density"] == "100 %"
    assert "Dense attention reads everything." in page.locator("#marks-note").inner_text()
    assert second.bounding_box()["y"] == first.bounding_box()["y"]
    first.get_by_role("button", name="Show passages").click()
    assert marked(page, "velvet canyon")

    page.locator("#plan").select_option(PLANS[1])
    third = ask(page, CAPTAIN)
    assert third.locator("code").inner_text() == PLANS[1]
    assert third.locator(".body").inner_text().strip()
    assert int(figures(third)["cached"].split()[0].replace(",", "")) > 6000

    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    assert download.value.suggested_filename == "chronicle-of-tarn.answers.md"
    download.value.save_as(tmp_path / "saved.md")
    saved = (tmp_path / "saved.md").read_text()
    assert saved.startswith("# chronicle-of-tarn.txt\n\nembedded, kvsift, 20")
    assert f"## {FACTS[3][1]}\n\n`{PLANS[0]}`: density " in saved
    assert "\n`dense`: density 100 %, per token " in saved
    assert saved.count("\nvelvet canyon\n") == 2
    assert page.faults == []


def test_a_file_is_asked_about_while_it_is_read_and_deleted(page: Any, served: Served) -> None:
    content = hidden_in_prose(NEEDLE)
    page.set_input_files("#file", {"name": "locker.md", "mimeType": "text/markdown", "buffer": content.encode()})
    answer = ask(page, "What is the number of the green locker?", wait=False)
    answer.get_by_text(re.compile("Reading: .* tokens|Waiting")).wait_for()
    wait_for_answer(page)
    assert answer.locator(".body").inner_text().strip() == "7351"
    page.get_by_label("Layers", exact=True).select_option("Layer 3")
    assert max(marked(page, "7351")) >= 3
    page.get_by_role("button", name="Delete locker.md").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.locator("#documents").get_by_text("locker.md").wait_for(state="detached")
    with served.client() as client:
        assert "locker.md" not in client.get("/v1/documents").text
    assert page.faults == []


def test_a_page_that_is_opened_again_has_the_documents(page: Any) -> None:
    add_text(page, "notes.txt", hidden_in_prose("The owner of the red bicycle is Jonas Berg.")[:4000])
    page.reload()
    page.locator("#documents").get_by_text("notes.txt").wait_for()
    page.locator("#text > div").first.wait_for()


def test_what_the_server_refuses_is_told_in_its_words(page: Any) -> None:
    page.set_input_files("#file", {"name": "empty.txt", "mimeType": "text/plain", "buffer": b" "})
    page.get_by_text("empty.txt was not added: The document is empty; there is nothing to ask about.").first.wait_for()
    page.set_input_files("#file", {"name": "broken.pdf", "mimeType": "application/pdf", "buffer": b"%PDF-1.4 nothing"})
    page.locator("#notice").get_by_text("broken.pdf", exact=False).or_(
        page.locator("#documents .failed")
    ).first.wait_for()


def test_an_answer_goes_on_after_the_engine_has_died(page: Any, served: Served) -> None:
    add_text(page, "again.txt", hidden_in_prose(NEEDLE))
    os.kill(served.engine(), signal.SIGKILL)
    answer = ask(page, "What is the number of the green locker?")
    assert answer.locator(".body").inner_text().strip() == "7351"
    assert page.locator("#notice").is_hidden()


def test_a_server_with_keys_lets_the_page_in_with_one(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    served = Served(tmp_path, "--threads", "1", "--device", "cpu", KVSIFT_API_KEY="schlüssel")
    try:
        page = open_page(served.url)
        page.get_by_role("dialog").get_by_text("This server needs an API key.").wait_for()
        page.get_by_role("textbox", name="Key").fill("schlüssel")
        page.keyboard.press("Enter")
        page.locator("#send:enabled").wait_for()
        add_text(page, "short.txt", f"A line.\n{NEEDLE}\nAnother line.\n" * 3)
        assert ask(page, "What is the number of the green locker?").locator(".body").inner_text().strip() == "7351"
    finally:
        served.stop()
