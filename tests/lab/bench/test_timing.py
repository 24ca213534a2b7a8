"""Samples are taken in turns."""

from __future__ import annotations

from kvsift_lab.bench.timing import WARM_UP_ROUNDS, Timer, host_clock, interleaved


def test_every_round_meets_every_variant_and_begins_with_another() -> None:
    called: list[str] = []

    def timer(name: str) -> Timer:
        return lambda: called.append(name) or float(len(called))  # type: ignore[func-returns-value]

    samples = interleaved({name: timer(name) for name in "abc"}, repeats=3)
    rounds = ["".join(called[start : start + 3]) for start in range(0, len(called), 3)]
    assert rounds == ["abc"] * WARM_UP_ROUNDS + ["abc", "bca", "cab"]
    assert samples == {"a": [7.0, 12.0, 14.0], "b": [8.0, 10.0, 15.0], "c": [9.0, 11.0, 13.0]}


def test_nothing_to_time_gives_no_samples() -> None:
    assert interleaved({}, repeats=3) == {}


def test_a_run_visits_every_set_of_buffers() -> None:
    visited: list[int] = []
    assert host_clock(visited.append, 4)() >= 0
    assert visited == [0, 1, 2, 3]
