"""The official scorers by name: 0 to 1 for one prediction against its references.

A prediction is the generated text: each scorer cuts and cleans it as its benchmark does. The score of a data set is 100
times the mean over its questions.

RULER's are those of its ``scripts/eval/evaluate.py`` and ``scripts/eval/synthetic/constants.py`` (NVIDIA/RULER),
InfiniteBench's those of ``src/compute_scores.py`` (OpenBMB/InfiniteBench) for models in general.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from kvsift.errors import MissingInput, unknown
from kvsift.tokenization.prompt import STOP
from kvsift_lab.eval.scorers_longbench import LONGBENCH, f1, plain_characters

Scorer = Callable[[str, Sequence[str]], float]

_CONTROL = re.compile(r"[\x00-\x1f]")


def parse_answer(generated: str) -> str:
    """Return the answer in generated text: its first non-empty line, without surrounding space."""
    return generated.strip().split(STOP, 1)[0].strip()


def exact_match(generated: str, answer: str) -> bool:
    """Whether the generated answer equals the expected one, apart from case, inner spacing and one final full stop."""
    return plain_line(parse_answer(generated)) == plain_line(answer)


def plain_line(answer: str) -> str:
    return " ".join(answer.casefold().split()).removesuffix(".")


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


_FIRST_DIGITS = re.compile(r"[0-9]+")
_FIRST_NUMBER = re.compile(r"\d+\.\d+|\d+")
_MARKS = str.maketrans(dict.fromkeys("\n:\"'.,?!{}", " "))
_DEBUG_CUES = ("answer is:", "is:", "answer:", "correct option is:")
_CHOICE_CUES = ("answer is:", "answer:", "answer is", "option is")


def first_number(prediction: str, references: Sequence[str]) -> float:
    """passkey, number_string: the first run of digits is the (first) reference, as text."""
    match = _FIRST_DIGITS.search(prediction)
    return float((match.group() if match else "") == references[0])


def word_match(prediction: str, references: Sequence[str]) -> float:
    """kv_retrieval: a reference is one of the words; quotes, braces and sentence marks are spaces."""
    words = prediction.translate(_MARKS).split()
    return float(any(reference in words for reference in references))


def math_find(prediction: str, references: Sequence[str]) -> float:
    """math_find: the first number equals the reference; signs are ignored, as published.

    The published code fails if the reference is whole and the number is not; the score is 0 here.
    """
    match, reference = _FIRST_NUMBER.search(prediction), references[0]
    if match is None or ("." in match.group() and "." not in reference):
        return 0.0
    return float(float(match.group()) == float(reference))


def math_calc(prediction: str, references: Sequence[str]) -> float:
    """math_calc: the share of references that the numbers of the prediction repeat before the first difference.

    Numbers are runs of digits of any length; signs are ignored, so a negative reference never matches.
    """
    right = 0
    for match, reference in zip(_FIRST_DIGITS.finditer(prediction), references):
        if match.group().lstrip("0") != reference.lstrip("0"):
            break
        right += 1
    return right / len(references)


def summary(prediction: str, references: Sequence[str]) -> float:
    """longbook_sum_eng: ROUGE-Lsum of ``rouge-score`` without stemming, as published, against the (first) reference."""
    from rouge_score.rouge_scorer import RougeScorer  # imports NLTK

    found = RougeScorer(["rougeLsum"]).score(references[0], prediction)
    return float(found["rougeLsum"].fmeasure)


def code_debug(prediction: str, references: Sequence[str]) -> float:
    """code_debug: ``references`` are the function's name and its letter.

    Right if the prediction begins with the letter and "." or ":"; otherwise the letter or the name must follow the
    first cue in the text after one character.
    """
    name, letter = references
    text = prediction.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = re.sub(" {2,}", " ", re.sub("[\n`'\"*-]|[Oo]ption", " ", text))
    return float(_after_cue(text, _DEBUG_CUES).startswith((letter, name)))


def code_run(prediction: str, references: Sequence[str]) -> float:
    """code_run: the last word is the reference, a whole number; back-ticks, quotes, stops and colons are spaces."""
    words = re.sub("[\n.`'\":]", " ", prediction.strip()).split()
    try:
        return float(bool(words) and int(words[-1]) == int(references[0]))
    except ValueError:
        return 0.0


def choice(prediction: str, references: Sequence[str]) -> float:
    """longbook_choice_eng: ``references`` are the option's text and its letter; the first letter decides if A to D."""
    text = prediction.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in references)
    if text in references:
        return 1.0
    text = re.sub(" {2,}", " ", re.sub("[\n\"'.,?!{}]", " ", text))
    if any(cue in text for cue in _CHOICE_CUES):
        return float(_after_cue(text, _CHOICE_CUES).startswith(tuple(references)))
    return float(next((word in references for word in text.split() if word in "ABCD"), False))


def speaker(prediction: str, references: Sequence[str]) -> float:
    """longdialogue_qa_eng: the reference, in capitals already, is one of the words."""
    return float(references[0] in [word.upper() for word in prediction.strip().translate(_MARKS).split()])


def qa_f1_characters(prediction: str, references: Sequence[str]) -> float:
    """longbook_qa_chn: F1 of characters, punctuation and space removed; the best over the references."""
    predicted = plain_characters(prediction)
    return max(f1(predicted, plain_characters(reference)) for reference in references)


def _after_cue(text: str, cues: Sequence[str]) -> str:
    """Return the text from one character after the first cue of the list that occurs; empty without a cue."""
    for cue in cues:
        if cue in text:
            return text.partition(cue)[2][1:]
    return ""


INFINITEBENCH: dict[str, Scorer] = {
    "first_number": first_number,
    "word_match": word_match,
    "math_find": math_find,
    "math_calc": math_calc,
    "summary": summary,
    "code_debug": code_debug,
    "code_run": code_run,
    "choice": choice,
    "speaker": speaker,
    "qa_f1_characters": qa_f1_characters,
}


SCORERS: dict[str, Scorer] = {
    "exact": exact,
    "contains": contains,
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    **LONGBENCH,
    **INFINITEBENCH,
}


def score(name: str, prediction: str, references: Sequence[str]) -> float:
    """Return the score of one prediction, 0 to 1.

    Raises:
        InputError: for an unknown scorer, or without references.
    """
    if name not in SCORERS:
        raise unknown("scorer", name, SCORERS)
    if not references:
        raise MissingInput(f"the scorer {name} needs at least one reference.")
    return SCORERS[name](prediction, references)
