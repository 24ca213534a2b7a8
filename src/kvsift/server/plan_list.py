"""The plans that requests may name: those that the server was started with, and dense.

A request's plan is compared as text and never parsed, so it opens no file and asks for nothing new.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvsift.server.api_errors import ApiError
from kvsift.server.settings import PlanText

AUTO = "auto"  # plan.syntax has it, and imports torch


class PlanList:
    """Plans by every spelling; a plan ``auto`` is listed as what it stands for.

    Args:
        given: as the server was started with; the first is that of requests without one.
        resolved: the same plans as the engine writes them.
    """

    def __init__(self, given: Sequence[PlanText], resolved: Sequence[str]) -> None:
        spellings = [spelling(text) if isinstance(text, str) else "" for text in given]
        pairs = [*enumerate(spellings), *((i, spelling(text)) for i, text in enumerate(resolved))]
        self._indices = {text: index for index, text in reversed(pairs) if text}
        both = zip(given, resolved, strict=True)
        names = (text if isinstance(text, str) and text.strip() != AUTO else name for text, name in both)
        self.names = list(dict.fromkeys(names))

    def index(self, plan: str | None) -> int:
        """Return the place of a plan; None is the first.

        Raises:
            ApiError: 400 for any other plan, with the list.
        """
        if plan is None:
            return 0
        if (index := self._indices.get(spelling(plan))) is None:
            text = f"the plan {plan!r} is not one of this server's: {'; '.join(self.names)}."
            raise ApiError(400, text, "plan_not_allowed", "sparsity")
        return index


def spelling(plan: str) -> str:
    """Return a plan without white space, its rules and their options in order."""
    rules = ("".join(rule.split()).split(":") for rule in plan.split(","))
    return ",".join(sorted(":".join([head, *sorted(options)]) for head, *options in rules))
