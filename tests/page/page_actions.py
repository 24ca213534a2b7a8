"""What a reader does on the page."""

from __future__ import annotations

from typing import Any


def add_text(page: Any, name: str, text: str) -> None:
    """Choose a file, and wait until it is read."""
    kind = "text/html" if name.endswith(".html") else "text/plain"
    page.set_input_files("#file", {"name": name, "mimeType": kind, "buffer": text.encode()})
    page.locator("#documents [aria-current=true]").get_by_text(name, exact=True).wait_for(state="attached")
    page.locator("#documents li:has([aria-current=true]) progress").wait_for(state="hidden", timeout=120_000)


def ask(page: Any, question: str, wait: bool = True) -> Any:
    """Ask, and return the answer's card, by default when it is complete."""
    page.locator("#send:enabled, #stop:visible").wait_for(state="attached")
    page.get_by_label("Question", exact=True).fill(question)
    cards = page.locator(".answer").count()
    page.keyboard.press("Enter")
    page.locator(".answer").nth(cards).wait_for(state="attached")
    if wait:
        wait_for_answer(page)
    return page.locator(".answer").last


def wait_for_answer(page: Any) -> None:
    page.locator(".answer.running").wait_for(state="detached", timeout=60_000)


def width_beyond_the_window(page: Any) -> int:
    """Pixels by which the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def is_in_sight(page: Any, selector: str) -> bool:
    """Whether an element is inside the window of the text."""
    return page.evaluate(
        """(selector) => {
        const box = (name) => document.querySelector(name).getBoundingClientRect();
        const [part, whole] = [box(selector), box("#text")];
        return part.height > 0 && part.top >= whole.top && part.bottom <= whole.bottom; }""",
        selector,
    )


def drop(page: Any, name: str, text: str) -> None:
    """Drop a file on the page."""
    page.evaluate(
        """([name, text]) => {
        const data = new DataTransfer();
        data.items.add(new File([text], name));
        const options = { dataTransfer: data, bubbles: true, cancelable: true };
        for (const kind of ["dragover", "drop"]) document.body.dispatchEvent(new DragEvent(kind, options)); }""",
        [name, text],
    )
