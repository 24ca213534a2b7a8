"""Pools of pages that do not grow."""

from __future__ import annotations

from kvsift.stores.page_pool import PagePool


def fixed_pool(num_pages: int) -> PagePool:
    """A pool of this many free pages, which holds itself."""
    pool = PagePool()
    pool.release(pool.allocate(num_pages))
    pool.hold(pool)
    return pool
