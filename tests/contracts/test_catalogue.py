"""Every catalogued method keeps every contract, in every phase it selects in: a method is tested by being listed."""

import os
from dataclasses import fields
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
from contracts import harness
from contracts.checks import (
    ALL_CHECKS,
    choosing_nothing_changes_nothing,
    placements_do_not_change_the_answer,
    visible_tokens_are_counted_from_what_was_attended,
)
from contracts.harness import Case, Check, MethodFactory, Runner, cases, examples, phase_plan, small
from hypothesis import given

from kvsift.errors import InputError
from kvsift.methods import catalogue, method_class
from kvsift.methods.base import Phase

# Knobs of many values: settings that take another path. Pages of one or two tokens, so that contexts of 90 tokens hold
# several blocks and some are left out.
ALSO: dict[str, list[dict[str, Any]]] = {
    "quest": [
        {"score_by": "minmax_fp8"},
        {"page_size": 1, "prefilter": 1},
        {"page_size": 2, "prefilter": 1.5, "block_pages": 4},
        {"page_size": 1, "prefilter": 2, "heads": "query"},
        {"page_size": 1, "prefilter": 1, "score_by": "minmax_fp8"},
    ],
    "quoka": [
        {"prefilter": 1},
        {"prefilter": 1.5, "mode": "max_of_mean_exact", "page_size": 2},
        {"prefilter": 1, "score": "dot", "reduce": "mean"},
        {"queries": 99},
    ],
    "critiprefill": [{"fusion": False}, {"block": 4, "scaled": False}, {"rest": True}],
    "infinigen": [{"alpha": 0.5}, {"partial": 1.0, "heads": "query"}],
    "less_is_more": [{"recent_fraction": 0.9}],
    "magicpig": [{"bits": 2, "tables": 12}, {"bits": 1, "tables": 3}],
    "pqcache": [{"bits": 2, "iterations": 3}, {"parts": 3, "bits": 1}],
    "retrieval_attention": [{"index": "graph", "block": 64, "beam": 9}, {"block": 64, "audit": 0}],
    "sketch": [{"rest": False}],
    "sparq": [{"second_copy": True}, {"mean_value": False}],
}


# Methods of page summaries, and that observe keys, which meet the contracts over keys and values in 8 bits too, but for
# those that compare with what was appended, or see each weight that is not 0.
CODED = {
    "host:kv_dtype=int8": ("quest", "sketch", "streaming_llm", "quoka", "retrieval_attention"),
    "device:kv_dtype=int8": ("quest", "sketch", "quoka"),
}
OF_WHAT_WAS_APPENDED = (
    placements_do_not_change_the_answer, choosing_nothing_changes_nothing,
    visible_tokens_are_counted_from_what_was_attended,
)  # fmt: skip

# Of the examples, for defaults and for other settings. All of ``test_broken_methods`` are caught with 0.4 of them.
SHARE, VARIANT_SHARE = 0.4, 0.15
EXTENSIVE = float(os.environ.get("KVSIFT_EXAMPLES", "1")) > 1  # every contract with every setting


class Subject(NamedTuple):
    """A method as some knobs make it, in one of its phases."""

    make: MethodFactory
    phase: Phase
    share: float  # of the examples
    name: str
    turn: int | None  # settings other than the defaults meet every eighth contract: those with this remainder
    place: str = "device"


def _subjects() -> list[Subject]:
    """A method with its defaults, with every value that its knobs of few values may take, and with the settings in
    ``ALSO``, in each of its phases."""
    found = []
    for name in catalogue():
        cls = method_class(name)
        hints = get_type_hints(cls)
        options = [(field.name, value) for field in fields(cls) for value in _literals(hints[field.name])]
        others = [{knob: value} for knob, value in options if value != getattr(cls, knob, None)]
        for number, knobs in enumerate([{}, *others, *ALSO.get(name, [])]):
            try:
                phases = small(name, **knobs)().phases
            except InputError:
                continue
            spelt = ":".join([name, *(f"{knob}={value}" for knob, value in knobs.items())])
            share = VARIANT_SHARE if knobs else SHARE
            for order, phase in enumerate(phases):
                turn = (number + order) % 8 if knobs and not EXTENSIVE else None
                found.append(Subject(small(name, **knobs), phase, share, f"{spelt}-{phase}", turn))
    coded = [
        subject._replace(share=VARIANT_SHARE, name=f"{subject.name}-{place}", place=place)
        for place, names in CODED.items() for subject in found if subject.name.rpartition("-")[0] in names
    ]  # fmt: skip
    return found + [each._replace(turn=None if EXTENSIVE else number % 8) for number, each in enumerate(coded)]


def _literals(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [value for argument in get_args(hint) for value in _literals(argument)]


SUBJECTS = _subjects()
MEETINGS = [
    pytest.param(subject, check, id=f"{subject.name}-{check.__name__}")
    for subject in SUBJECTS
    for index, check in enumerate(ALL_CHECKS)
    if subject.turn in (None, index % 8)
    or (check is placements_do_not_change_the_answer and subject.phase == "decode")  # prefill is dense there
    if subject.place == "device" or check not in OF_WHAT_WAS_APPENDED
]


@pytest.mark.parametrize(("subject", "check"), MEETINGS)
def test_contract(subject: Subject, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "DEFAULT_PLACE", subject.place)
    monkeypatch.setenv("KVSIFT_EXAMPLES", str(subject.share * float(os.environ.get("KVSIFT_EXAMPLES", "1"))))
    check(subject.make, subject.phase)


def _drawn_alike() -> list[Subject]:
    """One subject of each method and phase per size of units and segments, which is all that its cases depend on."""
    distinct: dict[tuple[object, ...], Subject] = {}
    for subject in SUBJECTS:
        method = subject.make()
        if not method.traits.unbounded:
            distinct.setdefault((type(method), subject.phase, method.unit_size, method.segment_size), subject)
    return list(distinct.values())


@pytest.mark.parametrize("subject", _drawn_alike(), ids=lambda subject: subject.name)
def test_contracts_reach_the_sparse_path(subject: Subject) -> None:
    make, phase = subject.make, subject.phase
    sparse = []

    @examples(30)
    @given(case=cases(make(), phase))
    def run(case: Case) -> None:
        runner = Runner(phase_plan(make(), case.budget, phase))
        runner.feed_all(case.tokens, case.prompt, range(case.prompt, case.length))
        sparse.append(runner.stats.phase(phase).sparse_queries > 0)

    run()
    assert sum(sparse) >= len(sparse) / 3
