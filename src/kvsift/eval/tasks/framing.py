"""Questions of published formats, put into the package's own, for models that know no other.

What is asked and how it is scored stay the same. The words that begin the answer in the published format are not given.
"""

from __future__ import annotations

from dataclasses import replace

from kvsift.engine.prompt import STOP
from kvsift.eval.tasks.sample import Question, Sample


def framed(sample: Sample) -> Sample:
    """The sample with every question as ``Question: ...`` and an answer of one line."""
    return replace(sample, questions=tuple(framed_question(question) for question in sample.questions))


def framed_question(question: Question) -> Question:
    """The same of one question."""
    if question.is_framed:
        return question
    asked = question.text.rpartition("Question:")[2].strip()  # without an instruction in front of it
    return replace(question, text=asked, answer_prefix="", is_framed=True, stop=STOP)
