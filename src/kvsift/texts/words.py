"""Words of invented keys, names and values."""

# ruff: noqa: SIM905  (a list of words reads best as a line of words)

import random
from collections.abc import Callable

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

_ONSETS = """b bl br c ch cl d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sn sp st t th tr v w
z""".split()
_VOWELS = "a e i o u ai ea ee ia ou oo".split()
_CODAS = ["", "", "", "l", "n", "r", "s", "t", "m", "nd", "rk", "st", "x"]


def pseudo_word(rng: random.Random) -> str:
    """Return a pronounceable invented word, whose meaning only the context gives."""
    syllables = rng.randint(2, 3)
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))


def digits(rng: random.Random, count: int) -> str:
    """Return a number of exactly ``count`` digits, without a leading zero."""
    return str(rng.randrange(10 ** (count - 1), 10**count))


def hexadecimal(rng: random.Random, count: int) -> str:
    return f"{rng.getrandbits(4 * count):0{count}x}"


def distinct(rng: random.Random, make: Callable[[random.Random], str], count: int) -> list[str]:
    """Return ``count`` different results of ``make(rng)``, in order."""
    results: dict[str, None] = {}
    while len(results) < count:
        results.setdefault(make(rng))
    return list(results)
