"""Pools with free pages."""

from kvsift.stores.page_pool import PagePool


def free_pool(num_pages: int) -> PagePool:
    """A pool of this many free pages, which takes new ones only when they do not suffice."""
    pool = PagePool()
    pool.release(pool.allocate(num_pages))
    return pool
