"""The rotary embedding that is found is the one the model applies."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from models.tiny import tiny

from kvsift.kernels.rerotate import rerotate
from kvsift.models.transformers_rope import rope_of

SCALED = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                              "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}  # fmt: skip
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Llama", {}), ("Llama", SCALED), ("Qwen3", {}), ("Phi3", {}), ("Glm", PARTIAL), ("Cohere", {})],
    ids=lambda each: each if isinstance(each, str) else "-".join(map(str, each)),
)
def test_turning_on_is_what_the_model_does_at_the_other_position(family: str, changes: dict[str, Any]) -> None:
    model = tiny(family, **changes)
    rope = rope_of(model)
    assert rope is not None
    assert rope.interleaved == (family in ("Glm", "Cohere"))
    rotary = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    turn = sys.modules[type(rotary).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
    x = torch.randn(1, 4, 3, 16, generator=torch.Generator().manual_seed(0))

    def at(*positions: int) -> torch.Tensor:
        queries: torch.Tensor = turn(x, x, *rotary(x, torch.tensor([positions])))[0]
        return queries[0]

    here, there = (0, 5, 130), (700, 4, 131)
    torch.testing.assert_close(
        rerotate(at(*here), torch.tensor(here), torch.tensor(there), rope), at(*there), atol=2e-5, rtol=0
    )


def test_frequencies_that_depend_on_the_context_are_not_taken() -> None:
    model = tiny("Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert rope_of(model) is None


def test_a_model_with_several_rotations_has_none_for_all() -> None:
    assert rope_of(tiny("Gemma3")) is None
