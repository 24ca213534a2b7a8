"""A request in the server process: what the engine has sent for it, until the client takes it.

Text that a slow client has not taken is joined to one piece, so a job holds no more than its answer.
"""

from __future__ import annotations

from asyncio import Event
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from kvsift.server.api_errors import ApiError
from kvsift.server.frames import AnswerRequest


@dataclass(frozen=True)
class Piece:
    """What is new about one answer of a request."""

    index: int
    text: str
    logprobs: list[Any]
    finish: str | None


@dataclass
class AnswerState:
    """One answer of a request.

    Attributes:
        ids: all tokens so far.
        text, logprobs: what the client has not taken.
        finish: why it ended; None before.
        stop: the text of the request that ended it; None if none did.
        usage: its counters, once it has ended.
        is_taken: the client knows the end.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    is_taken: bool = False


class ServerJob:
    """A request from submission to its last piece.

    Args:
        key: names it in messages.
        request: the request for the engine.

    Attributes:
        answers: answers in the order of prompts, then samples.
        prompt_tokens: number of tokens of each prompt; None until the engine has accepted the request.
        begins_reasoning: the answer begins with reasoning, of which the prompt has the delimiter.
        num_prefilled: prompt tokens that are cached; None while it waits.
        is_sent: the present engine has it.
        crashes: times that the engine died with it, since it was last further than before.
        error: the error that ended it.
        submitted, first_token: times.
    """

    def __init__(self, key: int, request: AnswerRequest) -> None:
        self.key, self.request = key, request
        self.answers = [AnswerState() for _ in range(request.num_answers)]
        self.prompt_tokens: list[int] | None = None
        self.begins_reasoning = False
        self.num_prefilled: int | None = None
        self._num_prefilled_at_crash = -1
        self.is_sent, self.crashes = False, 0
        self.error: ApiError | None = None
        self.submitted, self.first_token = monotonic(), 0.0
        self._changed = Event()

    @property
    def is_ended(self) -> bool:
        """Whether the engine owes it nothing more."""
        return self.error is not None or all(answer.finish is not None for answer in self.answers)

    @property
    def num_open(self) -> int:
        """Answers that have not ended."""
        return sum(answer.finish is None for answer in self.answers)

    def crashed(self, was_running: bool) -> None:
        """The engine has died, maybe of this request."""
        self.crashes += was_running
        if self.num_prefilled is not None:
            self._num_prefilled_at_crash = max(self.num_prefilled, self._num_prefilled_at_crash)
        self.is_sent, self.num_prefilled = False, None

    def message(self) -> dict[str, Any]:
        """Return the message that submits it, or resumes it after what was sent."""
        return {
            "op": "submit",
            "id": self.key,
            "request": vars(self.request),
            "sent": {index: answer.ids for index, answer in enumerate(self.answers) if answer.ids},
            "ended": [index for index, answer in enumerate(self.answers) if answer.finish is not None],
        }

    def accept(self, prompt_tokens: list[int], begins_reasoning: bool = False) -> None:
        """The engine has checked the request."""
        self.prompt_tokens, self.begins_reasoning = prompt_tokens, begins_reasoning
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        """End the request with an error, unless it has ended."""
        if not self.is_ended:
            self.error = error
        self._changed.set()

    def add(self, new: dict[str, Any]) -> None:
        """Add what a step has brought for one of its answers."""
        answer = self.answers[new["index"]]
        if "prefilled" in new:
            self.num_prefilled = max(new["prefilled"], self.num_prefilled or 0)
        if "tokens" in new or (self.num_prefilled is not None and self.num_prefilled > self._num_prefilled_at_crash):
            self.crashes = 0  # it is past what the engine would have died of
        for token, text, logprobs in new.get("tokens", ()):
            self.first_token = self.first_token or monotonic()
            answer.text += text
            if token is not None:
                answer.ids.append(token)
            answer.logprobs += logprobs or ()
        if "usage" in new:
            answer.finish, answer.stop, answer.usage = new["finish"], new.get("stop"), new["usage"]
        elif "finish" in new:
            self.fail(ApiError(new["status"], new["message"], new["code"]))
        self._changed.set()

    async def wait(self) -> None:
        """Wait for a change."""
        await self._changed.wait()
        self._changed.clear()

    async def wait_accepted(self) -> None:
        """Wait until the engine has checked the request (``ApiError`` if it is refused)."""
        await self._wait_until(lambda: self.prompt_tokens is not None)

    async def wait_ended(self) -> None:
        """Wait for the whole answers (``ApiError`` if the request failed)."""
        await self._wait_until(lambda: self.is_ended)

    async def _wait_until(self, is_done: Callable[[], bool]) -> None:
        while self.error is None and not is_done():
            await self.wait()
        if self.error is not None:
            raise self.error

    def take(self) -> list[Piece]:
        """Return what the client has not taken, and forget it."""
        pieces = []
        for index, answer in enumerate(self.answers):
            is_end = answer.finish is not None and not answer.is_taken
            if answer.text or answer.logprobs or is_end:
                pieces.append(Piece(index, answer.text, answer.logprobs, answer.finish if is_end else None))
                answer.text, answer.logprobs, answer.is_taken = "", [], answer.finish is not None
        return pieces
