"""LLM.generate: transformers' own tokens when dense; a stream that adds up to the text; stops and ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ends import Dictated
from engine.tiny_directory import text_of, write_model
from refusals import refused
from transformers import AutoModelForCausalLM

from kvsift import LLM
from kvsift.api.answer import Answer

PROMPT = text_of(400)


def said(llm: LLM, text: str, stop: str | None = None, max_new_tokens: int = 100) -> tuple[Answer, list[str]]:
    """The answer and the streamed pieces when the model says a text."""
    pieces: list[str] = []
    answer = llm.generate(
        "Say: ", max_new_tokens=max_new_tokens, sampling=Dictated(llm, text), stop=stop, on_text=pieces.append
    )
    return answer, pieces


@pytest.fixture(scope="module")
def llm(llama: Path) -> LLM:
    return LLM(llama, "dense")


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("chunk_size", [1, 96, 2048])
def test_dense_generates_the_tokens_of_transformers(
    family: str, chunk_size: int, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(family)
    answer = LLM(directory, "dense", chunk_size=chunk_size).generate(PROMPT, max_new_tokens=24)
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    ids = torch.tensor([LLM(directory).tokenizer(PROMPT)["input_ids"]])
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert answer.token_ids == expected.tolist()
    assert answer.prompt_tokens == ids.shape[1] == len(PROMPT) + 1


def test_a_model_that_kvsift_cannot_run_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    """And not with every request, after a server has said that it is ready."""
    llm = LLM(write_model(tmp_path, "DeepseekV3"))
    for _ in range(2):
        with refused("unsupported_model: DeepseekV3ForCausalLM"):
            llm.load()


def test_the_chat_template_is_not_applied_to_a_text_to_continue(llama: Path, chatty: Path) -> None:
    assert LLM(chatty).generate(PROMPT).token_ids == LLM(llama).generate(PROMPT).token_ids


def test_a_prompt_of_one_token_is_continued(llm: LLM) -> None:
    bare = LLM(llm.directory.path, "dense")
    bare.tokenizer.backend_tokenizer.post_processor = None  # no <bos>
    answer = bare.generate("T", max_new_tokens=3)
    assert (answer.prompt_tokens, len(answer.token_ids)) == (1, 3)


def test_pieces_add_up_to_the_text(llm: LLM) -> None:
    pieces: list[str] = []
    answer = llm.generate(PROMPT, max_new_tokens=40, on_text=pieces.append)
    assert "".join(pieces) == answer.text


@pytest.mark.parametrize(
    ("written", "options", "text", "pieces"),
    [
        ("wörld ☃ 🌲.", {"max_new_tokens": 16}, "wörld ☃ 🌲.", list("wörld ☃ 🌲.")),  # a token per byte
        ("ab☃", {"max_new_tokens": 4}, "ab\ufffd", ["a", "b", "\ufffd"]),
        ("one EN two ENDED", {"stop": "END"}, "one EN two ", None),
        ("aaab", {"stop": "aab"}, "a", None),
        ("\n\n42\nand on", {"stop": "\n"}, "\n\n42", None),
        ("one E", {"stop": "END", "max_new_tokens": 5}, "one E", None),
    ],
    ids=["whole characters", "half a character at the end", "a stop of several tokens", "a stop that overlaps itself",
         "white space before an answer is no stop", "no stop"],
)  # fmt: skip
def test_texts_and_their_pieces(
    llm: LLM, written: str, options: dict[str, Any], text: str, pieces: list[str] | None
) -> None:
    answer, streamed = said(llm, written, **options)
    assert answer.text == "".join(streamed) == text
    assert pieces is None or streamed == pieces
    if options.get("stop") == "END" and "END" in written:
        assert len(answer.token_ids) == len("one EN two END")


@pytest.mark.parametrize("ends", ["one", "several"])
def test_an_end_token_ends_the_text_and_is_not_in_it(ends: str, llama: Path, tmp_path: Path) -> None:
    unended = LLM(llama, "dense").generate(PROMPT, max_new_tokens=20)
    end = unended.token_ids[6]
    index = unended.token_ids.index(end)
    directory = write_model(tmp_path, eos_token_id=end if ends == "one" else [1, end])
    pieces: list[str] = []
    answer = LLM(directory, "dense").generate(PROMPT, max_new_tokens=20, on_text=pieces.append)
    assert answer.token_ids == unended.token_ids[:index]
    assert "".join(pieces) == answer.text
    assert len(answer.itl_s) == len(answer.token_ids)  # the end took a step of its own


@pytest.mark.usefixtures("no_weights")
def test_a_layer_that_the_model_lacks_is_refused_before_the_weights_are_loaded(llama: Path) -> None:
    llm = LLM(llama, "tidal_decode:budget=128:correction=13")
    with refused("invalid_value: correction=13"):
        llm.generate(PROMPT)
