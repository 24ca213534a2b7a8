"""Which pages belong to whom: shared ones are counted, none is lost, rows that decode side by side stay consecutive."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvsift.placement.pages import SPARE_PAGES, PageTable

Operation = tuple[str, int, int]

operations = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(0, 2), st.integers(1, 12)),
        st.tuples(st.just("shrink"), st.integers(0, 2), st.integers(0, 6)),
        st.tuples(st.just("unshare"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("fork"), st.integers(0, 26), st.just(0)),
        st.tuples(st.just("reserve"), st.integers(0, 2), st.integers(1, 12)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@given(operations)
def test_pages_are_owned_spare_or_free_and_never_lost(given_operations: list[Operation]) -> None:
    table = PageTable(3)
    for operation, row, amount in given_operations:
        if operation == "grow":
            table.grow(row, len(table.rows[row]) + amount)
        elif operation == "shrink":
            table.shrink(row, max(len(table.rows[row]) - amount, 0))
        elif operation == "unshare" and table.rows[row]:
            source, shared = table.rows[row][-1], table.is_shared(table.rows[row][-1])
            copy = table.unshare_last(row)
            assert (copy is not None) == shared
            assert copy is None or (copy[0] == source and copy[1] == table.rows[row][-1] != source)
            assert not table.is_shared(table.rows[row][-1])
        elif operation == "fork":
            table.fork([row % 3, row // 3 % 3, row // 9])
        elif operation == "reserve":
            table.reserve(row, len(table.rows[row]) + amount)
            assert len(table.planned(row)) >= len(table.rows[row]) + amount
        elif operation == "clear":
            table.clear()
            assert not any(table.planned(row) for row in range(3))
        check(table)


def check(table: PageTable) -> None:
    owned = [page for row in table.rows for page in row]
    spare = [page for pages in table._spare for page in pages]
    homes = [*sorted(set(owned)), *spare, *sorted(table._free)]
    assert sorted(homes) == list(range(table.num_pages)), "a page is lost, or in two places"
    for page in range(table.num_pages):
        owners = owned.count(page)
        assert table.is_shared(page) == (owners > 1)
    for row, pages in enumerate(table.rows):
        consecutive = bool(pages) and pages == list(range(pages[0], pages[0] + len(pages)))
        assert table.run_start(row) == (pages[0] if consecutive else None)
        assert len(set(pages)) == len(pages)


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
    assert table.num_pages == 1000


def test_a_row_grows_back_into_the_pages_it_gave_up() -> None:
    table = PageTable(2)
    table.grow(0, 300)
    table.grow(1, 10)
    pages, before = list(table.rows[0]), table.num_pages
    for num_pages in (299, 120, 0):
        table.shrink(0, num_pages)
        table.grow(0, 300)
        assert table.rows[0] == pages
    assert table.num_pages == before


def test_beams_take_little_more_than_the_pages_they_hold() -> None:
    table, choose = PageTable(4), random.Random(0)
    for row in range(4):
        table.grow(row, 100)
    before = table.num_pages
    for num_tokens in range(4 * 100 + 1, 4 * 100 + 800):
        table.fork([choose.randrange(4) for _ in range(4)])
        for row in range(4):
            if num_tokens % 4 != 1:
                table.unshare_last(row)
            table.grow(row, -(-num_tokens // 4))
    held = {page for row in table.rows for page in row}
    assert table.num_pages <= max(before, 2 * len(held))


def test_a_fork_shares_pages_and_takes_none() -> None:
    table = PageTable(1)
    table.grow(0, 40)
    before = table.num_pages
    table.fork([0, 0, 0])
    assert table.num_pages == before
    assert table.rows[0] == table.rows[1] == table.rows[2]
    assert all(table.is_shared(page) for page in table.rows[0])


def test_a_row_grows_into_the_pages_it_reserved() -> None:
    table = PageTable(2)
    scratch = table.take()
    for row in range(2):
        table.reserve(row, 30)
    planned = [table.planned(row) for row in range(2)]
    for row in range(2):
        table.grow(row, 10)
        table.grow(row, 25)
        table.shrink(row, 12)
        table.grow(row, 30)
        assert table.rows[row] == planned[row] == list(range(planned[row][0], planned[row][0] + 30))
    assert scratch not in planned[0] + planned[1]


def test_rows_that_are_reserved_again_after_clearing_take_the_same_pages() -> None:
    table = PageTable(3)
    for row, num_pages in enumerate((40, 10, 20)):
        table.reserve(row, num_pages)
        table.grow(row, num_pages)
    table.clear()
    for row, num_pages in enumerate((15, 30, 25)):
        table.reserve(row, num_pages)
        assert table.planned(row) == list(range(table.planned(row)[0], table.planned(row)[0] + num_pages))
    assert table.num_pages == 70
