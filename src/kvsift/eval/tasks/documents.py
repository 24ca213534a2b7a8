"""Invented documents for question answering: paragraphs of facts, and pairs of documents that only together answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvsift.eval.tasks.facts import facts
from kvsift.eval.tasks.values import value
from kvsift.eval.tasks.words import (
    ADJECTIVES,
    ANIMALS,
    DEFAULT,
    FIRST_NAMES,
    JOBS,
    NOUNS,
    PLACES,
    SURNAMES,
    endless,
    pseudo_word,
    with_article,
)

FACTS_PER_DOCUMENT = 6
ROLES = ("keeper", "architect", "founder", "director", "owner", "curator", "chief engineer", "head gardener")
# What is known of a person: the sentence, and the question about whoever has a role.
TRAITS = {
    "birthplace": ("{p} was born in {v}.", "Where was {whom} born?"),
    "birth year": ("{p} was born in the year {v}.", "In which year was {whom} born?"),
    "first job": ("{p} first worked as {v}.", "What did {whom} first work as?"),
    "favourite dish": ("The favourite dish of {p} is {v}.", "What is the favourite dish of {whom}?"),
    "pet": ("{p} has {v} as a pet.", "Which pet does {whom} have?"),
}


@dataclass(frozen=True)
class Asked:
    """A question and the documents without which it has no answer."""

    needed: tuple[str, ...]
    question: str
    answer: str


def fact_documents(rng: random.Random) -> tuple[Asked, Iterator[str]]:
    """A question that one paragraph answers, and endless others about the same and similar subjects."""
    source = facts(rng)

    def others() -> Iterator[str]:
        while True:
            yield " ".join(next(source).statement for _ in range(FACTS_PER_DOCUMENT))

    chosen = [next(source) for _ in range(FACTS_PER_DOCUMENT)]
    asked = rng.choice(chosen)
    return Asked((" ".join(fact.statement for fact in chosen),), asked.question, asked.answer), others()


def linked_documents(rng: random.Random) -> tuple[Asked, Iterator[str]]:
    """A question over two documents, one about a place and one about the person it names, and endless other pairs."""
    places, people = endless(rng, _place), endless(rng, _person)
    role, asked = rng.choice(ROLES), rng.choice(sorted(TRAITS))
    place = next(places)
    one, other, answer = _pair(rng, role, asked, place, next(people))
    question = TRAITS[asked][1].format(whom=f"the {role} of the {place}")

    def others() -> Iterator[str]:
        while True:
            yield from _pair(rng, rng.choice(ROLES), asked, next(places), next(people))[:2]

    return Asked((one, other), question, answer), others()


def _pair(rng: random.Random, role: str, asked: str, place: str, person: str) -> tuple[str, str, str]:
    """A document about a place, one about a person who has the role there, and the person's trait that is asked."""
    traits = rng.sample([asked, *rng.sample([name for name in TRAITS if name != asked], 2)], 3)
    known = {name: _trait(rng, name) for name in traits}
    about = (
        f"The {place} stands near {rng.choice(PLACES)}. The {role} of the {place} is {person}. "
        f"It has been open to visitors since {value(rng, 'year', DEFAULT)}."
    )
    life = " ".join(TRAITS[name][0].format(p=person, v=known[name]) for name in traits)
    return f"The {place}\n{about}", f"{person}\n{life}", known[asked]


def _trait(rng: random.Random, name: str) -> str:
    if name == "birthplace":
        return rng.choice(PLACES)
    if name in ("first job", "pet"):
        return with_article(rng.choice(JOBS if name == "first job" else ANIMALS))
    return value(rng, "year" if name == "birth year" else "food", DEFAULT)


def _place(rng: random.Random) -> str:
    first = rng.choice(ADJECTIVES) if rng.random() < 0.5 else pseudo_word(rng)
    return f"{first.capitalize()} {rng.choice(NOUNS).capitalize()}"


def _person(rng: random.Random) -> str:
    last = rng.choice(SURNAMES) if rng.random() < 0.5 else pseudo_word(rng).capitalize()
    return f"{rng.choice(FIRST_NAMES)} {last}"
