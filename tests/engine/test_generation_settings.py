"""What generation_config.json asks for is applied as by generate(), or named when the model is loaded."""

import json
import logging
import shutil
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.tiny_directory import text_of
from engine.tiny_tokenizers import byte_level, cycle, parrot
from refusals import refused
from transformers import AutoModelForCausalLM

from kvsift import LLM, Sampling

PROMPTS = [text_of(150), text_of(90) + " Why? Why? Why? W"]
DRAFTING = "quest:budget=32:page_size=8:dense_layers=none:sinks=1:window=8"
NEW = 20
SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 1},
    {"suppress_tokens": list(range(100))},
    {"begin_suppress_tokens": list(range(200))},
    {"bad_words_ids": [[token] for token in range(60, 160)]},
    {"sequence_bias": [[[70], 30.0], [[70, 71], 40.0]]},
    {"min_new_tokens": 12, "eos_token_id": list(range(1, 200))},
    {"min_length": 160, "eos_token_id": list(range(1, 200))},
    {"exponential_decay_length_penalty": [2, 2.0]},
    {"forced_bos_token_id": 70, "forced_eos_token_id": 1},
    {"remove_invalid_values": True},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "suppress_tokens": [5], "min_new_tokens": 3},
]


def with_settings(llama: Path, folder: Path, settings: dict[str, Any]) -> Path:
    """A copy of a model directory with a generation_config.json of its own."""
    directory = shutil.copytree(llama, folder / "model")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **settings}))
    return directory


def stock(directory: Path, ids: list[int], **options: Any) -> list[int]:
    """The tokens of stock generate(), without the one that ends them."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    found = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, **options)[0, len(ids) :].tolist()
    ends = model.generation_config.eos_token_id
    return found[:-1] if found[-1] in (ends if isinstance(ends, list) else [ends]) else found


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "+".join(settings))
def test_answers_are_those_of_generate_under_the_settings_of_the_checkpoint(
    settings: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    """In a batch, after a document, and where drafts are verified."""
    directory, plain = with_settings(llama, tmp_path, settings), LLM(llama, "dense")
    llm = LLM(directory, "dense", dtype="float32")
    prompts = [llm.tokenizer(text)["input_ids"] for text in PROMPTS]
    expected = [stock(directory, ids) for ids in prompts]
    assert [answer.token_ids for answer in llm.generate(PROMPTS, max_new_tokens=NEW)] == expected
    exact = llm.generate(PROMPTS[0], plan=DRAFTING, exact=True, max_new_tokens=NEW)
    assert exact.token_ids == expected[0]
    document = llm.read(PROMPTS[0], template="{context} {question}")
    asked = document.check("Why?", NEW)
    assert document.ask("Why?", max_new_tokens=NEW).token_ids == stock(directory, asked)
    if "remove_invalid_values" not in settings:  # which changes nothing here
        assert [answer.token_ids for answer in plain.generate(PROMPTS, max_new_tokens=NEW)] != expected


@pytest.mark.usefixtures("eager_pace")
def test_drafts_are_chosen_under_the_settings_of_the_checkpoint(llama: Path, tmp_path: Path) -> None:
    """Else hardly any would be accepted where tokens may not be repeated."""
    llm = LLM(with_settings(llama, tmp_path, {"no_repeat_ngram_size": 1}), "quest:budget=4096:dense_layers=none")
    answer = llm.generate(PROMPTS[0], exact=True, max_new_tokens=40)
    assert answer.exact["drafts_wrong"] == 0
    assert answer.exact["drafts_accepted"] > 10


def test_draws_obey_the_settings_of_the_checkpoint(llama: Path, tmp_path: Path) -> None:
    allowed = set(range(100, 110))
    directory = with_settings(llama, tmp_path, {"suppress_tokens": [n for n in range(259) if n not in allowed]})
    answers = LLM(directory, "dense").generate(PROMPTS[0], n=3, sampling=Sampling(temperature=5.0), max_new_tokens=10)
    drawn = {token for answer in answers for token in answer.token_ids}
    assert drawn <= allowed
    assert len(drawn) > 3


def test_stop_strings_of_the_checkpoint_join_those_of_a_request(llama: Path, tmp_path: Path) -> None:
    text = LLM(llama, "dense").generate(PROMPTS[0], max_new_tokens=NEW).text
    middle = next(character for character in text[4:] if text.index(character) > 3 and not character.isspace())
    llm = LLM(with_settings(llama, tmp_path, {"stop_strings": [middle]}), "dense")
    for stop in (None, "never"):
        answer = llm.generate(PROMPTS[0], max_new_tokens=NEW, stop=stop)
        assert (answer.text, answer.finish_reason) == (text[: text.index(middle)], "stop")


@pytest.mark.parametrize("skips", [None, True, False])
def test_a_stop_string_of_the_checkpoint_that_is_a_special_token_ends_the_answer(
    skips: bool | None, tmp_path: Path
) -> None:
    tokenizer = byte_level()
    directory = parrot(tmp_path, tokenizer, cycle(tokenizer.convert_tokens_to_ids(["H", "i", "<|im_end|>", "."])))
    settings = {"stop_strings": ["", "<|im_end|>"]}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    answer = LLM(directory, "dense").generate("H", max_new_tokens=9, skip_special_tokens=skips)
    assert (answer.text, answer.finish_reason) == ("i", "stop")


def test_stop_strings_that_are_no_texts_are_refused_with_the_name_of_the_file(llama: Path, tmp_path: Path) -> None:
    llm = LLM(with_settings(llama, tmp_path, {"stop_strings": 5}), "dense")
    with refused("invalid_value: stop_strings=5"):
        llm.generate("Why?")


@pytest.mark.parametrize("settings", [{"remove_invalid_values": True}, {"suppress_tokens": [40]}])
def test_log_probabilities_are_numbers_where_settings_replace_logits_that_are_not(
    settings: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    directory = with_settings(llama, tmp_path, settings)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.get_output_embeddings().weight[40] = torch.nan
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **settings}))
    answer = LLM(directory, "dense").generate("Why?", max_new_tokens=3, logprobs=2)
    assert all(isfinite(value) for each in answer.logprobs for _, value in [(each.token, each.logprob), *each.top])


def test_what_is_not_applied_is_named_once_when_the_model_is_loaded(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"guidance_scale": 1.5, "num_beams": 4, "temperature": 0.7, "do_sample": True, "repetition_penalty": 1.1}
    llm = LLM(with_settings(llama, tmp_path, asked), "dense")
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "kvsift"):
        for _ in range(2):
            llm.generate(PROMPTS[0], max_new_tokens=1)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        "generation_config.json asks for guidance_scale=1.5, num_beams=4, which kvsift does not appl"
    )


def test_settings_that_ask_for_nothing_are_not_named(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"guidance_scale": 1.0, "num_beams": 1, "repetition_penalty": 1.0, "suppress_tokens": []}
    llm = LLM(with_settings(llama, tmp_path, asked), "dense", path="eager")
    assert llm.generate(PROMPTS[0], max_new_tokens=2).path == "eager"
    assert not caplog.records


def test_captured_steps_are_not_taken_past_the_settings_of_the_checkpoint(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They choose tokens inside of a graph."""
    directory = with_settings(llama, tmp_path, {"repetition_penalty": 1.3})
    answer = LLM(directory, "dense", path="eager").generate(PROMPTS[0], max_new_tokens=NEW)
    reason = "generation_config.json asks for repetition_penalty=1.3, which is applied to the logits of each step"
    assert answer.path == "native"
    assert reason in caplog.text
    assert answer.token_ids == stock(directory, LLM(llama).tokenizer(PROMPTS[0])["input_ids"])


def test_a_setting_that_transformers_refuses_is_refused_in_the_name_of_the_file(llama: Path, tmp_path: Path) -> None:
    llm = LLM(with_settings(llama, tmp_path, {"repetition_penalty": -1.0}), "dense")
    with refused("invalid_value: repetition_penalty=-1.0"):
        llm.generate(PROMPTS[0], max_new_tokens=1)
