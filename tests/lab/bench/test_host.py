"""The host benchmark in small: variants of a part answer alike, floors count what is read, rounds are cold."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvsift_lab.bench.host import HostRecipe, point_text, ratios, times
from kvsift_lab.bench.host_measure import (
    AttentionInputs,
    HostBench,
    attention_inputs,
    native_variants,
    retrieval_variants,
    sketch_variants,
    torch_variants,
)
from kvsift_lab.bench.host_steps import LAYERS, step_variants
from kvsift_lab.bench.host_timing import cold_rounds
from kvsift_lab.bench.index_cases import synthetic
from kvsift_lab.bench.report import middle, quiet_rounds

from kvsift import native
from kvsift.indexes.flat import FlatIndex

needs_core = pytest.mark.skipif(not native.available(), reason=native.why_missing() or "the core is here")
TINY: dict[str, Any] = {
    "contexts": (512,), "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 32, "budget": 64, "tokens": (20,),
    "sketch_tokens": 24, "top": 10, "samples": 128, "repeats": 3, "cold_bytes": 1 << 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def layer() -> AttentionInputs:
    made = attention_inputs(synthetic("T", 520, 4, 2, 32, 8, 1), 16)  # 32 pages, and half of one
    return AttentionInputs(*(of.float() if isinstance(of, torch.Tensor) else of for of in made))  # type: ignore[arg-type]


def outputs(variants: Any) -> dict[str, list[torch.Tensor]]:
    found: dict[str, list[torch.Tensor]] = {}
    for each in variants:
        answer = each.run()
        tensor = answer[0] if isinstance(answer, tuple) else answer
        found.setdefault(each.part, []).append(tensor.reshape(4, -1))
    return found


@needs_core
def test_native_variants_answer_as_torch_does(layer: AttentionInputs) -> None:
    ours, theirs = outputs(native_variants(layer, 64, (20,))), outputs(torch_variants(layer, 64, (20,)))
    for part in ("dense", "pages", "20 tokens"):
        torch.testing.assert_close(ours[part][0], theirs[part][-1], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours["attention"][0], ours["pages"][0])


@needs_core
def test_a_retrieval_step_attends_what_the_search_found(layer: AttentionInputs) -> None:
    steps = {each.part: each for each in retrieval_variants(layer, FlatIndex.build(layer.keys), 10)}
    logits = torch.einsum("hgd,hnd->hgn", layer.grouped, layer.keys) * layer.scale
    best = logits.topk(10)
    values = (
        layer.values.unsqueeze(1).expand(-1, 2, -1, -1).gather(2, best.indices.unsqueeze(-1).expand(-1, -1, -1, 32))
    )
    expected = torch.einsum("hgk,hgkd->hgd", best.values.softmax(-1), values).flatten(0, 1)
    torch.testing.assert_close(steps["retrieval"].run()[0], expected, rtol=1e-3, atol=1e-4)  # type: ignore[index]
    assert steps["search"].num_bytes == layer.keys.numel() * 4  # a scan reads a key once for its group
    assert steps["retrieval"].num_bytes == steps["search"].num_bytes + 2 * 4 * 10 * 32 * 4


@needs_core
def test_floors_count_what_must_be_read(layer: AttentionInputs) -> None:
    found = {
        each.name: each.num_bytes for each in (*torch_variants(layer, 64, (20,)), *native_variants(layer, 64, (20,)))
    }
    keys_and_values, rows, selected = 2 * 2 * 520 * 32 * 4, 2 * 32 * 64 * 4, 2 * 2 * 64 * 32 * 4
    assert found["native dense"] == found["torch sdpa, enable_gqa"] == keys_and_values
    assert found["native pages per KV head"] == found["torch pages per KV head"] == rows + selected
    assert found["native pages per query head"] == rows + 2 * selected
    assert found["of it: page scores"] == rows
    assert found["native 20 tokens per query head"] == 2 * 4 * 20 * 32 * 4


@needs_core
@pytest.mark.parametrize("kind", ["sketch1", "sketch2"])
def test_a_step_by_sketches_is_near_dense_attention_and_nearer_than_its_tokens_alone(
    layer: AttentionInputs, kind: str
) -> None:
    runs: dict[str, Any] = {variant.name: variant.run for variant in sketch_variants(layer, 24)}
    whole = layer._replace(keys=layer.keys[:, :512], values=layer.values[:, :512])
    dense = native.attend_dense(layer.queries, whole.keys.contiguous(), whole.values.contiguous(), layer.scale)[0]
    ids, _, _ = runs[f"of it: choice by {kind}"]()
    assert ids.shape == (2, 24)
    alone = native.attend_units(layer.queries, layer.keys, layer.values, ids, 1, (), layer.scale)[0]
    assert float((runs[f"native {kind} per KV head"]() - dense).norm()) < 0.8 * float((alone - dense).norm())


@needs_core
def test_floors_of_sketches_count_rows_and_selected_tokens(layer: AttentionInputs) -> None:
    found = {each.name: each.num_bytes for each in sketch_variants(layer, 24)}
    rows, selected = {"sketch1": 160, "sketch2": 224}, 2 * 2 * 24 * 32 * 4  # bytes of a page of 16 tokens, 32 channels
    assert found == {
        name.format(kind): 2 * 32 * width + more
        for kind, width in rows.items()
        for name, more in (("native {} per KV head", selected), ("of it: choice by {}", 0))
    }


@needs_core
@pytest.mark.parametrize("context", [512, 520])  # half a page is left out
def test_steps_of_the_core_attend_what_their_plans_say(context: int) -> None:
    with torch.inference_mode():
        runs = dict(step_variants(HostRecipe(**TINY), context))
        visible = {}
        for name, run in runs.items():
            run()
            cache = run.args[1]
            visible[name] = [cache.stats.tally(i, "decode").report()["visible_tokens"] for i in range(LAYERS)]
    assert visible == {
        name: [tokens] * LAYERS
        for name, tokens in (("step, 64 tokens", 65), ("step, dense", 513), ("step, quest", 49), ("step, sketch", 44))
    }


@needs_core
def test_steps_are_left_out_and_named_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    (point,) = HostBench(HostRecipe(**TINY | {"index": "none"})).run()
    assert not [each for each in point["variants"] if each["part"] == "step"]
    (missing,) = point["missing"]
    assert missing.startswith("steps of the core: they need ")


@needs_core
def test_steps_whose_budget_is_too_small_are_left_out_and_named() -> None:
    (point,) = HostBench(HostRecipe(**TINY | {"index": "none", "budget": 16})).run()
    assert [each["name"] for each in point["variants"] if each["part"] == "pages"]
    (missing,) = point["missing"]
    assert missing.startswith("steps of the core: ")


def test_a_context_that_was_not_measured_says_why() -> None:
    assert point_text({"context": 512, "reason": "memory is short"}) == "512 tokens: memory is short\n"


@needs_core
def test_a_context_is_measured_and_told() -> None:
    bench = HostBench(HostRecipe(**TINY))
    (point,) = bench.run()
    assert bench.head()["level"] == native.level()
    assert all(len(each["samples_s"]) == 3 for each in point["variants"])
    assert len(point["bandwidth"]) == len(point["others"]) == 3
    assert point["missing"] == []
    text = point_text(point)
    assert "native dense is " in text
    assert "index auto, " in text
    assert {name for name, _, _ in ratios(point)} >= {
        "native dense", "retrieval step", "native pages per KV head", "native sketch1 per KV head", "step, sketch",
    }  # fmt: skip


def test_without_the_core_torch_is_measured_and_the_gap_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "why_missing", lambda: "no compiler")
    (point,) = HostBench(HostRecipe(**TINY)).run()
    assert {each["name"].split()[0] for each in point["variants"]} == {"torch"}
    assert point["missing"] == ["everything native: no compiler"]
    assert "no compiler" in point_text(point)


def test_rounds_take_every_variant_in_turn_and_measure_the_bandwidth_in_each() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    found = cold_rounds(runs, 4, 1 << 10, lambda: 7.0)
    assert order == [*"abcabc", *"abc", *"bca", *"cab", *"abc"]
    assert {name: len(samples) for name, samples in found.seconds.items()} == dict.fromkeys("abc", 4)
    assert found.bandwidth == [7.0] * 4
    assert len(found.others) == 4
    assert found.document()["bandwidth"] == [7.0] * 4


def test_the_second_of_two_runs_is_timed_where_they_follow_each_other() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    found = cold_rounds(runs, 2, 1 << 10, lambda: 7.0, again="b")
    assert order == [*"abab", *"abb", *"bba"]
    assert {name: len(samples) for name, samples in found.seconds.items()} == {"a": 2, "b": 2}


def test_medians_leave_out_rounds_in_which_others_worked() -> None:
    others = [0.0, 0.5, 0.02, 0.9, 0.04]
    assert quiet_rounds(others) == [0, 2, 4]
    assert middle([1, 50, 2, 50, 3], others) == 2
    assert quiet_rounds([0.0, 0.5, 0.5]) == [0, 1, 2]  # too few quiet ones: all count
    assert quiet_rounds([None, None, None]) == [0, 1, 2]


def test_times_and_ratios_come_from_the_samples() -> None:
    variants = [
        {"name": name, "part": "dense", "num_bytes": 10**6, "samples_s": [seconds] * 3}
        for name, seconds in (("native dense", 1e-3), ("torch bmm-softmax-bmm", 3e-3))
    ]
    others = [0.0] * 3
    point = {"context": 8192, "variants": variants, "bandwidth": [2e9] * 3, "others": others, "missing": []}
    assert times(point) == {"native dense": 1e-3, "torch bmm-softmax-bmm": 3e-3}
    ((name, other, factor),) = ratios(point)
    assert (name, other, pytest.approx(3)) == ("native dense", "torch bmm-softmax-bmm", factor)
    assert "| native dense | 1.000 | 0.500 | 50% |" in point_text(point)
    assert "8K tokens; 2 GB/s, 3 of 3 rounds were quiet and count" in point_text(point)
    assert "2 GB/s, 3 rounds; THE MACHINE WAS BUSY: others took 70% of it" in point_text({**point, "others": [0.7] * 3})
    assert "2 GB/s, 3 rounds\n" in point_text({**point, "others": [None] * 3})
