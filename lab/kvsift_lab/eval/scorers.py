"""The official scorers by name: 0 to 1 for one prediction against its references.

A prediction is the generated text: each scorer cuts and cleans it as its benchmark does. The score of a data set is 100
times the mean over its questions, see ``dataset_score``.

RULER's are those of its ``scripts/eval/evaluate.py`` and ``scripts/eval/synthetic/constants.py`` (NVIDIA/RULER).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from kvsift.engine.prompt import exact_match
from kvsift.errors import InputError, unknown
from kvsift_lab.eval import scorers_infinitebench as infinitebench
from kvsift_lab.eval import scorers_longbench as longbench

Scorer = Callable[[str, Sequence[str]], float]

_CONTROL = re.compile(r"[\x00-\x1f]")


def exact(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if the first line is one of the references, ignoring case, spacing and a final stop."""
    return float(any(exact_match(prediction, reference) for reference in references))


def contains(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if one of the references is in the text as whole words, ignoring case and spacing: ``exact`` for chat
    models, which write sentences. Values joined by commas may have other words between them, in their order."""
    text = " ".join(prediction.casefold().split())
    return float(any(re.search(_pattern(reference), text) for reference in references))


def _pattern(reference: str) -> str:
    values = [" ".join(value.split()) for value in reference.casefold().strip().removesuffix(".").split(", ")]
    return r"(?<!\w)" + r"(?!\w).*?(?<!\w)".join(map(re.escape, values)) + r"(?!\w)"


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """RULER without question answering: return the share of references in the prediction, ignoring case."""
    hits = _hits(prediction, references)
    return sum(hits) / len(hits)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """RULER, question answering: return 1 if any reference is in the prediction, ignoring case."""
    return float(any(_hits(prediction, references)))


def cleaned(prediction: str) -> str:
    """RULER's post-processing: replace control characters, tabs included, by newlines, and strip outer space.

    A control character inside a word therefore splits it.
    """
    return _CONTROL.sub("\n", prediction.strip()).strip()


def _hits(prediction: str, references: Sequence[str]) -> list[bool]:
    text = cleaned(prediction).lower()
    return [reference.lower() in text for reference in references]


SCORERS: dict[str, Scorer] = {
    "exact": exact,
    "contains": contains,
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    **longbench.SCORERS,
    **infinitebench.SCORERS,
}


def score(name: str, prediction: str, references: Sequence[str]) -> float:
    """Return the score of one prediction, 0 to 1.

    Raises:
        InputError: for an unknown scorer, or without references.
    """
    if name not in SCORERS:
        raise unknown("scorer", name, SCORERS)
    if not references:
        raise InputError(f"the scorer {name} needs at least one reference.")
    return SCORERS[name](prediction, references)


def dataset_score(scores: Sequence[float]) -> float:
    """Return 100 times the mean, to two places, as RULER and LongBench publish it."""
    if not scores:
        raise InputError("no scores: a data set's score is a mean over at least one question.")
    return round(100 * sum(scores) / len(scores), 2)
