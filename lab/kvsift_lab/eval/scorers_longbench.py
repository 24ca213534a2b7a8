"""LongBench's scorers (THUDM/LongBench, ``LongBench/metrics.py`` and ``eval.py``): the best over the references; and
ROUGE-L.

Four of its data sets keep only the first line of a prediction: trec, triviaqa, samsum, lsht. Chinese text is cut into
words by jieba, which is installed apart.

``rouge_l`` is that of the PyPI package ``rouge`` 1.0, which LongBench uses.

    overlap = |union over sentence pairs of the words of their longest common subsequence|
    P = overlap / |words of the prediction|,  R = overlap / |words of the reference|,  F = 2 P R / (P + R + 1e-8)

Sentences end at a full stop, words at a space, and all three counts are of *distinct* words. The choice among equally
long subsequences is the package's too. Unlike the package, this one has no limit of recursion: the package fails, and
LongBench scores 0, if two sentences have about a thousand words together.

``rapidfuzz`` gives neither of the published numbers. Of equally long subsequences its ``LCSseq`` keeps other words, in
377 of 5,000 random pairs even when both are reversed, which changes the union. Its ``ratio`` is not difflib's, which
``code_sim`` needs: 1,374 of 5,000 random lines of code score differently. ``rouge-score`` has no ROUGE-L of distinct
words; the ROUGE-Lsum of InfiniteBench is its own (own code had the same score for 5,000 random pairs of texts).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from kvsift.errors import MissingPackage, WrongFile


def rouge_l(prediction: str, reference: str) -> float:
    """Return F of the union of longest common subsequences; 0 if a side has no sentence."""
    predicted, references = _sentences(prediction), _sentences(reference)
    if not predicted or not references:
        return 0.0
    overlap: set[str] = set()
    for one in references:
        for other in predicted:
            overlap.update(one[index] for index in common_indices(one, other))
    precision = len(overlap) / len({word for sentence in predicted for word in sentence})
    recall = len(overlap) / len({word for sentence in references for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _lengths(first: list[str], second: list[str]) -> list[list[int]]:
    """Return the lengths of the longest common subsequences of all pairs of prefixes."""
    table = [[0] * (len(second) + 1)]
    for word in first:
        above, row = table[-1], [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        table.append(row)
    return table


def common_indices(first: list[str], second: list[str]) -> set[int]:
    """Return the indices in ``first`` of a longest common subsequence; of several, the one that keeps its end."""
    table, indices, i, j = _lengths(first, second), set(), len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            indices.add(i)
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return indices


def _sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence; a sentence of space has one empty word, as in the package."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


Single = Callable[[str, str], float]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"\d+")
# What LongBench counts as Chinese punctuation, as ranges of code points: general, CJK and full-width marks.
_CHINESE_RANGES = """2013-2014 2018-2019 201b-201f 2026-2027 3001-3003 300b-3011 3014-301f 3030-3030 303e-303f fe4f-fe4f
ff01-ff0d ff0f-ff0f ff1a-ff20 ff3b-ff40 ff5b-ff64"""
_BOUNDS = [tuple(int(bound, 16) for bound in bounds.split("-")) for bounds in _CHINESE_RANGES.split()]
_CHINESE_MARKS = "".join(chr(point) for first, last in _BOUNDS for point in range(first, last + 1))
_NO_MARKS = str.maketrans("", "", string.punctuation)
_NO_CHINESE_MARKS = str.maketrans("", "", string.punctuation + _CHINESE_MARKS)


def first_line(prediction: str) -> str:
    """Return the first line after leading newlines (a space is not skipped), which few-shot data sets score."""
    return prediction.lstrip("\n").split("\n", 1)[0]


def f1(predicted: Sequence[str], reference: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of two bags of tokens."""
    same = sum((Counter(predicted) & Counter(reference)).values())
    if not same:
        return 0.0
    precision, recall = same / len(predicted), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def plain_words(text: str) -> list[str]:
    """Return SQuAD's normal form: words in lower case without ASCII punctuation and the articles a, an, the."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_MARKS)).split()


def plain_characters(text: str) -> str:
    """Return the Chinese normal form: lower case, ASCII and Chinese punctuation and all space removed."""
    return "".join(text.lower().translate(_NO_CHINESE_MARKS).split())


def qa_f1(prediction: str, reference: str) -> float:
    """Return the F1 of words."""
    return f1(plain_words(prediction), plain_words(reference))


def qa_f1_zh(prediction: str, reference: str) -> float:
    """Return the F1 of jieba's words without punctuation."""
    words = [[word for word in map(plain_characters, _segmented(text)) if word] for text in (prediction, reference)]
    return f1(*words)


def rouge_l_zh(prediction: str, reference: str) -> float:
    """Return ROUGE-L over jieba's words."""
    return rouge_l(" ".join(_segmented(prediction)), " ".join(_segmented(reference)))


def share_of_numbers(prediction: str, number: str) -> float:
    """Return the share of whole numbers in the prediction that equal ``number``, compared as text (07 is not 7)."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """Return ``share_of_numbers`` for the number of a reference such as "Paragraph 7"."""
    return share_of_numbers(prediction, _paragraph(reference, r"Paragraph (\d+)"))


def retrieval_zh(prediction: str, reference: str) -> float:
    return share_of_numbers(prediction, _paragraph(reference, r"段落(\d+)"))


def code_sim(prediction: str, reference: str) -> float:
    """Return the edit similarity of the first line without back-tick, ``#`` and ``//``, in whole hundredths.

    fuzzywuzzy's ``ratio`` without python-Levenshtein, as LongBench's requirements install it: difflib's ratio, rounded
    to a per cent; equal texts score 1, one empty text 0.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == reference:
        return 1.0
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100 if line and reference else 0.0


def classification(prediction: str, references: Sequence[str]) -> float:
    """Return 1 over the number of class names in the first line if the right one is among them.

    ``references`` are the answer and then all classes. Names that are part of the answer do not count. As in the
    published loop, which removes from the list that it iterates, the entry after each removed one is skipped.
    """
    answer, *classes = references
    line = first_line(prediction)
    named = [name for name in classes if name in line]
    index = 0
    while index < len(named):
        if named[index] in answer and named[index] != answer:
            named.remove(named[index])
        index += 1
    return 1 / len(named) if answer in named else 0.0


def _best(single: Single, first_line_only: bool = False) -> Callable[[str, Sequence[str]], float]:
    def best(prediction: str, references: Sequence[str]) -> float:
        text = first_line(prediction) if first_line_only else prediction
        return max(single(text, reference) for reference in references)

    return best


def _paragraph(reference: str, pattern: str) -> str:
    match = re.search(pattern, reference)
    if match is None:
        raise WrongFile(f"the reference {reference!r} names no paragraph; one like {pattern!r} is expected.")
    return match.group(1)


def _segmented(text: str) -> list[str]:
    try:
        import jieba
    except ImportError:
        raise MissingPackage("scorers of Chinese text need jieba, which is not installed: pip install jieba.") from None
    return list(jieba.cut(text, cut_all=False))


LONGBENCH: dict[str, Callable[[str, Sequence[str]], float]] = {
    "qa_f1": _best(qa_f1),
    "qa_f1_first_line": _best(qa_f1, first_line_only=True),
    "qa_f1_zh": _best(qa_f1_zh),
    "rouge_l": _best(rouge_l),
    "rouge_l_first_line": _best(rouge_l, first_line_only=True),
    "rouge_l_zh": _best(rouge_l_zh),
    "classification": classification,
    "retrieval": _best(retrieval),
    "retrieval_zh": _best(retrieval_zh),
    "count": _best(share_of_numbers),
    "code_sim": _best(code_sim),
}
