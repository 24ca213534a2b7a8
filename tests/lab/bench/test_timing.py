"""Statistics of samples, and the order in which they are taken."""

import pytest
from kvsift_lab.bench.attention import break_even
from kvsift_lab.bench.timing import WARM_UP_ROUNDS, Timer, interleaved
from kvsift_lab.numbers import spread, tokens

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


@pytest.mark.parametrize(("number", "text"), [(1 << 20, "1M"), (131072, "128K"), (1536, "1,536"), (96, "96")])
def test_lengths_are_written_short(number: int, text: str) -> None:
    assert tokens(number) == text


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert spread([1.0]) == 0


def test_every_round_meets_every_variant_and_begins_with_another() -> None:
    called: list[str] = []

    def timer(name: str) -> Timer:
        return lambda: called.append(name) or float(len(called))  # type: ignore[func-returns-value]

    samples = interleaved({name: timer(name) for name in "abc"}, repeats=3)
    rounds = ["".join(called[start : start + 3]) for start in range(0, len(called), 3)]
    assert rounds == ["abc"] * WARM_UP_ROUNDS + ["abc", "bca", "cab"]
    assert samples == {"a": [7.0, 12.0, 14.0], "b": [8.0, 10.0, 15.0], "c": [9.0, 11.0, 13.0]}
