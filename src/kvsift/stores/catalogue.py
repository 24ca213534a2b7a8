"""The catalogue of stores: every placement by name, one line each."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvsift.stores.base import Store
from kvsift.stores.page_table import PageTable

STORES: dict[str, str] = {  # "module:Class"; its keyword-only arguments are the knobs of the placement
    "device": "kvsift.stores.paged:PagedStore",
    "split": "kvsift.stores.split:SplitStore",
    "offload": "kvsift.stores.offload:OffloadStore",
    "host": "kvsift.stores.host:HostStore",
}


def store_class(name: str) -> Any:
    """The class of a catalogued store."""
    module, _, attribute = STORES[name].partition(":")
    return getattr(import_module(module), attribute)


def open_store(name: str, *arguments: Any, **knobs: Any) -> Store:
    """An empty store of one layer; arguments as for the class."""
    store: Store = store_class(name)(*arguments, **knobs)
    return store


def evicting(store: Any) -> Store:
    """A store that continues with what another one holds and can evict tokens."""
    from kvsift.stores.evicting import EvictingStore

    return store if store.evicts else EvictingStore.of(store)


def not_evicting(store: Any, table: PageTable | None) -> Store:
    """A store that continues in the pages of ``table`` with what an evicting one holds, which has evicted nothing."""
    continued: Store = store.whole(table)
    return continued
