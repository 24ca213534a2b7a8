"""Which rotary embedding a transformers model applies, for methods that turn queries to other positions."""

from __future__ import annotations

import sys
from typing import Any

import torch

from kvsift.types import Rope

FIXED_TYPES = ("default", "linear", "llama3", "yarn")  # whose frequencies do not depend on the context's length


def rope_of(model: torch.nn.Module) -> Rope | None:
    """The rotary embedding that all layers share; None if there is none, or several, or it depends on the length.

    How pairs are laid out is found by trying the architecture's own rotation, which its file defines beside the module.
    """
    found = [module for name, module in model.named_modules() if name.split(".")[-1] == "rotary_emb"]
    frequencies = [getattr(module, "inv_freq", None) for module in found]
    if len(found) != 1 or not isinstance(frequencies[0], torch.Tensor):
        return None
    if getattr(found[0], "rope_type", "default") not in FIXED_TYPES:
        return None
    interleaved = _interleaved(sys.modules[type(found[0]).__module__])
    return None if interleaved is None else Rope(frequencies[0].detach().float().cpu(), interleaved)


def _interleaved(modeling: Any) -> bool | None:
    rotate = getattr(modeling, "rotate_half", None)
    if rotate is None:
        return None
    quarter_turn = rotate(torch.arange(4.0)).tolist()
    return {(-2.0, -3.0, 0.0, 1.0): False, (-1.0, 0.0, -3.0, 2.0): True}.get(tuple(quarter_turn))
