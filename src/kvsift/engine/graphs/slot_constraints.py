"""What changes the logits of slots before their tokens are chosen: penalties, biases, and the masks of grammars."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvsift.engine.graphs.feeds import uploaded
from kvsift.engine.sampling import ConstrainedChooser
from kvsift.kernels.constrain_logits import IN_PROMPT, constrain_logits

NEUTRAL = 1.0, 0.0, 0.0  # penalties


class SlotConstraints:
    """The constraints of slots, on the device of their logits.

    The device counts the tokens that it has chosen, so that penalties need nothing of the host. A mask comes from the
    host, which makes it while the forward pass runs: it depends on the token that the pass is fed.

    Args:
        logits: float32 [slots, vocabulary], those that steps keep.
        block: so many slots are consecutive tokens of a sequence.
    """

    def __init__(self, logits: Tensor, block: int) -> None:
        (num_slots, self.vocabulary), device = logits.shape, logits.device
        self._counts = torch.zeros_like(logits, dtype=torch.int32)
        self._bias = torch.zeros_like(logits)
        self._penalties = torch.tensor(NEUTRAL, device=device).unsqueeze(1).repeat(1, num_slots)  # [3, slots]
        words = -(-self.vocabulary // 32)
        self._masks = torch.full((num_slots, words), -1, dtype=torch.int32, device=device)
        # written over once the tokens were read that were chosen by it
        self._on_host = torch.full((num_slots, words), -1, dtype=torch.int32, pin_memory=logits.is_cuda)
        size = max(block, 1)
        before = torch.ones(size, size, dtype=torch.int32, device=device).tril()  # tokens of a block up to each
        self._fed, self._size = before.repeat(num_slots // size, 1), size  # [slots, size]

    def assign(self, seqs: Mapping[int, tuple[ConstrainedChooser, int]]) -> None:
        """Assign constraints to slots, each with the number of tokens that were fed before its next one; the other
        slots have none."""
        self._counts.zero_()
        self._bias.zero_()
        self._on_host.fill_(-1)
        penalties = [NEUTRAL] * len(self._counts)
        for slot, (constraint, num_fed) in seqs.items():
            sampling = constraint.sampling
            penalties[slot] = sampling.penalties
            if penalties[slot] != NEUTRAL:
                prompt, answer = constraint.fed(num_fed)
                self._counts[slot].index_fill_(0, prompt, IN_PROMPT)
                self._counts[slot].index_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))
            if sampling.logit_bias:
                self._bias[slot].index_copy_(0, *constraint.bias)
        self._penalties.copy_(uploaded(torch.tensor(penalties), self._penalties.device).T)

    def mask(self, masks: Mapping[int, Tensor]) -> None:
        """Let only some tokens come next in slots (``ConstrainedChooser.mask``)."""
        for slot, bits in masks.items():
            self._on_host[slot] = bits
        self._masks.copy_(self._on_host, non_blocking=True)

    def apply(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits [slots, vocabulary] behind the tokens that were fed, int64 [slots], as they are changed."""
        blocks = tokens.view(-1, 1, self._size).expand(-1, self._size, -1).reshape(len(tokens), self._size)
        self._counts.scatter_add_(1, blocks, self._fed)
        return constrain_logits(logits, self._counts, self._penalties, self._bias, self._masks)
