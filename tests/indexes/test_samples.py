"""Which queries of a prompt are kept: evenly spread, the newest ones in any case, whatever the chunks."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsift.indexes.samples import QueryRecorder, QuerySamples

HEADS, DIM = 3, 4


def prompt(length: int, offset: float = 0.0) -> Tensor:
    """Queries that say where they stood."""
    return (torch.arange(length, dtype=torch.float32) + offset).view(1, -1, 1).expand(HEADS, -1, DIM)


def recorded(length: int, capacity: int, cuts: list[int] | None = None) -> QueryRecorder:
    recorder = QueryRecorder(capacity)
    stops = sorted({cut for cut in cuts or [] if cut < length} | {0, length})
    for start, stop in pairwise(stops):
        recorder.observe(prompt(length)[:, start:stop], start, stop)
    return recorder


def taken(recorder: QueryRecorder) -> QuerySamples:
    samples = recorder.take()
    assert samples.queries.shape == (HEADS, len(samples.positions), DIM)
    return samples


@given(length=st.integers(1, 3000), capacity=st.integers(2, 700), cuts=st.lists(st.integers(1, 3000), max_size=40))
def test_what_is_kept_depends_on_the_length_alone(length: int, capacity: int, cuts: list[int]) -> None:
    samples = taken(recorded(length, capacity, cuts))
    at_once = taken(recorded(length, capacity))
    assert torch.equal(samples.positions, at_once.positions)
    assert torch.equal(samples.queries[0, :, 0].long(), samples.positions)
    assert torch.equal(samples.queries, at_once.queries)


@given(length=st.integers(1, 5000), capacity=st.integers(2, 900))
def test_samples_are_spread_and_the_newest_are_among_them(length: int, capacity: int) -> None:
    positions = taken(recorded(length, capacity)).positions
    assert len(positions) <= capacity
    assert bool((positions[1:] > positions[:-1]).all())
    newest = min(256, capacity // 2, length)
    assert positions[-newest:].tolist() == list(range(length - newest, length))
    gaps = positions[: len(positions) - newest + 1].diff()
    assert len(set(gaps[:-1].tolist())) <= 1, "some part of the prompt is sampled more thinly than another"
    assert int((positions >= length // 2).sum()) >= int((positions < length // 2).sum())
    assert length <= capacity // 4 or len(positions) >= min(length, capacity) // 4, "room is left unused"


def test_token_by_token_is_as_good_as_a_chunk() -> None:
    samples, at_once = taken(recorded(1500, 300, list(range(1500)))), taken(recorded(1500, 300))
    assert torch.equal(samples.positions, at_once.positions)
    assert torch.equal(samples.queries, at_once.queries)


@given(length=st.integers(2, 600), extra=st.integers(1, 100), capacity=st.sampled_from([300, 1024]))
def test_a_roll_back_leaves_no_trace_of_what_was_cropped(length: int, extra: int, capacity: int) -> None:
    recorder = recorded(length, capacity)
    recorder.observe(prompt(extra, 10_000.0), length, length + extra)
    recorder.crop(length)
    samples = taken(recorder)
    assert torch.equal(samples.queries[0, :, 0].long(), samples.positions)
    assert int(samples.positions[-1]) == length - 1
    if length + extra <= capacity // 2:  # nothing had to be thinned out meanwhile
        assert torch.equal(samples.positions, taken(recorded(length, capacity)).positions)


def test_forks_go_their_own_ways() -> None:
    recorder = recorded(1000, 600)
    before = taken(recorder)
    fork = recorder.fork()
    fork.observe(prompt(500, 5000.0), 1000, 1500)
    recorder.observe(prompt(300)[:, :0], 1000, 1000)
    after = taken(recorder)
    assert torch.equal(before.positions, after.positions)
    assert torch.equal(before.queries, after.queries)
    assert int(taken(fork).queries[0, -1, 0]) == 5499


def test_tokens_that_come_without_queries_are_remembered_until_they_are_gone() -> None:
    recorder = QueryRecorder(100)
    assert recorder.take() is None
    recorder.observe(None, 0, 50)
    recorder.observe(prompt(10), 50, 60)
    assert recorder.unseen_stop == 50
    assert taken(recorder).positions.tolist() == list(range(50, 60))
    recorder.crop(0)
    assert recorder.unseen_stop == 0
    assert recorder.take() is None


def test_samples_do_not_keep_a_chunk_alive_or_see_it_change() -> None:
    chunk = prompt(4000).clone()
    recorder = QueryRecorder(64)
    recorder.observe(chunk, 0, 4000)
    before = taken(recorder).queries.clone()
    chunk.fill_(-1)
    assert torch.equal(taken(recorder).queries, before)
    held = sum(piece.queries.untyped_storage().nbytes() for piece in recorder._spread.pieces + recorder._newest.pieces)
    assert held <= 4 * 64 * HEADS * DIM * 4
