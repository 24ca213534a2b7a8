"""What the tokens before and a grammar change in logits, of several sequences at once (``Sampling``)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.triton_shim import jit_for_any, runs_on_triton, tl, triton

IN_PROMPT = 1 << 30  # added to the count of a token
TILE = 1024  # tokens of a program


def constrain_logits(logits: Tensor, counts: Tensor, penalties: Tensor, bias: Tensor, masks: Tensor) -> Tensor:
    """Return logits with penalties and a bias, and -inf for the tokens that may not come.

    Args:
        logits: float32 [sequences, vocabulary].
        counts: int32 [sequences, vocabulary], how often the answer has a token, plus ``IN_PROMPT`` if the prompt has
            it.
        penalties: float32 [3, sequences]: for repetition, frequency and presence.
        bias: float32 [sequences, vocabulary].
        masks: int32 [sequences, ceil(vocabulary / 32)], a bit for each token that may come (``GrammarState.bits``).

    Returns:
        float32 [sequences, vocabulary]. A sequence with penalties 1, 0 and 0, no bias and all bits has its own logits.
    """
    run = constrain_logits_triton if runs_on_triton(logits) else constrain_logits_reference
    return run(logits, counts, penalties, bias, masks)


def constrain_logits_reference(
    logits: Tensor, counts: Tensor, penalties: Tensor, bias: Tensor, masks: Tensor
) -> Tensor:
    repetition, frequency, presence = penalties.unsqueeze(2)  # each [sequences, 1]
    used = counts & IN_PROMPT - 1
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed = torch.where(counts > 0, repeated, logits) - (frequency * used + presence * (used > 0)) + bias
    may = (masks.unsqueeze(2) >> torch.arange(32, device=masks.device) & 1).flatten(1)[:, : logits.shape[1]]
    return changed.masked_fill_(may == 0, -torch.inf)


def constrain_logits_triton(logits: Tensor, counts: Tensor, penalties: Tensor, bias: Tensor, masks: Tensor) -> Tensor:
    (num_seqs, vocabulary), changed = logits.shape, torch.empty_like(logits)
    with torch.cuda.device_of(logits):
        _constrain_kernel[num_seqs, triton.cdiv(vocabulary, TILE)](
            logits, counts, penalties, bias, masks, changed, num_seqs, vocabulary, masks.shape[1],
            IN_PROMPT=IN_PROMPT, TILE=TILE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return changed


@jit_for_any("num_seqs", "vocabulary", "words")
def _constrain_kernel(
    logits_ptr, counts_ptr, penalties_ptr, bias_ptr, masks_ptr, changed_ptr, num_seqs, vocabulary, words,
    IN_PROMPT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside, at = token < vocabulary, seq * vocabulary + token
    logits = tl.load(logits_ptr + at, mask=inside, other=0.0)
    count = tl.load(counts_ptr + at, mask=inside, other=0)
    bias = tl.load(bias_ptr + at, mask=inside, other=0.0)
    word = tl.load(masks_ptr + seq * words + token // 32, mask=inside, other=0)
    repetition = tl.load(penalties_ptr + seq)
    frequency = tl.load(penalties_ptr + num_seqs + seq)
    presence = tl.load(penalties_ptr + 2 * num_seqs + seq)
    used = count & (IN_PROMPT - 1)
    repeated = tl.where(logits > 0, tl.div_rn(logits, repetition + tl.zeros_like(logits)), logits * repetition)
    penalty = frequency * used.to(tl.float32) + tl.where(used > 0, presence, 0.0)
    changed = tl.where(count > 0, repeated, logits) - penalty + bias
    tl.store(changed_ptr + at, tl.where((word >> (token % 32)) & 1 != 0, changed, float("-inf")), mask=inside)
