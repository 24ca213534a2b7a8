"""Which model layers belong to."""

from __future__ import annotations

from typing import Any

from kvsift.types import Origin


def origin_of(model: Any) -> Origin | None:
    """The model as files that were made for it know it; None where it has no embedding of tokens to tell it by."""
    weights = getattr(model.get_input_embeddings(), "weight", None)
    if weights is None:
        return None
    config = model.config.get_text_config(decoder=True)
    heads, layers = getattr(config, "num_attention_heads", "?"), getattr(config, "num_hidden_layers", "?")
    return Origin(f"{type(model).__name__}, {layers} layers, {heads} heads, {tuple(weights.shape)} embeddings", weights)
