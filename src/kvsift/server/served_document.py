"""One document that a client has uploaded, and the progress of its prefill."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any, Literal

from kvsift.server.api_errors import ApiError
from kvsift.server.response_bodies import DocumentObject

Status = Literal["reading", "ready", "failed"]


@dataclass(eq=False)
class ServedDocument:
    """A document of an API key.

    Attributes:
        key, name, text: the name is shown, and never opened.
        owner: client and salt (``AccessMiddleware``).
        num_bytes: size of the upload.
        tokens: None until the engine has counted them.
        num_prefilled: tokens that are cached.
        pinned: they stay cached for questions.
        is_sent: the present engine has it.
        is_begun: its prefill has begun in the present engine.
        crashes: times that the engine died during its prefill.
        error: why it failed.
        kept: it is on the disk, and served again after a restart.
        why_not_kept: None if it is.
        changed: is set, and replaced, when something changes.
    """

    key: str
    name: str
    text: str
    owner: tuple[str, str]
    num_bytes: int
    created: int = field(default_factory=lambda: int(time()))
    status: Status = "reading"
    tokens: int | None = None
    num_prefilled: int = 0
    pinned: bool = True
    crashes: int = 0
    error: str | None = None
    is_sent: bool = False
    is_begun: bool = False
    kept: bool = False
    why_not_kept: str | None = None

    def __post_init__(self) -> None:
        self._begun: tuple[float, int] | None = None  # time and tokens of the first change during prefill
        self.changed = asyncio.Event()

    def as_dict(self) -> DocumentObject:
        """Return the object of the API."""
        return {
            "id": self.key,
            "object": "document",
            "name": self.name,
            "created": self.created,
            "bytes": self.num_bytes,
            "characters": len(self.text),
            "tokens": self.tokens,
            "status": self.status,
            "read_tokens": self.num_prefilled,
            "seconds_left": self.seconds_left,
            "error": self.error,
            "pinned": self.pinned,
            "kept": self.kept,
            "why_not_kept": self.why_not_kept,
        }

    @property
    def seconds_left(self) -> float | None:
        """By the rate so far; None if that is not known."""
        if self.status != "reading":
            return 0.0 if self.status == "ready" else None
        if self._begun is None or self.tokens is None or self.num_prefilled <= self._begun[1]:
            return None
        rate = (self.num_prefilled - self._begun[1]) / max(monotonic() - self._begun[0], 1e-3)
        return round((self.tokens - self.num_prefilled) / rate, 1)

    def check_readable(self) -> None:
        """Refuse questions about a document that cannot be read (``ApiError``)."""
        if self.status == "failed":
            raise ApiError(400, f"the document cannot be read: {self.error}", "document_failed", "document")

    def update(self, **changes: Any) -> None:
        """Change attributes, and notify those that wait for a change."""
        for name, value in changes.items():
            setattr(self, name, value)
        if self.status != "reading" or not self.tokens:
            self._begun = None
        elif self._begun is None:
            self._begun = monotonic(), self.num_prefilled
        self.changed.set()
        self.changed = asyncio.Event()

    def message(self) -> dict[str, Any]:
        """Return the message that lets the engine prefill it."""
        client, salt = self.owner
        return {"op": "prefill", "document": self.key, "text": self.text, "client": client, "salt": salt}
