"""Drafts of contexts with questions, and their layout: an exact number of tokens with the needles spread over the whole
depth."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Encode = Callable[[str], Sequence[int]]
"""Token ids of a piece of text, special tokens not added."""


@dataclass(frozen=True)
class DraftQuestion:
    """A question of a draft; ``needle`` is the index of the last needle that the answer depends on."""

    text: str
    answer: str
    needle: int
    answers: tuple[str, ...] = ()
    answer_prefix: str = ""


@dataclass(frozen=True)
class Draft:
    """A context before it has a length.

    Attributes:
        needles: pieces to hide, in order of appearance, each with its separator in front.
        questions: about the needles, in any order.
        filler: endless pieces that fill the context, each with its separator in front.
        is_stock: whether pieces of filler recur across samples, so that their tokens are worth caching.
        intro: the beginning of the context, before any needle or filler.
    """

    needles: list[str]
    questions: list[DraftQuestion]
    filler: Iterator[str]
    is_stock: bool
    intro: str = ""


@dataclass(frozen=True)
class Layout:
    """Pieces in order; the last may exceed the length and is cut by ``cut_tail``."""

    pieces: list[str]
    ids: list[int]
    tail_start: int  # where the tokens of the last piece start
    needle_starts: list[int]


def lay_out(
    draft: Draft, length: int, encode: Encode, encode_stock: Encode, rng: random.Random, prefix: Sequence[int] = ()
) -> Layout:
    """Lay out at least ``length`` tokens of filler with the needles at even depths, jittered inside their stratum.

    A needle moves forward if the next piece of filler would leave no room for it and its successors.
    """
    needles = [encode(needle) for needle in draft.needles]
    fill = draft.filler
    tokenise = encode_stock if draft.is_stock else encode
    ids: list[int] = [*prefix, *encode(draft.intro)] if draft.intro else list(prefix)
    pieces: list[str] = [draft.intro] if draft.intro else []
    first = len(pieces)  # index of the first piece, which has no separator
    needle_starts: list[int] = []
    room = length - sum(map(len, needles))  # the latest start of the next needle for all to fit
    if room < len(ids):
        start = f" after an introduction of {len(ids)}" if draft.intro else ""
        raise ValueError(
            f"{len(needles)} needles of {length - room} tokens do not fit a context of {length}{start}; ask less"
        )
    tail_start = len(ids)
    targets = [(i + rng.random()) / len(needles) for i in range(len(needles))]
    base = len(ids) if draft.intro else 0  # needles are spread over the rest
    index = 0
    while index < len(needles) or len(ids) < length:
        is_due = index < len(needles) and len(ids) >= base + targets[index] * (length - base)
        if not is_due:
            text = next(fill)
            piece = tokenise(text) if len(pieces) > first else encode(text.lstrip())
            is_due = index < len(needles) and len(ids) + len(piece) > room
        if is_due:
            text, piece = draft.needles[index], needles[index]
            if len(pieces) == first:
                text = text.lstrip()
                piece = encode(text)
            needle_starts.append(len(ids))
            room += len(needles[index])
            index += 1
        tail_start = len(ids)
        pieces.append(text if len(pieces) > first else text.lstrip())
        ids.extend(piece)
    return Layout(pieces, ids, tail_start, needle_starts)


def cut_tail(layout: Layout, length: int, encode: Encode) -> tuple[str, list[int]]:
    """Return the text and the ids of exactly ``length`` tokens, the last piece cut."""
    excess = len(layout.ids) - length
    if excess == 0:
        return "".join(layout.pieces), layout.ids
    keep = length - layout.tail_start
    head, last = "".join(layout.pieces[:-1]), layout.pieces[-1]
    for stop in range(len(last), 0, -1):
        tail = list(encode(last[:stop]))
        if len(tail) == keep:
            return head + last[:stop], layout.ids[: layout.tail_start] + tail
    # no prefix of the last piece has that many tokens (a character of several tokens): full stops instead
    full_stop = list(encode("."))
    assert len(full_stop) == 1, "the tokenizer spells a full stop in several tokens"
    return head + "." * keep, layout.ids[: layout.tail_start] + full_stop * keep
