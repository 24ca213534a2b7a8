"""RULER's question answering: one of many numbered documents (qa_1) or two together (qa_2) have the answer.

Facts from NVIDIA/RULER (``scripts/data/synthetic/qa.py``): documents of the question and distractors in random order
under a numbered heading, the instruction before and after them, the answer's first word given, 32 new tokens, any
reference counts. RULER uses SQuAD and HotpotQA, which do not ship here, so the documents are invented. A local file of
either replaces them through ``eval.loaders``. The last distractor is cut to reach the exact length.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvsift.errors import InputError
from kvsift.texts.sample import Sample, SampleRequest, Style, Task
from kvsift_lab.eval.tasks.assembly import Assembly
from kvsift_lab.eval.tasks.documents import DocumentQuestion, fact_documents, linked_documents

STYLE = Style("string_match_part", 32, is_framed=False, stop=None)
_INSTRUCTION = "Answer the question from the documents given here. Write the answer and nothing else."
_INTRO = f"{_INSTRUCTION}\n\nThe documents:"
_MANY = 99_999  # an upper bound of the number of documents, with the most tokens


def write_invented(
    task: str, make: Callable[[random.Random], tuple[DocumentQuestion, Iterator[str]]], request: SampleRequest
) -> Sample:
    item, others = make(request.rng)
    return write_sample(task, request, item.documents, others, item.question, (item.answer,))


def write_sample(
    task: str,
    request: SampleRequest,
    documents: Sequence[str],
    others: Iterator[str],
    question: str,
    answers: tuple[str, ...],
) -> Sample:
    """Write the documents of a question at random depths among others.

    Raises:
        InputError: if they do not fit.
    """
    rng, assembly = request.rng, Assembly(request, _INTRO)
    order = rng.sample(range(len(documents)), len(documents))
    sizes = [len(request.encode(_numbered(_MANY, documents[i]))) for i in order]
    if sum(sizes) > assembly.room:
        raise InputError(
            f"{len(documents)} documents of {sum(sizes)} tokens have {assembly.room}; ask for a longer context."
        )
    targets = sorted(rng.random() for _ in order)
    starts: list[float] = []
    number, room = 0, assembly.room
    while assembly.room > 0:
        number, placed = number + 1, len(starts)
        due = placed < len(order) and 1 - assembly.room / room >= targets[placed]
        text = "" if due else _numbered(number, next(others))
        if placed < len(order) and (due or len(request.encode(text)) + sum(sizes[placed:]) > assembly.room):
            starts.append(assembly.add(_numbered(number, documents[order[placed]])))
        else:
            assembly.add(text)
    context, ids = assembly.cut()
    tail = f"\n\n{_INSTRUCTION}\n\nQuestion: {question}"
    return Sample(task, context, ids, (STYLE.question(tail, answers[0], starts[-1], answers, " Answer:"),))


def _numbered(number: int, document: str) -> str:
    return f"\n\nDocument {number}:\n{document}"


TASKS = tuple(
    Task(name, about, write=partial(write_invented, name, make), max_questions=1, family="ruler", style=STYLE)
    for name, about, make in (
        ("qa_1", "a question that one of many invented documents answers", fact_documents),
        ("qa_2", "a question over two of many invented documents", linked_documents),
    )
)
