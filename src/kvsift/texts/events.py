"""Invented events: who did what, where, when and how, with a question about one of these, and asides for statements."""

import random
from dataclasses import dataclass

from kvsift.texts.values import value
from kvsift.texts.words import Lexicon, capitalised, pseudo_word, table_of

TEMPLATES = table_of("facts.toml")
_VERBS = [pair.split("/") for pair in TEMPLATES["verbs"].split()]
_CIRCUMSTANCES = TEMPLATES["circumstances"]


@dataclass(frozen=True)
class Event:
    """An event; each verb has a ``subject`` and an ``object`` only once, so that every question has one answer."""

    verb: str
    subject: str
    object: str
    statement: str
    question: str
    answer: str


def new_event(rng: random.Random, subject: str, thing: str, lexicon: Lexicon) -> Event:
    base, past = rng.choice(_VERBS) if rng.random() < 0.85 else _new_verb(rng)
    chosen = rng.sample(sorted(_CIRCUMSTANCES), rng.randint(0, 3))
    if "when" in chosen and "hour" in chosen:  # "when" must have one answer
        chosen.remove("hour")
    values = {name: value(rng, rng.choice(_CIRCUMSTANCES[name]["kinds"]), lexicon) for name in chosen}
    phrases = [rng.choice(_CIRCUMSTANCES[name]["phrases"]).format(v=values[name]) for name in chosen]
    topic = rng.choice(("who", "what", *chosen, *chosen))
    if topic == "who":
        question, answer = rng.choice((f"Who {past} {thing}?", f"By whom was {thing} {past}?")), subject
    elif topic == "what":
        question, answer = f"What did {subject} {base}?", thing
    else:
        template = rng.choice(_CIRCUMSTANCES[topic]["questions"])
        question, answer = template.format(s=subject, b=base, o=thing), values[topic]
    return Event(f"event {base}", subject, thing, _statement(rng, subject, past, thing, phrases), question, answer)


def with_aside(rng: random.Random, statement: str) -> str:
    """Return the statement with an empty remark before or after it."""
    if not statement.endswith(".") or rng.random() < 0.4:
        inner = statement[0].lower() + statement[1:] if statement.startswith(("The ", "For ", "To ")) else statement
        return f"{rng.choice(TEMPLATES['before'])} {inner}"
    return f"{statement[:-1]}{rng.choice(TEMPLATES['after'])}."


def _statement(rng: random.Random, subject: str, past: str, thing: str, phrases: list[str]) -> str:
    front = f"{capitalised(phrases.pop())}{rng.choice((',', ''))} " if phrases and rng.random() < 0.3 else ""
    core = f"{subject} {past} {thing}" if rng.random() < 0.7 else f"{thing} was {past} by {subject}"
    return f"{front}{core if front else capitalised(core)}{''.join(f' {phrase}' for phrase in phrases)}."


def _new_verb(rng: random.Random) -> tuple[str, str]:
    word = pseudo_word(rng)
    return word, f"{word}ed"
