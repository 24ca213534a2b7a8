"""Documents and prompts of one model in one pool of pages: the answers that each gets alone."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from engine.tiny_directory import text_of

from kvsift.engine.llm import LLM
from kvsift.stores.kv_pool import KVPool
from kvsift.stores.page_pool import OutOfPages

QUEST = "quest:budget=128:window=32:dense_layers=0"
QUESTIONS = ("Which mill?", "How many sacks?")


@pytest.mark.parametrize("path", ["composed", "eager"])
def test_two_documents_in_one_pool_answer_as_each_does_alone(path: str, llama: Path) -> None:
    texts = [text_of(300), text_of(180)]
    alone = [LLM(llama, QUEST, path=path).read(text) for text in texts]
    expected = [[each.ask(question, max_new_tokens=12).token_ids for question in QUESTIONS] for each in alone]
    llm = LLM(llama, QUEST, path=path)
    llm.kv = KVPool.of_size(400)
    documents = [llm.read(text) for text in texts]
    answers: list[list[list[int]]] = [[], []]
    for question in QUESTIONS:  # in turns
        for document, of_document in zip(documents, answers):
            of_document.append(document.ask(question, max_new_tokens=12).token_ids)
    assert answers == expected
    tensors = [tensor for layer in llm.kv.layers.values() for tensor in layer.tensors]
    used = llm.kv.pages.num_used
    assert llm.generate(text_of(60), max_new_tokens=8).token_ids == (
        LLM(llama, QUEST, path=path).generate(text_of(60), max_new_tokens=8).token_ids
    )
    assert all(one is other for one, other in zip(tensors, (t for la in llm.kv.layers.values() for t in la.tensors)))
    del document, documents
    gc.collect()
    assert llm.kv.pages.num_used < used, "the pages of a document go back with it"


def test_a_document_that_does_not_fit_the_pool_leaves_the_others_alone(llama: Path) -> None:
    llm = LLM(llama, QUEST, path="composed")
    llm.kv = KVPool.of_size(60)
    document = llm.read(text_of(200))
    first = document.ask(QUESTIONS[0], max_new_tokens=6).token_ids
    with pytest.raises(OutOfPages):
        llm.read(text_of(900)).ask(QUESTIONS[0], max_new_tokens=6)
    assert document.ask(QUESTIONS[0], max_new_tokens=6).token_ids == first
