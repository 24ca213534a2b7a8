"""Identity of the model that a layer belongs to."""

from __future__ import annotations

from typing import Any

from kvsift.types import Origin


def origin_of(model: Any) -> Origin | None:
    """Return the identity of a model, as files made for it store it; None without a token embedding."""
    weights = getattr(model.get_input_embeddings(), "weight", None)
    if weights is None:
        return None
    config = model.config.get_text_config(decoder=True)
    every = {str(getattr(own, "num_attention_heads", "?")) for own in config.per_layer_config}  # one, as a rule
    heads, layers = " or ".join(sorted(every)), getattr(config, "num_hidden_layers", "?")
    return Origin(f"{type(model).__name__}, {layers} layers, {heads} heads, {tuple(weights.shape)} embeddings", weights)
