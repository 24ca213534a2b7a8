"""Benchmarks of kvsift: speed beside the floor that memory sets. One bench, one file and one line of this table."""

from __future__ import annotations

from importlib import import_module
from typing import Any

BENCHES = {  # name on the command line -> "module:class" of its recipe; --help imports these, so they import no torch
    "attention": "kvsift.benchmarks.attention:AttentionRecipe",
    "decode": "kvsift.benchmarks.decode:DecodeRecipe",
    "host": "kvsift.benchmarks.host:HostRecipe",
    "index": "kvsift.benchmarks.index:IndexRecipe",
    "prefill": "kvsift.benchmarks.prefill:PrefillRecipe",
    "serve": "kvsift.benchmarks.serve:ServeRecipe",
    "split": "kvsift.benchmarks.split:SplitRecipe",
}


def load(path: str) -> Any:
    """Import the class of "module:class"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
