"""What slots are fed: sequences that take one each, blocks of tokens that take neighbouring ones, and the next
tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.engine.sampling import ConstrainedChooser, Sampling, choice_of
from kvsift.layer.paged_decode import ALWAYS
from kvsift.models.hf.cache import SparseCache
from kvsift.plan.plan import Rule
from kvsift.types import LayerShape

PageNumbers = Sequence[int] | Tensor
NO_PAGES: PageNumbers = ()  # of an idle slot


class Assignment(NamedTuple):
    """A sequence that takes a slot."""

    pages: PageNumbers  # of its tokens so far, and of those to come
    length: int  # tokens cached
    token: int  # the next to feed
    sampling: Sampling
    drawn: int  # tokens chosen so far, the one to feed included
    rule: Rule | None  # of decode; None is dense
    dense_below: int = 0  # context length below which the sequence is dense in every layer
    cache: SparseCache | None = None  # has what layers without pages keep of it; None: steps are timed
    constraint: ConstrainedChooser | None = None  # of its tokens

    def dense_below_in(self, layer: LayerShape) -> int:
        """Return the context length below which the sequence is dense in a layer."""
        return ALWAYS if self.rule is None or self.rule.budget.is_dense(layer) else self.dense_below


class Block(NamedTuple):
    """Consecutive tokens of a sequence, which take neighbouring slots."""

    pages: PageNumbers
    length: int  # tokens cached before them
    tokens: Sequence[int]
    sampling: Sampling
    drawn: int  # tokens chosen so far, the first of these included
    constraint: ConstrainedChooser | None = None


class Shift(NamedTuple):
    """What the device alone knows of sequences that are assigned.

    Attributes:
        ahead: int64 [slots], places by which each is farther than it was assigned.
        tokens: int64 [slots], the next to feed there.
        most: places, at most.
    """

    ahead: Tensor
    tokens: Tensor
    most: int


class Feed(NamedTuple):
    """What a slot feeds in the next step."""

    length: int  # tokens cached
    token: int
    sampling: Sampling


IDLE = Feed(1, 0, Sampling())


def feeds_of_sequences(seqs: Sequence[Assignment], num_slots: int, steps: int) -> tuple[list[Feed], Tensor | None]:
    """Return what each slot feeds, and random numbers of the steps, int64 [steps, num_slots]; None: nobody draws."""
    feeds, noise = [Feed(seq.length, seq.token, seq.sampling) for seq in seqs], None
    if _any_drawn(feeds):
        noise = torch.zeros(steps, num_slots, dtype=torch.int64)
        for slot, seq in enumerate(seqs):
            noise[:, slot] = _noise(seq.sampling, seq.drawn, steps)
    return feeds + [IDLE] * (num_slots - len(seqs)), noise


def feeds_of_blocks(
    blocks: Mapping[int, Block], num_slots: int, size: int, steps: int
) -> tuple[list[Feed], Tensor | None]:
    """``feeds_of_sequences`` of blocks of so many slots, by their places."""
    feeds, drawn = [IDLE] * num_slots, torch.zeros(steps, num_slots, dtype=torch.int64)
    for number, block in blocks.items():
        last = len(block.tokens) - 1
        noise = _noise(block.sampling, block.drawn, last + steps)
        for slot, place in enumerate([*range(last), *[last] * (size - last)], number * size):
            feeds[slot] = Feed(block.length + place, block.tokens[place], block.sampling)
            drawn[:, slot] = noise[place : place + steps]
    return feeds, drawn if _any_drawn(feeds) else None


def drafts_at(place: Any) -> Any:
    """Return the number that stands for a draft that is still on the device, or the place of such a number."""
    return -1 - place


def uploaded(numbers: Tensor, device: torch.device) -> Tensor:
    """Return numbers of the host on a device, without waiting for it."""
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)


def _any_drawn(feeds: Sequence[Feed]) -> bool:
    return choice_of(feed.sampling for feed in feeds) != "greedy"


def _noise(sampling: Sampling, drawn: int, steps: int) -> Tensor:
    """Random numbers of steps, int64 [steps]; zeros where tokens are not drawn."""
    if sampling.temperature == 0:
        return torch.zeros(steps, dtype=torch.int64)
    return sampling.noise(drawn + steps, drawn)
