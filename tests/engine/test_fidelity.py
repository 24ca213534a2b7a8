"""Predictions under a plan beside dense ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvsift import LLM
from kvsift.engine.document import Document
from kvsift.engine.fast_path import FastPath
from kvsift.engine.fidelity import predictions
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan

BUDGET = ":budget=64:sinks=4:window=8:dense_layers=none"


@pytest.mark.parametrize("method", ["dense", "sketch", "quest", "decode=less_is_more", "snapkv", "infinigen"])
def test_known_tokens_are_predicted_in_one_pass_as_one_by_one(
    method: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(llama, "dense", dense_below=0, dtype="float32", device="cpu")
    ids = torch.randint(3, 60, (140,), generator=torch.Generator().manual_seed(5)).tolist()
    document = Document(llm, ids[:120], lambda text: ids, Plan())
    plan = parse_plan(method if method == "dense" else method + BUDGET)
    together, counted = predictions(llm, document, ids[120], ids[121:], plan)
    monkeypatch.setattr(FastPath, "fused", lambda *_: None)
    one_by_one, expected = predictions(llm, document, ids[120], ids[121:], plan)
    torch.testing.assert_close(together, one_by_one, atol=1e-4, rtol=1e-4)
    assert counted["phases"]["decode"]["visible_tokens"] == expected["phases"]["decode"]["visible_tokens"]
