"""Replies of the engine process, prompts of messages, and streams whose clients are slow."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.tiny_directory import CHAT_TEMPLATE, write_tokenizer
from engine.tiny_tokenizers import SPACE, byte_fallback, byte_level
from refusals import refused
from server.fake_worker import USAGE

from kvsift.engine.request import Request
from kvsift.engine.sampling import Sampling
from kvsift.server.answers import AnswerForm
from kvsift.server.frames import AnswerRequest
from kvsift.server.jobs import ServerJob
from kvsift.server.replies import Reply
from kvsift.server.schemas import CompletionRequest
from kvsift.server.streams import EventResponse, answer_events
from kvsift.tokenization.prompt import PromptFormat

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def said(*texts: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in texts]


def test_messages_without_a_template_are_a_document_and_questions(tokenizer: Any) -> None:
    form = PromptFormat(tokenizer)
    document = "Rules.\n\nA mill.\n\nIt grinds."
    first = (USER, "A mill.\n\nIt grinds.\n\nWhat?")
    expected = form.encode(document, "Why?", [("What?", "Corn.")])
    assert form.encode_messages(said((SYSTEM, "Rules."), first, (ASSISTANT, "Corn."), (USER, "Why?"))) == expected
    assert form.encode_messages(said((USER, "What?"))) == form.encode("", "What?")


@pytest.mark.parametrize("roles", [[], [ASSISTANT], [USER, USER], [USER, ASSISTANT], [ASSISTANT, USER]])
def test_messages_without_a_template_take_turns(tokenizer: Any, roles: list[str]) -> None:
    with refused("invalid_value"):
        PromptFormat(tokenizer).encode_messages(said(*((role, "a") for role in roles)))


def test_messages_follow_a_template_in_any_order(tmp_path: Path) -> None:
    form = PromptFormat(write_tokenizer(tmp_path, CHAT_TEMPLATE))
    ids = form.encode_messages(said((ASSISTANT, "a"), (ASSISTANT, "b")))
    assert form.tokenizer.decode(ids) == "<bos>[assistant] a\n[assistant] b\n[assistant] "


def steps(reply: Reply, logits: torch.Tensor, count: int) -> list[int]:
    return [reply.take(logits, 0.0)[0] for _ in range(count)]


def test_a_reply_goes_on_with_the_draws_after_those_that_were_sent(tokenizer: Any) -> None:
    logits = torch.randn(len(tokenizer), generator=torch.Generator().manual_seed(0))
    logits[:3] = -torch.inf  # tokens that end or are no text
    request = Request([5], 30, sampling=Sampling(1.0, seed=3), streamed=True, logprobs=1)
    whole = Reply(request, tokenizer, torch.device("cpu"))
    tokens = steps(whole, logits, 30)
    assert len(set(tokens)) > 10
    rest = Reply(request, tokenizer, torch.device("cpu"), sent=tokens[:12])
    assert steps(rest, logits, 30) == tokens
    assert list(rest.events) == list(whole.events)[12:]
    assert rest.transcript.text == whole.transcript.text


def test_a_reply_without_the_white_space_before_it(tokenizer: Any) -> None:
    ids = tokenizer("  \n a b ", add_special_tokens=False)["input_ids"]
    request = Request([5], len(ids), streamed=True)
    for strips, text in ((True, "a b "), (False, "  \n a b ")):
        reply = Reply(request, tokenizer, torch.device("cpu"), sent=ids[:3], strips=strips)
        for token in ids:
            reply.take(torch.nn.functional.one_hot(torch.tensor(token), len(tokenizer)).float(), 0.0)
        sent = "" if strips else "  \n"
        assert sent + "".join(piece for _, piece, _ in reply.events) == text


def probable(reply: Reply, tokenizer: Any, *tokens: tuple[int, ...]) -> None:
    """Let each of these tokens be chosen, the others of its group being the likeliest after it."""
    for group in tokens:
        logits = torch.zeros(len(tokenizer))
        for rank, token in enumerate(group):
            logits[token] = 20.0 - rank
        reply.take(logits, 0.0)


def logprobs_of(reply: Reply, **asked: Any) -> tuple[dict[str, Any], str]:
    """Log-probabilities of a completion, and its text."""
    job = accepted()
    job.add({"index": 0, "tokens": list(reply.events), "finish": "stop", "usage": USAGE})
    [choice] = AnswerForm(CompletionRequest(prompt="a", **asked), "tiny").whole(job)["choices"]
    return choice["logprobs"], choice["text"]


def test_log_probabilities_tell_a_word_from_its_end(tmp_path: Path) -> None:
    """Tokens have their spaces, so that none of the likeliest has the text of another one, and offsets fit the text."""
    tokenizer = byte_fallback()
    words = tokenizer.get_vocab()
    end = next(name for name in words if f"{SPACE}{name}" in words and len(name) > 1 and name.isascii())
    word, before = words[f"{SPACE}{end}"], words["a"]
    reply = Reply(Request([1, before], 3, streamed=True, logprobs=3), tokenizer, torch.device("cpu"))
    byte = words[f"<0x{ord(end[0]):02X}>"]
    probable(reply, tokenizer, *[(word, words[end], byte)] * 3)
    logprobs, text = logprobs_of(reply, logprobs=3)
    assert text == f" {end}" * 3
    assert logprobs["tokens"] == [f" {end}"] * 3
    assert [list(top) for top in logprobs["top_logprobs"]] == [[f" {end}", end, end[0]]] * 3
    assert logprobs["text_offset"] == [0, 1 + len(end), 2 + 2 * len(end)]


def test_log_probabilities_of_parts_of_characters_and_none_beyond_a_stop() -> None:
    tokenizer = byte_level()
    ids = tokenizer("🐙yzx", add_special_tokens=False).input_ids
    num_parts = len(ids) - 3
    assert num_parts > 1
    for stops, count in (((), 3), (("z",), 1)):
        reply = Reply(Request([5], len(ids), stops=stops, streamed=True, logprobs=1), tokenizer, torch.device("cpu"))
        probable(reply, tokenizer, *[(token,) for token in ids[: num_parts + max(count, 2)]])
        logprobs, text = logprobs_of(reply, logprobs=1)
        assert text == "🐙yzx"[: 1 + count]
        assert logprobs["text_offset"] == [0] * num_parts + [1, 2, 3][:count]
        assert logprobs["tokens"][num_parts:] == ["y", "z", "x"][:count]
        data = [byte for event in reply.events for _, each, *_ in event[2] for byte in each]
        assert bytes(data).decode() == text
        assert logprobs["tokens"][0].startswith("bytes:\\xf0")
        assert all(len(top) == 1 for top in logprobs["top_logprobs"])


def test_events_are_lines_for_clients_that_read_lines_of_text() -> None:
    separators = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    job = accepted()
    job.add({"index": 0, "tokens": [[7, separators, None]]})
    data = AnswerForm(CompletionRequest(prompt="a", stream=True), "tiny").chunks(job)
    [line, _] = data.decode().splitlines()
    assert json.loads(line.removeprefix("data: "))["choices"][0]["text"] == separators


def stream(job: ServerJob, during: Any) -> tuple[bytes, list[ServerJob]]:
    """What a client reads, and the requests that were released."""
    released: list[ServerJob] = []
    body = bytearray()

    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        body.extend(message.get("body", b""))

    async def run() -> None:
        form = AnswerForm(CompletionRequest(prompt="a", stream=True), "tiny")
        response = EventResponse(answer_events(job, form), lambda: released.append(job))
        async with asyncio.timeout(10):
            await asyncio.gather(response({}, never, send), during())

    asyncio.run(run())
    return bytes(body), released


def accepted() -> ServerJob:
    job = ServerJob(1, AnswerRequest())
    job.accept([8])
    return job


def test_comments_say_how_far_the_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsift.server.streams.COMMENT_S", 0.02)
    job = accepted()

    async def during() -> None:
        await asyncio.sleep(0.1)
        job.add({"index": 0, "prefilled": 4})
        await asyncio.sleep(0.1)
        job.add({"index": 0, "tokens": [[7, "b", None]], "finish": "length", "usage": USAGE})

    body, released = stream(job, during)
    lines = [line for line in body.decode().split("\n\n") if line]
    comments = list(dict.fromkeys(line for line in lines if line.startswith(":")))
    assert comments == [": waiting", ": read 4 of 8 tokens"]
    assert '"text":"b"' in lines[-3]
    assert lines[-1] == "data: [DONE]"
    assert released == [job]
