"""Facts task: invented statements in English with natural questions, among others that share subject or wording."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from kvsift.texts.layout import Draft, DraftQuestion
from kvsift.texts.prose import haystack
from kvsift.texts.values import KINDS, value
from kvsift.texts.words import DEFAULT, Lexicon, capitalised, digits, pseudo_word, table_of

TOKENS_PER_QUESTION = 64  # of its needles, an upper bound
_TEMPLATES = table_of("facts.toml")
_VERBS = [pair.split("/") for pair in _TEMPLATES["verbs"].split()]
_CIRCUMSTANCES = _TEMPLATES["circumstances"]
_ATTRIBUTES = [(kind, name) for kind, names in _TEMPLATES["attributes"].items() for name in names]


@dataclass(frozen=True)
class Fact:
    """A statement that has the answer letter for letter, except for a capital at the start of the sentence."""

    statement: str
    question: str
    answer: str


def draft(rng: random.Random, num_questions: int, lexicon: Lexicon = DEFAULT) -> Draft:
    """Return facts in prose or noise or, in a quarter of the samples, in a document of facts only."""
    source = facts(rng, lexicon)
    chosen = [next(source) for _ in range(num_questions)]
    separator = rng.choice((" ", " ", "\n", "\n\n"))
    needles = [separator + fact.statement for fact in chosen]
    questions = [DraftQuestion(fact.question, fact.answer, i) for i, fact in enumerate(chosen)]
    if rng.random() < 0.25:
        return Draft(needles, questions, (separator + fact.statement for fact in source), is_stock=False)
    return Draft(needles, questions, haystack(rng), is_stock=True)


def facts(rng: random.Random, lexicon: Lexicon = DEFAULT) -> Iterator[Fact]:
    """Yield endless facts. Subjects and attributes come from small pools, so most facts differ from others in one word;
    no subject has the same attribute or question twice."""
    breadth = rng.choice((2, 4, 8, 16))  # subjects per pool: small pools make many look-alikes
    pools = [_Pool(rng, breadth, lexicon)]
    used: set[tuple[str, str]] = set()
    # the kinds of facts that dominate this document
    makers = rng.choices((_attribute_fact, _verb_fact, _event_fact), (3, 2, 2), k=4)
    misses = 0
    while True:
        subject, relations, fact = rng.choice(makers)(rng, rng.choice(pools), lexicon)
        keys = {(subject, relation) for relation in relations}
        if not used.isdisjoint(keys):
            misses += 1
            if misses > 4:  # the pools are nearly used up
                pools.append(_Pool(rng, breadth, lexicon))
            continue
        misses = 0
        used |= keys
        yield replace(fact, statement=_with_aside(rng, fact.statement)) if rng.random() < 0.25 else fact


class _Pool:
    """Subjects and attributes that facts combine."""

    def __init__(self, rng: random.Random, breadth: int, lexicon: Lexicon) -> None:
        stem = rng.choice(lexicon.nouns)  # "the north warehouse" beside "the south warehouse"
        self.things = [_thing(rng, lexicon, stem) for _ in range(breadth)]
        self.people = [_person(rng, lexicon) for _ in range(breadth)]
        self.attributes = [_attribute(rng, lexicon) for _ in range(breadth)]


def _attribute_fact(rng: random.Random, pool: _Pool, lexicon: Lexicon) -> tuple[str, tuple[str, ...], Fact]:
    """Return the subject, the relations that the fact uses up, and the fact."""
    kind, attribute = rng.choice(pool.attributes)
    subject = rng.choice(pool.things if rng.random() < 0.75 else pool.people)
    answer = value(rng, kind, lexicon)
    forms = _TEMPLATES["kind_questions"].get(kind)
    question = rng.choice(forms) if forms and rng.random() < 0.4 else rng.choice(_TEMPLATES["questions"])
    return subject, (attribute,), _fact(rng.choice(_TEMPLATES["statements"]), question, subject, answer, attribute)


def _verb_fact(rng: random.Random, pool: _Pool, lexicon: Lexicon) -> tuple[str, tuple[str, ...], Fact]:
    owner, kind, statement, *questions = rng.choice(_TEMPLATES["verb_facts"])
    subject = rng.choice(pool.people if owner == "person" else pool.things)
    fact = _fact(statement, rng.choice(questions), subject, value(rng, kind, lexicon))
    return subject, _relations(*questions), fact


def _event_fact(rng: random.Random, pool: _Pool, lexicon: Lexicon) -> tuple[str, tuple[str, ...], Fact]:
    """An event: who did what, where, when and how, with a question about one of these."""
    subject, thing = rng.choice(pool.people), rng.choice(pool.things)
    base, past = rng.choice(_VERBS) if rng.random() < 0.85 else ((word := pseudo_word(rng)), f"{word}ed")
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
    fact = Fact(_happened(rng, subject, past, thing, phrases), question, answer)
    return f"event {base}", (subject, thing), fact


def _happened(rng: random.Random, subject: str, past: str, thing: str, phrases: list[str]) -> str:
    front = f"{capitalised(phrases.pop())}{rng.choice((',', ''))} " if phrases and rng.random() < 0.3 else ""
    core = f"{subject} {past} {thing}" if rng.random() < 0.7 else f"{thing} was {past} by {subject}"
    return f"{front}{core if front else capitalised(core)}{''.join(f' {phrase}' for phrase in phrases)}."


@cache
def _relations(*questions: str) -> tuple[str, ...]:
    """Return the relations of a verb fact: questions, and attributes they name ("What is the price of {e}?")."""
    matches = (re.fullmatch(r"\w+ is (?:the (.+) of {e}|{e}'s (.+))\?", question) for question in questions)
    return (*questions, *(match[1] or match[2] for match in matches if match))


def _fact(statement: str, question: str, subject: str, answer: str, attribute: str = "") -> Fact:
    words = {"{e}": subject, "{E}": capitalised(subject), "{a}": attribute, "{A}": capitalised(attribute)}
    # a value at the start of a sentence keeps its case: the answer is a copy
    words |= {"{v}": answer, "{V}": answer}
    return Fact(_filled(statement, words), _filled(question, words), answer)


def _filled(template: str, words: dict[str, str]) -> str:
    for slot, word in words.items():
        template = template.replace(slot, word)
    return template


def _attribute(rng: random.Random, lexicon: Lexicon) -> tuple[str, str]:
    """Return a kind of value and an attribute; one in five is an invented compound."""
    if rng.random() < 0.8:
        return rng.choice(_ATTRIBUTES)
    nouns = f"{rng.choice(lexicon.nouns)} {rng.choice(lexicon.nouns)}"
    words = (rng.choice(lexicon.nouns), f"{rng.choice(lexicon.adjectives)} {rng.choice(lexicon.nouns)}", nouns)
    return rng.choice(tuple(KINDS)), rng.choice(words)


def _thing(rng: random.Random, lexicon: Lexicon, stem: str) -> str:
    noun = stem if rng.random() < 0.4 else rng.choice(lexicon.nouns)
    draw = rng.random()
    if draw < 0.45:
        return f"the {rng.choice(lexicon.adjectives)} {noun}"
    if draw < 0.55:
        return f"the {noun} in {rng.choice(lexicon.places)}"
    if draw < 0.63:
        return f"the {rng.choice(lexicon.places)} {noun}"
    if draw < 0.71:
        return f"{noun} {rng.choice('ABCDEFGHKMNPRSTX') if rng.random() < 0.4 else digits(rng, rng.randint(1, 3))}"
    if draw < 0.79:
        return f"Project {pseudo_word(rng).capitalize() if rng.random() < 0.5 else noun.capitalize()}"
    if draw < 0.87:
        return f"the {pseudo_word(rng).capitalize() if rng.random() < 0.6 else rng.choice(lexicon.surnames)} {noun}"
    if draw < 0.93:
        return f"the {noun} {rng.choice(lexicon.nouns)}"
    return pseudo_word(rng).capitalize() if rng.random() < 0.5 else f"the {noun}"


def _person(rng: random.Random, lexicon: Lexicon) -> str:
    draw = rng.random()
    first = rng.choice(lexicon.first_names) if draw < 0.85 else pseudo_word(rng).capitalize()
    if draw < 0.4:
        return first
    last = rng.choice(lexicon.surnames) if rng.random() < 0.85 else pseudo_word(rng).capitalize()
    return rng.choice((f"{first} {last}", f"{first} {last}", f"Mr. {last}", f"Mrs. {last}", f"Dr. {last}"))


def _with_aside(rng: random.Random, statement: str) -> str:
    """Return the statement with an empty remark before or after it."""
    if not statement.endswith(".") or rng.random() < 0.4:
        inner = statement[0].lower() + statement[1:] if statement.startswith(("The ", "For ", "To ")) else statement
        return f"{rng.choice(_TEMPLATES['before'])} {inner}"
    return f"{statement[:-1]}{rng.choice(_TEMPLATES['after'])}."
