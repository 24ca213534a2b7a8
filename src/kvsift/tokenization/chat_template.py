"""A model's chat template, and the check that every message reaches the prompt.

Most templates read the content of a message as text; some read it as a list of parts
(``[{"type": "text", "text": ...}]``) and write nothing of a text. Which form a template reads, role by role, is
found by rendering messages whose contents are markers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from kvsift.errors import UnsupportedPrompt

Message = Mapping[str, Any]  # with a role and, as text, a content
MOST_KNOWN = 256  # sequences of roles
MARKER = "kvsift-content-"
DUMPED = "'text': '", '"text": "'


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._in_parts = lru_cache(MOST_KNOWN)(self._find_parts)

    def render(self, messages: Sequence[Message], continues: bool = False) -> str:
        """Return the prompt of messages, which the model answers, or of which it ``continues`` the last one.

        Raises:
            InputError: if the template refuses them, or leaves out the content of some.
        """
        template, roles = str(self._tokenizer.chat_template), tuple(message["role"] for message in messages)
        in_parts = self._in_parts(template, roles)
        try:
            text = self._rendered(messages, in_parts or (), continues)
        except Exception as error:  # templates raise any exception
            raise UnsupportedPrompt(f"the model's chat template refuses this prompt: {error}.") from error
        if in_parts is None:  # it refuses markers, so look for the contents themselves
            _require_all({message["role"] for message in messages if message["content"].strip() not in text})
        return text

    def _find_parts(self, template: str, roles: Sequence[str]) -> frozenset[str] | None:
        """The roles whose contents the template reads as parts; None if it refuses markers.

        Raises:
            InputError: if it leaves out contents either way.
        """
        lost = self._lost(roles, ())
        for parts in ((), lost or roles, roles):
            if self._lost(roles, parts) == set():
                return frozenset(parts)
        _require_all(lost or ())
        return None

    def _lost(self, roles: Sequence[str], in_parts: Collection[str]) -> set[str] | None:
        """The roles of which a content does not arrive; None if the template raises an error."""
        markers = [f"{MARKER}{number}-" for number in range(len(roles))]
        messages = [{"role": role, "content": marker} for role, marker in zip(roles, markers)]
        try:
            text = self._rendered(messages, in_parts).casefold()
        except Exception:
            return None
        for dumped in DUMPED:  # the list itself, instead of the text in it
            text = text.replace(dumped + MARKER, "")
        return {role for role, marker in zip(roles, markers) if marker not in text}

    def _rendered(self, messages: Sequence[Message], in_parts: Collection[str], continues: bool = False) -> str:
        given = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if message["role"] in in_parts
            else message
            for message in messages
        ]
        text: str = self._tokenizer.apply_chat_template(
            given, tokenize=False, add_generation_prompt=not continues, continue_final_message=continues
        )
        return text


def _require_all(lost: Collection[str]) -> None:
    """Refuse a prompt without the contents of some roles (``InputError``)."""
    if lost:
        roles = " and ".join(sorted(lost))
        raise UnsupportedPrompt(
            f"the model's chat template (chat_template of its tokenizer) does not write the content of {roles} "
            "messages, whether it is given as text or as parts, so that it would be lost. Leave these messages out, "
            "use a prompt template of your own, or correct the chat template."
        )
