"""Replies of the engine process, prompts of messages, and streams whose clients are slow."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.tiny_directory import CHAT_TEMPLATE, write_tokenizer
from server.fake_worker import USAGE

from kvsift.engine.prompt import PromptFormat
from kvsift.engine.sampling import Sampling
from kvsift.engine.transcript import Request
from kvsift.errors import InputError
from kvsift.server.answers import AnswerForm
from kvsift.server.jobs import ServerJob
from kvsift.server.replies import Reply
from kvsift.server.schemas import CompletionRequest
from kvsift.server.streams import EventStream

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
    with pytest.raises(InputError, match="in turn, the user's first and last"):
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
    request = Request([5], 30, Sampling(1.0, seed=3), streamed=True, logprobs=1)
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
        response = EventStream(job, AnswerForm(CompletionRequest(prompt="a", stream=True), "tiny"), released.append)
        async with asyncio.timeout(10):
            await asyncio.gather(response({}, never, send), during())

    asyncio.run(run())
    return bytes(body), released


def accepted() -> ServerJob:
    job = ServerJob(1, {}, 1)
    job.accept([8])
    return job


def test_comments_say_how_far_the_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsift.server.streams.COMMENT_S", 0.02)
    job = accepted()

    async def during() -> None:
        await asyncio.sleep(0.1)
        job.add({"index": 0, "read": 4})
        await asyncio.sleep(0.1)
        job.add({"index": 0, "tokens": [[7, "b", None]], "finish": "length", "usage": USAGE})

    body, released = stream(job, during)
    lines = [line for line in body.decode().split("\n\n") if line]
    comments = list(dict.fromkeys(line for line in lines if line.startswith(":")))
    assert comments == [": waiting", ": read 4 of 8 tokens"]
    assert '"text":"b"' in lines[-3]
    assert lines[-1] == "data: [DONE]"
    assert released == [job]
