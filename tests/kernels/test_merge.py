"""Merging partial attentions: the union of disjoint token sets, whatever the split."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.conftest import DEVICE, DTYPES, needs_triton
from kernels.paged_cases import distance
from torch import Tensor

from kvsift.kernels.attention import attention_reference, nothing
from kvsift.kernels.merge import merge, merge_all, merge_reference, merge_triton, with_sink_logit
from kvsift.types import Part

RUNS = [merge_reference, pytest.param(merge_triton, marks=needs_triton)]


def draw(num_keys: int, seed: int = 0, spread: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    queries = spread * torch.randn(1, 4, 3, 8, generator=generator)
    return queries, *(torch.randn(1, 2, num_keys, 8, generator=generator) for _ in range(2))


def attend(tokens: tuple[Tensor, Tensor, Tensor], chosen: Tensor) -> Part:
    queries, keys, values = tokens
    return attention_reference(queries, keys[:, :, chosen], values[:, :, chosen], 0.3)


def assert_same(a: Part, b: Part) -> None:
    torch.testing.assert_close(a.output, b.output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a.lse, b.lse, rtol=1e-5, atol=1e-5)


@given(
    owner=st.lists(st.integers(0, 3), min_size=1, max_size=40), order=st.permutations(range(4)), seed=st.integers(0, 99)
)
def test_any_split_merged_in_any_order_is_the_whole(owner: list[int], order: list[int], seed: int) -> None:
    tokens, owners = draw(len(owner), seed), torch.tensor(owner)
    parts = [attend(tokens, owners == index) for index in range(4)]
    merged = parts[order[0]]
    for index in order[1:]:
        merged = merge(merged, parts[index])
    assert_same(merged, attend(tokens, owners >= 0))
    left = merge(merge(parts[0], parts[1]), merge(parts[2], parts[3]))
    assert_same(left, merged)


@pytest.mark.parametrize(
    ("run", "dtype"),
    [(merge_reference, torch.float32), (merge_reference, torch.bfloat16)]
    + [pytest.param(merge_triton, dtype, marks=needs_triton) for dtype in DTYPES],
)
def test_merging_with_nothing_changes_no_bit(run: object, dtype: torch.dtype) -> None:
    queries, keys, values = (tensor.to(DEVICE, dtype) for tensor in draw(9))
    part, empty = attention_reference(queries, keys, values, 0.3), nothing(queries)
    for merged in (run(part, empty), run(empty, part)):  # type: ignore[operator]
        assert merged.output.dtype == dtype
        assert torch.equal(merged.output, part.output)
        assert torch.equal(merged.lse, part.lse)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log")  # which is meant
def test_two_parts_that_saw_nothing_make_one_that_saw_nothing(run: object) -> None:
    empty = nothing(draw(1)[0].to(DEVICE))
    merged = run(empty, empty)  # type: ignore[operator]
    assert not merged.output.any()
    assert bool((merged.lse == -torch.inf).all())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("size", [1e4, -1e4])  # far beyond what exp can hold, in both directions
def test_large_logits_do_not_overflow(run: object, size: float) -> None:
    output = torch.ones(1, 1, 1, 2, device=DEVICE)
    a, b = Part(output, size * output[..., 0]), Part(3 * output, size * output[..., 0])
    merged = run(a, b)  # type: ignore[operator]
    torch.testing.assert_close(merged.output, 2 * output, rtol=1e-3, atol=0)  # one ulp of a float32 lse of 10^4
    torch.testing.assert_close(merged.lse, a.lse + torch.log(torch.tensor(2.0)))
    far = run(a, Part(3 * output, a.lse - 1e4))  # type: ignore[operator]
    assert torch.equal(far.output, output)


def draw_parts(dtype: torch.dtype, head_dim: int) -> tuple[Part, Part]:
    """Parts [2, 3, 5, head_dim] of unlike weight, some of which saw nothing; laid out as kernels leave them."""
    generator = torch.Generator().manual_seed(head_dim)
    parts = []
    for seed in range(2):
        output = torch.randn(2, 5, 3, head_dim, generator=generator).transpose(1, 2).to(DEVICE, dtype)
        lse = (4 * torch.randn(2, 3, 8, generator=generator)).to(DEVICE)[:, :, :5]
        lse[seed, 1], output[seed, 1] = -torch.inf, 0.0
        parts.append(Part(output, lse))
    return parts[0], parts[1]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [6, 80, 256])  # the last takes several programs
def test_the_twin_is_as_near_to_float64_as_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    a, b = draw_parts(dtype, head_dim)
    lse = torch.logaddexp(a.lse.double(), b.lse.double())
    shares = [(part.lse.double() - lse).exp().nan_to_num(0.0).unsqueeze(-1) for part in (a, b)]
    exact = a.output.double() * shares[0] + b.output.double() * shares[1]
    own, twin = merge_reference(a, b), merge_triton(a, b)
    assert twin.output.dtype == dtype
    assert twin.lse.dtype == torch.float32
    finite = lse.isfinite()
    assert torch.equal(twin.lse.isfinite(), finite)
    for found, reference, wanted in (
        (twin.output, own.output, exact), (twin.lse[finite], own.lse[finite], lse[finite])
    ):  # fmt: skip
        floor = torch.finfo(torch.float32).eps * float(wanted.norm())
        assert distance(found, wanted) <= 2 * max(distance(reference, wanted), floor)


def test_merged_halves_are_at_most_twice_as_far_from_float64_as_the_formula_in_their_dtype() -> None:
    queries, keys, values = (tensor.bfloat16() for tensor in draw(200))
    halves = [attention_reference(queries, keys[:, :, half], values[:, :, half], 0.3) for half in
              (slice(0, 70), slice(70, 200))]  # fmt: skip

    def formula(dtype: torch.dtype) -> Tensor:
        k, v = (tensor.to(dtype).repeat_interleave(2, 1) for tensor in (keys, values))
        return (queries.to(dtype) @ k.mT * 0.3).softmax(-1) @ v

    exact = formula(torch.float64)
    own = (formula(torch.bfloat16).double() - exact).norm()
    assert (merge(*halves).output.double() - exact).norm() <= 2 * own


def test_parts_of_different_shape_are_refused() -> None:
    a, b = nothing(torch.zeros(1, 4, 3, 8)), nothing(torch.zeros(1, 4, 2, 8))
    with pytest.raises(ValueError, match=r"differ in shape: \(1, 4, 3, 8\) and \(1, 4, 2, 8\)"):
        merge(a, b)


def test_a_sink_logit_takes_its_share_of_the_softmax_and_adds_no_value() -> None:
    queries, keys, values = draw(9)
    sink = torch.tensor([0.5, -3.0, 8.0, 0.0])
    k, v = (tensor.repeat_interleave(2, 1) for tensor in (keys, values))
    logits = torch.cat([queries @ k.mT * 0.3, sink.view(1, -1, 1, 1).expand(1, 4, 3, 1)], -1)
    part = with_sink_logit(attention_reference(queries, keys, values, 0.3), sink)
    torch.testing.assert_close(part.output, logits.softmax(-1)[..., :-1] @ v)
    torch.testing.assert_close(part.lse, logits.logsumexp(-1))
    alone = with_sink_logit(nothing(queries), sink)
    assert not alone.output.any()
    torch.testing.assert_close(alone.lse, sink.view(1, -1, 1).expand(1, 4, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_that_are_made_one_after_the_other_are_rounded_once(dtype: torch.dtype, count: int) -> None:
    tokens = tuple(tensor.to(DEVICE) for tensor in draw(40))
    parts = [attend(tokens, torch.arange(index, 40, count)) for index in range(count)]  # type: ignore[arg-type]
    given = [Part(part.output.to(dtype).transpose(1, 2).contiguous().transpose(1, 2), part.lse) for part in parts]
    copies = [Part(part.output.clone(), part.lse.clone()) for part in given]
    expected = Part(given[0].output.float(), given[0].lse)
    for part in given[1:]:
        expected = merge(expected, part)
    merged = merge_all(part for part in given)
    assert merged.output.dtype == dtype
    assert torch.equal(merged.output, expected.output.to(dtype))
    assert torch.equal(merged.lse, expected.lse)
    for part, copied in zip(given, copies):  # no part is overwritten
        assert torch.equal(part.output, copied.output)
