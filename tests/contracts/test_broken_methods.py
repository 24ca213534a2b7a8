"""The contract suite catches broken methods that it has never heard of.

Each class below is Quest, or the stateful toy, with one mistake that people make. No check was written for any of
them: the same functions that the catalogue must pass run here, and at least one must object.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from contracts.checks import ALL_CHECKS
from contracts.harness import Check, MethodFactory
from contracts.toy import KeySums, RememberedMeans
from hypothesis import settings
from torch import Tensor

from kvsift.methods.base import Method, Phase
from kvsift.methods.quest import Quest
from kvsift.methods.scoring import top_units
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection

pytestmark = pytest.mark.slow  # it tests the contracts, not the methods

SelectArguments = tuple[Any, LayerShape, Tensor, int, Candidates, Limit, KVReader]


@dataclass(frozen=True)
class SmallQuest(Quest):
    page_size: int = 4


@dataclass(frozen=True)
class DropsNewestPage(SmallQuest):
    """Ranks every page but the last, as if the last were always incomplete."""

    def select(self, *given: Any) -> Selection:
        state, shape, queries, start, candidates, limit, reader = given
        older = Candidates(candidates.first, max(candidates.count - 1, 1), candidates.unit_size)
        return super().select(state, shape, queries, start, older, limit, reader)


@dataclass(frozen=True)
class ScoresNewestPageLow(SmallQuest):
    """Pads the newest page with the smallest number and never lets it in: -1 where it would have been."""

    def select(self, *given: Any) -> Selection:
        selection, candidates = super().select(*given), given[4]
        newest = selection.units == candidates.stop - 1
        return Selection(selection.units.masked_fill(newest, -1), selection.unit_size)


@dataclass(frozen=True)
class RemembersInTheClass(SmallQuest):
    """Caches the summaries of pages by layer, for all sequences of the process."""

    seen: ClassVar[dict[int, Tensor]] = {}

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        rows = self.seen.get(shape.layer)
        if rows is None or rows.shape[1] < candidates.stop:
            rows = self.seen[shape.layer] = reader.summary("minmax", slice(0, candidates.stop)).clone()
        grouped = queries.unflatten(0, (shape.num_kv_heads, -1)).flatten(1, 2)
        halves = rows[:, candidates.units].chunk(2, -1)
        scores = grouped.clamp_min(0) @ halves[0].mT + grouped.clamp_max(0) @ halves[1].mT
        return scores.reshape(shape.num_query_heads, queries.shape[1], -1) * shape.scale


@dataclass(frozen=True)
class RemembersLastChoice(SmallQuest):
    """Keeps one choice per layer for all sequences and reuses it every other time."""

    last: ClassVar[dict[int, Selection]] = {}

    def select(self, *given: Any) -> Selection:
        layer = given[1].layer
        last = self.last.pop(layer, None)
        if last is not None and int(last.units.max()) < given[4].stop and last.units.shape[1] == given[5].units:
            return last
        self.last[layer] = super().select(*given)
        return self.last[layer]


@dataclass(frozen=True)
class SelectsOwnPage(SmallQuest):
    """Takes the page that the query itself stands in instead of its worst choice."""

    def select(self, *given: Any) -> Selection:
        selection, candidates = super().select(*given), given[4]
        units = selection.units.clone()
        units[:, -1] = candidates.stop
        return Selection(units, selection.unit_size)


@dataclass(frozen=True)
class SelectsBeyondTheEnd(SmallQuest):
    """Names a page that does not exist yet."""

    def select(self, *given: Any) -> Selection:
        selection, reader = super().select(*given), given[6]
        units = selection.units.clone()
        units[:, -1] = reader.length // selection.unit_size + 1
        return Selection(units, selection.unit_size)


@dataclass(frozen=True)
class IgnoresCandidates(SmallQuest):
    """Ranks every page there is: sinks, window and the page being filled compete again."""

    def select(self, *given: Any) -> Selection:
        state, shape, queries, start, candidates, limit, reader = given
        everything = Candidates(0, -(-reader.length // candidates.unit_size), candidates.unit_size)
        return super().select(state, shape, queries, start, everything, limit, reader)


@dataclass(frozen=True)
class IgnoresPadding(SmallQuest):
    """Centres the scores on the mean row over whole pages of the pool, unwritten ones included."""

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        rows = reader.summary("minmax", slice(0, candidates.stop + 8))
        scores = super().score(state, shape, queries, start, candidates, reader)
        middle = rows.mean(1)  # [num_kv_heads, width]
        return scores + middle.sum() - middle.norm() * scores.abs()


@dataclass(frozen=True)
class ReadsTheUnwrittenTail(SmallQuest):
    """Summarises pages itself, the page being filled at its full size."""

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        size = self.page_size
        keys = reader.keys()
        whole = keys.new_empty(keys.shape[0], -(-reader.length // size) * size, keys.shape[2])
        whole[:, : reader.length] = keys
        top, middle = whole.unflatten(1, (-1, size)).amax(2), whole.mean(1)
        q = queries.unflatten(0, (shape.num_kv_heads, -1)).flatten(1, 2)
        scores = q @ top[:, candidates.units].mT - (q * middle.unsqueeze(1)).sum(-1, keepdim=True)
        return scores.reshape(shape.num_query_heads, queries.shape[1], -1)


@dataclass(frozen=True)
class RepeatsItself(SmallQuest):
    """Spends two places on its best page."""

    def select(self, *given: Any) -> Selection:
        selection = super().select(*given)
        return Selection(torch.cat([selection.units[:, :1], selection.units], 1)[:, : given[5].units], 4)


@dataclass(frozen=True)
class AnswersInOrderOfScore(SmallQuest):
    """Forgets to sort: best page first."""

    def select(self, *given: Any) -> Selection:
        state, shape, queries, start, candidates, limit, reader = given
        scores = self.score(state, shape, queries, start, candidates, reader).amax(1)
        order = scores.sort(-1, descending=True).indices[:, : limit.units]
        return Selection(order + candidates.first, candidates.unit_size)


@dataclass(frozen=True)
class ForgetsItsFirstCandidate(SmallQuest):
    """Answers with places among the candidates instead of unit ids."""

    def select(self, *given: Any) -> Selection:
        state, shape, queries, start, candidates, limit, reader = given
        scores = self.score(state, shape, queries, start, candidates, reader).amax(1)
        return Selection(top_units(scores, limit.units), candidates.unit_size)


@dataclass(frozen=True)
class DrawsAnew(SmallQuest):
    """Breaks ties by chance, with a random number that no position fixes."""

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        scores = super().score(state, shape, queries, start, candidates, reader)
        return scores + 5 * torch.rand(scores.shape)


class StaleSums(KeySums):
    def fork(self) -> KeySums:
        return StaleSums(self.sums)

    def crop(self, length: int) -> None:
        pass


@dataclass(frozen=True)
class KeepsWhatWasCropped(RememberedMeans):
    """Appends to what it remembers, cropped or not."""

    def new_state(self, shape: LayerShape) -> KeySums:
        return StaleSums(super().new_state(shape).sums)

    def observe(
        self, state: KeySums, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        state.sums = torch.cat([state.sums, state.sums[:, -1:] + keys.double().cumsum(1)], 1)


class SharedSums(KeySums):
    def fork(self) -> KeySums:
        return self


@dataclass(frozen=True)
class ForksShareOneMemory(RememberedMeans):
    """A fork is the same object, and both rows write into it."""

    def new_state(self, shape: LayerShape) -> KeySums:
        return SharedSums(super().new_state(shape).sums)

    def observe(
        self, state: KeySums, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        state.sums = torch.cat([state.sums, state.sums[:, -1:] + keys.double().cumsum(1)], 1)


@dataclass(frozen=True)
class OneMemoryForAll(RememberedMeans):
    """A state made once, for all layers and sequences."""

    memory: ClassVar[dict[str, KeySums]] = {}

    def new_state(self, shape: LayerShape) -> KeySums:
        return self.memory.setdefault("state", super().new_state(shape))

    def observe(
        self, state: KeySums, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        state.sums = torch.cat([state.sums, state.sums[:, -1:] + keys.double().cumsum(1)], 1)


@dataclass(frozen=True)
class PeeksIntoItsOwnChunk(RememberedMeans):
    """Leans towards the mean of everything observed, tokens after the query included."""

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        scores = super().score(state, shape, queries, start, candidates, reader)
        lean = (state.sums[:, -1] / reader.length).float().sum()  # of all tokens, not of those before the query
        return scores + 100 * lean * torch.arange(candidates.count)


BROKEN: list[tuple[type[Method], Phase]] = [
    (DropsNewestPage, "decode"),
    (ScoresNewestPageLow, "decode"),
    (RemembersInTheClass, "decode"),
    (RemembersLastChoice, "decode"),
    (SelectsOwnPage, "decode"),
    (SelectsBeyondTheEnd, "decode"),
    (IgnoresCandidates, "decode"),
    (IgnoresPadding, "decode"),
    (ReadsTheUnwrittenTail, "decode"),
    (RepeatsItself, "decode"),
    (AnswersInOrderOfScore, "decode"),
    (ForgetsItsFirstCandidate, "decode"),
    (DrawsAnew, "decode"),
    (KeepsWhatWasCropped, "decode"),
    (KeepsWhatWasCropped, "prefill"),
    (ForksShareOneMemory, "decode"),
    (ForksShareOneMemory, "prefill"),
    (OneMemoryForAll, "decode"),
    (PeeksIntoItsOwnChunk, "prefill"),
]


@pytest.fixture
def _no_shrinking() -> Iterator[None]:
    settings.load_profile("first_failure")
    yield
    settings.load_profile("kvsift")


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("phase", RememberedMeans.phases)
@pytest.mark.usefixtures("fewer_examples")
def test_a_method_with_memory_keeps_the_contracts(phase: Phase, check: Check) -> None:
    check(RememberedMeans, phase)


@pytest.mark.usefixtures("_no_shrinking", "fewer_examples")
@pytest.mark.parametrize(("broken", "phase"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_contracts_catch_a_method_that(broken: type[Method], phase: Phase) -> None:
    objecting = any(objects(check, broken, phase) for check in ALL_CHECKS)
    assert objecting, f"no contract objects to {broken.__name__}: {broken.__doc__}"


def objects(check: Check, make: MethodFactory, phase: Phase) -> bool:
    """Whether a contract says that a method breaks it."""
    try:
        check(make, phase)
    except AssertionError:
        return True
    except Exception:  # a crash is a mistake too, but an objection says what is wrong
        return False
    return False
