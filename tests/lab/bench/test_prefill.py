"""The prefill benchmarks in small, on a CPU: every variant is timed, and the tables say what was measured."""

from typing import Any

import pytest
import torch
from kvsift_lab.bench.bench import Bench
from kvsift_lab.bench.prefill import CEILING, PrefillLayerRecipe, PrefillRecipe, layer_table, point_text, ttft_table
from kvsift_lab.bench.prefill_measure import PrefillBench, PrefillLayerBench

QUOKA = "prefill=quoka:budget=160:chunk=128:dense_layers=none"
CRITI = "prefill=critiprefill:budget=160:segment=128:dense_layers=none"
CPU = torch.device("cpu")


def measured(bench: Bench) -> dict[str, Any]:
    return {**bench.head(), "points": list(bench.run())}


def test_first_tokens_are_timed_dense_sifted_and_without_attention() -> None:
    recipe = PrefillRecipe((512,), (QUOKA, CRITI), shape="tiny", chunks=(128, 256), repeats=2, device="cpu")
    result = measured(PrefillBench.of(recipe, torch.float32))
    variants = {each["name"]: each for each in result["points"][0]["variants"]}
    assert list(variants) == ["dense, chunks of 128", "dense, chunks of 256", QUOKA, CRITI, CEILING]
    assert all(len(each["ttft_s"]) == 2 and min(each["ttft_s"]) > 0 for each in variants.values())
    assert variants["dense, chunks of 128"]["density"] == 1
    assert variants[QUOKA]["density"] < 0.8
    assert "density" not in variants[CEILING]
    row = ttft_table(result).splitlines()[-1]
    assert row.startswith("| 512 |")
    assert row.count("x |") == 3
    assert "| 100.0% |" in point_text(result["points"][0])


def test_time_that_is_up_is_said() -> None:
    recipe = PrefillRecipe((512, 256), (QUOKA,), shape="tiny", chunks=(256,), device="cpu", max_seconds=0.0)
    points = list(PrefillBench.of(recipe, torch.float32).run())
    assert [point["context"] for point in points] == [256, 512]
    assert all("--max-seconds 0 had passed" in point["reason"] for point in points)
    assert "not measured" in point_text(points[0])


@pytest.mark.parametrize("whole", [True, False])
def test_one_layer_is_timed_against_dense_forms_that_agree(whole: bool) -> None:
    recipe = PrefillLayerRecipe((512,), (QUOKA,), 128, whole, 4, 2, 32, repeats=2)
    result = measured(PrefillLayerBench(recipe, CPU, torch.float32))
    point = result["points"][0]
    assert all("reason" not in each for each in point["variants"])
    assert len(point["variants"]) == (2 if whole else 5)
    assert point_text(point).count(" % |") == len(point["variants"])
    assert "| 1 sample |" in point_text({**point, "variants": [{"name": "bmm", "samples_s": [0.03]}]})
    pairs = 512 * 512 / 2 if whole else 128 * (512 + 64)
    assert point["flops"] == 4 * 4 * 32 * pairs
    assert layer_table(result).count("\n") == 1 + len(point["variants"])
