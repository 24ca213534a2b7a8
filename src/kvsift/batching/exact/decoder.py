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
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kvsift.batching.exact.pace import Pace
from kvsift.batching.exact.repeats import Repeats
from kvsift.models.transformers_cache import SparseCache

Foresee = Callable[[Tensor, int], int]  # logits [vocabulary], tokens from now -> the token that would be chosen
Take = Callable[[Tensor], int | None]  # logits [vocabulary] -> the token that is chosen; None: the answer has ended


class ExactModel(Protocol):
    """What exact decoding needs of a model.

    Attributes:
        most_verified: tokens of a verification.
    """

    most_verified: int

    def decode(self, caches: Sequence[SparseCache], tokens: Sequence[int]) -> Sequence[Tensor]:
        """Store and attend one generated token of each cache; logits [vocabulary] of each."""

    def verify(self, cache: SparseCache, tokens: Sequence[int]) -> Tensor:
        """Store consecutive tokens and attend them densely; logits [tokens, vocabulary]."""


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
    """Tokens to verify; ``repeat`` is the length of the repeat that they followed, 0 of drafts that took so long."""

    tokens: Sequence[int] = ()
    repeat: int = 0
    draft_s: float = 0.0


class ExactDecoder:
    """Exact decoding of one sequence, whose cache has ``run.is_exact``.

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

    def step(
        self, model: ExactModel, cache: SparseCache, token: int, most: int, foresee: Foresee, take: Take
    ) -> int | None:  # fmt: skip
        """Feed a token, and those after it that are proposed and accepted.

        Args:
            model: of the cache.
            cache: has all tokens before.
            token: the last that was chosen.
            most: tokens for which the cache has room after it.
            foresee: asked for drafts.
            take: called with the logits of each token that is fed, in their order.

        Returns:
            What ``take`` returned last; unless it is None, the cache ends before it.
        """
        start = cache.get_seq_length()
        proposal = self._propose(model, cache, token, min(most, model.most_verified - 1), foresee)
        started, accepted, next_token = perf_counter(), 0, None
        every = model.verify(cache, [token, *proposal.tokens])
        verify_s = perf_counter() - started
        for logits, proposed in zip(every, [*proposal.tokens, None]):
            next_token = take(logits)
            if next_token is None or next_token != proposed:
                break
            accepted += 1
        self._learn(proposal, accepted, verify_s, next_token is not None and accepted < len(proposal.tokens))
        if next_token is not None:
            cache.undo(start + 1 + accepted)
            if self._repeats is not None:
                self._repeats.extend(proposal.tokens[:accepted])
        return next_token

    def _propose(self, model: ExactModel, cache: SparseCache, token: int, most: int, foresee: Foresee) -> Proposal:
        length, repeated = 0, list[int]()
        if self._repeats is not None:
            self._repeats.extend([token])
            length, repeated = self._repeats.find(most)
        choice = self._pace.choose(length, len(repeated), max(most, 0) if self._drafts else 0)
        if choice.is_repeat:
            return Proposal(repeated[: choice.tokens], length)
        return self._draft(model, cache, token, choice.tokens, foresee) if choice.tokens else Proposal()

    def _draft(self, model: ExactModel, cache: SparseCache, token: int, count: int, foresee: Foresee) -> Proposal:
        """Tokens under the plan; the cache is as before."""
        started, start, tokens = perf_counter(), cache.get_seq_length(), [token]
        cache.run.is_exact = False
        try:
            for ahead in range(count):
                [logits] = model.decode([cache], tokens[-1:])
                tokens.append(foresee(logits, ahead))
        finally:
            cache.run.is_exact = True
            cache.undo(start)
        return Proposal(tokens[1:], draft_s=perf_counter() - started)

    def _learn(self, proposal: Proposal, accepted: int, verify_s: float, is_wrong: bool) -> None:
        pace, report, proposed = self._pace, self.report, len(proposal.tokens)
        if proposal.repeat:
            pace.note_repeats(proposal.repeat, proposed, accepted)
            report.repeated, report.repeats_accepted = report.repeated + proposed, report.repeats_accepted + accepted
        elif proposed:
            pace.note_drafts(proposed, accepted, proposal.draft_s)
            report.drafted, report.drafts_accepted = report.drafted + proposed, report.drafts_accepted + accepted
            report.drafts_wrong += is_wrong
        pace.note_verified(proposed + 1, accepted + 1, verify_s)
        report.verified[proposed] += 1
        report.draft_s, report.verify_s = report.draft_s + proposal.draft_s, report.verify_s + verify_s
        report.is_paused = pace.measured.is_paused
