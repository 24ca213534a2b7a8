"""A sample document for the embedded model: a chronicle with facts that it can find."""

from __future__ import annotations

import random
from functools import cache

from kvsift.server.responses import SampleDocument

NAME = "chronicle-of-tarn.txt"
ABOUT = (
    "The embedded model has 16 million parameters. It finds facts that a document states, such as names, numbers and "
    "years, and answers in a few words. It neither summarises nor converses."
)
PARAGRAPHS = 64
FACTS = (  # depth in the document, fact, question, answer
    (0.08, "The access code of the old harbour is 48213.", "What is the access code of the old harbour?", "48213"),
    (0.27, "The captain of the ship Aurora is Elena Voss.", "Who is the captain of the ship Aurora?", "Elena Voss"),
    (
        0.46,
        "The bridge over the river Tarn was built in 1874.",
        "When was the bridge over the river Tarn built?",
        "1874",
    ),
    (0.65, "The password for the archive is velvet canyon.", "What is the password for the archive?", "velvet canyon"),
    (0.86, "The price of the silver compass is 340 crowns.", "What is the price of the silver compass?", "340 crowns"),
)  # fmt: skip
OPENINGS = (
    "In {month} the {people} of the {place} met to talk about {matter}.",
    "Nobody at the {place} remembers a {month} with so much {weather}.",
    "The {people} wrote a long letter about {matter}, and it was read aloud at the {place}.",
    "When the {weather} came in {month}, the {people} stayed at the {place} and waited.",
    "Much was said that {month} about {matter}, most of it at the {place}.",
)
MIDDLES = (
    "Some of them wanted to begin at once, while others asked for more time.",
    "After the {weather} had passed, work went on as it always had.",
    "The {people} brought bread and apples, and the talk became quieter.",
    "A boy from the {place} carried the news to the other bank of the river.",
    "It was agreed that {matter} would be looked at again in {month}.",
    "The older {people} shook their heads, but they did not say no.",
    "Two carts were sent to the {place}, and both came back empty.",
    "Lamps were lit early, since the {weather} had made the afternoon dark.",
    "Whoever had a free hand helped the {people} to carry wood and rope.",
)
ENDINGS = (
    "In the end everybody went home, and the {place} was closed for the night.",
    "So {matter} was left as it had been, to the content of the {people}.",
    "By the end of {month} hardly anybody spoke of it any more.",
    "The {weather} stayed for another week, and then the sky was clear again.",
)
WORDS = {
    "month": [
        "January", "February", "March", "April", "May", "June", "July",
        "August", "September", "October", "November", "December",
    ],
    "people": ["fishermen", "millers", "carpenters", "bakers", "teachers", "farmers", "weavers", "gardeners"],
    "place": ["old mill", "market hall", "village school", "upper lock", "boat house", "chapel", "smithy", "town well"],
    "weather": ["rain", "snow", "fog", "wind", "frost", "thunder", "sunshine", "hail"],
    "matter": [
        "the new road", "the price of flour", "the leaking roof", "the summer fair", "the spring floods",
        "the hours of the ferry", "the fence along the common", "the repair of the clock",
    ],
}  # fmt: skip


@cache
def sample() -> SampleDocument:
    """Return the object of GET /v1/sample."""
    return {"name": NAME, "text": text(), "questions": [question for _, _, question, _ in FACTS], "about": ABOUT}


@cache
def text() -> str:
    """Return the document, always the same one."""
    rng = random.Random(7)
    paragraphs = [_paragraph(rng) for _ in range(PARAGRAPHS)]
    for depth, fact, _, _ in FACTS:
        sentences = paragraphs[int(depth * PARAGRAPHS)]
        sentences.insert(2, fact)
    return "\n\n".join(" ".join(sentences) for sentences in paragraphs) + "\n"


def _paragraph(rng: random.Random) -> list[str]:
    chosen = [rng.choice(OPENINGS), *rng.sample(MIDDLES, 3), rng.choice(ENDINGS)]
    return [_filled(sentence, rng) for sentence in chosen]


def _filled(sentence: str, rng: random.Random) -> str:
    filled = sentence.format_map({name: rng.choice(words) for name, words in WORDS.items()})
    return filled[0].upper() + filled[1:]
