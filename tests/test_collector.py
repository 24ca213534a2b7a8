"""Imports without collections of garbage leave the collector as it was."""

import gc
from collections.abc import Iterator

import pytest

from kvsift.collector import collector_paused


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    """But by the test itself; ``conftest`` lets garbage be collected while tests run."""
    assert gc.isenabled()
    gc.unfreeze()
    yield
    gc.freeze()  # as in ``conftest``


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with collector_paused():
            with collector_paused():
                pass
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collector_paused():
        pass
    assert gc.get_freeze_count() > frozen / 2 > 0  # some may have gone by themselves


def test_what_was_imported_is_not_searched_at_once() -> None:
    with collector_paused():
        imported = [[] for _ in range(2000)]
    gc.collect(1)  # the younger generations
    assert any(each is imported for each in gc.get_objects(generation=2))
