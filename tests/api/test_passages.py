"""Passages: the characters of a document that decode steps selected."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.tiny_directory import text_of
from refusals import refused

from kvsift import LLM
from kvsift.api.passages import MOST_SPANS, Passages, passages_of
from kvsift.engine.executor import Executor
from kvsift.layer.selection_log import LayerSelections, SelectionLog
from kvsift.methods import catalogue, method_class
from kvsift.plan.syntax import parse_plan
from kvsift.texts.prose import document
from kvsift.tokenization.prompt import PromptFormat
from kvsift.tokenization.text_offsets import TextOffsets, offsets_of

SMALL = "budget=80:sinks=4:window=16:dense_layers=none"
KNOBS = {"retrieval_attention": ":index=flat", "infllm": ":block=16:chunk=32"}
NEEDLE = "The access code of the north warehouse is 48213."
QUESTION = "What is the access code of the north warehouse?"


def new_llm(directory: Path | None, **options: object) -> LLM:
    return LLM(directory, f"quest:{SMALL}:page_size=16", device="cpu", chunk_size=64, dtype="float32", **options)


def found(answer: object) -> Passages:
    passages = answer.passages
    assert isinstance(passages, Passages)
    for spans in (passages.all, *passages.layers.values()):
        assert all(0 <= start < stop <= passages.characters and 0 < share <= 1 for start, stop, share in spans)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    return passages


def share_of(passages: Passages, start: int, stop: int) -> float:
    """The largest share of characters among these."""
    return max((share for first, last, share in passages.all if first < stop and start < last), default=0.0)


@pytest.fixture(scope="module")
def embedded() -> LLM:
    return LLM(plan="dense", device="cpu")


@pytest.mark.parametrize("method", ["quest", "sketch", "oracle_tokens"])
def test_the_passages_of_a_needle_contain_it(embedded: LLM, method: str) -> None:
    tokens = lambda text: len(embedded.tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    text = document([NEEDLE], [0.4], 1500, tokens)
    answer = embedded.read(text).ask(QUESTION, plan=f"{method}:budget=192:window=32:dense_layers=none", passages=True)
    assert "48213" in answer.text
    passages, start = found(answer), text.index("48213")
    assert passages.characters == len(text)
    assert "everything" not in passages.note
    assert share_of(passages, start, start + 5) > 0.1
    read = sum(stop - start for start, stop, share in passages.all if share > 0.1)
    assert read < len(text) / 2, "and little else"


def test_spans_are_exact_with_characters_of_several_bytes(llama: Path) -> None:
    tokenizer = new_llm(llama).tokenizer
    text = "Grüße 🙂 an e\u0301 人\n" * 20
    ids, offsets = tokenizer(text)["input_ids"], offsets_of(tokenizer, text)
    assert offsets.num_tokens == len(ids)
    for place, number in enumerate(range(1, len(ids))):  # a token per byte
        shares = torch.zeros(len(ids))
        shares[number] = 0.5
        [(start, stop, share)] = offsets.spans(shares)
        assert (stop - start, share) == (1, 0.5)
        assert len(text[:start].encode()) <= place < len(text[:stop].encode())
    assert offsets.spans(torch.ones(len(ids))) == [(0, len(text), 1.0)]


def test_words_with_spaces_leave_no_gaps(embedded: LLM) -> None:
    text = "  An old mill\n\n  by the Größe 🙂🙂 of a river."
    offsets = offsets_of(embedded.tokenizer, text)
    [(start, stop, _)] = offsets.spans(torch.ones(offsets.num_tokens))
    assert text[start:stop].strip() == text.strip()


@pytest.mark.parametrize("kind", ["llama", "chatty"])
def test_offsets_are_those_of_the_document_wherever_it_is_in_the_prompt(
    kind: str, request: pytest.FixtureRequest
) -> None:
    llm, text = new_llm(request.getfixturevalue(kind)), " \n" + "Märchen 🙂. " * 30 + "\n "
    turns = [("Who?", "Märchen"), ("When?", "now")]
    form = PromptFormat(llm.tokenizer)
    ids, offsets = form.encode(text, "Why?", turns), form.offsets(text, "Why?", turns)
    shares = torch.zeros(len(ids))
    first = next(i for i in range(len(ids)) if llm.tokenizer.decode(ids[: i + 1]).endswith("Märchen"))
    shares[first] = 1
    [(start, stop, _)] = offsets.spans(shares)
    assert text[start:stop] == "n"
    assert start == text.index("Märchen") + 6
    assert offsets.spans(torch.ones(len(ids)))[0][1] >= len(text.rstrip())


@pytest.mark.parametrize("name", [name for name in catalogue() if "decode" in method_class(name).phases])
def test_every_method_has_passages_or_says_why_not(llama: Path, name: str) -> None:
    small = SMALL.replace(":window=16", "") if name == "streaming_llm" else SMALL
    plan = "dense" if name == "dense" else f"{name}:{small}{KNOBS.get(name, '')}"
    if name in ("infinigen", "loki", "verify"):
        pytest.skip("needs a calibration, or drafts alone")
    passages = found(new_llm(llama).generate(text_of(600), plan=plan, max_new_tokens=5, passages=True))
    if name in ("dense", "streaming_llm"):
        assert passages.all == []
        assert {"dense": "reads everything", "streaming_llm": "selects nothing"}[name] in passages.note
    else:
        assert passages.all
        assert set(passages.layers) | {0, 1, 2} == {0, 1, 2}


def test_as_many_tokens_are_counted_as_were_selected(llama: Path) -> None:
    llm, text = new_llm(llama), text_of(600)
    answer = llm.generate(text, plan=f"oracle_tokens:{SMALL}", max_new_tokens=9, passages=True)
    per_step = 80 - 4 - 16
    for spans in [found(answer).all, *answer.passages.layers.values()]:  # a byte is a token, and a character
        assert sum((stop - start) * share for start, stop, share in spans) == pytest.approx(per_step, abs=0.6)


def test_layers_and_steps_that_read_everything_are_told(llama: Path) -> None:
    llm, text = new_llm(llama), text_of(600)
    passages = found(llm.generate(text, plan="quest:budget=80:window=16:dense_layers=0+1", passages=True))
    assert list(passages.layers) == [2]
    assert passages.note == "Layers 0, 1 read everything."
    assert passages.all == passages.layers[2]
    assert "fits the budget" in found(llm.generate("Once.", passages=True)).note
    assert "no second token" in found(llm.generate(text, max_new_tokens=1, passages=True)).note
    assert "no second token" in found(llm.generate(text, timeout_s=1e-9, passages=True)).note
    guarded = found(llm.generate(text, plan=f"random:{SMALL}:min_recovery=1.0", max_new_tokens=60, passages=True))
    assert "steps read everything, and are left out" in guarded.note


def test_nothing_is_kept_unless_asked_for(llama: Path) -> None:
    llm = new_llm(llama)
    assert llm.generate("Once upon a time", max_new_tokens=2).passages is None
    document = llm.read(text_of(300))
    assert document.ask("Who?", passages=True, max_new_tokens=3).passages is not None
    assert document.ask("Who?", max_new_tokens=3).passages is None


@pytest.mark.parametrize("kind", ["llama", "chatty"])
def test_turns_and_documents_agree_and_sequences_do_not_mix(kind: str, request: pytest.FixtureRequest) -> None:
    llm, text = new_llm(request.getfixturevalue(kind)), text_of(500)
    chat, options = llm.chat(text), {"max_new_tokens": 5, "passages": True, "stop": "\n\n"}
    first = found(chat.ask("Which mill?", **options))
    document = llm.read(text)
    assert found(document.ask("Which mill?", **options)) == first
    second = found(chat.ask("How many sacks?", **options))
    assert second.characters == len(text)
    assert second != first
    fresh = llm.chat(text)
    fresh.turns = chat.turns[:1]
    assert found(fresh.ask("How many sacks?", **options)) == second, "also if nothing is reused"
    prompts = [text_of(300), text_of(420), "Märchen " * 40]
    together = llm.generate(prompts, max_new_tokens=6, passages=True)
    for prompt, answer in zip(prompts, together):
        alone = llm.generate(prompt, max_new_tokens=6, passages=True)
        assert found(answer) == found(alone)
        assert answer.passages.characters == len(prompt)


def test_a_step_that_failed_counts_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, prompts = new_llm(llama), [text_of(300), text_of(420)]
    expected = [answer.passages for answer in llm.generate(prompts, max_new_tokens=24, passages=True)]
    decode, calls = Executor.decode_sequences, []

    def failing(self: Executor, seqs: Any) -> object:
        logits = decode(self, seqs)
        calls.append(len(seqs))
        if calls.count(2) == 2 and calls[-1] == 2:
            raise RuntimeError("a fault after the pass")
        return logits

    monkeypatch.setattr(Executor, "decode_sequences", failing)
    again = [answer.passages for answer in llm.generate(prompts, max_new_tokens=24, passages=True)]
    assert again == expected
    assert calls.count(2) > 2
    assert calls.count(1) >= 2


def test_what_has_no_passages_is_refused(llama: Path) -> None:
    eager = LLM(llama, f"quest:{SMALL}", device="cpu", path="eager")
    with refused("conflict"):
        eager.generate(text_of(300), passages=True)
    with refused("missing_input"):
        new_llm(llama).chat().ask("Who?", passages=True)
    slow = type("SlowTokenizer", (), {"is_fast": False})()
    with refused("unsupported_prompt: SlowTokenizer"):
        offsets_of(slow, "text")


def test_long_lists_are_cut_to_the_largest_shares() -> None:
    count = 3 * MOST_SPANS
    log, offsets = SelectionLog(count), TextOffsets([(i, i + 1) for i in range(count)], count)
    shares = torch.zeros(count + 1)
    shares[0:count:2] = 0.25
    shares[2 * MOST_SPANS : count : 2] = 0.5
    log._layers[3] = LayerSelections(1, 0, {1: shares})
    passages = passages_of(log, offsets, parse_plan("sketch:budget=1024"))
    assert passages.all == passages.layers[3]
    assert passages.all == [(i, i + 1, 0.5) for i in range(2 * MOST_SPANS, count, 2)], "none of those with less"
    assert "those with the largest shares" in passages.note
    shares[0:count:2] = 0.25
    assert len(passages_of(log, offsets, parse_plan("sketch:budget=1024")).all) == MOST_SPANS
