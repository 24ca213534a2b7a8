"""Pieces of host pools on a device, the least recently wanted of which make room."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.stores.device_cache import DeviceCache

CPU = torch.device("cpu")


def pools(num_pages: int = 8, num_heads: int = 2, page_size: int = 2) -> list[Tensor]:
    keys = torch.arange(num_heads * num_pages * page_size).float().view(num_heads, num_pages, page_size, 1)
    return [keys.contiguous(), (-keys).expand(-1, -1, -1, 3).contiguous()]


def places(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def test_a_worked_example() -> None:
    cache, held = DeviceCache(4, CPU), pools()  # 4 tokens: 2 pages of each head, 4 pieces
    (keys, values), copied = cache.fetch(held, places([3, 0], [1, 1]), 2)
    assert keys.squeeze(-1).tolist() == [[6, 7, 0, 1], [18, 19, 18, 19]]  # head 1 begins at 16
    assert torch.equal(values, -keys.expand(-1, -1, 3))
    assert copied == 3 * 2 * (1 + 3) * 4  # page 1 of head 1 was wanted twice and came once
    assert cache.take_counts() == (3, 0)
    assert cache.fetch(held, places([0], [1]), 2)[1] == 0
    assert cache.take_counts() == (2, 2)
    # two new pieces: one slot is free, and page 3 of head 0 was wanted longest ago
    cache.fetch(held, places([5], [6]), 2)
    assert cache.fetch(held, places([0], [1]), 2)[1] == 0
    cache.take_counts()
    cache.fetch(held, places([3], [1]), 2)
    assert cache.take_counts() == (2, 1)


def test_a_step_that_wants_more_than_there_is_room_for_gets_it() -> None:
    cache, held = DeviceCache(1, CPU), pools()
    (keys, _), _ = cache.fetch(held, places([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), 2)
    assert torch.equal(keys.squeeze(-1), held[0].flatten(1)[:, :10])
    assert cache.num_bytes == 10 * 2 * 4 * 4


def test_what_is_written_anew_is_fetched_anew() -> None:
    cache, held = DeviceCache(100, CPU), pools()
    cache.fetch(held, places([3, 4], [3, 4]), 2)
    held[0][:, 3, 1] = 99
    cache.forget(torch.tensor([7]))  # token 7 is the second of page 3
    (keys, _), copied = cache.fetch(held, places([3, 4], [3, 4]), 2)
    assert keys[:, 1].flatten().tolist() == [99, 99]
    assert copied == 2 * 2 * 4 * 4, "page 4 was there still"


def test_pieces_keep_their_names_when_the_pools_grow() -> None:
    cache, held = DeviceCache(100, CPU), pools()
    before, _ = cache.fetch(held, places([3, 7], [0, 7]), 2)
    grown = [torch.cat([pool, torch.full_like(pool, 5.0)], 1) for pool in held]
    after, copied = cache.fetch(grown, places([3, 7], [0, 7]), 2)
    assert copied == 0
    assert torch.equal(before[0], after[0])
    assert cache.fetch(grown, places([8], [15]), 2)[0][0].unique().tolist() == [5]


def test_any_order_of_wants_is_answered_from_the_pools() -> None:
    generator = torch.Generator().manual_seed(0)
    held, found = pools(num_pages=40), 0
    cache = DeviceCache(30, CPU)
    for _ in range(200):
        if torch.rand(1, generator=generator) < 0.3:
            token = int(torch.randint(80, (1,), generator=generator))
            held[0].flatten(1, 2)[:, token] += 1000
            cache.forget(torch.tensor([token]))
        wanted = torch.randint(40, (4, 3), generator=generator)  # two query heads of each of two KV heads
        (keys, _), _ = cache.fetch(held, wanted, 2)
        expected = torch.stack([held[0][head // 2, wanted[head]].flatten() for head in range(4)])
        assert torch.equal(keys.squeeze(-1), expected)
        count, hits = cache.take_counts()
        assert 0 <= hits <= count <= 12
        found += hits
    assert found > 100
