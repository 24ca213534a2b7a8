"""The page by keyboard, by screen reader, in the dark, on paper white, without motion."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from page.fake_server import FakeServer
from page.page_actions import add_text, ask, wait_for_answer

pytestmark = pytest.mark.page
TEXT = "A line about nothing, and another.\n" * 400 + "NEEDLE" + "\nMore of it." * 400
CONTRAST = """() => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].map((part) => part / 255);
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const ground = (element) => {
    if (!element) return [1, 1, 1];
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, ground(element.parentElement));
  };
  const light = (colour) => {
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = colour.slice(0, 3).map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!hasText || !element.checkVisibility() || element.matches(":disabled, option")) continue;
    const below = ground(element);
    const [a, b] = [light(over(rgba(getComputedStyle(element).color), below)), light(below)];
    const ratio = Math.max(a, b) / Math.min(a, b);
    if (ratio < 4.5) poor.push(`${element.tagName} ${element.className}: ${ratio.toFixed(2)}`);
  }
  return poor; }"""

OUTLINE = """() => {
  const focused = document.activeElement;
  const style = getComputedStyle(focused.id === "file" ? focused.parentElement : focused);
  return [style.outlineStyle, parseFloat(style.outlineWidth)]; }"""


@pytest.fixture
def page(fake: FakeServer, open_page: Callable[..., Any]) -> Any:
    page = open_page(fake.url)
    page.get_by_text("It copies facts").wait_for()
    return page


def focus(page: Any) -> str:
    """Name of what has the focus."""
    return page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()")


def press_tab_until(page: Any, name: str) -> list[str]:
    """What has had the focus on the way."""
    seen: list[str] = []
    while not seen or seen[-1] != name:
        page.keyboard.press("Tab")
        seen.append(focus(page))
        assert len(seen) < 30, seen
    return seen


def test_everything_is_done_by_keyboard_in_the_order_of_the_page(page: Any, fake: FakeServer) -> None:
    assert press_tab_until(page, "paste") == ["theme", "file", "paste"]
    page.keyboard.press("Enter")
    assert focus(page) == "paste-name"
    page.keyboard.press("Tab")
    page.keyboard.insert_text(TEXT)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator("#documents progress").wait_for(state="hidden")
    assert focus(page) == "paste"
    press_tab_until(page, "question")
    page.keyboard.type("Where?")
    page.keyboard.press("Enter")
    page.locator(".answer").wait_for()
    wait_for_answer(page)
    assert focus(page) == "question"
    page.keyboard.press("Shift+Tab")
    assert focus(page) == "Ask again"
    page.keyboard.press("Enter")
    page.locator(".answer").nth(1).wait_for()
    wait_for_answer(page)
    assert focus(page) == "turns"  # where the answer is; the button was disabled
    press_tab_until(page, "Show passages")
    page.keyboard.press("Enter")
    press_tab_until(page, "text")
    page.keyboard.press("s")
    assert page.locator("mark.here").inner_text() == "NEEDLE"
    assert [body["sparsity"]["plan"] for body in fake.bodies][1] == "dense"


def test_what_has_the_focus_is_framed(page: Any) -> None:
    add_text(page, "a.txt", TEXT)
    ask(page, "Where?")
    page.evaluate("document.activeElement.blur()")
    for _ in range(20):
        page.keyboard.press("Tab")
        if focus(page) and page.evaluate("document.activeElement !== document.body"):
            outline, width = page.evaluate(OUTLINE)
            assert outline == "solid", focus(page)
            assert width >= 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_all_text_has_contrast(scheme: str, width: int, fake: FakeServer, open_page: Any) -> None:
    page = open_page(fake.url, width=width, color_scheme=scheme)
    page.get_by_text("It copies facts").wait_for()
    assert page.evaluate(CONTRAST) == []
    page.set_input_files("#file", {"name": "bad.txt", "mimeType": "text/plain", "buffer": b"unreadable " * 50})
    page.locator("#documents .failed").wait_for()
    add_text(page, "a.txt", TEXT)
    if width == 360:
        page.get_by_role("button", name="Conversation", exact=True).click()
    ask(page, "error")
    ask(page, "Where?")
    page.get_by_role("button", name="Ask again").last.click()
    wait_for_answer(page)
    page.locator(".answer").nth(1).get_by_role("button").click()
    assert page.evaluate(CONTRAST) == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == (scheme == "dark")


def test_the_switch_overrides_the_system_and_is_remembered(page: Any) -> None:
    page.emulate_media(color_scheme="light")
    grounds = []
    for name in ("Theme: system", "Theme: light", "Theme: dark"):
        page.get_by_role("button", name=name).wait_for()
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.locator("#theme").click()
    assert grounds[0] == grounds[1] != grounds[2]
    page.locator("#theme").click()
    page.locator("#theme").click()
    page.reload()
    page.get_by_role("button", name="Theme: dark").wait_for()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == grounds[2]


def test_every_control_has_a_name_and_every_part_a_landmark(page: Any) -> None:
    add_text(page, "a.txt", TEXT)
    ask(page, "Where?")
    tree = page.locator("body").aria_snapshot()
    controls = re.findall(r"- (button|textbox|combobox|link|progressbar)\b(.*)", tree)
    assert len(controls) >= 12
    assert [control for control in controls if not control[1].strip().startswith('"')] == []
    for part in ("banner", "main", 'navigation "Documents"', 'region "Conversation"', 'region "Text of the document"'):
        assert f"- {part}" in tree
    assert page.locator("h1").count() == 1


def test_a_screen_reader_hears_the_answer_once_and_not_each_token(page: Any) -> None:
    page.evaluate(
        """() => {
        window.heard = [];
        const status = document.getElementById("status");
        const note = () => status.textContent && window.heard.push(status.textContent);
        new MutationObserver(note).observe(status, { childList: true }); }"""
    )
    assert page.locator("[aria-live]").count() == 1
    ask(page, "What is it that is announced?")
    page.wait_for_timeout(200)
    assert page.evaluate("window.heard") == ["Answer: An answer to: What is it that is announced? "]


def test_nothing_moves_for_those_who_asked_for_that(fake: FakeServer, open_page: Any) -> None:
    page = open_page(fake.url, reduced_motion="reduce")
    ask(page, "slow", wait=False).get_by_text("word").wait_for()
    moving = "[...document.querySelectorAll('*')].filter((e) => e.getAnimations({ subtree: true }).length).length"
    assert page.evaluate(moving) == 0
    page.keyboard.press("Escape")
    wait_for_answer(page)
