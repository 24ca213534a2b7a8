"""Exact decoding over long contexts of the embedded model: ten thousand tokens, all those of dense attention. And a
hundred thousand drawn tokens of a small vocabulary, of the model's distribution."""

from pathlib import Path

import pytest
import torch
from ends import set_ends
from engine.tiny_directory import text_of, write_model

from kvsift import LLM, Sampling, native
from kvsift.api.document import Document
from kvsift.cli.demo import FACTS, make_document
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
        set_ends(patch)
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


def test_long_sequences_are_exact_side_by_side(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    set_ends(monkeypatch)
    text = make_document(4_096)
    texts = [text[:length] for length in (16_000, 9_000, 14_000, 6_000)]
    options = {"max_new_tokens": 150, "sampling": [Sampling(0.8 * (seq % 2), seed=seq) for seq in range(4)]}
    dense = llm.generate(texts, plan="dense", **options)
    exact = llm.generate(texts, plan=PLANS[0], exact=True, **options)
    assert [answer.token_ids for answer in exact] == [answer.token_ids for answer in dense]


@pytest.mark.usefixtures("eager_pace")
def test_exact_answers_are_drawn_from_the_distribution_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of 100,000 tokens against what the model expects after each text, by token and by rank: beyond these
    in one of a thousand runs, and the seeds are fixed."""
    set_ends(monkeypatch)
    directory = write_model(tmp_path, "Qwen3", hidden_size=64, head_dim=32, num_hidden_layers=1)
    llm, prompt, new, seqs = LLM(directory, "dense", device="cpu", dtype="float32"), text_of(120), 25, 250
    plan = "sketch:budget=48:sinks=4:window=16:dense_layers=none"
    llm.load()
    start = llm.tokenizer(prompt)["input_ids"]
    by_token, by_rank = torch.zeros(2, llm.model.config.vocab_size), torch.zeros(2, llm.model.config.vocab_size)
    drafted = wrong = 0
    for first in range(0, 100_000 // new, seqs):
        samplings = [Sampling(1.0, seed=seed) for seed in range(first, first + seqs)]
        answers = llm.generate([prompt] * seqs, plan=plan, exact=True, max_new_tokens=new, sampling=samplings)
        drafted += sum(answer.exact["drafted"] for answer in answers if answer.exact)
        wrong += sum(answer.exact["drafts_wrong"] for answer in answers if answer.exact)
        drawn = torch.tensor([answer.token_ids for answer in answers])
        texts = torch.cat([torch.tensor(start).expand(seqs, -1), drawn[:, :-1]], 1)
        with torch.inference_mode():
            shares = llm.model(texts).logits[:, len(start) - 1 :].float().softmax(2).flatten(0, 1)
        ranked, order = shares.sort(1, descending=True)
        ranks = (order == drawn.reshape(-1, 1)).int().argmax(1)
        for found, expected, each in ((by_token, shares, drawn.flatten()), (by_rank, ranked, ranks)):
            found += torch.stack([each.bincount(minlength=expected.shape[1]).float(), expected.sum(0)])
    assert drafted > 30_000
    assert wrong > 100, "drafts that are always right show nothing"
    for found, expected in (by_token, by_rank):
        assert int(found.sum()) == 100_000
        freedom = len(found) - 1  # a square of so many degrees, nearly normal
        assert float(expected.min()) > 5
        assert float(((found - expected) ** 2 / expected).sum()) < freedom + 3.1 * (2 * freedom) ** 0.5
