"""SparQ in decode: channels, shares, and the mean value in place of what is not seen."""

from typing import Any

import pytest
import torch
from contracts.harness import SHAPE, Runner, Tokens, draw_tokens
from torch import Tensor

from kvsift.methods.sparq import SparQ, ValueMean
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan
from kvsift.types import LayerShape

BUDGET = Budget(tokens=30, sinks=3, window=6, dense_layers=())
PROMPT = 70


def decoded(method: SparQ, tokens: Tokens, budget: Budget = BUDGET, shape: LayerShape = SHAPE) -> tuple[Tensor, Runner]:
    """Answers to the tokens behind the prompt, one by one."""
    runner = Runner(Plan(decode=Rule(method, budget)), shape=shape)
    output = runner.feed_all(tokens, PROMPT, range(PROMPT, tokens.length))
    return output[:, PROMPT:], runner


def by_the_formula(tokens: Tokens, position: int, channels: int, *, per_head: bool, logits_summed: bool) -> Tensor:
    """The answer to one token, [num_query_heads, head_dim], in float64 and loops."""
    group, stop = SHAPE.group_size, position + 1
    chosen_room = 30 - 3 - 6
    heads = []
    for kv_head in range(SHAPE.num_kv_heads):
        own = range(kv_head * group, (kv_head + 1) * group)
        q = tokens.queries[own.start : own.stop, position].double()
        keys, values = tokens.keys[kv_head, :stop].double(), tokens.values[kv_head, :stop].double()
        kept = q.abs().sum(0).topk(channels).indices
        sharp = (q[:, kept].abs().sum(1) / q.abs().sum(1)).sqrt()
        logits = q[:, kept] @ keys[:, kept].T * SHAPE.scale / sharp[:, None]
        shares = logits.softmax(-1)
        for head in range(group):
            ranked = shares[head] if per_head else (logits if logits_summed else shares).sum(0)
            middle = ranked[3 : stop - 6].topk(chosen_room).indices + 3
            seen = torch.cat([torch.arange(3), middle, torch.arange(stop - 6, stop)])
            a = shares[head, seen].sum()
            weights = (q[head] @ keys[seen].T * SHAPE.scale).softmax(-1)
            heads.append(a * (weights @ values[seen]) + (1 - a) * values.mean(0))
    return torch.stack(heads).float()


@pytest.mark.parametrize("second_copy", [False, True])
@pytest.mark.parametrize(
    ("knobs", "formula"),
    [
        ({}, {"per_head": False, "logits_summed": False}),
        ({"heads": "query"}, {"per_head": True, "logits_summed": False}),
        ({"compat": "code"}, {"per_head": False, "logits_summed": True}),
    ],
)
def test_decode_is_the_formula(knobs: dict[str, Any], formula: dict[str, bool], second_copy: bool) -> None:
    tokens = draw_tokens(PROMPT + 6, 5)
    output, _ = decoded(SparQ(channels=3, second_copy=second_copy, **knobs), tokens)
    expected = [by_the_formula(tokens, position, 3, **formula) for position in range(PROMPT, tokens.length)]
    torch.testing.assert_close(output, torch.stack(expected, 1), rtol=1e-4, atol=1e-5)


def test_without_the_mean_value_it_is_attention_over_what_is_visible() -> None:
    """And the two differ, or the tests above prove nothing."""
    tokens = draw_tokens(PROMPT + 1, 5)
    plain, _ = decoded(SparQ(channels=3, mean_value=False), tokens)
    other = tokens._replace(values=tokens.values.clone())
    other.values[:, :] += 1  # attention follows a shift of all values, and so does their mean
    corrected = [decoded(SparQ(channels=3), each)[0] for each in (tokens, other)]
    torch.testing.assert_close(corrected[1], corrected[0] + 1, rtol=1e-4, atol=1e-5)
    assert float((corrected[0] - plain).abs().max()) > 1e-3


def test_what_is_seen_stands_for_all_when_all_channels_are_sure_of_it() -> None:
    """One key takes all attention: nothing is left for the mean value, however far it lies."""
    tokens = draw_tokens(PROMPT + 1, 5)
    tokens.keys[:, 20] = 50 * tokens.queries.unflatten(0, (2, 2)).mean(1)[:, -1]
    tokens.queries[:] = tokens.queries.unflatten(0, (2, 2)).mean(1).repeat_interleave(2, 0)
    tokens.values[:, :PROMPT] += 1000
    tokens.values[:, 20] = 1.0
    output, _ = decoded(SparQ(channels=8), tokens)
    torch.testing.assert_close(output, torch.ones_like(output))


def test_a_second_copy_is_read_in_part() -> None:
    """3 of 8 channels, 4 bytes each, of the keys; and of the values those of the incomplete block."""
    tokens = draw_tokens(PROMPT + 1, 5)
    read = {}
    for second_copy in (False, True):
        method = SparQ(channels=3, second_copy=second_copy, mean_value=False)
        runner = Runner(Plan(decode=Rule(method, BUDGET)))
        for stop in range(PROMPT, tokens.length + 1):
            runner.feed(tokens.part(0 if stop == PROMPT else stop - 1, stop), decode_tokens=int(stop > PROMPT))
        runner.feed(draw_tokens(1, 0), decode_tokens=1)  # the first step copies what is there
        before = runner.stats.phase("decode").index_bytes_read
        runner.feed(draw_tokens(1, 0), decode_tokens=1)
        read[second_copy] = runner.stats.phase("decode").index_bytes_read - before
    length, heads = PROMPT + 3, SHAPE.num_kv_heads
    assert read[False] == 4 * heads * length * 8
    assert read[True] == 4 * heads * (length * 3 + 8)  # and the new key, to be copied


class Values:
    """A reader of values alone."""

    def __init__(self, values: Tensor) -> None:
        self.all = values
        self.tokens_read = 0

    def values(self, start: int, stop: int) -> Tensor:
        self.tokens_read += stop - start
        return self.all[:, start:stop]

    def counted(self, remembered: Tensor) -> Tensor:
        return remembered


def test_the_mean_of_long_contexts_reads_a_block_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any steps, after a roll-back into a block and in a fork."""
    monkeypatch.setattr("kvsift.methods.sparq.TOKENS_PER_SUM", 8)
    monkeypatch.setattr("kvsift.methods.sparq.AT_ONCE", 3)
    reader, mean = Values(draw_tokens(100, 1).values), ValueMean()

    def check(mean: ValueMean, stop: int) -> None:
        found = mean.read(reader, stop)  # type: ignore[arg-type]
        torch.testing.assert_close(found, reader.all[:, :stop].mean(1))
        assert found.dtype == torch.float32

    for stop in (1, 7, 8, 61, 62, 100):
        check(mean, stop)
    reader.tokens_read = 0
    check(mean, 100)
    assert reader.tokens_read == 100 % 8
    fork = mean.fork()
    mean.crop(37)
    reader.all = torch.cat([reader.all[:, :37], draw_tokens(63, 2).values], 1)
    check(mean, 37)
    check(mean, 90)
    mean.crop(0)
    check(mean, 50)
    assert fork.num_blocks == 12


def test_settings_of_paper_and_notebook() -> None:
    paper, code = parse_plan("sparq:compat=paper").decode, parse_plan("sparq:compat=code").decode
    assert (paper.budget.tokens, paper.budget.window, paper.budget.sinks, paper.budget.dense_layers) == (128, 32, 0, ())
    assert (code.budget.tokens, code.budget.window) == (64, 16)
    assert SparQ().state_bytes_per_token(SHAPE) == 2 * 8 * 8 / 256
    assert SparQ(second_copy=True, mean_value=False).state_bytes_per_token(SHAPE) == 2 * 8 * 2
