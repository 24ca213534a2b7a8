"""Tokens with attention weights written by hand, and which tokens each query sees: of a run, and the slow way."""

from collections.abc import Callable

import torch
from contracts.checks import masked_attention
from contracts.harness import SHAPE, Runner, Tokens, assert_same_answer
from torch import Tensor

from kvsift.methods.common.dropping import DroppingMethod
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
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


def kept_by_rule(worths: list[dict[int, float]], k: int, own: int) -> list[set[int]]:
    """Each head keeps ``own`` and a fifth of what is left of k; the rest is for the largest worths of all. Ties go to
    the lower head, then to the earlier token."""
    own = min(own, k)
    ranked = [sorted(worth, key=lambda token: (-worth[token], token)) for worth in worths]
    safe = own + int(0.2 * (k - own))
    kept = [set(tokens[:safe]) for tokens in ranked]
    rest = [(-worths[head][token], head, token) for head, tokens in enumerate(ranked) for token in tokens[safe:]]
    for _, head, token in sorted(rest)[: k * len(worths) - sum(map(len, kept))]:
        kept[head].add(token)
    return kept


def simulate(
    tokens: Tokens, runs: list[tuple[int, int]], num_rows: int, budget: Budget,
    worths_of: Callable[[int, Tensor], tuple[Tensor, int]],
) -> Tensor:  # fmt: skip
    """What each query of the generated runs sees, the slow way: bool [num_query_heads, num_queries, num_tokens]. Heads
    that share nothing keep as many each.

    ``worths_of`` tells of a query and bool [num_rows, num_tokens] that are left before it: worths, alike, and how many
    tokens are every head's own.
    """
    left = torch.ones(num_rows, tokens.length, dtype=torch.bool)
    group, rows = SHAPE.num_query_heads // num_rows, []
    for query in (query for start, stop in runs for query in range(start, stop)):
        stop = budget.always(query, 1)[1]
        worths, own = worths_of(query, left & (torch.arange(tokens.length) < query))
        others = [[j for j in range(budget.sinks, stop) if row[j]] for row in left]
        by_head = [{j: float(worths[head, j]) for j in of_head} for head, of_head in enumerate(others)]
        units = budget.units(query, 1)
        kept = kept_by_rule(by_head, units, own if budget.head_budgets == "adaptive" else units)
        for head, of_head in enumerate(others):
            left[head, [j for j in of_head if j not in kept[head]]] = False
        rows.append((left & (torch.arange(tokens.length) <= query)).repeat_interleave(group, 0))
    return torch.stack(rows, 1)


def compare(
    method: DroppingMethod, budget: Budget, tokens: Tokens, runs: list[tuple[int, int]], visible: Tensor,
    joins: bool = False,
) -> None:  # fmt: skip
    """The answers of generated runs are attention over what is visible, which is the budget in the mean."""
    plan, at, answers = Plan(decode=Rule(method, budget)), 0, []
    runner = Runner(Plan() if joins else plan)
    for start, stop in runs:
        runner.feed(tokens.part(at, start))
        if joins:
            runner.attention.replan(plan)
        answers.append(runner.feed(tokens.part(start, stop), decode_tokens=stop - start)[0])
        at = stop
    queries = [query for run in runs for query in range(*run)]
    mask = torch.zeros(SHAPE.num_query_heads, tokens.length, tokens.length, dtype=torch.bool)
    mask[:, queries] = visible
    mask[:, [query for query in range(tokens.length) if query not in queries], 0] = True  # not compared
    assert_same_answer(torch.cat(answers, 1), masked_attention(tokens, mask)[:, queries], "not what the rule says")
    by_head = visible.sum(-1).double()
    assert bool((by_head.mean(0) == budget.tokens).all())
    assert bool((by_head != by_head[0]).any()) == (budget.head_budgets == "adaptive"), "who shares, and nobody else"
    tally = runner.stats.phase("decode")
    assert float(tally.visible_tokens) / len(queries) == budget.tokens


class Keys:
    """A reader of given keys, which counts the bytes of what a method remembers."""

    def __init__(self, keys: Tensor) -> None:
        self.given, self.length, self.read = keys, keys.shape[1], 0

    def keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self.given[:, start:stop]

    borrow = borrow_in_place = keys

    def counted(self, remembered: Tensor) -> Tensor:
        self.read += remembered.numel() * remembered.element_size()
        return remembered

    def count_bytes(self, num_bytes: int) -> None:
        self.read += num_bytes
