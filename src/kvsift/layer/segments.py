"""How a chunk is cut: into prompt and generated tokens, and into segments that share a selection."""

from __future__ import annotations

from itertools import pairwise

from kvsift.methods.base import Phase
from kvsift.plan.plan import Rule
from kvsift.stores.base import Segment


def steps_of(length: int, decode_tokens: int, together: int = 1) -> list[tuple[int, int, Phase]]:
    """(start, stop, phase) of the prompt in a row of so many new tokens, and of the generated ones, each alone or so
    many ``together``."""
    prompt = max(length - decode_tokens, 0)
    steps: list[tuple[int, int, Phase]] = [(0, prompt, "prefill")] if prompt else []
    return [*steps, *((token, min(token + together, length), "decode") for token in range(prompt, length, together))]


def pieces_of(rule: Rule, layer: int, segment: Segment, phase: Phase) -> list[tuple[Segment, bool]]:
    """The segment cut at multiples of the method's segment size, with whether each piece is dense; dense neighbours
    stay together. Cutting at absolute positions makes the answer independent of how the prompt was chunked."""
    size = rule.method.segment_size
    cuts = [segment.start, *range((segment.start // size + 1) * size, segment.stop, size), segment.stop]
    if phase == "decode":
        cuts = [segment.start, segment.stop]
    pieces: list[tuple[int, int, bool]] = []
    for start, stop in pairwise(cuts):
        dense = rule.is_dense(layer, start, stop)
        if dense and pieces and pieces[-1][2]:
            pieces[-1] = (pieces[-1][0], stop, True)
        else:
            pieces.append((start, stop, dense))
    return [
        (Segment(segment.queries[:, :, start - segment.start : stop - segment.start], start, stop), dense)
        for start, stop, dense in pieces
    ]
