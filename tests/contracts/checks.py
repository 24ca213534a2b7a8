"""The contracts of every method, one function each; docs/architecture.md lists names and docstrings.

A check takes a factory of methods and a phase that they select in; it raises AssertionError when the contract is
broken. ``ALL_CHECKS`` is what a method must pass; nothing here knows any method by name.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from contracts.harness import (
    SHAPE,
    Case,
    Check,
    MethodFactory,
    Runner,
    Stack,
    Tokens,
    answers,
    assert_same_answer,
    calls,
    cases,
    draw_tokens,
    examples,
    least_tokens,
    phase_plan,
    spy,
    spy_scores,
    takes_mass,
    visible_tokens,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from torch import Tensor

from kvsift.methods.base import Phase
from kvsift.plan.placement import Placement
from kvsift.plan.plan import Plan
from kvsift.types import Limit, Selection

SHARES = st.sampled_from([sixteenths / 16 for sixteenths in range(17)])  # floats would mostly be 0 and 1

# 1 ---------------------------------------------------------------------------------------------------------------


def budget_larger_than_context_is_dense(make: MethodFactory, phase: Phase) -> None:
    """By tokens, ratio, mass, minimum context or a dense layer: the dense answer, bit for bit."""
    enough = ["tokens", "ratio", "min_context", "dense_layers"] + ["mass"] * (
        takes_mass(make(), phase) and not make().traits.unbounded
    )

    @examples(25)
    @given(case=cases(make(), phase), reason=st.sampled_from(enough))
    def holds(case: Case, reason: str) -> None:
        method, total = make(), case.length
        least = least_tokens(method, case.budget.sinks, case.budget.window)
        everything: dict[str, dict[str, Any]] = {
            "tokens": {"tokens": max(total, least), "ratio": None, "mass": None},
            "ratio": {"tokens": None, "ratio": 1.0, "mass": None},
            "mass": {"tokens": None, "ratio": None, "mass": 1.0},
            "min_context": {"min_context": total + 1},
            "dense_layers": {"dense_layers": (0, SHAPE.layer)},
        }
        runner = Runner(phase_plan(method, replace(case.budget, **everything[reason]), phase))
        steps = range(case.prompt, total)
        answer = runner.feed_all(case.tokens, case.prompt, steps)
        assert torch.equal(answer, answers(Plan(), case.tokens, case.prompt)), f"{reason} is not dense"
        tally = runner.stats.phase(phase)
        assert tally.sparse_queries == 0
        assert float(tally.visible_tokens) == tally.context_tokens

    run(holds)


# 2 ---------------------------------------------------------------------------------------------------------------


def chunking_does_not_change_the_answer(make: MethodFactory, phase: Phase) -> None:
    """A prompt cut at multiples of the segment size, or anywhere when only decode is sparse; generated tokens one by
    one, several at once, or in one call with the end of the prompt."""
    step = make().segment_size if phase == "prefill" else 1

    @examples(15)
    @given(case=cases(make(), phase), cuts=st.lists(st.integers(1, 90), max_size=12))
    def holds(case: Case, cuts: list[int]) -> None:
        plan = phase_plan(make(), case.budget, phase)
        cut = answers(plan, case.tokens, case.prompt, [step * cut for cut in cuts])
        assert_same_answer(cut, answers(plan, case.tokens, case.prompt), "chunking changed the answer")

    run(holds)


def neighbours_and_padding_do_not_change_the_answer(make: MethodFactory, phase: Phase) -> None:
    """A row in a ragged batch whose padding is NaN answers as it does alone."""

    @examples(8)
    @given(rows=st.tuples(*[cases(make(), phase)] * 3), padding=st.integers(0, 3))
    def holds(rows: tuple[Case, ...], padding: int) -> None:
        plan = phase_plan(make(), rows[0].budget, phase)
        batch = Runner(plan, num_rows=len(rows))
        outputs: list[list[Tensor]] = [[] for _ in rows]
        size = make().segment_size
        for start, stop in calls(max(case.prompt for case in rows), size):
            _feed(batch, [case.tokens.part(start, min(stop, case.prompt)) for case in rows], outputs, 0, padding)
        for step in range(max(case.decode for case in rows)):
            tokens = [case.tokens.part(case.prompt + step, case.prompt + step + 1) for case in rows]
            _feed(batch, tokens, outputs, 1, padding)
        for case, output in zip(rows, outputs):
            cuts = [*range(size, case.prompt, size), *range(case.prompt, case.length)]
            alone = answers(plan, case.tokens, case.prompt, cuts)
            assert_same_answer(torch.cat(output, 1), alone, "a batch changed the answer")

    run(holds)


def scattered_pages_do_not_change_the_answer(make: MethodFactory, phase: Phase) -> None:
    """The answer is the same for any physical order of pages."""

    @examples(10)
    @given(case=cases(make(), phase))
    def holds(case: Case) -> None:
        plan = phase_plan(make(), case.budget, phase)
        scattered = answers(plan, case.tokens, case.prompt, scattered=True)
        assert_same_answer(scattered, answers(plan, case.tokens, case.prompt), "scattered pages changed the answer")

    run(holds)


# 3 ---------------------------------------------------------------------------------------------------------------


def placements_do_not_change_the_answer(make: MethodFactory, phase: Phase) -> None:
    """Every placement has the same answer and the same counts, after a rollback too."""
    if phase == "prefill" and not make().traits.unbounded:
        return  # prefill is dense where KV is in host memory, which is refused at the start

    @examples(15)
    @given(case=cases(make(), phase), size=st.sampled_from([7, 32, 1000]), cached=st.sampled_from([1, 16, 1000]))
    def holds(case: Case, size: int, cached: int) -> None:
        plan = phase_plan(make(), case.budget, phase)
        device = Runner(plan)
        offload = Placement("offload", device_cache=cached)
        apart = {"split": Runner(plan, placement="split"), "offload": Runner(plan, placement=offload)}
        cuts = [*range(0, case.prompt, size), *range(case.prompt, case.length)]
        first = device.feed_all(case.tokens, case.prompt, cuts)
        device.crop(0, case.prompt)
        again = device.feed_all(case.tokens, case.prompt, cuts, start=case.prompt)
        for name, other in apart.items():
            answer = other.feed_all(case.tokens, case.prompt, cuts)
            assert_same_answer(answer, first, f"placement {name} gave another answer")
            other.crop(0, case.prompt)
            answer = other.feed_all(case.tokens, case.prompt, cuts, start=case.prompt)
            assert_same_answer(answer, again, f"placement {name} gave another answer after a roll-back")
            for key in ("visible_tokens", "sparse_queries", "kv_bytes_read", "context_tokens"):
                assert getattr(device.stats.phase(phase), key) == getattr(other.stats.phase(phase), key), (name, key)

    run(holds)


def selections_are_well_formed(make: MethodFactory, phase: Phase) -> None:
    """Within the candidates, unique, ascending, -1 only at the end, as many as the limit allows; candidates are
    complete units before the queries, and the limit is at least one and below their number."""

    @examples(25)
    @given(case=cases(make(), phase))
    def holds(case: Case) -> None:
        method = make()
        asked, scores = spy(method), spy_scores(method)
        answers(phase_plan(method, case.budget, phase), case.tokens, case.prompt)
        assert not any(bool(score.isnan().any()) for score in scores), "a score is NaN: what was never written counts"
        for question in asked:
            candidates, limit, selection = question.candidates, question.limit, question.selection
            assert candidates.unit_size == method.unit_size
            assert candidates.count >= 1
            assert 1 <= limit.units <= candidates.count
            assert limit.mass is not None or limit.units < candidates.count
            assert case.budget.window == 0 or candidates.stop * candidates.unit_size <= question.start
            _check_form(selection, candidates.unit_size)
            units = selection.units
            chosen = units >= 0
            assert bool(((units >= candidates.first) & (units < candidates.stop) | ~chosen).all()), "not a candidate"
            assert bool((chosen.sum(1) <= limit.units).all()), "more than the limit"
            if limit.mass is None and method.traits.fills:
                assert bool((chosen.sum(1) == limit.units).all()), "less than the limit although no mass was asked for"

    run(holds)


def all_candidates_are_chosen_when_all_fit(make: MethodFactory, phase: Phase) -> None:
    """With a limit of all candidates, a method returns every one, the newest page too."""

    @examples(15)
    @given(case=cases(make(), phase, ["tokens"]))
    def holds(case: Case) -> None:
        def ask_for_all(answer: Any, state: Any, shape: Any, queries: Any, start: Any, candidates: Any, limit: Any,
                        reader: Any) -> Selection:  # fmt: skip
            copy = None if state is None else state.fork()
            selection = answer(copy, shape, queries, start, candidates, Limit(candidates.count), reader)
            every = list(range(candidates.first, candidates.stop))
            assert all(row == every for row in selection.units.tolist()), "candidates are missing although all fit"
            return answer(state, shape, queries, start, candidates, limit, reader)

        method = make()
        spy(method, ask_for_all)
        answers(phase_plan(method, case.budget, phase), case.tokens, case.prompt)

    run(holds)


def choosing_nothing_changes_nothing(make: MethodFactory, phase: Phase) -> None:
    """If the always-visible tokens have the requested mass, the answer is attention over those."""
    if make().traits.unbounded or not takes_mass(make(), phase):
        return

    @examples(10)
    @given(case=cases(make(), phase, ["tokens"]))
    def holds(case: Case) -> None:
        budget = replace(
            case.budget, tokens=None, mass=1e-9, window=max(case.budget.window, 2)
        )  # one token is the query itself
        method = make()
        asked = spy(method, tokens_alone)
        runner = Runner(phase_plan(method, budget, phase))
        answer = runner.feed_all(case.tokens, case.prompt, range(case.prompt, case.length))
        assert all(bool((question.selection.units == -1).all()) for question in asked)
        for question in asked:
            stop = question.start + question.num_queries
            sinks_stop, window_start = budget.always(question.start, method.unit_size)
            positions = torch.arange(stop)
            seen = (positions < sinks_stop) | (positions >= window_start)
            mask = seen & (positions <= torch.arange(question.start, stop).unsqueeze(1))
            expected = masked_attention(case.tokens.part(0, stop), mask)
            assert_same_answer(answer[:, question.start : stop], expected[:, -question.num_queries :], "not the spans")

    run(holds)


# 4 ---------------------------------------------------------------------------------------------------------------


def future_does_not_influence_the_past(make: MethodFactory, phase: Phase) -> None:
    """Keys and values after a token, and padding, do not change the answers up to it; nor do the queries of generated
    tokens, each of which is answered as if it were alone."""

    @examples(30)
    @given(case=cases(make(), phase), where=SHARES, at_once=st.booleans())
    def holds(case: Case, where: float, at_once: bool) -> None:
        past = int(where * (case.length - 1)) + 1
        tokens, other = case.tokens, draw_tokens(case.length, case.seed + 1)
        changed = tokens.part(0, past).then(Tokens(*(5 * tensor for tensor in other)).part(past))
        if phase == "prefill":
            changed = changed._replace(queries=tokens.queries)
        plan = phase_plan(make(), case.budget, phase)
        cuts = [] if at_once else range(case.prompt, case.length)
        answer = Runner(plan).feed_all(tokens, case.prompt, cuts, padding=2)
        other_future = Runner(plan).feed_all(changed, case.prompt, cuts, padding=2, padded_with=9.0)
        assert_same_answer(other_future[:, :past], answer[:, :past], "the future changed the past")

    run(holds)


def later_segments_do_not_influence_earlier_ones(make: MethodFactory, phase: Phase) -> None:
    """Whole tokens, with their queries, from a position on change nothing in the segments before that position's, and
    nothing in other rows of the batch; for any chunks."""
    size = make().segment_size if phase == "prefill" else 1
    most = 4 if phase == "prefill" else 64

    @examples(12)
    @given(rows=st.tuples(*[cases(make(), phase)] * 2), where=SHARES, segments=st.integers(most // 4, most))
    def holds(rows: tuple[Case, ...], where: float, segments: int) -> None:
        plan = phase_plan(make(), rows[0].budget, phase)
        past = int(where * (rows[0].length - 1)) + 1
        other = draw_tokens(rows[0].length, rows[0].seed + 1)
        changed = rows[0].tokens.part(0, past).then(Tokens(*(5 * tensor for tensor in other)).part(past))
        outputs = []
        for first in (rows[0].tokens, changed):
            batch, tokens = Runner(plan, num_rows=2), (first, rows[1].tokens)
            outputs.append(_in_chunks(batch, tokens, [case.prompt for case in rows], segments * size))
        same = past // size * size
        before, after = (output[0][:, :same] for output in outputs)
        assert_same_answer(after, before, "a later segment changed an earlier one")
        assert_same_answer(outputs[1][1], outputs[0][1], "the future of one row changed another")

    run(holds)


# 5 ---------------------------------------------------------------------------------------------------------------


def summaries_do_not_depend_on_how_they_were_built(make: MethodFactory, phase: Phase) -> None:
    """Token by token, by chunk, in one shot, after a rollback and in a fork: the same rows, bit for bit."""

    @examples(10)
    @given(
        case=cases(make(), phase), cuts=st.lists(st.integers(1, 600), max_size=8), overshoot=st.integers(1, 9),
        scattered=st.booleans(),
    )  # fmt: skip
    def holds(case: Case, cuts: list[int], overshoot: int, scattered: bool) -> None:
        plan = phase_plan(make(), case.budget, phase)
        if not Runner(plan).store.summaries:
            return  # of most methods
        tokens = case.tokens.part(0, 90)
        too_many = tokens.then(draw_tokens(overshoot, case.seed + 1))

        def built(tokens: Tokens, cuts: Any, num_rows: int = 1) -> Runner:
            runner = Runner(plan, num_rows, scattered=scattered)
            for start, stop in zip([0, *cuts], [*cuts, tokens.length]):
                runner.feed(tokens.part(start, stop), *[None] * (num_rows - 1))
            return runner

        one_shot = built(tokens, []).summaries()
        by_token = built(tokens, range(1, tokens.length)).summaries()
        by_chunk = built(tokens, sorted({cut for cut in cuts if cut < tokens.length})).summaries()
        rolled_back = built(too_many, [tokens.length // 2])
        rolled_back.crop(0, tokens.length)
        forked = built(too_many, [], num_rows=2)
        forked.fork([0, 0])
        forked.crop(1, tokens.length)
        original = forked.summaries(0)
        forked.feed(None, draw_tokens(5, case.seed + 2))
        forked.crop(1, tokens.length)
        for kind, rows in one_shot.items():
            assert torch.equal(by_token[kind], rows), "token by token"
            assert torch.equal(by_chunk[kind], rows), "by chunk"
            assert torch.equal(rolled_back.summaries()[kind], rows), "rolled back"
            assert torch.equal(forked.summaries(1)[kind], rows), "forked"
            assert torch.equal(forked.summaries(0)[kind], original[kind]), "a fork wrote into its origin"

    run(holds)


# 6 ---------------------------------------------------------------------------------------------------------------


def interleaved_sequences_answer_as_alone(make: MethodFactory, phase: Phase) -> None:
    """Two sequences that share a method object and take turns, in caches of their own or as rows of one."""

    first, second = (make().new_state(SHAPE) for _ in range(2))
    assert first is None or first is not second, "two sequences get one state"

    @examples(8)
    @given(pair=st.tuples(*[cases(make(), phase)] * 2), rows_of_one=st.booleans())
    def holds(pair: tuple[Case, Case], rows_of_one: bool) -> None:
        budget = pair[0].budget
        before = [answers(phase_plan(make(), budget, phase), case.tokens, case.prompt) for case in pair]
        shared = phase_plan(make(), budget, phase)
        runners = [Runner(shared, num_rows=2)] * 2 if rows_of_one else [Runner(shared), Runner(shared)]
        outputs: list[list[Tensor]] = [[], []]
        turns = [
            [(0, case.prompt), *((token, token + 1) for token in range(case.prompt, case.length))] for case in pair
        ]
        for turn in range(max(map(len, turns))):
            for index, case in enumerate(pair):
                if turn >= len(turns[index]):
                    continue
                start, stop = turns[index][turn]
                tokens: list[Tokens | None] = [None, None] if rows_of_one else [None]
                row = index if rows_of_one else 0
                tokens[row] = case.tokens.part(start, stop)
                outputs[index].append(runners[index].feed(*tokens, decode_tokens=int(start >= case.prompt))[row])
        for alone, output in zip(before, outputs):
            assert_same_answer(torch.cat(output, 1), alone, "another sequence changed the answer")
        again = answers(phase_plan(make(), budget, phase), pair[0].tokens, pair[0].prompt)
        assert_same_answer(again, before[0], "sequences that ran before changed the answer")

    run(holds)


def messages_between_layers_stay_in_their_sequence_and_pass(make: MethodFactory, phase: Phase) -> None:
    """Messages between layers stay within one forward pass of one sequence: rows, interleaved sequences, rollbacks and
    forks answer, in every layer, as they do alone."""
    step = make().segment_size if phase == "prefill" else 16

    @examples(6)
    @given(pair=st.tuples(*[cases(make(), phase)] * 2), where=SHARES, rows_of_one=st.booleans())
    def holds(pair: tuple[Case, Case], where: float, rows_of_one: bool) -> None:
        plan, lengths = phase_plan(make(), pair[0].budget, phase), [case.prompt for case in pair]
        alone = [_in_chunks(Stack(plan), (case.tokens,), [case.prompt], step)[0] for case in pair]
        if rows_of_one:
            together = _in_chunks(Stack(plan, num_rows=2), tuple(case.tokens for case in pair), lengths, step)
            for own, output in zip(alone, together):
                assert_same_answer(output, own, "another row changed the answer of a layer")
            return
        keep = int(where * pair[0].prompt) // step * step
        stack, prompt, decode = Stack(plan, num_rows=2), pair[0].prompt, int(phase == "decode")
        for start, stop in calls(keep, step):
            stack.feed(pair[0].tokens.part(start, stop), None)
        stack.feed(draw_tokens(step, 1), None, decode_tokens=decode * step)
        stack.crop(0, keep)
        stack.fork([0, 0])
        stack.feed(draw_tokens(step, 2), None, decode_tokens=decode * step)
        rest = pair[0].tokens.part(keep)
        output = _in_chunks(stack, (rest.part(0, 0), rest), [0, prompt - keep], step)[1]
        assert_same_answer(output, alone[0][:, :, keep:], "a pass that is over changed the answer of a layer")

    run(holds)


def a_rolled_back_sequence_answers_as_if_nothing_had_been(make: MethodFactory, phase: Phase) -> None:
    """Tokens that were cached, attended and then cropped leave no trace."""
    step = make().segment_size if phase == "prefill" else 1

    @examples(12)
    @given(case=cases(make(), phase), where=SHARES, extra=st.integers(1, 20))
    def holds(case: Case, where: float, extra: int) -> None:
        keep = int(where * case.length) // step * step
        plan = phase_plan(make(), case.budget, phase)
        runner = Runner(plan)
        steps = range(case.prompt, case.length)
        before = runner.feed_all(case.tokens.part(0, keep), case.prompt, steps) if keep else case.tokens.queries[:, :0]
        runner.feed(draw_tokens(extra, case.seed + 1), decode_tokens=0 if phase == "prefill" else extra)
        runner.crop(0, keep)
        after = runner.feed_all(case.tokens, case.prompt, steps, start=keep)
        alone = answers(plan, case.tokens, case.prompt, [keep, *steps])
        assert_same_answer(torch.cat([before, after], 1), alone, "cropped tokens left a trace")

    run(holds)


def forks_answer_as_if_each_had_always_been_alone(make: MethodFactory, phase: Phase) -> None:
    """Copies of a row, and rows that changed places, answer as separate sequences."""
    step = make().segment_size if phase == "prefill" else 1
    added = 2 * step if phase == "prefill" else 8

    @examples(12)
    @given(case=cases(make(), phase), where=SHARES, sources=st.sampled_from([[0, 0], [1, 0], [1, 1]]))
    def holds(case: Case, where: float, sources: list[int]) -> None:
        shared = max(int(where * case.prompt) // step, 1) * step
        plan = phase_plan(make(), case.budget, phase)
        grown = [draw_tokens(shared + case.length, case.seed + row) for row in range(2)]
        runner = Runner(plan, num_rows=2)
        runner.feed(*(tokens.part(0, shared) for tokens in grown))
        runner.fork(sources)
        own = [draw_tokens(added, case.seed + 9 + row) for row in range(2)]
        ways = [grown[source].part(0, shared).then(tokens) for source, tokens in zip(sources, own)]
        generated = added if phase == "decode" else 0
        first = runner.feed(own[0], None, decode_tokens=generated)[0]
        second = runner.feed(None, own[1], decode_tokens=generated)[1]
        for way, answer in zip(ways, (first, second)):
            alone = answers(plan, way, way.length - generated, [shared])
            assert_same_answer(answer, alone[:, shared:], "a fork does not answer as it does alone")

    run(holds)


# 7 ---------------------------------------------------------------------------------------------------------------


def visible_tokens_are_counted_from_what_was_attended(make: MethodFactory, phase: Phase) -> None:
    """The count equals that of the attention weights, selected and always-visible tokens included, and in decode never
    exceeds a token budget."""

    @examples(12)
    @given(case=cases(make(), phase))
    def holds(case: Case) -> None:
        method, budget = make(), case.budget
        asked = spy(method, tokens_alone)
        visible, runner = visible_tokens(phase_plan(method, budget, phase), case, phase)
        tally = runner.stats.phase(phase)
        counted, exact = float(tally.visible_tokens), float(visible.sum(-1).double().mean(0).sum())
        assert abs(counted - exact) <= 1e-6 * exact, f"{counted} visible tokens are reported, {exact} were attended"
        offset = case.prompt if phase == "decode" else 0
        for question in asked:
            rows = slice(question.start - offset, question.start - offset + question.num_queries)
            chosen = question.selection.to_mask(case.length)
            chosen = chosen.repeat_interleave(SHAPE.num_query_heads // chosen.shape[0], 0).unsqueeze(1)
            past = (
                torch.arange(case.length)
                <= torch.arange(question.start, question.start + question.num_queries)[:, None]
            )
            assert bool((visible[:, rows] | ~(chosen & past)).all()), "a selected token was not attended"
        if method.traits.unbounded or phase != "decode":
            return
        for step in range(case.decode):
            seen = visible[:, step, : case.prompt + step + 1]
            if method.traits.selects:
                assert bool(seen[:, : budget.sinks].all()), "a sink is hidden"
                assert bool(seen[:, seen.shape[1] - min(budget.window, seen.shape[1]) :].all()), "the window has a gap"
            if budget.tokens is not None:
                assert int(seen.sum(1).max()) <= budget.tokens, "the token budget is exceeded"

    run(holds)


ALL_CHECKS: list[Check] = [
    budget_larger_than_context_is_dense,
    chunking_does_not_change_the_answer,
    neighbours_and_padding_do_not_change_the_answer,
    scattered_pages_do_not_change_the_answer,
    placements_do_not_change_the_answer,
    selections_are_well_formed,
    all_candidates_are_chosen_when_all_fit,
    choosing_nothing_changes_nothing,
    future_does_not_influence_the_past,
    later_segments_do_not_influence_earlier_ones,
    summaries_do_not_depend_on_how_they_were_built,
    interleaved_sequences_answer_as_alone,
    messages_between_layers_stay_in_their_sequence_and_pass,
    a_rolled_back_sequence_answers_as_if_nothing_had_been,
    forks_answer_as_if_each_had_always_been_alone,
    visible_tokens_are_counted_from_what_was_attended,
]


def tokens_alone(answer: Callable[..., Selection], *question: Any) -> Selection:
    """What was chosen, without the estimate of the rest: that is no token, and yet shows in the answer."""
    return replace(answer(*question), rest=None, extra=None)


def masked_attention(tokens: Tokens, mask: Tensor) -> Tensor:
    """Softmax attention of the last ``mask.shape[-2]`` queries where the mask allows it, by the textbook formula.

    mask bool [num_queries, num_tokens] or [num_query_heads, num_queries, num_tokens].
    """
    group = SHAPE.group_size
    keys, values = (tensor.double().repeat_interleave(group, 0) for tensor in (tokens.keys, tokens.values))
    queries = tokens.queries[:, tokens.length - mask.shape[-2] :].double()
    logits = (queries @ keys.mT * SHAPE.scale).masked_fill(~mask, -torch.inf)
    return (logits.softmax(-1) @ values).float()


def _feed(batch: Runner, tokens: list[Tokens], outputs: list[list[Tensor]], decode_tokens: int, padding: int) -> None:
    for row, output in enumerate(batch.feed(*tokens, decode_tokens=decode_tokens, padding=padding)):
        outputs[row].append(output)


def _in_chunks(batch: Runner | Stack, tokens: tuple[Tokens, ...], prompts: list[int], size: int) -> list[Tensor]:
    """Outputs of every row: prompts in chunks of ``size``, generated tokens one by one."""
    outputs: list[list[Tensor]] = [[] for _ in tokens]
    for start, stop in calls(max(prompts), size):
        fed = batch.feed(*[row.part(start, min(stop, prompt)) for row, prompt in zip(tokens, prompts)])
        for of_row, output in zip(outputs, fed):
            of_row.append(output)
    generated = [row.part(prompt) for row, prompt in zip(tokens, prompts)]
    for step in range(max(row.length for row in generated)):
        fed = batch.feed(*[row.part(step, step + 1) for row in generated], decode_tokens=1)
        for of_row, output in zip(outputs, fed):
            of_row.append(output)
    return [torch.cat(of_row, -2) for of_row in outputs]


def _check_form(selection: Selection, unit_size: int) -> None:
    units = selection.units
    assert units.dtype == torch.int64
    assert units.ndim == 2
    assert units.shape[0] in (SHAPE.num_query_heads, SHAPE.num_kv_heads, 1)
    assert selection.unit_size == unit_size
    padded = torch.where(units < 0, torch.iinfo(torch.int64).max, units)
    assert bool((units >= -1).all())
    rising = padded[:, 1:] > padded[:, :-1]
    assert bool((rising | (units[:, 1:] == -1)).all()), "units are not unique and ascending, or -1 is not at the end"
    if selection.log_weight is not None:
        assert selection.log_weight.dtype == torch.float32
        assert selection.log_weight.shape == units.shape
    if selection.extra is not None:
        assert selection.extra.lse.dtype == torch.float32


def run(holds: Callable[[], None]) -> None:
    """All examples of a check. What fails once and then does not has a memory that its state knows nothing of."""
    try:
        holds()
    except Flaky as error:
        raise AssertionError("the same sequence was answered in two ways: something outlives it") from error
