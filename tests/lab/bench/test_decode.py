"""The decode benchmark on a CPU, its steps run as they are: same pools, counted bytes, reasons."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kvsift_lab.bench import machine
from kvsift_lab.bench.decode import DecodeRecipe
from kvsift_lab.bench.decode_case import DecodeCase, filled_caches, pool_bytes, weight_bytes
from kvsift_lab.bench.decode_case import decode as decode_rows
from kvsift_lab.bench.decode_measure import DecodeBench, step_of
from kvsift_lab.bench.random_models import random_model
from models.quantized_files import stay_everywhere
from models.tiny import tiny

from kvsift.errors import InputError
from kvsift.models.fused_step import FusedStep
from kvsift.models.scaled_linear import ScaledLinear
from kvsift.plan.placement import Placement
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan

CPU = torch.device("cpu")
QUEST = "quest:budget=128:window=16:score_by=minmax_fp8"
SMALL = DecodeRecipe("tiny", contexts=(512, 256), batches=(1, 3), plan=QUEST, steps=3, repeats=2)
PLAN = parse_plan(QUEST)


def run(recipe: DecodeRecipe, model: Any) -> Iterator[dict[str, Any]]:
    return DecodeBench(recipe, model, step_of(model), capture=False).run()


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("tiny", torch.device("cpu"), torch.float32)


def test_both_plans_are_sampled_at_every_point(model: Any) -> None:
    points = list(run(SMALL, model))
    assert [(point["batch"], point["context"]) for point in points] == [(1, 256), (1, 512), (3, 256), (3, 512)]
    for point in points:
        dense, sifted = point["variants"]
        assert (dense["name"], sifted["name"]) == ("dense", "sifted")
        for variant in (dense, sifted):
            assert len(variant["tpot_s"]) == SMALL.repeats
            assert all(seconds > 0 for seconds in variant["tpot_s"])
            assert variant["bytes"] == point["weight_bytes"] + variant["kv_bytes"]
        assert dense["density"] == 1
        assert sifted["density"] < 1


def test_bytes_of_a_step_are_those_of_weights_and_of_what_was_seen(model: Any) -> None:
    dense, sifted = next(iter(run(SMALL, model)))["variants"]
    config, per_token = model.config, 2 * 2 * 64 * 4  # of a layer: keys and values, KV heads, head_dim, float32
    embedding = config.vocab_size * config.hidden_size
    assert weight_bytes(model) == 4 * (sum(weight.numel() for weight in model.parameters()) - embedding)
    lengths = [256 + step for step in (1, 2, 3)]
    assert dense["kv_bytes"] == pytest.approx(3 * per_token * sum(lengths) / 3)
    # layers 0 and 1 show everything, layer 2 at most the budget, after scoring a byte per number of 14 or 15 pages
    seen = sifted["kv_bytes"] - 2 * per_token * sum(lengths) / 3
    assert 100 * per_token < seen < 128 * per_token + 15 * 2 * 128


def test_rounded_weights_count_with_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_everywhere(monkeypatch, stays=True)
    plain, model = (random_model("tiny", CPU, torch.bfloat16, quantize=quantize) for quantize in (None, "fp8"))
    before = weight_bytes(plain)
    linears = [module for module in model.modules() if isinstance(module, ScaledLinear)]
    saved = sum(module.values.numel() - 4 * module.out_features for module in linears)
    assert len(linears) == 7 * model.config.num_hidden_layers
    assert weight_bytes(model) == before - saved
    points = [point for point in run(replace(SMALL, contexts=(256,), batches=(2,)), model) if "variants" in point]
    assert points[0]["weight_bytes"] == before - saved
    with pytest.raises(InputError, match="unknown quantize 'int3'"):
        replace(SMALL, quantize="int3")


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("plan", [PLAN, parse_plan("sketch:budget=64:sinks=4:window=16")], ids=str)
def test_a_context_full_of_random_numbers_is_decoded_from_its_end(plan: Plan, kv_dtype: str, model: Any) -> None:
    place = Placement(kv_dtype=kv_dtype)
    caches = filled_caches(model, plan, 256, 2, 4, place)
    assert caches[0].num_bytes <= 1.1 * pool_bytes(model.config, plan, 256, 2, 4, model.dtype, place)
    case = DecodeCase.of(model, FusedStep(model), caches, plan, capture=False)
    for _ in range(2):  # the second time begins where the first began
        seconds, tallies, tokens = decode_rows(case, 256, 4)
        assert min(seconds) > 0
        assert [len(row) for row in tokens] == [5, 5]
        assert [tally.context_tokens for tally in tallies] == [3 * (257 + 258 + 259 + 260)] * 2
        assert all(tally.sparse_queries == 4 for tally in tallies)
    assert torch.isfinite(caches[0].attentions[0].store.keys.float()).all()


def test_pools_of_a_hybrid_are_counted_by_layer() -> None:
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32}
    model = tiny("Gemma4", **windows, num_hidden_layers=4, global_head_dim=64, hidden_size_per_layer_input=0)
    held = filled_caches(model, PLAN, 256, 2, 4)[0].num_bytes
    assert 0.9 * held < pool_bytes(model.config, PLAN, 256, 2, 4, model.dtype) < 1.2 * held
    point = next(iter(run(replace(SMALL, contexts=(256,), batches=(1,)), model)))
    assert [variant["name"] for variant in point["variants"]] == ["dense", "sifted"]


def test_time_that_has_run_out_and_pools_that_do_not_fit_are_said(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    late = replace(SMALL, max_seconds=0.0)
    assert {point["reason"] for point in run(late, model)} == {"--max-seconds 0 had passed"}
    monkeypatch.setattr(machine, "available_bytes", lambda device: 1 << 20)
    reasons = [point.get("reason", "") for point in run(SMALL, model)]
    assert reasons[-1].startswith("its pools need 0.0 GiB")
