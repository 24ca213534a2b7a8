"""Knobs of the wrong type are refused once for all methods, those of other packages too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from kvsift.errors import InputError
from kvsift.methods.scoring import ScoringMethod
from kvsift.plan.syntax import parse_plan


@dataclass(frozen=True)
class Tempered(ScoringMethod):
    """Of another package: it calculates with what it is given."""

    optimism: float = 0.5
    rounds: int = 3
    both_ways: bool = False
    centre: Literal["mean", "median"] = "mean"
    depth: int | Literal["auto"] = "auto"
    beam: int | None = None
    file: str = ""
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        assert 0 <= self.optimism <= 1


@dataclass(frozen=True)
class Untyped(ScoringMethod):
    """Whose annotations only a type checker can read."""

    rounds: Nowhere = 3  # type: ignore[name-defined]  # noqa: F821
    beam: Nowhere = None  # type: ignore[name-defined]  # noqa: F821


WRONG_TYPES = [
    ("tempered:optimism=a", "optimism='a' must be a number; by default it is 0.5."),
    ("tempered:rounds=2.5", "rounds=2.5 must be a whole number; by default it is 3."),
    ("tempered:rounds=true", "rounds=True must be a whole number; by default it is 3."),
    ("tempered:both_ways=1", "both_ways=1 must be true or false; by default it is false."),
    ("tempered:centre=medain", "centre='medain' must be 'mean' or 'median'; did you mean 'median'?"),
    ("tempered:depth=1.5", "depth=1.5 must be a whole number or 'auto'; by default it is 'auto'."),
    ("tempered:beam=wide", "beam='wide' must be a whole number or left out; by default it is None."),
    ("tempered:file=7", "file=7 must be text; by default it is ''."),
    ("untyped:rounds=few", "rounds='few' must be a whole number; by default it is 3."),
]


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {"tempered": Tempered, "untyped": Untyped}
    monkeypatch.setattr("kvsift.plan.syntax.method_class", lambda name: classes[name])


@pytest.mark.parametrize(("spec", "message"), WRONG_TYPES)
def test_a_knob_of_the_wrong_type_is_refused_for_a_method_of_another_package_too(
    plug_in: None, spec: str, message: str
) -> None:
    with pytest.raises(InputError) as refused:
        parse_plan(spec)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "spec", ["optimism=1", "rounds=4", "both_ways=true", "centre=median", "depth=auto", "depth=2", "beam=5", "sizes=3"]
)
def test_a_knob_of_its_type_is_taken(plug_in: None, spec: str) -> None:
    assert isinstance(parse_plan(f"tempered:{spec}").decode.method, Tempered)  # type: ignore[union-attr]
    assert parse_plan("untyped:beam=wide").decode is not None


def test_a_mistake_of_a_method_is_not_taken_for_one_of_its_user(plug_in: None) -> None:
    with pytest.raises(AssertionError):
        parse_plan("tempered:optimism=2")
