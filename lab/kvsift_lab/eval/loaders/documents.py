"""Loaders of documents: RULER's qa tasks from SQuAD 2.0 and HotpotQA (distractor), and books of PG19, as published.

SQuAD: {"data": [{"paragraphs": [{"context", "qas": [{"question", "is_impossible", "answers": [{"text"}]}]}]}]};
distractors are the other paragraphs of the article, then any paragraph. HotpotQA: [{"question", "answer", "context":
[[title, [sentences]], ...]}], with all ten documents of the question. Facts from NVIDIA/RULER (``qa.py``).

PG19 and other texts: a directory of books, one .txt each; the perplexity of the tokens after the beginning of a book.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from kvsift.errors import TooShort, UnreadableFile, WrongFile
from kvsift_lab.eval.loaders.reading import ContextFitter
from kvsift_lab.eval.sample import Sample, SampleRequest
from kvsift_lab.eval.tasks.perplexity import continued
from kvsift_lab.eval.tasks.ruler_qa import write_sample


@dataclass(frozen=True)
class QuestionItem:
    """A question, the documents that answer it, and the distractors closest to them."""

    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    distractors: tuple[str, ...] = ()


def load_squad(path: Path, fitting: ContextFitter) -> Iterator[Sample]:
    return _samples("qa_1", _parsed(path, _squad_items), fitting)


def load_hotpotqa(path: Path, fitting: ContextFitter) -> Iterator[Sample]:
    return _samples("qa_2", _parsed(path, _hotpot_items), fitting)


def _samples(task: str, items: list[QuestionItem], fitting: ContextFitter) -> Iterator[Sample]:
    documents = sorted({document for item in items for document in (*item.documents, *item.distractors)})
    for index, item in enumerate(items):
        rng = random.Random(f"{task}:{fitting.length}:{index}")
        request = SampleRequest(rng, fitting.length, 1, fitting.encode, fitting.prefix)
        others = _others(rng, item, documents)
        yield write_sample(task, request, item.documents, others, item.question, item.answers)


def _others(rng: random.Random, item: QuestionItem, documents: Sequence[str]) -> Iterator[str]:
    """Yield the distractors of the question, then all other documents, each in random order, without end."""
    close = rng.sample(item.distractors, len(item.distractors))
    rest = [document for document in documents if document not in (*item.documents, *item.distractors)]
    if not close and not rest:
        raise WrongFile("the file has only the documents of one question; distractors are needed.")
    while True:
        yield from close
        yield from rng.sample(rest, len(rest))


def _squad_items(data: Any) -> Iterator[QuestionItem]:
    for article in data["data"]:
        paragraphs = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            others = tuple(dict.fromkeys(text for text in paragraphs if text != paragraph["context"]))
            for question in paragraph["qas"]:
                if not question.get("is_impossible"):
                    answers = tuple(answer["text"] for answer in question["answers"])
                    yield QuestionItem(question["question"], answers, (paragraph["context"],), others)


def _hotpot_items(data: Any) -> Iterator[QuestionItem]:
    for item in data:
        documents = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in item["context"])
        yield QuestionItem(item["question"], (item["answer"],), documents)


def _parsed(path: Path, items: Callable[[Any], Iterator[QuestionItem]]) -> list[QuestionItem]:
    try:
        return list(items(json.loads(path.read_text(encoding="utf-8-sig"))))
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableFile(f"{path} cannot be read as JSON: {error}.") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise WrongFile(f"{path} is not in the published format: {type(error).__name__} at {error}.") from None


_SPARE = 8  # cutting a line may change the number of tokens


def load_texts(path: Path, fitting: ContextFitter) -> Iterator[Sample]:
    books = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    return (_book_sample(book, fitting) for book in books)


def _book_sample(book: Path, fitting: ContextFitter) -> Sample:
    """Return a context whose targets end at the length of the fitter; the notes name a shorter book."""
    try:
        lines = book.read_text(encoding="utf-8-sig").lstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableFile(f"{book} cannot be read as UTF-8 text: {error}.") from None
    targets, notes = fitting.targets, tuple[str, ...]()
    length = fitting.length - targets
    available = _num_tokens(lines, fitting, fitting.length + _SPARE) - _SPARE - targets
    if available < length:
        length, notes = available, (f"the book has about {available + targets} tokens only",)
    if length <= len(fitting.prefix):
        raise TooShort(f"{book} or max_tokens is too short: {targets} tokens are predicted, others come before them.")
    request = SampleRequest(random.Random(0), length, 1, fitting.encode, fitting.prefix)
    return replace(continued("texts", request, _pieces(lines), targets), notes=notes)


def _pieces(lines: list[str]) -> Iterator[str]:
    return chain(lines[:1], (f"\n{line}" for line in islice(lines, 1, None)))


def _num_tokens(lines: list[str], fitting: ContextFitter, enough: int) -> int:
    """Count the tokens of a book, up to ``enough``."""
    count = len(fitting.prefix)
    for piece in _pieces(lines):
        count += len(fitting.encode(piece))
        if count >= enough:
            break
    return count
