"""Rows that a kernel writes: pages are reserved first, the store is told afterwards."""

import torch

from kvsift.kernels.append import append
from kvsift.kernels.paged import PagedKV
from kvsift.stores.paged import PagedStore
from kvsift.types import LayerShape

SHAPE = LayerShape(layer=0, num_query_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
KINDS = ("minmax", "mean_std")
LENGTHS = (13, 5)


def filled(generator: torch.Generator, extra: int = 0) -> tuple[PagedStore, list[torch.Tensor]]:
    store = PagedStore(SHAPE, 2, 4, torch.empty(0), KINDS)
    store.reserve_rows([40, 40])
    drawn = [torch.randn(2, 2, length + extra, 8, generator=generator) for length in LENGTHS]
    for row, length in enumerate(LENGTHS):
        store.append(row, *drawn[row][:, :, : length + extra].unbind(0))
    return store, drawn


@torch.inference_mode()
def test_tokens_written_by_a_kernel_are_as_if_appended() -> None:
    expected, drawn = filled(torch.Generator().manual_seed(0), extra=7)
    store = PagedStore(SHAPE, 2, 4, torch.empty(0), KINDS)
    store.reserve_rows([40, 40])
    pools = store.keys, store.values
    for row, length in enumerate(LENGTHS):
        store.append(row, *drawn[row][:, :, :length].unbind(0))
    table = torch.tensor([store.table.planned(row) for row in range(2)], dtype=torch.int32)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    for step in range(7):
        lengths += 1
        new = torch.stack([drawn[row][:, :, length + step] for row, length in enumerate(LENGTHS)], 1)
        append(PagedKV(store.keys, store.values, table, lengths), new[0], new[1], store.summaries)
    for row, length in enumerate(LENGTHS):
        store.advance(row, length + 7)
        ours, theirs = store.reader(row), expected.reader(row)
        assert ours.length == theirs.length
        assert torch.equal(ours.keys(), theirs.keys())
        assert torch.equal(ours.values(), theirs.values())
        pages = slice(0, -(-ours.length // 4))
        for kind in KINDS:
            assert torch.equal(ours.summary(kind, pages), theirs.summary(kind, pages))
    assert pools == (store.keys, store.values), "pools moved"


@torch.inference_mode()
def test_what_ran_too_far_is_taken_back() -> None:
    store, _ = filled(torch.Generator().manual_seed(0))
    before = [store.reader(0).summary(kind, slice(0, 4)).clone() for kind in KINDS]
    planned = store.table.planned(0)
    store.keys[:, store.table.planned(0)[3], 1:] = 100.0  # positions 13 to 15 are nobody's
    store.advance(0, 16)
    store.crop(0, 13)
    assert all(torch.equal(store.reader(0).summary(kind, slice(0, 4)), old) for kind, old in zip(KINDS, before))
    assert store.table.planned(0) == planned
