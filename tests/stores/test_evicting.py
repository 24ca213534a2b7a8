"""A store that drops tokens holds exactly what was kept, in order, and its bytes fall."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import Tensor

from kvsift.stores.evicting import EvictingStore
from kvsift.stores.paged import PagedStore
from kvsift.types import LayerShape

SHAPE = LayerShape(0, 4, 2, 8, 1.0)


def new_store(num_rows: int = 1, page_size: int = 4) -> EvictingStore:
    return EvictingStore.of(PagedStore(SHAPE, num_rows, page_size, torch.empty(0)))


def tokens(positions: Tensor, row: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values that say where they stand: [num_kv_heads, count, head_dim]."""
    keys = (positions.double() + 1000 * row).float().expand(2, -1).unsqueeze(-1).expand(-1, -1, 8)
    return keys, -keys


def fill(store: EvictingStore, row: int, start: int, stop: int) -> None:
    store.append(row, *tokens(torch.arange(start, stop), row))


def held(store: EvictingStore, row: int = 0) -> list[list[int]]:
    """Positions that each KV head still holds, read off its keys; values agree."""
    reader = store.reader(row)
    assert torch.equal(reader.keys(), -reader.values())
    return (reader.keys()[..., 0] - 1000 * row).int().tolist()


def test_one_list_may_serve_all_heads_and_none_may_be_left() -> None:
    store = new_store()
    fill(store, 0, 0, 9)
    store.evict(0, 1, torch.tensor([[4, 5]]), 8)
    assert held(store) == [[0, 4, 5, 8]] * 2
    store.evict(0, 1, torch.empty(1, 0, dtype=torch.int64), 8)
    assert held(store) == [[0, 8]] * 2


@settings(max_examples=40)
@given(data=st.data())
def test_it_holds_what_a_list_would(data: st.DataObject) -> None:
    store, expected = new_store(page_size=data.draw(st.sampled_from([1, 4, 16]))), [[], []]  # type: list[list[int]]
    sinks, length = data.draw(st.integers(0, 3)), 0
    for _ in range(data.draw(st.integers(1, 6))):
        new = data.draw(st.integers(3, 90))
        fill(store, 0, length, length + new)
        expected = [row + list(range(length, length + new)) for row in expected]
        length += new
        stop = data.draw(st.integers(max(length - new, min(sinks, length)), length))
        between = [[token for token in row if sinks <= token < stop] for row in expected]
        count = data.draw(st.integers(0, len(between[0])))
        kept = [sorted(data.draw(st.permutations(row))[:count]) for row in between]
        store.evict(0, sinks, torch.tensor(kept, dtype=torch.int64).view(2, -1), stop)
        expected = [[t for t in row if t < sinks or t >= stop or t in kept[head]] for head, row in enumerate(expected)]
        assert held(store) == expected
        assert store.num_stored(0) == len(expected[0])


def test_a_row_that_drops_leaves_the_pages_of_others_alone() -> None:
    store = new_store(num_rows=3)
    for row in range(3):
        fill(store, row, 0, 50)
    for row in (0, 2):
        store.evict(row, 1, torch.tensor([[7]]), 49)
    assert held(store, 1) == [list(range(50))] * 2
    assert held(store, 2) == [[0, 7, 49]] * 2
    fill(store, 1, 50, 60)
    assert held(store, 1) == [list(range(60))] * 2
    assert [row.keys.shape[1] > 0 for row in store.row_stores] == [False, True, False]


def test_forks_share_full_pages_until_one_of_them_evicts() -> None:
    store = new_store(num_rows=3)
    fill(store, 0, 0, 400)
    fill(store, 1, 0, 50)
    store.fork([0, 1, 1])
    store.evict(0, 1, torch.tensor([[4]]), 399)
    one, other = store.row_stores[1:]
    assert one.table.runs(0)[0].start == other.table.runs(0)[0].start
    assert one.table.pool.is_shared(one.table.runs(0)[0].start)
    del one
    store.evict(1, 1, torch.tensor([[4]]), 49)
    assert other.table.pool.num_free  # the pages of a table that is gone
    assert not other.table.pool.is_shared(other.table.runs(0)[0].start)
    fill(store, 2, 50, 120)
    assert (
        (store.reader(2).keys()[..., 0]).tolist()
        == [[*(1000 + t for t in range(50)), *(2000 + t for t in range(50, 120))]] * 2
    )


def test_a_fork_of_a_whole_row_may_drop_while_the_other_keeps_all() -> None:
    store = new_store(num_rows=2)
    fill(store, 0, 0, 9)
    store.fork([0, 0])
    store.evict(0, 1, torch.tensor([[4]]), 8)
    assert store.reader(1).keys()[..., 0].tolist() == [list(range(9))] * 2
    store.crop(1, 5)
    assert store.reader(1).keys()[..., 0].tolist() == [list(range(5))] * 2


def test_going_back_is_refused_once_something_is_gone() -> None:
    store = new_store()
    fill(store, 0, 0, 9)
    store.crop(0, 8)
    store.evict(0, 1, torch.tensor([[4]]), 7)
    store.crop(0, 8)  # nothing to forget
    with refused("evicted_tokens"):
        store.crop(0, 7)
    with refused("evicted_tokens"):
        store.repage(4, ())
