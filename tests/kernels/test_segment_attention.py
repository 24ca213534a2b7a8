"""Segments over listed tokens and their own past: the reference against attention with a mask, the twin against it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, needs_triton
from torch import Tensor
from turns import in_turns

from kvsift.kernels.attention import attention_reference
from kvsift.kernels.segment_attention import Rows, Span, segment_attention_reference, segment_attention_triton
from kvsift.types import Part

SHAPES = [  # KV heads, lists, query heads, head_dim, page_size
    (2, 2, 2, 64, 8),
    (1, 1, 4, 128, 16),
    (2, 2, 6, 80, 16),
    (2, 4, 4, 64, 16),
    (1, 2, 8, 32, 32),
]


class Case(NamedTuple):
    queries: Tensor
    rows: Rows
    start: int
    spans: list[Span]
    slots: Tensor
    counts: Tensor
    visible: Tensor  # bool [num_query_heads, num_queries, length]


def draw(shape: tuple[int, int, int, int, int], dtype: torch.dtype, foreign: bool = False, most: int = 150) -> Case:
    """Three segments of different lengths at the end of a row of scattered pages."""
    kv_heads, num_lists, heads, head_dim, page_size = shape
    generator = torch.Generator().manual_seed(sum(shape) + most)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(DEVICE, dtype)

    start, lengths = 300, (130, 3, 65)
    length = start + sum(lengths)
    held = -(-length // page_size)
    table = torch.randperm(held + 3, generator=generator)[:held].to(DEVICE, torch.int32)
    pools = [normal(kv_heads, held + 3, page_size, head_dim) for _ in range(2)]
    if foreign:  # blocks of pages first, heads inside them
        pools = [pool.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for pool in pools]
    rows = Rows(pools[0], pools[1], table)
    firsts = [0, 130, 133]
    spans = [
        Span(first, first + size, start + first - back) for first, size, back in zip(firsts, lengths, (40, 0, 129))
    ]
    positions = torch.zeros(len(spans), num_lists, most, dtype=torch.int64)
    counts = torch.zeros(len(spans), num_lists, dtype=torch.int32)
    visible = torch.zeros(num_lists, sum(lengths), length, dtype=torch.bool)
    for s, span in enumerate(spans):
        for each in range(num_lists):
            chosen = torch.randperm(span.oldest, generator=generator)[: max(0, most - 37 * each - s)].sort().values
            positions[s, each, : len(chosen)], counts[s, each] = chosen, len(chosen)
            for query in range(span.first, span.stop):
                visible[each, query, chosen] = True
                visible[each, query, span.oldest : start + query + 1] = True
    slots = rows.slots(positions.to(DEVICE)).to(torch.int32)
    visible = visible.repeat_interleave(heads // num_lists, 0).to(DEVICE)
    return Case(normal(heads, sum(lengths), head_dim), rows, start, spans, slots, counts.to(DEVICE), visible)


def run(how: Callable[..., Part], case: Case, **knobs: Any) -> Part:
    return how(case.queries, case.rows, case.start, case.spans, case.slots, case.counts, 0.1, **knobs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_reference_is_attention_with_a_mask(shape: tuple[int, int, int, int, int], softcap: float | None) -> None:
    case = draw(shape, torch.float32)
    keys, values = (pool[:, case.rows.table.long()].flatten(1, 2)[:, : case.visible.shape[2]] for pool in case.rows[:2])
    heads = case.queries.shape[0]
    keys, values = (pool.repeat_interleave(heads // shape[0], 0)[None] for pool in (keys, values))
    expected = attention_reference(case.queries[None], keys, values, 0.1, mask=case.visible, softcap=softcap)
    found = run(segment_attention_reference, case, softcap=softcap)
    torch.testing.assert_close(found.output, expected.output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-5, atol=1e-5)


@needs_triton
@pytest.mark.parametrize(("shape", "dtype"), in_turns(SHAPES, DTYPES), ids=str)
def test_the_twin_is_as_exact_as_the_dtype(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    foreign = (SHAPES.index(shape) + DTYPES.index(dtype)) % 2 == 0  # pages of our own or of another owner's blocks
    case = draw(shape, dtype, foreign)
    exact = run(segment_attention_reference, case._replace(queries=case.queries.float()))
    found = run(segment_attention_triton, case)
    assert found.output.dtype == dtype
    error = (found.output.float() - exact.output).abs().max()
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    torch.testing.assert_close(found.lse, exact.lse, rtol=1e-3, atol={torch.float32: 1e-4}.get(dtype, 4e-3))


@needs_triton
@pytest.mark.parametrize("most", [0, 1, 64, 128])
def test_lists_of_any_length(most: int) -> None:
    case = draw(SHAPES[1], torch.float32, most=most or 1)
    case = case if most else case._replace(counts=torch.zeros_like(case.counts))
    exact, found = (run(how, case, softcap=3.0) for how in (segment_attention_reference, segment_attention_triton))
    torch.testing.assert_close(found.output, exact.output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.lse, exact.lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "how", [segment_attention_reference, pytest.param(segment_attention_triton, marks=needs_triton)]
)
def test_what_is_never_written_does_not_matter(how: Callable[..., Part]) -> None:
    case = draw(SHAPES[1], torch.float32)
    expected = run(how, case)
    unused = torch.ones(case.rows.keys.shape[1], dtype=torch.bool, device=DEVICE)
    unused[case.rows.table.long()] = False
    for pool in case.rows[:2]:
        pool[:, unused] = torch.nan
        pool[:, case.rows.table[-1].long(), case.visible.shape[2] % pool.shape[2] :] = torch.nan
    torch.testing.assert_close(run(how, case).output, expected.output)
