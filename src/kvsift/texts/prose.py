"""Long English text for haystacks from CPython: the language reference and the docstrings of the library.

The text is read from the running interpreter, so it depends on the version of Python.
"""

import ast
import random
import re
import sysconfig
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

# Filler of our own wording, for haystacks that repeat (as RULER's noise does).
NOISE = (
    "The river runs past the mill and the mill stands still.",
    "Morning comes, the light is clear, and nothing has changed.",
    "A cart goes up the hill; the same cart comes down again.",
    "The rain has stopped and the road is dry.",
    "Someone sweeps the yard, and the wind sweeps it after them.",
    "Clouds drift over the field. The field is wide. The clouds drift on.",
    "The bell rings at noon, and at noon the bell rings.",
    "Bread is on the table and the door is open.",
    "There and back is the same distance, whichever way you walk.",
    "The lamp is lit in the evening and put out at night.",
)

_PLAIN = re.compile(r"[A-Za-z0-9_ ,.;:'!?()/%+=-]+")
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z])")
# Tests have few docstrings, idlelib and lib2to3 generated tables; site-packages is not CPython's.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "idlelib", "__pycache__"}


@lru_cache(maxsize=1)
def paragraphs() -> tuple[str, ...]:
    """Return all distinct plain paragraphs: the language reference, then docstrings by file name."""
    from pydoc_data.topics import topics

    distinct = dict.fromkeys(p for name in sorted(topics) for p in plain_paragraphs(topics[name]))
    distinct.update(dict.fromkeys(p for block in _docstrings() for p in plain_paragraphs(block)))
    return tuple(distinct)


@lru_cache(maxsize=1)
def sentences() -> tuple[tuple[str, ...], ...]:
    """Return the sentences of every paragraph."""
    return tuple(tuple(_SENTENCE_END.split(paragraph)) for paragraph in paragraphs())


def plain_paragraphs(block: str) -> Iterator[str]:
    """Yield the English paragraphs of a block of reStructuredText, on one line each, without markup."""
    for raw in re.split(r"\n\s*\n", block):
        text = " ".join(re.sub(r"[*`\"|]|:[a-z]+:(?=`)", "", raw).split())
        is_prose = text[:1].isupper() and text[-1:] in ".!?" and text.count(" ") >= 9
        if is_prose and _PLAIN.fullmatch(text) and ">>>" not in raw and " - " not in text and " = " not in text:
            yield text


def prose(rng: random.Random) -> Iterator[str]:
    """Yield endless prose from a random paragraph on, sentence by sentence, each with its separator in front."""
    texts = sentences()
    index = rng.randrange(len(texts))
    while True:
        first, *others = texts[index % len(texts)]
        yield "\n\n" + first
        for sentence in others:
            yield " " + sentence
        index += 1


def noise(rng: random.Random) -> Iterator[str]:
    """Yield a few sentences of noise in the same order again and again, each with a space in front."""
    chosen = rng.sample(NOISE, rng.randint(3, 6))
    while True:
        for sentence in chosen:
            yield " " + sentence


def haystack(rng: random.Random) -> Iterator[str]:
    """Return noise for a quarter of the samples and prose for the others."""
    return noise(rng) if rng.random() < 0.25 else prose(rng)


def document(facts: Sequence[str], depths: Sequence[float], num_tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Return an English document of at least ``num_tokens`` tokens with each fact at its depth.

    Args:
        facts: whole sentences; each is placed between two sentences of the prose.
        depths: one per fact, 0 is the beginning of the document and 1 its end.
        num_tokens: the length; the last sentence may exceed it.
        count_tokens: tokens in a piece of text; pieces are counted one by one.
    """
    if len(facts) != len(depths) or any(not 0 <= depth <= 1 for depth in depths):
        raise ValueError(f"document needs one depth between 0 and 1 per fact; got {len(facts)} facts, depths {depths}")
    pending = sorted(zip(depths, facts), reverse=True)
    pieces: list[str] = []
    length, source = 0, prose(random.Random(0))
    while length < num_tokens or pending:
        is_due = bool(pending) and length >= pending[-1][0] * num_tokens
        pieces.append(" " + pending.pop()[1].strip() if is_due and pieces else next(source))
        length += count_tokens(pieces[-1])
    return "".join(pieces).strip()


def _docstrings() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            yield from _docstrings_of(path)


def _docstrings_of(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings(action="ignore"):  # old escapes in string literals
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, OSError):  # some distributions have templates that are not Python
        return
    nodes: deque[ast.AST] = deque([tree])  # in the order of ast.walk, which visits all expressions too
    while nodes:
        node = nodes.popleft()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        for block in ("body", "handlers", "orelse", "finalbody", "cases"):
            nodes.extend(getattr(node, block, ()))
