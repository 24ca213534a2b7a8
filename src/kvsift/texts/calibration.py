"""Texts whose ends are decoded to calibrate layers and to tune plans: contexts with questions and their answers, or
any texts."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from kvsift.calibration.fidelity import DecodedText
from kvsift.calibration.recipe import pieces_of_texts
from kvsift.engine.model_runner import ModelRunner
from kvsift.errors import TooShort
from kvsift.texts import facts, key_value, needle
from kvsift.texts.layout import Draft, Encode, cut_tail, lay_out
from kvsift.texts.prose import prose
from kvsift.tokenization.prompt import answer_text, question_text

QUESTIONS, ROOM = 8, 384  # of a context, and the most tokens that they and their answers take
DECODED = 128  # tokens at the end of a text
CHARACTERS = 8  # of a token, an upper bound
LEAST_CONTEXT = 512  # tokens before those that are scored


class Kind(NamedTuple):
    """A kind of context with questions.

    Attributes:
        draft: makes one of so many questions.
        tokens_per_question: an upper bound of the tokens of one question's needles.
    """

    draft: Callable[[Random, int], Draft]
    tokens_per_question: int


KINDS = {
    "needle": Kind(needle.draft, needle.TOKENS_PER_QUESTION),
    "key_value": Kind(key_value.draft, key_value.TOKENS_PER_QUESTION),
    "facts": Kind(facts.draft, facts.TOKENS_PER_QUESTION),
}


def task_texts(
    tokenizer: Any, tokens: int, length: int, first_seed: int = 0
) -> tuple[list[DecodedText], dict[str, str]]:
    """Contexts of ``length`` tokens, questions and answers included, which are decoded; and the contexts by name.

    Raises:
        InputError: if a context is too short for a task.
    """
    texts, sources = [], {}
    encode = lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # noqa: E731
    prefix = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = min(ROOM, length // 2)
    for seed in range(first_seed, first_seed + max(tokens // length, 1)):
        name, kind = list(KINDS.items())[seed % len(KINDS)]
        rng = Random(f"{name}:{length - room}:{seed}")
        draft = kind.draft(rng, max(1, min(QUESTIONS, (length - room) // (2 * kind.tokens_per_question))))
        try:
            layout = lay_out(draft, length - room, encode, lru_cache(maxsize=None)(encode), rng, prefix)
        except ValueError as error:
            raise TooShort(
                f"task {name!r} cannot be made of {length} tokens: {error}. Give a longer --length."
            ) from error
        context, ids = cut_tail(layout, length - room, encode)
        texts.append(DecodedText([*ids, *_answers(draft, encode, room)], len(ids)))
        sources[f"{name} {seed}"] = context
    return texts, sources


def ends(runner: ModelRunner, texts: Mapping[str, str], tokens: int, length: int) -> list[DecodedText]:
    """Pieces of at most ``length`` tokens, the ends of which are decoded."""
    pieces = pieces_of_texts(runner, texts, tokens, length)
    return [DecodedText(piece, len(piece) - min(DECODED, len(piece) // 2)) for piece in pieces]


def windows(
    runner: ModelRunner, texts: Mapping[str, str], context: int, scored: int, count: int, seed: int
) -> list[DecodedText]:
    """Pieces of texts at random places, of one length, whose scored ends do not overlap.

    Args:
        runner: has the tokenizer that reads the texts.
        texts: texts by name; pieces are taken from each in turn.
        context: tokens before the scored ones; fewer where the texts are too short for so many.
        scored: tokens at the end of each piece.
        count: number of pieces.
        seed: draws the places.

    Raises:
        InputError: if the texts have no room for so many scored tokens.
    """
    encoded = {name: runner.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
               for name, text in texts.items()}  # fmt: skip
    bos = runner.tokenizer.bos_token_id
    prefix = [] if bos is None else [bos]
    while True:
        places = {name: _places(len(ids), context - len(prefix), scored, Random(f"{seed} {name}"))
                  for name, ids in encoded.items()}  # fmt: skip
        if sum(map(len, places.values())) >= count:
            break
        if context <= LEAST_CONTEXT:
            total = sum(map(len, encoded.values()))
            raise TooShort(
                f"the texts have {total:,} tokens, too little: {count} pieces are scored, {scored} tokens of each, "
                f"after at least {LEAST_CONTEXT}. Give --text files of at least {count * scored + LEAST_CONTEXT:,} "
                "tokens together, or leave out --text for those that come with kvsift."
            )
        context = max(LEAST_CONTEXT, context * 3 // 4)
    found: list[DecodedText] = []
    while len(found) < count:
        for name, free in places.items():
            if free and len(found) < count:
                start = free.pop()
                ids = encoded[name][start - context + len(prefix) : start + scored]
                found.append(DecodedText([*prefix, *ids], context))
    return found


def mixed(runner: ModelRunner, context: int, scored: int, count: int, seed: int) -> list[DecodedText]:
    """Pieces of prose and program text from the running Python, and contexts with questions and answers, in turn.

    Prose hardly needs its middle; questions need little else.
    """
    questions, _ = task_texts(runner.tokenizer, (context + scored) * len(range(2, count, 3)), context + scored, seed)
    asked = [DecodedText(text.ids, len(text.ids) - scored) for text in questions]
    characters = CHARACTERS * (context + scored) * count
    plain = [
        windows(runner, {name: text}, context, scored, len(range(first, count, 3)), seed)
        for first, (name, text) in enumerate(
            [("prose", prose_of(characters, seed)), ("programs", programs_of(characters, seed))]
        )
    ]
    in_turn = [each for turn in zip_longest(*plain, asked) for each in turn if each is not None]
    return in_turn[:count]


def prose_of(characters: int, seed: int = 0) -> str:
    """Return the beginning of endless prose, the same on one version of Python."""
    pieces, text = prose(Random(seed)), ""
    while len(text) < characters:
        text += next(pieces)
    return text


def programs_of(characters: int, seed: int = 0) -> str:
    """Return modules of Python's library, the same on one version of Python."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    Random(seed).shuffle(files)
    text = ""
    for file in files:
        if len(text) >= characters:
            break
        text += file.read_text(encoding="utf-8", errors="replace")
    return text


def _places(length: int, context: int, scored: int, rng: Random) -> list[int]:
    """First tokens of the scored ends in a text, in random order, none overlapping another."""
    if length < context + scored:
        return []
    first = context + rng.randrange((length - context) % scored + 1)
    found = [*range(first, length - scored + 1, scored)]
    rng.shuffle(found)
    return found


def _answers(draft: Draft, encode: Encode, room: int) -> list[int]:
    """The questions of a draft with their answers, as many as there is room for, in tokens."""
    ids: list[int] = []
    for question in draft.questions:
        asked = [*encode(question_text(question.text)), *encode(answer_text(question.answer))]
        if len(ids) + len(asked) > room:
            break
        ids += asked
    return ids
