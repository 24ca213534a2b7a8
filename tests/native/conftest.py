"""What every test of the compiled core needs: the core, and each of its instruction sets in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvsift import native

LEVELS = native.levels() if native.available() else ["missing"]


@pytest.fixture
def core() -> None:
    if not native.available():
        pytest.skip(native.why_missing())


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, core: None) -> Iterator[str]:
    before = native.level()
    native.use_level(request.param)
    yield request.param
    native.use_level(before)
