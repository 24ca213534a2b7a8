"""The rotary embedding that is found is the one the model applies."""

import sys
from typing import Any

import pytest
import torch
from models.tiny import prompt, tiny
from refusals import refused

import kvsift
from kvsift.kernels.rerotate import rerotate
from kvsift.models.hf.adapter import Adapter
from kvsift.models.hf.rope import find_rope
from kvsift.types import Rope

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
    rope = find_rope(model)
    assert isinstance(rope, Rope)
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
    assert find_rope(model) == "the frequencies of its rotary embedding (dynamic) depend on the length of the context"


def test_a_model_with_several_rotations_has_none_for_all() -> None:
    assert find_rope(tiny("Gemma3")) == "it has several rotary embeddings"


def test_a_model_without_rotation_has_none() -> None:
    assert "it has no rotary embedding" in str(find_rope(torch.nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Llama", {}), ("Llama", SCALED), ("Qwen3", {}), ("Phi3", {}), ("Glm", PARTIAL), ("Cohere", {}), ("Gemma2", {})],
    ids=lambda each: each if isinstance(each, str) else "-".join(map(str, each)),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_rotates_all_its_layers_is_seen_to(
    family: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    model = tiny(family, **changes).to(dtype)
    adapter = Adapter.attach(model)
    assert adapter.rope is not None, adapter.no_rope
    torch.testing.assert_close(adapter.rope.inv_freq, find_rope(model).inv_freq)  # type: ignore[union-attr]


def test_a_layer_that_is_not_rotated_is_found_out() -> None:
    model = tiny("SmolLM3", no_rope_layers=[1, 0], layer_types=["full_attention"] * 2)
    assert isinstance(find_rope(model), Rope)
    with refused("unsupported_plan"):
        kvsift.make_cache(model, "streaming_llm:positions=cache")
    assert "_kvsift" not in model.__dict__, "the model is as it was"
    with refused("unsupported_plan: its layer 1 rotates otherwise"), kvsift.sparse(model, "infllm"):
        pass
    assert "_kvsift" not in model.__dict__
    cache = kvsift.make_cache(model, "streaming_llm")
    with refused("unsupported_plan: its layer 1 rotates otherwise"):
        cache.replan("streaming_llm:positions=cache")
    assert str(cache.run.plan) == "streaming_llm:budget=1024"


@pytest.mark.parametrize("changes", [{}, SCALED], ids=["plain", "llama3"])
def test_one_layer_answers_from_its_cache_as_it_does_to_sinks_and_window_alone(changes: dict[str, Any]) -> None:
    """A single layer knows of positions by rotation alone: with positions in the cache, tokens between sinks and window
    might as well have never been. With absolute ones they leave a gap."""
    model, ids = tiny("Llama", num_hidden_layers=1, **changes), prompt(150)
    settings = "budget=40:sinks=4:positions=cache"
    together = torch.cat([ids[:, :4], ids[:, -36:]], 1)
    with torch.no_grad():
        expected = model(together).logits[0, -1]
        with kvsift.sparse(model, f"prefill=streaming_llm:{settings},decode=streaming_llm:{settings}"):
            in_cache = model(ids).logits[0, -1]
        with kvsift.sparse(model, "prefill=streaming_llm:budget=40:sinks=4:dense_layers=none"):
            absolute = model(ids).logits[0, -1]
    torch.testing.assert_close(in_cache, expected, rtol=1e-4, atol=1e-5)
    assert float((absolute - expected).abs().max()) > 0.01
