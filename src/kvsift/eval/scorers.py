"""The official scorers: 0 to 1 for one prediction against its references, by name.

A prediction is the text as it was generated: each scorer cuts and cleans it as the benchmark it comes from does. A data
set's score is 100 times the mean over its questions, see ``dataset_score``.

RULER's are those of its ``scripts/eval/evaluate.py`` and ``scripts/eval/synthetic/constants.py`` (NVIDIA/RULER).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from kvsift.engine.prompt import exact_match
from kvsift.errors import InputError, unknown
from kvsift.eval import scorers_infinitebench as infinitebench
from kvsift.eval import scorers_longbench as longbench

Scorer = Callable[[str, Sequence[str]], float]

_CONTROL = re.compile(r"[\x00-\x1f]")


def exact(prediction: str, references: Sequence[str]) -> float:
    """1 if the first line of the prediction is one of the references; case, spacing and a final stop do not count."""
    return float(any(exact_match(prediction, reference) for reference in references))


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """RULER, all tasks but question answering: the share of references found in the prediction, case ignored."""
    found = _found(prediction, references)
    return sum(found) / len(found)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """RULER, question answering: 1 if any reference is found in the prediction, case ignored."""
    return float(any(_found(prediction, references)))


def cleaned(prediction: str) -> str:
    """RULER's post-processing: control characters, tabs among them, become newlines; outer space goes.

    A control character inside a word or a name so breaks it in two; it is not dropped.
    """
    return _CONTROL.sub("\n", prediction.strip()).strip()


def _found(prediction: str, references: Sequence[str]) -> list[bool]:
    text = cleaned(prediction).lower()
    return [reference.lower() in text for reference in references]


SCORERS: dict[str, Scorer] = {
    "exact": exact,
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    **longbench.SCORERS,
    **infinitebench.SCORERS,
}


def score(name: str, prediction: str, references: Sequence[str]) -> float:
    """The score of one prediction, 0 to 1.

    Raises:
        InputError: for a scorer that does not exist, or without references.
    """
    if name not in SCORERS:
        raise unknown("scorer", name, SCORERS)
    if not references:
        raise InputError(f"the scorer {name} needs at least one reference.")
    return SCORERS[name](prediction, references)


def dataset_score(scores: Sequence[float]) -> float:
    """100 times the mean, to two places: how RULER and LongBench publish a data set."""
    if not scores:
        raise InputError("no scores: a data set's score is a mean over at least one question.")
    return round(100 * sum(scores) / len(scores), 2)
