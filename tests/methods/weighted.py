"""Tokens with attention weights written by hand, and runs that show which tokens each query saw."""

from __future__ import annotations

import torch
from contracts.harness import Runner, Tokens
from torch import Tensor

from kvsift.plan.plan import Plan
from kvsift.types import LayerShape


def weighted(weights: list[list[list[float]]], num_kv_heads: int) -> tuple[LayerShape, Tokens]:
    """Tokens whose query i gives token j the weight ``weights[head][i][j]`` where it sees all tokens up to itself.

    Keys and values are unit vectors: queries are logits, and outputs are weights again.
    """
    length = max(map(len, weights))
    queries = torch.full((len(weights), length, length), -30.0)  # e^-30: seen, and of no weight
    for head, rows in enumerate(weights):
        for i, row in enumerate(rows):
            queries[head, i, : len(row)] = torch.tensor(row, dtype=torch.float32).log()
    units = torch.eye(length).expand(num_kv_heads, -1, -1)
    shape = LayerShape(2, len(weights), num_kv_heads, length, 1.0)
    return shape, Tokens(queries, units, units)


def seen(plan: Plan, shape: LayerShape, tokens: Tokens, prompt: int) -> list[list[list[int]]]:
    """The tokens that each query head saw at each decode step, [num_query_heads][step]."""
    output = Runner(plan, shape=shape).feed_all(tokens, prompt, range(prompt, tokens.length))
    return [[row.nonzero().flatten().tolist() for row in head] for head in output[:, prompt:]]


def softmax_over(tokens: Tokens, query: int, visible: Tensor, shape: LayerShape) -> Tensor:
    """Weights of one query over what it sees, the textbook way: visible bool [num_query_heads, num_tokens] -> float64
    [num_query_heads, num_tokens]."""
    keys = tokens.keys.double().repeat_interleave(shape.group_size, 0)
    logits = (keys @ tokens.queries[:, query, :, None].double()).squeeze(-1) * shape.scale
    return logits.masked_fill(~visible, -torch.inf).softmax(-1)


class Keys:
    """A reader of given keys, which counts the bytes of what a method remembers."""

    def __init__(self, keys: Tensor) -> None:
        self.given, self.length, self.read = keys, keys.shape[1], 0

    def keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self.given[:, start:stop]

    borrow = keys

    def counted(self, remembered: Tensor) -> Tensor:
        self.read += remembered.numel() * remembered.element_size()
        return remembered

    def count_bytes(self, num_bytes: int) -> None:
        self.read += num_bytes
