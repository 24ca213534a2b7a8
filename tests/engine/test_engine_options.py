"""Options of generation: one list for prompts, streams and questions."""

import re
from pathlib import Path
from typing import Any

import pytest
from engine.tiny_directory import text_of
from refusals import refused

from kvsift import LLM, Sampling
from kvsift.api.answer import Answer
from kvsift.engine.options import GenerateOptions

PROMPTS = [text_of(300), text_of(90), text_of(200)]


def test_a_keyword_that_is_not_known_is_refused(llama: Path) -> None:
    llm, wrong = LLM(llama), {"max_token": 3}
    document = llm.read(text_of(300))
    for call in (llm.generate, llm.stream, document.ask):
        with refused("unknown_name: 'max_token'; did you mean 'max_new_tokens'"):
            call("Why?", **wrong)  # type: ignore[operator]


def test_printing_an_answer_shows_a_few_words_and_not_all_counters(llama: Path) -> None:
    plan = "quest:budget=128:dense_layers=none"
    llm = LLM(llama, plan, device="cpu")
    document = llm.read(text_of(300))
    about = f"<Document of {document.num_tokens} tokens for {llama.name}, {plan}, "
    assert repr(document) == f"{about}not prefilled yet>"
    answer = document.ask("Why?", max_new_tokens=120)
    assert re.fullmatch(re.escape(about) + r"prefilled in \d+\.\d s>", repr(document))
    assert repr(llm) == f"<LLM {llama.name} on cpu (float32), {plan}>"
    assert repr(llm.chat("A text.")) == "<Chat about 7 characters, turns: 0>"
    shown = str(answer)
    assert shown.startswith("Answer(")
    assert len(shown) < 600, "100 characters, which may be escaped"
    numbers = r"\.\.\.['\"], tokens=120, finish_reason='length', \d+\.\d ms per token, density \d\d\.\d %, "
    assert re.search(f"{numbers}{plan}\\)$", shown)
    assert repr(Answer("", [], 1, 1, 0.0, [], "dense", 0, 0)) == "Answer('', tokens=0, finish_reason='stop', dense)"


def test_samplings_are_one_for_all_or_one_for_each() -> None:
    cold, warm = Sampling(), Sampling(temperature=1.0)
    assert [one.sampling for one in GenerateOptions(sampling=warm).split(2)] == [warm, warm]
    assert [one.sampling for one in GenerateOptions(sampling=[cold, warm]).split(2)] == [cold, warm]
    with refused("invalid_value"):
        GenerateOptions(sampling=[cold, warm]).split(3)


@pytest.mark.parametrize(("stop", "stops"), [(None, ()), ("", ()), ("a", ("a",)), (["a", "", "b"], ("a", "b"))])
def test_stops_are_texts(stop: Any, stops: tuple[str, ...]) -> None:
    assert GenerateOptions(stop=stop).stops == stops


def test_a_question_may_bring_its_own_stop(llama: Path) -> None:
    document = LLM(llama).read(text_of(300), stop="no such text")
    text = document.ask("Why?", max_new_tokens=8).text
    stop = text[3]
    assert document.ask("Why?", max_new_tokens=8, stop=stop).text == text[: text.lstrip().index(stop, 1)].strip()


@pytest.mark.parametrize("path", ["composed", "eager"])
def test_progress_over_several_prompts_never_falls_and_reaches_the_end(path: str, llama: Path) -> None:
    calls: list[tuple[int, int]] = []
    llm = LLM(llama, "quest:budget=128:dense_layers=none", path=path, chunk_size=64)
    llm.generate(PROMPTS, max_new_tokens=2, progress=lambda done, total: calls.append((done, total)))
    done, totals = [call[0] for call in calls], {call[1] for call in calls}
    assert done == sorted(done)
    assert totals == {sum(map(len, PROMPTS))}  # a token per byte, after <bos>; the last one is not counted
    assert done[-1] in totals
    assert len(calls) > len(PROMPTS)
