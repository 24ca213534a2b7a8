"""Exact decoding: drafts under a plan, verified by dense attention (lossless self-speculation).

A verification feeds the last token and its drafts to the model in one pass that reads the KV cache once, and in which
each token gets the bits that it gets alone. The client then chooses from the logits as if dense steps had made them one
by one, with the same random number for each token, until its choice differs from the draft. Answers are those of dense
decoding, whatever was drafted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from kvsift.batching.exact.pace import Pace
from kvsift.batching.exact.repeats import Repeats

if TYPE_CHECKING:
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


@dataclass
class ExactReport:
    """What exact decoding did for one answer.

    Attributes:
        verified: number of proposed tokens -> verifications of so many.
        drafted, drafts_accepted: tokens that the plan drafted.
        drafts_wrong: drafts that differed from the dense token; those after one are neither accepted nor wrong.
        repeated, repeats_accepted: tokens that were proposed because they had followed the same text before.
        draft_s, verify_s: seconds of drafts, and of verifications.
        is_paused: drafts did not pay at the end.
    """

    verified: Counter[int] = field(default_factory=Counter)
    drafted: int = 0
    drafts_accepted: int = 0
    drafts_wrong: int = 0
    repeated: int = 0
    repeats_accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    is_paused: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {**vars(self), "verified": dict(sorted(self.verified.items()))}


class Proposal(NamedTuple):
    """Tokens to verify, those that followed a repeat of this length; or so many to draft first."""

    tokens: Sequence[int] = ()
    repeat: int = 0
    drafts: int = 0


class ExactDecoder:
    """Exact decoding of one sequence.

    Args:
        ids: tokens of the prompt.
        pace: decides how much is proposed.
        drafts: let the plan draft.
        repeats: propose what followed the same text before.

    Attributes:
        report: what was done so far.
    """

    def __init__(self, ids: Sequence[int], pace: Pace, drafts: bool = True, repeats: bool = True) -> None:
        self._pace, self._drafts = pace, drafts
        self._repeats = Repeats(ids) if repeats else None
        self.report = ExactReport()

    def propose(self, token: int, most: int) -> Proposal:
        """Decide what is verified with the last token that was chosen: ``most`` tokens after it."""
        length, repeated = 0, list[int]()
        if self._repeats is not None:
            self._repeats.extend([token])
            length, repeated = self._repeats.find(most)
        choice = self._pace.choose(length, len(repeated), max(most, 0) if self._drafts else 0)
        return Proposal(repeated[: choice.tokens], length) if choice.is_repeat else Proposal(drafts=choice.tokens)

    def learn(self, proposal: Proposal, accepted: int, draft_s: float, verify_s: float, is_wrong: bool) -> None:
        """Note how many of the proposed tokens were accepted, the seconds spent, and whether one was refused."""
        pace, report, proposed = self._pace, self.report, len(proposal.tokens)
        if proposal.repeat:
            pace.note_repeats(proposal.repeat, proposed, accepted)
            report.repeated, report.repeats_accepted = report.repeated + proposed, report.repeats_accepted + accepted
        elif proposed:
            pace.note_drafts(proposed, accepted, draft_s)
            report.drafted, report.drafts_accepted = report.drafted + proposed, report.drafts_accepted + accepted
            report.drafts_wrong, report.draft_s = report.drafts_wrong + is_wrong, report.draft_s + draft_s
        pace.note_verified(proposed + 1, accepted + 1, verify_s)
        report.verified[proposed] += 1
        report.verify_s += verify_s
        report.is_paused = pace.measured.is_paused
        if self._repeats is not None:
            self._repeats.extend(proposal.tokens[:accepted])


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
    draft_s, verify_s = verifying - started, perf_counter() - model.setup_s - verifying
    for row, logits_of_row in zip(rows, every):
        proposal, accepted, token = proposals[row], 0, None
        for logits, proposed in zip(logits_of_row, [*proposal.tokens, None]):
            row.num_cached += 1
            token = tell(row, logits)
            if token is None or token != proposed:
                break
            accepted += 1
        assert row.exact is not None
        row.exact.learn(proposal, accepted, draft_s, verify_s, token is not None and accepted < len(proposal.tokens))
        if token is not None:
            model.undo(row)
