"""RULER's qa tasks from the files they are made of: SQuAD 2.0 and HotpotQA (distractor), as their authors publish them.

SQuAD: {"data": [{"paragraphs": [{"context", "qas": [{"question", "is_impossible", "answers": [{"text"}]}]}]}]};
distractors are the article's other paragraphs, then any. HotpotQA: [{"question", "answer", "context": [[title,
[sentences]], ...]}]; all ten documents of the question are there. Facts from NVIDIA/RULER, ``data/synthetic/qa.py``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsift.errors import InputError
from kvsift.eval.loaders.fitting import Fitting
from kvsift.eval.tasks.ruler_qa import write_sample
from kvsift.eval.tasks.sample import Request, Sample


@dataclass(frozen=True)
class Item:
    """A question, the documents it needs, and those that are nearest to them."""

    question: str
    answers: tuple[str, ...]
    wanted: tuple[str, ...]
    near: tuple[str, ...] = ()


def load_squad(path: Path, fitting: Fitting) -> Iterator[Sample]:
    return _samples("qa_1", _parsed(path, _squad_items), fitting)


def load_hotpotqa(path: Path, fitting: Fitting) -> Iterator[Sample]:
    return _samples("qa_2", _parsed(path, _hotpot_items), fitting)


def _samples(task: str, items: list[Item], fitting: Fitting) -> Iterator[Sample]:
    documents = sorted({document for item in items for document in (*item.wanted, *item.near)})
    for index, item in enumerate(items):
        rng = random.Random(f"{task}:{fitting.length}:{index}")
        request = Request(rng, fitting.length, 1, fitting.encode, fitting.prefix)
        others = _others(rng, item, documents)
        yield write_sample(task, request, item.wanted, others, item.question, item.answers)


def _others(rng: random.Random, item: Item, documents: Sequence[str]) -> Iterator[str]:
    """The near ones, then all others, both in random order; again from the start when there are no more."""
    near = rng.sample(item.near, len(item.near))
    far = [document for document in documents if document not in (*item.wanted, *item.near)]
    if not near and not far:
        raise InputError("the file has no document beside those of one question; distractors are needed.")
    while True:
        yield from near
        yield from rng.sample(far, len(far))


def _squad_items(data: Any) -> Iterator[Item]:
    for article in data["data"]:
        paragraphs = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            near = tuple(dict.fromkeys(each for each in paragraphs if each != paragraph["context"]))
            for asked in paragraph["qas"]:
                if not asked.get("is_impossible"):
                    answers = tuple(answer["text"] for answer in asked["answers"])
                    yield Item(asked["question"], answers, (paragraph["context"],), near)


def _hotpot_items(data: Any) -> Iterator[Item]:
    for asked in data:
        documents = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"])
        yield Item(asked["question"], (asked["answer"],), documents)


def _parsed(path: Path, items: Callable[[Any], Iterator[Item]]) -> list[Item]:
    try:
        return list(items(json.loads(path.read_text(encoding="utf-8-sig"))))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}.") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not in the published format: {type(error).__name__} at {error}.") from None
