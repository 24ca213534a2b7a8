"""Which pages belong to which row: shared ones are counted, none is lost, rows that decode side by side stay
consecutive, and all layers of a batch see the same pages."""

import gc
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stores.pools import free_pool

from kvsift.stores.kv_pool import KVPool
from kvsift.stores.page_pool import Run
from kvsift.stores.page_table import SPARE_PAGES, PageTable

Operation = tuple[str, int, int]

operations = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(0, 2), st.integers(1, 12)),
        st.tuples(st.just("shrink"), st.integers(0, 2), st.integers(0, 6)),
        st.tuples(st.just("unshare"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("fork"), st.integers(0, 26), st.just(0)),
        st.tuples(st.just("reserve"), st.integers(0, 2), st.integers(1, 12)),
        st.tuples(st.just("close"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("adopt"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


def pages(table: PageTable, row: int) -> list[int]:
    return [page for run in table.runs(row) for page in range(*run)]


def spare(table: PageTable, row: int) -> list[int]:
    return table.planned(row)[table.num_pages(row) :]


def is_consecutive(numbers: list[int]) -> bool:
    return bool(numbers) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))


@given(operations)
def test_pages_are_owned_spare_or_free_and_never_lost(given_operations: list[Operation]) -> None:
    table = PageTable(3)
    for operation, row, amount in given_operations:
        if operation == "grow":
            table.grow(row, table.num_pages(row) + amount)
        elif operation == "shrink":
            table.shrink(row, max(table.num_pages(row) - amount, 0))
        elif operation == "unshare" and table.num_pages(row):
            source, num_copies = pages(table, row)[-1], len(table.copies)
            shared = table.pool.is_shared(source)
            table.unshare_last(row)
            assert (len(table.copies) > num_copies) == shared
            assert not shared or table.copies[-1] == (source, pages(table, row)[-1])
            assert not table.pool.is_shared(pages(table, row)[-1])
        elif operation == "fork":
            table.fork([row % 3, row // 3 % 3, row // 9])
        elif operation == "reserve":
            table.reserve(row, table.num_pages(row) + amount)
            assert len(table.planned(row)) >= table.num_pages(row) + amount
        elif operation == "close":
            table.close(row)
            assert not table.planned(row)
        elif operation == "adopt" and row != amount:
            table.close(row)
            table.adopt(row, table.runs(amount))
            assert pages(table, row) == pages(table, amount)
        elif operation == "clear":
            table.clear()
            assert not any(table.planned(row) for row in range(3))
        check(table)


def check(table: PageTable) -> None:
    rows = range(table.num_rows)
    owned = [page for row in rows for page in pages(table, row)]
    reserved = [page for row in rows for page in spare(table, row)]
    free = [page for run in table.pool.free_runs for page in range(*run)]
    assert sorted([*set(owned), *reserved, *free]) == list(range(table.pool.num_pages)), "lost, or in two places"
    for page in set(owned):
        assert table.pool.is_shared(page) == (owned.count(page) > 1)
    for row in rows:
        numbers = pages(table, row)
        assert table.num_pages(row) == len(numbers) == len(set(numbers))
        assert table.run_start(row) == (numbers[0] if is_consecutive(numbers) else None)


def test_rows_that_decode_side_by_side_stay_consecutive() -> None:
    table = PageTable(3)
    for row in range(3):
        table.grow(row, 10)
    for num_pages in range(11, 11 + SPARE_PAGES):
        for row in range(3):
            table.grow(row, num_pages)
    assert all(table.run_start(row) is not None for row in range(3))


def test_a_reserved_row_stays_consecutive_up_to_its_reserve() -> None:
    table = PageTable(2)
    table.grow(0, 1, reserve=500)
    table.grow(1, 1, reserve=500)
    table.grow(0, 500)
    table.grow(1, 500)
    assert table.run_start(0) is not None
    assert table.run_start(1) is not None
    assert table.pool.num_pages == 1000


def test_rows_that_say_what_they_need_stay_consecutive_in_a_pool_with_room() -> None:
    table = PageTable(2, KVPool(free_pool(64)))
    for num_pages in range(1, 21):
        for row in range(2):
            table.grow(row, num_pages, reserve=20)
    assert [len(table.runs(row)) for row in range(2)] == [1, 1]


def test_a_row_grows_back_into_the_pages_it_gave_up() -> None:
    table = PageTable(2)
    table.grow(0, 300)
    table.grow(1, 10)
    before, num_pages = pages(table, 0), table.pool.num_pages
    for length in (299, 120, 0):
        table.shrink(0, length)
        table.grow(0, 300)
        assert pages(table, 0) == before
    assert table.pool.num_pages == num_pages


def test_beams_take_little_more_than_the_pages_they_hold() -> None:
    table, choose = PageTable(4), random.Random(0)
    for row in range(4):
        table.grow(row, 100)
    before = table.pool.num_pages
    for num_tokens in range(4 * 100 + 1, 4 * 100 + 800):
        table.fork([choose.randrange(4) for _ in range(4)])
        for row in range(4):
            if num_tokens % 4 != 1:
                table.unshare_last(row)
            table.grow(row, -(-num_tokens // 4))
    in_use = {page for row in range(4) for page in pages(table, row)}
    assert table.pool.num_pages <= max(before, 2 * len(in_use))


def test_a_fork_shares_pages_and_takes_none() -> None:
    table = PageTable(1)
    table.grow(0, 40)
    before = table.pool.num_pages
    table.fork([0, 0, 0])
    assert table.pool.num_pages == before
    assert pages(table, 0) == pages(table, 1) == pages(table, 2)
    assert all(table.pool.is_shared(page) for page in pages(table, 0))


def test_a_row_grows_into_the_pages_it_reserved() -> None:
    table = PageTable(2)
    scratch = table.reserve_scratch()
    for row in range(2):
        table.reserve(row, 30)
    planned = [table.planned(row) for row in range(2)]
    for row in range(2):
        table.grow(row, 10)
        table.grow(row, 25)
        table.shrink(row, 12)
        table.grow(row, 30)
        assert pages(table, row) == planned[row]
        assert is_consecutive(planned[row])
    assert scratch == table.reserve_scratch()
    assert scratch not in planned[0] + planned[1]


def test_rows_that_are_reserved_again_after_clearing_take_the_same_pages() -> None:
    table = PageTable(3)
    for row, num_pages in enumerate((40, 10, 20)):
        table.reserve(row, num_pages)
        table.grow(row, num_pages)
    table.clear()
    for row, num_pages in enumerate((15, 30, 25)):
        table.reserve(row, num_pages)
        assert is_consecutive(table.planned(row))
        assert len(table.planned(row)) == num_pages
    assert table.pool.num_pages == 70


def test_rows_adopt_pages_and_are_closed_one_at_a_time() -> None:
    table, one, other = PageTable(2), 0, 1
    table.grow(one, 6, reserve=6)
    table.adopt(other, [Run(table.runs(one)[0].start, table.runs(one)[0].start + 4)])
    table.grow(other, 7, reserve=3)
    assert pages(table, other)[:4] == pages(table, one)[:4]
    shared = pages(table, one)[0]
    table.close(one)
    assert not table.pool.is_shared(shared)
    assert table.num_pages(other) == 7
    check(table)


def test_a_fragmented_row_is_its_runs() -> None:
    table = PageTable(2, KVPool(free_pool(8)))
    for num_pages in range(1, 5):
        for row in range(2):
            table.grow(row, num_pages)
    assert [run.num_pages for run in table.runs(0)] == [4] or len(table.runs(0)) > 1
    assert sorted(pages(table, 0) + pages(table, 1)) == list(range(8))


def test_tables_share_a_pool_and_return_their_pages() -> None:
    kv = KVPool()
    one, other = PageTable(1, kv), PageTable(1, kv)
    one.grow(0, 30)
    other.grow(0, 40)
    assert not set(pages(one, 0)) & set(pages(other, 0))
    assert kv.pages.num_used >= 70
    before = kv.pages.num_used
    del other
    gc.collect()
    assert kv.pages.num_used <= before - 40
    one.grow(0, 200)  # into what was returned, as far as it goes
    assert len(set(pages(one, 0))) == 200


def test_pages_and_slots_on_a_device_follow_the_row() -> None:
    kv, device = KVPool(), torch.device("cpu")
    table, other = PageTable(1, kv), PageTable(1, kv)
    for size in (3, 60, 200):
        table.grow(0, size)
        other.grow(0, size)
        owned = pages(table, 0)
        assert table.pages_on(0, device).tolist() == table.page_ids(0).tolist() == owned
        assert table.pages_on(0, device) is table.pages_on(0, device)
        assert table.slots_on(0, 4, device).tolist() == [4 * page + i for page in owned for i in range(4)]
    assert len(table.runs(0)) > 1


def test_the_layers_of_a_batch_take_a_step_once() -> None:
    table = PageTable(2)
    table.grow(0, 3)
    for _ in range(3):  # three layers that have taken no step yet
        if table.take_step(0, "fork", 0, 0):
            table.fork([0, 0])
    assert pages(table, 0) == pages(table, 1)
    assert table.steps == 1
    with pytest.raises(AssertionError, match="grew apart"):
        table.take_step(0, "fork", 1, 1)
    one, other = table.successor(1, 32), table.successor(1, 32)
    assert one is other
    assert one.num_rows == 2
