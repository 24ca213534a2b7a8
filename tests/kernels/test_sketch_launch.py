"""The single launch of sketches: its tokens are as good as the reference's, its answers those of its tokens."""

from itertools import product
from typing import Any

import pytest
import torch
from kernels.conftest import DEVICE
from kernels.test_sketch_attention import Case, Step, draw, step
from torch import Tensor

from kvsift.kernels.cuda_module import have_nvrtc, in_host_memory
from kvsift.kernels.merge import with_sink_logit
from kvsift.kernels.sketch import (
    SketchLayout,
    Unpacked,
    estimated_logits,
    log_weights,
    random_rotation,
    sketch_rows,
    unpack,
)
from kvsift.kernels.sketch import votes as sums_of_votes
from kvsift.kernels.sketch_attention import answer_reference, past_reference, sketch_attention_reference
from kvsift.kernels.sketch_launch import SketchSpace, single_launch_runs, sketch_attention_cuda
from kvsift.kernels.split_attention import ESTIMATED_WHOLE
from kvsift.stores.transfers import mapped

needs_nvrtc = pytest.mark.skipif(not have_nvrtc(), reason="needs a Hopper GPU or newer, and NVRTC")
pytestmark = [pytest.mark.gpu, needs_nvrtc]
VALUES = [(1, torch.bfloat16), (2, torch.float16), (2, torch.bfloat16), (1, torch.float16)]  # bits, dtype
BIN = 2.0 ** (1 / 120)  # votes are told apart by bins of 1/128 octave
LEAST, MOST = 2.0**-22, 2.0**10  # votes below are all alike, and those above


def rounded_log_weights(queries: Tensor, rows: Unpacked, bits: int, softcap: float | None) -> Tensor:
    """``log_weights`` of one query per head, rounded to whole numbers of 7 bits where it meets codes."""
    rotated = queries @ random_rotation(queries.shape[2], queries.device)
    step = (rotated.abs().amax(-1, keepdim=True) / 63).clamp_min(1e-30)
    missed = ((rotated / step).round() * step - rotated).unflatten(0, (len(rows.codes), -1)).flatten(1, 2)
    more = ((missed @ rows.codes.mT) * rows.factors.unsqueeze(1)).flatten(0, 1)
    if softcap is None:
        return log_weights(queries, rows, bits, None)[:, 0] + more
    return softcap * torch.tanh((estimated_logits(queries, rows, bits)[0][:, 0] + more) / softcap)


def answer(
    case: Case, row: int, tokens: Tensor, counts: Tensor, rest: bool, **how: Any
) -> tuple[Tensor, float, Tensor]:
    """What the specification answers with these lists, the estimated shares of all heads, and votes of candidates."""
    kv, (first, stop, chosen, held) = case.kv, case.spans[row].tolist()
    queries, scale, softcap = case.queries[row], kv.head_dim**-0.5, how.get("softcap")
    votes, others = torch.zeros(kv.num_kv_heads, 0, device=DEVICE), None
    if stop > first:
        pages = kv.table[row, first // kv.page_size : -(-stop // kv.page_size)].long()
        unpacked = unpack(case.rows[:, pages], SketchLayout(case.bits, kv.head_dim, kv.page_size))
        weights = rounded_log_weights(queries[:, None].float() * scale, unpacked, case.bits, softcap)
        weights = weights[:, first % kv.page_size :][:, : stop - first]
        past = past_reference(queries, kv, row, (first, stop, held), scale=scale, softcap=softcap)
        votes = sums_of_votes(weights.unsqueeze(1), past, kv.num_kv_heads)
        others = (weights, unpacked.value_means) if rest and chosen < stop - first else None
    part, share = answer_reference(queries, kv, row, (tokens, counts), first, others, scale=scale, softcap=softcap)
    sink = how.get("sink_logit")
    part = part if sink is None else with_sink_logit(part, sink)
    return part.output[0, :, 0], share, votes


def check(case: Case, rest: bool = True, spare: int = 1, **how: Any) -> Step:
    assert single_launch_runs(case.queries, case.kv, case.new_lists(spare)[0].shape[2])
    expected, found = (step(run, case, rest, **how) for run in (sketch_attention_reference, sketch_attention_cuda))
    assert torch.equal(found.counts, expected.counts)
    assert torch.equal(found.visible, expected.visible)
    for row, (first, stop, chosen, held) in enumerate(case.spans.tolist()):
        output, share, votes = answer(case, row, found.tokens[row], found.counts[row], rest, **how)
        tolerance = 4e-3 if case.queries.dtype == torch.float16 else 3e-2
        size = min(max(float(output.abs().max()), 0.2), 1.0)  # means of many values are small
        torch.testing.assert_close(found.output[row].float(), output.float(), atol=tolerance * size, rtol=tolerance)
        assert abs(int(found.estimated[row]) / ESTIMATED_WHOLE - share) < 4e-3 * case.queries.shape[1]
        for head in range(case.kv.num_kv_heads):
            listed = found.tokens[row, head, : int(found.counts[row, head])]
            assert torch.equal(listed, listed.unique())
            ends = torch.cat([listed[:first], listed[first + chosen :]])
            assert ends.tolist() == [*range(first), *range(stop, held)]
            if 0 < chosen < stop - first:
                mine, best = votes[head, listed[first : first + chosen].long() - first], votes[head].topk(chosen).values
                assert float(mine.min()) * BIN >= min(float(best[-1]), MOST) or float(best[-1]) < LEAST
                assert float((mine.sum() - best.sum()).abs()) < 2e-2 * float(best.sum())
    assert bool((found.tokens[:, :, -spare:] == -7).all()) or not spare
    return found


SHAPES = [
    (2, 1, 64, 16),
    (1, 4, 128, 32),
    (8, 4, 128, 16),
    (1, 8, 64, 16),
    (2, 7, 128, 64),
    (1, 3, 128, 16),
    (2, 2, 128, 16),
]
WIDE = [
    (4, 6, 256, 16),  # Qwen3.6-27B
    (2, 8, 256, 32),  # Qwen3.6-35B-A3B
    (4, 16, 128, 16),  # Qwen3-235B
    (1, 12, 128, 16),  # GLM-4.7
    (1, 10, 64, 16),
    (1, 16, 256, 16),
    (2, 8, 512, 16),  # Gemma 4
]


@pytest.mark.parametrize(
    ("shape", "values"), [*product(SHAPES, VALUES), *((shape, VALUES[i % 4]) for i, shape in enumerate(WIDE))], ids=str
)
def test_the_launch_chooses_and_answers_as_the_specification(
    shape: tuple[int, int, int, int], values: tuple[int, torch.dtype]
) -> None:
    bits, dtype = values
    check(draw(*shape, dtype, bits=bits))
    check(draw(*shape, dtype, bits=bits, in_8_bits=True))


@pytest.mark.parametrize("shape", [(2, 4, 64, 16), (1, 6, 256, 16), (1, 16, 128, 16)], ids=str)
def test_a_cache_of_fp8_gives_the_bits_of_its_numbers(shape: tuple[int, int, int, int]) -> None:
    case = draw(*shape, torch.bfloat16)
    keys, values = (pool.to(torch.float8_e4m3fn) for pool in case.kv[:2])
    found, expected = (
        step(sketch_attention_cuda, case._replace(kv=case.kv._replace(keys=keys.to(dtype), values=values.to(dtype))))
        for dtype in (keys.dtype, torch.bfloat16)
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


@pytest.mark.parametrize("group", [1, 4, 12])
def test_a_cache_in_host_memory_gives_the_answers_of_one_on_the_device(group: int) -> None:
    case = draw(2, group, 128, 16, torch.bfloat16, lengths=[3000, 700], window=150)
    keys, values = (mapped(pool.cpu().contiguous().pin_memory(), pool.device) for pool in case.kv[:2])
    assert in_host_memory(keys)
    assert not in_host_memory(case.kv.keys)
    found = step(sketch_attention_cuda, case._replace(kv=case.kv._replace(keys=keys, values=values)))
    assert all(torch.equal(one, other) for one, other in zip(found, check(case)))


@pytest.mark.parametrize(("shape", "longest"), [((1, 6, 256, 16), 50_000), ((1, 16, 128, 16), 40_000)], ids=str)
def test_wide_members_spill_too(shape: tuple[int, int, int, int], longest: int) -> None:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    case = draw(*shape, torch.bfloat16, lengths=[longest] + [50] * processors, chosen=300)  # a member each
    space = SketchSpace.make(case.kv, shape[1], case.new_lists()[0].shape[2])
    assert space.parts.shape[1] == 1
    assert space.spill.shape[2] > 0
    check(case)


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("lengths", [[5000], [4999, 130, 20000], [33000] * 4], ids=str)
@pytest.mark.parametrize("chosen", [1, 40, 1000])
def test_contexts_of_many_tiles(lengths: list[int], chosen: int, in_8_bits: bool) -> None:
    check(draw(2, 4, 128, 16, torch.bfloat16, lengths=lengths, chosen=chosen, in_8_bits=in_8_bits))


@pytest.mark.parametrize("rest", [True, False])
def test_softcap_and_sink_logit(rest: bool) -> None:
    case = draw(dtype=torch.float16)
    sinks = torch.linspace(-3, 5, case.queries.shape[1], device=DEVICE)
    check(case, rest)
    check(case, rest, softcap=3.0, sink_logit=sinks)


@pytest.mark.parametrize("chosen", [0, 1, 200, 1000])
@pytest.mark.parametrize("rest", [True, False])
def test_few_tokens_and_all_of_them(chosen: int, rest: bool) -> None:
    case = draw(dtype=torch.float16, chosen=chosen)
    found = step(sketch_attention_cuda, case, rest)
    assert bool(found.estimated.any()) == (rest and chosen < 1000)
    if chosen < 1000:
        for row in range(case.kv.batch):
            output, _, _ = answer(case, row, found.tokens[row], found.counts[row], rest)
            torch.testing.assert_close(found.output[row], output, atol=4e-3, rtol=4e-3)


def test_equal_votes_go_to_the_first() -> None:
    """Keys that are all equal: every token votes alike."""
    case = draw(dtype=torch.float16, lengths=[3000], chosen=50)
    case.kv.keys.copy_(case.kv.keys[:, :1, :1])
    case.rows.copy_(sketch_rows(1, case.kv.keys, case.kv.values.nan_to_num()))
    found = step(sketch_attention_cuda, case)
    assert found.tokens[0, 0, 3:53].tolist() == list(range(3, 53))
    output, _, _ = answer(case, 0, found.tokens[0], found.counts[0], True)
    torch.testing.assert_close(found.output[0], output, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize(("longest", "spilled"), [(2000, 0), (40000, 0), (55000, 16), (90000, 48), (150000, 68)])
def test_numbers_that_do_not_fit_shared_memory(longest: int, spilled: int) -> None:
    case = draw(2, 4, 128, 16, torch.bfloat16, lengths=[longest] + [50] * 69, chosen=300)  # a member each
    space = SketchSpace.make(case.kv, 4, case.new_lists()[0].shape[2])
    assert space.parts.shape[1] == 1
    subs = -(-case.kv.table.shape[1] // 8) * 8
    assert space.spill.shape[2] == spilled * subs  # bytes of 16 tokens
    check(case)


def test_a_workspace_serves_again_and_rows_may_be_dense() -> None:
    case = draw(dtype=torch.bfloat16)
    space = SketchSpace.make(case.kv, 2, case.new_lists()[0].shape[2])
    below = torch.tensor([300, 0, 61, 65, 0], dtype=torch.int32, device=DEVICE)
    whole = step(sketch_attention_cuda, case, space=space)
    for early in (False, True, False):
        again = step(sketch_attention_cuda, case, space=space, early=early)
        assert all(torch.equal(one, other) for one, other in zip(whole, again))
        out = torch.full_like(case.queries, 7.0)
        mixed = step(sketch_attention_cuda, case, dense_below=below, out=out, space=space, early=early)
        for row, dense in enumerate((True, False, False, True, False)):
            assert torch.equal(mixed.output[row], torch.full_like(out[row], 7.0) if dense else whole.output[row])
    launches = space.launches[:, 0].view(len(below), -1)
    assert launches.tolist() == [[n] * launches.shape[1] for n in (4, 7, 7, 4, 7)]
