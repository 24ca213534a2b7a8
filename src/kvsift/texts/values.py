"""Values of invented facts, by kind: each stands in its sentence letter for letter as the answer."""

# ruff: noqa: SIM905  (a list of words reads best as a line of words)

import random
from collections.abc import Callable

from kvsift.texts.words import Lexicon, digits, pseudo_word, with_article

_UPPER = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_MONTHS = """January February March April May June July August September October November December""".split()
_WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
_SMALL_NUMBERS = """two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty""".split()


def value(rng: random.Random, kind: str, lexicon: Lexicon) -> str:
    """Return a value of a kind in ``KINDS``."""
    return KINDS[kind](rng, lexicon)


def _letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choices(_UPPER, k=count))


def _code(rng: random.Random, _: Lexicon) -> str:
    draw = rng.random()
    if draw < 0.45:
        return digits(rng, rng.randint(3, 8))
    if draw < 0.6:
        return f"{_letters(rng, rng.randint(1, 3))}-{digits(rng, rng.randint(2, 5))}"
    if draw < 0.7:
        return f"{digits(rng, rng.randint(2, 4))}-{digits(rng, rng.randint(2, 4))}"
    if draw < 0.8:
        return f"{_letters(rng, 1)}{digits(rng, 1)}-{digits(rng, 3)}-{_letters(rng, 2)}"
    if draw < 0.92:
        return "".join(rng.choices(_UPPER + "123456789", k=rng.randint(4, 8)))
    return f"{pseudo_word(rng)}{digits(rng, 2)}"


def _money(rng: random.Random, _: Lexicon) -> str:
    amount = rng.randint(2, 999_999)
    text = f"{amount:,}" if rng.random() < 0.5 else str(amount)
    return (
        f"${text}" if rng.random() < 0.4 else f"{text} {rng.choice(('dollars', 'euros', 'pounds', 'crowns', 'francs'))}"
    )


_UNITS = """metres kilometres km cm kilograms kg grams tonnes litres hours minutes seconds days weeks months years
miles feet inches degrees percent people seats pages rooms floors volts watts points boxes copies""".split()


def _measure(rng: random.Random, _: Lexicon) -> str:
    amount = rng.choice(_SMALL_NUMBERS) if rng.random() < 0.15 else digits(rng, rng.randint(1, 4))
    decimals = f".{rng.randint(1, 9)}" if amount.isdigit() and rng.random() < 0.15 else ""
    return f"{amount}{decimals} {rng.choice(_UNITS)}"


def _year(rng: random.Random, _: Lexicon) -> str:
    return str(rng.randint(1400, 2099))


def _date(rng: random.Random, lexicon: Lexicon) -> str:
    day, month, year = rng.randint(1, 28), rng.choice(_MONTHS), _year(rng, lexicon)
    forms = (f"{day} {month} {year}", f"{month} {day}, {year}", f"{day} {month}", f"{month} {day}", f"{month} {year}")
    return rng.choice((*forms, f"{year}-{_MONTHS.index(month) + 1:02d}-{day:02d}", rng.choice(_WEEKDAYS), month))


def _time(rng: random.Random, _: Lexicon) -> str:
    hour, minute = rng.randint(1, 12), rng.randint(0, 59)
    half = rng.choice(("am", "pm"))
    return rng.choice((f"{hour} {half}", f"{hour}:{minute:02d} {half}", f"{hour + 11}:{minute:02d}", f"{hour} o'clock"))


def _person(rng: random.Random, lexicon: Lexicon) -> str:
    first = rng.choice(lexicon.first_names) if rng.random() < 0.8 else pseudo_word(rng).capitalize()
    last = rng.choice(lexicon.surnames) if rng.random() < 0.8 else pseudo_word(rng).capitalize()
    return rng.choice(
        (f"{first} {last}", f"{first} {last}", first, f"Dr. {last}", f"{first} {_letters(rng, 1)}. {last}")
    )


def _place(rng: random.Random, lexicon: Lexicon) -> str:
    draw = rng.random()
    if draw < 0.5:
        return rng.choice(lexicon.places) if draw < 0.35 else pseudo_word(rng).capitalize()
    if draw < 0.65:
        return (
            f"the {rng.choice(_ORDINALS)} floor"
            if draw < 0.55
            else f"{rng.choice(('Room', 'Hall', 'Gate'))} {digits(rng, rng.randint(1, 3))}"
        )
    return f"the {rng.choice(lexicon.adjectives)} {rng.choice(lexicon.nouns)}" + (
        f" in {rng.choice(lexicon.places)}" if draw > 0.9 else ""
    )


def _thing(rng: random.Random, lexicon: Lexicon) -> str:
    noun = (
        rng.choice(lexicon.nouns)
        if rng.random() < 0.7
        else f"{rng.choice(lexicon.adjectives)} {rng.choice(lexicon.nouns)}"
    )
    return rng.choice((with_article(noun), with_article(noun), f"the {noun}", noun))


def _colour(rng: random.Random, lexicon: Lexicon) -> str:
    colour = rng.choice(lexicon.colours)
    return f"{rng.choice(('dark', 'light', 'pale', 'bright'))} {colour}" if rng.random() < 0.25 else colour


def _animal(rng: random.Random, lexicon: Lexicon) -> str:
    return with_article(rng.choice(lexicon.animals)) if rng.random() < 0.5 else rng.choice(lexicon.animals)


def _food(rng: random.Random, lexicon: Lexicon) -> str:
    food = rng.choice(lexicon.foods)
    draw = rng.random()
    if draw < 0.6:
        return food
    return f"{food} and {rng.choice(lexicon.foods)}" if draw < 0.8 else f"{rng.choice(lexicon.adjectives)} {food}"


def _word(rng: random.Random, lexicon: Lexicon) -> str:
    draw = rng.random()
    if draw < 0.4:
        return rng.choice(lexicon.nouns)
    word = pseudo_word(rng) if draw < 0.8 else rng.choice(lexicon.adjectives)
    return word.capitalize() if rng.random() < 0.4 else word


def _phrase(rng: random.Random, lexicon: Lexicon) -> str:
    words = [rng.choice(lexicon.adjectives if rng.random() < 0.4 else lexicon.nouns) for _ in range(rng.randint(2, 5))]
    return " ".join(words)


KINDS: dict[str, Callable[[random.Random, Lexicon], str]] = {
    "number": lambda rng, _: digits(rng, rng.randint(2, 7)),
    "code": _code,
    "money": _money,
    "measure": _measure,
    "count": lambda rng, _: rng.choice(_SMALL_NUMBERS) if rng.random() < 0.3 else digits(rng, rng.randint(1, 4)),
    "year": _year,
    "date": _date,
    "time": _time,
    "person": _person,
    "place": _place,
    "thing": _thing,
    "colour": _colour,
    "animal": _animal,
    "food": _food,
    "job": lambda rng, lexicon: rng.choice(lexicon.jobs),
    "word": _word,
    "phrase": _phrase,
}
