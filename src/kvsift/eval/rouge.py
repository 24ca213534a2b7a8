"""ROUGE-L of whole summaries as the PyPI package ``rouge`` 1.0 computes it, which LongBench uses.

    overlap = |union over sentence pairs of the words of their longest common subsequence|
    P = overlap / |words of the prediction|,  R = overlap / |words of the reference|,  F = 2 P R / (P + R + 1e-8)

Sentences end at a full stop, words at a space, and all three counts are of *distinct* words. Which of several equally
long subsequences counts is the package's choice too. Unlike it, this one has no limit of recursion: the package gives
up, and LongBench scores 0, when two sentences have about a thousand words together.
"""

from __future__ import annotations


def rouge_l(prediction: str, reference: str) -> float:
    """F of the union of longest common subsequences; 0 when either side has no sentence."""
    predicted, wanted = _sentences(prediction), _sentences(reference)
    if not predicted or not wanted:
        return 0.0
    overlap: set[str] = set()
    for one in wanted:
        for other in predicted:
            overlap.update(common_words(one, other))
    precision = len(overlap) / len({word for sentence in predicted for word in sentence})
    recall = len(overlap) / len({word for sentence in wanted for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def common_words(first: list[str], second: list[str]) -> set[str]:
    """The words of a longest common subsequence; of equally long ones, that which keeps the end of ``first``."""
    table = [[0] * (len(second) + 1)]
    for word in first:
        above, row = table[-1], [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        table.append(row)
    found, i, j = set(), len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            found.add(first[i])
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def _sentences(text: str) -> list[list[str]]:
    """Words of each sentence; a sentence of space alone has one word, the empty one, as in the package."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]
