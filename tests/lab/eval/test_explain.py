"""Explanations: what a run read is what the model's own attention says, methods are asked what the run was asked, and
the passage that holds the answer stands out."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from ends import set_ends
from engine.tiny_directory import CHAT_TEMPLATE, text_of, write_model
from kvsift_lab.eval.explain import equal_budget, explain, explain_tokens
from kvsift_lab.eval.explain.explanation import Explanation, passages_of
from kvsift_lab.eval.explain.page import page
from lab.eval.samples import Tags
from refusals import refused
from transformers import AutoModelForCausalLM

from kvsift.api.llm import LLM
from kvsift.cli.demo import FACTS, make_document
from kvsift.errors import InputError
from kvsift.plan.syntax import parse_plan

QUESTION = "How many sacks does the <b>ninth</b> mill grind?"
QUEST = "quest:budget=96:page_size=8:window=16:dense_layers=none"


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Three layers of four query and two KV heads, a token per byte."""
    # with a template, no stop cuts its noise short
    directory = write_model(tmp_path_factory.mktemp("tiny"), chat_template=CHAT_TEMPLATE)
    return LLM(directory, "dense", path="composed", dtype="float32")


def explained(llm: LLM, **how: Any) -> Explanation:
    return explain(llm, text_of(600), QUESTION, **{"max_new_tokens": 5, "token": 2, "passage_tokens": 50, **how})


def several(llm: LLM, **how: Any) -> list[Explanation]:
    return explain_tokens(llm, text_of(600), QUESTION, **{"max_new_tokens": 5, "passage_tokens": 50, **how})


def test_a_dense_run_reads_what_the_models_own_attention_says(tiny: LLM) -> None:
    found = explained(tiny)
    ids = tiny.read(text_of(600)).check(QUESTION, 5)
    answer = tiny.read(text_of(600)).ask(QUESTION, max_new_tokens=5)
    assert found.answer == answer.text
    assert found.position == len(ids) - 1 + 2
    model = AutoModelForCausalLM.from_pretrained(tiny.directory.path, attn_implementation="eager")
    fed = torch.tensor([[*ids, *answer.token_ids][: found.position + 1]])
    with torch.no_grad():
        attentions = model(fed, output_attentions=True).attentions
    for reading, attention in zip(found.readings, attentions, strict=True):
        rows = attention[0, :, -1]
        mass = torch.stack([rows[:, each.start : each.stop].sum(1) for each in found.passages], 1)
        torch.testing.assert_close(torch.tensor(reading.mass), mass, rtol=1e-3, atol=1e-5)
        assert all(share == 1 for row in reading.seen for share in row)
    mean = torch.stack([attention[0, :, -1] for attention in attentions]).mean((0, 1))
    expected = [float(mean[each.start : each.stop].sum()) for each in found.passages]
    assert found.attention() == pytest.approx(expected, abs=1e-5)
    best = found.most_read(3)
    assert all(found.passages[index].kind == "text" for index in best)
    assert best == sorted(best, key=lambda index: -expected[index])


@pytest.mark.parametrize(
    "method",
    ["quest:page_size=8", "oracle_tokens", "streaming_llm", "keydiff", "less_is_more", "tova", "snapkv", "infinigen"],
)
def test_a_method_is_asked_what_the_run_is_asked(tiny: LLM, method: str) -> None:
    """Compared with a run under itself, at the same budget, a method shows exactly what the run did, in every layer; at
    the first token and at a later one, which it has come to step by step."""
    budget = 96 if method == "streaming_llm" else "96:window=16"
    for token in (0, 2):
        found = explained(tiny, plan=f"{method}:budget={budget}:dense_layers=none", methods=[method], token=token)
        run = torch.tensor([reading.seen for reading in found.readings])
        assert run.mean((0, 1)).tolist() == pytest.approx(found.choices[-1].passages)
        assert 0 < float(run.mean()) < 0.9


def test_queries_are_foreseen_for_a_method_beside_the_run(tiny: LLM) -> None:
    """What layer 0 gets is the same under any plan, and so is what is foreseen of it for layer 1."""
    beside = explained(tiny, plan=QUEST, methods=["infinigen:alpha=1.0"], token=0)
    alone = explained(
        tiny,
        plan=QUEST.replace("quest", "infinigen:alpha=1.0").replace(":page_size=8", ""),
        methods=["infinigen:alpha=1.0"],
        token=0,
    )
    counts = [found.choices[1].layers[1]["visible_tokens"] for found in (beside, alone)]
    assert counts[0] == counts[1] < 96


def test_the_passages_most_read_are_parts_of_the_document_and_not_of_the_system_prompt(tiny: LLM) -> None:
    found = explained(tiny, passage_tokens=20)
    inside = [each for each in found.passages if each.kind == "text"]
    assert "".join(each.text for each in inside) == text_of(600).strip()[: sum(len(each.text) for each in inside)]
    assert all("[user]" not in found.passages[index].text for index in found.most_read(len(found.passages)))
    lines = ["[sys] be brief [user] ", "one two\n", "three four ", "five\n", "[end] ", "which?"]
    got = [(each.kind, each.line, each.text) for each in passages_of(lines, (0, 5), 1, "one two\nthree four five\n")]
    assert got == [
        ("prompt", 0, lines[0]), ("text", 1, lines[1]), ("text", 2, lines[2]), ("text", 2, lines[3]),
        ("prompt", 0, lines[4]), ("window", 0, lines[5]),
    ]  # fmt: skip


def test_methods_have_the_same_budget_and_none_beats_the_oracle(tiny: LLM) -> None:
    methods = ["oracle_tokens:heads=query", "quest:page_size=8", "loki", "magicpig", "pqcache", "random:page_size=8"]
    found = explained(tiny, plan=QUEST, methods=methods)
    assert [each.name for each in found.choices] == ["oracle_tokens", *methods]
    oracle, best = found.choices[:2]
    assert (oracle.overlap, oracle.visible_tokens) == (1.0, 96.0)
    assert [row["layer"] for row in oracle.layers] == [0, 1, 2]
    for each in found.choices:
        assert each.visible_tokens == pytest.approx(96, abs=8), each.name
        assert each.visible_tokens <= 96
        assert each.recovery <= best.recovery + 1e-6
        assert 0 <= each.overlap <= 1
        assert each.recovery == pytest.approx(sum(row["recovery"] for row in each.layers) / 3)
        assert sum(share * (p.stop - p.start) for share, p in zip(each.passages, found.passages)) == pytest.approx(
            each.visible_tokens, abs=1e-3
        )
    assert oracle.recall > found.choices[-1].recall


def test_the_budget_of_the_methods() -> None:
    budget = equal_budget(parse_plan("quest:budget=512:sinks=8:min_context=9999"), None)
    assert (budget.tokens, budget.sinks, budget.dense_layers, budget.min_context) == (512, 8, (0, 1), 0)
    assert equal_budget(parse_plan("quest:ratio=0.1"), None).ratio == 0.1
    assert equal_budget(parse_plan("quest:ratio=0.1"), 300) == equal_budget(parse_plan("quest:mass=0.9"), 300)
    assert equal_budget(parse_plan("dense"), None).tokens == 256
    with refused("missing_input"):
        equal_budget(parse_plan("quest:mass=0.9"), None)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"token": 5}, "token=5 is not among the tokens that may be generated: 0 to 4. Raise max_new_tokens"),
        ({"token": -1}, "token=-1 is not among the tokens"),
        ({"tokens": []}, "tokens is empty: name at least one token"),
        ({"tokens": [0, 7]}, "token=7 is not among the tokens"),
        ({"methods": ["qest"]}, "unknown method 'qest'; did you mean 'quest'?"),
        ({"methods": ["quest:budget=64"]}, "quest:budget=64: all methods get the same budget; leave out budget."),
        ({"methods": ["critiprefill"]}, "critiprefill does not select in decode"),
        ({"methods": ["dense"]}, "dense does not select in decode"),
        ({"passage_tokens": 0}, "passage_tokens=0 must be 1 or more."),
        ({"budget": 5000}, "all of them fit the budget, so there is nothing to select"),
        ({"plan": "quest:mass=0.9"}, "say with budget how many tokens the methods may select"),
    ],
)
def test_what_cannot_be_explained_is_refused_before_anything_is_loaded(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(LLM, "load", lambda self: pytest.fail("the weights were loaded"))
    with pytest.raises(InputError) as error:
        several(tiny, **how) if "tokens" in how else explained(tiny, **how)
    assert message in str(error.value)


def test_a_token_beyond_the_answer_is_refused_with_the_tokens_there_are(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tiny.read(text_of(600)).check(QUESTION, 5)
    first = tiny.generate(tiny.tokenizer.decode(ids[1:]), max_new_tokens=3)
    set_ends(monkeypatch, {first.token_ids[1]})
    with refused("invalid_value: 0 '�'") as error:
        explained(tiny, token=4)
    assert "2 '" not in str(error.value)


@pytest.fixture(scope="module")
def embedded() -> Callable[[str], Explanation]:
    """The demo's document at 1200 tokens through the embedded model, by plan."""
    llm, text, found = LLM(None, "dense", path="composed"), make_document(1200), {}

    def get(plan: str) -> Explanation:
        if plan not in found:
            found[plan] = explain(llm, text, FACTS[2][2], plan=plan, methods=["oracle_tokens:heads=query", "random"])
        return found[plan]

    return get


@pytest.mark.parametrize("plan", ["dense", "oracle_tokens:budget=128:dense_layers=none"])
def test_the_passage_that_holds_the_answer_is_the_most_read(embedded: Callable[[str], Explanation], plan: str) -> None:
    found = embedded(plan)
    assert found.answer == "velvet canyon"
    best = found.passages[found.most_read(1)[0]]
    assert "velvet" in best.text
    holds = found.passages.index(best)
    # some heads look for it and give it nearly all they have; chance would have been a passage in twenty
    assert max(row[holds] for reading in found.readings for row in reading.mass) > 0.9
    oracle, _, chance = found.choices
    assert oracle.recovery > chance.recovery + 0.05
    assert oracle.recall > chance.recall


def test_the_page_is_whole_by_itself(tiny: LLM) -> None:
    found = explained(tiny, plan=QUEST, methods=["quest:page_size=8", "keydiff"])
    html = page(found)
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    names = {name for name, _ in tags.attributes}
    assert "src" not in names
    assert "url(" not in html, "no drawing refers to another one"
    assert "http" not in html
    assert "<script" not in html
    targets = {value for name, value in tags.attributes if name == "href"}
    assert targets == {f"#{value}" for name, value in tags.attributes if name == "id"}
    assert {f"#t2p{index}" for index in range(len(found.passages))} < targets
    assert QUESTION in tags.text, "what users and models write is text, not markup"
    assert "layer 2, head 3" in tags.text
    assert "keydiff" in tags.text
    for each in found.passages:
        assert each.text.strip() in tags.text


def test_words_carry_the_attention_of_their_tokens(embedded: Callable[[str], Explanation]) -> None:
    found = embedded("dense")
    assert ["".join(text for text, _ in words) for words in found.words] == [each.text for each in found.passages]
    shares = [sum(share for _, share in words) for words in found.words]
    assert shares == pytest.approx(found.attention(), abs=1e-4)
    best = found.most_read(1)[0]
    assert max(found.words[best], key=lambda word: word[1])[0].strip() == "velvet"
    assert re.search(r'<mark style="--v:60%" title="[^"]*">velvet</mark>', page(found))


def test_no_passage_is_cut_inside_a_word(embedded: Callable[[str], Explanation]) -> None:
    passages = embedded("dense").passages
    for before, after in pairwise(passages[1:-1]):
        assert before.text[-1:].isspace() or after.text[:1].isspace(), (before.text, after.text)
