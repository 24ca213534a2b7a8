"""Invented events: who did what, where, when and how, with a question about one of these, and asides for statements."""

# ruff: noqa: SIM905  (a list of words reads best as a line of words)

import random
from dataclasses import dataclass

from kvsift.texts.values import value
from kvsift.texts.words import Lexicon, capitalised, pseudo_word

# Verbs whose past form is also their participle: base, past. None is in VERB_FACTS, whose questions would be the same.
_VERBS = tuple(
    tuple(pair.split("/"))
    for pair in """accept/accepted admire/admired bring/brought bury/buried carry/carried
    catch/caught check/checked clean/cleaned copy/copied count/counted decorate/decorated
    describe/described examine/examined
    fix/fixed follow/followed inherit/inherited inspect/inspected install/installed
    invent/invented lock/locked make/made measure/measured mention/mentioned
    photograph/photographed place/placed plan/planned polish/polished
    praise/praised protect/protected receive/received rent/rented replace/replaced report/reported
    rescue/rescued restore/restored return/returned send/sent study/studied test/tested trade/traded
    translate/translated visit/visited watch/watched weigh/weighed win/won wrap/wrapped""".split()
)
# Circumstance: phrases, kinds of value, and questions ({s} subject, {b} base, {o} object).
_CIRCUMSTANCES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "where": (("in {v}", "at {v}", "near {v}", "behind {v}"), ("place",), ("Where did {s} {b} {o}?",)),
    "when": (("on {v}", "on {v}"), ("date",), ("When did {s} {b} {o}?", "On which day did {s} {b} {o}?")),
    "hour": (("at {v}",), ("time",), ("At what time did {s} {b} {o}?", "When did {s} {b} {o}?")),
    "whom": (
        ("together with {v}", "with {v}"),
        ("person",),
        ("With whom did {s} {b} {o}?", "Who did {s} {b} {o} with?"),
    ),
    "for": (("for {v}",), ("money",), ("For how much did {s} {b} {o}?", "What was the price when {s} {b} {o}?")),
    "tool": (("using {v}", "by means of {v}"), ("thing",), ("What did {s} use to {b} {o}?", "How did {s} {b} {o}?")),
    "long": (("within {v}",), ("measure",), ("How long did {s} need to {b} {o}?",)),
}
_BEFORE = (
    "After a long debate,|As far as anyone knows,|To everyone's surprise,|In the end,|It is well known that|"
    "The report says that|I was told that|We later learned that|My neighbour insists that|Nobody doubts that|"
    "On the last page it says that|By the way,|In a letter it was written that|Last but not least,|"
    "For some reason|Oddly enough,|He added that|She remembered that|As agreed,|Of course"
).split("|")
_AFTER = (
    ", which was a surprise|, as the report explains|, although few people know it|, and that is all we know|"
    ", or so they say| after a long debate| despite the rain|, but the others disagreed|"
    ", so nobody has to ask again| according to the guide| for the time being| until further notice|"
    ", to be precise|, not more and not less|, and everyone was glad| as usual|; the rest is unknown|"
    ", while the others waited outside|, just as before|, if the notes are right"
).split("|")


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
    values = {name: value(rng, rng.choice(_CIRCUMSTANCES[name][1]), lexicon) for name in chosen}
    phrases = [rng.choice(_CIRCUMSTANCES[name][0]).format(v=values[name]) for name in chosen]
    topic = rng.choice(("who", "what", *chosen, *chosen))
    if topic == "who":
        question, answer = rng.choice((f"Who {past} {thing}?", f"By whom was {thing} {past}?")), subject
    elif topic == "what":
        question, answer = f"What did {subject} {base}?", thing
    else:
        template = rng.choice(_CIRCUMSTANCES[topic][2])
        question, answer = template.format(s=subject, b=base, o=thing), values[topic]
    return Event(f"event {base}", subject, thing, _statement(rng, subject, past, thing, phrases), question, answer)


def with_aside(rng: random.Random, statement: str) -> str:
    """Return the statement with an empty remark before or after it."""
    if not statement.endswith(".") or rng.random() < 0.4:
        inner = statement[0].lower() + statement[1:] if statement.startswith(("The ", "For ", "To ")) else statement
        return f"{rng.choice(_BEFORE)} {inner}"
    return f"{statement[:-1]}{rng.choice(_AFTER)}."


def _statement(rng: random.Random, subject: str, past: str, thing: str, phrases: list[str]) -> str:
    front = f"{capitalised(phrases.pop())}{rng.choice((',', ''))} " if phrases and rng.random() < 0.3 else ""
    core = f"{subject} {past} {thing}" if rng.random() < 0.7 else f"{thing} was {past} by {subject}"
    return f"{front}{core if front else capitalised(core)}{''.join(f' {phrase}' for phrase in phrases)}."


def _new_verb(rng: random.Random) -> tuple[str, str]:
    word = pseudo_word(rng)
    return word, f"{word}ed"
