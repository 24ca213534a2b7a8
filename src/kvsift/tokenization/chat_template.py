"""A model's chat template, and the check that every message reaches the prompt.

Most templates read the content of a message as text; some read it as a list of parts
(``[{"type": "text", "text": ...}]``) and write nothing of a text. Which form a template reads, role by role, is
found by rendering messages whose contents are markers. In the same way it is found how a template reads the calls of
tools in messages of the assistant: with arguments as an object or as text.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from kvsift.errors import InvalidValue, UnsupportedPrompt

Message = Mapping[str, Any]  # with a role and, as text, a content; tool_calls have arguments as objects
MOST_KNOWN = 256  # sequences of roles
MARKER = "kvsift-content-"
DUMPED = "'text': '", '"text": "'
RESERVED = {"messages", "documents", "bos_token", "eos_token", "add_generation_prompt"}  # of templates


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._in_parts = lru_cache(MOST_KNOWN)(self._find_parts)
        self._reads_text = lru_cache(MOST_KNOWN)(self._find_arguments)

    def render(
        self, messages: Sequence[Message], continues: bool = False, variables: Mapping[str, Any] | None = None
    ) -> str:
        """Return the prompt of messages, which the model answers, or of which it ``continues`` the last one.

        Args:
            messages: the messages.
            continues: the answer goes on with the last of them.
            variables: of the template, besides messages; ``tools``, for example.

        Raises:
            InputError: if the template refuses them, or leaves out the content of some, or has no such variables.
        """
        template, roles = str(self._tokenizer.chat_template), tuple(message["role"] for message in messages)
        self._check_variables(template, variables or {})
        calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()]
        in_parts = None if calls or "tool" in roles else self._in_parts(template, roles)
        if calls and self._reads_text(template):
            messages = _with_arguments_as_text(messages)
        try:
            text = self._rendered(messages, in_parts or (), continues, variables)
        except Exception as error:  # templates raise any exception
            raise UnsupportedPrompt(f"the model's chat template refuses this prompt: {error}.") from error
        if in_parts is None:  # it refuses markers, so look for the contents themselves
            # some leave out what was said before calls; the model has learned to go on without
            said = [message for message in messages if not message.get("tool_calls")]
            _require_all({message["role"] for message in said if not _is_written(message["content"], text)})
        if not all(name in text for name in calls):
            raise _no_tools("the calls of tools in messages of the assistant")
        return text

    def _check_variables(self, template: str, variables: Mapping[str, Any]) -> None:
        if variables.get("tools") and not re.search(r"\btools\b", template):
            raise _no_tools("tools")
        taken = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys() - {"tools"} | RESERVED
        for name in variables:
            if name in taken or not (name.isidentifier() and re.search(rf"\b{name}\b", template)):
                raise InvalidValue(
                    f"the model's chat template has no variable {name[:80]!r} that requests may set. Leave it out of "
                    "chat_template_kwargs."
                )

    def _find_arguments(self, template: str) -> bool:
        """Whether the template reads arguments of calls as text.

        Raises:
            InputError: if calls reach the prompt in neither form.
        """
        name, value = f"{MARKER}name", f"{MARKER}value"
        calls = [{"id": "kvsiftid1", "type": "function", "function": {"name": name, "arguments": {"x": value}}}]
        messages: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "!", "name": name, "tool_call_id": "kvsiftid1"},
        ]
        for is_text, given in ((False, messages), (True, _with_arguments_as_text(messages))):
            with suppress(Exception):  # templates raise any exception
                text = self._rendered(given, ())
                if name in text and value in text:
                    return is_text
        raise _no_tools("the calls of tools in messages of the assistant")

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

    def _rendered(
        self, messages: Sequence[Message], in_parts: Collection[str], continues: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        given = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if message["role"] in in_parts
            else message
            for message in messages
        ]
        text: str = self._tokenizer.apply_chat_template(
            given, tokenize=False, add_generation_prompt=not continues, continue_final_message=continues,
            **variables or {},
        )  # fmt: skip
        return text


def _with_arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    def written(call: Mapping[str, Any]) -> Mapping[str, Any]:
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": text}}

    return [
        {**message, "tool_calls": [*map(written, message["tool_calls"])]} if message.get("tool_calls") else message
        for message in messages
    ]


def _is_written(content: str, text: str) -> bool:
    """Whether a text has a content, as it is or as JSON, without the reasoning before it."""
    content = content.rpartition("</think>")[2].strip()
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


def _no_tools(what: str) -> UnsupportedPrompt:
    return UnsupportedPrompt(
        f"the model's chat template does not write {what}, so the model would not know of them. Leave them out, or "
        "use a model that was trained to call tools."
    )


def _require_all(lost: Collection[str]) -> None:
    """Refuse a prompt without the contents of some roles (``InputError``)."""
    if lost:
        roles = " and ".join(sorted(lost))
        raise UnsupportedPrompt(
            f"the model's chat template (chat_template of its tokenizer) does not write the content of {roles} "
            "messages, whether it is given as text or as parts, so that it would be lost. Leave these messages out, "
            "use a prompt template of your own, or correct the chat template."
        )
