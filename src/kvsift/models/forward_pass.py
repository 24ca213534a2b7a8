"""Forward pass of a decoder over new tokens of one sequence or several; their caches attend.

The transformers forward pass of an 8B model spends a third of its time on norms, rotation, residuals and gates between
its matrix products (H200, 8K tokens: 75 of 226 ms). Weights and roundings here are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from kvsift.kernels.rms_norm import rms_norm
from kvsift.kernels.rotary import rotate_heads
from kvsift.methods.base import Phase
from kvsift.models.decoder import Decoder
from kvsift.models.hf.cache import SparseCache
from kvsift.models.hf.window import attend_window
from kvsift.models.native_step import NativeStep
from kvsift.models.projection import Norm
from kvsift.native.loader import AVAILABLE
from kvsift.native.product import MAX_ROWS, normalised, takes_rows
from kvsift.plan.capabilities import reason
from kvsift.threads import yield_to_others

MAX_SEQUENCES = MAX_ROWS  # that one pass decodes
FEW_TOKENS = 64  # whose logits are at hand at once
ANGLES, MOST_BLOCKS = 256, 32  # starts whose angles are computed at once for decode, and how many of these are kept


class ForwardPass:
    """Forward pass of a whole model.

    Args:
        step: its weights are used.
    """

    def __init__(self, step: Decoder) -> None:
        self._step = step
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}  # first position -> of ``ANGLES`` positions
        self.native: NativeStep | None = None  # where it is None or refuses a sequence, steps are composed
        if AVAILABLE and reason(step, NativeStep.of_weights) is None:
            self.native = NativeStep(step, self._angles_at)

    @cached_property
    def joins(self) -> bool:
        """Whether ``decode`` gives each sequence the bits that it has alone: the compiled core multiplies few rows."""
        return all(product.in_core for product in self._step.products)

    def reason_composed(self, cache: SparseCache) -> str | None:
        """Why steps of a sequence on a CPU, or verifications of an exact one, are composed; None: they are native,
        beside others that are."""
        if self.native is None:
            return reason(self._step, NativeStep.of_weights) if AVAILABLE else "the compiled core is missing"
        return reason(cache, NativeStep.of_caches, NativeStep.of_drafts if cache.run.exact else ())

    def prefill(
        self, tokens: Tensor, cache: SparseCache, phase: Phase, pause: Callable[[], bool] | None = None,
        score: Callable[[Tensor], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """Store and attend the next tokens of the sequence of a cache.

        Args:
            tokens: int64 [num_new].
            cache: a cache of the model.
            phase: "decode" attends each token as if it had been generated.
            pause: called between layers; may run other sequences through the model, and returns whether it has.
            score: called with logits [few tokens, vocabulary] of all tokens in their order.

        Returns:
            Logits of the last token, [1, 1, vocabulary].
        """
        return self._run(tokens, [cache], phase, pause, score=score)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, caches: Sequence[SparseCache]) -> Tensor:
        """Store and attend one generated token of each of several sequences, each as if it had come alone.

        Where ``joins``, up to ``MAX_SEQUENCES`` get the bits that each has alone.

        Args:
            tokens: int64 [sequences].
            caches: caches of the model, one for each sequence.

        Returns:
            Logits [sequences, 1, vocabulary].
        """
        logits = None if self.native is None else self.native(tokens, caches)
        return self._run(tokens, caches, "decode") if logits is None else logits.unsqueeze(1)

    @torch.inference_mode()
    def verify(self, tokens: Tensor, cache: SparseCache) -> Tensor:
        """As ``decode`` of consecutive tokens of one sequence, which are all known; a cache of which ``run.exact``
        attends them in one pass. Up to ``MAX_SEQUENCES``, and logits [tokens, vocabulary].
        """
        logits = None if self.native is None else self.native(tokens, [cache])
        return self._run(tokens, [cache], "decode", all_logits=True) if logits is None else logits

    @torch.inference_mode()
    def _run(
        self, tokens: Tensor, caches: Sequence[SparseCache], phase: Phase, pause: Callable[[], bool] | None = None,
        all_logits: bool = False, score: Callable[[Tensor], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend equal parts of the tokens with each cache; logits of the last token of each part, or of all tokens."""
        foreseen = phase == "decode" and any(cache.run.plan.wants_hidden for cache in caches)
        assert not foreseen, "queries are foreseen by transformers' modules"
        if not tokens.is_cuda:
            yield_to_others(len(tokens))
        step, num_new = self._step, len(tokens) // len(caches)
        decode_tokens = num_new if phase == "decode" else 0
        cos, sin = self._angles_of([cache.get_seq_length() for cache in caches], num_new)
        if step.scales_queries:
            scales = torch.cat([step.query_scales(cache.get_seq_length(), num_new) for cache in caches])
        x = step.embed(tokens)  # [sequences * num_new, hidden]
        for index, layer in enumerate(step.layers):
            heads = rotate_heads(
                layer.qkv(x, layer.before_attention), cos[layer.rope], sin[layer.rope], step.num_query_heads,
                step.num_kv_heads, q_norm=layer.q_norm, k_norm=layer.k_norm, norm_eps=layer.head_eps,
                norm_offset=step.norm_offset,
            )  # fmt: skip
            outputs = []
            for number, cache in enumerate(caches):
                own = slice(number * num_new, (number + 1) * num_new)
                queries, keys, values = (each if len(caches) == 1 else each[:, own] for each in heads)
                if step.scales_queries:
                    queries *= scales[own].unsqueeze(1)
                if layer.window is None:
                    of_one = queries.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0)
                    attended = cache.layers[index].attend_new(*of_one, decode_tokens, step.scale, step.softcap)[0]
                else:
                    attended = attend_window(cache.layers[index], queries, keys, values, step.scale, step.softcap)
                outputs.append(attended.transpose(0, 1).flatten(1))
            every = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
            if layer.after_attention is None:
                x = layer.output.add_to(x, every)
            else:
                x = _add_normalised(x, layer.output(every), layer.after_attention)
            del attended, outputs, every  # the memory of a long chunk, which the next layer needs
            if layer.after_mlp is None:
                x = layer.mlp.add_to(x, x, layer.before_mlp)
            else:
                x = _add_normalised(x, layer.mlp(x, layer.before_mlp), layer.after_mlp)
            if pause is not None and pause() and not tokens.is_cuda:
                yield_to_others(len(tokens))  # the others may have chosen another number of threads
        if score is not None:
            for part in x.split(FEW_TOKENS):
                score(step.capped(step.head(part, step.norm)))
        if all_logits:
            return step.capped(step.head(x, step.norm))
        last = x[-1:] if len(caches) == 1 else x[num_new - 1 :: num_new].contiguous()
        return step.capped(step.head(last, step.norm)).unsqueeze(1)

    def _angles_of(self, starts: Sequence[int], num_new: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of ``num_new`` positions from each start on, [ropes, positions, rotary_dim] both."""
        if num_new <= MAX_SEQUENCES:
            cos, sin = zip(*(self._angles_at(start, num_new) for start in starts))
            return (cos[0], sin[0]) if len(starts) == 1 else (torch.cat(cos, 1), torch.cat(sin, 1))
        positions = [torch.arange(start, start + num_new, device=self._step.device) for start in starts]
        return self._step.angles_of(positions[0] if len(positions) == 1 else torch.cat(positions))

    def _angles_at(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """As ``_angles_of``, of few positions: the model's own embedding takes as long for one as for many."""
        row, first = start % ANGLES, start - start % ANGLES
        if first not in self._angles:
            if len(self._angles) == MOST_BLOCKS:
                self._angles.clear()
            positions = torch.arange(first, first + ANGLES + MAX_SEQUENCES, device=self._step.device)
            self._angles[first] = self._step.angles_of(positions)
        cos, sin = self._angles[first]
        return cos[:, row : row + count], sin[:, row : row + count]


def _add_normalised(x: Tensor, added: Tensor, norm: Norm) -> Tensor:
    """``x + rms_norm(added)``."""
    if takes_rows(x) and len(x) <= MAX_ROWS:
        return normalised(added, norm, x)
    return rms_norm(added, *norm, residual=x)
