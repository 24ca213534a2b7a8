"""Answers of a real model: those of transformers when nothing is skipped, and the same ones by every way to ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ends import set_ends
from real.conftest import EXCERPTS, PLAN, excerpt
from real.smollm2 import smollm2
from refusals import refused
from server.serving import Served, events, texts
from torch import Tensor
from transformers import PreTrainedModel

import kvsift
from kvsift import LLM, Sampling
from kvsift.api.document import Document

pytestmark = pytest.mark.real
QUESTION = "What does the text say about the order of evaluation?"


@pytest.fixture(scope="module")
def document(llm: LLM) -> Document:
    """About 600 tokens, read once for all plans."""
    return llm.read(excerpt("compound_statements")[:2_400])


@pytest.fixture(scope="module")
def dense(document: Document) -> list[int]:
    """What dense attention answers."""
    return document.ask(QUESTION, plan="dense", max_new_tokens=24).token_ids


@pytest.fixture(scope="module")
def served(smol: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the model, whose options are those of ``llm``."""
    options = "--plan", PLAN, "--dtype", "float32", "--device", "cpu", "--threads", "1", "--dense-below", "0"
    served = Served(tmp_path_factory.mktemp("served"), str(smol), *options)
    yield served
    served.stop()


def greedy(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, num_new: int = 24) -> list[list[int]]:
    """The new tokens of each row of a batch of prompts, [rows, tokens]."""
    mask = torch.ones_like(ids) if mask is None else mask
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=num_new, do_sample=False)
    return tokens[:, ids.shape[1] :].tolist()


def test_dense_answers_are_those_of_transformers(document: Document, dense: list[int], stock: PreTrainedModel) -> None:
    [expected] = greedy(stock, torch.tensor([document.check(QUESTION, 24)]))
    assert dense == expected


def test_its_gguf_file_has_the_weights_of_the_directory_and_its_answers(smol: Path) -> None:
    """Packed weights multiply inputs in 8 bits, so that logits are only near (``test_packed_fidelity``)."""
    prompts, question = [], [{"role": "user", "content": "Which city is the capital of France?"}]
    loaded, answers = [], []
    for path in (smol, smollm2(".gguf")):
        llm = LLM(path, "dense", device="cpu", dtype="bfloat16", probe_every=0)
        prompts.append(llm.tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False))
        answers.append(llm.generate(prompts[-1], max_new_tokens=24).text)
        loaded.append(llm.model)
    directory, file = (model.state_dict() for model in loaded)
    assert all(torch.equal(weight, file[name]) for name, weight in directory.items())
    ids = torch.tensor([[1, 1000, 2000, 3000, 4000]])
    with torch.no_grad():
        exact, found = (model(ids).logits for model in loaded)
    assert (found - exact).norm() < 0.05 * exact.norm()
    assert prompts[0] == prompts[1]
    assert all("capital of France" in text for text in answers)  # two first tokens are as likely as each other


@pytest.mark.parametrize("method", ["sketch", "quest"])
def test_a_covering_budget_answers_as_dense(method: str, document: Document, dense: list[int]) -> None:
    assert document.ask(QUESTION, plan=f"{method}:budget=8192", max_new_tokens=24).token_ids == dense


def test_exact_answers_have_the_tokens_of_dense_attention(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Over 250 greedy tokens, which soon repeat themselves, and 250 drawn ones, which do not."""
    set_ends(monkeypatch)  # answers are as long as they may be
    document = llm.read(excerpt("special_method_names")[:3_000])
    question = "Write a long tutorial about what this text says, with examples."
    for sampling in (None, Sampling(temperature=1.0, seed=1)):
        dense = document.ask(question, plan="dense", max_new_tokens=250, sampling=sampling)
        exact = document.ask(question, plan="sketch:budget=256", max_new_tokens=250, sampling=sampling, exact=True)
        assert len(dense.token_ids) == 250
        assert exact.token_ids == dense.token_ids
        assert max(exact.exact["verified"]) > 1  # several tokens in one pass
        record_property("measured", str({name: exact.exact[name] for name in ("drafted", "drafts_wrong", "repeated")}))


def test_a_saved_document_answers_as_it_did(document: Document, llm: LLM, tmp_path: Path) -> None:
    expected = document.ask(QUESTION, max_new_tokens=24)
    document.save(tmp_path / "text.kvsift")
    answer = llm.open(tmp_path / "text.kvsift").ask(QUESTION, max_new_tokens=24)
    assert answer.decode("density") < 0.6
    assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)


def test_prompts_of_three_lengths_answer_at_once_as_alone(llm: LLM) -> None:
    prompts = [excerpt("special_method_names")[:length] for length in (600, 1_800, 1_200)]
    together = llm.generate(prompts, max_new_tokens=16)
    assert [answer.token_ids for answer in together] == [
        llm.generate(prompt, max_new_tokens=16).token_ids for prompt in prompts
    ]


def test_left_padding_changes_no_token(stock: PreTrainedModel, llm: LLM) -> None:
    prompts = [llm.tokenizer(excerpt(name))["input_ids"][:length] for name, length in zip(EXCERPTS, (320, 250))]
    padding = len(prompts[0]) - len(prompts[1])
    ids = torch.tensor([prompts[0], [stock.config.pad_token_id] * padding + prompts[1]])
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    with kvsift.sparse(stock, PLAN) as run:
        together = greedy(stock, ids, mask, num_new=12)
        alone = [greedy(stock, torch.tensor([prompt]), num_new=12)[0] for prompt in prompts]
    assert together == alone
    assert run.report()["phases"]["decode"]["density"] < 0.6


def test_the_chat_template_makes_it_answer(llm: LLM) -> None:
    chat = llm.chat()
    assert "Paris" in chat.ask("What is the capital of France?", max_new_tokens=32).text
    answer = chat.ask("And of Italy?", max_new_tokens=32)
    assert "Rome" in answer.text
    assert answer.finish_reason == "stop"


def test_a_served_stream_is_the_answer_of_the_library(served: Served, llm: LLM) -> None:
    content = f"{excerpt('compound_statements')[:2_000]}\n\n{QUESTION}"
    expected = llm.chat().ask(content, max_new_tokens=32)
    with served.client() as client, client.stream("POST", "/v1/chat/completions", json=asked(content)) as response:
        [answer] = texts(list(events(response)))
    assert len(expected.token_ids) == 32
    assert answer == expected.text


def test_a_prompt_beyond_its_positions_is_refused(served: Served, llm: LLM) -> None:
    too_long = "".join(map(excerpt, EXCERPTS))  # 8,733 tokens
    with refused("context_length_exceeded: 8192"):
        llm.generate(too_long, max_new_tokens=1)
    with served.client() as client:
        response = client.post("/v1/chat/completions", json={**asked(too_long), "stream": False})
    assert response.status_code == 400
    assert "maximum context length is 8192 tokens" in response.json()["error"]["message"]


def asked(content: str) -> dict[str, Any]:
    """A request for a stream of 32 greedy tokens."""
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 32, "temperature": 0, "stream": True}
