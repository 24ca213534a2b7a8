"""Sketch: votes, the estimate of the rest, and its counters. The contracts are in tests/contracts."""

from __future__ import annotations

import pytest
from contracts.harness import SHAPE, Runner, Tokens, answers, draw_tokens
from refusals import refused
from torch import Tensor

from kvsift.methods.sketch import Sketch
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan

KNOBS = "budget=16:sinks=4:window=4:dense_layers=none:page_size=4"


def steps_of(tokens: Tokens, prompt: int) -> range:
    return range(prompt, tokens.length)


def error(plan: str, tokens: Tokens, prompt: int) -> float:
    """Mean square error of decode against dense attention."""
    dense = answers(Plan(), tokens, prompt)[:, prompt:]
    output = answers(parse_plan(plan), tokens, prompt, steps_of(tokens, prompt))[:, prompt:]
    return float((output - dense).square().mean())


def alike_in_pages(tokens: Tokens, page_size: int) -> Tokens:
    def alike(tensor: Tensor) -> Tensor:
        return tensor[:, ::page_size].repeat_interleave(page_size, 1)[:, : tensor.shape[1]]

    return Tokens(tokens.queries, alike(tokens.keys), alike(tokens.values))


@pytest.mark.parametrize("bits", [1, 2])
def test_the_rest_is_exact_where_the_tokens_of_a_page_are_alike(bits: int) -> None:
    tokens = alike_in_pages(draw_tokens(120, 0), 4)
    estimated = error(f"sketch:{KNOBS}:bits={bits}", tokens, 100)
    left_out = error(f"sketch:{KNOBS}:bits={bits}:rest=false", tokens, 100)
    assert estimated < 2e-3 < 0.02 < left_out


@pytest.mark.parametrize("seed", range(3))
def test_an_estimate_of_the_rest_is_better_than_none(seed: int) -> None:
    tokens = draw_tokens(160, seed)
    tokens = tokens._replace(queries=tokens.queries / 3)  # flat attention
    assert error(f"sketch:{KNOBS}", tokens, 120) < 0.7 * error(f"sketch:{KNOBS}:rest=false", tokens, 120)


def test_the_estimated_share_is_counted() -> None:
    tokens = alike_in_pages(draw_tokens(121, 1), 4)
    runner = Runner(parse_plan(f"sketch:{KNOBS}"))
    runner.stats.probe_every = 1
    runner.feed_all(tokens, 120, [120])
    decode = runner.stats.report()["phases"]["decode"]
    assert decode["visible_tokens"] <= 16
    assert decode["estimated_share"] == pytest.approx(1 - decode["recovery"], abs=0.02)
    left_out = Runner(parse_plan(f"sketch:{KNOBS}:rest=false"))
    left_out.feed_all(tokens, 120, [120])
    assert left_out.stats.report()["phases"]["decode"]["estimated_share"] is None


def test_heads_vote_by_their_shares_of_attention() -> None:
    """One head of a group sees a single token that matters; the logits of the other are larger but all alike."""
    tokens = draw_tokens(101, 0)
    tokens.keys[:, :100] *= 0.01
    tokens.keys[:, 40, 0] = 4.0
    tokens.keys[:, :, 1] = 10.0
    tokens.queries[:, 100] = 0.0
    tokens.queries[::2, 100, 0] = 8.0
    tokens.queries[1::2, 100, 1] = 8.0
    assert SHAPE.group_size == 2
    runner, chosen = Runner(parse_plan(f"sketch:{KNOBS}".replace("budget=16", "budget=9"))), list[Tensor]()

    class Spy:
        def before_chunk(self, *arguments: object) -> None: ...

        def after_segment(self, shape: object, row: int, segment: object, spans: object, selection: object) -> None:
            if selection is not None:
                chosen.append(selection.units)  # type: ignore[attr-defined]

    runner.stats.observer = Spy()  # type: ignore[assignment]
    runner.feed_all(tokens, 100, [100])
    assert all(40 in units.tolist() for units in chosen[-1])


def test_a_wrong_number_of_bits_is_refused() -> None:
    with refused("invalid_value: bits=3"):
        Sketch(bits=3)  # type: ignore[arg-type]
    with refused("invalid_value: page_size=0"):
        Sketch(page_size=0)
