"""The attention benchmark on a CPU: what is compared is right, what cannot run is named, floors count the bytes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from timeit import timeit
from typing import Any

import pytest
import torch
from kvsift_lab.bench import attention_measure, attention_variants
from kvsift_lab.bench.attention import NOT_EARLY, AttentionRecipe
from kvsift_lab.bench.attention_measure import AttentionBench, check_sketch, check_sparse, exact_attention
from kvsift_lab.bench.attention_variants import AttentionPoint, Buffers, SparseLaunch, ours_dense
from kvsift_lab.bench.timing import Launch, Timer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

CPU = torch.device("cpu")
SMALL = AttentionRecipe(
    shapes=((4, 2),), contexts=(512, 128), batch=2, head_dim=32, page_size=8, budget=192, sketch_budget=160, repeats=2,
    breakdown=True,
)  # fmt: skip
LLAMA = {"batch": 1, "head_dim": 128, "page_size": 16, "budget": 2048}


@pytest.fixture(autouse=True)
def few_buffers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_variants, "COLD_BYTES", 1 << 17)
        yield


def measured(recipe: AttentionRecipe = SMALL) -> list[dict[str, Any]]:
    def clock(run: Launch, num_sets: int) -> Timer:
        return lambda: sum(timeit(partial(run, number), number=1) for number in range(num_sets)) / num_sets

    return list(AttentionBench(recipe, clock, CPU).run())


def test_every_variant_of_every_point_is_timed_and_right_or_left_out_with_its_reason() -> None:
    points = measured()
    assert [point["context"] for point in points] == [128, 512]
    for point in points:
        variants = {variant["name"]: variant for variant in point["variants"]}
        assert set(variants) == {
            "quest-minmax", "quest-minmax_fp8", "sketch-bits1", "sdpa-flash", "sdpa-cudnn", "flashinfer",
            "flashinfer-tc", "ours-dense",
        }  # fmt: skip
        for variant in variants.values():
            assert ("reason" in variant) != ("samples_s" in variant)
            assert "timer" not in variant
            if "samples_s" in variant:
                assert len(variant["samples_s"]) == SMALL.repeats
                assert variant["error"] < 0.01
        timed = {name for name, variant in variants.items() if "samples_s" in variant}
        assert {"quest-minmax", "quest-minmax_fp8", "sketch-bits1", "ours-dense"} <= timed
        assert variants["quest-minmax"]["same_pages"] == variants["sketch-bits1"]["same_tokens"] == 1
        assert "flashinfer" in variants["flashinfer"]["reason"]
        assert {piece["name"] for piece in point["breakdown"]} == {
            "score_pages", "visible_pages", "page_attention", NOT_EARLY,
        }  # fmt: skip
    assert points[1]["visible_tokens"] == 192


def test_a_variant_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(point: AttentionPoint, sets: Any) -> Any:
        right = ours_dense(point, sets)
        return lambda number: right(number) * 1.2

    def broken(point: AttentionPoint, sets: Any) -> Any:
        raise NotImplementedError("no kernel for this\nat all")

    monkeypatch.setattr(attention_measure, "BASELINES", {"ours-dense": {"wrong": wrong, "broken": broken}})
    variants = measured(replace(SMALL, contexts=(128,), baselines=("ours-dense",)))[0]["variants"]
    assert variants[-2]["reason"] == "its output is 0.2 away from float32's"
    assert variants[-1]["reason"] == "no kernel for this"
    assert not any("samples_s" in variant for variant in variants[-2:])


def test_sketches_that_choose_other_tokens_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_measure, "check_sketch", lambda *_: {"error": 0.0, "same_tokens": 0.9})
    variants = measured(replace(SMALL, contexts=(128,)))[0]["variants"]
    sketch = next(variant for variant in variants if variant["name"] == "sketch-bits1")
    assert sketch["reason"] == "10.0% of its tokens are not the reference's"
    assert "samples_s" not in sketch


def buffers(point: AttentionPoint) -> list[Buffers]:
    return [Buffers.random(point, ["minmax"], CPU, seed) for seed in (0, 1)]


SMALL_POINT = AttentionPoint(6, 2, 256, batch=2, head_dim=32, page_size=8, budget=128)


def test_exact_attention_over_all_pages_listed_is_exact_dense_attention() -> None:
    everything = replace(SMALL_POINT, budget=256)
    one = buffers(everything)[0]
    pages = torch.arange(32, dtype=torch.int32).expand(2, 2, -1)
    listed = exact_attention(everything, one, pages, torch.full((2, 2), 32))
    torch.testing.assert_close(listed, exact_attention(everything, one))
    fewer = exact_attention(everything, one, pages, torch.full((2, 2), 31))
    assert not torch.allclose(listed, fewer)
    for row in range(2):
        grouped = one.queries[row].float().unflatten(0, (2, 3))
        dense = scaled_dot_product_attention(grouped, *(tensor.float() for tensor in one.kv.row(row)))
        torch.testing.assert_close(listed[row], dense.flatten(0, 1))


def test_other_pages_than_the_reference_s_are_noticed() -> None:
    sets = buffers(SMALL_POINT)

    class Shifted(SparseLaunch):
        """Shows the page behind the last it should have chosen, or in front of it."""

        def __call__(self, number: int) -> Tensor:
            output = super().__call__(number)
            chosen = self.units[0, 0]
            free = sorted(set(range(1, 24)) - set(chosen.tolist()))
            chosen[1] = free[0]
            chosen.copy_(chosen.sort().values)
            return output

    right = check_sparse(SMALL_POINT, sets, SparseLaunch(SMALL_POINT, sets, "minmax"))
    assert (right["same_pages"], right["score_gap"]) == (1.0, 0.0)
    wrong = check_sparse(SMALL_POINT, sets, Shifted(SMALL_POINT, sets, "minmax"))
    assert wrong["same_pages"] == 1 - 1 / 64  # four lists of 16 pages
    assert wrong["score_gap"] > 0
    assert wrong["error"] > right["error"]


def test_other_tokens_than_the_reference_s_are_noticed() -> None:
    point = replace(SMALL_POINT, sketch_budget=100)
    sets = [Buffers.random(point, ["sketch2"], CPU, seed) for seed in (0, 1)]

    class Shifted(SparseLaunch):
        """Shows a token that it has not chosen."""

        def __call__(self, number: int) -> Tensor:
            output = super().__call__(number)
            chosen = self.units[0, 0]
            chosen[50] = min(set(range(4, 190)) - set(chosen.tolist()))
            return output * 1.1

    right = check_sketch(point, sets, SparseLaunch(point, sets, "sketch2"))
    assert (right["same_tokens"], right["launches"]) == (1.0, 7)
    assert right["error"] < 0.01
    wrong = check_sketch(point, sets, Shifted(point, sets, "sketch2"))
    assert wrong["same_tokens"] == 1 - 1 / 400  # four lists
    assert wrong["error"] > 0.09


@pytest.mark.parametrize(
    ("heads", "context", "summary_mb", "kv_mb"),
    [(32, 32768, 33.6, 33.6), (32, 131072, 134.2, 33.6), (8, 131072, 33.6, 8.4), (8, 524288, 134.2, 8.4)],
)
def test_floors_are_those_of_the_bytes_that_must_move(
    heads: int, context: int, summary_mb: float, kv_mb: float
) -> None:
    point = AttentionPoint(32, heads, context, **LLAMA)
    assert point.counted[1] * 16 == 2048
    assert point.summary_bytes("minmax") / 1e6 == pytest.approx(summary_mb, rel=0.01)  # all but sinks and window
    assert point.sparse_bytes("minmax") - point.summary_bytes("minmax") == pytest.approx(kv_mb * 1e6, rel=0.01)
    assert 2 * point.summary_bytes("minmax_fp8") == point.summary_bytes("minmax")
    assert point.dense_bytes == 2 * heads * context * 128 * 2
