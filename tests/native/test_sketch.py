"""Choice of tokens by sketches, and the estimate of the rest, against the torch reference of the same rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from refusals import refused
from torch import Tensor

from kvsift import native
from kvsift.kernels.sketch import estimated_logits, sketch_rows, unpack, votes
from kvsift.native import PooledRows, twins
from kvsift.native.sketch_format import SketchLayout, random_rotation, sketch_layout

# A table of 4 channels has 6 bits: the deviation of an estimate is some 0.03 |q| factor, where the code's own is 0.6.
NEAR = 0.06  # logarithm of a weight; of the votes of many chosen tokens less, since their errors are independent
REST = 0.02  # of the rest's norm, for weights that are not dominated by a few


class Case(NamedTuple):
    """Rows of pages whose first and last tokens may be no candidates."""

    queries: Tensor  # scaled
    rows: Tensor
    layout: SketchLayout
    first: int
    count: int
    past: Tensor  # float32 [num_query_heads], log-sum-exp of what is visible anyway

    @property
    def heads(self) -> int:
        return len(self.rows)

    def choose(self, k: int, num_selections: int, threads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        return native.choose_sketched(
            self.queries, self.rows, self.layout, 1.0, self.first, self.count, k, num_selections, self.past,
            threads=threads,
        )  # fmt: skip

    def log_weights(self) -> Tensor:
        """Of the candidates, by the reference: [num_query_heads, count]."""
        rows = unpack(self.rows, self.layout)
        logits, variance = estimated_logits(self.queries.unsqueeze(1), rows, self.layout.bits)
        return (logits - variance / 2)[:, 0, self.first : self.first + self.count]

    def expected(self, k: int, num_selections: int) -> tuple[Tensor, Tensor, Tensor]:
        means = unpack(self.rows, self.layout).value_means
        return twins.choose_sketched(
            self.log_weights(), means, self.layout.page_size, self.first, k, num_selections, self.past
        )

    def votes(self, num_selections: int) -> Tensor:
        """Of the candidates, by the reference: [num_selections, count]."""
        return votes(self.log_weights().unsqueeze(1), self.past.unsqueeze(1), num_selections)


def case(
    bits: int = 1, heads: int = 2, group: int = 4, dim: int = 128, page_size: int = 16, pages: int = 80,
    first: int = 0, missing: int = 0, size: float = 0.7, seed: int = 0, later: float = 0.0,
) -> Case:  # fmt: skip
    """Random keys around random page means, and a page of 64 on with logits that are larger by so much."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(heads, pages, page_size, dim, generator=generator) for _ in range(2))
    keys += 0.5 * torch.randn(heads, pages, 1, dim, generator=generator)
    values += torch.randn(heads, 1, 1, dim, generator=generator)
    queries = torch.randn(heads * group, dim, generator=generator) * size * dim**-0.5
    layout = SketchLayout(bits, dim, page_size)
    unrotated = queries * 2 @ random_rotation(dim, queries.device).mT
    if later:
        unrotated[:, 0] = 1.0
        keys[:, 64:, :, 0] += later
    rows = sketch_rows(bits, keys, values)
    count = pages * page_size - first - missing
    past = math.log(count) + torch.randn(heads * group, generator=generator)
    return Case(unrotated, rows, layout, first, count, past)


def check(given: Case, k: int, num_selections: int) -> None:
    ids, output, lse = given.choose(k, num_selections)
    expected_ids, expected, expected_lse = given.expected(k, num_selections)
    assert ids.shape == expected_ids.shape
    assert bool((ids.diff(dim=1) > 0).all())
    assert bool(((ids >= 0) & (ids < given.count)).all())
    by_list = given.votes(num_selections)
    share = math.exp(-NEAR / math.sqrt(max(k, 1)))
    assert bool((by_list.gather(1, ids).sum(1) >= share * by_list.gather(1, expected_ids).sum(1)).all())
    if k >= given.count:
        assert torch.equal(ids, expected_ids)
        assert bool((lse == -torch.inf).all())
        assert not output.any()
        return
    if given.count - k < 16:
        return  # the rest is a token or few, and near-ties decide which
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=NEAR)
    assert float((output - expected).norm()) <= REST * float(expected.norm())


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize(
    ("heads", "group", "dim"),
    [
        (2, 4, 128),
        (2, 1, 64),  # every query head has its keys
        (1, 2, 80),  # the last word of a code is half empty
        (1, 3, 96),
        (1, 7, 128),  # two calls of a kernel: four heads and three
        (1, 8, 256),
    ],
)
def test_choice_and_rest_are_those_of_the_reference(level: str, heads: int, group: int, dim: int, bits: int) -> None:
    given = case(bits, heads, group, dim)
    for num_selections in {heads, heads * group}:
        check(given, 64, num_selections)


@pytest.mark.parametrize("leading", range(3))
def test_the_head_leads_that_sees_least_anyway(level: str, leading: int) -> None:
    """Sums of all candidates' weights differ by less than a hundredth of what these do."""
    given = case(heads=2, group=3, first=3)
    past = torch.full((2, 3), 20.0)
    past[0, leading], past[1, (leading + 1) % 3] = -20.0, -math.inf  # of the weights as they are
    given = given._replace(past=past.flatten())
    check(given, 64, 2)
    ids, alone = given.choose(64, 2)[0], given.choose(64, 6)[0].unflatten(0, (2, 3))
    for head, leader in ((0, leading), (1, (leading + 1) % 3)):
        assert torch.equal(ids[head], alone[head, leader])
        others = [q for q in range(3) if q != leader]
        assert not any(torch.equal(ids[head], alone[head, q]) for q in others)


def test_where_nothing_is_visible_anyway_weights_count_as_they_are(level: str) -> None:
    given = case(size=0.3, seed=2)
    nothing = given._replace(past=torch.full((8,), -torch.inf))
    check(nothing, 64, 2)
    for found, expected in zip(nothing.choose(64, 2), given._replace(past=torch.zeros(8)).choose(64, 2)):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [20, 60])
@pytest.mark.parametrize("past", [-torch.inf, -200.0, 0.0, 200.0, torch.inf])
def test_votes_that_would_leave_float32_rank_as_weights_do(level: str, past: float, size: float) -> None:
    given = case(size=size, seed=4)._replace(past=torch.full((8,), past))
    logs, (ids, output, lse) = given.log_weights(), given.choose(1, 8)
    assert bool(output.isfinite().all())
    assert not bool(lse.isnan().any())
    best = logs.amax(1)
    ranked = best > (past if past > -torch.inf else 0.0) - 60  # else no token of the head matters
    assert not bool((best - logs.gather(1, ids)[:, 0])[ranked].gt(0.1 * logs.std()).any())


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("size", [4, 20, 60])
def test_a_rest_that_weighs_almost_nothing_is_no_nan(level: str, size: float, bits: int) -> None:
    given = case(bits, pages=8, size=size)
    for left in (1, 2, 5):
        _, output, lse = given.choose(given.count - left, given.heads)
        assert bool(output.isfinite().all())
        assert not bool(lse.isnan().any())


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize(
    ("page_size", "pages", "first", "missing"),
    [
        (16, 1, 3, 4),  # less than the tokens that are looked up at once
        (16, 63, 15, 15),  # one page less than a block
        (16, 64, 0, 0),
        (16, 65, 1, 1),
        (16, 200, 5, 9),
        (48, 50, 40, 3),  # a page is three strips; blocks are not full
        (64, 17, 20, 0),
        (1024, 2, 700, 500),  # a page is a block
    ],
)
def test_candidates_may_begin_and_end_within_a_page(
    level: str, page_size: int, pages: int, first: int, missing: int, bits: int
) -> None:
    given = case(bits, 2, 3, 64, page_size, pages, first, missing)
    check(given, max(2, given.count // 10), 2)  # one of nine alone would be a near-tie


@pytest.mark.parametrize("k", [0, 1, 7, 100, 1000, 1279, 1280, 5000])
def test_any_number_may_be_chosen(level: str, k: int) -> None:
    given = case(size=0.3)
    for num_selections in (2, 8):
        check(given, k, num_selections)


@pytest.mark.parametrize("pages", [90, 700])
def test_tokens_outside_do_not_matter(level: str, pages: int) -> None:
    given = case(pages=pages, first=5, missing=7)
    rows = given.rows.clone()
    layout = given.layout
    for page, tokens in ((0, range(5)), (pages - 1, range(9, 16))):
        for token in tokens:
            start = layout.factors + 2 * token
            rows[:, page, start : start + 2] = torch.tensor([torch.nan], dtype=torch.float16).view(torch.uint8)
    pool = torch.full((2, pages + 2, layout.width), 255, dtype=torch.uint8)  # NaN as float16
    pool[:, 1:-1] = rows
    for found, expected in zip(given._replace(rows=pool[:, 1:-1]).choose(60, 2), given.choose(60, 2)):
        assert torch.equal(found, expected)


def test_equal_tokens_are_chosen_from_the_front(level: str) -> None:
    given = case(heads=1, group=2, pages=300, seed=3)
    same = given._replace(rows=given.rows[:, :1].expand(1, 300, -1).contiguous())
    best = int(same._replace(rows=same.rows[:, :1], count=16).choose(1, 1)[0])
    for k in (5, 250):  # by a threshold, and by ranks
        assert same.choose(k, 1)[0].tolist() == [[best + 16 * page for page in range(k)]]


def test_one_weight_far_above_the_others_leaves_a_rest(level: str) -> None:
    """Weights beyond float32's range within a block, and what is left after the largest is gone."""
    given = case(size=40.0, pages=300)
    ids, output, lse = given.choose(1, 8)
    expected_ids, _, expected_lse = given.expected(1, 8)
    logs = given.log_weights()
    assert float((logs.gather(1, ids) - logs.gather(1, expected_ids)).min()) > -0.1 * float(logs.std())
    assert bool(output.isfinite().all())
    assert float((lse - expected_lse).abs().max()) < 0.1 * float(logs.std())


@pytest.mark.parametrize("later", [-90.0, -40.0, 40.0, 60.0, 70.0, 120.0])
def test_the_first_pages_may_be_far_from_the_others(level: str, later: float) -> None:
    check(case(pages=300, later=later), 200, 8)


@pytest.mark.parametrize("num_selections", [3, 12])
def test_nothing_depends_on_threads(level: str, num_selections: int) -> None:
    given = case(heads=3, pages=333, first=3)
    one = given.choose(40, num_selections, threads=1)
    for threads in (2, 3, 5):  # with more threads than heads, blocks are shared out
        for found, expected in zip(given.choose(40, num_selections, threads=threads), one):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("page_size", [16, 48])
def test_rows_in_a_pool_have_the_bits_of_consecutive_rows(level: str, page_size: int) -> None:
    given = case(2, page_size=page_size, pages=150, first=7, missing=2)
    slots = torch.randperm(170, generator=torch.Generator().manual_seed(1))[:150]
    pool = torch.full((2, 170, given.layout.width), 255, dtype=torch.uint8)
    pool[:, slots] = given.rows
    runs = torch.stack([slots, torch.ones_like(slots)], 1)
    for start in (0, 4):
        rows = PooledRows(pool, runs, 150 - start, start)
        part = given._replace(rows=given.rows[:, start:], count=given.count - start * page_size)
        for threads in (1, 4):
            found = native.choose_sketched(
                given.queries, rows, given.layout, 1.0, 7, part.count, 30, 2, given.past, threads=threads
            )
            for one, expected in zip(found, part.choose(30, 2)):
                assert torch.equal(one, expected)


def test_levels_agree(core: None) -> None:
    given, before = case(2, pages=400, size=0.5), native.level()
    found = []
    try:
        for level in native.levels():
            native.use_level(level)
            found.append(given.choose(50, 2))
    finally:
        native.use_level(before)
    for ids, output, lse in found[1:]:  # sums of tables are whole numbers: the same at every level
        assert torch.equal(ids, found[0][0])
        torch.testing.assert_close(output, found[0][1], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(lse, found[0][2], rtol=0, atol=1e-4)


def test_what_cannot_be_read_is_refused(core: None) -> None:
    given = case(pages=4)
    calls = (
        (given._replace(first=16), 1, 2, "invalid_value"),
        (given._replace(count=48), 1, 2, "invalid_value"),
        (given._replace(rows=given.rows[..., :-16]), 1, 2, "invalid_tensor: 448"),
        (given._replace(rows=given.rows.float()), 1, 2, "invalid_tensor"),
        (given._replace(rows=given.rows[:, ::2]), 1, 2, "invalid_tensor"),
        (given._replace(layout=replace(given.layout, page_size=24)), 1, 2, "invalid_value"),
        (given._replace(queries=given.queries * torch.nan), 1, 2, "not_finite: NaN or infinity"),
        (given._replace(queries=given.queries[:3]), 1, 2, "invalid_tensor"),
        (given._replace(past=given.past[:7]), 1, 2, "invalid_tensor: [7] torch.float32 on cpu"),
        (given._replace(past=given.past.unsqueeze(1)), 1, 2, "invalid_tensor: [8, 1]"),
        (given._replace(past=given.past.double()), 1, 2, "invalid_tensor: torch.float64"),
        (given._replace(past=given.past.to("meta")), 1, 2, "invalid_tensor: on meta"),
        (given._replace(past=given.past.tolist()), 1, 2, "invalid_tensor: list"),  # type: ignore[arg-type]
        (given._replace(past=given.past.masked_fill(given.past == given.past[5], torch.nan)), 1, 2, "not_finite"),
        (given, -1, 2, "invalid_value"),
        (given, 1, 4, "invalid_value"),
    )
    for wrong, k, num_selections, words in calls:
        with refused(words):
            wrong.choose(k, num_selections)
    runs = torch.tensor([[0, 3]])
    with refused("invalid_tensor: hold 3 rows, not 4"):
        native.choose_sketched(
            given.queries, PooledRows(given.rows, runs, 4), given.layout, 1.0, 0, 64, 1, 2, given.past
        )


def test_what_fits(core: None) -> None:
    given = case(pages=4)
    assert native.sketches_fit(given.queries, given.rows, given.layout)
    assert not native.sketches_fit(given.queries, given.rows, replace(given.layout, page_size=24))
    assert not native.sketches_fit(given.queries, given.rows[:, ::2], given.layout)


@pytest.mark.parametrize("change", [
    {"dtype": torch.float16}, {"values": torch.bfloat16}, {"head_dim": 80}, {"valid": torch.int64}, {"pages": 2},
], ids=str)  # fmt: skip
def test_rows_are_not_written_of_tensors_that_the_core_cannot_read(change: dict[str, Any]) -> None:
    keys = torch.randn(2, 3, 16, change.get("head_dim", 64), dtype=change.get("dtype", torch.float32))
    valid = torch.ones(change.get("pages", 3), 16, dtype=change.get("valid", torch.bool))
    with refused(
        "invalid_tensor: must be bool"
        if {"valid", "pages"} & change.keys()
        else "invalid_tensor: must be bfloat16 or float32"
    ):
        native.sketch_rows(sketch_layout(1, 64, 16), keys, keys.to(change.get("values", keys.dtype)), valid)


def test_sketches_have_one_or_two_bits() -> None:
    with refused("invalid_value: bits=3 must be 1 or 2"):
        sketch_rows(3, torch.randn(2, 3, 16, 64), torch.randn(2, 3, 16, 64))


def test_gradients_pass_through_a_rotation_that_was_made_without_them() -> None:
    random_rotation.cache_clear()
    with torch.inference_mode():
        rotation = random_rotation(48, torch.device("cpu"))
    query = torch.randn(48, requires_grad=True)
    (query @ rotation).sum().backward()
    assert query.grad is not None
