"""How far the predictions of a plan are from those of dense decoding over the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsift.engine.document import Document
from kvsift.engine.model_runner import ModelRunner
from kvsift.models.transformers import feeding
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
    runner: ModelRunner, document: Document, last: int, targets: Sequence[int], plan: Plan
) -> tuple[Tensor, dict[str, Any]]:
    """Decode a text token by token under a plan, each after all tokens before it.

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
    cache, tokens = document.prefill(plan, len(targets)), [last, *targets[:-1]]
    fused = None if plan.is_guarded or plan.wants_hidden else runner.fast_path.fused(runner.model)
    if fused is None:  # a guard decides token by token, and foreseen queries come from transformers' modules
        logits = torch.stack([runner.prefill(cache, [token], phase="decode")[0, -1] for token in tokens])
    else:  # one pass, in which each token is attended as if it had come alone
        with feeding(cache, "decode"):
            logits = fused.verify(torch.tensor(tokens, device=runner.device), cache)
    return logits.float().log_softmax(-1).cpu(), cache.stats.report()


def fidelity(predicted: Tensor, dense: Tensor, targets: Sequence[int]) -> Fidelity:
    """Compare log-probabilities [num_targets, vocabulary] of a plan with those of dense decoding."""
    nll = -float(predicted.gather(1, torch.tensor(targets).unsqueeze(1)).mean())
    divergence = torch.nn.functional.kl_div(predicted, dense, reduction="batchmean", log_target=True)
    agreement = (predicted.argmax(-1) == dense.argmax(-1)).float().mean()
    return Fidelity(nll, float(divergence), float(agreement))
