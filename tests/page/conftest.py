"""A browser for tests of the page: none may ask for anything elsewhere, break the policy or fail in silence."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from page.fake_server import FakeServer, running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
REFUSED = "Failed to load resource: "  # how chromium reports a status of 400 and more


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("chromium is missing: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is missing; make test-page installs it")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open an address in a window of its own; ``page.faults`` has what the console said of refused requests."""
    windows, errors, elsewhere = [], [], []

    def open_page(url: str, width: int = 1280, height: int = 800, **options: Any) -> Any:
        window = browser.new_context(viewport={"width": width, "height": height}, **options)
        page = window.new_page()
        page.set_default_timeout(15_000)
        page.faults = []

        def said(message: Any) -> None:
            is_fault = message.text.startswith(REFUSED)
            (page.faults if is_fault else errors).append(message.text)

        page.on("console", lambda message: said(message) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        origin = urlsplit(url).netloc
        page.on(
            "request",
            lambda request: elsewhere.append(request.url) if urlsplit(request.url).netloc not in ("", origin) else None,
        )
        page.goto(url)
        windows.append(window)
        return page

    yield open_page
    for window in windows:
        window.close()
    assert errors == []
    assert elsewhere == []


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """A server without a model; ``fake.url`` is its address."""
    server = FakeServer()
    with running(server) as server.url:
        yield server
