"""What followed the last tokens when they occurred before."""

from hypothesis import given
from hypothesis import strategies as st

from kvsift.engine.speculative.repeats import LONGEST, PLACES, SHORTEST, Repeats


def expected(ids: list[int], most: int) -> tuple[int, list[int]]:
    """By comparison with every place."""
    found = []
    for place in range(SHORTEST, len(ids)):
        length = 0
        while length < min(LONGEST, place) and ids[place - 1 - length] == ids[-1 - length]:
            length += 1
        found.append((length, place))
    long = [each for each in found if each[0] >= SHORTEST][-PLACES:]
    if not long or most < 1:
        return 0, []
    length, place = max(long)
    return length, ids[place : place + most]


@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6),
    st.integers(0, 8),
)
def test_the_longest_of_the_latest_repeats_is_found(prompt: list[int], more: list[list[int]], most: int) -> None:
    repeats = Repeats(prompt)
    for part in more:
        repeats.extend(part)
    assert repeats.find(most) == expected([*prompt, *(token for part in more for token in part)], most)


def test_a_quotation_goes_on() -> None:
    repeats = Repeats([1, 2, 3, 4, 5, 6, 7, 8, 9])
    repeats.extend([3, 4, 5])
    assert repeats.find(3) == (3, [6, 7, 8])
    repeats.extend([6])
    assert repeats.find(9) == (4, [7, 8, 9, 3, 4, 5, 6])
