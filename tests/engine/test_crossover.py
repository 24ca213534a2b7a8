"""The length from which on skipping pays, from two lengths and straight lines."""

from __future__ import annotations

import pytest

from kvsift.engine.graphs.crossover import NEVER, crossover_length
from kvsift.engine.graphs.session import round_up


@pytest.mark.parametrize(
    ("dense", "sparse", "length"),
    [
        ((1.0, 4.0), (2.0, 2.0), 2000),  # dense grows by 1 per 1000 tokens, sparse does not
        ((1.0, 4.0), (2.0, 2.3), 1000 + round(1000 / 0.9)),
        ((1.0, 4.0), (0.2, 0.2), 200),
        ((4.0, 13.0), (0.5, 0.5), 0),
        ((1.0, 1.0), (2.0, 2.0), NEVER),
        ((1.0, 1.0), (0.5, 0.5), 0),
        ((1.0, 2.0), (2.0, 4.0), NEVER),
    ],
)
def test_lines_meet_where_they_meet(dense: tuple[float, float], sparse: tuple[float, float], length: int) -> None:
    assert crossover_length({1000: (dense[0], sparse[0]), 4000: (dense[1], sparse[1])}) == length
    assert crossover_length({4000: (dense[1], sparse[1]), 1000: (dense[0], sparse[0])}) == length


def test_capacities_come_in_few_sizes_and_waste_little() -> None:
    sizes = {pages: round_up(pages) for pages in range(1, 20_000)}
    assert all(pages <= size <= max(pages * 17 / 16, pages + 8) for pages, size in sizes.items())
    assert len({size for pages, size in sizes.items() if 8192 < pages <= 16384}) == 16
    assert round_up(8192 + 4) == 8192 + 512
