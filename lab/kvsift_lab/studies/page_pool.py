"""Time of taking and returning pages in pools of different fragmentation.

    python -m kvsift_lab.studies.page_pool results/page-pool-cpu.json

8,192 pages (128K tokens) are taken out of a pool of 65,536, and returned, again and again.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from kvsift.engine.provenance import versions_and_machine
from kvsift.stores.page_pool import PagePool

NUM_PAGES, REQUESTED, REPEATS = 65_536, 8_192, 21


def fresh() -> PagePool:
    """A pool of which no page was taken."""
    return PagePool(NUM_PAGES)


def used() -> PagePool:
    """A pool after a thousand rows of 1 to 128 pages, every other one of which was closed."""
    pool, rng = PagePool(NUM_PAGES), random.Random(0)
    rows = [pool.allocate(rng.randint(1, 128)) for _ in range(1000)]
    for row in rows[::2]:
        pool.release(row)
    return pool


def crowded() -> PagePool:
    """The same with only 10,000 pages left, in runs of closed rows: a request takes hundreds of runs."""
    pool = used()
    pool.allocate(max(pool.num_free - 10_000, 0))
    return pool


def alternating() -> PagePool:
    """A pool of which every other page is in use: no allocation can have longer runs than one page."""
    pool = PagePool(NUM_PAGES)
    pages = [pool.allocate(1) for _ in range(NUM_PAGES)]
    for page in pages[::2]:
        pool.release(page)
    return pool


def measure(pool: PagePool) -> dict[str, Any]:
    """Time of taking and of returning the pages, and the runs that they come in."""
    free_runs, taken_s, returned_s, num_runs = len(pool.free_runs), list[float](), list[float](), 0
    for _ in range(REPEATS):
        started = perf_counter()
        runs = pool.allocate(REQUESTED)
        taken_s.append(perf_counter() - started)
        started = perf_counter()
        pool.release(runs)
        returned_s.append(perf_counter() - started)
        num_runs = len(runs)
    return {
        "free_runs": free_runs, "num_runs": num_runs, "taken_s": taken_s, "returned_s": returned_s,
        "median_taken_s": median(taken_s), "median_returned_s": median(returned_s),
    }  # fmt: skip


def main() -> None:
    recipe = {"num_pages": NUM_PAGES, "requested": REQUESTED, "repeats": REPEATS}
    head = {"kind": "page_pool", "recipe": recipe} | versions_and_machine(torch.device("cpu"))
    pools = {make.__name__: measure(make()) for make in (fresh, used, crowded, alternating)}
    for name, point in pools.items():
        runs = f"{point['num_runs']:5} runs of {point['free_runs']:6}"
        print(f"{name:12} {runs} taken in {1e3 * point['median_taken_s']:8.3f} ms, returned in "
              f"{1e3 * point['median_returned_s']:8.3f} ms")  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(head | {"pools": pools}, indent=1) + "\n")


if __name__ == "__main__":
    main()
