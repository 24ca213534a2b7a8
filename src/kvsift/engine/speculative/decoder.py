"""What exact decoding proposes for one answer, and what it learns from its verifications."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvsift.engine.speculative.pace import Pace
from kvsift.engine.speculative.repeats import Repeats


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
        learns: the plan learns from verifications, which then take longer than dense steps.

    Attributes:
        pace: the pace as given.
        drafts: the drafts as given.
        is_paused: nothing is proposed now, and drafts need not learn from this step: they pause, or the time of a dense
            step is to be measured.
        report: what was done so far.
    """

    def __init__(self, ids: Sequence[int], pace: Pace, drafts: bool = True, learns: bool = False) -> None:
        self.pace, self.drafts, self.is_paused, self._learns = pace, drafts, False, learns
        self._repeats = Repeats(ids)
        self._is_known = False  # the last token is among ``_repeats``
        self.report = ExactReport()

    def propose(self, token: int, most: int, is_ahead: bool) -> Proposal:
        """Decide what is verified with the last token that was chosen: ``most`` tokens after it, none if the step that
        feeds it alone is on its way."""
        if not self._is_known:  # else the step after its proposal has failed, and is taken again
            self._repeats.extend([token])
        self._is_known = True
        length, repeated = self._repeats.find(most)
        choice = self.pace.choose(length, len(repeated), max(most, 0) if self.drafts and not is_ahead else 0)
        known = self.pace.measured
        self.is_paused = not choice.tokens and (not self.drafts or known.left > 0 or known.is_due)
        if is_ahead:
            return Proposal()
        return Proposal(repeated[: choice.tokens], length) if choice.is_repeat else Proposal(drafts=choice.tokens)

    def learn(
        self, proposal: Proposal, accepted: int, draft_s: float, verify_s: float, is_wrong: bool, most: int
    ) -> None:
        """Note how many of the proposed tokens were accepted, the seconds spent, whether one was refused, and how many
        tokens were verified at most in the sequences of the step."""
        pace, report, proposed = self.pace, self.report, len(proposal.tokens)
        tried = accepted + is_wrong  # nothing is known of what follows a wrong token, or the end of the answer
        if proposal.repeat:
            pace.note_repeats(proposal.repeat, tried, accepted)
            report.repeated, report.repeats_accepted = report.repeated + proposed, report.repeats_accepted + accepted
        elif proposed:
            pace.note_drafts(tried, accepted, draft_s / proposed)
            report.drafted, report.drafts_accepted = report.drafted + proposed, report.drafts_accepted + accepted
            report.drafts_wrong, report.draft_s = report.drafts_wrong + is_wrong, report.draft_s + draft_s
        was_dense = most == 1 and (self.is_paused or not self._learns)
        if was_dense or (proposed and most > 1):
            pace.note_verified(most, verify_s)
        report.verified[proposed] += 1
        report.verify_s += verify_s
        report.is_paused = pace.measured.is_paused
        self._repeats.extend(proposal.tokens[:accepted])
        self._is_known = False
