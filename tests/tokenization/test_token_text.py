"""The text of tokens of every kind of tokenizer: whole, in pieces, stopped, cut anywhere, and as it is served."""

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engine.tiny_tokenizers import KINDS, SPACE, byte_fallback, byte_level, cycle, parrot, unigram
from refusals import refused
from transformers import PreTrainedTokenizerFast

import kvsift
from kvsift.engine.request import Request
from kvsift.engine.transcript import Transcript
from kvsift.server.answers import AnswerForm
from kvsift.server.frames import AnswerRequest
from kvsift.server.jobs import ServerJob
from kvsift.server.replies import Reply
from kvsift.server.schemas import CompletionRequest
from kvsift.tokenization.token_text import AnswerText, TokenDecoder

# 20,000 of all kinds together were tried; by default as many as take seconds
ANSWERS = int(os.environ.get("KVSIFT_TEXT_ANSWERS", "900"))
CPU = torch.device("cpu")
ROLES = "bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"
MARKS = ".", "'", "!", ",", "?", SPACE, f"{SPACE}'", "s", "n", "t", "m", "v", "re", "##s", "##t", "Ġ", "Ċ"
CHARACTERS = "éü猫🦉☀"


class Example(NamedTuple):
    """Random tokens."""

    prompt: list[int]
    answer: list[int]
    skips: bool | None


class Kind:
    """A kind of tokenizer, and what the text of its tokens has to be: written apart from what is tested."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self.bytes = {vocabulary[f"<0x{byte:02X}>"]: byte for byte in range(256) if f"<0x{byte:02X}>" in vocabulary}
        self.marks = [vocabulary[mark] for mark in MARKS if mark in vocabulary]
        self.special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        # of characters of several tokens each byte, as far as it has a token
        names = {token: byte for byte, token in self.bytes.items()} or self._byte_level(vocabulary)
        self.characters = [
            [names[byte] for byte in character.encode()]
            for character in CHARACTERS
            if all(byte in names for byte in character.encode())
        ]

    @staticmethod
    def _byte_level(vocabulary: dict[str, int]) -> dict[int, int]:
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = iter(range(256, 512))
        letters = [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]
        return {byte: vocabulary[letter] for byte, letter in enumerate(letters) if letter in vocabulary}

    def draw(self, rng: random.Random) -> Example:
        prompt = self._tokens(rng, rng.choice([0, 1, 2, 5, 40]))
        return Example(prompt, self._tokens(rng, rng.choice([1, 2, 5, 20, 70])), rng.choice([True, False, None]))

    def _tokens(self, rng: random.Random, count: int) -> list[int]:
        """Many characters of several tokens, whole and broken, marks, special tokens, and any others."""
        tokens: list[int] = []
        only_bytes = bool(self.characters) and rng.random() < 0.2
        while len(tokens) < count:
            chance = rng.random()
            if self.characters and (only_bytes or chance < 0.3):
                character = rng.choice(self.characters)
                tokens += character if rng.random() < 0.8 else rng.sample(character, rng.randint(1, len(character)))
            elif self.marks and chance < 0.5:
                tokens.append(rng.choice(self.marks))
            elif chance < 0.55:
                tokens.append(rng.choice(sorted(self.special)))
            else:
                tokens.append(rng.randrange(len(self.tokenizer)))
        return tokens[:count]

    def left_out(self, skips: bool | None) -> set[int]:
        roles = {getattr(self.tokenizer, role) for role in ROLES}
        return {True: self.special, False: set(), None: self.special & roles}[skips]

    def text(self, ids: Sequence[int], skips: bool | None) -> str:
        """``decode``; with byte tokens, that of their bytes, broken characters apart."""
        left_out = self.left_out(skips)
        visible = [token for token in ids if token not in left_out]
        whole: str = self.tokenizer.decode(visible)
        if not self.bytes:
            return whole
        names = self.tokenizer.convert_ids_to_tokens(visible)
        parts = [bytes([self.bytes[token]]) if token in self.bytes else name.replace(SPACE, " ").encode()
                 for token, name in zip(visible, names)]  # fmt: skip
        text = b"".join(parts).decode(errors="replace").removeprefix(" ")
        assert "\ufffd" in text or text == whole
        return text

    def answer(self, example: Example, count: int | None = None) -> str:
        """The rule."""
        before = self.text(example.prompt, example.skips)
        after = self.text([*example.prompt, *example.answer[:count]], example.skips)
        return after[next((at for at, pair in enumerate(zip(before, after)) if len({*pair}) > 1), len(before)) :]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(KINDS[request.param]())


def examples(kind: Kind) -> list[Example]:
    rng = random.Random(0)
    return [kind.draw(rng) for _ in range(ANSWERS // len(KINDS))]


def told(example: Example, tokenizer: Any, **settings: Any) -> tuple[Transcript, list[str]]:
    request = Request(example.prompt, len(example.answer), skip_special_tokens=example.skips, **settings)
    transcript = Transcript(request, tokenizer)
    return transcript, [transcript.take(token, 0.0) for token in example.answer if not transcript.done]


def served(example: Example, tokenizer: Any, stops: tuple[str, ...]) -> str:
    """The text of the events of a stream, read line by line."""
    request = Request(
        example.prompt, len(example.answer), stops=stops, streamed=True, skip_special_tokens=example.skips
    )
    reply, job = Reply(request, tokenizer, CPU), ServerJob(1, AnswerRequest())
    form, lines = AnswerForm(CompletionRequest(prompt="a", stream=True), "tiny"), list[str]()
    for token in example.answer:
        if not reply.transcript.done:
            reply.take(token, 0.0)
            job.add({"index": 0, "tokens": [reply.events.popleft()]})
            lines += form.chunks(job).decode().splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_any_answer_has_the_text_that_decoding_it_after_its_prompt_adds(
    kind: Kind, record_property: Callable[[str, object], None]
) -> None:
    rng, tried = random.Random(1), examples(kind)
    for example in tried:
        expected = kind.answer(example)
        whole, _ = told(example, kind.tokenizer)
        assert whole.text == expected, example
        streamed, pieces = told(example, kind.tokenizer, streamed=True)
        assert "".join(pieces) == streamed.text == expected, example

        cut = rng.randint(1, len(example.answer))  # as a deadline or a client cuts it
        ended = Transcript(
            Request(example.prompt, 1000, streamed=True, skip_special_tokens=example.skips), kind.tokenizer
        )
        pieces = [ended.take(token, 0.0) for token in example.answer[:cut]]
        assert "".join([*pieces, ended.end("deadline")]) == ended.text == kind.answer(example, cut), example

        text = expected.lstrip()
        begin = rng.randrange(len(text)) if text else 0
        stop = text[begin : begin + rng.choice([1, 2, 5])] or "never"
        if not stop.strip() or "\ufffd" in stop:  # white space before a text is no stop, and broken characters are none
            stop = "never"
        stopped, pieces = told(example, kind.tokenizer, streamed=True, stops=(stop,))
        assert "".join(pieces) == stopped.text == expected.partition(stop)[0], (example, stop)
        assert served(example, kind.tokenizer, (stop,)) == stopped.text, (example, stop)
    record_property("measured", f"{len(tried)} answers, each whole, streamed, cut, stopped and served")


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "unigram", "word_piece"])
def test_log_probabilities_of_any_answer_have_its_bytes_and_its_offsets(name: str) -> None:
    kind = Kind(KINDS[name]())
    size = len(kind.tokenizer)
    for prompt, answer, _ in examples(kind)[:60]:
        request = Request(prompt, len(answer), streamed=True, logprobs=2, skip_special_tokens=False)
        reply = Reply(request, kind.tokenizer, CPU)
        for token in answer:
            reply.take(torch.nn.functional.one_hot(torch.tensor(token), size).float() * 9, 0.0)
        described = [each for _, _, more in reply.events for each in more]
        text = reply.transcript.text
        assert len(described) == len(answer)
        for label, data, value, offset, top in described:
            assert value > -0.5
            assert len({each[3] for each in top}) == 2
            assert offset <= len(text)
            assert data is not None
            if not label.startswith("bytes:") and "\ufffd" not in text[offset : offset + 1] and offset:
                assert text.startswith(label, offset), (label, offset, text)
        joined = b"".join(bytes(data) for _, data, *_ in described).decode(errors="replace")
        before = kind.text(prompt, False)
        if prompt and not before.endswith("\ufffd"):
            assert joined == text


def test_the_cost_of_a_token_does_not_grow_with_a_text_of_broken_characters() -> None:
    tokenizer = byte_fallback()
    decoder = TokenDecoder.of(tokenizer)
    text, longest = AnswerText(decoder, []), 0
    decode = decoder.decode

    def counted(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    decoder.decode = counted  # type: ignore[method-assign]
    broken = tokenizer.convert_tokens_to_ids("<0xE7>")
    assert "".join(text.add([broken]) for _ in range(3000)) + text.rest() == "\ufffd" * 3000
    assert longest < 64


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_character_of_several_tokens_belongs_to_the_last_of_them(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    tokenizer = make()
    pieces = TokenDecoder.of(tokenizer).pieces(tokenizer(" Käse 5 🦊", add_special_tokens=False).input_ids)
    assert "".join(pieces).strip() == "Käse 5 🦊"
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-4:-1] == ["", "", ""] or pieces[-1] == "🦊"


def generator(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, follows: dict[int, int]) -> kvsift.LLM:
    return kvsift.LLM(parrot(tmp_path / "parrot", tokenizer, follows), plan="dense", device="cpu")


def test_characters_of_byte_tokens_do_not_turn_into_replacement_characters(tmp_path: Path) -> None:
    """After 64 tokens, in streams and beside a stop."""
    tokenizer, text = byte_fallback(), "你安我"  # of nine different bytes
    tokens = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]
    llm = generator(tmp_path, tokenizer, cycle(tokens))
    expected = ("安我你" * 20)[:40]
    assert llm.generate("你", max_new_tokens=120).text == expected
    assert "".join(llm.stream("你", max_new_tokens=120)) == expected
    assert llm.generate("你", max_new_tokens=120, stop="never").text == expected
    stopped = llm.generate("你", max_new_tokens=120, stop="我")
    assert (stopped.text, stopped.finish_reason) == ("安", "stop")
    pieces = list(llm.stream("你", max_new_tokens=119))
    assert "".join(pieces) == expected[:39] + "\ufffd", "cut inside a character, the others stay"
    assert llm.generate("你", max_new_tokens=119).text == expected[:39] + "\ufffd"


def test_the_first_space_of_a_completion_stays(tmp_path: Path) -> None:
    tokenizer = byte_fallback()
    [*_, last] = tokenizer("mill").input_ids
    word = next(token for name, token in tokenizer.get_vocab().items() if name.startswith(SPACE) and len(name) > 2)
    answer = generator(tmp_path, tokenizer, {last: word, word: word}).generate("mill", max_new_tokens=2)
    assert answer.text == 2 * tokenizer.convert_ids_to_tokens(word).replace(SPACE, " ")
    assert answer.text.startswith(" ")


def test_a_stop_that_is_a_special_token_ends_the_answer(tmp_path: Path) -> None:
    tokenizer = byte_level()
    ids = tokenizer.convert_tokens_to_ids(["H", "i", "<|im_end|>", "."])
    llm = generator(tmp_path, tokenizer, cycle(ids))
    for options in ({"stop": "<|im_end|>"}, {"stop_token_ids": [ids[2]]}):
        for skips in (None, True, False):
            answer = llm.generate("H", max_new_tokens=20, skip_special_tokens=skips, **options)  # type: ignore[call-overload]
            assert (answer.text, answer.finish_reason) == ("i", "stop")
    assert llm.generate("H", max_new_tokens=20, stop="<|im_end|>.").text == "i", "in the middle of a text it is text"
    with refused("conflict: '<|im_end|>'"):
        llm.generate("H", stop="<|im_end|>.", skip_special_tokens=True)
    with refused("invalid_value: 5000"):
        llm.generate("H", stop_token_ids=[5000])
    with refused("invalid_value"):
        llm.generate("H", stop_token_ids="<|im_end|>")  # type: ignore[arg-type]
    with refused("invalid_value: skip_special_tokens"):
        llm.generate("H", skip_special_tokens="no")  # type: ignore[arg-type]


CHANNELS = "<|channel|>", "<|message|>", "<|final|>", "<|start|>"


def test_control_tokens_within_an_answer_are_text(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": [*CHANNELS]})
    said = "<|channel|>", "a", "<|message|>", "H", "<|start|>", "b", "<|final|>", "P", "<|end|>"
    follows = cycle(tokenizer.convert_tokens_to_ids(["?", *said]))
    llm = generator(tmp_path, tokenizer, follows)
    assert llm.generate("?", max_new_tokens=20).text == "".join(said[:-1])
    assert "".join(llm.stream("?", max_new_tokens=20, skip_special_tokens=True)) == "aHbP"
    answer = llm.generate("?", max_new_tokens=20, skip_special_tokens=False)
    assert answer.text == "".join(said[:-1]), "what ends an answer is no part of it"


def test_the_history_of_a_chat_has_no_control_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'H' }}"
    follows = cycle(tokenizer.convert_tokens_to_ids(["H", "<|note|>", "i", "<|end|>"]))
    chat = generator(tmp_path, tokenizer, follows).chat()
    assert chat.ask("Who?", max_new_tokens=9).text == "<|note|>i"
    assert chat.turns == [("Who?", "i")]
    decoder = TokenDecoder.of(tokenizer)
    spelled = tokenizer.convert_tokens_to_ids(["<", "|"])
    assert decoder.without_special("<|note|>", spelled) == "<|note|>", "spelled, it is text"


def test_white_space_before_an_answer_is_no_stop_where_it_is_a_token_of_its_own(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["\n\n"])
    llm = generator(tmp_path, tokenizer, cycle(tokenizer.convert_tokens_to_ids(["H", "\n\n", "i"])))
    assert llm.generate("H", max_new_tokens=9, stop="\n\n").text == "\n\niH"


def test_punctuation_after_a_cleaned_space_is_streamed(tmp_path: Path) -> None:
    tokenizer = unigram(cleans=True)
    ids = tokenizer.convert_tokens_to_ids(["t", SPACE, "!"])
    llm = generator(tmp_path, tokenizer, cycle(ids))
    assert llm.generate("t", max_new_tokens=9).text == "".join(llm.stream("t", max_new_tokens=9)) == "!t!t!t"


def test_a_second_bos_is_left_out_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from engine.tiny_directory import write_model

    llm = kvsift.LLM(write_model(tmp_path), plan="dense", device="cpu")
    plain = llm.generate("Hello", max_new_tokens=3)
    assert not caplog.records
    answers = llm.generate(["<bos>Hello", "<bos>Hello"], max_new_tokens=3)
    assert [answer.prompt_tokens for answer in answers] == [plain.prompt_tokens] * 2
    assert answers[0].token_ids == plain.token_ids
    llm.generate("<bos>Hello", max_new_tokens=1, passages=True)
    [said] = [record.getMessage() for record in caplog.records]
    assert "begins with <bos>" in said
