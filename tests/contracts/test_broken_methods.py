"""The contract suite catches broken methods that it has never heard of.

Each below is Quest, or the stateful toy, with one mistake that people make. No check was written for any of
them: the same functions that the catalogue must pass run here, and at least one must object.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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
from kvsift.types import Candidates, KVReader, LayerShape, Selection

pytestmark = pytest.mark.slow  # it tests the contracts, not the methods


class Question(NamedTuple):
    """What a method is asked."""

    state: Any
    shape: LayerShape
    queries: Tensor
    start: int
    candidates: Candidates
    reader: KVReader


@dataclass(frozen=True)
class SmallQuest(Quest):
    page_size: int = 4


Scores, Answer = Callable[[Question], Tensor], Callable[[Question], Selection]
BROKEN: list[tuple[type[Method], Phase]] = []


def selects(mistake: Callable[[Answer, Question, int], Selection]) -> None:
    """A method that answers otherwise than Quest, which it may ask; given the limit."""

    def select(self: SmallQuest, *given: Any) -> Selection:
        def quest(question: Question) -> Selection:
            return SmallQuest.select(self, *question[:5], given[5], question.reader)

        return mistake(quest, Question(*given[:5], given[6]), given[5].units)

    BROKEN.append((type(mistake.__name__, (SmallQuest,), {"select": select, "__doc__": mistake.__doc__}), "decode"))


def scores(mistake: Callable[[Scores, Question], Tensor]) -> None:
    """A method that scores otherwise than Quest, which it may ask."""

    def score(self: SmallQuest, *given: Any) -> Tensor:
        return mistake(lambda question: SmallQuest.score(self, *question), Question(*given))

    BROKEN.append((type(mistake.__name__, (SmallQuest,), {"score": score, "__doc__": mistake.__doc__}), "decode"))


@selects
def drops_newest_page(quest: Answer, question: Question, units: int) -> Selection:
    """Ranks every page but the last, as if the last were always incomplete."""
    first, count, unit_size = question.candidates.first, question.candidates.count, question.candidates.unit_size
    return quest(question._replace(candidates=Candidates(first, max(count - 1, 1), unit_size)))


@selects
def scores_newest_page_low(quest: Answer, question: Question, units: int) -> Selection:
    """Pads the newest page with the smallest number and never lets it in: -1 where it would have been."""
    selection = quest(question)
    return Selection(selection.units.masked_fill(selection.units == question.candidates.stop - 1, -1), 4)


@selects
def remembers_last_choice(
    quest: Answer, question: Question, units: int, last: dict[int, Selection] = {}  # noqa: B006
) -> Selection:  # fmt: skip
    """Keeps one choice per layer for all sequences and reuses it every other time."""
    layer = question.shape.layer
    before = last.pop(layer, None)
    if before is not None and int(before.units.max()) < question.candidates.stop and before.units.shape[1] == units:
        return before
    last[layer] = quest(question)
    return last[layer]


def instead_of_the_last(selection: Selection, unit: int) -> Selection:
    units = selection.units.clone()
    units[:, -1] = unit
    return Selection(units, selection.unit_size)


@selects
def selects_own_page(quest: Answer, question: Question, units: int) -> Selection:
    """Takes the page that the query itself stands in instead of its worst choice."""
    return instead_of_the_last(quest(question), question.candidates.stop)


@selects
def selects_beyond_the_end(quest: Answer, question: Question, units: int) -> Selection:
    """Names a page that does not exist yet."""
    return instead_of_the_last(quest(question), question.reader.length // 4 + 1)


@selects
def ignores_candidates(quest: Answer, question: Question, units: int) -> Selection:
    """Ranks every page there is: sinks, window and the page being filled compete again."""
    return quest(question._replace(candidates=Candidates(0, -(-question.reader.length // 4), 4)))


@selects
def repeats_itself(quest: Answer, question: Question, units: int) -> Selection:
    """Spends two places on its best page."""
    chosen = quest(question).units
    return Selection(torch.cat([chosen[:, :1], chosen], 1)[:, :units], 4)


@selects
def answers_in_order_of_score(quest: Answer, question: Question, units: int) -> Selection:
    """Forgets to sort: best page first."""
    order = SmallQuest().score(*question).amax(1).sort(-1, descending=True).indices[:, :units]
    return Selection(order + question.candidates.first, 4)


@selects
def forgets_its_first_candidate(quest: Answer, question: Question, units: int) -> Selection:
    """Answers with places among the candidates instead of unit ids."""
    return Selection(top_units(SmallQuest().score(*question).amax(1), units), 4)


@scores
def remembers_in_the_class(
    quest: Scores, question: Question, seen: dict[int, Tensor] = {}  # noqa: B006
) -> Tensor:  # fmt: skip
    """Caches the summaries of pages by layer, for all sequences of the process."""
    shape, candidates = question.shape, question.candidates
    rows = seen.get(shape.layer)
    if rows is None or rows.shape[1] < candidates.stop:
        rows = seen[shape.layer] = question.reader.summary("minmax", slice(0, candidates.stop)).clone()
    grouped = question.queries.unflatten(0, (shape.num_kv_heads, -1)).flatten(1, 2)
    halves = rows[:, candidates.units].chunk(2, -1)
    found = grouped.clamp_min(0) @ halves[0].mT + grouped.clamp_max(0) @ halves[1].mT
    return found.reshape(shape.num_query_heads, question.queries.shape[1], -1) * shape.scale


@scores
def ignores_padding(quest: Scores, question: Question) -> Tensor:
    """Centres the scores on the mean row over whole pages of the pool, unwritten ones included."""
    middle = question.reader.summary("minmax", slice(0, question.candidates.stop + 8)).mean(1)  # [num_kv_heads, width]
    found = quest(question)
    return found + middle.sum() - middle.norm() * found.abs()


@scores
def reads_the_unwritten_tail(quest: Scores, question: Question) -> Tensor:
    """Summarises pages itself, the page being filled at its full size."""
    keys, shape = question.reader.keys(), question.shape
    whole = keys.new_empty(keys.shape[0], 4 * -(-question.reader.length // 4), keys.shape[2])
    whole[:, : question.reader.length] = keys
    top, middle = whole.unflatten(1, (-1, 4)).amax(2), whole.mean(1)
    q = question.queries.unflatten(0, (shape.num_kv_heads, -1)).flatten(1, 2)
    found = q @ top[:, question.candidates.units].mT - (q * middle.unsqueeze(1)).sum(-1, keepdim=True)
    return found.reshape(shape.num_query_heads, question.queries.shape[1], -1)


@scores
def draws_anew(quest: Scores, question: Question) -> Tensor:
    """Breaks ties by chance, with a random number that no position fixes."""
    found = quest(question)
    return found + 5 * torch.rand(found.shape)


@dataclass(frozen=True)
class AppendsInAnyCase(RememberedMeans):
    """Appends to what it remembers, cropped or not."""

    def observe(
        self, state: KeySums, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        state.sums = torch.cat([state.sums, state.sums[:, -1:] + keys.double().cumsum(1)], 1)


class StaleSums(KeySums):
    def fork(self) -> KeySums:
        return StaleSums(self.sums)

    def crop(self, length: int) -> None:
        pass


class KeepsWhatWasCropped(AppendsInAnyCase):
    """Its state cannot be cropped."""

    def new_state(self, shape: LayerShape) -> KeySums:
        return StaleSums(super().new_state(shape).sums)


class SharedSums(KeySums):
    def fork(self) -> KeySums:
        return self


class ForksShareOneMemory(AppendsInAnyCase):
    """A fork is the same object, and both rows write into it."""

    def new_state(self, shape: LayerShape) -> KeySums:
        return SharedSums(super().new_state(shape).sums)


class OneMemoryForAll(AppendsInAnyCase):
    """A state made once, for all layers and sequences."""

    memory: ClassVar[dict[str, KeySums]] = {}

    def new_state(self, shape: LayerShape) -> KeySums:
        return self.memory.setdefault("state", super().new_state(shape))


class PeeksIntoItsOwnChunk(RememberedMeans):
    """Leans towards the mean of everything observed, tokens after the query included."""

    def score(self, *given: Any) -> Tensor:
        question = Question(*given)
        lean = (question.state.sums[:, -1] / question.reader.length).float().sum()
        return super().score(*given) + 100 * lean * torch.arange(question.candidates.count)


BROKEN += [(KeepsWhatWasCropped, phase) for phase in RememberedMeans.phases]
BROKEN += [(ForksShareOneMemory, phase) for phase in RememberedMeans.phases]
BROKEN += [(OneMemoryForAll, "decode"), (PeeksIntoItsOwnChunk, "prefill")]


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
