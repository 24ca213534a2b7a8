"""Where keys and values live, and what that rules out. A place is written as a plan is:

    offload                                           its name
    offload:device_cache=4096:host_values=int8        with its knobs
    Place("offload", device_cache=4096)               as an object

Whatever the place, every method gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvsift.errors import InputError, unknown
from kvsift.placement.device import DeviceStore
from kvsift.placement.offload import DEVICE_CACHE, OffloadStore
from kvsift.placement.packed_values import packed_width
from kvsift.placement.split import HostValues, SplitStore
from kvsift.runtime.plan import Plan
from kvsift.types import LayerShape

PlaceName = Literal["device", "split", "offload", "host"]
PLACEMENTS: tuple[PlaceName, ...] = ("device", "split", "offload", "host")
APART: tuple[PlaceName, ...] = ("split", "offload")  # in host memory, whatever the device
HOST_VALUES: tuple[HostValues, ...] = ("model", "int8")
KNOBS = ("host_values", "device_cache")


@dataclass(frozen=True)
class Place:
    """Where KV lives.

    Attributes:
        name: "device": with the model. "split": in host memory, where methods choose and the host attends what they
            chose; the device attends sinks and window. "offload": in host memory, but the device attends, and what was
            chosen is brought to it. "host": model and KV on the CPU.
        host_values: in host memory, values as they come from the "model", or packed in 8 bits, "int8".
        device_cache: tokens of a layer that "offload" keeps on the device of what was chosen lately.

    Raises:
        InputError: for a name that does not exist, or a knob that means nothing there.
    """

    name: PlaceName = "device"
    host_values: HostValues = "model"
    device_cache: int | None = None

    def __post_init__(self) -> None:
        if self.name not in PLACEMENTS:
            raise unknown("placement", str(self.name), PLACEMENTS)
        if self.host_values not in HOST_VALUES:
            raise unknown("host_values", str(self.host_values), HOST_VALUES)
        if self.host_values != "model" and not self.apart:
            raise InputError(
                f"host_values={self.host_values} is of placement=split and placement=offload; with "
                f"placement={self.name} values stay as they come. Leave it out, or change the placement."
            )
        size = self.device_cache
        if size is None:
            return
        if self.name != "offload":
            raise InputError(f"device_cache={size} is of placement=offload; leave it out with {self.name}.")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(f"device_cache={size!r} must be a number of tokens, 1 or more; {DEVICE_CACHE} is usual.")

    @classmethod
    def of(cls, placement: Placement) -> Place:
        """A place from any of its spellings (see the module).

        Raises:
            InputError: for a name or a knob that does not exist, or a value that it cannot have.
        """
        if isinstance(placement, Place):
            return placement
        name, *pairs = str(placement).split(":")
        knobs: dict[str, Any] = {}
        for key, _, value in (pair.partition("=") for pair in pairs):
            if key not in KNOBS:
                raise unknown("knob of a placement", key, KNOBS)
            knobs[key] = int(value) if value.isdecimal() else value
        return cls(name, **knobs)  # type: ignore[arg-type]

    def __str__(self) -> str:
        knobs = {key: getattr(self, key) for key in KNOBS}
        changed = [f"{key}={value}" for key, value in knobs.items() if value != getattr(Place, key)]
        return ":".join([self.name, *changed])

    def value_share(self, head_dim: int, dtype: torch.dtype) -> float:
        """Bytes of a value in host memory over those it takes as it comes."""
        return packed_width(head_dim) / (head_dim * dtype.itemsize) if self.host_values == "int8" else 1.0

    @property
    def apart(self) -> bool:
        """Whether KV is in host memory although the model may be elsewhere."""
        return self.name in APART

    def reason_against(self, plan: Plan, on_gpu: bool = False) -> str | None:
        """Why a plan cannot run with its KV there, the model on a GPU or not; None if it can."""
        if on_gpu and not self.apart and plan.decode is not None and plan.decode.method.on_host:
            return (
                f"decode={plan.decode} searches host memory, and with placement={self.name} keys and values are on the "
                "GPU. Take placement=split, or device=cpu."
            )
        if self.apart and plan.evicts_prompt:
            return (
                f"{plan} frees what it drops while it reads; placement={self.name} keeps everything in host memory. "
                "Leave out the placement, or take a rule of decode without evict."
            )
        if self.apart and plan.prefill is not None and not plan.prefill.method.unbounded:
            return (
                f"prefill={plan.prefill} needs its KV on the device: with placement={self.name} prefill is dense. "
                "Leave the prefill rule out, or the placement."
            )
        if self.apart and plan.decode is not None and plan.decode.evicts:
            return (
                f"decode={plan.decode} frees what it drops, and placement={self.name} keeps everything in host memory. "
                "Leave out evict, or the placement."
            )
        return None

    def new_store(
        self, shape: LayerShape, num_rows: int, page_size: int, like: Tensor, summaries: Iterable[str], reserve: int
    ) -> DeviceStore:
        """An empty store of one layer.

        Raises:
            InputError: if the model is not where the place says.
        """
        given = shape, num_rows, page_size, like, summaries, reserve
        if self.name == "split":
            return SplitStore(*given, host_values=self.host_values)
        if self.name == "offload":
            return OffloadStore(*given, host_values=self.host_values, device_cache=self.device_cache or DEVICE_CACHE)
        if self.name == "host" and like.device.type != "cpu":
            raise InputError(
                f"placement=host keeps the model on the CPU, and this one is on {like.device}. Move it, or use "
                "placement=split or placement=offload."
            )
        return DeviceStore(*given)


Placement = str | Place


def reason_against(placement: Placement, plan: Plan, on_gpu: bool = False) -> str | None:
    """Why a plan cannot run with its KV there, the model on a GPU or not; None if it can.

    Raises:
        InputError: if there is no such placement.
    """
    return Place.of(placement).reason_against(plan, on_gpu)
