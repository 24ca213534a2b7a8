"""Invented documents for question answering: paragraphs of facts, and pairs of documents for two-hop questions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvsift.texts.facts import facts
from kvsift.texts.values import value
from kvsift.texts.words import (
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
        f"The {place} stands near {rng.choice(PLACES)}. The {role} of the {place} is {person}. "
        f"It has been open to visitors since {value(rng, 'year', DEFAULT)}."
    )
    life = " ".join(TRAITS[name][0].format(p=person, v=values[name]) for name in traits)
    return f"The {place}\n{about}", f"{person}\n{life}", values[trait]


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
