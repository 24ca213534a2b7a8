"""How a document and a question become a prompt.

Models with a chat template get one user turn, the document first, after a system message if there is one. Others get
this format, an answer per line; a template of one's own replaces both:

    {context}

    Question: {question}
    Answer: {answer}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsift.errors import InputError

STOP = "\n"
RAW = "{context}\n\n{question}"  # a template that adds nothing


@dataclass(frozen=True)
class PromptFormat:
    """How a context and a question become the prompt of a model.

    Args:
        tokenizer: of the model.
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
                raise InputError("a prompt template needs {context} and, after it, {question}.")
        if self.system is None:
            return
        require_text(self.system, "system message")
        if self.template is not None or not self.tokenizer.chat_template:
            lacking = "a prompt template replaces it" if self.template is not None else "this model has none"
            raise InputError(
                f"a system message is part of a chat template, and {lacking}. Use a prompt template alone."
            )

    @property
    def stop(self) -> str | None:
        """What ends an answer, besides the model's own end-of-text tokens."""
        return None if self.template is not None or self.tokenizer.chat_template else STOP

    def text(self, context: str, question: str) -> str:
        """The prompt; a bos token that is not in a template is the tokenizer's business."""
        context, question = context.rstrip(), question.strip()
        if self.template is not None:
            before, _, rest = self.template.partition("{context}")
            between, _, after = rest.partition("{question}")
            return f"{before}{context}{between}{question}{after}"
        if not self.tokenizer.chat_template:
            return prompt(context, question)
        turns = [] if self.system is None else [{"role": "system", "content": self.system}]
        turns.append({"role": "user", "content": f"{context}\n\n{question}"})
        try:
            text: str = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise what they like
            raise InputError(f"the model's chat template refuses this prompt: {error}.") from error
        return text

    def encode(self, context: str, question: str) -> list[int]:
        """The prompt as tokens, with one bos token if the model has one."""
        text = self.text(context, question)
        bos = self.tokenizer.bos_token
        chat = self.template is None and self.tokenizer.chat_template
        special = not (chat or (bos and text.startswith(bos)))
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids


def require_text(text: str, what: str) -> None:
    """Refuse what no tokenizer takes.

    Raises:
        InputError: for surrogates, which stand for bytes that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the {what} is not UTF-8 text (character {error.start} is {text[error.start]!a}). Give it in UTF-8."
        ) from None


def question_text(question: str) -> str:
    """What follows a context to ask a question."""
    return f"\n\nQuestion: {question.strip()}\nAnswer:"


def answer_text(answer: str) -> str:
    """What a model should produce after ``question_text``, the stop included."""
    return f" {answer}{STOP}"


def prompt(context: str, question: str) -> str:
    """One question about a document, as plain text; a bos token is the tokenizer's business."""
    return context.rstrip() + question_text(question)


def parse_answer(generated: str) -> str:
    """The answer in freshly generated text: its first non-empty line, without surrounding space."""
    return generated.strip().split(STOP, 1)[0].strip()


def exact_match(generated: str, answer: str) -> bool:
    """Whether the generated answer equals the expected one; case, inner spacing and one final stop do not count."""
    return _plain(parse_answer(generated)) == _plain(answer)


def _plain(answer: str) -> str:
    return " ".join(answer.casefold().split()).removesuffix(".")
