"""Segments of a chunk chosen and attended together answer as one by one, and count the same."""

import pytest
import torch

from kvsift.layer.accounting import RunStats
from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.methods.segment_batch import SegmentRequests, SegmentSelections
from kvsift.plan.syntax import parse_plan
from kvsift.types import Chunk, LayerShape

PLANS = [
    "quoka:budget=200:chunk=64:window=16:sinks=4:queries=8:dense_layers=none",
    "quoka:budget=200:chunk=64:window=16:mode=max_of_mean_exact:queries=8:dense_layers=none",
    "quoka:budget=200:chunk=64:window=16:score=dot:reduce=mean:queries=8:dense_layers=none",
    "quoka:budget=200:chunk=64:window=16:queries=8:prefilter=2:dense_layers=none",
    "critiprefill:budget=192:segment=64:block=16:page_size=8:window=16:dense_layers=none",
    "critiprefill:budget=192:segment=64:block=16:page_size=8:window=16:estimator=paper:dense_layers=none",
    "critiprefill:budget=192:segment=64:block=16:page_size=8:window=16:estimator=bound:fusion=false:dense_layers=none",
    "oracle_tokens:budget=192:window=16:dense_layers=none",
]
LAYERS = 2
CHUNKS = [300, 400, 137, 64]  # the second and the fourth begin inside a segment


def answers(plan: str, together: bool, device: str) -> tuple[torch.Tensor, dict[str, object]]:
    """Of two layers one above the other, over several chunks."""
    generator = torch.Generator().manual_seed(1)
    stats, relay = RunStats(0), LayerMessages()
    layers = []
    for layer in range(LAYERS):
        shape = LayerShape(layer, 4, 2, 32, 32**-0.5)
        attention = SparseAttention(
            shape, parse_plan(f"prefill={plan}"), 1, torch.empty(0, device=device), stats, messages=relay
        )
        attention.joins = together
        layers.append(attention)
    outputs = []
    for size in CHUNKS:
        for attention in layers:
            drawn = (torch.randn(1, heads, size, 32, generator=generator) for heads in (4, 2, 2))
            queries, keys, values = (each.to(device) for each in drawn)
            outputs.append(attention.attend(Chunk(2 * queries, keys, values, [size])))
    return torch.cat(outputs, 2), stats.report()["phases"]["prefill"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_together_as_one_by_one(plan: str, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    (one, counted), (other, also) = (answers(plan, together, device) for together in (False, True))
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    assert counted["density"] < 1
    for key in ("queries", "sparse_queries", "visible_tokens", "density", "kv_bytes_dense"):
        assert also[key] == pytest.approx(counted[key]), key
    assert also["kv_bytes_read"] <= counted["kv_bytes_read"]  # what is read once for all segments counts once


@pytest.mark.parametrize("plan", PLANS[:3] + PLANS[4:7])
def test_no_segment_is_asked_for_alone_by_methods_that_select_for_all(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (SegmentRequests, SegmentSelections):
        monkeypatch.setattr(name, "_each", property(lambda self: pytest.fail("the host makes one for every segment")))
    answers(plan, True, "cpu")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("position", [512, 650, 836])  # of the second chunk and of the third
def test_keys_and_values_from_a_position_on_change_nothing_before_it(plan: str, position: int) -> None:
    outputs = []
    for noise in (0.0, 3.0):
        generator, other = torch.Generator().manual_seed(2), torch.Generator().manual_seed(3)
        queries, keys, values = (torch.randn(1, heads, 900, 32, generator=generator) for heads in (4, 2, 2))
        for pool in (keys, values):
            pool[:, :, position:] += noise * torch.randn(1, 2, 900 - position, 32, generator=other)
        layer = SparseAttention(LayerShape(0, 4, 2, 32, 32**-0.5), parse_plan(f"prefill={plan}"), 1, keys, RunStats(0))
        layer.joins = True
        parts = [
            layer.attend(Chunk(queries[:, :, a:b], keys[:, :, a:b], values[:, :, a:b], [b - a]))
            for a, b in ((0, 300), (300, 700), (700, 900))
        ]
        outputs.append(torch.cat(parts, 2)[:, :, :position])
    assert torch.equal(*outputs)
