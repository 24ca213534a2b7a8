"""Exact decoding: drafts under a plan, verified by dense attention (lossless self-speculation).

A verification feeds the last token and its drafts to the model in one pass that reads the KV cache once, and in which
each token gets the bits that it gets alone. The client then chooses from the logits as if dense steps had made them one
by one, with the same random number for each token, until its choice differs from the draft. Answers are those of dense
decoding, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

from torch import Tensor

from kvsift.batching.row import Row

Logits = Tensor | int  # [vocabulary], or the token that the model has chosen from them


class ExactModel(Protocol):
    """What exact decoding needs of a model. Rows are exact, and given together those of one group of the loop.

    Attributes:
        setup_s: seconds so far that belong to no token.
    """

    @property
    def setup_s(self) -> float: ...

    def most_verified(self, row: Row) -> int:
        """Tokens of the next verification of a row, at most."""

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> Sequence[Sequence[int]]:
        """Tokens under the plan of each row, after its last one; its cache is as before."""

    def verify(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> Sequence[Sequence[Logits]]:
        """Store consecutive tokens of each row and attend them densely; what follows each token."""

    def undo(self, row: Row) -> None:
        """Forget what is stored of a row behind ``num_cached`` tokens."""


def step_exactly(model: ExactModel, rows: Sequence[Row], tell: Callable[[Row, Logits], int | None]) -> None:
    """Feed the last token of each row, and those after it that are proposed and accepted.

    Args:
        model: of the rows.
        rows: exact ones, that decode in one group.
        tell: called with what follows each token that is fed, in their order, once ``num_cached`` counts it; returns
            the token that was chosen, None if the answer has ended.
    """
    proposals = {}
    for row in rows:
        assert row.exact is not None
        proposals[row] = row.exact.propose(row.token, min(row.length - row.num_cached, model.most_verified(row)) - 1)
    started, drafting = perf_counter() - model.setup_s, [row for row in rows if proposals[row].drafts]
    if drafting:
        drafted = model.draft(drafting, [proposals[row].drafts for row in drafting])
        proposals |= {row: proposals[row]._replace(tokens=tokens) for row, tokens in zip(drafting, drafted)}
    verifying = perf_counter() - model.setup_s
    every = model.verify(rows, [[row.token, *proposals[row].tokens] for row in rows])
    longest = max((len(proposals[row].tokens) for row in drafting), default=1)  # all rows draft at once
    draft_s, verify_s = (verifying - started) / longest, perf_counter() - model.setup_s - verifying
    for row, logits_of_row in zip(rows, every):
        proposal, accepted, token = proposals[row], 0, None
        for logits, proposed in zip(logits_of_row, [*proposal.tokens, None]):
            row.num_cached += 1
            token = tell(row, logits)
            if token is None or token != proposed:
                break
            accepted += 1
        assert row.exact is not None
        is_wrong = token is not None and accepted < len(proposal.tokens)
        row.exact.learn(proposal, accepted, draft_s * len(proposal.tokens), verify_s, is_wrong)
        if token is not None:
            model.undo(row)
