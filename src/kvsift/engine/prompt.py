"""How a document and a question become a prompt.

Models with a chat template get one user turn, the document first. Others get this format, an answer per line:

    {context}

    Question: {question}
    Answer: {answer}
"""

from __future__ import annotations

STOP = "\n"


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
