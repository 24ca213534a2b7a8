"""Tiny models whose layers do not all keep pages: windows, gated delta nets, Mamba layers, short convolutions."""

from pathlib import Path

from engine.tiny_directory import write_model

HYBRIDS = {
    "Qwen3Next": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
                  "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                  "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "Bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 8,
              "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16},
    "FalconH1": {"num_hidden_layers": 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_ssm": 64,
                 "mamba_n_groups": 1, "mamba_chunk_size": 16},
    "NemotronH": {"num_hidden_layers": 4, "hybrid_override_pattern": "M*-M", "mamba_num_heads": 8, "mamba_head_dim": 8,
                  "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16},
    "Lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "Gemma3": {"num_hidden_layers": 2},
    "GptOss": {"num_hidden_layers": 2},
}  # fmt: skip


def write_hybrid(folder: Path, family: str) -> Path:
    """A random model of one of ``HYBRIDS`` and its tokenizer."""
    return write_model(folder, family, **HYBRIDS[family])
