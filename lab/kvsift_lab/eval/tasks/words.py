"""Names and lists of several tasks, and the words of invented facts."""

# ruff: noqa: SIM905  (a list of words reads best as a line of words)

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

from kvsift.texts.words import ADJECTIVES, NOUNS

FIRST_NAMES = """Ada Adam Aisha Alan Alice Amara Amir Ana Anders Andrea Anna Arjun Astrid Ben Bianca Boris Carla
Carlos Cecile Chen Clara Daniel David Diana Diego Elena Eli Emil Emma Erik Eva Farid Fatima Felix Fiona Frank George
Grace Hana Hassan Helen Hugo Ida Igor Ines Ingrid Iris Ivan Jack Jana Jin Jonas Jose Julia Kai Karim Karin Kenji
Laila Lars Laura Lena Leo Lin Lucas Lucy Luis Maja Marco Maria Marie Martin Mei Mia Mina Nadia Nina Noah Nora Oleg
Olga Omar Oscar Paul Pavel Petra Priya Rafael Ravi Rosa Ruth Samir Sara Selma Simon Sofia Stefan Sven Tara Tomas
Vera Victor Yara Yuki Yusuf Zoe""".split()
SURNAMES = """Abe Adler Ahmed Almeida Andersen Baker Bauer Becker Berg Bianchi Brandt Brown Carter Castro Cohen
Costa Dahl Diaz Dubois Eriksen Farrow Fischer Fleming Fontaine Garcia Gupta Haddad Hale Hansen Hart Hoffmann Holm
Hughes Ibrahim Ito Jensen Kaplan Keller Khan Kim Klein Kowalski Kumar Lang Larsen Laurent Lee Lindqvist Lopez Madsen
Marin Mehta Meyer Mori Moreau Nakamura Newman Nguyen Novak Okafor Olsen Osman Park Patel Petrov Quinn Reyes Richter
Rossi Roy Sato Schmidt Shah Silva Smith Sorensen Stone Suzuki Takeda Torres Varga Vogel Walker Weber Wilson Wong
Young Zimmermann""".split()
PLACES = """Aarhus Ankara Athens Barcelona Basel Bergen Berlin Bogota Boston Bristol Brussels Cairo Calgary Chicago
Cologne Dakar Denver Dublin Edinburgh Florence Geneva Genoa Ghent Glasgow Graz Hamburg Hanoi Helsinki Istanbul
Jakarta Kyoto Lagos Leipzig Lima Lisbon London Lyon Madrid Malaga Manila Marseille Melbourne Milan Montreal Munich
Nairobi Naples Oslo Ottawa Paris Perth Porto Prague Quito Riga Rome Rotterdam Santiago Seattle Seoul Seville Sofia
Stockholm Sydney Tallinn Tokyo Toronto Toulouse Trieste Tunis Turin Utrecht Valencia Verona Vienna Vilnius Warsaw
York Zagreb Zurich""".split()
COLOURS = """amber black blue bronze brown crimson cyan emerald gold green grey indigo ivory lavender magenta maroon
navy olive orange pink purple red scarlet silver teal turquoise violet white yellow""".split()
JOBS = """accountant architect baker biologist blacksmith bookseller bricklayer carpenter chemist cook dentist diver
doctor driver editor electrician engineer farmer firefighter gardener geologist guide hairdresser historian
inspector journalist judge lawyer librarian locksmith mechanic miner musician nurse painter pharmacist photographer
pilot plumber potter sailor sculptor surgeon tailor teacher translator violinist waiter watchmaker welder""".split()
FOODS = """almonds apples apricots bananas beans beetroot bread butter carrots cheese cherries chestnuts chocolate
cinnamon coffee cucumber figs garlic ginger grapes honey lemons lentils lime mango milk mint mushrooms mustard
noodles oats olives onions oranges parsley peaches pears pepper pistachios plums potatoes pumpkin raisins rice
saffron salt soup spinach strawberries tea thyme tomatoes vanilla walnuts yoghurt""".split()
ANIMALS = """badger bear beaver bee camel cat cow crab crow deer dog dolphin donkey dove duck eagle elephant falcon
fox frog goat goose hare hedgehog heron horse ibis jackal kangaroo lion lizard lynx magpie mole monkey moose mouse
octopus otter owl panther parrot pelican penguin pony rabbit raven salmon seal sheep shrimp sparrow squirrel stork
swan tiger toad tortoise trout turtle walrus weasel whale wolf zebra""".split()
MONTHS = """January February March April May June July August September October November December""".split()
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


@dataclass(frozen=True)
class Lexicon:
    """Open word classes of names and values; training may widen them."""

    adjectives: tuple[str, ...] = tuple(ADJECTIVES)
    nouns: tuple[str, ...] = tuple(NOUNS)
    first_names: tuple[str, ...] = tuple(FIRST_NAMES)
    surnames: tuple[str, ...] = tuple(SURNAMES)
    places: tuple[str, ...] = tuple(PLACES)
    colours: tuple[str, ...] = tuple(COLOURS)
    jobs: tuple[str, ...] = tuple(JOBS)
    foods: tuple[str, ...] = tuple(FOODS)
    animals: tuple[str, ...] = tuple(ANIMALS)


DEFAULT = Lexicon()


def with_article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def two_words(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def uuid(rng: random.Random) -> str:
    """Return a random (version 4) UUID."""
    return str(UUID(int=rng.getrandbits(128), version=4))


def listed(items: Sequence[str]) -> str:
    """ "a", "a and b" or "a, b, and c"."""
    head, last = ", ".join(items[:-1]), items[-1]
    return f"{head}{',' if len(items) > 2 else ''} and {last}" if head else last


def endless(rng: random.Random, make: Callable[[random.Random], str]) -> Iterator[str]:
    """Yield different results of ``make(rng)``."""
    used: set[str] = set()
    while True:
        if (result := make(rng)) not in used:
            used.add(result)
            yield result
