"""Exact decoding: drafts under a plan, verified by dense attention (lossless self-speculation).

A verification feeds the last token and its drafts to the model in one pass that reads the KV cache once, and in which
each token gets the bits that it gets alone. The client then chooses from the logits as if dense steps had made them one
by one, with the same random number for each token, until its choice differs from the draft. Answers are those of dense
decoding, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from kvsift.engine.row import Row
from kvsift.engine.speculative.decoder import Proposal
from kvsift.engine.speculative.pace import decide_together

Logits = Tensor | int  # [vocabulary], or the token that the model has chosen from them


class Checked(NamedTuple):
    """What a model has made of the proposals of some rows.

    Attributes:
        proposed: tokens of each row, those that it has drafted.
        following: what follows the last token of each row, and each proposed one.
        draft_s, verify_s: seconds; captures count nowhere.
    """

    proposed: Sequence[Sequence[int]]
    following: Sequence[Sequence[Logits]]
    draft_s: float
    verify_s: float


class ExactModel(Protocol):
    """What exact decoding needs of a model. Rows are exact, and given together those of one group of the loop."""

    def most_verified(self, row: Row) -> int:
        """Tokens of the next verification of a row, at most."""

    def is_ahead(self, row: Row) -> bool:
        """Whether the step that feeds the last token of a row alone is on its way."""

    def check(self, rows: Sequence[Row], proposals: Sequence[Proposal]) -> Checked:
        """Draft where drafts are proposed; then store the last token of each row and the proposed ones, and attend
        them densely."""

    def undo(self, row: Row) -> None:
        """Forget what is stored of a row behind ``num_cached`` tokens."""


def step_exactly(model: ExactModel, rows: Sequence[Row], tell: Callable[[Row, Logits], int | None]) -> None:
    """Feed the last token of each row, and those after it that are proposed and accepted.

    Args:
        model: of the rows.
        rows: exact ones, that decode in one group.
        tell: called with what follows each token that is fed, in their order, which ``num_cached`` counts from then
            on; returns the token that was chosen, None if the answer has ended.
    """
    decoders = [row.exact for row in rows if row.exact is not None]
    most = [min(row.request.length - row.num_cached, model.most_verified(row)) - 1 for row in rows]
    ahead = [model.is_ahead(row) for row in rows]
    may = [number if each.drafts and not launched else 0 for each, number, launched in zip(decoders, most, ahead)]
    decide_together([each.pace for each in decoders], may)
    together = zip(rows, decoders, most, ahead, strict=True)
    proposals = [each.propose(row.token, number, launched) for row, each, number, launched in together]
    checked = model.check(rows, proposals)
    drafted = (len(tokens) for tokens, proposal in zip(checked.proposed, proposals) if proposal.drafts)
    draft_s = checked.draft_s / max(drafted, default=1)  # all rows draft at once
    most_proposed = max(map(len, checked.proposed))
    each_checked = zip(rows, decoders, proposals, checked.proposed, checked.following, strict=True)
    for row, decoder, proposal, proposed, following in each_checked:
        accepted, token = 0, None
        for logits, expected in zip(following, [*proposed, None]):
            token = tell(row, logits)
            if token is None or token != expected:
                break
            accepted += 1
        is_wrong = token is not None and accepted < len(proposed)
        learned = proposal._replace(tokens=proposed)
        decoder.learn(learned, accepted, draft_s * len(proposed), checked.verify_s, is_wrong, most_proposed)
        if token is not None:
            model.undo(row)
