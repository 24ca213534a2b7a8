"""Text as its tokens come: pieces add up, whatever is remembered of what came before."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine.tiny_tokenizers import SPACE, unigram

from kvsift.engine.request import Request
from kvsift.engine.transcript import Transcript, undecided
from kvsift.models.hf.model_directory import ModelDirectory
from kvsift.tokenization.token_text import CONTEXT_TOKENS, FOLD_TOKENS, TokenDecoder

TEXT = "wörld ☃ 🌲 and so on; " * 30


@pytest.fixture(scope="module")
def tokenizer(llama: Path) -> Any:
    return ModelDirectory.check(llama).tokenizer()


def said(tokenizer: Any, text: str, **settings: Any) -> tuple[Transcript, list[str]]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    transcript = Transcript(Request([0], len(ids), **settings), tokenizer)
    return transcript, [transcript.take(token, float(index)) for index, token in enumerate(ids) if not transcript.done]


def test_pieces_of_a_long_text_add_up(tokenizer: Any) -> None:
    transcript, pieces = said(tokenizer, TEXT, streamed=True)
    assert "".join(pieces) == transcript.text == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens that are decoded at once."""
    counts: list[int] = []
    decode = TokenDecoder.decode

    def counted(self: TokenDecoder, ids: Sequence[int]) -> str:
        counts.append(len(ids))
        return decode(self, ids)

    monkeypatch.setattr(TokenDecoder, "decode", counted)
    return counts


def test_the_cost_of_a_token_does_not_grow_with_the_text(tokenizer: Any, decoded: list[int]) -> None:
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    transcript = Transcript(Request(ids, len(ids), streamed=True), tokenizer)
    for token in ids:
        transcript.take(token, 0.0)
    assert max(decoded) <= 2 * (CONTEXT_TOKENS + FOLD_TOKENS)
    assert sum(decoded) < 40 * len(ids)


def test_nothing_is_decoded_where_nobody_looks(tokenizer: Any, decoded: list[int]) -> None:
    transcript = Transcript(Request([40], 5), tokenizer)
    of_prompt = len(decoded)
    for token in (40, 41, 42):
        assert transcript.take(token, 0.0) == ""
    assert len(decoded) == of_prompt
    assert len(transcript.text) == 3


@pytest.mark.parametrize("stops", [("so",), ("never", "so"), ("so", "and")])
def test_the_first_of_several_stops_ends_the_text(tokenizer: Any, stops: tuple[str, ...]) -> None:
    transcript, pieces = said(tokenizer, TEXT, streamed=True, stops=stops)
    end = min(TEXT.index(stop) for stop in stops if stop in TEXT)
    assert transcript.text == "".join(pieces) == TEXT[:end]


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [(" buffer size", " bu", ""), ("\nQuestion: x", "\nQuestion", ""), ("\n\nAda\n\n", "\n\n", "\n\nAda")],
)
def test_white_space_before_the_text_is_no_stop_by_itself(tokenizer: Any, text: str, stop: str, left: str) -> None:
    transcript, pieces = said(tokenizer, text, streamed=True, stops=(stop,))
    assert "".join(pieces) == transcript.text == left
    assert transcript.finish_reason == "stop"


def test_a_stop_far_into_the_text_is_found(tokenizer: Any) -> None:
    transcript, _ = said(tokenizer, TEXT + "END of it", stops=("END",))
    assert transcript.text == TEXT


@pytest.mark.parametrize(
    ("text", "stops", "count"),
    [("abc", (), 0), ("abE", ("END",), 1), ("abEN", ("END", "NO"), 2), ("", ("x",), 0), ("ab\n", ("\n☃",), 1)],
)
def test_what_may_begin_a_stop_is_held_back(text: str, stops: tuple[str, ...], count: int) -> None:
    assert undecided(text, stops) == count


def test_a_stop_that_begins_before_a_character_in_parts_is_in_no_piece(tokenizer: Any) -> None:
    transcript, pieces = said(tokenizer, "foo\n☃ bar", streamed=True, stops=("\n☃",))
    assert transcript.text == "".join(pieces) == "foo"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_stop_in_white_space_at_the_end_of_an_answer_is_found(streamed: bool) -> None:
    """A tokenizer that cleans up holds such white space back until the end."""
    cleaning = unigram(cleans=True)
    first, space, end = cleaning.convert_tokens_to_ids(["t", SPACE, "</s>"])
    transcript = Transcript(Request([first], 9, ends={end}, stops=(" ",), streamed=streamed), cleaning)
    for token in (first, space, end):
        transcript.take(token, 0.0)
    assert (transcript.text, transcript.finish_reason) == ("t", "stop")


def test_times_are_those_of_the_tokens(tokenizer: Any) -> None:
    transcript, _ = said(tokenizer, "abc")
    assert transcript.times == [0.0, 1.0, 2.0]
    assert transcript.itl_s == [1.0, 1.0]
    assert transcript.done


def test_the_finish_reason_is_what_ended_the_text(tokenizer: Any) -> None:
    (end,) = tokenizer("!", add_special_tokens=False)["input_ids"]
    assert said(tokenizer, "abc")[0].finish_reason == "length"
    assert said(tokenizer, "ab!", ends={end})[0].finish_reason == "stop"
    assert said(tokenizer, "abc", stops=("c",))[0].finish_reason == "stop"
