"""The page with a server that does what it is told: faults, hostile documents, keys, large documents."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from page.fake_server import PLANS, FakeServer
from page.page_actions import add_text, ask, drop, is_in_sight, wait_for_answer, width_beyond_the_window

pytestmark = pytest.mark.page
TEXT = "A line about nothing.\n" * 3000
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<style>*{display:none}</style><iframe src=//evil.example></iframe>&lt;b&gt; NEEDLE </div></main>\n"
)


@pytest.fixture
def page(fake: FakeServer, open_page: Callable[..., Any]) -> Any:
    page = open_page(fake.url)
    page.get_by_text("It copies facts out of a document").wait_for()
    return page


def test_a_connection_that_is_lost_keeps_the_text_and_may_be_asked_again(page: Any, fake: FakeServer) -> None:
    answer = ask(page, "drop")
    assert answer.locator(".body").inner_text().strip() == "An answer"
    assert "connection to the server was lost" in answer.locator(".state").inner_text()
    page.get_by_role("button", name="Ask again").click()
    page.locator(".answer").nth(1).wait_for()
    wait_for_answer(page)
    assert [body["sparsity"]["plan"] for body in fake.bodies] == [PLANS[0]] * 2  # the plan that failed


def test_an_error_of_the_stream_is_told_in_the_servers_words(page: Any) -> None:
    assert ask(page, "error").locator(".state").inner_text() == "The engine process died twice with this request."


def test_a_server_that_restarts_is_asked_again(page: Any, fake: FakeServer) -> None:
    answer = ask(page, "busy", wait=False)
    page.get_by_text("The server is restarting. Try again later. This page asks again every 1 s.").first.wait_for()
    wait_for_answer(page)
    assert answer.locator(".body").inner_text().strip() == "An answer to: busy"
    assert page.locator("#notice").is_hidden()
    assert len(fake.bodies) == 2
    assert len(page.faults) == 1


def test_an_answer_is_stopped_by_button_and_by_key_and_stays(page: Any, fake: FakeServer) -> None:
    for stop in (lambda: page.get_by_role("button", name="Stop").click(), lambda: page.keyboard.press("Escape")):
        answer = ask(page, "slow", wait=False)
        answer.get_by_text("word word").wait_for()
        stop()
        wait_for_answer(page)
        assert answer.locator(".state").inner_text() == "Stopped."
        assert "word" in answer.locator(".body").inner_text()
    ask(page, "And then?")
    roles = [message["role"] for message in fake.bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]


def test_a_document_that_cannot_be_read_says_why(page: Any) -> None:
    page.set_input_files("#file", {"name": "big.txt", "mimeType": "text/plain", "buffer": b"unreadable " * 50})
    page.get_by_text("big.txt could not be read: the prompt has more tokens").first.wait_for()
    assert "Not read:" in page.locator("#documents li").inner_text()


def test_a_file_that_is_too_large_is_not_sent(page: Any, fake: FakeServer) -> None:
    page.set_input_files("#file", {"name": "huge.txt", "mimeType": "text/plain", "buffer": b"x" * 5_000_000})
    assert page.locator("#notice").inner_text() == "huge.txt has 5.0 MB; this server takes up to 4.0 MB."
    assert fake.documents == {}


def test_a_hostile_document_is_only_text(page: Any) -> None:
    add_text(page, "<img src=x onerror=alert(1)>.html", HOSTILE * 30)
    ask(page, "<b onclick=alert(1)>What?</b>")
    assert page.locator("#text").evaluate("element => element.textContent") == HOSTILE * 30
    assert page.locator("#text :is(script, img, style, iframe, b), #turns :is(b, img), #documents img").count() == 0
    assert page.locator("mark.here.m5").inner_text() == "NEEDLE"
    assert page.title() == "<img src=x onerror=alert(1)>.html · kvsift"


def test_marks_count_characters_as_the_server_does(page: Any) -> None:
    text = "\ufeff😀 naïve \U0001d518 text\r\n" * 900 + "😀NEEDLE😀\n" + "tail 😀\n" * 300
    add_text(page, "emoji.txt", text)
    ask(page, "Where?")
    assert page.locator("mark.here").inner_text() == "NEEDLE"
    assert page.locator("#text").evaluate("element => element.textContent") == text


def test_passages_are_stepped_through_by_buttons_keys_and_layers(page: Any) -> None:
    add_text(page, "a.txt", TEXT[: len(TEXT) // 2] + "NEEDLE" + TEXT[len(TEXT) // 2 :])
    ask(page, "Where?")
    assert page.locator("mark.here").inner_text() == "NEEDLE"
    assert is_in_sight(page, "mark.here")
    note = page.locator("#marks-note")
    found = re.match(r"Passage (\d+) of (\d+), read by up to 100 % of steps and heads\.", note.inner_text())
    assert found
    number, total = map(int, found.groups())
    assert 2 < total <= 11
    page.get_by_role("button", name="Next").click()
    assert note.inner_text().startswith(f"Passage {number + 1} of {total},")
    page.locator("#text").focus()
    for key, place in (("p", number), ("p", number - 1), ("s", number)):
        page.keyboard.press(key)
        assert note.inner_text().startswith(f"Passage {place} of {total},")
        page.wait_for_timeout(60)
        assert is_in_sight(page, "mark.here")
    page.get_by_label("Layers", exact=True).select_option("Layer 3")
    assert "Passage 1 of 1, read by" in note.inner_text()
    page.keyboard.press("n")  # on the list of layers, not in the text
    assert "Passage 1 of 1, read by" in note.inner_text()


def test_plans_stand_side_by_side_and_the_chosen_one_goes_on(page: Any, fake: FakeServer) -> None:
    add_text(page, "a.txt", TEXT + "NEEDLE")
    ask(page, "First?")
    page.get_by_role("button", name="Ask again").click()
    page.locator(".answer .figures div").nth(6).wait_for()
    wait_for_answer(page)
    assert [body["sparsity"]["plan"] for body in fake.bodies] == [PLANS[0], "dense"]
    boxes = [page.locator(".answer").nth(index).bounding_box() for index in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert page.locator("#marks-note").inner_text() == "dense attention reads everything."
    assert page.locator("#text mark").count() == 0
    page.get_by_role("button", name="Show passages").click()
    assert page.locator("mark.here").inner_text() == "NEEDLE"
    ask(page, "Second?")
    assert [message["content"].strip() for message in fake.bodies[-1]["messages"]] == [
        "First?", "An answer to: First?", "Second?",
    ]  # fmt: skip


def test_keys_are_asked_for_again_until_one_is_right_and_kept_in_the_tab(fake: FakeServer, open_page: Any) -> None:
    fake.key = "schlüssel-🔑"
    page = open_page(fake.url)
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("This server needs an API key.").wait_for()
    page.get_by_role("textbox", name="Key").fill("wrong")
    page.keyboard.press("Enter")
    dialog.get_by_text("does not accept this key").wait_for()
    page.get_by_role("textbox", name="Key").fill(fake.key)
    page.keyboard.press("Enter")
    page.get_by_text("It copies facts").wait_for()
    assert page.evaluate("[Object.keys(localStorage).includes('kvsift-key'), document.cookie]") == [False, ""]
    page.reload()
    page.get_by_text("It copies facts").wait_for()
    assert not dialog.is_visible()
    open_page(fake.url).get_by_text("This server needs an API key.").wait_for()  # another tab does not have it


def test_two_megabytes_scroll_and_mark_at_once(page: Any) -> None:
    line = "Words of a long document, which is two megabytes long in all, line by line. NEEDL\n"
    text = line * 13_000 + "NEEDLE" + line * 13_000
    add_text(page, "long.txt", text)
    ask(page, "Where?")
    assert page.locator("mark.here").inner_text() == "NEEDLE"
    assert is_in_sight(page, "mark.here")
    longest = page.evaluate(
        """async () => {
        const [text, gaps] = [document.getElementById("text"), []];
        let last = performance.now();
        for (let i = 0; i < 60; i += 1) {
          text.scrollTop += 700;
          await new Promise(requestAnimationFrame);
          gaps.push(performance.now() - last);
          last = performance.now();
        }
        return gaps.sort((a, b) => a - b)[54]; }"""
    )
    assert longest < 200  # milliseconds, of nine frames in ten; on a shared core without a GPU
    assert page.locator("#text > div").count() < 2000


def test_pasted_and_dropped_texts_become_documents(page: Any, fake: FakeServer) -> None:
    page.get_by_role("button", name="Paste text").click()
    page.get_by_label("Name").fill("Notes")
    page.get_by_label("Text", exact=True).fill("Some notes.")
    page.get_by_role("button", name="Add").click()
    page.get_by_role("heading", name="Notes").wait_for()
    drop(page, "dropped.md", "# Title")
    page.get_by_role("heading", name="dropped.md").wait_for()
    assert list(fake.texts.values()) == ["Some notes.", "# Title"]
    page.get_by_role("button", name="Delete dropped.md").click()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Delete dropped.md").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.get_by_role("heading", name="Notes").wait_for()
    assert [document["name"] for document in fake.documents.values()] == ["Notes"]


def test_the_sample_is_a_click_and_its_questions_are_buttons(page: Any, fake: FakeServer) -> None:
    page.get_by_role("button", name="Load the sample document").click()
    page.get_by_role("button", name="Who is the captain?").click()
    page.locator(".answer .figures div").first.wait_for()
    assert fake.bodies[0]["document"] == next(iter(fake.documents))
    page.reload()
    page.get_by_role("button", name="Who is the captain?").wait_for()  # the document is still there


@pytest.mark.parametrize("width", [360, 390, 760, 761, 1024, 1100, 1101, 1920])
def test_no_width_scrolls_sideways(width: int, fake: FakeServer, open_page: Any) -> None:
    page = open_page(fake.url, width=width, height=700)
    page.get_by_text("It copies facts").wait_for()
    assert width_beyond_the_window(page) <= 0
    add_text(page, "a-name-without-any-place-to-break-it-at-" * 3 + ".txt", "w" * 900 + " NEEDLE\n" + TEXT)
    if width <= 760:
        page.get_by_role("button", name="Conversation", exact=True).click()
    ask(page, "unbroken" * 40)
    page.get_by_role("button", name="Ask again").click()
    wait_for_answer(page)
    assert width_beyond_the_window(page) <= 0
    if width <= 760:
        page.get_by_role("button", name="Show passages").click()
        assert page.locator("#text").is_visible()
        page.wait_for_timeout(100)
        assert is_in_sight(page, "mark.here")
        assert width_beyond_the_window(page) <= 0
