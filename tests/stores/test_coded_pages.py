"""Pages in 8 bits that GPUs read hold the same tokens as the rows in 8 bits that the compiled core reads."""

import random

import pytest
import torch
from contracts.harness import poison, scattered_table
from torch import Tensor

from kvsift.kernels.attention import attention_reference
from kvsift.stores import reader
from kvsift.stores.base import Segment
from kvsift.stores.paged import HostStore, PagedStore
from kvsift.types import LayerShape

SHAPE = LayerShape(layer=0, num_query_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)
KINDS = ("minmax", "sketch1")


def drawn(count: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 6, (2, 2, count, 1), generator=generator))
    return list((spread * torch.randn(2, 2, count, 8, generator=generator)).to(dtype))


def check_alike(store: PagedStore, other: PagedStore) -> None:
    assert store.lengths == other.lengths
    for row, length in enumerate(other.lengths):
        held, expected = store.reader(row), other.reader(row)
        assert all(torch.equal(one, two) for one, two in zip(held.rows(), expected.rows()))
        rounding = {"rtol": 2 * torch.finfo(held.keys().dtype).eps, "atol": 1e-4}
        torch.testing.assert_close(held.keys(), expected.keys(), **rounding)
        torch.testing.assert_close(held.values(length // 2), expected.values(length // 2), **rounding)
        paged = held.paged()
        if length:
            granules = torch.tensor([[0, length - 1], [length // 2, length // 3]])
            for one, two in zip(held.gather(granules, 1), expected.gather(granules, 1)):
                torch.testing.assert_close(one, two, **rounding)
            at = paged.slots(torch.arange(length)).long()
            for pool, tokens in zip(paged, (held.keys(), held.values())):
                assert torch.equal(pool.flatten(1, 2)[:, at], tokens)
        pages = slice(0, -(-length // store.page_size))
        if "minmax" in store.kinds:
            one, two = (each.summary("minmax", pages) for each in (held, expected))
            torch.testing.assert_close(one, two, **rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_they_hold_the_same_rows(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    stores = [
        made(SHAPE, 2, 4, torch.empty(0, dtype=dtype), KINDS, table=scattered_table(2), kv_dtype="int8")
        for made in (PagedStore, HostStore)
    ]
    for step in range(60):
        row, action = rng.randrange(2), rng.random()
        tokens = drawn(1 + step % 7, 100 * seed + step, dtype)
        for each in stores:
            if action < 0.7:
                each.append(row, *tokens)
            elif action < 0.8:
                each.crop(row, each.lengths[row] * step // 60)
            elif action < 0.9:
                each.fork([1, 0] if step % 2 else [row, row])
            else:
                each.repage(8 if step % 2 else 4, KINDS if step % 3 else KINDS[:1])
            poison(each)
        check_alike(*stores)
    assert stores[0].token_bytes == stores[1].token_bytes == 2 * 2 * 12


def test_rows_of_one_begin_the_other() -> None:
    like = torch.empty(0, dtype=torch.bfloat16)
    page, host = (made(SHAPE, 1, 4, like, KINDS, kv_dtype="int8") for made in (PagedStore, HostStore))
    page.append(0, *drawn(30, 0, torch.bfloat16))
    host.restore(0, *page.reader(0).rows(), {"minmax": page.reader(0).summary("minmax", slice(0, 8))})
    check_alike(page, host)
    again = PagedStore(SHAPE, 1, 4, like, KINDS, kv_dtype="int8")
    again.restore(0, *host.reader(0).rows(), {})
    check_alike(again, host)


@pytest.mark.parametrize("num_queries", [1, 7])
def test_dense_attention_in_pieces_is_that_of_the_whole(num_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "DECODED_TOKENS", 16)
    store = PagedStore(SHAPE, 1, 4, torch.empty(0), kv_dtype="int8")
    store.append(0, *drawn(60, 0))
    queries = torch.randn(1, 4, num_queries, 8, generator=torch.Generator().manual_seed(0))
    segment, held = Segment(queries, 60 - num_queries, 60), store.reader(0)
    assert held.consecutive(60) == [(0, 16), (16, 32), (32, 48), (48, 60)]
    mask = torch.arange(60) <= torch.arange(segment.start, 60)[:, None]
    expected = attention_reference(queries, held.keys()[None], held.values()[None], SHAPE.scale, mask=mask[None, None])
    found = store.attend_all(0, segment)
    torch.testing.assert_close(found.output, expected.output, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-4, atol=1e-4)
