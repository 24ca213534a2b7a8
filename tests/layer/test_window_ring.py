"""Attention over the ring of a sliding window: that of the last tokens, wherever a sequence has begun and gone back."""

import pytest
import torch
from kernels.conftest import DEVICE
from torch import Tensor

from kvsift.kernels.attention import attention_reference
from kvsift.kernels.merge import with_sink_logit
from kvsift.layer.paged_decode import DecodeBatch
from kvsift.layer.window_ring import PAGE_SIZE, WindowRing
from kvsift.types import LayerShape

SHAPE = LayerShape(layer=0, num_query_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, softcap=3.0)
SPARE = 3
STARTS = [0, 5, 200]  # an empty sequence, one below the window, one whose ring wraps


def step(ring: WindowRing, keys: Tensor, values: Tensor, queries: Tensor, lengths: list[int], sinks: Tensor) -> Tensor:
    """Append and attend the token at position ``lengths[i]`` of each sequence; all have the same tokens."""
    batch = DecodeBatch(torch.zeros(len(lengths), 1, dtype=torch.int32, device=DEVICE), lengths, 16, [None] * 3)
    batch.advance()
    at = torch.tensor(lengths)
    asked, *new = (each[:, at].transpose(0, 1).contiguous() for each in (queries, keys, values))
    places = ring.places(batch.lengths)
    ring.append(*new, places)
    return ring.attend(SHAPE, asked, places, batch, sinks)


@pytest.mark.parametrize("window", [1, 2, 13, PAGE_SIZE - SPARE, 64])  # below, at and above a page with what is spare
def test_the_last_tokens_are_attended(window: int) -> None:
    draw = torch.Generator().manual_seed(window)
    keys, values, queries = (torch.randn(heads, 400, 16, generator=draw).to(DEVICE) for heads in (2, 2, 4))
    sinks, ring = torch.randn(4, generator=draw).to(DEVICE), WindowRing(window, 4, SPARE, keys[None, :, :0], 16)
    ring, lengths = ring.first(3), list(STARTS)
    for slot, length in enumerate(lengths):
        kept = slice(max(length - window + 1, 0), length)
        ring.load(slot, keys[:, kept], values[:, kept], length)
    for number in range(120):
        found = step(ring, keys, values, queries, lengths, sinks)
        for slot, length in enumerate(lengths):
            seen = slice(max(length - window + 1, 0), length + 1)
            part = attention_reference(
                queries[None, :, length : length + 1], keys[None, :, seen], values[None, :, seen], SHAPE.scale,
                softcap=SHAPE.softcap,
            )  # fmt: skip
            expected = with_sink_logit(part, sinks).output[0, :, 0]
            assert torch.allclose(found[slot], expected, atol=1e-5)
        back = number % (SPARE + 1) if number % 7 == 6 else 0  # steps that are taken again
        lengths = [max(length + 1 - back, start) for start, length in zip(STARTS, lengths)]
        for slot, length in enumerate(lengths):
            kept = slice(max(length - window + 1, 0), length)
            assert all(map(torch.equal, ring.last(slot, length), (keys[:, kept], values[:, kept])))
