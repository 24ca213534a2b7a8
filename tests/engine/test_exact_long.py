"""Exact decoding over long contexts of the embedded model: ten thousand tokens, all those of dense attention."""

from __future__ import annotations

import pytest

from kvsift import LLM, Sampling, native
from kvsift.cli.demo import FACTS, make_document
from kvsift.engine.document import Document
from kvsift.plan.syntax import parse_plan

PLANS = (
    "sketch:budget=256:dense_layers=none",
    "quest:budget=512:dense_layers=none",
    "verify:budget=512:dense_layers=none",
)
NEW = 360

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native.available(), reason="verification needs the compiled core"),
]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(device="cpu", dtype=request.param, probe_every=0)


@pytest.mark.parametrize("tokens", [4_096, 8_192, 16_384])
def test_long_answers_are_those_of_dense_attention(llm: LLM, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,160 tokens of exact decoding in each of six cases, and answers to the questions of the demo."""
    text = make_document(tokens)
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "_end_ids", lambda runner: frozenset())
        ids = llm.tokenizer(text)["input_ids"][:tokens]
        document = Document(llm, ids, lambda question: ids, parse_plan("dense"))
        prompt = [*ids, *llm.tokenizer(" The", add_special_tokens=False)["input_ids"]]
        for sampling in (None, Sampling(1.0, seed=tokens)):
            dense = document.go_on(prompt, plan="dense", max_new_tokens=NEW, sampling=sampling)
            assert len(dense.token_ids) == NEW
            for plan in PLANS:
                exact = document.go_on(prompt, plan=plan, max_new_tokens=NEW, sampling=sampling, exact=True)
                assert exact.token_ids == dense.token_ids, plan
    asked = llm.read(text)
    for _, _, question in FACTS:
        dense = asked.ask(question, plan="dense")
        assert asked.ask(question, plan=PLANS[0], exact=True).token_ids == dense.token_ids


def test_long_rows_are_exact_side_by_side(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "_end_ids", lambda runner: frozenset())
    text = make_document(4_096)
    texts = [text[:length] for length in (16_000, 9_000, 14_000, 6_000)]
    options = {"max_new_tokens": 150, "sampling": [Sampling(0.8 * (row % 2), seed=row) for row in range(4)]}
    dense = llm.generate(texts, plan="dense", **options)
    exact = llm.generate(texts, plan=PLANS[0], exact=True, **options)
    assert [answer.token_ids for answer in exact] == [answer.token_ids for answer in dense]
