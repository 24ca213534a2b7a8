"""RULER's question answering: one of many numbered documents (qa_1) or two together (qa_2) have the answer.

Facts from NVIDIA/RULER (``scripts/data/synthetic/qa.py``): documents of the question and distractors in random order
under a numbered heading, the instruction before and after them, the answer's first word given, 32 new tokens, any
reference counts. RULER uses SQuAD and HotpotQA, which do not ship here, so the documents are invented: paragraphs of
facts, and pairs of documents for two-hop questions. A local file of either replaces them through ``eval.loaders``. The
last distractor is cut to reach the exact length.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvsift.errors import TooShort
from kvsift.texts.facts import facts
from kvsift.texts.values import value
from kvsift.texts.words import DEFAULT, pseudo_word, with_article
from kvsift_lab.eval.sample import Sample, SampleRequest, Style, Task
from kvsift_lab.eval.tasks.assembly import Assembly
from kvsift_lab.eval.tasks.words import endless

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
        raise TooShort(
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


FACTS_PER_DOCUMENT = 6
ROLES = ("keeper", "architect", "founder", "director", "owner", "curator", "chief engineer", "head gardener")
# Trait of a person: the statement, and the question about the holder of a role.
TRAITS = {
    "birthplace": ("{p} was born in {v}.", "Where was {whom} born?"),
    "birth year": ("{p} was born in the year {v}.", "In which year was {whom} born?"),
    "first job": ("{p} first worked as {v}.", "What did {whom} first work as?"),
    "favourite dish": ("The favourite dish of {p} is {v}.", "What is the favourite dish of {whom}?"),
    "pet": ("{p} has {v} as a pet.", "Which pet does {whom} have?"),
}


@dataclass(frozen=True)
class DocumentQuestion:
    """A question and the documents that answer it together."""

    documents: tuple[str, ...]
    question: str
    answer: str


def fact_documents(rng: random.Random) -> tuple[DocumentQuestion, Iterator[str]]:
    """Return a question that one paragraph answers, and endless other paragraphs about similar subjects."""
    source = facts(rng)

    def others() -> Iterator[str]:
        while True:
            yield " ".join(next(source).statement for _ in range(FACTS_PER_DOCUMENT))

    chosen = [next(source) for _ in range(FACTS_PER_DOCUMENT)]
    fact = rng.choice(chosen)
    return DocumentQuestion((" ".join(item.statement for item in chosen),), fact.question, fact.answer), others()


def linked_documents(rng: random.Random) -> tuple[DocumentQuestion, Iterator[str]]:
    """Return a question over a document about a place and one about a person that it names, and endless other pairs."""
    places, people = endless(rng, _place), endless(rng, _person)
    role, trait = rng.choice(ROLES), rng.choice(sorted(TRAITS))
    place = next(places)
    one, other, answer = _pair(rng, role, trait, place, next(people))
    question = TRAITS[trait][1].format(whom=f"the {role} of the {place}")

    def others() -> Iterator[str]:
        while True:
            yield from _pair(rng, rng.choice(ROLES), trait, next(places), next(people))[:2]

    return DocumentQuestion((one, other), question, answer), others()


def _pair(rng: random.Random, role: str, trait: str, place: str, person: str) -> tuple[str, str, str]:
    """Return a document about a place, one about a person with a role there, and the trait of the person."""
    traits = rng.sample([trait, *rng.sample([name for name in TRAITS if name != trait], 2)], 3)
    values = {name: _trait(rng, name) for name in traits}
    about = (
        f"The {place} stands near {rng.choice(DEFAULT.places)}. The {role} of the {place} is {person}. "
        f"It has been open to visitors since {value(rng, 'year', DEFAULT)}."
    )
    life = " ".join(TRAITS[name][0].format(p=person, v=values[name]) for name in traits)
    return f"The {place}\n{about}", f"{person}\n{life}", values[trait]


def _trait(rng: random.Random, name: str) -> str:
    if name == "birthplace":
        return rng.choice(DEFAULT.places)
    if name in ("first job", "pet"):
        return with_article(rng.choice(DEFAULT.jobs if name == "first job" else DEFAULT.animals))
    return value(rng, "year" if name == "birth year" else "food", DEFAULT)


def _place(rng: random.Random) -> str:
    first = rng.choice(DEFAULT.adjectives) if rng.random() < 0.5 else pseudo_word(rng)
    return f"{first.capitalize()} {rng.choice(DEFAULT.nouns).capitalize()}"


def _person(rng: random.Random) -> str:
    last = rng.choice(DEFAULT.surnames) if rng.random() < 0.5 else pseudo_word(rng).capitalize()
    return f"{rng.choice(DEFAULT.first_names)} {last}"


TASKS = tuple(
    Task(name, about, write=partial(write_invented, name, make), max_questions=1, family="ruler", style=STYLE)
    for name, about, make in (
        ("qa_1", "a question that one of many invented documents answers", fact_documents),
        ("qa_2", "a question over two of many invented documents", linked_documents),
    )
)
