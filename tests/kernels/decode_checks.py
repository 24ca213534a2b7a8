"""What a decode step must be: contract 8, lists of the best pages, and every token that was shown counted."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from kernels.decode_cases import DecodeCase, Lists, exact_attention, tokens_of
from kernels.paged_cases import distance, plain, rounding
from torch import Tensor

from kvsift.kernels.page_attention import page_attention_reference, page_attention_triton
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.score_pages import score_pages_reference, score_pages_triton
from kvsift.kernels.top_pages import visible_pages_reference, visible_pages_triton

FAINT = 1e-4  # of a row's largest score: pages that differ by less may be exchanged


class Verdict(NamedTuple):
    """What came of a step that was checked."""

    output: Tensor
    error: float  # distance to what is exact over that of the reference; contract 8 allows 2
    disputed: int  # pages in one list only: ties but for rounding


def check_step(
    function: Callable[..., Tensor], case: DecodeCase, shared: bool = True, capacity: int | None = None,
    expected: Lists | None = None, **how: Any,
) -> Verdict:  # fmt: skip
    """One step against the reference: the same lists (or those given), and over them an answer as near to float64."""
    found = case.new_lists(shared, capacity)
    visible = torch.zeros(case.kv.batch, dtype=torch.int64, device=case.queries.device)
    given: dict[str, Any] = {"kind": case.kind, "scale": case.scale}
    output = function(*case[:4], *found, **given, visible=visible, **how)
    bent = {name: how.get(name) for name in ("softcap", "sink_logit")}
    if expected is None:
        expected = case.new_lists(shared, capacity)
        scores = score_pages_reference(case.queries, case.summary, case.kv.table, case.spans, **given, shared=shared)
        visible_pages_reference(scores, case.spans, expected[0].shape[2], out=expected)
    dispute = disputed(case, found, expected)
    exact = exact_attention(case.queries, case.kv, found, scale=case.scale, **bent)
    own = page_attention_reference(case.queries, plain(case.kv, case.queries.dtype), *found, scale=case.scale, **bent)
    error = error_ratio(output, own, exact)
    assert output.dtype == case.queries.dtype
    assert error <= 2, f"{error:.2f} times as far from float64 as the reference"
    assert visible.tolist() == tokens_of(case.kv, found)[1].sum((1, 2)).tolist(), "visible tokens are miscounted"
    return Verdict(output, error, dispute)


def by_twins(
    queries: Tensor, kv: PagedKV, summary: Tensor, spans: Tensor, pages: Tensor, counts: Tensor, *, kind: str,
    scale: float, **how: Any,
) -> Tensor:  # fmt: skip
    """``sifted_attention`` by the three Triton kernels, whatever else there is."""
    shared = pages.shape[1] == kv.num_kv_heads
    scores = score_pages_triton(queries, summary, kv.table, spans, kind=kind, scale=scale, shared=shared)
    visible_pages_triton(scores, spans, pages.shape[2], out=(pages, counts))
    return page_attention_triton(queries, kv, pages, counts, scale=scale, **how)  # type: ignore[no-any-return]


def error_ratio(found: Tensor, own: Tensor, exact: Tensor) -> float:
    """Distance to what is exact over that of the reference in the kernel's dtype; contract 8 allows 2."""
    return distance(found, exact) / max(distance(own, exact), rounding(exact), 1e-30)


def disputed(case: DecodeCase, found: Lists, expected: Lists) -> int:
    """How many pages are in one of two lists only, each of which stands within rounding of the last that is chosen.

    Raises:
        AssertionError: if lists differ in anything else, or are no lists.
    """
    (pages, counts), (_, expected_counts) = found, expected
    assert torch.equal(counts, expected_counts), "counts differ"
    listed = torch.arange(pages.shape[2], device=pages.device) < counts[..., None]
    following = listed[..., 1:]
    assert bool((pages.diff(dim=2)[following] > 0).all()), "pages are not ascending"
    assert bool((pages[~listed] < 0).all()), "a kernel wrote behind its list"
    seen, wanted = (_seen(case, lists) for lists in (found, expected))
    if torch.equal(seen, wanted):
        return 0
    shared = pages.shape[1] == case.kv.num_kv_heads
    scores = score_pages_reference(
        case.queries, case.summary, case.kv.table, case.spans, kind=case.kind, scale=case.scale, shared=shared
    )
    for row, head in (seen != wanted).any(2).nonzero().tolist():
        first, stop, chosen, _ = case.spans[row].tolist()
        differ = (seen[row, head] != wanted[row, head]).nonzero().flatten()
        assert bool(((differ >= first) & (differ < stop)).all()), "sinks or window are not shown"
        own = scores[row, head, : stop - first]
        last = own.sort(descending=True).values[chosen - 1]
        gap = (own[differ - first] - last).abs().max() / own.abs().max()
        assert float(gap) < FAINT, f"row {row}, head {head}: pages {differ.tolist()} are not tied: {float(gap):.1e}"
    return int((seen != wanted).sum())


def _seen(case: DecodeCase, lists: Lists) -> Tensor:
    """bool [batch, num_rows, max_pages]"""
    pages, counts = lists
    listed = torch.arange(pages.shape[2], device=pages.device) < counts[..., None]
    seen = torch.zeros(*counts.shape, case.kv.table.shape[1] + 1, dtype=torch.bool, device=pages.device)
    return seen.scatter_(2, pages.long().masked_fill(~listed, seen.shape[2] - 1), True)[..., :-1]
