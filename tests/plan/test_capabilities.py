"""The table of objections: conditions, their sentences, and the path that follows. The stored verdicts are in
``tests/contracts/verdicts.txt``."""

from refusals import refused

from kvsift.plan.capabilities import check, reason, reasons, verdict
from kvsift.types import Objections

LARGE: Objections = ((lambda number: number > 9 and number - 9, "{it} is {found} more than 9"),)
ODD: Objections = (
    (lambda number: number % 2, "{it} is odd"),
    (lambda number: number.real < 0, "{it.real} is negative"),
)


def test_a_sentence_names_what_was_asked_about_and_what_was_found() -> None:
    assert list(reasons(11, LARGE, ODD)) == ["11 is 2 more than 9", "11 is odd"]
    assert list(reasons(-1, LARGE, ODD)) == ["-1 is odd", "-1 is negative"]
    assert reason(8, LARGE, ODD) is None


def test_there_is_no_objection_to_a_rule_that_is_not_there() -> None:
    assert reason(None, LARGE, ODD) is None


def test_a_verdict_is_the_best_path_and_why_it_is_not_a_better_one() -> None:
    paths = {"small": LARGE, "even": ODD}
    assert verdict(7, paths) == ("small", [])
    assert verdict(12, paths) == ("even", ["12 is 3 more than 9"])
    assert verdict(13, paths) == ("", ["13 is 4 more than 9", "13 is odd"])


def test_the_first_objection_is_named_or_all_of_them() -> None:
    check(8, LARGE, ODD)
    with refused("unsupported_plan: 11 is 2 more than 9"):
        check(11, LARGE, ODD)
    with refused("unsupported_plan: 11 is 2 more than 9 11 is odd"):
        check(11, LARGE, ODD, name_all=True)
