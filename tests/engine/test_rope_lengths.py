"""Models whose RoPE depends on the length: prompt and answer decide the rotation, whatever the chunks or the path."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.loop_sequences import pinned_caches
from engine.tiny_directory import text_of, write_model
from models.ropes import KNOBS, ORIGINAL, PHI3, in_one_rotation, rope
from refusals import refused

from kvsift import LLM
from kvsift.api.answer import Answer
from kvsift.api.document import Document
from kvsift.models.hf.rope import RopeLimits

COVERING = "quest:budget=4096:page_size=8:dense_layers=none"
SPARSE = "quest:budget=64:page_size=8:window=8:dense_layers=none"
NEW = 8
ACROSS, LONG, SHORT = text_of(ORIGINAL - 5), text_of(300), text_of(50)  # a token per byte, after <bos>
WITH_LENGTHS = ["dynamic", "longrope"]


@pytest.fixture(scope="module", params=KNOBS)
def kind(request: pytest.FixtureRequest) -> str:
    param: str = request.param
    return param


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {kind: write_model(tmp_path_factory.mktemp(kind), **rope(kind)) for kind in KNOBS}
    return {**found, "Phi3": write_model(tmp_path_factory.mktemp("Phi3"), "Phi3", **PHI3)}


def generated(llm: LLM, text: str, **options: Any) -> list[int]:
    answer = llm.generate(text, max_new_tokens=NEW, **options)
    assert isinstance(answer, Answer)
    return answer.token_ids


def wanted(llm: LLM, text: str, num_new: int = NEW) -> list[int]:
    """Of a model whose whole sequence uses one rotation, that of prompt and answer."""
    ids = torch.tensor([llm.tokenizer(text)["input_ids"]])
    length, limits = ids.shape[1] + num_new - 1, RopeLimits.of(llm.model)
    return in_one_rotation(llm.model, ids, num_new, length if limits is None else limits.stepped(length))[0].tolist()


def test_prompt_chunks_do_not_change_the_rotation(kind: str, directories: dict[str, Path]) -> None:
    whole, pieces = (
        LLM(directories[kind], plan, chunk_size=chunk_size, device="cpu", dtype="float32")
        for plan, chunk_size in (("dense", 1000), (COVERING, 40))
    )
    for text in (SHORT, ACROSS, LONG):
        assert generated(whole, text) == generated(pieces, text) == wanted(whole, text)


@pytest.mark.parametrize("kind", [*WITH_LENGTHS, "Phi3"])
@pytest.mark.parametrize("plan", ["dense", SPARSE])
def test_captured_steps_rotate_as_the_composed_path(kind: str, plan: str, directories: dict[str, Path]) -> None:
    composed, eager = (
        LLM(directories[kind], plan, device="cpu", dtype="float32", path=path) for path in ("composed", "eager")
    )
    for text in (SHORT, ACROSS, LONG, SHORT):  # steps are kept from call to call
        assert generated(eager, text) == generated(composed, text)


@pytest.mark.parametrize("kind", WITH_LENGTHS)
def test_prompts_of_different_lengths_do_not_rotate_each_other(kind: str, directories: dict[str, Path]) -> None:
    for path in ("composed", "eager"):
        llm = LLM(directories[kind], SPARSE, device="cpu", dtype="float32", path=path)
        alone = [generated(llm, text) for text in (SHORT, LONG, ACROSS)]
        together = llm.generate([SHORT, LONG, ACROSS], max_new_tokens=NEW)
        assert [answer.token_ids for answer in together] == alone


@pytest.mark.parametrize("kind", [*WITH_LENGTHS, "Phi3"])
@pytest.mark.parametrize("path", ["composed", "eager"])
def test_a_question_that_crosses_the_original_maximum_reads_the_document_again(
    kind: str, path: str, directories: dict[str, Path]
) -> None:
    llm = LLM(directories[kind], "dense", chunk_size=40, device="cpu", dtype="float32", path=path)
    document = llm.read(text_of(60))
    questions = ("Who?", "Which of the mills by the river grinds the least corn in a day?", "Who?")
    for question in questions:
        ids = document.check(question, NEW)
        expected = wanted(llm, llm.tokenizer.decode(ids[1:]))
        assert document.go_on(ids, max_new_tokens=NEW).token_ids == expected


def test_questions_about_a_long_document_share_its_reading(directories: dict[str, Path]) -> None:
    for kind in WITH_LENGTHS:
        llm, caches = LLM(directories[kind], "dense", device="cpu"), []
        document = llm.read(text_of(280))
        for question in ("Who?", "Where is it?"):
            document.ask(question, max_new_tokens=8)
            caches += pinned_caches(llm)
        assert caches[0] is caches[1]


def test_feeding_a_document_more_than_was_said_is_refused(directories: dict[str, Path]) -> None:
    llm = LLM(directories["longrope"], "dense", device="cpu", dtype="float32")
    ids = llm.tokenizer(text_of(100))["input_ids"]
    document = Document(llm, ids, lambda question: ids, llm.plan)
    cache = document.prefill(llm.plan, 10)
    with refused("unsupported_call: longrope, original maximum 128"):
        llm.feed(cache, [5] * 40)


def test_dynamic_ntk_goes_as_far_as_its_factor(directories: dict[str, Path]) -> None:
    llm = LLM(directories["dynamic"], "dense", device="cpu")
    with refused("context_length_exceeded: 512"):
        llm.generate(text_of(500), max_new_tokens=20)
