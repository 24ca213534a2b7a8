"""Variables task: chains of assignments (RULER's variable tracking), 1 to 4 steps from the question to the number."""

import random
from collections.abc import Callable

from kvsift.texts.layout import Draft, DraftQuestion
from kvsift.texts.prose import haystack
from kvsift.texts.words import DEFAULT, digits, distinct, pseudo_word
from kvsift_lab.eval.sample import Task

MAX_HOPS = 4
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def draft(rng: random.Random, num_questions: int) -> Draft:
    """Return interleaved chains of ``num_questions`` variables in all, with a question about each variable."""
    chains = _chain_lengths(rng, num_questions)
    names = iter(distinct(rng, rng.choice(_NAMES), num_questions))
    values = distinct(rng, lambda r: digits(r, 5), len(chains))
    order = [chain for chain, hops in enumerate(chains) for _ in range(hops)]
    rng.shuffle(order)
    last: dict[int, str] = {}
    needles, questions = [], []
    for i, chain in enumerate(order):
        name = next(names)
        source = f"VAR {last[chain]}" if chain in last else values[chain]
        needles.append(f"\nVAR {name} = {source}\n")
        questions.append(DraftQuestion(f"What is the value of the variable {name}?", values[chain], i))
        last[chain] = name
    return Draft(needles, questions, haystack(rng), is_stock=True)


def hops(question: str, context: str) -> int:
    """Return the number of assignments from the variable of a question to its number."""
    source = dict(line[4:].split(" = ") for line in context.splitlines() if line.startswith("VAR ") and " = " in line)
    name, count = question.removesuffix("?").rsplit(" ", 1)[1], 1
    while source[name].startswith("VAR "):
        name, count = source[name][4:], count + 1
    return count


def _chain_lengths(rng: random.Random, total: int) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(min(rng.randint(2, MAX_HOPS), total - sum(lengths)))
    return lengths


def _letters(rng: random.Random) -> str:
    return "".join(rng.choices(_LETTERS, k=4))


def _numbered(rng: random.Random) -> str:
    return f"X{rng.randint(1, 999)}"


def _word(rng: random.Random) -> str:
    return rng.choice(DEFAULT.nouns) if rng.random() < 0.5 else pseudo_word(rng)


_NAMES: tuple[Callable[[random.Random], str], ...] = (_letters, _numbered, _word)

TASKS = (Task("variables", "chains of 1 to 4 assignments", draft, tokens_per_question=32),)
