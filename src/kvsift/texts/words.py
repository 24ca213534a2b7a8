"""Words of invented keys, names and values."""

# ruff: noqa: SIM905  (a list of words reads best as a line of words)

import random
from collections.abc import Callable
from dataclasses import dataclass

ADJECTIVES = """amber ancient bitter blue brave bright broad broken calm careful central clever cold copper crimson
crooked curious dark deep distant double dry dusty early eastern elegant empty faint famous fierce flat foggy
fragile fresh frozen gentle gloomy golden grand green grey happy heavy hidden hollow honest humble icy inner iron
ivory jolly keen large lazy light little local lonely long lost loud lower lucky main mellow mild misty modern mossy
muddy narrow new noble noisy northern old olive open orange outer pale patient plain polite proud public purple
quick quiet rapid rare red regional remote rough round royal rusty sandy scarlet secret shallow sharp shiny short
silent silver simple slow small smooth soft solid southern spare steep still stone strange strong sunny sweet swift
tall tender thin tiny upper velvet violet warm western white wide wild windy winter wise wooden yellow young north
south east west""".split()
NOUNS = """anchor apple apron archive arrow bakery balcony barrel basket beacon bell bicycle boat book bottle branch
bridge brush bucket button cabin cabinet camera candle canyon carpet castle cave cellar chair chapel clinic clock
cloud coat compass corridor cottage courtyard crane creek crown cup depot desk diary dock door drawer drum engine
factory farm feather fence ferry field flag flute forest fork fountain furniture garage garden gate glacier glove
greenhouse hall hammer harbour harvest hat hospital hotel house island jacket jar kettle key kitchen laboratory
ladder lake lamp lantern library lift lighthouse lock locker machine market meadow mill mirror mountain museum
needle notebook oak office orchard oven paddle painting palace parcel park pencil piano pier pipe plate pond printer
pump quarry radio railway ribbon ring river road robot roof room rope school server shed shelf ship shop spoon
stable stadium station statue stove street studio submarine suitcase table tablet telescope temple tent theatre
tower town tractor trail train tram tree truck trumpet tunnel umbrella valley van vase vault village violin wagon
wall wallet warehouse watch well wheel whistle window workshop yard""".split()
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

_ONSETS = """b bl br c ch cl d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sn sp st t th tr v w
z""".split()
_VOWELS = "a e i o u ai ea ee ia ou oo".split()
_CODAS = ["", "", "", "l", "n", "r", "s", "t", "m", "nd", "rk", "st", "x"]


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


def pseudo_word(rng: random.Random) -> str:
    """Return a pronounceable invented word, whose meaning only the context gives."""
    syllables = rng.randint(2, 3)
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))


def digits(rng: random.Random, count: int) -> str:
    """Return a number of exactly ``count`` digits, without a leading zero."""
    return str(rng.randrange(10 ** (count - 1), 10**count))


def hexadecimal(rng: random.Random, count: int) -> str:
    return f"{rng.getrandbits(4 * count):0{count}x}"


def with_article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def distinct(rng: random.Random, make: Callable[[random.Random], str], count: int) -> list[str]:
    """Return ``count`` different results of ``make(rng)``, in order."""
    results: dict[str, None] = {}
    while len(results) < count:
        results.setdefault(make(rng))
    return list(results)
