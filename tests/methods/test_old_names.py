"""Methods written for the former base class keep working, each with a warning that names the new spelling."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import pytest
import torch
from contracts import checks
from contracts.harness import SHAPE
from torch import Tensor

from kvsift.errors import InputError
from kvsift.layer.method_states import MethodStates
from kvsift.methods import base, old_names
from kvsift.methods.base import Method, Phase
from kvsift.methods.oracle import exact_logits
from kvsift.methods.pages import PagedMethod
from kvsift.methods.scoring import ScoringMethod
from kvsift.methods.streaming_llm import StreamingLLM
from kvsift.methods.traits import Traits
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.types import Candidates, KVReader, LayerShape, Moved


@contextmanager
def warned(*words: str) -> Iterator[None]:
    with pytest.warns(DeprecationWarning, match="works for one release") as caught:
        yield
    text = " ".join(str(warning.message) for warning in caught)
    assert all(word in text for word in words), text
    assert {warning.filename for warning in caught} == {__file__}


def page_mean() -> type[Method]:
    """The documented example as it stood."""

    @dataclass(frozen=True)
    class PageMean(PagedMethod):
        phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
        summaries: ClassVar[tuple[str, ...]] = ("mean_std",)

        def score(
            self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
        ) -> Tensor:
            mean = reader.summary("mean_std", candidates.units)[..., : shape.head_dim]
            return exact_logits(shape, queries, mean)

    return PageMean


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_documented_method_needs_no_change_and_warns_of_nothing(phase: Phase) -> None:
    with warnings.catch_warnings(action="error"):
        cls = page_mean()
        method = cls(page_size=4)  # type: ignore[call-arg]
        traits = method.traits
    assert traits == Traits(granularity="page", estimates_mass=True, compares_heads=True)
    checks.budget_larger_than_context_is_dense(lambda: method, phase)


def test_class_flags_become_traits_with_a_warning() -> None:
    with warned("Flagged states", "traits = Traits(slides=..., follows=...)"):

        @dataclass(frozen=True)
        class Flagged(Method):
            slides: ClassVar[bool] = True
            follows = True

    assert Flagged().traits == Traits(slides=True, follows=True)


def test_a_flag_that_is_a_property_stays_one() -> None:
    with warned("repositions=...", "move is now called reposition"):

        @dataclass(frozen=True)
        class Remapped(Method):
            far: bool = False

            @property
            def moves(self) -> bool:
                return self.far

            def move(self, positions: Tensor, spans: Sequence[tuple[int, int]]) -> Moved:
                return Moved(positions - 1)

    assert not Remapped().traits.repositions
    assert Remapped(True).traits == Traits(repositions=True)
    assert Remapped(True).reposition(torch.tensor([5]), ()).queries.tolist() == [4]


def test_flags_add_to_those_of_the_class_above() -> None:
    with warned("no_mass=..."):

        class Short(StreamingLLM):
            no_mass = "is too short"

    with warned("keeps_all=..."):

        class Kept(Short):
            keeps_all = True

    above = StreamingLLM(positions="cache").traits
    assert Short(positions="cache").traits.no_mass == "is too short"
    assert Short(positions="cache").traits.repositions is above.repositions is True
    assert Kept().traits == Traits(selects=False, slides=True, no_mass="is too short")


def test_flags_of_two_classes_above_add_up() -> None:
    with warned("wants_queries=..."):

        class Learns(Method):
            wants_queries = True

    class Both(Learns, ScoringMethod):
        pass

    assert Both().traits == Traits(wants_queries=True, estimates_mass=True, compares_heads=True)


def test_scores_that_are_no_logits_compare_no_heads() -> None:
    with warned("estimates_mass=..."):

        class Drawn(ScoringMethod):
            estimates_mass = False

    assert Drawn().traits == Traits()
    with pytest.raises(InputError, match="does not score candidates for each head"):
        Rule(Drawn(), Budget(tokens=640, head_budgets="adaptive"))


def test_a_method_of_both_releases_is_not_warned_of() -> None:
    with warnings.catch_warnings(action="error"):

        class Both(Method):
            slides = True
            traits = Traits(slides=True, on_host=True)

            def reposition(self, positions: Tensor, spans: Sequence[tuple[int, int]]) -> Moved:
                return Moved(positions)

            move = reposition

    assert Both().traits == Traits(slides=True, on_host=True)


def test_former_names_can_be_read() -> None:
    method = StreamingLLM(positions="cache")
    with warned("StreamingLLM.moves is now traits.repositions"):
        assert method.moves  # type: ignore[attr-defined]
    with warned("StreamingLLM.slides is now traits.slides"):
        assert method.slides  # type: ignore[attr-defined]
    with warned("move is now called reposition"):
        assert method.move == method.reposition  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'StreamingLLM' object has no attribute 'glides'"):
        method.glides  # type: ignore[attr-defined]  # noqa: B018


class Marked:
    """A state of the release before: it forgets, and remembers where it may be rolled back to."""

    marks = 0

    def mark(self) -> None:
        self.marks += 1


class Forgets(Method):
    def new_state(self, shape: LayerShape) -> Marked:
        return Marked()


def test_the_mark_of_a_state_is_called_at_a_checkpoint() -> None:
    states = MethodStates(Plan(decode=Rule(Forgets(), Budget(tokens=640))), SHAPE, 2)
    with pytest.warns(DeprecationWarning, match=r"Marked.mark .* Method.checkpoint\(state\)"):
        states.checkpoint()
    assert [states.of("decode", row).marks for row in range(2)] == [1, 1]


@pytest.mark.parametrize("name", sorted(old_names.MOVED))
def test_what_left_the_module_of_the_base_class_can_still_be_imported(name: str) -> None:
    module, present = old_names.MOVED[name]
    with warned(f"kvsift.methods.base.{name} is now kvsift.methods.{module}.{present}"):
        former = getattr(base, name)
    assert former is getattr(import_module(f"kvsift.methods.{module}"), present)


def test_the_base_module_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match=r"module 'kvsift.methods.base' has no attribute 'Scoring'"):
        base.Scoring  # noqa: B018
