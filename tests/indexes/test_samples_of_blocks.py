"""Queries that are kept of a block: they depend on the block alone, whatever the chunks and roll-backs in reach."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsift.indexes.samples import BlockRecorder

BLOCK = 24


def positions(start: int, stop: int) -> Tensor:
    """Queries that say where they are."""
    return torch.arange(start, stop, dtype=torch.float32).view(1, -1, 1).expand(3, -1, 4)


def recorded(length: int, capacity: int, cuts: list[int] | None = None) -> BlockRecorder:
    recorder = BlockRecorder(BLOCK, capacity)
    for start, stop in pairwise(sorted({cut for cut in cuts or [] if cut < length} | {0, length})):
        recorder.observe(positions(start, stop), start, stop)
    return recorder


def kept(recorder: BlockRecorder, number: int) -> list[int] | None:
    samples = recorder.of_block(number)
    if samples is None:
        return None
    assert torch.equal(samples.queries[0, :, 0].long(), samples.positions)
    return samples.positions.tolist()


@given(st.integers(1, 150), st.integers(2, 30), st.lists(st.integers(1, 150), max_size=20))
def test_queries_of_a_block_do_not_depend_on_the_chunks(length: int, capacity: int, cuts: list[int]) -> None:
    newest = length // BLOCK - 1  # the newest complete block
    for number in range(max(newest, 0), newest + 1):
        found = kept(recorded(length, capacity, cuts), number)
        assert found is not None
        assert found == kept(recorded((number + 1) * BLOCK, capacity), number)
        assert len(found) <= capacity
        assert len(found) > capacity // 2 or len(found) == BLOCK, "room is left unused"
    assert kept(recorded(length, capacity, cuts), newest + 1) is None, "it is not complete"


@given(st.integers(2, 30), st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60), st.booleans()), max_size=9))
def test_a_roll_back_within_two_blocks_leaves_no_trace(capacity: int, steps: list[tuple[int, int, bool]]) -> None:
    recorder, at, newest = BlockRecorder(BLOCK, capacity), 0, 0
    for more, back, forks in steps:
        newest = max(newest, at)
        recorder.observe(positions(at, at + more), at, at + more)
        at = max(at + more - back, (newest // BLOCK - 1) * BLOCK, 0)
        other, recorder = (recorder, recorder.fork()) if forks else (recorder.fork(), recorder)
        recorder.crop(at)
        other.observe(-positions(other.length, other.length + 9), other.length, other.length + 9)
    stop = (at // BLOCK + 1) * BLOCK
    recorder.observe(positions(at, stop), at, stop)
    assert kept(recorder, at // BLOCK) == kept(recorded(stop, capacity), at // BLOCK)


def test_a_checkpoint_keeps_the_block_that_a_document_ends_in() -> None:
    recorder = recorded(30, 30)
    fresh = recorder.fork()
    recorder.checkpoint()
    for start in range(30, 200, 10):
        recorder.observe(positions(start, start + 10), start, start + 10)
        fresh.observe(positions(start, start + 10), start, start + 10)
    for each in (recorder, fresh):
        each.crop(30)
        each.observe(positions(30, 50), 30, 50)
    assert kept(recorder, 1) == list(range(24, 48))
    assert kept(fresh, 1) is None, "without it they are gone, and that is known"


def test_old_blocks_are_discarded_and_unknown_queries_are_no_sample() -> None:
    recorder = recorded(500, 30, list(range(0, 500, 5)))
    samples = recorder.take()
    assert len(samples.positions) <= 3 * BLOCK
    recorder = BlockRecorder(BLOCK, 30)
    recorder.observe(None, 0, 30)
    recorder.observe(positions(30, 100), 30, 100)
    assert [kept(recorder, number) is None for number in range(4)] == [True, True, False, False]
    recorder.crop(10)
    assert recorder.unseen_stop == 10
