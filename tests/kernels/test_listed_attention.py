"""The single launch over given lists: as near to float64 as the reference, whatever else runs before it."""

from typing import Any

import pytest
import torch
from kernels.conftest import DEVICE
from kernels.decode_cases import DecodeCase, Lists, draw_case
from kernels.decode_checks import error_ratio
from kernels.paged_cases import plain
from torch import Tensor

from kvsift.kernels.cuda_module import have_nvrtc
from kvsift.kernels.listed_attention import listed_attention_cuda, listed_launch_runs
from kvsift.kernels.page_attention import page_attention, page_attention_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not have_nvrtc(), reason="needs a Hopper GPU or newer, and NVRTC")]
SHAPES = [  # KV heads, group, head_dim, page_size
    (2, 1, 64, 16),
    (8, 4, 128, 16),
    (1, 8, 64, 8),
    (2, 7, 128, 64),
    (1, 3, 128, 16),
    (4, 6, 256, 16),  # Qwen3.6-27B
    (4, 16, 128, 16),  # Qwen3-235B
    (2, 8, 512, 16),  # Gemma 4
    (1, 12, 256, 16),
]
LENGTHS = [250, 1, 61, 64, 5000]


def lists_of(case: DecodeCase, unit_size: int, most: int = 400) -> Lists:
    """Random units of every KV head, ascending, the last one among them; no list is full."""
    generator = torch.Generator().manual_seed(1)
    held = [-(-length // unit_size) for length in case.kv.lengths.tolist()]
    units, counts = case.new_lists(True, min(most, max(held)) + 3)
    for row, number in enumerate(held):
        for head in range(units.shape[1]):
            wanted = int(torch.randint(0, min(most, number), (1,), generator=generator))
            chosen = torch.randperm(number - 1, generator=generator)[:wanted].sort().values
            units[row, head, : wanted + 1] = torch.cat([chosen, torch.tensor([number - 1])])
            counts[row, head] = wanted + 1
    return units, counts


def attend(function: Any, case: DecodeCase, lists: Lists, unit_size: int, **how: Any) -> tuple[Tensor, list[int]]:
    visible = torch.full((case.kv.batch,), 100, dtype=torch.int64, device=DEVICE)
    output = function(case.queries, case.kv, *lists, scale=case.scale, unit_size=unit_size, visible=visible, **how)
    return output, visible.tolist()


def check(case: DecodeCase, unit_size: int, most: int = 400, **how: Any) -> None:
    lists = lists_of(case, unit_size, most // unit_size)
    assert listed_launch_runs(case.queries, case.kv, lists[0], unit_size)
    found, counted = attend(listed_attention_cuda, case, lists, unit_size, **how)
    own, shown = attend(
        page_attention_reference, case._replace(kv=plain(case.kv, case.queries.dtype)), lists, unit_size, **how
    )
    kv = plain(case.kv, torch.float64)
    precise = case._replace(
        queries=case.queries.double(), kv=kv._replace(keys=kv.keys.double(), values=kv.values.double())
    )
    exact, _ = attend(page_attention_reference, precise, lists, unit_size, **how)
    assert error_ratio(found, own, exact) <= 2
    assert counted == shown


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "tokens"])
@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_answers_are_as_near_to_float64_as_the_references(
    shape: tuple[int, int, int, int], dtype: torch.dtype, in_8_bits: bool, paged: bool
) -> None:
    case = draw_case(LENGTHS, *shape, dtype, in_8_bits=in_8_bits)
    check(case, shape[3] if paged else 1)
    sinks = torch.linspace(-3, 5, case.queries.shape[1], device=DEVICE).to(dtype)
    check(case, shape[3] if paged else 1, softcap=3.0, sink_logit=sinks)


@pytest.mark.parametrize("shape", [(2, 4, 64, 16), (2, 6, 256, 16), (1, 8, 512, 16)], ids=str)
def test_a_cache_of_fp8_gives_the_bits_of_its_numbers(shape: tuple[int, int, int, int]) -> None:
    case = draw_case(LENGTHS, *shape, torch.bfloat16)
    lists = lists_of(case, 1)
    keys, values = (pool.to(torch.float8_e4m3fn) for pool in case.kv[:2])
    found, expected = (
        attend(
            listed_attention_cuda, case._replace(kv=case.kv._replace(keys=keys.to(dtype), values=values.to(dtype))),
            lists, 1,
        )
        for dtype in (keys.dtype, torch.bfloat16)
    )  # fmt: skip
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("batch", [1, 4, 70])
def test_rows_of_many_blocks_and_of_one(batch: int, in_8_bits: bool) -> None:
    lengths = [33000, 4999, 130, 17][:batch] + [300] * max(0, batch - 4)
    check(draw_case(lengths, 2, 4, 128, 16, torch.bfloat16, in_8_bits=in_8_bits), 1, most=200)


def test_long_lists_are_left_to_triton() -> None:
    case = draw_case([33000] * 16, 8, 4, 128, 16, torch.bfloat16)
    units = lists_of(case, 1, most=1000)[0]
    assert not listed_launch_runs(case.queries, case.kv, units, 1)
    assert listed_launch_runs(case.queries[:4], case.kv._replace(table=case.kv.table[:4]), units[:4], 1)


def test_short_rows_are_left_out_and_heads_attend_the_lists_that_are_named() -> None:
    case = draw_case(LENGTHS, 2, 4, 128, 16, torch.bfloat16)
    units, counts = lists_of(case, 1)
    below = torch.tensor([300, 1, 61, 65, 0], dtype=torch.int32, device=DEVICE)
    heads = torch.tensor([1, 1], dtype=torch.int32, device=DEVICE)
    how: dict[str, Any] = {"dense_below": below, "heads": heads}
    outputs = []
    for run in (page_attention_reference, page_attention):
        out = torch.full_like(case.queries, 7.0)
        outputs.append(attend(run, case, (units, counts), 1, out=out, **how))
    (own, shown), (found, counted) = outputs
    assert counted == shown
    torch.testing.assert_close(found, own, atol=2e-2, rtol=2e-2)
    assert bool((found[[0, 3]] == 7).all())


def test_a_launch_ahead_of_its_predecessors_end_sees_the_newest_token() -> None:
    """The newest key and value and the queries are written by kernels in front, hundreds of times."""
    case = draw_case([5000, 33, 700], 8, 4, 128, 16, torch.bfloat16)
    lists, kv = lists_of(case, 1), case.kv
    last = (kv.lengths - 1).long()
    pages = kv.table[torch.arange(3, device=DEVICE), last // 16].long()
    drawn = [torch.randn(3, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(200)]
    heavy = torch.randn(4096, 4096, dtype=torch.bfloat16, device=DEVICE)

    def step(function: Any, token: Tensor, **how: Any) -> Tensor:
        heavy @ heavy
        kv.keys[:, pages, last % 16] = token.transpose(0, 1)
        kv.values[:, pages, last % 16] = -token.transpose(0, 1)
        queries = token.repeat_interleave(4, 1)
        return attend(function, case._replace(queries=queries), lists, 1, **how)[0]

    early = [step(listed_attention_cuda, token, early=True) for token in drawn]
    assert all(torch.equal(one, step(listed_attention_cuda, token)) for one, token in zip(early, drawn))
