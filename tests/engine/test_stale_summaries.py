"""Steps that show everything write no summaries: they are there all the same once somebody asks for them."""

from pathlib import Path

import pytest
import torch
from ends import set_ends
from engine.loop_sequences import pinned_caches
from engine.tiny_directory import text_of

from kvsift import LLM
from kvsift.kernels.page_summary import summarise
from kvsift.models.hf.sparse import SparseCache

QUEST = "quest:budget=128:window=32:dense_layers=0"
TEXT = text_of(500)


@pytest.fixture(autouse=True)
def no_answer_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ends(monkeypatch)


def assert_summaries_are_those_of_the_keys(cache: SparseCache) -> None:
    for attention in cache.attentions:
        store = attention.store
        pages = torch.tensor(store.table.planned(0)[: store.table.num_pages(0)])
        positions = torch.arange(len(pages) * store.page_size).view(-1, store.page_size)
        fresh = summarise("minmax", store.keys[:, pages], positions < store.lengths[0])
        assert torch.equal(store.reader(0).summary("minmax", slice(0, len(pages))), fresh)


@pytest.mark.parametrize("dense_steps", [0, 1, 40, 200])  # none, less than a page, pages, all of them
def test_a_document_has_its_summaries_whatever_its_answers_were_decoded_by(dense_steps: int, llama: Path) -> None:
    length = LLM(llama).read(TEXT).num_tokens
    llm = LLM(llama, QUEST, path="eager", dense_below=length + dense_steps)
    document = llm.read(TEXT)
    answer = document.ask("Which mill?", max_new_tokens=120)
    assert len(answer.token_ids) > 60
    [cache] = pinned_caches(llm)
    assert_summaries_are_those_of_the_keys(cache)


def test_pages_written_by_dense_steps_compete_once_lists_are_on(llama: Path) -> None:
    length = len(LLM(llama).tokenizer(TEXT)["input_ids"])
    options = {"dense_below": length + 60, "dtype": "float32"}
    fast = LLM(llama, QUEST, path="eager", **options).generate(TEXT, max_new_tokens=300)  # type: ignore[arg-type]
    slow = LLM(llama, QUEST, path="composed", **options).generate(TEXT, max_new_tokens=300)  # type: ignore[arg-type]
    assert len(fast.token_ids) == 300
    assert fast.token_ids == slow.token_ids
    assert fast.decode("sparse_queries") == slow.decode("sparse_queries") > 0
