"""Where keys and values are. A placement is written as a plan is:

    offload                                           its name
    offload:device_cache=4096:host_values=int8        with its knobs
    Placement("offload", device_cache=4096)           as an object

Every method gives the same answer under every placement.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvsift.errors import UnusedOption, unknown
from kvsift.stores.catalogue import STORES, store_class


@dataclass(frozen=True, init=False)
class Placement:
    """Where KV is.

    Attributes:
        name: "device": with the model. "split": in host memory, where methods select and the host attends the
            selection; the device attends sinks and window. "offload": in host memory, but the device attends, and
            reads the selection there. "host": model and KV on the CPU.
        knobs: those that were given: kv_dtype ("int8": keys and values of "device" and "host" in 8 bits),
            host_values ("model": values in host memory as they come from the model, "int8": packed in 8 bits),
            device_cache (tokens of a layer that "offload" caches on the device where steps are composed).

    Raises:
        InputError: for a name that does not exist, or a knob that means nothing there.
    """

    name: str
    knobs: tuple[tuple[str, Any], ...]

    def __init__(self, name: str = "device", **knobs: Any) -> None:
        if not isinstance(name, str) or name not in STORES:
            raise unknown("placement", str(name), STORES)
        for knob, value in knobs.items():
            homes = [f"placement={place}" for place in STORES if knob in _knobs_of(place)]
            if not homes:
                raise unknown(
                    "option of a placement", knob, sorted({key for place in STORES for key in _knobs_of(place)})
                )
            if knob not in _knobs_of(name):
                raise UnusedOption(
                    f"{knob}={value} is an option of {' and '.join(homes)}; leave it out with placement={name}, or "
                    "change the placement."
                )
        store_class(name).check_knobs(**knobs)
        changed = [(key, knobs[key]) for key, default in _knobs_of(name).items() if knobs.get(key, default) != default]
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "knobs", tuple(changed))

    @classmethod
    def of(cls, placement: PlacementSpec) -> Placement:
        """A placement from any of its spellings (see the module).

        Raises:
            InputError: for a name or a knob that does not exist, or a value that it cannot have.
        """
        if isinstance(placement, Placement):
            return placement
        name, *pairs = str(placement).split(":")
        knobs = {key: int(value) if value.isdecimal() else value for key, _, value in (p.partition("=") for p in pairs)}
        return cls(name, **knobs)

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{key}={value}" for key, value in self.knobs)])

    @property
    def store(self) -> Any:
        """The class of its stores."""
        return store_class(self.name)

    @property
    def in_host_memory(self) -> bool:
        """Whether KV is in host memory although the model may be elsewhere."""
        return bool(self.store.in_host_memory)

    @property
    def kv_dtype(self) -> str:
        """In what keys and values are kept (``stores.paged``); "auto" where nothing else can be asked for."""
        return str(dict(self.knobs).get("kv_dtype", "auto"))

    def knob(self, name: str) -> Any:
        """The value of a knob, given or not."""
        return dict(self.knobs).get(name, _knobs_of(self.name)[name])


PlacementSpec = str | Placement


@cache
def _knobs_of(name: str) -> dict[str, Any]:
    """Knobs of a placement and their defaults: the keyword-only arguments of its store."""
    parameters = inspect.signature(store_class(name).__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
