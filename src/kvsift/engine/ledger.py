"""The ledger: every page has an owner, and as many references as owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from kvsift.engine.row import State
from kvsift.stores.page_pool import PagePool, Run


class Books(NamedTuple):
    """Numbers of a loop.

    Attributes:
        rows: by state.
        pages: by owner: "free", "kept" (complete chunks of prompts, for rows that begin alike) or "rows" (those that
            rows alone own).
    """

    rows: dict[State, int]
    pages: dict[str, int]


def audit(pool: PagePool, owned: Iterable[Run]) -> list[str]:
    """Return what does not balance; empty if every page has as many references as owners, and the others are free."""
    owners = Counter(page for run in owned for page in range(*run))
    free = {page for run in pool.free_runs for page in range(*run)}
    wrong = [
        f"page {page} has {count} references and {owners[page]} owners"
        for page in range(pool.num_pages)
        if (count := pool.references(page)) != owners[page]
    ]
    wrong += [f"page {page} is free and has an owner" for page in sorted(free & owners.keys())]
    wrong += [f"page {page} is lost" for page in range(pool.num_pages) if page not in free and not owners[page]]
    return wrong
