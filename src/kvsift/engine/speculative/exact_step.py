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

from kvsift.engine.sequence import EngineSequence
from kvsift.engine.speculative.decoder import Proposal
from kvsift.engine.speculative.pace import decide_together

Logits = Tensor | int  # [vocabulary], or the token that the model has chosen from them


class Checked(NamedTuple):
    """What a model has made of the proposals of some sequences.

    Attributes:
        proposed: tokens of each sequence, those that it has drafted.
        following: what follows the last token of each sequence, and each proposed one, but perhaps a last one that ends
            the answer.
        draft_s, verify_s: seconds; captures count nowhere.
    """

    proposed: Sequence[Sequence[int]]
    following: Sequence[Sequence[Logits]]
    draft_s: float
    verify_s: float


class ExactModel(Protocol):
    """What exact decoding needs of a model. Sequences are exact, and given together those of one group of the loop."""

    def most_verified(self, seq: EngineSequence) -> int:
        """Tokens of the next verification of a sequence, at most."""

    def is_ahead(self, seq: EngineSequence) -> bool:
        """Whether the step that feeds the last token of a sequence alone is on its way."""

    def check(self, seqs: Sequence[EngineSequence], proposals: Sequence[Proposal]) -> Checked:
        """Draft where drafts are proposed; then store the last token of each sequence and the proposed ones, and attend
        them densely."""

    def undo(self, seq: EngineSequence) -> None:
        """Forget what is stored of a sequence behind ``num_cached`` tokens."""


def step_exactly(
    model: ExactModel, seqs: Sequence[EngineSequence], notify: Callable[[EngineSequence, Logits], int | None]
) -> None:
    """Feed the last token of each sequence, and those after it that are proposed and accepted.

    Args:
        model: drafts and verifies.
        seqs: exact ones, that decode in one group.
        notify: called with what follows each token that is fed, in their order, which ``num_cached`` counts from then
            on; returns the token that was chosen, None if the answer has ended.
    """
    decoders = [seq.decoder for seq in seqs if seq.decoder is not None]
    most = [min(seq.request.length - seq.num_cached, model.most_verified(seq)) - 1 for seq in seqs]
    ahead = [model.is_ahead(seq) for seq in seqs]
    may = [number if each.drafts and not launched else 0 for each, number, launched in zip(decoders, most, ahead)]
    decide_together([each.pace for each in decoders], may)
    together = zip(seqs, decoders, most, ahead, strict=True)
    proposals = [each.propose(seq.token, number, launched) for seq, each, number, launched in together]
    checked = model.check(seqs, proposals)
    drafted = (len(tokens) for tokens, proposal in zip(checked.proposed, proposals) if proposal.drafts)
    draft_s = checked.draft_s / max(drafted, default=1)  # all sequences draft at once
    most_verified = max(map(len, checked.following))
    each_checked = zip(seqs, decoders, proposals, checked.proposed, checked.following, strict=True)
    for seq, decoder, proposal, proposed, following in each_checked:
        accepted, token = 0, None
        for logits, expected in zip(following, [*proposed, None]):
            token = notify(seq, logits)
            if token is None or token != expected:
                break
            accepted += 1
        is_wrong = token is not None and accepted < len(proposed)
        learned = proposal._replace(tokens=proposed)
        decoder.learn(learned, accepted, draft_s * len(proposed), checked.verify_s, is_wrong, most_verified)
        if token is not None:
            model.undo(seq)
