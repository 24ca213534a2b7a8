"""The catalogue of stores: every placement by name, one line each."""

from __future__ import annotations

from importlib import import_module
from typing import Any

STORES: dict[str, str] = {  # "module:Class"; its keyword-only arguments are the knobs of the placement
    "device": "kvsift.stores.paged:PagedStore",
    "split": "kvsift.stores.split:SplitStore",
    "offload": "kvsift.stores.offload:OffloadStore",
    "host": "kvsift.stores.paged:HostStore",
}


def store_class(name: str) -> Any:
    """Return the class of a catalogued store."""
    module, _, attribute = STORES[name].partition(":")
    return getattr(import_module(module), attribute)
