"""Beyond the families that everything is tested on: whatever uses the attention interface runs, linear layers beside
full ones included, which stay as they are."""

from typing import Any

import pytest
import torch
from models.tiny import SPARSE, assert_sparse, covered, greedy, prompt, ragged, tiny

import kvsift

MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
ALL, UPPER = [0, 1], [1]
OTHERS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "Apertus": ({}, ALL),
    "Bamba": ({**MAMBA, "attn_layer_indices": [1]}, UPPER),
    "BioGpt": ({}, ALL),
    "Cohere2": (SLIDING, UPPER),
    "Exaone4": (SLIDING, UPPER),
    "GPTNeoX": ({"rotary_pct": 0.5}, ALL),
    "Glm4": ({}, ALL),
    "Granite": ({}, ALL),
    "GraniteMoeHybrid": ({**MAMBA, "layer_types": ["mamba", "attention"]}, UPPER),
    "Lfm2": ({"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, UPPER),
    "MiniMaxM2": ({}, ALL),
    "Mixtral": ({"num_local_experts": 4}, ALL),
    "OPT": ({"ffn_dim": 32, "word_embed_proj_dim": 32}, ALL),
    "Olmo3": (SLIDING, UPPER),
    "Phi": ({"partial_rotary_factor": 0.5}, ALL),
    "Qwen3Next": ({**DELTA, **EXPERTS, "layer_types": ["linear_attention", "full_attention"]}, UPPER),
    "SmolLM3": ({}, ALL),
    "StableLm": ({"head_dim": 8, "partial_rotary_factor": 0.5}, ALL),
    "Starcoder2": ({}, ALL),
}


@pytest.mark.parametrize("family", OTHERS)
def test_a_covering_budget_gives_the_tokens_of_eager_attention(family: str) -> None:
    model = tiny(family, **OTHERS[family][0])
    expected = greedy(model, **ragged(100, 61))
    with covered(model):
        assert torch.equal(greedy(model, **ragged(100, 61)), expected)


@pytest.mark.parametrize("family", OTHERS)
def test_sparse_tokens_depend_on_the_text_alone(family: str) -> None:
    changes, layers = OTHERS[family]
    model = tiny(family, **changes)
    with kvsift.sparse(model, SPARSE) as run:
        together = greedy(model, **ragged(150, 121))
        alone = [greedy(model, prompt(length, seed=row)) for row, length in enumerate((150, 121))]
        chunked = greedy(model, **ragged(150, 121), prefill_chunk_size=64)
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together, chunked)
    assert_sparse(run)
    assert sorted({row["layer"] for row in run.report()["layers"]}) == layers
