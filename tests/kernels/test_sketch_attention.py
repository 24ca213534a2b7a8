"""Attention of a sketch in one step: the twin's tokens, counts, answers and estimated shares are the reference's."""

from typing import Any, NamedTuple

import pytest
import torch
from kernels.conftest import DEVICE, needs_triton
from kernels.decode_cases import draw_case, exact_attention
from kernels.paged_cases import coded, plain
from torch import Tensor
from turns import in_turns

from kvsift.kernels import sketch_attention as module
from kvsift.kernels.page_attention import page_attention, page_attention_reference, page_attention_triton
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.sketch import SketchLayout, sketch_rows
from kvsift.kernels.sketch_attention import sketch_attention, sketch_attention_reference, sketch_attention_triton
from kvsift.kernels.split_attention import ESTIMATED_WHOLE

SINKS, WINDOW = 3, 6
LENGTHS = [250, 1, 61, 64, 8]  # several chunks; no candidate; a partial and a full last page; none but sinks and window


class Case(NamedTuple):
    """What one step is given."""

    queries: Tensor
    kv: PagedKV
    rows: Tensor
    spans: Tensor
    bits: int

    def new_lists(self, spare: int = 1) -> tuple[Tensor, Tensor]:
        first, stop, chosen, held = self.spans.unbind(1)
        capacity = int((first + chosen + held - stop).max()) + spare
        tokens = torch.full((self.kv.batch, self.kv.num_kv_heads, capacity), -7, device=DEVICE).int()
        return tokens, torch.full_like(tokens[:, :, 0], -7)


def draw(
    num_kv_heads: int = 2, group: int = 2, head_dim: int = 64, page_size: int = 16, dtype: torch.dtype = torch.float32,
    *, bits: int = 1, chosen: int = 20, lengths: list[int] = LENGTHS, seed: int = 0, in_8_bits: bool = False,
    sinks: int = SINKS, window: int = WINDOW,
) -> Case:  # fmt: skip
    """A step over rows of these lengths, NaN wherever no token is and in the rows of pages that hold none."""
    drawn = draw_case(lengths, num_kv_heads, group, head_dim, page_size, dtype, kind="minmax", seed=seed)
    kv, spans = drawn.kv, []
    kv.keys[..., 0] /= 20  # else a single channel decides, and every head agrees
    held = kv
    if in_8_bits:
        kv = coded(kv)
        held = plain(kv, torch.float32)
    layout = SketchLayout(bits, head_dim, page_size)
    rows = torch.full((num_kv_heads, kv.keys.shape[1], layout.width), 0x7F, dtype=torch.uint8, device=DEVICE)
    for row, length in enumerate(lengths):
        pages = kv.table[row, : -(-length // page_size)].long()
        valid = torch.arange(len(pages) * page_size, device=DEVICE).view(-1, page_size) < length
        rows[:, pages] = sketch_rows(bits, held.keys[:, pages], held.values[:, pages], valid)
        stop = max(length - window, 0)
        first = min(sinks, stop)
        spans.append((first, stop, min(chosen, stop - first), length))
    spans_tensor = torch.tensor(spans, dtype=torch.int32, device=DEVICE)
    return Case(drawn.queries, kv, rows, spans_tensor, bits)


class Step(NamedTuple):
    """What came of a step."""

    output: Tensor
    tokens: Tensor
    counts: Tensor
    visible: Tensor
    estimated: Tensor


def step(run: Any, case: Case, rest: bool = True, **how: Any) -> Step:
    lists = case.new_lists()
    visible, estimated = (torch.zeros(case.kv.batch, dtype=torch.int64, device=DEVICE) for _ in range(2))
    output = run(
        *case[:4], *lists, bits=case.bits, rest=rest, scale=case.kv.head_dim**-0.5, visible=visible,
        estimated=estimated, **how,
    )  # fmt: skip
    assert output.dtype == case.queries.dtype
    return Step(output, *lists, visible, estimated)


def check(case: Case, rest: bool = True, **how: Any) -> Step:
    """The same lists, and an answer as near as the dtype allows."""
    expected, found = (step(run, case, rest, **how) for run in (sketch_attention_reference, sketch_attention_triton))
    assert torch.equal(found.counts, expected.counts)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.visible, expected.visible)
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3}.get(case.queries.dtype, 3e-2)
    torch.testing.assert_close(found.output, expected.output, atol=tolerance, rtol=tolerance)
    shares = (found.estimated - expected.estimated).double().abs() / ESTIMATED_WHOLE
    assert float(shares.max()) < 1e-3 * case.queries.shape[1]
    assert bool(found.estimated.any()) == rest
    return found


@needs_triton
@pytest.mark.parametrize(
    ("shape", "values"),
    in_turns(
        [
            (2, 1, 64, 16),
            (2, 2, 80, 4),
            (1, 4, 128, 32),
            (1, 8, 64, 16),
            (1, 3, 24, 8),
            (1, 12, 32, 16),
            (1, 2, 512, 16),
        ],
        [(1, torch.float32, False), (2, torch.float16, True), (2, torch.float32, True), (1, torch.float16, False)],
    ),
    ids=str,
)
def test_twins_choose_and_answer_as_the_reference(
    shape: tuple[int, int, int, int], values: tuple[int, torch.dtype, bool]
) -> None:
    bits, dtype, in_8_bits = values
    check(draw(*shape, dtype, bits=bits, in_8_bits=in_8_bits))


@needs_triton
@pytest.mark.parametrize("rest", [True, False])
def test_softcap_and_sink_logit(rest: bool) -> None:
    case = draw(lengths=[90, 8])
    sinks = torch.linspace(-3, 5, case.queries.shape[1], device=DEVICE)
    plain = step(sketch_attention_triton, case, rest)
    bent = check(case, rest, softcap=3.0, sink_logit=sinks)
    assert float((plain.output - bent.output).abs().max()) > 0.01
    without = step(sketch_attention_triton, case, rest, softcap=3.0)  # a sink logit is no part of the shares
    assert float((bent.estimated - without.estimated).double().abs().max()) < 1e-5 * ESTIMATED_WHOLE


@needs_triton
@pytest.mark.parametrize("chosen", [0, 200, 1000])
def test_few_tokens_and_all_of_them(chosen: int) -> None:
    """With all candidates chosen nothing is estimated, and the answer is that of dense attention, whether or not their
    pages have sketches yet."""
    case = draw(chosen=chosen)
    if chosen < 1000:
        check(case)
        return
    case.rows.fill_(0x7F)  # no numbers
    found = step(sketch_attention_triton, case)
    assert not found.estimated.any()
    assert found.counts.tolist() == [[length] * 2 for length in LENGTHS]
    scale = case.kv.head_dim**-0.5
    dense = page_attention_reference(case.queries, case.kv, None, None, scale=scale)
    torch.testing.assert_close(found.output, dense, atol=2e-5, rtol=2e-5)


@needs_triton
def test_candidates_of_many_chunks_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEIGHED", "HIDDEN", "REST"):
        monkeypatch.setattr(module, name, 64)
    check(draw(lengths=[700, 30], page_size=4, chosen=90))


@needs_triton
def test_the_best_token_is_found_wherever_it_is() -> None:
    """One token per head agrees with the queries; ties go to the first of several equal ones."""
    case, at = draw(chosen=1), [17, 130]
    for head, position in enumerate(at):
        page = int(case.kv.table[0, position // 16])
        case.kv.keys[head, page, position % 16] = 9 * case.queries[0, 2 * head]
        valid = torch.ones(1, 16, dtype=torch.bool, device=DEVICE)
        pools = (case.kv.keys[:, [page]], case.kv.values[:, [page]])
        case.rows[:, [page]] = sketch_rows(case.bits, *pools, valid)
    found = check(case)
    assert found.tokens[0, :, SINKS].tolist() == at


@needs_triton
@pytest.mark.parametrize(
    ("place", "in_8_bits", "softcap"),
    [(0, False, None), (0, True, None), (244, False, 30.0), (249, True, 30.0)],  # a sink; both ends of the window
)
def test_heads_whose_attention_is_on_sinks_or_window_have_no_vote(
    place: int, in_8_bits: bool, softcap: float | None
) -> None:
    """One token that is visible anyway holds nearly all attention of each first head, and none of each second one."""
    case = draw(lengths=[250])
    before = step(sketch_attention_triton, case, softcap=softcap)
    first, second = case.queries[0, ::2], case.queries[0, 1::2]
    apart = first - second * (first * second).sum(-1, keepdim=True) / second.square().sum(-1, keepdim=True)
    page = int(case.kv.table[0, place // 16])
    case.kv.keys[:, page, place % 16] = 5 * apart  # a logit of about 40
    case = case._replace(kv=coded(case.kv)) if in_8_bits else case
    found = check(case, softcap=softcap)
    alone = step(sketch_attention_triton, case._replace(queries=case.queries[:, 1::2].contiguous()), softcap=softcap)
    assert torch.equal(found.tokens, alone.tokens)
    assert not torch.equal(found.tokens, before.tokens)


@needs_triton
@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (SINKS, 0), (0, WINDOW), (20, 150)])
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_sinks_and_window_of_any_size(sinks: int, window: int, in_8_bits: bool) -> None:
    """Without either, weights count as they are; they may also take several tiles."""
    check(draw(in_8_bits=in_8_bits, sinks=sinks, window=window))


@needs_triton
def test_sequences_that_are_dense_are_left_out() -> None:
    case = draw()
    below = torch.tensor([300, 0, 61, 65, 0], dtype=torch.int32, device=DEVICE)  # the first and the fourth
    for run in (sketch_attention_reference, sketch_attention_triton):
        whole, out = step(run, case), torch.full_like(case.queries, 7.0)
        mixed = step(run, case, dense_below=below, out=out)
        assert mixed.output is out
        for row, dense in enumerate((True, False, False, True, False)):
            assert torch.equal(out[row], torch.full_like(out[row], 7.0) if dense else whole.output[row])
            for counted, expected in ((mixed.visible, whole.visible), (mixed.estimated, whole.estimated)):
                assert int(counted[row]) == (0 if dense else int(expected[row]))


@needs_triton
def test_the_pool_may_lie_in_any_order_and_a_list_be_as_long_as_it_must() -> None:
    case = draw(lengths=[90, 61])
    expected = step(sketch_attention_triton, case)
    order = torch.randperm(case.kv.keys.shape[1], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    kv = case.kv._replace(
        keys=case.kv.keys[:, order], values=case.kv.values[:, order], table=order.argsort()[case.kv.table.long()].int()
    )
    moved = step(sketch_attention_triton, case._replace(kv=kv, rows=case.rows[:, order].contiguous()))
    assert all(torch.equal(one, other) for one, other in zip(moved, expected))
    tight = case.new_lists(spare=0)
    sketch_attention_triton(*case[:4], *tight, bits=1, rest=True, scale=case.kv.head_dim**-0.5)
    assert torch.equal(tight[0], expected.tokens[..., :-1])


def test_the_dispatcher_takes_what_the_tensors_need() -> None:
    case = draw()
    torch.testing.assert_close(step(sketch_attention, case).output, step(sketch_attention_reference, case).output)


@needs_triton
@pytest.mark.parametrize(("unit_size", "dtype"), in_turns([1, 2, 8], [torch.float32, torch.float16]), ids=str)
def test_lists_may_hold_parts_of_pages(unit_size: int, dtype: torch.dtype) -> None:
    case = draw(dtype=dtype, page_size=8)
    generator, held = torch.Generator().manual_seed(1), -(-case.kv.lengths // unit_size)
    units = torch.zeros(case.kv.batch, 2, int(held.max()), dtype=torch.int32)
    counts = torch.zeros(case.kv.batch, 2, dtype=torch.int32)
    for row, number in enumerate(held.tolist()):
        for head in range(2):
            kept = torch.randperm(number, generator=generator)[: 1 + 2 * number // 3].sort().values
            units[row, head, : len(kept)], counts[row, head] = kept.int(), len(kept)
    lists, scale = (units.to(DEVICE), counts.to(DEVICE)), case.kv.head_dim**-0.5
    as_tokens = case.kv._replace(  # a cache of pages that small
        keys=case.kv.keys.unflatten(2, (-1, unit_size)).flatten(1, 2),
        values=case.kv.values.unflatten(2, (-1, unit_size)).flatten(1, 2),
        table=(case.kv.table[..., None] * (8 // unit_size) + torch.arange(8 // unit_size, device=DEVICE)).flatten(1),
    )  # fmt: skip
    exact = exact_attention(case.queries, as_tokens, lists, scale=scale).to(dtype)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    for run in (page_attention, page_attention_reference, page_attention_triton):
        output = run(case.queries, case.kv, *lists, scale=scale, unit_size=unit_size)
        torch.testing.assert_close(output, exact, atol=tolerance, rtol=tolerance)
    same = page_attention_triton(case.queries, as_tokens, *lists, scale=scale)
    assert torch.equal(same, page_attention_triton(case.queries, case.kv, *lists, scale=scale, unit_size=unit_size))
