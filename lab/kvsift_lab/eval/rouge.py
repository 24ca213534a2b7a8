"""ROUGE-L of whole summaries, as two benchmarks compute it.

``rouge_l`` is that of the PyPI package ``rouge`` 1.0, which LongBench uses.

    overlap = |union over sentence pairs of the words of their longest common subsequence|
    P = overlap / |words of the prediction|,  R = overlap / |words of the reference|,  F = 2 P R / (P + R + 1e-8)

Sentences end at a full stop, words at a space, and all three counts are of *distinct* words. The choice among equally
long subsequences is the package's too. Unlike the package, this one has no limit of recursion: the package fails, and
LongBench scores 0, if two sentences have about a thousand words together.

``rouge_lsum`` is that of the PyPI package ``rouge_score``, which InfiniteBench uses without stemming: sentences are
lines, words are runs of a-z and 0-9 in lower case, and a word may be hit as often as it occurs on either side.

    hits = words of the reference that are in the union of its lines' longest common subsequences with the prediction's
    P = hits / words of the prediction,  R = hits / words of the reference,  F = 2 P R / (P + R)
"""

from __future__ import annotations

import re
from collections import Counter

_WORD = re.compile(r"[a-z0-9]+")


def rouge_l(prediction: str, reference: str) -> float:
    """Return F of the union of longest common subsequences; 0 if a side has no sentence."""
    predicted, references = _sentences(prediction), _sentences(reference)
    if not predicted or not references:
        return 0.0
    overlap: set[str] = set()
    for one in references:
        for other in predicted:
            overlap.update(common_words(one, other))
    precision = len(overlap) / len({word for sentence in predicted for word in sentence})
    recall = len(overlap) / len({word for sentence in references for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_lsum(prediction: str, reference: str) -> float:
    """Return F of the union of longest common subsequences by lines; 0 if a side has no word."""
    predicted, references = _lines(prediction), _lines(reference)
    ours, theirs = (Counter(word for line in lines for word in line) for lines in (predicted, references))
    if not ours or not theirs:
        return 0.0
    num_words, hits = ours.total() + theirs.total(), 0
    for line in references:
        shared = set().union(*(_common_indices(line, other) for other in predicted))
        for word in (line[index] for index in sorted(shared)):
            if ours[word] and theirs[word]:
                hits, ours[word], theirs[word] = hits + 1, ours[word] - 1, theirs[word] - 1
    return 2 * hits / num_words


def _lines(text: str) -> list[list[str]]:
    return [_WORD.findall(line.lower()) for line in text.split("\n") if line]


def _common_indices(first: list[str], second: list[str]) -> set[int]:
    """Return the indices in ``first`` of a longest common subsequence; of several, the last in ``second``."""
    table, indices, i, j = _lengths(first, second), set(), len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            indices.add(i)
        elif table[i][j - 1] > table[i - 1][j]:
            j -= 1
        else:
            i -= 1
    return indices


def _lengths(first: list[str], second: list[str]) -> list[list[int]]:
    """Return the lengths of the longest common subsequences of all pairs of prefixes."""
    table = [[0] * (len(second) + 1)]
    for word in first:
        above, row = table[-1], [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        table.append(row)
    return table


def common_words(first: list[str], second: list[str]) -> set[str]:
    """Return the words of a longest common subsequence; of several, the one that keeps the end of ``first``."""
    table = _lengths(first, second)
    words, i, j = set(), len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            words.add(first[i])
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


def _sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence; a sentence of space has one empty word, as in the package."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]
