"""RULER's aggregation tasks: the most frequent words of a list.

Facts from NVIDIA/RULER (``scripts/data/synthetic/common_words_extraction.py``, ``freq_words_extraction.py``):

* cwe: a shuffled, numbered list in which ten words occur 30 times and all others 3 times (6 and 1 below 4096 tokens),
  after a solved example of 40 words (10 and 3 times; below 4096 tokens 20 words, 3 and 1 times); 120 new tokens.
* fwe: coded words of six letters, the one of rank k int(n k^-2 / zeta(2)) times, shuffled. Rank 1 is written ``...``
  and ignored, ranks 2 to 4 are the answer; a vocabulary of a fiftieth of the tokens; 50 new tokens.

Our own: the instructions; the words (of CPython's documentation, then invented ones); and the exact length, which cwe
reaches with a few more words at the end, each once, and fwe with dots.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import pi
from string import ascii_lowercase

from kvsift.texts.prose import sentences
from kvsift.texts.words import distinct, pseudo_word
from kvsift_lab.eval.sample import Sample, SampleRequest, Style, Task
from kvsift_lab.eval.tasks.assembly import ITEMS_AT_ONCE, Assembly, blocks, largest_that_fits, num_tokens
from kvsift_lab.eval.tasks.ruler_needles import STYLE

SHORT = 4096
NUM_COMMON = 10
DOTS = "..."
ZETA_2 = pi**2 / 6
LEAST_FWE = 53
"""The fewest words for a unique answer: the ranks 4 and 5 occur 2 and 1 times, or differ more."""
_CWE_STYLE = replace(STYLE, max_new_tokens=120)
_FWE_STYLE = replace(STYLE, max_new_tokens=50)
_CWE_INTRO = (
    "This is a numbered list of words, some of which occur more often than others. "
    "Remember those that occur most often.\n"
)
_CWE_QUESTION = "\nQuestion: Which 10 words occur most often in the list above?"
_CWE_PREFIX = " Answer: The 10 words that occur most often in the list are:"
_FWE_INTRO = "Read this text of coded words and count how often each occurs. Find the three most frequent ones. "
_FWE_QUESTION = (
    "\nQuestion: Which three coded words occur most often in the text above? "
    "Ignore the dots '....' and explain nothing."
)
_FWE_PREFIX = " Answer: The three coded words that occur most often in the text above are:"
_WORD = re.compile(r"(?<![\w.'-])[a-z]{3,12}(?![\w('-])")


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """Return the distinct lower-case words of the prose with 3 to 12 letters, sorted."""
    return tuple(sorted({word for texts in sentences() for text in texts for word in _WORD.findall(text)}))


def write_cwe(request: SampleRequest) -> Sample:
    rng, is_short = request.rng, request.length < SHORT
    common_times, other_times = (6, 1) if is_short else (30, 3)
    example = _example(rng, *((20, 3, 1) if is_short else (40, 10, 3)))
    assembly = Assembly(request, f"{example}\n{_CWE_INTRO}")
    most = assembly.room // (2 * other_times)  # an entry of the list has at least two tokens
    words, seed = _words(rng, NUM_COMMON + most + ITEMS_AT_ONCE), rng.random()
    common, others = words[:NUM_COMMON], words[NUM_COMMON:]

    def entries(num_others: int) -> list[str]:
        listed = common * common_times + others[:num_others] * other_times
        random.Random(seed).shuffle(listed)
        return [f"{i}. {word}" for i, word in enumerate(listed, 1)]

    num_others = largest_that_fits(lambda count: num_tokens(entries(count), request.encode), assembly.room, 1)
    listed = entries(num_others)
    for block in blocks(listed):
        assembly.add(block)
    for i, word in enumerate(others[num_others:], len(listed) + 1):
        if assembly.room <= 0:
            break
        assembly.add(f" {i}. {word}")
    return _sample("cwe", assembly, _CWE_QUESTION, _CWE_PREFIX, common, _CWE_STYLE)


def write_fwe(request: SampleRequest) -> Sample:
    rng = request.rng
    assembly = Assembly(request, _FWE_INTRO)
    vocabulary_size = max(4, request.length // 50)
    words = [DOTS, *distinct(rng, lambda r: "".join(r.choices(ascii_lowercase, k=6)), vocabulary_size - 1)]
    seed = rng.random()

    def text(num_words: int) -> list[str]:
        counts = zeta_counts(num_words, vocabulary_size)
        drawn = [word for word, count in zip(words, counts) for _ in range(count)]
        random.Random(seed).shuffle(drawn)
        return drawn

    num_words = largest_that_fits(lambda count: num_tokens(text(count), request.encode), assembly.room, LEAST_FWE)
    for block in blocks(text(num_words)):
        assembly.add(block)
    while assembly.room > 0:
        assembly.add(f" {DOTS}")
    return _sample("fwe", assembly, _FWE_QUESTION, _FWE_PREFIX, words[1:4], _FWE_STYLE)


def zeta_counts(num_words: int, vocabulary_size: int) -> list[int]:
    """Return the count of the word of each rank: a Zeta distribution with alpha 2, rounded down."""
    return [int(num_words / (rank**2 * ZETA_2)) for rank in range(1, vocabulary_size + 1)]


def _words(rng: random.Random, count: int) -> list[str]:
    prose_words = vocabulary()
    words = rng.sample(prose_words, min(count, len(prose_words)))
    return [*words, *distinct(rng, partial(_new_word, frozenset(prose_words)), count - len(words))]


def _new_word(used: frozenset[str], rng: random.Random) -> str:
    while (word := pseudo_word(rng)) in used:
        pass
    return word


def _example(rng: random.Random, num_words: int, common_times: int, other_times: int) -> str:
    """Return a list with its question and answer."""
    words = _words(rng, num_words)
    listed = words[:NUM_COMMON] * common_times + words[NUM_COMMON:] * other_times
    rng.shuffle(listed)
    context, answer = (
        " ".join(f"{i}. {word}" for i, word in enumerate(items, 1)) for items in (listed, words[:NUM_COMMON])
    )
    return f"{_CWE_INTRO}{context}{_CWE_QUESTION}{_CWE_PREFIX} {answer}"


def _sample(task: str, assembly: Assembly, question: str, prefix: str, answers: Sequence[str], style: Style) -> Sample:
    context, ids = assembly.cut()
    return Sample(task, context, ids, (style.question(question, " ".join(answers), 1.0, tuple(answers), prefix),))


TASKS = tuple(
    Task(name, about, write=write, max_questions=1, family="ruler", style=style)
    for name, about, write, style in (
        ("cwe", "the ten most common words of a list", write_cwe, _CWE_STYLE),
        ("fwe", "the three most frequent coded words, by a Zeta distribution", write_fwe, _FWE_STYLE),
    )
)
