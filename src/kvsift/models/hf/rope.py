"""The rotary embedding of a transformers model: frequencies, layout, and the lengths beyond which they change."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvsift.kernels.rerotate import rerotate
from kvsift.types import Rope

FIXED_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies do not depend on the length of the context
FAR = 1000  # position of the token whose keys are compared
MOST_OFF = 0.25  # error relative to the change by the rotation; 16-bit models have a hundredth


def find_rope(model: torch.nn.Module) -> Rope | str:
    """Return the rotary embedding that all layers share, or why it is not known.

    The layout of pairs comes from the architecture's own rotation, which its file defines next to the module.
    """
    modules = [module for name, module in model.named_modules() if name.split(".")[-1] == "rotary_emb"]
    frequencies = [getattr(module, "inv_freq", None) for module in modules]
    if not modules:
        return "it has no rotary embedding, or not where transformers' models have it"
    if len(modules) > 1 or not isinstance(frequencies[0], torch.Tensor):
        return "it has several rotary embeddings"
    kind = getattr(modules[0], "rope_type", "default")
    if kind not in FIXED_TYPES:
        return f"the frequencies of its rotary embedding ({kind}) depend on the length of the context"
    interleaved = _interleaved(sys.modules[type(modules[0]).__module__])
    if interleaved is None:
        return "its architecture rotates in a way of its own"
    return Rope(frequencies[0].detach().float().cpu(), interleaved)


def rotates(rope: Rope, at_zero: torch.Tensor, at_far: torch.Tensor) -> bool:
    """Whether keys of a token at position FAR are its keys at position 0 rotated by ``rope``; both [num_kv_heads, 1,
    head_dim]. Some layers of some models are not rotated."""
    if 2 * len(rope.inv_freq) > at_zero.shape[2]:
        return False
    at_zero, at_far = at_zero.float(), at_far.float()
    rotated = rerotate(at_zero, torch.tensor([0]), torch.tensor([FAR]), rope)
    return bool((at_far - rotated).norm() <= MOST_OFF * (rotated - at_zero).norm())


def _interleaved(modeling: Any) -> bool | None:
    rotate = getattr(modeling, "rotate_half", None)
    if rotate is None:
        return None
    quarter_turn = rotate(torch.arange(4.0)).tolist()
    return {(-2.0, -3.0, 0.0, 1.0): False, (-1.0, 0.0, -3.0, 2.0): True}.get(tuple(quarter_turn))


@dataclass(frozen=True)
class RopeLimits:
    """Original maximum lengths, beyond which the rotation of a model changes.

    Attributes:
        longrope: a second set of frequencies beyond each of these lengths.
        dynamic: other frequencies for every length beyond each of these.
    """

    longrope: tuple[int, ...] = ()
    dynamic: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> RopeLimits | None:
        """Return the limits of a model; None if its frequencies never change."""
        limits = {limit for module in model.modules() for limit in limits_of(module)}
        if not limits:
            return None
        return cls(
            *(tuple(sorted(limit for kind, limit in limits if kind == name)) for name in ("longrope", "dynamic"))
        )

    def least(self, length: int) -> int:
        """Return the least length with the rotation of ``length``; it identifies the rotation."""
        dynamic = length if any(length > limit for limit in self.dynamic) else 0
        return max([dynamic, *(limit + 1 for limit in self.longrope if length > limit)])

    def most(self, least: int) -> int:
        """Return the greatest length that can use the rotation ``least``."""
        if any(least > limit for limit in self.dynamic):
            return least
        return min((limit for limit in self.longrope + self.dynamic if limit >= least), default=least)

    def stepped(self, length: int) -> int:
        """Round up to a multiple of the original maximum for dynamic NTK, so that similar lengths share a rotation."""
        step = next((limit for limit in self.dynamic if length > limit), 1)
        return -(-length // step) * step

    def __str__(self) -> str:
        kinds = [f"longrope, original maximum {limit}" for limit in self.longrope]
        return "; ".join(kinds + [f"dynamic NTK, original maximum {limit}" for limit in self.dynamic])


def limits_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield (kind, original maximum length) of one rotary embedding."""
    types = getattr(module, "rope_type", None)
    for layer_type, kind in (types if isinstance(types, dict) else {None: types}).items():
        if kind == "longrope":
            parameters: Any = module.config.rope_parameters  # type: ignore[union-attr]
            own = parameters if layer_type is None else parameters[layer_type]
            yield "longrope", int(own["original_max_position_embeddings"])
        elif isinstance(kind, str) and "dynamic" in kind:
            yield "dynamic", int(module.original_max_seq_len)  # type: ignore[arg-type]
