"""Rows in a pool, as runs of slots: the bits of the same rows in one tensor, wherever the runs break."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import Tensor

from kvsift import native
from kvsift.native import Codes, PooledRows

EXAMPLES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


class Case(NamedTuple):
    """Queries and a row: consecutive, and in runs of a pool whose other slots are NaN."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    pooled_keys: PooledRows
    pooled_values: PooledRows


def pooled(rows: Tensor, runs: Tensor, num_slots: int) -> PooledRows:
    pool = torch.full((rows.shape[0], num_slots, rows.shape[2]), torch.nan).to(rows.dtype)
    start = 0
    for first, count in runs.tolist():
        pool[:, first : first + count] = rows[:, start : start + count]
        start += count
    return PooledRows(pool, runs, rows.shape[1])


def shuffled_runs(lengths: list[int], generator: torch.Generator) -> tuple[Tensor, int]:
    """Runs of these lengths, in random order in a pool with gaps."""
    first, slot = [0] * len(lengths), 0
    for place in torch.randperm(len(lengths), generator=generator).tolist():
        slot += int(torch.randint(0, 3, (), generator=generator))
        first[place] = slot
        slot += lengths[place]
    return torch.tensor([*zip(first, lengths)], dtype=torch.int64).view(-1, 2), slot + 2


@st.composite
def cases(draw: st.DrawFn) -> Case:
    heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4, 5]))
    dim = draw(st.sampled_from([8, 64, 80, 128]))
    granule = draw(st.sampled_from([1, 3, 16]))
    lengths = [granule * n for n in draw(st.lists(st.integers(1, 12), min_size=1, max_size=40))]
    lengths[draw(st.integers(0, len(lengths) - 1))] += granule * draw(st.sampled_from([0, 0, 70]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    queries, keys, values = (
        torch.randn(count, n, dim, generator=generator).to(dtype)
        for count, n in ((heads * group, 1), (heads, sum(lengths)), (heads, sum(lengths)))
    )
    runs, num_slots = shuffled_runs(lengths, generator)
    row = Case(queries[:, 0], keys, values, pooled(keys, runs, num_slots), pooled(values, runs, num_slots))
    length = sum(lengths) - draw(st.integers(0, min(lengths[-1], 5)))  # the last page is not full
    start = draw(st.integers(0, length))
    part = {"length": length - start, "start": start}
    return row._replace(
        keys=keys[:, start:length],
        values=values[:, start:length],
        pooled_keys=row.pooled_keys._replace(**part),
        pooled_values=row.pooled_values._replace(**part),
    )


def check(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


@EXAMPLES
@given(case=cases(), softcap=st.sampled_from([None, 4.0]), threads=st.sampled_from([1, 2]))
def test_dense_attention_has_the_bits_of_consecutive_rows(
    level: str, case: Case, softcap: float | None, threads: int
) -> None:
    queries, keys, values, pooled_keys, pooled_values = case
    found = native.attend_dense(queries, pooled_keys, pooled_values, 0.1, softcap, threads=threads)
    check(found, native.attend_dense(queries, keys, values, 0.1, softcap, threads=threads))


@EXAMPLES
@given(case=cases(), num_tokens=st.integers(1, 8), threads=st.sampled_from([1, 2]))
def test_several_tokens_have_the_bits_of_consecutive_rows(
    level: str, case: Case, num_tokens: int, threads: int
) -> None:
    queries, keys, values, pooled_keys, pooled_values = case
    several = queries.unsqueeze(1) * torch.arange(1, min(num_tokens, max(keys.shape[1], 1)) + 1).view(1, -1, 1)
    several = several.to(queries.dtype)
    found = native.attend_dense(several, pooled_keys, pooled_values, 0.1, threads=threads)
    check(found, native.attend_dense(several, keys, values, 0.1, threads=threads))


@EXAMPLES
@given(case=cases(), unit_size=st.sampled_from([1, 5, 16, 32]), per=st.integers(0, 2), data=st.data())
def test_units_and_spans_across_runs_have_the_bits_of_consecutive_rows(
    level: str, case: Case, unit_size: int, per: int, data: st.DataObject
) -> None:
    queries, keys, values, pooled_keys, pooled_values = case
    length, lists = keys.shape[1], (1, len(keys), len(queries))[per]
    most = length // unit_size  # this unit may be there in part, or not at all
    unit_ids = data.draw(
        st.lists(st.lists(st.integers(-1, most), min_size=9, max_size=9), min_size=lists, max_size=lists)
    )
    bounds = st.integers(-3, length + 3)
    spans = data.draw(st.lists(st.tuples(bounds, bounds), max_size=3))
    units = torch.tensor(unit_ids)
    found = native.attend_units(queries, pooled_keys, pooled_values, units, unit_size, spans, 0.1)
    check(found, native.attend_units(queries, keys, values, units, unit_size, spans, 0.1))


@EXAMPLES
@given(case=cases(), k=st.sampled_from([1, 20, 300]))
def test_search_has_the_bits_of_consecutive_rows(level: str, case: Case, k: int) -> None:
    queries, keys, pooled_keys = case.queries, case.keys, case.pooled_keys
    check(native.scan(queries, pooled_keys, k), native.scan(queries, keys, k))
    check((native.all_scores(queries, pooled_keys),), (native.all_scores(queries, keys),))
    codes = Codes.of(keys)
    check(native.scan_codes(queries, codes, pooled_keys, k), native.scan_codes(queries, codes, keys, k))


@EXAMPLES
@given(case=cases().filter(lambda case: case.keys.shape[2] % 16 == 0), k=st.sampled_from([1, 20]))
def test_pages_have_the_bits_of_consecutive_rows(level: str, case: Case, k: int) -> None:
    queries, rows = case.queries[:, : case.keys.shape[2] // 2].contiguous(), case.pooled_keys
    check((native.page_scores(queries, rows, 0.1),), (native.page_scores(queries, case.keys, 0.1),))
    check((native.choose_pages(queries, rows, 0.1, k, 1),), (native.choose_pages(queries, case.keys, 0.1, k, 1),))


def test_long_rows_of_single_pages_have_the_bits_of_consecutive_rows(level: str) -> None:
    generator = torch.Generator().manual_seed(1)
    queries, keys, values = (torch.randn(n, 20_000, 64, generator=generator).bfloat16() for n in (8, 2, 2))
    runs, num_slots = shuffled_runs([16] * 1250, generator)
    row = Case(queries[:, 0], keys, values, pooled(keys, runs, num_slots), pooled(values, runs, num_slots))
    units = torch.randperm(1250, generator=generator)[:900].sort().values.unsqueeze(0)
    for dtype in (torch.bfloat16, torch.float32):  # float32 queries over bf16 keys, too
        q = row.queries.to(dtype)
        check(
            native.attend_dense(q, row.pooled_keys, row.pooled_values, 0.1), native.attend_dense(q, keys, values, 0.1)
        )
        spans = [(0, 40), (19_000, 20_000)]
        found = native.attend_units(q, row.pooled_keys, row.pooled_values, units, 16, spans, 0.1)
        check(found, native.attend_units(q, keys, values, units, 16, spans, 0.1))
    check(native.scan(row.queries, row.pooled_keys, 2000), native.scan(row.queries, keys, 2000))


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([[0, 5], [30, 3]], "invalid_tensor: run 1 is 3 slots from 30 on"),
        ([[-1, 5]], "invalid_tensor: run 0 is 5 slots from -1 on"),
        ([[3, 0], [0, 9]], "invalid_tensor: 1 or more of the pool's 32"),
        ([[31, 2**62]], "invalid_tensor: run 0"),
        ([[0, 5]], "invalid_tensor: hold 5 rows, not 9"),
        ([], "invalid_tensor: hold 0 rows, not 9"),
    ],
)
def test_runs_outside_the_pool_are_refused(core: None, runs: list[list[int]], words: str) -> None:
    pool = torch.zeros(1, 32, 64)
    rows = PooledRows(pool, torch.tensor(runs, dtype=torch.int64).view(-1, 2), 9)
    for call in (lambda: native.attend_dense(pool[:, 0], rows, rows, 0.1), lambda: native.scan(pool[:, 0], rows, 2)):
        with refused(words):
            call()


def test_runs_of_another_form_are_refused(core: None) -> None:
    pool, runs = torch.zeros(1, 32, 64), torch.tensor([[0, 9]])
    for wrong in (runs.int(), runs[0], torch.zeros(1, 4, dtype=torch.int64)[:, ::2]):
        with refused("invalid_tensor"):
            native.scan(pool[:, 0], PooledRows(pool, wrong, 9), 2)
    with refused("invalid_tensor"):
        native.attend_dense(pool[:, 0], PooledRows(pool, runs, 9), PooledRows(pool, runs.clone(), 9), 0.1)
    with refused("invalid_tensor"):
        native.attend_dense(pool[:, 0], PooledRows(pool, runs, 9), pool[:, :9], 0.1)


def test_values_are_in_a_pool_like_that_of_keys() -> None:
    runs = torch.tensor([[0, 40]])
    keys, values = (PooledRows(torch.randn(2, slots, 64), runs, 40) for slots in (40, 20))
    with refused("invalid_tensor: must have the same shape"):
        native.attend_dense(torch.randn(4, 64), keys, values, 0.1)
