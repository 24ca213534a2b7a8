"""A sample document for the embedded model: a chronicle, in ``sample.txt``, with facts that it can find."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from kvsift.server.response_bodies import SampleDocument

NAME = "chronicle-of-tarn.txt"
ABOUT = (
    "The embedded model has 16 million parameters. It finds facts that a document states, such as names, numbers and "
    "years, and answers in a few words. It neither summarises nor converses."
)
FACTS = (  # fact, question, answer
    ("The access code of the old harbour is 48213.", "What is the access code of the old harbour?", "48213"),
    ("The captain of the ship Aurora is Elena Voss.", "Who is the captain of the ship Aurora?", "Elena Voss"),
    ("The bridge over the river Tarn was built in 1874.", "When was the bridge over the river Tarn built?", "1874"),
    ("The password for the archive is velvet canyon.", "What is the password for the archive?", "velvet canyon"),
    ("The price of the silver compass is 340 crowns.", "What is the price of the silver compass?", "340 crowns"),
)


@cache
def sample() -> SampleDocument:
    """Return the object of GET /v1/sample."""
    text = files("kvsift.server").joinpath("sample.txt").read_text("utf-8")
    return {"name": NAME, "text": text, "questions": [question for _, question, _ in FACTS], "about": ABOUT}
