"""Storing a token: the pools and summaries of the composed path, and nothing else is touched."""

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, crossed, needs_triton
from kernels.paged_cases import coded, copy_of, distance, paged_kv, pools_of, same
from torch import Tensor
from turns import in_turns

from kvsift.kernels.append import append, append_reference, append_sketches, append_triton, summarise_without_twins
from kvsift.kernels.page_summary import SUMMARIES, summarise, summarise_pages
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.sketch import SKETCHES, SketchLayout, unpack
from kvsift.kernels.sketch_append import write_newest_triton
from kvsift.stores.paged import PagedStore
from kvsift.types import LayerShape

EXACT = [kind for kind in SUMMARIES if kind.startswith("minmax")]
HELD = [*EXACT, *SKETCHES]
RUNS = [append_reference, pytest.param(append_triton, marks=needs_triton)]


def new_tokens(kv: PagedKV, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, kv.batch, kv.num_kv_heads, kv.head_dim, generator=generator)
    return keys.to(kv.keys), values.to(kv.keys)


def newest(kv: PagedKV) -> tuple[Tensor, Tensor]:
    """Page and slot of each row's last token."""
    position = kv.lengths.long() - 1
    return kv.table.long().gather(1, position[:, None] // kv.page_size)[:, 0], position % kv.page_size


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("foreign", [False, True], ids=["ours", "foreign blocks"])
@pytest.mark.parametrize(
    ("page_size", "head_dim"), [(4, 16), (5, 6)], ids=str
)  # the usual in small; page size and head_dim not powers of two
def test_tokens_and_summaries_are_written_and_nothing_else(
    run: object, dtype: torch.dtype, foreign: bool, page_size: int, head_dim: int
) -> None:
    # the first token of all, the first and the last of a page, one in the middle
    lengths = [1, page_size + 1, 2 * page_size, 2 * page_size + 2]
    before = paged_kv(lengths, 2, page_size, head_dim, dtype, DEVICE, foreign)
    kv, summaries = copy_of(before), pools_of(list(SUMMARIES), before)
    keys, values = new_tokens(kv)
    run(kv, keys, values, summaries)  # type: ignore[operator]
    pages, slots = newest(kv)
    for pool, old, new in ((kv.keys, before.keys, keys), (kv.values, before.values, values)):
        expected = old.clone()
        expected[:, pages, slots] = new.transpose(0, 1)
        assert same(pool, expected)
    valid = torch.arange(page_size, device=DEVICE) <= slots[:, None]
    for kind, pool in summaries.items():
        others = torch.ones(kv.keys.shape[1], dtype=torch.bool, device=DEVICE)
        others[pages] = False
        assert bool((pool[:, others].float() == pools_of([kind], before)[kind][:, others].float()).all())
        own, exact = (summarise(kind, kv.keys[:, pages].to(t), valid) for t in (dtype, torch.float32))
        rows = pool[:, pages]
        if kind in EXACT:
            assert same(rows, own)
        floor = torch.finfo(torch.float32).eps * float(exact.float().norm())
        assert distance(rows, exact) <= 2 * max(distance(own, exact), floor)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_by_token_is_what_the_store_would_hold(run: object, dtype: torch.dtype) -> None:
    kv = paged_kv([1, 1], 2, 4, 8, dtype, DEVICE)
    kv = kv._replace(table=torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=DEVICE))
    summaries = pools_of(HELD, kv)
    store = PagedStore(LayerShape(0, 4, 2, 8, 1.0), 2, 4, kv.keys, HELD)
    for step in range(6):
        kv.lengths.fill_(step + 1)
        keys, values = new_tokens(kv, step)
        run(kv, keys, values, summaries)  # type: ignore[operator]
        for row in range(2):
            store.append(row, keys[row].unsqueeze(1), values[row].unsqueeze(1))
    for row in range(2):
        held = store.reader(row)
        assert all(torch.equal(a, b) for a, b in zip(kv.row(row), (held.keys(), held.values())))
        for kind in HELD:
            assert same(summaries[kind][:, kv.table[row].long()], held.summary(kind, slice(0, 2)))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("head_dim", "dtype"), in_turns([16, 40], DTYPES), ids=str
)  # 40: blocks of 8 channels that a transform mixes
def test_a_cache_in_8_bits_holds_what_the_store_would(run: object, dtype: torch.dtype, head_dim: int) -> None:
    """Codes of keys may differ by one, since their rotation rounds; summaries are those of what is held."""
    wide, kinds = paged_kv([1, 1], 2, 4, head_dim, dtype, DEVICE), [*SUMMARIES, *SKETCHES]
    wide = wide._replace(table=torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=DEVICE))
    kv, summaries = coded(wide), pools_of(kinds, wide)
    store = PagedStore(LayerShape(0, 4, 2, head_dim, 1.0), 2, 4, wide.keys, kinds, kv_dtype="int8")
    for step in range(6):
        kv.lengths.fill_(step + 1)
        keys, values = new_tokens(wide, step)
        keys[..., 0] *= 20
        run(kv, keys, values, summaries)  # type: ignore[operator]
        for row in range(2):
            store.append(row, keys[row].unsqueeze(1), values[row].unsqueeze(1))
    for row in range(2):
        pages, held = kv.table[row].long(), store.reader(row)
        keys, values = kv.row(row)
        step = held.rows()[0][..., -4:].clone().view(torch.float32)
        assert bool(((keys - held.keys().float()).norm(dim=-1) <= 1.01 * step[..., 0] + 2e-3).all())
        torch.testing.assert_close(values, held.values().float(), rtol=2 * torch.finfo(dtype).eps, atol=0)
        valid = torch.arange(8, device=DEVICE).view(2, 4) < 6
        for kind, pool in summaries.items():
            own = summarise_pages(kind, kv.keys, kv.values, pages, pool, valid)
            if kind in EXACT and head_dim == 16:
                assert same(pool[:, pages], own)
            elif kind in SKETCHES:
                layout = SketchLayout(SKETCHES[kind], head_dim, 4)
                found, expected = unpack(pool[:, pages], layout), unpack(own, layout)
                assert float((found.codes != expected.codes).float().mean()) < 0.02
                torch.testing.assert_close(found.value_means, expected.value_means, rtol=0.02, atol=0.02)
            else:
                rounding = 8 * torch.finfo(dtype).eps  # of keys, which may cancel
                rows, rtol = pool[:, pages].float(), rounding if pool.element_size() > 1 else 0.126
                torch.testing.assert_close(rows, own.float(), rtol=rtol, atol=rounding * float(keys.abs().max()))


@needs_triton
@crossed(shape=[(16, 64), (5, 80), (32, 128), (4, 24)], kind=list(SKETCHES), dtype=DTYPES)
def test_sketches_are_those_of_the_reference_but_for_rounding(
    shape: tuple[int, int], kind: str, dtype: torch.dtype
) -> None:
    """A code is another one only where a number lies on the border of two."""
    page_size, head_dim = shape
    lengths = [1, page_size + 1, 2 * page_size, 2 * page_size + 3]
    kv = paged_kv(lengths, 2, page_size, head_dim, dtype, DEVICE, foreign=page_size == 16)
    rows, expected = pools_of([kind], kv), pools_of([kind], kv)
    keys, values = new_tokens(kv)
    append_reference(copy_of(kv), keys, values, expected)
    append_triton(kv, keys, values, rows)
    pages, layout = newest(kv)[0], SketchLayout(SKETCHES[kind], head_dim, page_size)
    one, other = (unpack(pool[kind][:, pages], layout) for pool in (rows, expected))
    assert float((one.codes != other.codes).float().mean()) < 1e-3
    torch.testing.assert_close(one.factors, other.factors, rtol=3e-3, atol=1e-6)
    for found, mean in zip(one[2:], other[2:]):
        torch.testing.assert_close(found, mean, rtol=0, atol=1.1 * float(mean.abs().max()) / 127)
    untouched = torch.ones(kv.keys.shape[1], dtype=torch.bool, device=DEVICE)
    untouched[pages] = False
    assert bool((rows[kind][:, untouched] == 77).all())


@needs_triton
@pytest.mark.parametrize("kind", SKETCHES)
def test_sketches_of_all_layers_in_one_launch_are_those_of_each(kind: str) -> None:
    layers = [paged_kv([16, 17, 48], 2, 16, 64, torch.float16, DEVICE) for _ in range(3)]
    for number, kv in enumerate(layers):
        append_triton(kv, *new_tokens(kv, number), {})
        kv.values.mul_(number + 1)
    joined = torch.cat([layers[1].keys, layers[1].values], -1)  # as ``LayerPool`` has them side by side
    layers[1] = layers[1]._replace(keys=joined[..., :64], values=joined[..., 64:])
    alone, together = ([pools_of([kind], kv) for kv in layers] for _ in range(2))
    for kv, pools in zip(layers, alone):
        filled = torch.tensor([0, 2], device=DEVICE)  # sequences whose newest token fills a page
        summarise_without_twins(kv._replace(table=kv.table[filled], lengths=kv.lengths[filled]), pools)
    append_sketches(list(zip(layers, together)), lambda make, pools, key: make(pools))
    assert all(same(one[kind], other[kind]) for one, other in zip(alone, together))
    assert not same(alone[0][kind], alone[1][kind])


@needs_triton
@pytest.mark.parametrize("kind", SKETCHES)
def test_of_several_tokens_in_one_page_the_last_writes_its_sketch(kind: str) -> None:
    """Three tokens of one sequence, of which the second fills its page, and one of another."""
    kv = paged_kv([17, 17, 17, 20], 2, 16, 64, torch.float16, DEVICE)
    kv = kv._replace(table=kv.table[[0, 0, 0, 3]])
    append_triton(kv, *new_tokens(kv), {})
    alone, together = (pools_of([kind], kv) for _ in range(2))
    lengths = torch.tensor([15, 16, 17, 20], dtype=torch.int32, device=DEVICE)
    full, last = kv._replace(table=kv.table[1:2], lengths=lengths[1:2]), kv._replace(lengths=lengths)
    append_sketches([(full, alone)], lambda make, pools, key: make(pools))
    append_sketches([(last, together)], lambda make, pools, key: make(pools))
    assert same(alone[kind], together[kind])
    assert bool((together[kind][:, int(kv.table[1, 0])] != 77).any())
    [by_twin, all_of_them] = (pools_of([kind], kv)[kind] for _ in range(2))
    write_newest_triton(last, SKETCHES[kind], by_twin, filled=True)
    write_newest_triton(full, SKETCHES[kind], all_of_them)
    assert same(by_twin, all_of_them)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_8_bit_bounds_are_rounded_as_the_reference_rounds_them(dtype: torch.dtype) -> None:
    """Every binade the dtype has, both signs, on and beside the steps of 8 bits, and beyond their end."""
    steps = torch.tensor([1.0, 1.0625, 1.125, 1.1251, 1.9375, 1.999])
    numbers = (steps * torch.exp2(torch.arange(-26.0, 14.0))[:, None]).flatten()
    tiny = torch.finfo(dtype).smallest_normal / 2  # a subnormal number
    numbers = torch.cat([numbers, -numbers, torch.tensor([0.0, tiny, -tiny, 3584.0, -3584.0])])
    numbers = torch.nn.functional.pad(numbers, (0, 512 - len(numbers))).to(DEVICE, dtype)
    kv = paged_kv([1] * 16, 1, 2, 32, dtype, DEVICE)
    keys, pools = numbers.view(16, 1, 32), pools_of(["minmax_fp8"], kv)
    expected = pools_of(["minmax_fp8"], kv)
    append_triton(kv, keys, keys, pools)
    append_reference(kv, keys, keys, expected)
    assert torch.equal(pools["minmax_fp8"].float(), expected["minmax_fp8"].float())


def test_the_dispatcher_takes_what_the_tensors_need() -> None:
    kv = paged_kv([3, 5], 2, 4, 16, torch.float32, DEVICE)
    other, pools, expected = copy_of(kv), pools_of(["minmax"], kv), pools_of(["minmax"], kv)
    keys, values = new_tokens(kv)
    append(kv, keys, values, pools)
    append_reference(other, keys, values, expected)
    assert same(kv.keys, other.keys)
    assert same(pools["minmax"], expected["minmax"])
