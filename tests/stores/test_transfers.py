"""Rows on their way to the host: which of them go straight to the pools, and what ``settle`` owes.

CUDA's streams and events are replaced by ones that do everything at once, so this is about the order of calls alone;
``tests/engine/test_split.py`` runs the real ones on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvsift.stores.transfers import FEW_TOKENS, HostTransfers


class Stream:
    def __init__(self, *device: Any) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)


class Event:
    all: list[Event] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.recorded, self.waited = None, 0
        Event.all.append(self)

    def record(self, stream: Any) -> None:
        self.recorded = stream

    def synchronize(self) -> None:
        self.waited += 1


COMPUTING = Stream()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def stream(of: Any) -> Iterator[None]:
        yield

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **how: empty(*shape, **how))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    for name, stand_in in (("Stream", Stream), ("Event", Event), ("stream", stream)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: COMPUTING)
    Event.all.clear()


def rows_of(count: int) -> list[torch.Tensor]:
    return [torch.randn(2, count, width) for width in (4, 6)]


def test_many_go_straight_to_the_pools_beside_what_is_computed() -> None:
    to_host, pools, rows = HostTransfers(), [torch.zeros(2, 200, 4), torch.zeros(2, 200, 6)], rows_of(FEW_TOKENS)
    to_host.send(pools, slice(10, 10 + FEW_TOKENS), rows)
    assert not to_host.has_buffered
    (arrived,) = Event.all
    assert arrived.recorded is to_host.stream(torch.device("cpu"))
    assert to_host.stream(torch.device("cpu")).waited == [COMPUTING], "the rows must have been computed"
    assert to_host.settle() == []
    assert arrived.waited == 1
    assert all(torch.equal(pool[:, 10 : 10 + FEW_TOKENS], each) for pool, each in zip(pools, rows))
    assert to_host.settle() == []
    assert arrived.waited == 1, "nothing is under way"


@pytest.mark.parametrize("slots", [slice(3, 5), torch.arange(100)], ids=["few", "scattered"])
def test_few_and_scattered_ones_are_given_back(slots: Any) -> None:
    count = 2 if isinstance(slots, slice) else len(slots)
    to_host, pools = HostTransfers(), [torch.zeros(2, 200, 4), torch.zeros(2, 200, 6)]
    sent = [rows_of(count), rows_of(count)]
    for rows in sent:
        to_host.send(pools, slots, rows)
    assert to_host.has_buffered
    assert not any(pool.any() for pool in pools)
    back = to_host.settle()
    assert not to_host.has_buffered
    for (where, rows), expected in zip(back, sent, strict=True):
        assert where is slots
        assert all(torch.equal(one, two) for one, two in zip(rows, expected))


def test_what_was_sent_on_the_other_stream_is_waited_for_too() -> None:
    to_host, pools = HostTransfers(), [torch.zeros(2, 200, 4), torch.zeros(2, 200, 6)]
    to_host.send(pools, slice(0, 100), rows_of(100))
    to_host.send(pools, slice(100, 101), rows_of(1))
    to_host.settle()
    assert [event.waited > 0 for event in Event.all] == [True, True]
