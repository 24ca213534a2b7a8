"""One prompt cannot end another: what fails while a token, its text or the answer is made ends that answer alone."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local
from typing import Any

import pytest
import torch
from engine.tiny_directory import text_of
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvsift import LLM, Sampling
from kvsift.api import generation
from kvsift.api.generation import Generation
from kvsift.engine.executor import Executor
from kvsift.engine.loop import Loop
from kvsift.engine.sampling import Chooser
from kvsift.engine.sequence import CacheReport
from kvsift.engine.transcript import TextOutput, TokenLogprobs, Transcript
from kvsift.errors import LogitsError
from kvsift.layer.selection_log import SelectionLog

PLAN = "quest:budget=96:window=32:dense_layers=none"
FAULTY = 77  # seed of the answer that fails
SEEDS = [1, FAULTY, 2]
TEXTS = [text_of(150), text_of(170), text_of(130)]
OPTIONS = {"max_new_tokens": 6, "logprobs": 1, "passages": True}
working = local()  # whether the answer that fails is worked on, where a place does not know it


def of_output(output: TextOutput, *_: Any) -> bool:
    return output.transcript.request.sampling.seed == FAULTY


def of_transcript(transcript: Transcript, *_: Any) -> bool:
    return transcript.request.sampling.seed == FAULTY


def of_sequence(_: Any, seq: Any, *others: Any) -> bool:
    return of_output(seq.output)


def of_working(*_: Any) -> bool:
    return getattr(working, "is_faulty", False)


PLACES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "the loop takes the sequence": (Loop, "_enter", of_sequence),
    "the cache is opened": (Executor, "open", of_sequence),
    "how far the prompt is read": (TextOutput, "note_prefilled", of_output),
    "a selection is recorded": (SelectionLog, "after_segment", lambda log, *_: log.prompt_length == 171),
    "the sampler": (Chooser, "__call__", lambda chooser, *_: chooser._sampling.seed == FAULTY),
    "the output": (TextOutput, "take", of_output),
    "the transcript": (Transcript, "take", of_transcript),
    "the end of the text": (Transcript, "end", of_transcript),
    "the text": (PreTrainedTokenizerBase, "decode", of_working),
    "the log-probabilities": (TokenLogprobs, "of", of_working),
    "the counters of the cache": (CacheReport, "of", of_working),
    "the passages": (generation, "passages_of", of_working),
    "the answer": (generation, "answer_of_sequence", of_sequence),
}


@pytest.fixture
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that fails for one answer."""
    owner, name, is_due = PLACES[request.param]

    def replace(owner: Any, name: str, new: Callable[..., Any]) -> None:
        old = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: new(old, *args, **options))

    def failing(old: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if is_due(*args):
            raise RuntimeError("a fault")
        return old(*args, **options)

    replace(owner, name, failing)

    def known(is_faulty: Callable[..., bool]) -> Callable[..., Any]:
        def work(old: Callable[..., Any], *args: Any, **options: Any) -> Any:
            before, working.is_faulty = of_working(), is_faulty(*args)
            try:
                return old(*args, **options)
            finally:
                working.is_faulty = before

        return work

    replace(TextOutput, "take", known(of_output))
    replace(Loop, "_finish", known(of_sequence))
    replace(Generation, "_settle", known(lambda _, index, seq, *others: of_output(seq.output)))


@pytest.fixture(scope="module")
def llm(llama: Path) -> LLM:
    return LLM(llama, PLAN, dtype="float32", chunk_size=64)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """Tokens of the answers, each alone."""
    return [ask(llm, text, seed).token_ids for text, seed in zip(TEXTS, SEEDS)]


def ask(llm: LLM, text: str, seed: int) -> Any:
    return llm.generate(text, sampling=Sampling(0.8, seed=seed), **OPTIONS)


@pytest.mark.parametrize("broken", PLACES, indirect=True)
def test_a_prompt_that_fails_leaves_the_others_of_its_call_their_answers(
    broken: None, llm: LLM, expected: list[list[int]]
) -> None:
    with pytest.raises(RuntimeError, match="a fault") as failed:
        llm.generate(TEXTS, sampling=[Sampling(0.8, seed=seed) for seed in SEEDS], **OPTIONS)
    first, second, third = failed.value.answers  # type: ignore[attr-defined]
    assert second is None
    assert [first.token_ids, third.token_ids] == [expected[0], expected[2]]
    assert failed.value.__notes__ == ["kvsift: of 3 prompts, these failed: 2. The attribute answers has the others."]
    assert ask(llm, TEXTS[0], 1).token_ids == expected[0]
    assert llm.loop.seqs == []
    llm.loop.check()


@pytest.mark.parametrize("broken", PLACES, indirect=True)
def test_a_thread_whose_answer_fails_leaves_the_others_theirs(
    broken: None, llm: LLM, expected: list[list[int]]
) -> None:
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask, llm, text, seed) for text, seed in zip(TEXTS, SEEDS)]
    with pytest.raises(RuntimeError, match="a fault"):
        asked[1].result()
    assert [asked[0].result().token_ids, asked[2].result().token_ids] == [expected[0], expected[2]]
    llm.loop.check()


@pytest.mark.parametrize("path", ["composed", "eager"])
def test_a_turn_or_a_question_that_fails_leaves_the_next_one_its_answer(
    path: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(spoils: bool) -> list[list[int]]:
        llm = LLM(llama, PLAN, path=path)
        found = []
        for asked in (llm.chat(text_of(300)), llm.read(text_of(300))):
            found.append(asked.ask("Which mill?", max_new_tokens=4).token_ids)
            with monkeypatch.context() as patch:
                if spoils:
                    patch.setattr(Transcript, "take", lambda *_: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        asked.ask("How much corn?", max_new_tokens=4)
            found.append(asked.ask("How many sacks?", max_new_tokens=4).token_ids)
        return found

    assert answers(True) == answers(False)


def token_of_one_answer(answers: list[Any], ids: list[list[int]]) -> int:
    """A token that the second answer has after its first one and goes on after, and no other text has."""
    others = {*ids[0], *ids[1], *ids[2], *answers[0].token_ids, *answers[2].token_ids, answers[1].token_ids[0]}
    return next(token for token in answers[1].token_ids[1:-1] if token not in others)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("plan", "path", "deterministic", "exact"),
    [
        ("dense", "auto", False, False),
        (PLAN, "auto", False, True),
        (PLAN, "eager", False, False),
        ("dense", "eager", True, False),  # steps of blocks
        (PLAN, "eager", True, True),
    ],
)
def test_a_token_whose_logits_are_nan_ends_its_answer_with_a_sentence(
    plan: str, path: str, deterministic: bool, exact: bool, value: float, llama: Path
) -> None:
    llm = LLM(llama, plan, path=path, deterministic=deterministic, dtype="float32", chunk_size=64)
    options = {"max_new_tokens": 8, "exact": exact, "sampling": [Sampling(1.5, seed=seed) for seed in SEEDS]}
    before = llm.generate(TEXTS, **options)
    token = token_of_one_answer(before, [llm.tokenizer(text)["input_ids"] for text in TEXTS])
    weight = llm.model.get_input_embeddings().weight
    was = weight[token].clone()
    with torch.no_grad():
        weight[token] = value  # as an overflow in float16 gives
    with pytest.raises(
        LogitsError, match=r"no token can be chosen for token .* of the answer: .* NaN or infin"
    ) as failed:
        llm.generate(TEXTS, **options)
    if not exact:  # else the token may be verified in one pass with others
        number = before[1].token_ids.index(token) + 2
        assert f"for token {number} of the answer" in str(failed.value)
    found = failed.value.answers
    assert found[1] is None
    assert [found[0].token_ids, found[2].token_ids] == [before[0].token_ids, before[2].token_ids]
    with pytest.raises(LogitsError):  # in the sequences of the loop
        llm.generate(TEXTS[1], **{**options, "sampling": options["sampling"][1]})
    with torch.no_grad():
        weight[token] = was
    assert llm.generate(TEXTS[1], **{**options, "sampling": options["sampling"][1]}).token_ids == before[1].token_ids


def test_logits_of_minus_infinity_are_tokens_that_are_never_chosen() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0])
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.9)):
        choose = sampling.chooser(logits.device)
        assert {choose(logits) for _ in range(20)} <= {1, 3}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.5)])
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ([0.0, torch.nan, 1.0], "1 of 3 logits of the model are NaN or infinite; the first, of token 1, is nan"),
        ([0.0, 1.0, torch.inf], "1 of 3 logits of the model are NaN or infinite; the first, of token 2, is inf"),
        ([torch.inf, torch.nan, torch.inf], "3 of 3 logits"),
        ([-torch.inf] * 3, "all logits of the model are -inf"),
    ],
)
def test_logits_from_which_no_token_can_be_chosen_are_named(sampling: Sampling, wrong: list[float], text: str) -> None:
    choose = sampling.chooser(torch.device("cpu"))
    choose(torch.zeros(3))
    with pytest.raises(LogitsError, match="for token 2 of the answer: " + text):
        choose(Tensor(wrong))


def test_memory_that_cannot_be_told_ends_those_that_wait_for_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence that decodes goes on."""
    room, alone = Executor.room, llm.generate(TEXTS[0], max_new_tokens=12).token_ids
    stream = llm.stream(TEXTS[0], max_new_tokens=12)
    next(stream)
    monkeypatch.setattr(Executor, "room", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="the free memory cannot be determined"):
        llm.generate(TEXTS[1], max_new_tokens=2)
    monkeypatch.setattr(Executor, "room", room)
    list(stream)
    assert stream.answer.token_ids == alone
