"""Prompt formats: the prompt of a document and a question.

Models with a chat template get one user turn, the document first, after a system message if there is one. Others get
this format, an answer per line; the user's own template replaces both:

    {context}

    Question: {question}
    Answer: {answer}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from kvsift.errors import EmptyText, InvalidText, InvalidValue, MissingInput, UnsupportedPrompt
from kvsift.tokenization.chat_template import ChatTemplate, Message
from kvsift.tokenization.control_tokens import ControlTokens, Mask, Rendering
from kvsift.tokenization.growing_text import GrowingText
from kvsift.tokenization.text_offsets import TextOffsets, require_spans

STOP = "\n"
WORD = re.compile(r"[\w.-]*")
NOTHING: Mapping[str, Any] = MappingProxyType({})
Turn = tuple[str, str]  # a question and its answer


@dataclass(frozen=True)
class PromptFormat:
    """The prompt format of a model. Control tokens that a document, question or message spells are text.

    Args:
        tokenizer: tokenizer of the model.
        template: text with {context} and, after it, {question}, used instead of the chat template.
        system: a system message for the chat template.

    Raises:
        InputError: if the template lacks one of the two, or the system message has no chat template to go into.
    """

    tokenizer: Any
    template: str | None = None
    system: str | None = None

    def __post_init__(self) -> None:
        if self.template is not None:
            require_text(self.template, "prompt template")
            context, question = (self.template.find(slot) for slot in ("{context}", "{question}"))
            if not 0 <= context < question:
                raise InvalidValue("a prompt template needs {context} and, after it, {question}.")
        if self.system is None:
            return
        require_text(self.system, "system message")
        if self.template is not None or not self.tokenizer.chat_template:
            lacking = "a prompt template replaces it" if self.template is not None else "this model has none"
            raise UnsupportedPrompt(
                f"a system message is part of a chat template, and {lacking}. Use a prompt template alone."
            )

    @property
    def stop(self) -> str | None:
        """Text that ends an answer, besides the model's own end-of-text tokens."""
        return None if self.template is not None or self.tokenizer.chat_template else STOP

    def text(self, context: str, question: str, turns: Sequence[Turn] = ()) -> str:
        """Return the prompt, after earlier turns; unless a template has a bos token, the tokenizer adds it."""
        return self._control.render(lambda mask: self._text(context, question, turns, mask)).text

    def _text(self, context: str, question: str, turns: Sequence[Turn], mask: Mask) -> str:
        """The prompt of masked contents (``tokenization.control_tokens``)."""
        context, question = mask(context).rstrip(), mask(question).strip()
        turns = [(mask(asked), mask(answered)) for asked, answered in turns]
        if self.template is not None:
            assert not turns, "a prompt template has no place for earlier turns"
            before, _, rest = self.template.partition("{context}")
            between, _, after = rest.partition("{question}")
            return f"{before}{context}{between}{question}{after}"
        if not self.tokenizer.chat_template:
            said = "".join(f"{question_text(asked)} {answered.strip()}" for asked, answered in turns)
            return context + said + question_text(question)
        messages = [] if self.system is None else [{"role": "system", "content": mask(self.system)}]
        for asked, answered in turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        messages.append({"role": "user", "content": question})
        first = messages[self.system is not None]
        first["content"] = f"{context}\n\n{first['content']}".strip()
        return self._chat.render(messages)

    def encode(
        self, context: str, question: str, turns: Sequence[Turn] = (), growing: GrowingText | None = None
    ) -> list[int]:
        """Return the prompt as tokens, with one bos token if the model has one; ``growing`` of those that begin like
        it."""
        return self._tokens(lambda mask: self._text(context, question, turns, mask), growing)

    def offsets(self, context: str, question: str, turns: Sequence[Turn] = ()) -> TextOffsets:
        """Return where the tokens of ``encode`` stand in the document.

        Raises:
            InputError: if there is no document, the chat template changes it, or the tokenizer does not say.
        """
        return self._offsets(context, lambda document, mask: self._text(document, question, turns, mask))

    def _offsets(self, context: str, text_of: Callable[[str, Mask], str]) -> TextOffsets:
        if not context.strip():
            raise MissingInput("passages are parts of a document, and there is none. Give one, or leave out passages.")
        marker = "kvsift" + "x" * 32  # a document of its own, to find where documents begin
        rendering, start = self._control.render(partial(text_of, context)), text_of(marker, str).find(marker)
        lead, body = len(context) - len(context.lstrip()), context.strip()
        begin = next((at for at in (start, start + lead) if start >= 0 and rendering.text.startswith(body, at)), None)
        if begin is None:
            raise UnsupportedPrompt(
                "the model's chat template changes the document, so its passages cannot be found. Leave out passages."
            )
        require_spans(self.tokenizer)
        _, spans = self._control.encode(rendering, self._special(rendering), with_spans=True)
        return TextOffsets([(first - begin + lead, last - begin + lead) for first, last in spans], len(context))

    def encode_messages(
        self, messages: Sequence[Message], document: str = "", growing: GrowingText | None = None,
        variables: Mapping[str, Any] = NOTHING, continues: bool = False,
    ) -> list[int]:  # fmt: skip
        """Return the prompt of chat messages as tokens, after a document as in ``text``: by the chat template, or in
        kvsift's own format, in which system messages, and what stands before the last blank line of the first
        question, are of the document too. ``growing`` is of the prompts that begin like this one, ``variables`` are
        those of the chat template, such as tools. The answer ``continues`` the last message, or is one of its own.

        Raises:
            InputError: if the template refuses them or leaves out what one says, or they do not alternate, the user's
                first and last.
        """
        for message in messages:
            require_text(message["content"], "message")
        require_text(json.dumps([messages, dict(variables)], ensure_ascii=False), "request")
        return self._tokens(
            lambda mask: self._text_of_messages(messages, document, mask, variables, continues), growing
        )

    def message_offsets(
        self, messages: Sequence[Message], document: str, variables: Mapping[str, Any] = NOTHING
    ) -> TextOffsets:
        """Return where the tokens of ``encode_messages`` stand in the document; errors as of ``offsets``."""
        return self._offsets(document, lambda text, mask: self._text_of_messages(messages, text, mask, variables))

    def _text_of_messages(
        self, messages: Sequence[Message], context: str, mask: Mask, variables: Mapping[str, Any],
        continues: bool = False,
    ) -> str:  # fmt: skip
        messages = [
            {**_masked(message, mask), "role": message["role"], "content": mask(message["content"])}
            for message in messages
        ]
        context = mask(context)
        if self.tokenizer.chat_template:
            with_document = _with_document(messages, context) if context else messages
            return self._chat.render(with_document, continues, _masked(variables, mask))
        if continues:
            raise UnsupportedPrompt("this model has no chat template, so that a message cannot be continued.")
        if variables or any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
            raise UnsupportedPrompt(
                "this model has no chat template, which would write tools, their calls and results, and other "
                "variables. Leave them out, or use a model that has one."
            )
        contexts = [message["content"].strip() for message in messages if message["role"] == "system"]
        said = [message for message in messages if message["role"] != "system"]
        roles = [message["role"] for message in said]
        if roles != ["user", "assistant"] * (len(said) // 2) + ["user"]:
            got = ", ".join(roles) or "none"
            raise InvalidValue(
                f"this model answers questions and answers in turn, the user's first and last; got {got}."
            )
        texts = [message["content"] for message in said]
        document, _, texts[0] = texts[0].strip().rpartition("\n\n")
        if not texts[-1].strip():
            raise EmptyText("the last message is empty.")
        turns = list(zip(texts[:-1:2], texts[1::2]))
        return self._text("\n\n".join(filter(None, [context.rstrip(), *contexts, document])), texts[-1], turns, str)

    def _tokens(self, build: Callable[[Mask], str], growing: GrowingText | None) -> list[int]:
        rendering = self._control.render(build)
        ids, _ = self._control.encode(rendering, self._special(rendering), growing=growing)
        return ids

    @cached_property
    def _chat(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    def _special(self, rendering: Rendering) -> bool:
        """Whether the tokenizer adds its special tokens."""
        bos = self.tokenizer.bos_token
        chat = self.template is None and self.tokenizer.chat_template
        return not (chat or (bos and rendering.masked.startswith(bos)))


def _masked(value: Any, mask: Mask) -> Any:
    """A JSON value with masked texts, besides single words, by which templates tell kinds apart."""
    if isinstance(value, str):
        return value if WORD.fullmatch(value) else mask(value)
    if isinstance(value, Mapping):
        return {_masked(key, mask): _masked(each, mask) for key, each in value.items()}
    return [_masked(each, mask) for each in value] if isinstance(value, list) else value


def _with_document(messages: Sequence[Message], document: str) -> list[Message]:
    """Messages with a document before the user's first one."""
    first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise MissingInput("a chat about a document has a message of the user; got none.")
    content = f"{document.rstrip()}\n\n{messages[first]['content'].strip()}".strip()
    return [*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :]]


class DocumentText(NamedTuple):
    """A document and the prompt of its questions: arguments of ``LLM.read``."""

    context: str
    template: str | None = None
    system: str | None = None
    stop: str | Sequence[str] | None = None


class DocumentPrompts:
    """The prompts of questions about a document, which all begin with the same tokens.

    Args:
        form: format of the prompts.
        context: the document.
        ids: what the prompts begin with; None: what all prompts have in common now.
        growing: common text of the prompts.
    """

    def __init__(
        self, form: PromptFormat, context: str, ids: list[int] | None = None, growing: GrowingText | None = None
    ) -> None:
        self._form, self._context, self._growing = form, context, growing or GrowingText()
        self.ids = self._common() if ids is None else ids

    def __call__(self, question: str) -> list[int]:
        """Return the prompt of a question."""
        prompt = self._encode(question)
        if prompt[: len(self.ids)] == self.ids:
            return prompt
        common = self._common()  # some chat templates write the date, which is that of the day of reading
        return self.ids + prompt[len(common) :] if prompt[: len(common)] == common else prompt

    def offsets(self, question: str) -> TextOffsets:
        """Return where the tokens of a prompt stand in the document."""
        prompt, offsets = self._encode(question), self._form.offsets(self._context, question)
        return offsets.shifted(len(self(question)) - len(prompt))

    def _common(self) -> list[int]:
        one, other = (self._encode(question) for question in ("a", "Which?"))
        length = next(
            (i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other))
        )
        return one[:length]

    def _encode(self, question: str) -> list[int]:
        return self._form.encode(self._context, question, growing=self._growing)


def require_text(text: str, what: str) -> None:
    """Refuse text that no tokenizer accepts.

    Raises:
        InputError: for what is no text, and for surrogates, which stand for bytes that are not UTF-8.
    """
    if not isinstance(text, str):
        raise InvalidValue(f"the {what} is {type(text).__name__}, not text. Give a str.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidText(
            f"the {what} is not UTF-8 text (character {error.start} is {text[error.start]!a}). Give it in UTF-8."
        ) from None


def question_text(question: str) -> str:
    """Return the text that follows a context to ask a question."""
    return f"\n\nQuestion: {question.strip()}\nAnswer:"


def answer_text(answer: str) -> str:
    """Return the text that a model should generate after ``question_text``, the stop included."""
    return f" {answer}{STOP}"
