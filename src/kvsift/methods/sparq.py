"""SparQ: tokens by logits over the channels that the queries use most (https://arxiv.org/abs/2312.04985).

The channels of a KV head are those with the largest |q|, summed over the heads of the group (in prefill over the
queries of the chunk too). The share f of |q| in the kept channels sets the temperature of the softmax of a head:

    logit = scale * q.k over the kept channels / sqrt(f),    share = softmax(logit).

The answer to a single query combines y, attention over the visible tokens, and v, the mean of all values so far:

    a * y + (1 - a) * v,    a = the shares of the visible tokens.

Deviation from the paper: sinks and a larger window are always visible, unless ``compat`` says otherwise. The paper
reads channels from a second copy of the keys (``second_copy``); by default whole keys are read. In prefill the
criterion of a single query is applied to a chunk, as in the tables of QuoKA, without the mean value.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvsift.methods.base import Phase
from kvsift.methods.checks import knob
from kvsift.methods.common.softmax_share import ShareMethod, mean_shares
from kvsift.methods.common.token_rows import TokenRows
from kvsift.methods.scoring import chosen_units, top_units, units_per_head
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Rest, Selection

MOST_SHARE = 1 - 2.0**-20  # of the other tokens: a part with infinitely more weight than another cannot be merged
TOKENS_PER_SUM = 256
AT_ONCE = 16  # blocks that are summed together, which bounds temporary memory


@dataclass
class SparQState:
    """Mean value and second copy of the keys of one sequence in one layer."""

    mean: ValueMean
    channels: ChannelRows

    def fork(self) -> SparQState:
        return SparQState(self.mean.fork(), self.channels.fork())

    def crop(self, length: int) -> None:
        self.mean.crop(length)
        self.channels.crop(length)


@dataclass(frozen=True)
class SparQ(ShareMethod):
    """Tokens by their share of attention over a few channels.

    Attributes:
        channels: kept of each KV head (r of the paper).
        mean_value: put the mean value in place of the tokens that a single query does not see.
        second_copy: store the keys by channel too, so that decode reads the kept channels alone; takes as much memory
            as the keys.
        compat: "paper": k = 128 tokens, the most recent 32 among them, in all layers. "code": the notebook's k = 64
            with 16 recent ones (its r is channels=16), and tokens by the sum of the heads' logits, where the paper
            sums shares.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    source: ClassVar[str] = "arXiv 2312.04985"

    channels: int = knob(32, 1)
    mean_value: bool = knob(True)
    second_copy: bool = knob(False)
    compat: Literal["paper", "code"] | None = knob(None)

    @property
    def budget_defaults(self) -> dict[str, Any]:
        sizes = {"paper": (128, 32), "code": (64, 16)}.get(self.compat or "")
        return {} if sizes is None else {"tokens": sizes[0], "window": sizes[1], "sinks": 0, "dense_layers": ()}

    def new_state(self, shape: LayerShape) -> SparQState:
        return SparQState(ValueMean(), ChannelRows())

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        sums = 8 / TOKENS_PER_SUM if self.mean_value else 0
        return shape.num_kv_heads * shape.head_dim * (sums + (2 if self.second_copy else 0))

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        shares = self.shares(state, shape, queries, start, reader)  # [num_query_heads, num_tokens]
        by_list = shares.unflatten(0, (self.num_selections(shape), -1))[..., candidates.tokens]
        mean = by_list.mean(1)
        keep = units_per_head(mean, 1 - mean.sum(-1), limit)
        # the softmax subtracts one number from all logits of a head, so logarithms of shares rank as logits do
        ranked = by_list.log().mean(1) if self.compat == "code" else mean
        chosen = chosen_units(ranked, keep, limit, candidates)
        if queries.shape[1] > 1 or not self.mean_value:
            return chosen
        unseen = shares[:, candidates.tokens].clone()
        units = chosen.units.repeat_interleave(shape.num_query_heads // len(chosen.units), 0)
        index = torch.where(units < 0, candidates.count, units - candidates.first)
        unseen = torch.nn.functional.pad(unseen, (0, 1)).scatter_(1, index, 0.0)
        share = unseen.sum(-1)[None, :, None].clamp_max(MOST_SHARE)
        value = state.mean.read(reader, start + 1).repeat_interleave(shape.group_size, 0)
        return replace(chosen, rest=Rest(value[None, :, None], share))

    def shares(self, state: Any, shape: LayerShape, queries: Tensor, start: int, reader: KVReader) -> Tensor:
        if queries.shape[1] > 1 or not self.second_copy:
            return super().shares(state, shape, queries, start, reader)
        kept = kept_channels(shape, queries, self.channels)
        rows = state.channels.of_channels(reader, start + 1, kept)  # [num_kv_heads, number of kept, num_tokens]
        surrogates = self.stand_ins(state, shape, queries, start, reader)
        of_heads = kept.repeat_interleave(shape.group_size, 0).unsqueeze(1)
        return mean_shares(shape, surrogates.gather(2, of_heads), rows.mT)

    def stand_ins(self, state: Any, shape: LayerShape, queries: Tensor, start: int, reader: KVReader) -> Tensor:
        grouped = queries.float().unflatten(0, (shape.num_kv_heads, -1))  # [kv heads, group, queries, head_dim]
        size = grouped.abs()
        chosen = kept_channels(shape, queries, self.channels)
        mask = torch.zeros_like(size[:, 0, 0]).scatter_(1, chosen, 1.0)[:, None, None]
        share = (size * mask).sum(-1, keepdim=True) / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
        return (grouped * mask / share.clamp_min(1e-6).sqrt()).flatten(0, 1)


def kept_channels(shape: LayerShape, queries: Tensor, count: int) -> Tensor:
    """Channels with the largest |q| in a group, summed over queries, int64 [num_kv_heads, count], ascending."""
    size = queries.float().abs().unflatten(0, (shape.num_kv_heads, -1))
    return top_units(size.sum((1, 2)), count)


@dataclass
class ValueMean:
    """Mean value of one sequence in one layer."""

    sums: Tensor | None = None  # float64 [num_kv_heads, n + 1, head_dim], of the first 0 to n blocks; never written to

    def read(self, reader: KVReader, stop: int) -> Tensor:
        """Mean of the first ``stop`` values, float32 [num_kv_heads, head_dim]."""
        while self.num_blocks < stop // TOKENS_PER_SUM:
            self._append(reader, min(self.num_blocks + AT_ONCE, stop // TOKENS_PER_SUM))
        whole = stop // TOKENS_PER_SUM
        total = reader.values(whole * TOKENS_PER_SUM, stop).double().sum(1)
        if self.sums is not None:
            total = total + reader.counted(self.sums[:, whole])
        return (total / stop).float()

    @property
    def num_blocks(self) -> int:
        return 0 if self.sums is None else self.sums.shape[1] - 1

    @torch.inference_mode()  # the sums outlive the caller's inference mode
    def _append(self, reader: KVReader, stop_block: int) -> None:
        first = self.num_blocks
        values = reader.values(first * TOKENS_PER_SUM, stop_block * TOKENS_PER_SUM).double()
        added = values.unflatten(1, (-1, TOKENS_PER_SUM)).sum(2).cumsum(1)
        if self.sums is None:
            self.sums = torch.nn.functional.pad(added, (0, 0, 1, 0))
        else:
            self.sums = torch.cat([self.sums, self.sums[:, -1:] + added], 1)

    def fork(self) -> ValueMean:
        return ValueMean(self.sums)  # shared: never written to

    def crop(self, length: int) -> None:
        if self.sums is not None:
            self.sums = self.sums[:, : length // TOKENS_PER_SUM + 1]


class ChannelRows(TokenRows):
    """Keys of one sequence in one layer by channel, [num_kv_heads, head_dim, capacity], copied when they are read."""

    at_once = sys.maxsize  # a copy needs no temporary memory
    axis = 2

    def of_channels(self, reader: KVReader, stop: int, channels: Tensor) -> Tensor:
        """Chosen channels of the first ``stop`` keys, [num_kv_heads, count, stop].

        channels int64 [num_kv_heads, count].
        """
        keys = self.filled(reader, stop, lambda keys: keys.mT)
        return reader.counted(torch.stack([rows[own, :stop] for rows, own in zip(keys, channels)]))
