"""Attention of the compiled core against its twins."""

from __future__ import annotations

import random

import pytest
import torch
from refusals import refused
from torch import Tensor

from kvsift import native
from kvsift.kernels.merge import merge_reference
from kvsift.native import twins
from kvsift.native.coded_rows import encode_rows
from kvsift.types import Part

SHAPES = [  # num_kv_heads, group_size, head_dim, tokens
    (2, 4, 128, 1000), (8, 4, 64, 17), (1, 1, 96, 3), (2, 5, 80, 1), (1, 8, 256, 130), (2, 2, 72, 64),
    (1, 4, 128, 5000), (3, 3, 8, 65), (2, 4, 128, 0),
]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float32]


def qkv(shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    heads, group, dim, n = shape
    torch.manual_seed(seed)
    spare = torch.randn(2, heads, n + 5, dim).to(dtype)  # heads lie further apart than their tokens need
    return torch.randn(heads * group, dim).to(dtype), spare[0, :, :n], spare[1, :, 2 : n + 2]


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    output, lse = found
    assert output.dtype == dtype
    assert lse.dtype == torch.float32
    assert torch.equal(lse.isinf(), expected[1].isinf())
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-4)
    # weights and the output in bf16: two roundings of 2^-9 each, of values of about 1
    torch.testing.assert_close(
        output.float(), expected[0].float(), rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 2e-5
    )
    assert not output[lse.isinf()].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_attention_is_that_of_the_twin(level: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    softcap = 3.0 if (SHAPES.index(shape) + DTYPES.index(dtype)) % 2 else None
    queries, keys, values = qkv(shape, dtype)
    scale = shape[2] ** -0.5
    expected = twins.attend_dense(queries.float(), keys, values, scale, softcap)
    check(native.attend_dense(queries, keys, values, scale, softcap), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "num_tokens"),
    [((2, 4, 64, 1000), 3), ((1, 3, 32, 5), 5), ((1, 2, 128, 513), 2), ((2, 2, 8, 32803), 8), ((2, 3, 72, 67), 4),
     ((1, 5, 200, 1030), 7), ((2, 2, 128, 517), 8)],
    ids=str,
)  # fmt: skip
def test_tokens_that_are_attended_together_get_the_bits_that_each_gets_alone(
    level: str, shape: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype
) -> None:
    _, keys, values = qkv(shape, dtype)
    (heads, group, dim, n), scale = shape, shape[2] ** -0.5
    queries = 2 * torch.randn(heads * group, num_tokens, dim).to(dtype)  # pieces grow between 32,799 and 32,800 tokens
    shares = torch.empty(heads, -(-n // 16))
    output, lse = native.attend_dense(queries, keys, values, scale, shares=shares)
    for token in range(num_tokens):
        seen = slice(n - num_tokens + 1 + token)
        alone = native.attend_dense(queries[:, token], keys[:, seen], values[:, seen], scale)
        assert torch.equal(output[:, token], alone[0])
        assert torch.equal(lse[:, token], alone[1])
    if n > 5000:
        return
    expected = torch.empty_like(shares)
    twins.attend_dense(queries.float(), keys, values, scale, shares=expected)
    torch.testing.assert_close(shares, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)


def test_tokens_without_a_key_of_their_own_are_refused(core: None) -> None:
    queries, keys, values = qkv((2, 2, 64, 3), torch.float32)
    with refused("invalid_tensor"):
        native.attend_dense(queries.unsqueeze(1).expand(4, 4, 64), keys, values, 0.1)
    with refused("invalid_tensor"):
        native.attend_dense(queries, keys, values, 0.1, shares=torch.empty(2, 2))


def test_bf16_error_is_at_most_twice_that_of_torch_in_bf16(level: str) -> None:
    queries, keys, values = qkv((2, 4, 128, 3000), torch.bfloat16)
    exact, _ = twins.attend_dense(queries.float(), keys, values, 0.09)
    grouped = queries.unflatten(0, (2, -1))
    plain = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, scale=0.09).flatten(0, 1)
    found, _ = native.attend_dense(queries, keys, values, 0.09)
    assert (found.float() - exact).norm() <= 2 * (plain.float() - exact).norm()


def test_float32_queries_keep_their_precision_over_bf16_keys(level: str) -> None:
    _, keys, values = qkv((2, 4, 128, 500), torch.bfloat16)
    queries = torch.randn(8, 128)
    expected = twins.attend_dense(queries, keys, values, 0.1)
    check(native.attend_dense(queries, keys, values, 0.1), expected, torch.float32)


def random_units(rng: random.Random, lists: int, num_units: int, first: int) -> Tensor:
    capacity = rng.choice([0, 1, 7, num_units + 2])
    units = torch.full((lists, capacity), -1)
    for row in units:
        choice = list(range(first, num_units + 1))  # the last may be beyond the keys
        chosen = sorted(rng.sample(choice, min(len(choice), rng.randint(0, capacity))))
        row[: len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
    return units


def test_units_and_spans_are_those_of_the_twin(level: str) -> None:
    rng = random.Random(3)
    for trial in range(60):
        shape = (
            rng.choice([1, 2]),
            rng.choice([1, 2, 4, 5]),
            rng.choice([16, 64, 80, 128]),
            rng.choice([0, 1, 40, 333, 2500]),
        )
        dtype = rng.choice(DTYPES)
        queries, keys, values = qkv(shape, dtype, trial)
        unit_size = rng.choice([1, 3, 16])
        num_units = shape[3] // unit_size
        start = rng.choice([0, 0, min(2, num_units)])  # units in spans are left out
        spans = [(0, start * unit_size), (shape[3], shape[3] + 9)] if start else []
        units = random_units(rng, rng.choice([1, shape[0], shape[0] * shape[1]]), num_units, start)
        softcap = rng.choice([None, 5.0])
        expected = twins.attend_units(queries.float(), keys, values, units, unit_size, spans, 0.1, softcap)
        check(native.attend_units(queries, keys, values, units, unit_size, spans, 0.1, softcap), expected, dtype)


def test_nothing_to_see_is_output_zero_and_lse_minus_infinity(level: str) -> None:
    queries, keys, values = qkv((2, 2, 64, 50), torch.bfloat16)
    output, lse = native.attend_units(queries, keys, values, torch.full((4, 3), -1), 16, [], 0.1)
    assert not output.any()
    assert torch.equal(lse, torch.full((4,), -torch.inf))


def test_a_head_that_sees_only_minus_infinity_is_no_number_nowhere(level: str) -> None:
    queries = torch.ones(1, 64)
    keys = torch.full((1, 200, 64), -torch.inf)
    output, lse = native.attend_dense(queries, keys, torch.ones(1, 200, 64), 0.1)
    assert not output.any()
    assert lse.item() == -torch.inf


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("group", [1, 4, 6])  # 6: more queries than are attended together, but of AVX512-BF16
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_nan_in_a_key_or_query_shows_where_it_is_attended(
    level: str, form: str, group: int, softcap: float | None
) -> None:
    queries, keys, values = qkv((2, group, 64, 700), torch.float32 if form == "float32" else torch.bfloat16)
    wrong_queries, wrong_keys = queries.clone(), keys.clone()
    wrong_queries[group, 9], wrong_keys[1, 650, 9] = torch.nan, torch.nan
    if form == "int8":
        keys, wrong_keys = (encode_rows(each, turned=True) for each in (keys, wrong_keys))
        values = encode_rows(values)
    units, spans = torch.tensor([[3, 40]]), [(690, 700)]  # unit 40 holds token 650
    for output, lse in (
        native.attend_dense(queries, wrong_keys, values, 0.1, softcap),
        native.attend_units(queries, wrong_keys, values, units, 16, spans, 0.1, softcap),
    ):
        assert torch.equal(output.isnan().all(1), torch.arange(2 * group) >= group)
        assert torch.equal(lse.isnan(), torch.arange(2 * group) >= group)
        assert output[:group].isfinite().all()
    unseen, _ = native.attend_units(queries, wrong_keys, values, units[:, :1], 16, spans, 0.1, softcap)
    assert unseen.isfinite().all()
    for output, lse in (
        native.attend_dense(wrong_queries, keys, values, 0.1, softcap),
        native.attend_units(wrong_queries, keys, values, units, 16, spans, 0.1, softcap),
    ):
        assert torch.equal(output.isnan().all(1), torch.arange(2 * group) == group)
        assert torch.equal(lse.isnan(), torch.arange(2 * group) == group)


def test_logits_of_infinity_and_a_scale_of_nan_are_no_attention(level: str) -> None:
    queries, keys, values = qkv((1, 2, 64, 300), torch.float32)
    large = keys.clone()
    large[0, 200] = torch.inf * queries[0].sign()
    for output, _ in (
        native.attend_dense(queries[:1], large, values, 0.1),
        native.attend_dense(queries, keys, values, torch.nan),
    ):
        assert output.isnan().all()  # as of torch


def test_nan_of_a_later_token_does_not_show_in_those_before(level: str) -> None:
    queries, keys, values = qkv((2, 4, 64, 300), torch.float32)
    queries = queries.unsqueeze(1).repeat(1, 3, 1)
    expected, _ = native.attend_dense(queries, keys, values, 0.1)
    keys[:, -1] = torch.nan
    output, _ = native.attend_dense(queries, keys, values, 0.1)
    assert torch.equal(output[:, :2], expected[:, :2])
    assert output[:, 2].isnan().all()


def test_shares_of_pages_that_are_no_numbers_show(level: str) -> None:
    queries, keys, values = qkv((2, 2, 64, 100), torch.float32)
    keys[1, 20], shares = torch.nan, torch.empty(2, 7)
    native.attend_dense(queries, keys, values, 0.1, shares=shares)
    assert shares[0].isfinite().all()
    assert shares[1].isnan().all()


def test_parts_merge_to_the_whole(level: str) -> None:
    queries, keys, values = qkv((2, 4, 128, 900), torch.float32)
    a, a_lse = native.attend_dense(queries, keys[:, :333], values[:, :333], 0.1)
    b, b_lse = native.attend_dense(queries, keys[:, 333:], values[:, 333:], 0.1)
    whole, lse = native.attend_dense(queries, keys, values, 0.1)
    torch.testing.assert_close(torch.logaddexp(a_lse, b_lse), lse)
    merged = a * (a_lse - lse).exp().unsqueeze(1) + b * (b_lse - lse).exp().unsqueeze(1)
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_estimate_is_merged_as_attention_to_other_tokens(core: None, dtype: torch.dtype) -> None:
    part, estimate = (Part(torch.randn(1, 6, 1, 24), 3 * torch.randn(1, 6, 1)) for _ in range(2))
    part.lse[0, 0], estimate.lse[0, 1], part.lse[0, 2] = -torch.inf, -torch.inf, 80.0
    part = Part(part.output.to(dtype), part.lse)
    part.lse[0, 3] = estimate.lse[0, 3] = -torch.inf
    before, expected = Part(*(each.clone() for each in part)), merge_reference(part, estimate)
    assert native.takes_estimate(part, estimate)
    found, share = native.merge_estimate(part, estimate)
    torch.testing.assert_close(found.output, expected.output, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    torch.testing.assert_close(found.lse, expected.lse)
    shares = -torch.expm1(part.lse - expected.lse)
    assert share == pytest.approx(float(shares.nan_to_num(0.0).mean()), abs=1e-6)
    assert all(torch.equal(now, then) for now, then in zip(part, before))
    assert not native.takes_estimate(Part(part.output.half(), part.lse), estimate)


def test_the_answer_does_not_depend_on_the_number_of_threads(level: str) -> None:
    queries, keys, values = qkv((2, 4, 128, 5000), torch.bfloat16)
    units = torch.randperm(312)[:200].sort().values.unsqueeze(0)
    for call in (
        lambda threads: native.attend_dense(queries, keys, values, 0.1, threads=threads),
        lambda threads: native.attend_units(queries, keys, values, units, 16, [(4992, 5000)], 0.1, threads=threads),
    ):
        one, two = call(1), call(2)
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q, k[..., :100], v[..., :100]), "invalid_tensor"),
        (lambda q, k, v: (q, k.half(), v.half()), "invalid_tensor"),
        (lambda q, k, v: (q, k, v[:, :3]), "invalid_tensor"),
        (lambda q, k, v: (q, k.transpose(0, 1), v.transpose(0, 1)), "invalid_tensor"),
        (lambda q, k, v: (q[:3], k, v), "invalid_tensor"),
        (lambda q, k, v: (q, torch.zeros(2, 4, 512), torch.zeros(2, 4, 512)), "invalid_tensor: 256"),
    ],
)
def test_what_the_core_cannot_read_is_refused(core: None, change, words: str) -> None:  # type: ignore[no-untyped-def]
    queries, keys, values = qkv((2, 2, 128, 20), torch.float32)
    with refused(words):
        native.attend_dense(*change(queries, keys, values), 0.1)


@pytest.mark.parametrize("softcap", [0.0, -1.0, torch.inf, torch.nan])
def test_a_cap_that_caps_nothing_is_refused(core: None, softcap: float) -> None:
    queries, keys, values = qkv((2, 2, 128, 20), torch.float32)
    with refused("invalid_value: None for no cap"):
        native.attend_dense(queries, keys, values, 0.1, softcap)


@pytest.mark.parametrize("wrong", [None, [[1.0]], torch.zeros(4, 128).numpy()], ids=["None", "list", "array"])
@pytest.mark.parametrize("place", ["queries", "keys", "values", "units"])
def test_what_is_no_tensor_is_refused_by_name(core: None, wrong: object, place: str) -> None:
    given: dict[str, object] = dict(zip(("queries", "keys", "values"), qkv((2, 2, 128, 20), torch.float32)))
    given["units"] = torch.tensor([[0]])
    given[place] = wrong
    with refused(f"invalid_tensor: {place}: {type(wrong).__name__} was given"):
        native.attend_units(**given, unit_size=16, spans=[], scale=0.1)  # type: ignore[arg-type]
    if place == "units":
        return
    del given["units"]
    with refused(f"invalid_tensor: {place}: {type(wrong).__name__} was given"):
        native.attend_dense(**given, scale=0.1)  # type: ignore[arg-type]
    if place == "values":
        return
    with refused(f"invalid_tensor: {place}: {type(wrong).__name__} was given"):
        native.scan(given["queries"], given["keys"], 3)  # type: ignore[arg-type]
