"""Clients that ask properly: each request ends with the answer that is known, or an error that the server may give."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from soak.questions import Question, call_text
from soak.wire import Head, Lost, Wire

ENDS = "engine_lost", "server_draining"  # codes of answers that may fail: two crashes, and the end of the server


class Course:
    """What all clients share.

    Attributes:
        counts: what happened, by name.
        wrong: what should not have happened.
        gate: open while there is load.
        is_ending: the server was told to end.
        is_over: it takes no more requests.
        busy: clients between the beginning and the end of a request.
    """

    def __init__(self, url: str, asked: Sequence[Question]) -> None:
        self.url, self.asked = url, asked
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.gate = asyncio.Event()
        self.is_ending = self.is_over = False
        self.busy = 0

    def fault(self, text: str) -> None:
        """Note what should not have happened."""
        self.counts["faults"] += 1
        self.wrong.append(text)


async def ask_on(course: Course, seed: int) -> None:
    """Ask at random, one question after the other, until the server takes no more."""
    rng, wire = random.Random(seed), Wire(course.url)
    while not course.is_over:
        await course.gate.wait()
        course.busy += 1
        try:
            await _ask(course, wire, rng.choice(course.asked), rng)
        finally:
            course.busy -= 1
        if rng.random() < 0.2:
            wire.close()
    wire.close()


class Gone(Exception):
    """The document of a question was deleted meanwhile, or the engine died twice with it."""


async def _ask(course: Course, wire: Wire, question: Question, rng: random.Random) -> None:
    """Ask until there is an answer; a request that is put off is asked again."""
    streams, uploads = rng.random() < 0.6, bool(question.document) and rng.random() < 0.4
    body = {**question.body, **({"stream": True} if streams else {})}
    course.counts["requests"] += 1
    try:
        while True:
            try:
                if uploads:
                    key = await _upload(course, wire, question, rng)
                    body |= {"document": key, "messages": [{"role": "user", "content": question.asked}]}
                    course.counts["questions about documents"] += 1
                head = await _sent(course, wire, question.route, body, rng)
                await (_stream if head.status == 200 and streams else _whole)(course, wire, head, question)
                return
            except Gone:
                course.counts["documents gone"] += 1
    except Over:
        course.is_over = True
    except Lost as error:
        course.fault(f"lost: {error}")
        wire.close()


class Over(Exception):
    """The server takes no more requests, as it was told to end."""


async def _upload(course: Course, wire: Wire, question: Question, rng: random.Random) -> str:
    """The document of a question, which may be there already."""
    head = await _sent(course, wire, "/v1/documents", {"text": question.document}, rng)
    found = json.loads(await wire.body(head))
    if head.status != 200:
        _failed(course, found, head.status)
        raise Over
    return found["id"]


async def _sent(course: Course, wire: Wire, route: str, body: dict[str, Any], rng: random.Random) -> Head:
    """The beginning of a response that is no delay.

    Raises:
        Lost: if there is none.
        Over: if there need not be one.
    """
    data = json.dumps(body).encode()
    while True:
        is_old = wire.is_open
        try:
            if not is_old:
                await wire.connect()
            await wire.ask("POST", route, data)
            head = await wire.head()
        except (Lost, ConnectionError) as error:
            wire.close()
            if is_old:  # it was closed as idle, perhaps
                continue
            if course.is_ending:
                raise Over from None
            raise Lost(str(error)) from error
        if head.status not in (429, 503):
            return head
        if course.is_ending:
            course.counts["refused at the end"] += 1
            raise Over
        await _put_off(course, wire, head, rng)


async def _put_off(course: Course, wire: Wire, head: Head, rng: random.Random) -> None:
    error = json.loads(await wire.body(head))["error"]
    course.counts[f"put off: {error['code']}"] += 1
    if "retry-after" not in head.headers:
        course.fault(f"{head.status} without Retry-After")
    await asyncio.sleep(min(float(head.headers.get("retry-after", 1)), 2) * rng.uniform(0.3, 1))


async def _whole(course: Course, wire: Wire, head: Head, question: Question) -> None:
    body = json.loads(await wire.body(head))
    if head.status != 200:
        _failed(course, body, head.status)
        return
    _check(course, question, [(_text(choice), choice["finish_reason"]) for choice in body["choices"]])


async def _stream(course: Course, wire: Wire, head: Head, question: Question) -> None:
    texts, ends, done = [""] * len(question.answers), [""] * len(question.answers), False
    async for event in wire.events(head):
        if done:
            course.fault("an event after the end")
        if event is None or "error" in event:
            done = True
            if event is not None:
                wire.close()  # the rest is not read
                _failed(course, event, 200)
                return
            continue
        for choice in event["choices"]:
            index = choice["index"]
            if ends[index]:
                course.fault("a choice goes on after its end")
            texts[index] += _text(choice)
            ends[index] = choice["finish_reason"] or ""
    if not done:
        course.fault("lost: a stream without an end")
    _check(course, question, list(zip(texts, ends)))


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    message = choice.get("message") or choice.get("delta") or {}
    calls = (each["function"] for each in message.get("tool_calls", ()))
    return (message.get("content") or "") + "".join(
        call_text(each.get("name", ""), each["arguments"]) for each in calls
    )


def _check(course: Course, question: Question, found: list[tuple[str, str]]) -> None:
    course.counts["answers"] += 1
    course.counts["answers that call tools"] += any(end == "tool_calls" for _, end in found)
    if found != question.answers:
        course.fault(f"wrong: {found} instead of {question.answers} to {str(question.body)[-200:]}")


def _failed(course: Course, body: dict[str, Any], status: int) -> None:
    error = body["error"]
    if "document" in error["message"]:
        raise Gone
    course.counts[f"failed: {error['code']}"] += 1
    course.is_over = course.is_ending
    if error["code"] not in ENDS or (error["code"] == "server_draining" and not course.is_ending):
        course.fault(f"{status} {error}")
