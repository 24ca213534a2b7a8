"""The visible list of a row: sinks, the k best candidates, window; ascending, ties to the lower page."""

from math import inf, isnan
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.conftest import DEVICE, far_memory, needs_triton
from torch import Tensor
from turns import in_turns

from kvsift.kernels import top_pages
from kvsift.kernels.top_pages import visible_pages, visible_pages_reference, visible_pages_triton

pytestmark = needs_triton
CAPACITY = 64


def spans_of(*rows: tuple[int, int, int, int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def textbook(scores: Tensor, spans: Tensor) -> list[list[list[int]]]:
    """Lists in plain Python, by row and head."""
    rows = []
    for heads, (first, stop, k, held) in zip(scores.tolist(), spans.tolist()):
        rows.append([])
        for each in heads:
            numbers = [-inf if isnan(number) else number for number in each]
            ranked = sorted(range(stop - first), key=lambda page: (-numbers[page], page))[:k]
            rows[-1].append([*range(first), *sorted(first + page for page in ranked), *range(stop, held)])
    return rows


def check(scores: Tensor, spans: Tensor, capacity: int = CAPACITY) -> None:
    expected = textbook(scores, spans)
    for run in (visible_pages_reference, visible_pages_triton):
        pages = torch.full((*scores.shape[:2], capacity), -7, dtype=torch.int32, device=DEVICE)
        counts = torch.full(scores.shape[:2], -7, dtype=torch.int32, device=DEVICE)
        given_back = run(scores, spans, capacity, out=(pages, counts))
        assert given_back[0] is pages
        assert given_back[1] is counts
        for lists, count_of_heads, wanted in zip(pages.tolist(), counts.tolist(), expected):
            for found, count, want in zip(lists, count_of_heads, wanted):
                assert (found[:count], count) == (want, len(want)), run.__name__
                assert set(found[count:]) <= {-7}, "written behind the list"


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=False),  # infinities, denormal numbers and both zeros among them
    st.floats(-1.0, 1.0, width=32),
    st.sampled_from([-torch.inf, -1e-45, -0.0, 0.0, 1e-45, 1.0, 1.0000001, torch.inf]),  # repeats, and close neighbours
)


@st.composite
def rows_of_scores(draw: st.DrawFn) -> tuple[list[float], tuple[int, int, int, int]]:
    count = draw(st.one_of(st.integers(0, 12), st.integers(13, 150)))
    few = draw(st.lists(NUMBERS, min_size=1, max_size=draw(st.sampled_from([1, 3, 40]))))
    pick = st.lists(st.integers(0, len(few) - 1), min_size=count, max_size=count)
    first, window, k = draw(st.integers(0, 4)), draw(st.integers(1, 4)), draw(st.integers(0, min(count, 50)))
    return [few[index] for index in draw(pick)], (first, first + count, k, first + count + window)


@settings(max_examples=30)
@given(rows=st.lists(rows_of_scores(), min_size=1, max_size=2))
def test_lists_are_those_of_a_stable_sort(rows: list[tuple[list[float], tuple[int, int, int, int]]]) -> None:
    scores = torch.full((len(rows), 1, 160), torch.nan)  # nobody may look behind the candidates
    for row, (numbers, _) in enumerate(rows):
        scores[row, 0, : len(numbers)] = torch.tensor(numbers)
    with pytest.MonkeyPatch.context() as patch:  # so that short rows go through several blocks, and few groups
        patch.setattr(top_pages, "GROUP_PAGES", 4)
        patch.setattr(top_pages, "TILE", 32)
        check(scores.to(DEVICE), spans_of(*(spans for _, spans in rows)))


SPANS = (
    (2, 500, 7, 503),  # many candidates: groups are compared first
    (0, 0, 0, 1),  # a row of one token
    (1, 1, 0, 4),  # no candidates
    (1, 30, 0, 33),  # nothing may be chosen
    (1, 30, 29, 33),  # all may
    (0, 40, 1, 41),  # the best alone, without sinks
    (0, 224, 7, 225),  # as many groups as pages to choose: just not
    (0, 225, 7, 226),  # one more, of a single page
)
SCORES = ("random", "equal", "rising", "falling", "nothing", "no number", "some")


@pytest.mark.parametrize(("spans", "scores"), in_turns(SPANS, SCORES), ids=str)
def test_lists_of_rows_of_every_length(spans: tuple[int, int, int, int], scores: str) -> None:
    rising = torch.arange(512.0, device=DEVICE).expand(2, 3, -1).contiguous()
    kinds = {
        "random": draw(2, 3, 512), "equal": torch.full_like(rising, 2.5), "rising": rising, "falling": -rising,
        "nothing": torch.full_like(rising, -torch.inf), "no number": torch.full_like(rising, torch.nan),
        "some": draw(2, 3, 512).log(),  # NaN of both signs
    }  # fmt: skip
    check(kinds[scores], spans_of(spans, (1, 9, 2, 10)))


@pytest.mark.parametrize("k", [3, 40, 62])
def test_rows_longer_than_a_block(k: int) -> None:
    scores = draw(1, 2, 4999)
    scores[0, 1] = scores[0, 1].round()  # hardly any that differ
    check(scores, spans_of((1, 4998, k, 4999)))


@pytest.mark.parametrize("candidates", [1100, 4400, 5003])  # around the groups that lists so long have
def test_long_lists(candidates: int) -> None:
    scores = draw(2, 2, 5100)
    scores[:, 1] = scores[:, 1].round(decimals=1)
    check(scores, spans_of((2, candidates + 2, 1090, candidates + 5), (2, 1002, 700, 1010)), capacity=1100)


def test_a_list_may_be_as_long_as_its_capacity_says() -> None:
    check(draw(1, 2, 40), spans_of((3, 38, 11, 40)), capacity=16)


def test_new_lists_hold_nothing_behind_their_pages() -> None:
    for run in (visible_pages, visible_pages_reference, visible_pages_triton):
        pages, counts = run(draw(1, 1, 20), spans_of((1, 18, 2, 20)), 9)
        assert counts.tolist() == [[5]]
        assert pages[0, 0, 5:].tolist() == [-1] * 4


def test_both_zeros_are_equal() -> None:
    scores = torch.zeros(1, 1, 40, device=DEVICE)
    scores[..., ::2] = -0.0
    check(scores, spans_of((0, 40, 5, 41)))


def test_a_row_that_begins_beyond_32_bits_is_read_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^31 numbers behind the first row, as in prefill over 524,288 tokens: 8 KV heads, segments of 16 queries."""
    monkeypatch.setattr(top_pages, "GROUP_PAGES", 2048)  # else the maxima take memory
    rows, width = 9, 1 << 28
    scores = far_memory(tmp_path, rows * width, torch.float32).view(rows, 1, width)
    scores[:, 0, 0] = 1.0
    scores[8, 0, 5] = 2.0
    scores[8, 0, 90] = 3.0
    spans = spans_of(*[(0, 1, 1, 1)] * 8, (0, 100, 2, 100))
    pages, _ = visible_pages_triton(scores, spans, 2)
    assert pages[8].tolist() == [[5, 90]]


def test_a_row_of_more_scores_than_21_bits_count_gives_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.3 million scores are not the lowest there is: the first look at them counts them all."""
    if DEVICE == "cpu":
        monkeypatch.setattr(top_pages, "TILE", 1 << 18)  # the interpreter takes its time for every block
    scores, ulp = torch.full((1, 1, 2_400_000), 1.0, device=DEVICE), torch.finfo(torch.float32).eps
    scores[..., 50_000:2_350_000] = 1.0 + ulp
    scores[..., -1] = 1.0 + 3 * ulp
    pages, counts = visible_pages_triton(scores, spans_of((0, 2_400_000, 250_000, 2_400_000)), 2_400_000)
    assert counts.tolist() == [[250_000]]
    assert pages[0, 0, :250_001].tolist() == [*range(50_000, 299_999), 2_399_999, -1]


def test_a_list_may_be_longer_than_a_block_of_triton() -> None:
    """A million units and more, of which none competes."""
    held = (1 << 20) + 7
    pages, counts = visible_pages_triton(torch.zeros(1, 1, 16, device=DEVICE), spans_of((3, 5, 2, held)), held)
    assert counts.tolist() == [[held]]
    assert torch.equal(pages[0, 0], torch.arange(held, dtype=torch.int32, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter knows no limit of a grid")
def test_more_segments_than_the_second_axis_of_a_grid_holds() -> None:
    """A chunk of a million tokens that choose 16 at a time."""
    segments = (1 << 16) + 3
    scores = torch.arange(segments * 40, device=DEVICE).remainder(37).float().view(segments, 1, 40)
    spans = torch.tensor([[0, 40, 3, 40]], dtype=torch.int32, device=DEVICE).repeat(segments, 1)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :3]
    assert torch.equal(visible_pages_triton(scores, spans, 3)[0].long(), best.sort(-1).values)
