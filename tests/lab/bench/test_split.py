"""The benchmark of KV in host memory: what it refuses, what it reports, and how busy time is counted."""

from typing import Any

import pytest
import torch
from kvsift_lab.bench import split_measure
from kvsift_lab.bench.split import SplitRecipe, point_text
from kvsift_lab.bench.split_measure import SplitBench, layer_bytes, require_host_memory, shared_bytes
from kvsift_lab.bench.timeline import overlap, summary, union
from refusals import refused

from kvsift import InputError, native
from kvsift.plan.placement import Placement

GIB = 1 << 30
CPU = torch.device("cpu")


def test_busy_time_is_counted_once() -> None:
    kernels = [(5.0, 9.0), (0.0, 4.0), (3.0, 6.0), (20.0, 21.0)]  # two streams at once
    assert union(kernels) == [(0.0, 9.0), (20.0, 21.0)]
    host = [(2.0, 3.0), (8.0, 12.0), (20.5, 30.0)]
    assert overlap(host, kernels) == pytest.approx(1 + 1 + 0.5)
    assert overlap(kernels, host) == pytest.approx(2.5)
    assert overlap([], kernels) == 0
    told = summary(host, kernels)
    assert {key: told[key] for key in ("host_s", "device_s", "both_s")} == pytest.approx(
        {"host_s": 14.5e-6, "device_s": 10e-6, "both_s": 2.5e-6}
    )
    assert told["timeline_us"][:3] == [["device", 0.0, 4.0], ["host", 2.0, 3.0], ["device", 3.0, 6.0]]


def test_a_million_tokens_of_llama_3_8b_are_128_gib() -> None:
    shape = split_measure.SHAPES["llama-3-8b"]
    layer = layer_bytes(shape, 1 << 20, Placement("split"), ("flat",))
    assert 32 * layer == 128 * GIB  # 128 KiB per token
    assert layer_bytes(shape, 1 << 20, Placement("split", host_values="int8"), ("flat",)) == layer * (256 + 132) / 512
    assert layer_bytes(shape, 1 << 20, Placement("split"), ("flat_int8", "flat", "quest")) == 1.25 * layer
    assert layer_bytes(shape, 1 << 20, Placement("offload"), ("offload",)) == layer, "summaries are not there"
    assert shared_bytes(shape, 1 << 20, ("graph",)) == GIB
    assert shared_bytes(shape, 1 << 20, ("ivf", "graph")) == 8 * GIB


@pytest.mark.parametrize(
    ("layers", "values", "message"),
    [
        (None, "model", "not_enough_memory: --layers 31, --host-values int8"),
        (None, "int8", None),
        (16, "model", None),
        (31, "model", None),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_host_is_refused(layers: int | None, values: Any, message: str | None) -> None:
    given = "llama-3-8b", layers, 1 << 20, Placement("split", host_values=values), ("flat",), 125 * GIB
    if message is None:
        require_host_memory(*given)
        return
    with refused(message):
        require_host_memory(*given)


@pytest.mark.skipif(not native.available(), reason="the compiled core is missing")
@pytest.mark.parametrize("values", ["model", "int8"])
def test_every_kind_is_measured_with_its_bytes(values: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*given: Any) -> None:
        raise InputError("faiss is not installed.")

    monkeypatch.setattr(split_measure.IVFIndex, "build", missing)
    kinds = ("flat", "graph", "ivf", "quest", "offload", "sketch", "sketch_device", "dense")
    recipe = SplitRecipe((1024,), kinds, "tiny", tokens=1, layers=2, host_values=values, device="cpu")
    (point,) = SplitBench.of(recipe, torch.float32).run()
    found = {each["name"]: each for each in point["variants"]}
    assert set(found) == set(kinds)
    text = point_text(point)
    assert "ivf: not measured, faiss is not installed." in text
    assert text.count(" GiB |") == len(kinds) - 1
    assert "; the same tokens as on the device" in text
    assert found.pop("ivf") == {"name": "ivf", "reason": "faiss is not installed."}
    assert found["sketch"]["same_tokens"]
    for name in ("sketch", "sketch_device"):
        each = found.pop(name)
        assert len(each["samples_s"]) == 2
        assert each["visible_tokens"] == 128
        assert each["bus_bytes"] == 0, "nothing is between a CPU and its memory"
        assert each["chunk_s"] > 0
    for each in found.values():
        assert len(each["samples_s"]) == 1
    token = 2 * 2 * (64 * 4 + (64 * 4 if values == "model" else 64 + 4))  # of two layers with two KV heads
    assert found["flat"]["kv_bytes"] == token * 1280  # 1024 tokens, and room for 256
    assert found["flat"]["kv_bytes_on_device"] < found["offload"]["kv_bytes_on_device"]
    assert found["dense"]["kv_bytes_on_device"] == found["dense"]["kv_bytes"] == 2 * 2 * 2 * 64 * 4 * 1280
    assert 0 < found["offload"]["device_cache_hits"] < 1
    assert found["quest"]["device_cache_hits"] is None
    assert found["offload"]["bytes_copied"] > 0
