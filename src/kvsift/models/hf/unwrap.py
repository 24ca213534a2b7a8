"""The transformers model inside a wrapper, its input device, and unsupported architectures."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel

from kvsift.errors import UnsupportedModel


def unwrapped(model: Any) -> PreTrainedModel:
    """Return the transformers model inside torch.compile, PEFT, TRL's value heads or data parallelism, or itself.

    Raises:
        UnsupportedModel: if there is none.
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):  # PEFT
            inner = inner.get_base_model()
        else:
            names = (name for name in ("_orig_mod", "pretrained_model", "module") if hasattr(inner, name))
            if (name := next(names, None)) is None:
                raise UnsupportedModel(
                    f"{model!r:.60} is a {type(model).__name__}; kvsift needs a model of transformers (a "
                    'PreTrainedModel), as AutoModelForCausalLM.from_pretrained("...") returns it. For a directory or a '
                    'name use kvsift.LLM("...").'
                )
            inner = getattr(inner, name)
    return inner


def device_of_inputs(model: PreTrainedModel) -> torch.device:
    """Return the device of a forward pass's tokens; weights offloaded by accelerate are on no device before it."""
    embedding = model.get_input_embeddings()
    for module in (embedding, model):
        if (device := getattr(getattr(module, "_hf_hook", None), "execution_device", None)) is not None:
            return torch.device(device)
    device = next(chain(embedding.parameters(), embedding.buffers())).device  # not of weights that would be expanded
    return torch.device("cpu") if device.type == "meta" else device


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Refuse architectures that kvsift cannot run.

    Raises:
        UnsupportedModel: naming the architecture and the reason.
    """
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; kvsift runs decoders with causal self-attention.")
    if any(getattr(own, "kv_lora_rank", None) for own in config.per_layer_config):
        raise UnsupportedModel(
            f"{name} caches a latent instead of keys (multi-head latent attention); kvsift needs keys and values."
        )
