"""Rows whose pages are not consecutive: every step has the bits of the same row alone in its pool."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contracts.harness import scattered_table
from stores.pools import free_pool
from torch import Tensor

from kvsift import native
from kvsift.kernels.page_summary import SUMMARIES
from kvsift.layer.accounting import RunStats
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.plan.placement import PlacementSpec
from kvsift.plan.syntax import parse_plan
from kvsift.stores import parts
from kvsift.stores.base import Segment
from kvsift.stores.kv_pool import KVPool
from kvsift.stores.page_table import PageTable
from kvsift.stores.paged import PagedStore
from kvsift.stores.reader import RowReader
from kvsift.types import Chunk, LayerShape

CHUNKS = [100, 48, 7, 160, 33]  # of the prompt
STEPS = 18
NUM_TOKENS = sum(CHUNKS) + STEPS
SHAPE = LayerShape(layer=2, num_query_heads=8, num_kv_heads=2, head_dim=64, scale=0.125)
BUDGET = "budget=96:sinks=4:window=20"
QUEST = f"quest:{BUDGET}"
PLANS = ["dense", f"oracle_tokens:{BUDGET}", *(f"{QUEST}:score_by={kind}" for kind in SUMMARIES)]


@pytest.fixture(params=native.levels() if native.available() else [""])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.level() if request.param else ""
    if before:
        native.use_level(request.param)
    yield request.param
    if before:
        native.use_level(before)


def drawn(dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Queries, keys and values of a row, [1, num_heads, NUM_TOKENS, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    heads = SHAPE.num_query_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads
    return [torch.randn(1, count, NUM_TOKENS, SHAPE.head_dim, generator=generator).to(dtype) for count in heads]


def layer(plan: str, dtype: torch.dtype, num_rows: int, table: PageTable | None, placement: str) -> SparseAttention:
    spec: PlacementSpec = placement  # type: ignore[assignment]
    like = torch.empty(0, dtype=dtype)
    return SparseAttention(
        SHAPE, parse_plan(f"decode={plan}"), num_rows, like, RunStats(0), placement=spec, table=table
    )


def outputs(attention: SparseAttention, rows: list[list[Tensor]]) -> list[list[Tensor]]:
    """Outputs of every call, by row; the rows are fed in turns."""
    result: list[list[Tensor]] = [[] for _ in rows]
    start = 0
    for length, decode_tokens in [*((chunk, 0) for chunk in CHUNKS), *((1, 1) for _ in range(STEPS))]:
        for row, tensors in enumerate(rows):
            chunk = Chunk(*(tensor[:, :, start : start + length] for tensor in tensors), [length])
            result[row].append(attention.attend(chunk, decode_tokens, first_row=row))
        start += length
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_rows_that_grow_in_turns_have_the_bits_of_each_row_alone(level: str, plan: str, dtype: torch.dtype) -> None:
    rows = [drawn(dtype, seed) for seed in range(2)]
    table = PageTable(2, KVPool(free_pool(60)))  # too few pages for spare ones
    together = outputs(layer(plan, dtype, 2, table, "device"), rows)
    assert min(len(table.runs(row)) for row in range(2)) >= 4
    for row, answers in zip(rows, together):
        (alone,) = outputs(layer(plan, dtype, 1, None, "device"), [row])
        for answer, expected in zip(answers, alone):
            assert torch.equal(answer, expected)


@pytest.mark.parametrize("placement", ["device", "split"])
@pytest.mark.parametrize("plan", PLANS[:3])
def test_scattered_pages_have_the_bits_of_consecutive_ones(plan: str, placement: str) -> None:
    row, table = drawn(torch.bfloat16, 2), scattered_table(1)
    (scattered,) = outputs(layer(plan, torch.bfloat16, 1, table, placement), [row])
    assert len(table.runs(0)) >= 10
    (alone,) = outputs(layer(plan, torch.bfloat16, 1, None, placement), [row])
    for answer, expected in zip(scattered, alone):
        assert torch.equal(answer, expected)


@pytest.mark.skipif(not native.available(), reason="the compiled core is missing")
@pytest.mark.parametrize("plan", ["dense", QUEST])
def test_a_decode_step_copies_nothing_of_a_scattered_row(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = drawn(torch.float32, 3)
    attention = layer(plan, torch.float32, 1, scattered_table(1), "device")
    attention.attend(Chunk(*(tensor[:, :, :300] for tensor in tensors), [300]))

    def copies(*_: Any, **__: Any) -> None:
        raise AssertionError("a copy")

    for name in ("keys", "values", "gather", "summary"):
        monkeypatch.setattr(RowReader, name, copies)
    attention.attend(Chunk(*(tensor[:, :, 300:301] for tensor in tensors), [1]), 1)


def test_a_reader_follows_the_pages_of_its_row() -> None:
    keys, values = (torch.randn(2, 200, 64) for _ in range(2))
    attention = layer("dense", torch.float32, 2, scattered_table(2), "device")
    store = attention.store
    for row, (start, stop) in ((0, (0, 50)), (1, (0, 60)), (0, (50, 130))):
        store.append(row, keys[:, start:stop], values[:, start:stop])
        check(store.reader(row), keys[:, :stop])
    for length in (77, 16, 3):
        store.crop(0, length)
        check(store.reader(0), keys[:, :length])
    store.append(0, keys[:, 3:120], values[:, 3:120])
    store.fork([0, 0])
    store.append(1, keys[:, 120:125], values[:, 120:125])
    check(store.reader(0), keys[:, :120])
    check(store.reader(1), keys[:, :125])


def check(reader: RowReader, keys: Tensor) -> None:
    rows = reader.keys_in_place()
    assert torch.equal(rows.gather() if isinstance(rows, native.PooledRows) else rows, keys)
    assert torch.equal(reader.keys(), keys)


@pytest.mark.parametrize("num_queries", [1, 9, 40])
@pytest.mark.parametrize("length", [40, 61, 160])
def test_runs_attended_one_by_one_give_the_attention_over_all(num_queries: int, length: int) -> None:
    """As on a GPU, where a copy of all keys and values would cost more."""
    torch.manual_seed(length)
    store = PagedStore(SHAPE, 1, 8, torch.empty(0), (), table=scattered_table(1))
    store.append(0, *torch.randn(2, 2, length, SHAPE.head_dim))
    reader, queries = store.reader(0), torch.randn(1, SHAPE.num_query_heads, num_queries, SHAPE.head_dim)
    segment = Segment(queries, length - num_queries, length)
    runs = reader.consecutive(length)
    assert len(runs) > 2
    assert [*runs[0][:1], *(stop for _, stop in runs)] == [*(start for start, _ in runs), length]
    one_by_one, together = parts._attend_runs(SHAPE, segment, reader), parts.attend_dense(SHAPE, segment, reader)
    torch.testing.assert_close(one_by_one.output, together.output)
    torch.testing.assert_close(one_by_one.lse, together.lse)
