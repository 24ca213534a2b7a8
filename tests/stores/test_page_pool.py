"""Physical pages: none is lost, none has two owners by mistake, free ones come as runs, and taking many is fast."""

import random
from time import perf_counter

from hypothesis import given
from hypothesis import strategies as st
from stores.pools import free_pool

from kvsift.stores.page_pool import PagePool, Run


def pages_of(runs: list[Run]) -> list[int]:
    return [page for run in runs for page in range(*run)]


def check(pool: PagePool, references: dict[int, int]) -> None:
    free = pages_of(pool.free_runs)
    assert sorted([*free, *references]) == list(range(pool.num_pages)), "a page is lost, or free and in use"
    assert pool.num_free == len(free)
    assert pool.num_used == len(references)
    for page, count in references.items():
        assert pool.is_shared(page) == (count > 1)
    gaps = [(one.stop, other.start) for one, other in zip(pool.free_runs, pool.free_runs[1:])]
    assert all(stop < start for stop, start in gaps), "neighbouring free runs are one run"


@given(st.data(), st.sampled_from([0, 60]))
def test_pages_are_free_or_referred_to_and_never_lost(data: st.DataObject, size: int) -> None:
    pool, references, held = free_pool(size), dict[int, int](), list[list[Run]]()
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["allocate", "allocate", "share", "release"]))
        if action == "allocate":
            count, after = data.draw(st.integers(0, 20)), data.draw(st.none() | st.integers(0, 40))
            runs = pool.allocate(count, after)
            taken = pages_of(runs)
            assert len(set(taken)) == len(taken) == count
            assert not references.keys() & set(taken)
            references |= dict.fromkeys(taken, 1)
            held.append(runs)
        elif held and action == "share":
            held.append(held[data.draw(st.integers(0, len(held) - 1))])
            pool.share(held[-1])
            for page in pages_of(held[-1]):
                references[page] += 1
        elif held:
            runs = held.pop(data.draw(st.integers(0, len(held) - 1)))
            pool.release(runs)
            for page in pages_of(runs):
                references[page] -= 1
            references = {page: count for page, count in references.items() if count}
        check(pool, references)


def test_the_smallest_run_that_is_large_enough_comes_first() -> None:
    pool = free_pool(100)
    runs = [pool.allocate(count)[0] for count in (10, 1, 30, 1, 20, 1)]
    pool.release([runs[0], runs[2], runs[4]])  # free runs of 10, 30 and 20 pages
    assert pool.allocate(15) == [Run(42, 57)]
    assert pool.allocate(10) == [Run(0, 10)]
    assert pool.allocate(31) == [Run(63, 94)], "the end of the pool, which is untouched"
    assert pool.allocate(33) == [Run(11, 41), Run(57, 60)], (
        "the largest run, as none is large enough, and the smallest for the rest"
    )


def test_a_row_grows_into_the_pages_behind_it() -> None:
    pool = PagePool()
    (row,), (other,) = pool.allocate(4), pool.allocate(4)
    pool.release([other])
    assert pool.allocate(2, after=row.stop - 1) == [Run(4, 6)]


def test_a_pool_grows_by_what_is_missing_at_its_end() -> None:
    pool = PagePool()
    first, last = pool.allocate(8)[0], pool.allocate(8)[0]
    pool.release([Run(last.start + 4, last.stop)])
    assert pool.allocate(10) == [Run(12, 22)], "four free pages at the end, and six new ones"
    assert pool.num_pages == 22
    pool.release([first])


def test_taking_thousands_of_pages_is_fast() -> None:
    """8,192 pages of 65,536 in under a millisecond, in a pool of a thousand free runs (the bound here is generous, the
    machine may be busy; ``results/page-pool-cpu`` has the measurement)."""
    pool, choose = free_pool(65_536), random.Random(0)
    rows = [pool.allocate(choose.randint(1, 128))[0] for _ in range(1000)]
    for row in rows[::2]:
        pool.release([row])
    seconds = []
    for _ in range(20):
        started = perf_counter()
        runs = pool.allocate(8192)
        seconds.append(perf_counter() - started)
        pool.release(runs)
    assert min(seconds) < 0.01
