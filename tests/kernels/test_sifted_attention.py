"""A whole decode step: the twins one after the other on any machine, the single launch on a GPU."""

from typing import Any

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, needs_triton
from kernels.decode_cases import DecodeCase, draw_case
from kernels.decode_checks import by_twins, check_step
from turns import in_turns

from kvsift.kernels.cuda_module import have_nvrtc
from kvsift.kernels.page_summary import SUMMARIES
from kvsift.kernels.sifted_attention import (
    FEWEST_KEYS,
    GROUP_PAGES,
    KEYS,
    SiftSpace,
    sifted_attention,
    sifted_attention_cuda,
    single_launch_runs,
)

LENGTHS = [470, 1, 61, 64, 230]
SPANS = [(1, 2, 5), (1, 2, 5), (0, 1, 99), (2, 1, 0), (1, 3, 4)]  # sinks, window, pages to choose: 99 is all there are


@needs_triton
@pytest.mark.parametrize(("kind", "dtype"), in_turns(SUMMARIES, DTYPES), ids=str)
def test_the_twins_one_after_the_other_do_what_the_reference_does(kind: str, dtype: torch.dtype) -> None:
    shared = (list(SUMMARIES).index(kind) + DTYPES.index(dtype)) % 2 == 0  # lists per KV head or per query head
    in_8_bits = list(SUMMARIES).index(kind) % 2 == 1
    case = draw_case(LENGTHS, 1, 3, 12, 8, dtype, kind=kind, spans=SPANS, in_8_bits=in_8_bits)
    check_step(by_twins, case, shared, softcap=20.0, sink_logit=torch.tensor([1.0, -2.0, 3.0], device=DEVICE).to(dtype))


def test_the_dispatcher_takes_what_the_tensors_need() -> None:
    case = draw_case(LENGTHS, 2, 2, 16, 8, torch.float32, spans=SPANS)
    check_step(sifted_attention, case)
    check_step(sifted_attention, case, shared=False)


def test_a_cpu_never_launches() -> None:
    case = draw_case(LENGTHS, 2, 2, 64, 8, torch.float16, device="cpu")
    assert not single_launch_runs(case.queries, case.kv, case.summary, case.new_lists(True)[0], case.kind)


def check_dense_rows_are_left_out(function: Any, case: DecodeCase, capacity: int | None = None, **how: Any) -> None:
    below = torch.tensor([471, 1, 61, 65, 0], dtype=torch.int32, device=DEVICE)
    given: dict[str, Any] = {"kind": case.kind, "scale": case.scale, **how}
    lists, some = case.new_lists(True, capacity), case.new_lists(True, capacity)
    whole, counted = (torch.zeros(len(LENGTHS), dtype=torch.int64, device=DEVICE) for _ in range(2))
    expected = function(*case[:4], *lists, visible=whole, **given)
    found = function(*case[:4], *some, visible=counted, dense_below=below, **given)
    for row in (1, 2, 4):
        assert torch.equal(found[row], expected[row])
        assert all(torch.equal(one[row], other[row]) for one, other in zip(some, lists))
    assert counted.tolist() == [0, int(whole[1]), int(whole[2]), 0, int(whole[4])]


@needs_triton
def test_the_three_kernels_leave_dense_rows_out() -> None:
    check_dense_rows_are_left_out(by_twins, draw_case(LENGTHS, 2, 2, 16, 8, torch.float16, spans=SPANS))


def test_the_dispatcher_leaves_dense_rows_out() -> None:
    check_dense_rows_are_left_out(sifted_attention, draw_case(LENGTHS, 2, 2, 16, 8, torch.float32, spans=SPANS))


def on_gpu(test: Any) -> Any:
    reason = "needs an NVIDIA GPU of the Hopper generation or later"
    return pytest.mark.gpu(pytest.mark.skipif(not have_nvrtc(), reason=reason)(test))


def runs(case: DecodeCase, capacity: int | None = None, shared: bool = True) -> bool:
    return single_launch_runs(case.queries, case.kv, case.summary, case.new_lists(shared, capacity)[0], case.kind)


def launch(case: DecodeCase, **how: Any) -> None:
    """By the single launch, at once and early, twice over the same workspace: the same bits."""
    assert runs(case, how.get("capacity"))
    space = SiftSpace.make(case.kv, case.queries.shape[1] // case.kv.num_kv_heads)
    outputs = [
        check_step(sifted_attention_cuda, case, space=space, early=early, **how).output
        for early in (False, True, False)
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert set(space.launches[:, 0].tolist()) == {3}


@on_gpu
@pytest.mark.parametrize(
    ("shape", "dtype", "kind", "how"),
    [  # KV heads, group, head_dim, page_size
        ((8, 4, 128, 16), torch.bfloat16, "minmax", {}),
        ((2, 1, 128, 16), torch.bfloat16, "minmax_fp8", {}),
        ((1, 8, 64, 32), torch.bfloat16, "mean_std", {"softcap": 20.0}),
        ((3, 3, 128, 8), torch.float16, "log_mass", {"sink_logit": True}),
        ((2, 2, 64, 8), torch.float16, "minmax", {"softcap": 5.0, "sink_logit": True}),
        ((4, 5, 64, 16), torch.float16, "minmax_fp8", {}),
        ((1, 7, 128, 32), torch.bfloat16, "minmax", {"sink_logit": True}),
        ((4, 6, 256, 16), torch.bfloat16, "minmax", {}),  # Qwen3.6-27B
        ((2, 8, 256, 16), torch.float16, "minmax_fp8", {"softcap": 5.0, "sink_logit": True}),
        ((2, 8, 512, 16), torch.bfloat16, "minmax", {}),  # Gemma 4
        ((1, 3, 512, 32), torch.float16, "minmax_fp8", {"sink_logit": True}),
        ((4, 16, 128, 16), torch.bfloat16, "minmax", {}),  # Qwen3-235B
        ((2, 12, 128, 16), torch.float16, "mean_std", {}),  # GLM-4.7
        ((1, 10, 64, 8), torch.bfloat16, "minmax_fp8", {}),
        ((1, 16, 256, 32), torch.bfloat16, "log_mass", {"softcap": 5.0}),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["ours", "foreign blocks", "8 bits"])
def test_a_single_launch_does_what_the_reference_does(
    shape: tuple[int, int, int, int], dtype: torch.dtype, kind: str, how: dict[str, Any], where: str
) -> None:
    case = draw_case(
        [3000, *LENGTHS], *shape, dtype, kind=kind, spans=[(1, 2, 9), *SPANS], foreign=where == "foreign blocks",
        in_8_bits=where == "8 bits",
    )  # fmt: skip
    if how.get("sink_logit"):
        how = how | {"sink_logit": torch.linspace(-3, 5, case.queries.shape[1], device=DEVICE).to(dtype)}
    launch(case, capacity=64, **how)


@on_gpu
def test_nothing_is_read_before_a_first_step() -> None:
    """Spans are zero then, and the pages that would be attended are whatever shared memory held."""
    case = draw_case([1], 4, 6, 256, 16, torch.bfloat16, spans=[(0, 1, 0)])
    case.spans.zero_()
    found = sifted_attention_cuda(*case[:4], *case.new_lists(True, 64), kind=case.kind, scale=case.scale)
    assert not found.any()


@on_gpu
@pytest.mark.parametrize("shape", [(2, 4, 64, 16), (2, 6, 256, 8), (1, 8, 512, 16), (1, 16, 128, 16)], ids=str)
def test_a_cache_of_fp8_gives_the_bits_of_its_numbers(shape: tuple[int, int, int, int]) -> None:
    case = draw_case(LENGTHS, *shape, torch.bfloat16, spans=SPANS)
    keys, values = (pool.to(torch.float8_e4m3fn) for pool in case.kv[:2])
    answers = []
    for dtype in (keys.dtype, torch.bfloat16):
        own, lists = (
            case._replace(kv=case.kv._replace(keys=keys.to(dtype), values=values.to(dtype))),
            case.new_lists(True),
        )
        assert runs(own)
        answers.append((sifted_attention_cuda(*own[:4], *lists, kind=case.kind, scale=case.scale), *lists))
    assert all(torch.equal(one, other) for one, other in zip(*answers))


@on_gpu
@pytest.mark.parametrize("capacity", [64, KEYS // GROUP_PAGES])
@pytest.mark.parametrize("candidates", [300, FEWEST_KEYS, FEWEST_KEYS + 1, KEYS + 5, KEYS * GROUP_PAGES - 3])
@pytest.mark.parametrize("chosen", [1, 30, 10_000])  # the last: as many as the list holds, or all
def test_rows_of_any_number_of_candidates(candidates: int, chosen: int, capacity: int) -> None:
    case = draw_case([8 * (candidates + 3) - 2], 1, 4, 64, 8, torch.bfloat16, spans=[(1, 2, min(chosen, capacity - 3))])
    case = case._replace(kv=case.kv._replace(table=case.kv.table[:, :-1].contiguous()))
    launch(case, capacity=capacity)


@on_gpu
@pytest.mark.parametrize("candidates", [100, 700, 2 * FEWEST_KEYS + 9])  # fewer and more than threads, and than keys
@pytest.mark.parametrize("keys", ["equal", "two values"])
def test_ties_go_to_the_lower_page(candidates: int, keys: str) -> None:
    case = draw_case([8 * (candidates + 3)], 2, 2, 64, 8, torch.bfloat16, spans=[(1, 2, 50)])
    values = torch.ones(candidates + 3, device=DEVICE)  # by logical page
    if keys == "two values":
        values[::17] = 2.0
    summary = torch.zeros_like(case.summary)
    summary[:, case.kv.table[0, :-1].long()] = values[:, None].to(summary)
    case = case._replace(queries=case.queries.abs(), summary=summary)
    launch(case, capacity=64)
    pages, counts = case.new_lists(True, 64)
    sifted_attention_cuda(*case[:4], pages, counts, kind=case.kind, scale=case.scale)
    best = 1 + values[1:-2].sort(descending=True, stable=True).indices[:50].sort().values
    assert counts.tolist() == [[53, 53]]
    assert pages[0, :, :53].tolist() == [[0, *best.tolist(), candidates + 1, candidates + 2]] * 2


@on_gpu
@pytest.mark.parametrize("early", [False, True])
def test_the_single_launch_leaves_dense_rows_out_before_it_writes_a_list(early: bool) -> None:
    case = draw_case(LENGTHS, 8, 4, 128, 16, torch.bfloat16, spans=SPANS)
    assert runs(case, 64)
    space = SiftSpace.make(case.kv, 4)
    check_dense_rows_are_left_out(sifted_attention_cuda, case, 64, space=space, early=early)
    lists = case.new_lists(True, 64)
    nobody = torch.full((len(LENGTHS),), 1000, dtype=torch.int32, device=DEVICE)
    given: dict[str, Any] = {"kind": case.kind, "scale": case.scale, "space": space}
    sifted_attention_cuda(*case[:4], *lists, dense_below=nobody, **given)
    assert all(bool((tensor == -7).all()) for tensor in lists)


@on_gpu
def test_more_rows_than_the_device_has_processors() -> None:
    case = draw_case([37 + 11 * row for row in range(80)], 4, 2, 64, 16, torch.bfloat16)
    assert case.kv.batch * case.kv.num_kv_heads > torch.cuda.get_device_properties(0).multi_processor_count
    launch(case, capacity=16)


@on_gpu
def test_what_the_single_launch_does_not_take_goes_the_other_way() -> None:
    limit = KEYS // GROUP_PAGES
    good = draw_case(LENGTHS, 2, 2, 64, 8, torch.bfloat16, spans=SPANS)
    assert runs(good, limit)
    cases = [
        (draw_case(LENGTHS, 2, 2, 64, 8, torch.float32, spans=SPANS), limit, True),
        (draw_case(LENGTHS, 2, 2, 80, 8, torch.bfloat16, spans=SPANS), limit, True),
        (draw_case(LENGTHS, 2, 2, 64, 4, torch.bfloat16, spans=SPANS), limit, True),
        (draw_case(LENGTHS, 2, 2, 64, 8, torch.bfloat16, spans=SPANS, kind="centroid_radius"), limit, True),
        (draw_case(LENGTHS, 1, 17, 64, 8, torch.bfloat16, spans=SPANS), limit, True),
        (draw_case(LENGTHS, 1, 9, 512, 8, torch.bfloat16, spans=SPANS), limit, True),
        (draw_case(LENGTHS, 2, 2, 64, 8, torch.bfloat16, spans=SPANS, table_pages=KEYS * GROUP_PAGES + 1), limit, True),
        (good, limit + 1, True),
        (good, limit, False),
    ]
    for case, capacity, shared in cases:
        assert not runs(case, capacity, shared)
        check_step(sifted_attention, case, shared, capacity)
