"""RetrievalAttention selects what an exact search selects, wherever its index looks at everything, and remembers what
it needs of a sequence: queries of the prompt, and indexes that survive forks and roll-backs."""

from typing import Any

import pytest
import torch
from contracts.harness import Runner, Tokens, assert_same_answer, draw_tokens
from refusals import refused
from torch import Tensor

from kvsift import native
from kvsift.indexes.samples import QueryRecorder
from kvsift.methods import retrieval_attention
from kvsift.methods.retrieval_attention import RetrievalAttention
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import make_rule, parse_plan
from kvsift.types import Candidates, LayerShape, Limit, Rope

SHAPE = LayerShape(layer=2, num_query_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
SINKS, WINDOW, WANTED = 4, 8, 5
needs_core = pytest.mark.skipif(not native.available(), reason=f"no compiled core: {native.why_missing()}")
EXACT = [
    "flat",
    pytest.param("graph", marks=needs_core),  # with a beam that holds all
    "auto",
]


def plan(**settings: Any) -> Plan:
    given = {"budget": SINKS + WINDOW + WANTED, "sinks": SINKS, "window": WINDOW, "dense_layers": (), **settings}
    return Plan(decode=make_rule("retrieval_attention", given))


def knobs(index: str) -> dict[str, Any]:
    return {"index": index, "beam": 10_000} if index == "graph" else {"index": index}


def reference(tokens: Tokens, shared: bool) -> Tensor:
    """The last token's answer: sinks, window, and of the others the five with the largest logits."""
    start, group = tokens.length - 1, SHAPE.group_size
    between = torch.arange(SINKS, start + 1 - WINDOW)
    logits = torch.stack([tokens.keys[head // group] @ tokens.queries[head, -1] for head in range(4)])
    best = logits[:, between]
    if shared:
        best = best.unflatten(0, (2, group)).amax(1).repeat_interleave(group, 0)
    outputs = []
    for head in range(4):
        chosen = between[best[head].topk(WANTED).indices]
        seen = torch.cat([torch.arange(SINKS), chosen, torch.arange(start + 1 - WINDOW, start + 1)])
        weights = (logits[head, seen] * SHAPE.scale).softmax(-1)
        outputs.append(weights @ tokens.values[head // group, seen])
    return torch.stack(outputs)


@pytest.mark.parametrize("index", EXACT)
def test_generated_tokens_are_found_once_they_leave_the_window(index: str) -> None:
    tokens = draw_tokens(160, 3, SHAPE)
    tokens.keys[:, 125] = 9 * tokens.queries[::2, -1]  # generated; wanted 34 tokens later
    runner = Runner(plan(**knobs(index)), shape=SHAPE)
    answer = runner.feed_all(tokens, 100, range(100, 160))[:, -1]
    assert_same_answer(answer, reference(tokens, False), "a generated token was lost")
    assert len(runner.state().spans) == 1, "the index was built more than once"


@pytest.mark.parametrize("index", EXACT)
def test_a_tail_that_grows_long_gets_an_index_of_its_own(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval_attention, "TAIL", 20)
    tokens = draw_tokens(180, 4, SHAPE)
    runner = Runner(plan(**knobs(index)), num_rows=2, shape=SHAPE)
    answer = [runner.feed(tokens.part(0, 100), None)[0]]
    answer += [runner.feed(tokens.part(at, at + 1), None, decode_tokens=1)[0] for at in range(100, 180)]
    assert_same_answer(answer[-1][:, 0], reference(tokens, False), "parts do not add up")
    parts = runner.state().spans
    assert [(part.first, part.stop) for part in parts] == [(4, 93), (93, 114), (114, 135), (135, 156)]
    runner.fork([0, 0])
    runner.crop(1, 130)
    assert [part.stop for part in runner.state(1).spans] == [93, 114]
    assert len(runner.state().spans) == 4
    ways = tokens.part(0, 130).then(draw_tokens(1, 5, SHAPE))
    other = runner.feed(None, ways.part(130), decode_tokens=1)[1]
    assert_same_answer(other[:, 0], reference(ways, False), "a fork remembers what was cropped")


@needs_core
def test_what_the_graph_cannot_reach_is_looked_for() -> None:
    """A graph without edges: a search comes back with too few."""
    tokens = draw_tokens(121, 6, SHAPE)
    runner = Runner(plan(**knobs("graph")), shape=SHAPE)
    runner.feed_all(tokens.part(0, 120), 119, [119])
    state = runner.state()
    graph = state.spans[0].index
    graph.neighbours.fill_(-1)
    graph.entries[:, 2:] = -1
    answer = runner.feed(tokens.part(120), decode_tokens=1)[0]
    assert_same_answer(answer[:, 0], reference(tokens, False), "too few keys, and nobody looked for more")
    assert RetrievalAttention().describe(state)["completed"] == 1


@needs_core
@pytest.mark.parametrize(("per", "graphs"), [("kv_head", 2), ("query_head", 4)])
def test_prepare_builds_what_the_first_question_uses(per: str, graphs: int) -> None:
    tokens = draw_tokens(120, 7, SHAPE)
    runner = Runner(plan(per=per, **knobs("graph")), shape=SHAPE)
    runner.feed(tokens.part(0, 119))
    runner.attention.prepare()
    state, method = runner.state(), RetrievalAttention(index="graph")
    built = state.spans[0]
    assert (built.first, built.stop, built.length) == (SINKS, 120 - WINDOW, 119)
    answer = runner.feed(tokens.part(119), decode_tokens=1)[0]
    assert_same_answer(answer[:, 0], reference(tokens, False), "not the nearest keys")
    assert state.spans == [built]
    runner.crop(0, 119)
    assert state.spans == [built], "a roll-back to where it was built needs no other index"
    told = method.describe(state)
    assert told["samples"] == 119
    assert told["level"] == native.level()
    assert told["indexes"][0]["kind"] == "graph"
    assert told["indexes"][0]["graphs"] == graphs
    assert told["indexes"][0]["scanned"] > 0
    runner.crop(0, 118)
    assert state.spans == []


@needs_core
def test_samples_are_turned_by_the_models_rope_and_stay_as_they_are_for_the_paper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[dict[str, Any]] = []
    build = retrieval_attention.GraphIndex.build

    def spy(*tensors: Any, **settings: Any) -> Any:
        given.append(settings)
        return build(*tensors, **settings)

    monkeypatch.setattr(retrieval_attention.GraphIndex, "build", spy)
    rope = Rope(1e4 ** -(torch.arange(0, 16, 2) / 16))
    for settings in ({"index": "graph"}, {"compat": "paper"}):
        runner = Runner(plan(**settings), shape=SHAPE._replace(rope=rope))
        runner.feed_all(draw_tokens(120, 8, SHAPE), 119, [119])
    ours, papers = given
    assert (ours["rope"], ours["per"], ours["compat"]) == (rope, "kv_head", None)
    assert (papers["rope"], papers["per"], papers["compat"]) == (None, "query_head", "paper")
    assert (ours["first_position"], ours["window"], papers["window"]) == (SINKS, WINDOW, 0)


@needs_core
def test_a_cache_that_was_filled_without_it_is_scanned_and_that_is_said() -> None:
    tokens = draw_tokens(120, 9, SHAPE)
    runner = Runner(Plan(), shape=SHAPE)
    runner.feed(tokens.part(0, 119))
    runner.attention.replan(plan(index="graph"))
    answer = runner.feed(tokens.part(119), decode_tokens=1)[0]
    assert_same_answer(answer[:, 0], reference(tokens, False), "not the nearest keys")
    [told] = RetrievalAttention().describe(runner.state())["indexes"]
    assert told["kind"] == "flat"
    assert "its queries are not known" in told["why"]


def test_codes_are_used_when_asked_for() -> None:
    if not native.available():
        with refused("missing_package"):
            RetrievalAttention(index="flat_int8")
        return
    tokens = draw_tokens(120, 10, SHAPE)
    runner = Runner(plan(index="flat_int8"), shape=SHAPE)
    runner.feed_all(tokens, 119, [119])
    [told] = RetrievalAttention().describe(runner.state())["indexes"]
    assert (told["kind"], told["why"], told["rows"]) == ("flat_int8", "as asked", 120 - WINDOW - SINKS)


def test_without_the_core_it_scans_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "why_missing", lambda: "a test took it away")
    tokens = draw_tokens(120, 11, SHAPE)
    runner = Runner(plan(), shape=SHAPE)
    answer = runner.feed_all(tokens, 119, [119])[:, -1]
    assert_same_answer(answer, reference(tokens, False), "not the nearest keys")
    told = RetrievalAttention().describe(runner.state())
    assert told["level"] == "torch"
    assert "a test took it away" in told["indexes"][0]["why"]
    with refused("missing_package: a test took it away"):
        RetrievalAttention(index="graph")


def test_the_papers_budget_is_the_default() -> None:
    for spec in ("retrieval_attention", "retrieval_attention:compat=paper"):
        if "paper" in spec and not native.available():
            continue
        rule = parse_plan(spec).decode
        assert (rule.budget.sinks, rule.budget.window, rule.budget.tokens) == (128, 512, 740)
        assert rule.budget.units(100_000, 1) == 100
        assert rule.budget.dense_layers == (() if "paper" in spec else (0, 1))


def test_keys_on_another_device_are_refused() -> None:
    class Elsewhere:
        length = 100

        def borrow(self, start: int, stop: int) -> Tensor:
            return torch.empty(2, stop - start, 16, device="meta")

    method = RetrievalAttention(index="flat")
    state = method.new_state(SHAPE)
    assert isinstance(state.recorder, QueryRecorder)
    with refused("invalid_tensor"):
        method.select(state, SHAPE, torch.ones(4, 1, 16), 99, Candidates(4, 60, 1), Limit(5), Elsewhere())  # type: ignore[arg-type]
