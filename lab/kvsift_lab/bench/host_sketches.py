"""Variants of a decode step that selects tokens by sketches and estimates the rest, on the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvsift import native
from kvsift.kernels.merge import merge
from kvsift.kernels.sketch import SKETCHES, sketch_rows
from kvsift.native.sketch_format import SketchLayout, rotation
from kvsift.types import Part
from kvsift_lab.bench.host_variants import AttentionInputs, Variant


def sketch_variants(layer: AttentionInputs, tokens: int) -> Iterator[Variant]:
    """Return the steps that attend ``tokens`` tokens per KV head, and their choice alone, by kind of sketch. Tokens of
    a page that is not full are no candidates."""
    for kind, bits in SKETCHES.items():
        step = SketchStep(layer, bits, tokens)
        selected = layer.kv_bytes(step.tokens, len(layer.keys))
        yield Variant(f"native {kind} per KV head", "sketch", step.row_bytes + selected, step.attend)
        yield Variant(f"of it: choice by {kind}", "sketched choice", step.row_bytes, step.choose)


class SketchStep:
    """A step over sketches of ``bits`` per channel."""

    def __init__(self, layer: AttentionInputs, bits: int, tokens: int) -> None:
        num_kv_heads, length, head_dim = layer.keys.shape
        pages = length // layer.page_size
        self._layer = layer
        self._layout = SketchLayout(bits, head_dim, layer.page_size)
        self._rows = torch.empty(num_kv_heads, pages, self._layout.width, dtype=torch.uint8)
        for head, row in enumerate(self._rows):  # one by one: temporary memory is many times that of the rows
            paged = (t[head : head + 1, : pages * layer.page_size] for t in (layer.keys, layer.values))
            row.copy_(sketch_rows(bits, *(t.unflatten(1, (pages, layer.page_size)) for t in paged))[0])
        native.advise_huge(self._rows)
        self.tokens = min(tokens, pages * layer.page_size)

    @property
    def row_bytes(self) -> int:
        return self._rows.numel()

    def choose(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the chosen tokens of each KV head, and output and log-sum-exp of the rest."""
        layer = self._layer
        rotated = (layer.queries.float() * layer.scale) @ rotation(self._layout.head_dim, layer.queries.device)
        count, heads = self._rows.shape[1] * layer.page_size, len(layer.keys)
        return native.choose_sketched(rotated, self._rows, self._layout, 0, count, self.tokens, heads)

    def attend(self) -> Tensor:
        """Return attention over the chosen tokens, merged with the rest."""
        layer = self._layer
        ids, values, lse = self.choose()
        output, seen_lse = native.attend_units(layer.queries, layer.keys, layer.values, ids, 1, (), layer.scale)
        seen = Part(output[None, :, None], seen_lse[None, :, None])
        return merge(seen, Part(values[None, :, None], lse[None, :, None])).output[0, :, 0]
