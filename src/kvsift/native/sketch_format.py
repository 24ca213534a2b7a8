"""The row of a sketch: where its parts are, and the rotation of its keys; ``kernels.sketch`` says what they mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from kvsift.errors import InvalidValue
from kvsift.native.shapes import LARGEST_HEAD_DIM

STRIP = 16  # tokens; a page has a multiple of them
LARGEST_PAGE = 1024
MOST_VOTE = 40.0  # logarithm of what a head says for a token at most; larger numbers would leave float32
SECTOR = 32  # bytes that a GPU reads at least


@dataclass(frozen=True)
class SketchLayout:
    """Where the parts of a row are; computed once (``sketch_layout``)."""

    bits: int
    head_dim: int
    page_size: int

    @cached_property
    def words(self) -> int:
        """Groups of 32 channels."""
        return -(-self.head_dim // 32)

    @cached_property
    def factors(self) -> int:
        """Offset of the factors."""
        return 4 * self.bits * self.words * self.page_size

    @cached_property
    def key_mean(self) -> int:
        return self.factors + _round_up(2 * self.page_size, 4)

    @cached_property
    def scales(self) -> int:
        return self.key_mean + 16 * self.words

    @cached_property
    def value_mean(self) -> int:
        """Offset of the mean value: weighing tokens reads what is before it, estimating the rest reads it alone."""
        return _round_up(self.scales + 4, SECTOR)

    @cached_property
    def width(self) -> int:
        """Bytes of a row."""
        return _round_up(self.value_mean + -(-self.head_dim // 2), SECTOR)

    @cached_property
    def is_read_by_core(self) -> bool:
        """Whether the compiled core estimates from such rows."""
        return self.bits in (1, 2) and sketches_read(self.page_size, self.head_dim)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """What the compiled core's ``SketchFormat`` is made of."""
        parts = self.factors, self.key_mean, self.value_mean, self.scales, self.width
        return self.bits, self.head_dim, self.page_size, *parts


def sketches_read(page_size: int, head_dim: int) -> bool:
    """Whether the core can read sketches of such pages."""
    return page_size % STRIP == 0 and 0 < page_size <= LARGEST_PAGE and 0 < head_dim <= LARGEST_HEAD_DIM


@lru_cache
def sketch_layout(bits: int, head_dim: int, page_size: int) -> SketchLayout:
    """Return the one layout of these sizes."""
    if bits not in (1, 2):
        raise InvalidValue(f"bits={bits} must be 1 or 2, per channel of a sketch.")
    return SketchLayout(bits, head_dim, page_size)


@lru_cache
@torch.inference_mode(False)  # gradients may pass through it later
def random_rotation(head_dim: int, device: torch.device) -> Tensor:
    """An orthogonal matrix that spreads every channel over all, float32 [head_dim, head_dim]; vectors @ it rotates.

    Signs, then a Hadamard matrix of the largest power of two that divides ``head_dim``, in each of as many blocks as
    there are, and a cosine transform across the blocks.
    """
    size = head_dim & -head_dim
    hadamard = torch.ones(1, 1)
    while len(hadamard) < size:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard)
    blocks = torch.arange(head_dim // size, dtype=torch.float64)
    cosines = torch.cos(math.pi / len(blocks) * (blocks + 0.5).unsqueeze(1) * blocks)
    mixed = torch.kron((cosines / cosines.norm(dim=0)).float(), hadamard / math.sqrt(size))
    channels = torch.arange(head_dim)
    signs = 1 - 2 * ((channels * 0x9E3779B1 >> 15) & 1)  # any fixed pattern that no feature of a model follows
    return (signs.float().unsqueeze(1) * mixed).to(device)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
