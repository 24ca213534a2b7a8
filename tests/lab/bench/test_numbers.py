"""The length from which sparse is faster for good."""

from __future__ import annotations

import pytest
from kvsift_lab.bench.numbers import break_even

CONTEXTS = [1000, 2000, 4000]


@pytest.mark.parametrize(
    ("dense", "sparse", "expected"),
    [
        ([1.0, 2.0, 4.0], [1.5, 1.5, 1.5], 1500.0),  # half way between 1000 and 2000
        ([1.0, 2.0, 4.0], [3.0, 3.0, 3.0], 3000.0),
        ([1.0, 2.0, 4.0], [0.5, 0.5, 0.5], 0.0),  # always faster
        ([1.0, 2.0, 4.0], [5.0, 5.0, 5.0], None),  # never
        ([1.0, 2.0, 4.0], [1.0, 1.0, 1.0], 1000.0),  # a tie is no gain
        ([2.0, 2.0, 4.0], [1.0, 3.0, 3.0], 3000.0),  # faster, slower, faster: for good counts
        ([1.0, 2.0, 2.0], [0.5, 0.5, 2.0], None),  # no gain at the longest
    ],
)
def test_lines_between_neighbouring_contexts_say_where(
    dense: list[float], sparse: list[float], expected: float | None
) -> None:
    assert break_even(CONTEXTS, dense, sparse) == expected


def test_nothing_measured_breaks_even_nowhere() -> None:
    assert break_even([], [], []) is None
