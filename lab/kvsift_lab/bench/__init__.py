"""Benchmarks of kvsift: speed beside the floor that memory sets. One bench, one file and one line of this table."""

from __future__ import annotations

from importlib import import_module
from typing import Any

BENCHES = {  # name on the command line -> "module:class" of its recipe; --help imports these, so they import no torch
    "attention": "kvsift_lab.bench.attention:AttentionRecipe",
    "decode": "kvsift_lab.bench.decode:DecodeRecipe",
    "host": "kvsift_lab.bench.host:HostRecipe",
    "index": "kvsift_lab.bench.index:IndexRecipe",
    "prefill": "kvsift_lab.bench.prefill:PrefillRecipe",
    "serve": "kvsift_lab.bench.serve:ServeRecipe",
    "split": "kvsift_lab.bench.split:SplitRecipe",
    "busy": "kvsift_lab.studies.recipes:BusyRecipe",
    "chats": "kvsift_lab.studies.recipes:ChatsRecipe",
    "exact": "kvsift_lab.studies.recipes:ExactRecipe",
    "exact-acceptance": "kvsift_lab.studies.recipes:AcceptanceRecipe",
    "exact-captured": "kvsift_lab.studies.recipes:CapturedRecipe",
    "generation-recall": "kvsift_lab.studies.recipes:GenerationRecallRecipe",
    "llama-cpp": "kvsift_lab.studies.recipes:LlamaCppRecipe",
    "long-answers": "kvsift_lab.studies.recipes:LongAnswersRecipe",
    "summary-recall": "kvsift_lab.studies.recipes:SummaryRecallRecipe",
    "vllm-decode": "kvsift_lab.studies.recipes:VllmDecodeRecipe",
}


def load(path: str) -> Any:
    """Import the class of "module:class"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
