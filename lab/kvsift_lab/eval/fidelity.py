"""How far predictions under a plan are from those of dense decoding, of one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsift.api.document import Document
from kvsift.calibration.fidelity import decode_known
from kvsift.engine.engine import Engine
from kvsift.plan.plan import Plan


@dataclass(frozen=True)
class Fidelity:
    """Means over the predicted tokens.

    Attributes:
        nll: negative log-likelihood of the tokens that follow in the text.
        kl: KL(dense || plan), in nats.
        agreement: how often both find the same token likeliest.
    """

    nll: float
    kl: float
    agreement: float


@torch.inference_mode()
def predictions(
    runner: Engine, document: Document, last: int, targets: Sequence[int], plan: Plan
) -> tuple[Tensor, dict[str, Any]]:
    """Predict the tokens after a text under a plan, each after all tokens before it.

    Args:
        runner: of the document's model.
        document: the text before, without its last token.
        last: that token, which is decoded to predict the first target.
        targets: the tokens that follow in the text.
        plan: how to decode.

    Returns:
        Log-probabilities of every token in place of each target, float32 [num_targets, vocabulary] on the host, and the
        counters of the run.
    """
    cache, found = document.prefill(plan, len(targets)), list[Tensor]()
    decode_known(runner, [cache], [[last, *targets[:-1]]], lambda _, logits: found.append(logits.float()))
    return torch.cat(found).log_softmax(-1).cpu(), cache.stats.report()


def fidelity(predicted: Tensor, dense: Tensor, targets: Sequence[int]) -> Fidelity:
    """Compare log-probabilities [num_targets, vocabulary] of a plan with those of dense decoding."""
    nll = -float(predicted.gather(1, torch.tensor(targets).unsqueeze(1)).mean())
    divergence = torch.nn.functional.kl_div(predicted, dense, reduction="batchmean", log_target=True)
    agreement = (predicted.argmax(-1) == dense.argmax(-1)).float().mean()
    return Fidelity(nll, float(divergence), float(agreement))
