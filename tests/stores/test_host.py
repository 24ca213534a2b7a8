"""Stores in host memory hold what a store on the device holds, whatever happens to it, and lend it to the device."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvsift.kernels.page_summary import summarise
from kvsift.native.coded_rows import decode_rows, encode_rows
from kvsift.stores.offload import OffloadStore
from kvsift.stores.paged import PagedStore
from kvsift.stores.reader import RowReader
from kvsift.stores.split import SplitStore
from kvsift.types import LayerShape

SHAPE = LayerShape(layer=0, num_query_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
LIKE = torch.empty(0)
MAKE: dict[str, Callable[[], SplitStore]] = {
    "split": lambda: SplitStore(SHAPE, 2, 4, LIKE, ["minmax"]),
    "offload": lambda: OffloadStore(SHAPE, 2, 4, LIKE, ["minmax"], device_cache=12),
}


def drawn(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, count, 8, generator=generator)
    return keys, values


def readers(store: SplitStore) -> list[Callable[[int], RowReader]]:
    return [store.reader, store.device_reader] if isinstance(store, OffloadStore) else [store.reader]


def check_alike(store: SplitStore, other: PagedStore, rng: random.Random) -> None:
    for row, length in enumerate(other.lengths):
        expected = other.reader(row)
        start = rng.randint(0, length)
        window = rng.randint(0, length), length
        for read in readers(store):
            reader = read(row)
            assert reader.length == length
            assert torch.equal(reader.keys(start), expected.keys(start))
            assert torch.equal(reader.values(), expected.values())
            if length:
                chosen = torch.tensor([[rng.randrange(length) for _ in range(3)] for _ in range(4)])
                for granule_size in (1, 4):
                    granules = chosen // granule_size
                    seen = (granules.unsqueeze(-1) * granule_size + torch.arange(granule_size)).flatten(1) < length
                    for one, two in zip(reader.gather(granules, granule_size), expected.gather(granules, granule_size)):
                        assert torch.equal(one[seen], two[seen])
            pages = slice(0, -(-length // 4))
            if "minmax" in other.summaries:
                assert torch.equal(reader.summary("minmax", pages), expected.summary("minmax", pages))
        for span in ((0, min(3, length)), window):
            for one, two in zip(store.near(row, *span), (expected.keys(*span), expected.values(*span))):
                assert torch.equal(one, two)
        for number, read_all in enumerate((expected.keys, expected.values)):
            blocks = [block[number] for block in store.streamed(row, 0, length)]
            assert torch.equal(torch.cat([LIKE.view(0, 0, 0).new_empty(2, 0, 8), *blocks], 1), read_all())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_whatever_happens_they_hold_the_same(make: Callable[[], SplitStore], seed: int) -> None:
    rng = random.Random(seed)
    store, other = make(), PagedStore(SHAPE, 2, 4, LIKE, ["minmax"])
    for step in range(60):
        row, action = rng.randrange(2), rng.random()
        for each in (store, other):
            if action < 0.6:
                each.append(row, *drawn(1 + step % 7 if action < 0.5 else 70, 100 * seed + step))
            elif action < 0.8:
                each.crop(row, each.lengths[row] * step // 60)
            elif action < 0.9:
                each.fork([1, 0] if step % 2 else [row, row])
            else:
                each.repage(8 if step % 2 else 4, ["minmax"] if step % 3 else [])
        if store.page_size == 4:
            check_alike(store, other, rng)


def test_values_lie_behind_their_keys_where_a_device_selects_by_summaries() -> None:
    store, apart = MAKE["offload"](), OffloadStore(SHAPE, 2, 4, LIKE)
    for each in (store, apart, other := PagedStore(SHAPE, 2, 4, LIKE)):
        each.append(0, *drawn(30, 0))
    (tokens,), (keys, values) = store.pool.stored, apart.pool.stored
    assert tokens.shape[3] == 16
    assert (keys.shape[3], values.shape[3]) == (8, 8)
    for slot, token in enumerate(store.pools().keys.flatten(1, 2).unbind(1)):
        assert store.pools().values.flatten(1, 2)[:, slot].data_ptr() == token.data_ptr() + 8 * 4
    assert apart.reader(0).in_place
    reader, expected = store.reader(0), other.reader(0)
    assert not reader.in_place
    assert torch.equal(reader.borrow_in_place(3, 20), expected.keys(3, 20))  # by a method that ranks keys
    assert reader.borrow_in_place(3, 20).is_contiguous()


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_the_last_tokens_are_read_where_they_were_computed(make: Callable[[], SplitStore]) -> None:
    store = make()
    store.append(0, *drawn(70, 0))
    keys, values = drawn(70, 1)
    store.append(0, keys, values)
    store.take_transfers()
    ((fresh_keys, fresh_values),) = store.streamed(0, 80, 140)
    assert (fresh_keys.data_ptr(), store.take_transfers().num_bytes) == (keys[:, 10:].data_ptr(), 0)
    assert torch.equal(fresh_values, values[:, 10:])
    store._fresh = None
    ((host_keys, _),) = store.streamed(0, 80, 140)
    assert torch.equal(host_keys, fresh_keys)
    assert store.take_transfers().num_bytes == 60 * 2 * 2 * 8 * 4


def test_packed_values_come_back_as_they_were_packed() -> None:
    stores = [
        SplitStore(SHAPE, 1, 4, LIKE, host_values="int8"),
        OffloadStore(SHAPE, 1, 4, LIKE, ["minmax"], host_values="int8"),
    ]
    keys, values = drawn(30, 0)
    packed = decode_rows(encode_rows(values), torch.float32)
    plain = PagedStore(SHAPE, 1, 4, LIKE)
    plain.append(0, keys, packed)
    granules = torch.tensor([[0, 3], [5, 6], [1, 2], [0, 6]])
    for store in stores:
        store.append(0, keys, values)
        store.crop(0, 29)
        store.fork([0])
        for read in readers(store):
            reader = read(0)
            assert not reader.in_place, "attention in place would read packed rows"
            assert torch.equal(reader.values(4, 20), packed[:, 4:20])
            for one, two in zip(reader.gather(granules, 4), plain.reader(0).gather(granules, 4)):
                assert torch.equal(one, two)
        assert torch.equal(store.near(0, 20, 29)[1], packed[:, 20:29])
        blocks = list(store.streamed(0, 0, 29))
        assert torch.equal(blocks[0][1], packed[:, :29])
        assert store.token_bytes == 2 * (8 * 4 + 12)
        assert store.values.numel() == store.keys.numel() // 8 * 12


def test_summaries_wait_until_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []

    def counted(kind: str, keys: Tensor, valid: Tensor | None, values: Tensor) -> Tensor:
        asked.append(keys)
        return summarise(kind, keys, valid, values)

    store, other = SplitStore(SHAPE, 1, 4, LIKE, ["minmax"]), PagedStore(SHAPE, 1, 4, LIKE, ["minmax"])
    monkeypatch.setattr("kvsift.stores.paged.summarise", counted)
    for seed in range(3):
        store.append(0, *drawn(20, seed))
    assert not asked
    rows = store.reader(0).summary("minmax", slice(0, 15))
    assert [keys.shape[1] for keys in asked] == [15], "every page once"
    for seed in range(3):
        other.append(0, *drawn(20, seed))
    assert torch.equal(rows, other.reader(0).summary("minmax", slice(0, 15)))


def test_offload_keeps_summaries_and_its_cache_on_the_device() -> None:
    store = OffloadStore(SHAPE, 1, 4, LIKE, ["minmax"], device_cache=8)
    store.append(0, *drawn(40, 0))
    assert store.num_device_bytes == store.summaries["minmax"].numel() * 4
    store.near(0, 30, 40)
    store.device_reader(0).gather(torch.tensor([[0], [0]]), 4)
    near = 2 * 2 * (10 + 256) * 8 * 4
    assert store.num_device_bytes == store.summaries["minmax"].numel() * 4 + near + 2 * 2 * 8 * 8 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("seed", range(4))
@torch.inference_mode()
def test_a_gpu_sees_through_the_bus_what_is_beside_it_elsewhere(seed: int) -> None:
    like, shape, kinds = torch.empty(0, device="cuda"), SHAPE._replace(head_dim=32), ["sketch1", "minmax"]
    stores = [kind(shape, 2, 4, like, kinds) for kind in (OffloadStore, PagedStore)]
    rng = random.Random(seed)
    for step in range(60):
        row, action, count = rng.randrange(2), rng.random(), rng.choice([1, 3, 64, 70, 200])
        keys, values = torch.randn(2, 2, count, 32, device="cuda")
        for store in stores:
            length = store.lengths[row]
            if action < 0.5:
                store.append(row, keys, values)
            elif action < 0.7:  # as captured steps write
                store.reserve_rows([each + 300 * (number == row) for number, each in enumerate(store.lengths)])
                pages = torch.tensor(store.table.planned(row), device="cuda")
                slots = (pages[:, None] * 4 + torch.arange(4, device="cuda")).flatten()[length : length + count]
                for pool, tokens in zip(store.pools(), (keys, values)):
                    pool.flatten(1, 2)[:, slots] = tokens
                store.advance(row, length + count, length)
            elif action < 0.85:
                store.crop(row, length * step // 60)
            else:
                store.fork([1, 0] if step % 2 else [row, row])
        one, other = (store.pools() for store in stores)
        for number, length in enumerate(stores[0].lengths):
            readers = [store.reader(number) for store in stores]
            pages = slice(0, -(-length // 4))
            assert torch.equal(readers[0].keys(), readers[1].keys().cpu())
            assert torch.equal(readers[0].values(), readers[1].values().cpu())
            assert torch.equal(*(reader.summary("minmax", pages) for reader in readers))
            sketches = [reader.summary("sketch1", pages) for reader in readers]
            # products of more pages at once are rounded otherwise
            assert float((sketches[0] == sketches[1]).float().mean()) > 0.99 or not length
            slots = [reader.slots(0, None) for reader in readers]
            seen = [pools.keys.flatten(1, 2)[:, where] for pools, where in zip((one, other), slots)]
            assert torch.equal(*seen)
