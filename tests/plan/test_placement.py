"""Where KV may live, how that is written, and what it rules out."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from contracts.harness import answers, assert_same_answer, draw_tokens
from refusals import refused

from kvsift.errors import InputError
from kvsift.plan.capabilities import check_placement
from kvsift.plan.placement import Placement
from kvsift.plan.syntax import parse_plan
from kvsift.stores.base import Store
from kvsift.stores.catalogue import STORES
from kvsift.stores.offload import OffloadStore
from kvsift.stores.paged import HostStore, PagedStore
from kvsift.stores.split import SplitStore
from kvsift.types import LayerShape

SHAPE = LayerShape(0, 4, 2, 8, 1.0)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("device", Placement()),
        ("split", Placement("split")),
        ("split:host_values=int8", Placement("split", host_values="int8")),
        ("offload:device_cache=4096:host_values=int8", Placement("offload", host_values="int8", device_cache=4096)),
        (Placement("offload", device_cache=7), Placement("offload", device_cache=7)),
    ],
)
def test_a_place_is_written_as_a_plan_is(text: str | Placement, place: Placement) -> None:
    assert Placement.of(text) == place
    assert Placement.of(str(place)) == place


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ofload", "unknown_name: 'ofload'; did you mean 'offload'?"),
        ("split:host_value=int8", "unknown_name: of a placement 'host_value'; did you mean 'host_values'?"),
        ("split:host_values=int4", "unknown_name: 'int4'; did you mean 'int8'?"),
        ("device:host_values=int8", "unused_option: placement=split and placement=offload"),
        ("split:device_cache=5", "unused_option: placement=offload"),
        ("offload:device_cache=0", "invalid_value: device_cache=0"),
        ("offload:device_cache=many", "invalid_value: device_cache='many'"),
        ("offload:device_cache=", "invalid_value: device_cache=''"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, message: str) -> None:
    with refused(message):
        Placement.of(text)


def opened(placement: str | Placement, like: torch.Tensor) -> Store:
    place = Placement.of(placement)
    return place.store(SHAPE, 1, 4, like, ["minmax"], **dict(place.knobs))


def test_every_placement_has_its_store() -> None:
    names = ("device", "host", "split:host_values=int8", "offload:device_cache=5")
    made: dict[str, Any] = {name: opened(name, torch.empty(0)) for name in names}
    assert [type(store) for store in made.values()] == [PagedStore, HostStore, SplitStore, OffloadStore]
    assert made["split:host_values=int8"].values.dtype == torch.int8
    assert made["offload:device_cache=5"].cache.tokens == 5
    with refused("unsupported_device: meta"):
        opened("host", torch.empty(0, device="meta"))


def test_packed_values_take_half_of_16_bits_and_a_scale() -> None:
    key = 128 * 2
    assert SplitStore.bytes_per_token(128, torch.bfloat16, host_values="int8") == key + 132
    assert SplitStore.bytes_per_token(128, torch.float32, host_values="int8") == 2 * key + 132
    assert SplitStore.bytes_per_token(128, torch.bfloat16) == 2 * key


def test_all_reasons_are_given_at_once() -> None:
    plan = parse_plan("prefill=quoka:budget=512,decode=h2o:budget=512:evict=true")
    with refused("unsupported_plan: decode=h2o:budget=512:evict=true"):
        check_placement(plan, "split")


def test_a_placement_is_one_file_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with a knob of its own, known to nothing but the catalogue: parsed, checked, opened, attended."""
    module = ModuleType("placement_of_a_test")
    module.SlowStore = SlowStore  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(STORES, "slow", "placement_of_a_test:SlowStore")
    place = Placement.of("slow:delay=3")
    assert (str(place), place.knob("delay")) == ("slow:delay=3", 3)
    with refused("input_error: delay=-1"):
        Placement.of("slow:delay=-1")
    plan, tokens = parse_plan("quest:budget=24:window=8:page_size=4:dense_layers=none"), draw_tokens(90, 0)
    assert_same_answer(answers(plan, tokens, 80, placement="slow:delay=3"), answers(plan, tokens, 80), "another answer")


class SlowStore(PagedStore):
    def __init__(self, *arguments: Any, delay: int = 1, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.delay = delay

    @classmethod
    def check_knobs(cls, *, delay: object = 1, **knobs: Any) -> None:
        if not isinstance(delay, int):
            raise InputError(f"delay={delay} must be a whole number.")
