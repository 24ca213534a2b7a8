"""Prompts are cut at absolute positions, once for all layers of a pass that do not see everything."""

from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.segments import SegmentGroup, groups_of
from kvsift.plan.plan import Rule
from kvsift.plan.syntax import parse_plan


def rule_of(spec: str) -> Rule:
    rule = parse_plan(f"prefill={spec}").prefill
    assert rule is not None
    return rule


RULE = rule_of("quoka:budget=100:chunk=32:window=8:sinks=4:dense_layers=1")


def cut(start: int, stop: int, together: int | None = None) -> list[tuple[bool, list[int]]]:
    messages = LayerMessages()
    messages.begin(0, 2)
    groups = groups_of(RULE, 2, start, stop, messages, 0, together)
    assert [group.stop for group in groups[:-1]] == [group.start for group in groups[1:]]
    return [(group.is_dense, [group.start, *(end for _, end in group.bounds)]) for group in groups]


def test_segments_of_one_length_are_together_and_shorter_ends_alone() -> None:
    assert cut(130, 300) == [(False, [130, 160]), (False, [160, 192, 224, 256, 288]), (False, [288, 300])]
    assert cut(160, 224) == [(False, [160, 192, 224])]
    assert cut(0, 200) == [(True, [0, 128]), (False, [128, 160, 192]), (False, [192, 200])]
    assert cut(3, 60) == [(True, [3, 60])]


def test_as_many_as_memory_is_for_are_together() -> None:
    assert cut(160, 320, 2) == [(False, [160, 192]), (False, [192, 224, 256]), (False, [256, 288, 320])]


def test_layers_of_a_pass_share_what_is_cut_and_dense_layers_see_everything() -> None:
    messages = LayerMessages()

    def groups(layer: int, rule: Rule = RULE) -> tuple[SegmentGroup, ...]:
        messages.begin(0, layer)
        return groups_of(rule, layer, 160, 224, messages, 0)

    first = groups(0)
    assert [group.is_dense for group in groups(1)] == [True]
    assert groups(2) is first
    assert groups(3, rule_of("quoka:budget=60:chunk=32:window=8")) is not first
    assert groups(4) is first
    assert groups(0) is not first, "another pass"


def test_what_is_counted_of_a_group_is_that_of_its_segments() -> None:
    messages = LayerMessages()
    messages.begin(0, 2)
    (group,) = groups_of(RULE, 2, 160, 224, messages, 0)
    assert group.always == ((4, 153), (4, 185))
    assert group.context_tokens == sum(range(161, 225))
    assert group.visible_always == 2 * (32 * (4 + 7) + sum(range(1, 33)))
    assert group.read_always == 2 * (4 + 39)
    assert group.read_densely == 192 + 224
    assert [limit.units for limit in group.choices.limits] == [88, 88]
    assert [each.count for each in group.choices.candidates] == [149, 181]
