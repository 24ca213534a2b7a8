"""The paged store against the plainest model there is: a list of tensors per sequence."""

import pytest
import torch
from contracts.harness import poison, scattered_table
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from kvsift.kernels.page_summary import SUMMARIES, summarise
from kvsift.stores.paged import PagedStore
from kvsift.types import LayerShape

SHAPE = LayerShape(layer=0, num_query_heads=4, num_kv_heads=2, head_dim=3, scale=1.0)
KINDS = ("minmax", "centroid_radius", "minmax_fp8")


def tokens(count: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, count, 3, generator=generator).to(dtype) for _ in range(2))
    return keys, values


def store_of(*lengths: int, page_size: int = 4, dtype: torch.dtype = torch.float32) -> PagedStore:
    store = PagedStore(SHAPE, len(lengths), page_size, torch.empty(0, dtype=dtype), KINDS)
    for row, length in enumerate(lengths):
        store.append(row, *tokens(length, row, dtype))
    poison(store)
    return store


class StoreModel(RuleBasedStateMachine):
    """Appends, roll-backs, forks and new page sizes in any order; what holds no token is NaN all along."""

    @initialize(page_size=st.sampled_from([1, 4, 5]), num_rows=st.integers(1, 3), scattered=st.booleans())
    def begin(self, page_size: int, num_rows: int, scattered: bool) -> None:
        table = scattered_table(num_rows) if scattered else None
        self.store = PagedStore(SHAPE, num_rows, page_size, torch.empty(0), KINDS, table=table)
        self.model = [tokens(0, 0) for _ in range(num_rows)]
        self.seed = 0

    @rule(row=st.integers(0, 3), count=st.integers(0, 11))
    def append(self, row: int, count: int) -> None:
        row %= len(self.model)
        self.seed += 1
        new = tokens(count, self.seed)
        self.store.append(row, *new)
        self.model[row] = tuple(torch.cat([old, more], 1) for old, more in zip(self.model[row], new))  # type: ignore[assignment]

    @rule(row=st.integers(0, 3), length=st.integers(0, 40))
    def crop(self, row: int, length: int) -> None:
        row %= len(self.model)
        self.store.crop(row, length)
        self.model[row] = tuple(tensor[:, :length] for tensor in self.model[row])  # type: ignore[assignment]

    @rule(sources=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def fork(self, sources: list[int]) -> None:
        sources = [source % len(self.model) for source in sources]
        self.store.fork(sources)
        self.model = [self.model[source] for source in sources]

    @rule(page_size=st.sampled_from([1, 4, 5]))
    def repage(self, page_size: int) -> None:
        self.store.repage(page_size, KINDS)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        poison(self.store)
        assert self.store.num_rows == len(self.model)
        for row, (keys, values) in enumerate(self.model):
            reader = self.store.reader(row)
            assert reader.length == self.store.lengths[row] == keys.shape[1]
            assert torch.equal(reader.keys(), keys)
            assert torch.equal(reader.values(), values)
            start, stop = reader.length // 3, reader.length // 2
            assert torch.equal(reader.keys(start, stop), keys[:, start:stop])
            assert torch.equal(reader.values(start, stop), values[:, start:stop])
            self._check_summaries(row, keys)
            self._check_gather(row, keys, values)

    def _check_summaries(self, row: int, keys: Tensor) -> None:
        size, length = self.store.page_size, keys.shape[1]
        num_pages = -(-length // size)
        padded = torch.full((2, num_pages * size, 3), torch.nan)
        padded[:, :length] = keys
        valid = (torch.arange(num_pages * size) < length).view(-1, size)
        for kind in KINDS if num_pages else ():
            # compared in float32: torch cannot compare 8-bit tensors
            found = self.store.reader(row).summary(kind, slice(0, num_pages)).float()
            assert torch.equal(found, summarise(kind, padded.view(2, -1, size, 3), valid).float())
            last = self.store.reader(row).summary(kind, slice(num_pages - 1, num_pages)).float()
            assert torch.equal(last, found[:, -1:])
            chosen = torch.tensor([[0, num_pages - 1], [num_pages // 2, 0], [0, 0], [num_pages - 1, 0]])
            per_head = self.store.reader(row).summary(kind, chosen).float()  # of four query heads, two to a KV head
            assert torch.equal(per_head, torch.stack([found[head // 2, chosen[head]] for head in range(4)]))

    def _check_gather(self, row: int, keys: Tensor, values: Tensor) -> None:
        full = keys.shape[1] // self.store.page_size
        if full == 0:
            return
        pages = torch.arange(full).flip(0)
        for granule in {1, self.store.page_size}:
            runs = (pages * self.store.page_size)[:, None] + torch.arange(self.store.page_size)
            granules = (runs.flatten() if granule == 1 else pages).expand(4, -1)  # per query head
            got_keys, got_values = self.store.reader(row).gather(granules, granule)
            assert torch.equal(got_keys, keys.repeat_interleave(2, 0)[:, runs.flatten()])
            assert torch.equal(got_values, values.repeat_interleave(2, 0)[:, runs.flatten()])


TestStoreAgainstAListOfTensors = StoreModel.TestCase
TestStoreAgainstAListOfTensors.settings = settings(max_examples=40, stateful_step_count=20)


def test_a_row_that_grew_alone_is_read_without_a_copy() -> None:
    store = store_of(37, 21)

    def shares_memory(tensor: Tensor, pool: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()

    for row in range(2):
        reader = store.reader(row)
        assert shares_memory(reader.keys(), store.keys)
        assert shares_memory(reader.values(3, 9), store.values)
        assert shares_memory(reader.summary("minmax", slice(0, 3)), store.summaries["minmax"])


def test_a_fork_copies_no_full_page() -> None:
    store = store_of(4 * 50 + 1)
    before = store.table.pool.num_pages
    store.fork([0] * 8)
    assert store.table.pool.num_pages <= before + 8
    rows = [{page for run in store.table.runs(row) for page in range(*run)} for row in range(8)]
    assert len(set.intersection(*rows)) == 50


def test_a_reserved_store_does_not_move_its_pools() -> None:
    store = PagedStore(SHAPE, 2, 4, torch.empty(0), reserve=1000)  # beyond the spare pages of any row
    store.append(0, *tokens(1, 0))
    store.append(1, *tokens(1, 1))
    pool = store.keys.data_ptr()
    for row in range(2):
        store.append(row, *tokens(999, 2 + row))
    assert store.keys.data_ptr() == pool


def test_a_kind_of_summary_that_is_added_later_covers_what_is_stored() -> None:
    late = PagedStore(SHAPE, 2, 4, torch.empty(0))
    for row, length in enumerate((11, 6)):
        late.append(row, *tokens(length, row))
    poison(late)
    late.repage(4, KINDS)
    for row, num_pages in enumerate((3, 2)):
        for kind in KINDS:
            expected = store_of(11, 6).reader(row).summary(kind, slice(0, num_pages))
            assert torch.equal(late.reader(row).summary(kind, slice(0, num_pages)).float(), expected.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pools_have_the_dtype_of_the_keys_or_of_their_kind(dtype: torch.dtype) -> None:
    store = store_of(9, dtype=dtype)
    assert store.reader(0).keys().dtype == store.reader(0).values().dtype == dtype
    for kind, pool in store.summaries.items():
        assert pool.dtype == (SUMMARIES[kind].dtype or dtype)
    assert torch.equal(store.reader(0).keys(), tokens(9, 0, dtype)[0])


def test_bytes_are_those_of_all_pools() -> None:
    store = store_of(9)
    pages = store.keys.shape[1]
    row = {"minmax": 4 * 6, "centroid_radius": 4 * 4, "minmax_fp8": 6}  # bytes
    assert store.num_bytes == 2 * pages * (4 * 2 * 4 * 3 + sum(row[kind] for kind in KINDS))


def test_the_page_being_filled_is_summarised_once_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(kind: str, keys: Tensor, valid: Tensor | None, values: Tensor) -> Tensor:
        calls.append(kind)
        return summarise(kind, keys, valid, values)

    monkeypatch.setattr("kvsift.stores.paged.summarise", counted)
    store = store_of(10)  # pages of 4
    calls.clear()
    store.append(0, *tokens(1, 1))
    store.reader(0).summary("minmax", slice(0, 2))
    assert calls == []
    for _ in range(2):
        store.reader(0).summary("minmax", slice(0, 3))
        assert calls == list(store.kinds)
    store.append(0, *tokens(1, 2))  # it is full
    assert calls == 2 * list(store.kinds)
