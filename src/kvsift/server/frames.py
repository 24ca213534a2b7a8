"""Messages between server and engine process: JSON objects over a socket, each after its length in four bytes."""

from __future__ import annotations

import json
from asyncio import IncompleteReadError, StreamReader
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, BinaryIO

LENGTH = Struct(">I")


@dataclass(frozen=True)
class AnswerRequest:
    """A request for answers, as the engine process takes it.

    Attributes:
        prompts: texts or token ids; none: it is a chat.
        messages: messages of a chat, each with role and content, as chat templates read them.
        continues: the answer goes on with the last message.
        variables: variables of the chat template, such as tools.
        document: id of the document before the first message; None: there is none.
        num_samples: answers to each prompt.
        max_tokens: most tokens of each answer; None: what is usual in a chat.
        plan: index of a plan of the server.
        min_recovery: guard of that plan, if another one is wanted.
        sampling: keywords of ``Sampling``, logit_bias as pairs. The seed is among them, so that an answer can go on
            after a crash.
        options: other keywords of ``GenerateOptions``, of the grammar its fields.
        echo: answers begin with their prompts.
        ignore_eos: answers do not end at the end of the text.
        client: whom its share of the engine is counted for.
        salt: prompts of other salts share no prefix with its prompts.
    """

    prompts: list[str | list[int]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    continues: bool = False
    variables: dict[str, Any] = field(default_factory=dict)
    document: str | None = None
    num_samples: int = 1
    max_tokens: int | None = None
    plan: int = 0
    min_recovery: float | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    echo: bool = False
    ignore_eos: bool = False
    client: str = ""
    salt: str = ""

    @property
    def num_answers(self) -> int:
        """Answers to all prompts together."""
        return self.num_samples * max(len(self.prompts), 1)


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as JSON.

    Raises:
        ValueError, TypeError: if it has none, as NaN has not.
    """
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode()


def pack(message: dict[str, Any]) -> bytes:
    """Return the bytes of a message."""
    return _framed(encode(message))


def pack_step(news: Sequence[bytes]) -> bytes:
    """Return the bytes of {op: step, news: [...]}, of news that were encoded one by one."""
    return _framed(b'{"op":"step","news":[' + b",".join(news) + b"]}")


def _framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def receive(incoming: BinaryIO) -> dict[str, Any] | None:
    """Wait for the next message of a socket's file; None: the other side has closed."""
    try:
        header = incoming.read(LENGTH.size)
        size = LENGTH.unpack(header)[0] if len(header) == LENGTH.size else 0
        data = incoming.read(size)
    except ConnectionError:
        return None
    return json.loads(data) if size and len(data) == size else None


async def read(reader: StreamReader) -> dict[str, Any] | None:
    """As ``receive``."""
    try:
        data = await reader.readexactly(LENGTH.unpack(await reader.readexactly(LENGTH.size))[0])
    except (IncompleteReadError, ConnectionError):
        return None
    message: dict[str, Any] = json.loads(data)
    return message
