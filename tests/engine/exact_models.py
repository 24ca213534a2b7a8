"""Models whose answers can be exact in captured steps; here the steps run without graphs, on a GPU with them."""

from pathlib import Path

import pytest
from engine.apart import GPU
from engine.loop_sequences import GRID
from engine.tiny_directory import write_model

from kvsift import LLM
from kvsift.api.answer import Answer

PATHS = ["eager", pytest.param("captured", marks=GPU.marks)]


def open_llm(directory: Path, path: str, **options: object) -> LLM:
    device, dtype = ("cpu", "float32") if path == "eager" else ("cuda", "bfloat16")
    settings = {"path": path, "device": device, "dtype": dtype, "deterministic": True, "chunk_size": GRID}
    return LLM(directory, "dense", **{**settings, **options})  # type: ignore[arg-type]


def new_llm(folder: Path, path: str, family: str = "Qwen3", **changes: int) -> LLM:
    return open_llm(write_model(folder, family, hidden_size=128, head_dim=64, num_hidden_layers=3, **changes), path)


def same(exact: Answer, dense: Answer) -> bool:
    return (exact.token_ids, exact.text, exact.finish_reason) == (dense.token_ids, dense.text, dense.finish_reason)
