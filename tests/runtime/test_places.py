"""Where KV may live, how that is written, and what it rules out."""

from __future__ import annotations

import pytest
import torch

from kvsift.errors import InputError
from kvsift.placement.device import DeviceStore
from kvsift.placement.offload import OffloadStore
from kvsift.placement.split import SplitStore
from kvsift.runtime.places import Place, reason_against
from kvsift.runtime.spec import parse_plan
from kvsift.types import LayerShape

SHAPE = LayerShape(0, 4, 2, 8, 1.0)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("device", Place()),
        ("split", Place("split")),
        ("split:host_values=int8", Place("split", "int8")),
        ("offload:device_cache=4096:host_values=int8", Place("offload", "int8", 4096)),
        (Place("offload", device_cache=7), Place("offload", device_cache=7)),
    ],
)
def test_a_place_is_written_as_a_plan_is(text: str | Place, place: Place) -> None:
    assert Place.of(text) == place
    assert Place.of(str(place)) == place


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ofload", "unknown placement 'ofload'.*offload"),
        ("split:host_value=int8", "unknown knob of a placement 'host_value'.*host_values"),
        ("split:host_values=int4", "unknown host_values 'int4'"),
        ("device:host_values=int8", "host_values=int8 is of placement=split and placement=offload"),
        ("split:device_cache=5", "device_cache=5 is of placement=offload"),
        ("offload:device_cache=0", "device_cache=0 must be a number of tokens"),
        ("offload:device_cache=", "device_cache='' must be a number of tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Place.of(text)


@pytest.mark.parametrize("placement", ["split", "offload", Place("offload", "int8")])
def test_a_sparse_prefill_needs_its_kv_on_the_device(placement: str | Place) -> None:
    plan = parse_plan("prefill=quoka:budget=512")
    assert "prefill is dense. Leave the prefill rule out" in str(reason_against(placement, plan))
    assert reason_against(placement, parse_plan("prefill=dense,decode=quest:budget=512")) is None
    assert reason_against("device", plan) is None
    assert reason_against("host", plan) is None


def test_every_place_has_its_store() -> None:
    made = {
        name: Place.of(name).new_store(SHAPE, 1, 4, torch.empty(0), ["minmax"], 0)
        for name in ("device", "host", "split:host_values=int8", "offload:device_cache=5")
    }
    assert [type(store) for store in made.values()] == [DeviceStore, DeviceStore, SplitStore, OffloadStore]
    assert made["split:host_values=int8"].values.dtype == torch.int8
    assert made["offload:device_cache=5"].cache.tokens == 5  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="placement=host keeps the model on the CPU, and this one is on meta"):
        Place("host").new_store(SHAPE, 1, 4, torch.empty(0, device="meta"), [], 0)


def test_packed_values_take_half_of_16_bits_and_a_scale() -> None:
    assert Place("split", "int8").value_share(128, torch.bfloat16) == 132 / 256
    assert Place("split", "int8").value_share(128, torch.float32) == 132 / 512
    assert Place("split").value_share(128, torch.bfloat16) == 1


def test_an_index_of_host_memory_is_refused_before_a_gpu_reads_anything() -> None:
    plan = parse_plan("retrieval_attention:index=flat")
    assert Place().reason_against(plan) is None
    assert "Take placement=split, or device=cpu" in str(Place().reason_against(plan, on_gpu=True))
    assert Place("split").reason_against(plan, on_gpu=True) is None


def test_dropping_while_reading_needs_no_second_hint() -> None:
    plan = parse_plan("both=h2o:evict=true")
    for name in ("split", "offload"):
        assert "or take a rule of decode without evict" in str(Place(name).reason_against(plan))
