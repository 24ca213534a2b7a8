"""Which rotary embedding a transformers model applies, for methods that turn queries to other positions."""

from __future__ import annotations

import sys
from typing import Any

import torch

from kvsift.kernels.rerotate import rerotate
from kvsift.types import Rope

FIXED_TYPES = ("default", "linear", "llama3", "yarn")  # whose frequencies do not depend on the context's length


FAR = 1000  # positions, of a token whose keys are looked at
MOST_OFF = 0.25  # of what turning a key so far changes; 16-bit models are off by a hundredth


def find_rope(model: torch.nn.Module) -> Rope | str:
    """The rotary embedding that all layers share, or why there is none that could be known.

    How pairs are laid out is found by trying the architecture's own rotation, which its file defines beside the module.
    """
    found = [module for name, module in model.named_modules() if name.split(".")[-1] == "rotary_emb"]
    frequencies = [getattr(module, "inv_freq", None) for module in found]
    if not found:
        return "it has no rotary embedding, or not where transformers' models have it"
    if len(found) > 1 or not isinstance(frequencies[0], torch.Tensor):
        return "it has several rotary embeddings"
    kind = getattr(found[0], "rope_type", "default")
    if kind not in FIXED_TYPES:
        return f"the frequencies of its rotary embedding ({kind}) depend on the length of the context"
    interleaved = _interleaved(sys.modules[type(found[0]).__module__])
    if interleaved is None:
        return "its architecture rotates in a way of its own"
    return Rope(frequencies[0].detach().float().cpu(), interleaved)


def turns(rope: Rope, here: torch.Tensor, there: torch.Tensor) -> bool:
    """Whether the keys ``there``, of a token at position FAR, are those ``here``, of the same at 0, turned by ``rope``;
    both [num_kv_heads, 1, head_dim]. Some layers of some models are not rotated."""
    if 2 * len(rope.inv_freq) > here.shape[2]:
        return False
    here, there = here.float(), there.float()
    turned = rerotate(here, torch.tensor([0]), torch.tensor([FAR]), rope)
    return bool((there - turned).norm() <= MOST_OFF * (turned - here).norm())


def _interleaved(modeling: Any) -> bool | None:
    rotate = getattr(modeling, "rotate_half", None)
    if rotate is None:
        return None
    quarter_turn = rotate(torch.arange(4.0)).tolist()
    return {(-2.0, -3.0, 0.0, 1.0): False, (-1.0, 0.0, -3.0, 2.0): True}.get(tuple(quarter_turn))
