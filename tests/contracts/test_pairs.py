"""Any prefill rule with any decode rule: in one plan each answers as it does alone."""

import pytest
import torch
from contracts.harness import Runner, answers, assert_same_answer, draw_tokens, least_tokens, small
from turns import every_fourth

from kvsift.methods import catalogue, method_class
from kvsift.methods.base import Phase
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule


def able(phase: Phase) -> list[str]:
    return [name for name in catalogue() if phase in method_class(name).phases]


def rule(name: str, phase: Phase) -> Rule:
    method = small(name)()
    if method.traits.unbounded:
        return Rule(method)
    sinks, window = 3, 6 if method.traits.selects else Budget().window
    return Rule(method, Budget(least_tokens(method, sinks, window, 2), sinks=sinks, window=window, dense_layers=()))


PROMPT, GENERATED = 160, 5  # three segments of the largest size, the last one short


@pytest.mark.parametrize(("prefill", "decode"), every_fourth(able("prefill"), able("decode")))
def test_each_rule_of_a_pair_answers_as_it_does_alone(prefill: str, decode: str) -> None:
    """Layer by layer: what a prefill rule hides from the prompt, it hides from nothing that comes later. After a
    roll-back and in a fork too."""
    first, second = rule(prefill, "prefill"), rule(decode, "decode")
    tokens = draw_tokens(PROMPT + GENERATED, 7)
    size = first.method.segment_size
    expected = torch.cat(
        [
            answers(Plan(prefill=first), tokens, PROMPT)[:, :PROMPT],
            answers(Plan(decode=second), tokens, PROMPT)[:, PROMPT:],
        ],
        1,
    )
    pair = Plan(first, second)
    steps = range(PROMPT, tokens.length)
    assert_same_answer(answers(pair, tokens, PROMPT), expected, "a rule answers differently in company")
    cuts = [*range(size, PROMPT, size), *steps]
    assert_same_answer(answers(pair, tokens, PROMPT, cuts, scattered=True), expected, "chunks or pages mattered")

    runner = Runner(pair, num_rows=2)
    keep = min(size, PROMPT // 2 // size * size)
    runner.feed(tokens.part(0, keep), draw_tokens(9, 1))
    runner.feed(draw_tokens(12, 2), None, decode_tokens=2)
    runner.crop(0, keep)
    runner.fork([1, 0])
    output = [runner.feed(None, tokens.part(keep, PROMPT))[1]]
    output += [runner.feed(None, tokens.part(step, step + 1), decode_tokens=1)[1] for step in steps]
    assert_same_answer(torch.cat(output, 1), expected[:, keep:], "a roll-back or a fork left a trace")
