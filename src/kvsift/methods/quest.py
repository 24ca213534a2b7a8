"""Quest: pages by an upper bound of their logits (https://arxiv.org/abs/2406.10774), or by another page summary.

score(page) = sum over channels c of max(q_c * min_c, q_c * max_c), the largest logit the page could hold.

Deviation from the paper, unless ``compat`` asks for it:
- sinks and a local window, which includes the incomplete page, are always visible and count in the budget;
- query heads that share a KV head share a selection (by their largest scaled score), so a page is fetched once;
- ``score_by`` names another summary, which costs as much or, with minmax_fp8, half as much;
- ``prefilter`` ranks blocks of pages first, by the same bound, and then the pages of the best blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvsift.errors import Conflict
from kvsift.methods.checks import knob
from kvsift.methods.pages import SummaryMethod


@dataclass(frozen=True)
class Quest(SummaryMethod):
    """Pages by the score of their summary, in decode; prefill is dense.

    Attributes:
        compat: "paper": Algorithm 1: each query head selects, and every page is a candidate, even the incomplete one,
            which may not be selected (as in the public accuracy evaluation). "code": the public kernels, where the
            incomplete page is always attended and counts. Both without sinks or window.
    """

    compat: Literal["paper", "code"] | None = knob(None)

    source: ClassVar[str] = "arXiv 2406.10774"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compat is not None and (self.heads == "kv" or self.score_by != "minmax" or self.prefilter):
            raise Conflict(
                f"compat={self.compat!r} means heads='query' and score_by='minmax' without prefilter; leave those "
                "out, or compat."
            )
        if self.compat is not None:
            self._imply(heads="query")

    @property
    def budget_defaults(self) -> dict[str, Any]:
        if self.compat is None:
            return {}
        return {"sinks": 0, "window": 0 if self.compat == "paper" else 1}
