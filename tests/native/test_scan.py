"""Search by scanning, over keys and over codes, against brute force."""

from __future__ import annotations

import random

import pytest
import torch
from refusals import refused
from torch import Tensor
from turns import in_turns

from kvsift import native
from kvsift.native import Codes, twins


def whole(*shape: int) -> Tensor:
    """Small whole numbers: products are exact, ties are ties."""
    return torch.randint(-3, 4, shape).float()


def recall(found: Tensor, expected: Tensor) -> float:
    hits = sum(len(set(a) & set(b)) for a, b in zip(found.tolist(), expected.tolist()))
    return hits / expected.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("dim", "group"), in_turns([64, 80, 96, 128, 256], [4, 1, 2, 5, 8]))
def test_scan_finds_what_brute_force_finds(level: str, dim: int, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim + group)
    for n, k in ((0, 3), (1, 1), (3, 5), (17, 17), (1000, 100)):
        keys, queries = whole(2, n + 3, dim).to(dtype)[:, 1 : n + 1], whole(2 * group, dim).to(dtype)
        ids, scores = native.scan(queries, keys, k)
        expected_ids, expected = twins.scan(queries, keys, k)
        assert torch.equal(ids, expected_ids)
        assert torch.equal(scores, expected)
        assert torch.equal(native.all_scores(queries, keys), twins.all_scores(queries, keys))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scores_of_any_numbers_are_float32_products(level: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys, queries = torch.randn(2, 5000, 128).to(dtype), torch.randn(8, 128)  # float32 queries, also over bf16 keys
    ids, scores = native.scan(queries, keys, 50)
    _, expected = twins.scan(queries, keys, 50)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-4)
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    products = (queries.unflatten(0, (2, 4)) @ keys.float().mT).flatten(0, 1)
    torch.testing.assert_close(scores, products.gather(1, ids), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(native.all_scores(queries, keys), products, rtol=1e-5, atol=1e-4)


def test_random_sizes_and_duplicate_keys(level: str) -> None:
    rng = random.Random(7)
    for trial in range(150):
        torch.manual_seed(trial)
        heads, group, dim = rng.choice([1, 2]), rng.choice([1, 3, 4]), rng.choice([8, 16, 40, 64])
        n, k = rng.choice([0, 1, 2, 31, 33, 600, 4700]), rng.choice([0, 1, 5, 100, 700])
        keys, queries = whole(heads, n, dim), whole(heads * group, dim)
        if n > 2:
            keys[:, rng.randrange(n) :] = keys[:, :1]  # many equal scores
        ids, scores = native.scan(queries, keys, k)
        expected_ids, expected = twins.scan(queries, keys, k)
        assert torch.equal(ids, expected_ids)
        assert torch.equal(scores, expected)
        # everything fetched: codes only order the candidates
        code_ids, code_scores = native.scan_codes(queries, Codes.of(keys), keys, k, overfetch=max(1.0, n / max(k, 1)))
        assert torch.equal(code_ids, expected_ids)
        assert torch.equal(code_scores, expected)


def test_answers_do_not_depend_on_the_number_of_threads(level: str) -> None:
    torch.manual_seed(0)
    keys, queries = torch.randn(2, 9000, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    codes = Codes.of(keys)
    for call in (
        lambda threads: native.scan(queries, keys, 100, threads=threads),
        lambda threads: native.scan_codes(queries, codes, keys, 100, threads=threads),
        lambda threads: [native.all_scores(queries, keys, threads=threads)] * 2,
    ):
        one, two = call(1), call(2)
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])


def outlier_keys(n: int) -> tuple[Tensor, Tensor]:
    """Keys with four channels 20 times as large as the others and one far from zero; queries of every channel."""
    torch.manual_seed(9)
    keys, queries = torch.randn(2, n, 128), torch.randn(8, 128)
    keys[..., [3, 40, 77, 100]] *= 20
    keys[..., 5] += 50
    return queries.bfloat16(), keys.bfloat16()


def test_codes_keep_the_best_where_few_channels_are_large(level: str) -> None:
    queries, keys = outlier_keys(20000)
    codes = Codes.of(keys)
    for k in (100, 1000):
        expected, _ = native.scan(queries, keys, k)
        assert recall(native.scan_codes(queries, codes, keys, k)[0], expected) >= 0.999
        assert recall(native.scan_codes(queries, codes, keys, k, overfetch=1.0)[0], expected) > 0.9
    assert codes.nbytes < 1.1 * keys.numel()


def test_all_levels_find_the_same_candidates(core: None) -> None:
    queries, keys = outlier_keys(5000)
    codes, before, found = Codes.of(keys), native.level(), []
    for name in native.levels():
        native.use_level(name)
        found.append(native.scan_codes(queries, codes, keys, 100, overfetch=1.0)[0].sort().values)
    native.use_level(before)
    assert all(torch.equal(ids, found[0]) for ids in found)


def test_codes_grow_shrink_and_fork(core: None) -> None:
    torch.manual_seed(3)
    keys, queries = torch.randn(2, 3000, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    keys[:, 1500:] *= 3  # outside the range of the first: coded anew
    codes = Codes.of(keys[:, :1000])
    for n in (1001, 1002, 1017, 1500, 1501, 3000):
        codes.extend(keys[:, :n])
        expected, _ = native.scan(queries, keys[:, :n], 100)
        assert recall(native.scan_codes(queries, codes, keys[:, :n], 100)[0], expected) >= 0.99
    fork = codes.fork()
    codes.crop(700)
    changed = torch.cat([keys[:, :700], -keys[:, :50]], 1)
    codes.extend(changed)
    assert recall(native.scan_codes(queries, codes, changed, 100)[0], native.scan(queries, changed, 100)[0]) >= 0.99
    assert recall(native.scan_codes(queries, fork, keys, 100)[0], native.scan(queries, keys, 100)[0]) >= 0.99
    with refused("invalid_tensor"):
        native.scan_codes(queries, codes, keys, 5)
    with refused("invalid_tensor"):
        codes.extend(keys[:, :5])


def test_a_key_that_is_no_number_is_never_first(level: str) -> None:
    torch.manual_seed(0)
    keys, queries = torch.randn(1, 2000, 64), torch.randn(2, 64)
    keys[0, 500:1500] = torch.nan
    ids, _ = native.scan(queries, keys, 100)
    assert not ((ids >= 500) & (ids < 1500)).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("joins", ["at first", "later", "alone"])
def test_codes_of_other_keys_outlive_one_that_is_infinite(core: None, bad: float, joins: str) -> None:
    torch.manual_seed(0)
    keys, queries = torch.randn(1, 2000, 64), torch.randn(2, 64)
    keys[0, 1000, 7] = bad
    codes = Codes.of(keys[:, {"at first": slice(None), "later": slice(500), "alone": slice(1000, 1001)}[joins]])
    if joins == "alone":
        codes.crop(0)
    codes.extend(keys)
    assert codes.centre.isfinite().all()
    assert codes.scale.isfinite().all()
    finite = keys.clone()
    finite[0, 1000] = 0
    for overfetch in (1.0, 1.5):
        ids = native.scan_codes(queries, codes, finite, 100, overfetch=overfetch)[0]
        assert recall(ids, native.scan(queries, finite, 100)[0]) >= (0.9 if overfetch == 1 else 0.98)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_queries_that_rank_nothing_are_refused(core: None, bad: float) -> None:
    queries = torch.ones(2, 64)
    queries[1, 7] = bad
    keys = torch.zeros(1, 5, 64)
    with refused("not_finite: NaN or infinity"):
        native.scan(queries, keys, 3)
    with refused("not_finite: NaN or infinity"):
        native.scan_codes(queries, Codes.of(keys), keys, 3)


def test_scores_of_a_query_without_numbers_are_none(level: str) -> None:
    queries = torch.randn(4, 64)
    queries[1, 3] = torch.nan
    scores = native.all_scores(queries, torch.randn(2, 100, 64))
    assert scores.isnan().any(1).tolist() == [False, True, False, False]
