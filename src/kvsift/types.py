"""The types every part of kvsift speaks; shapes are the contract. Imports torch and nothing of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Objections = tuple[tuple[Callable[[Any], object], str], ...]  # conditions and sentences (``plan.capabilities``)
Exact = Literal["", "dense", "learning"]  # attention to everything, whatever the plan, from which its method may learn


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary position embedding of a model: number pair i of a head turns by ``inv_freq[i]`` radians per position.

    Attributes:
        inv_freq: float32 [rotary_dim / 2]; the first rotary_dim numbers of a head turn.
        interleaved: pair i is numbers 2 i and 2 i + 1; otherwise i and i + rotary_dim / 2.
    """

    inv_freq: Tensor
    interleaved: bool = False


@dataclass(frozen=True, eq=False)
class Origin:
    """Which model a layer belongs to, for files that were made for one model.

    Attributes:
        name: its architecture in a few words.
        weights: the embedding of its tokens, a few numbers of which tell it from others of the same architecture.
    """

    name: str
    weights: Tensor

    @staticmethod
    def step(count: int) -> int:
        """Return the distance of numbers of a sample of so many."""
        return -(-count // 64)

    def sample(self) -> Tensor:
        """Numbers that lie evenly in the weights, float32 [at most 64]."""
        flat = self.weights.detach().flatten()
        return flat[:: self.step(len(flat))].float().cpu().clone(memory_format=torch.contiguous_format)


class LayerShape(NamedTuple):
    """What does not change about one attention layer while it runs."""

    layer: int  # true index in the model, sliding and linear layers counted
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # logit = scale * q.k
    softcap: float | None = None  # logit = softcap * tanh(logit / softcap)
    rope: Rope | None = None  # how queries and keys were turned, where that is known
    peers: tuple[int, ...] = ()  # true indices of all layers that are attended like this one, where they are known
    origin: Origin | None = None  # the model, where that is known

    @property
    def attention_index(self) -> int:
        """Number of the layer among its ``peers``, from 0, as budgets count ``dense_layers``; the true index where they
        are unknown, -1 if it is none of them."""
        if not self.peers:
            return self.layer
        return self.peers.index(self.layer) if self.layer in self.peers else -1

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_query_heads // self.num_kv_heads

    def capped(self, logits: Tensor) -> Tensor:
        """Soft-cap logits where the layer does."""
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Chunk(NamedTuple):
    """New tokens of a batch in one layer, after RoPE. Row b holds ``lengths[b]`` real tokens, first ones first."""

    queries: Tensor  # [batch, num_query_heads, num_new, head_dim]
    keys: Tensor  # [batch, num_kv_heads, num_new, head_dim]
    values: Tensor  # [batch, num_kv_heads, num_new, head_dim]
    lengths: Sequence[int]  # [batch], each at most num_new; what follows in a row is padding
    foreseen: Tensor | None = None  # like the queries: what they would be of the input of the layer below


class Part(NamedTuple):
    """Attention over some tokens. Parts over disjoint tokens merge exactly (``kernels.merge``)."""

    output: Tensor  # [batch, num_query_heads, num_queries, head_dim]
    lse: Tensor  # [batch, num_query_heads, num_queries] float32, natural log; -inf where a row saw nothing


class Rest(NamedTuple):
    """What queries do not see, by a method's estimate."""

    value: Tensor  # [batch, num_query_heads, num_queries, head_dim], stands for the values of all of it
    share: Tensor  # float32 [batch, num_query_heads, num_queries], its share of all attention, less than 1


@dataclass(frozen=True)
class Candidates:
    """Units a method may choose from: ids ``first`` to ``first + count - 1``.

    They are complete units that lie after the sinks and before the local window of every query that asks, so a
    method handles neither causality nor partial pages nor its own sinks.
    """

    first: int
    count: int
    unit_size: int  # tokens

    @property
    def stop(self) -> int:
        return self.first + self.count

    @property
    def units(self) -> slice:
        """Index of the candidates along a dimension of units."""
        return slice(self.first, self.stop)

    @property
    def tokens(self) -> slice:
        """Index of the candidates along a dimension of tokens."""
        return slice(self.first * self.unit_size, self.stop * self.unit_size)


@dataclass(frozen=True)
class Limit:
    """How much one selection may hold: at most ``units``, and no more than ``mass`` asks for.

    ``mass`` is the share of attention that always-visible and selected tokens must reach by the method's own
    estimate. ``always_lse`` [num_query_heads, num_queries] is the exact log-sum-exp over the always-visible tokens,
    -inf if there are none; it is given when ``mass`` is, when ``adaptive``, and to methods whose traits ask for it.
    Where ``adaptive``, heads may hold more units than others, ``units`` in the mean.
    """

    units: int
    mass: float | None = None
    always_lse: Tensor | None = None
    adaptive: bool = False


@dataclass
class Selection:
    """Unit ids that each head may see, on top of the tokens that are always visible.

    Attributes:
        units: int64 [num_heads, capacity], ascending and unique in a row, -1 pads at the end. num_heads is the
            number of query heads, of KV heads, or 1 when all heads share the row.
        unit_size: tokens per unit.
        log_weight: optional float32 [num_heads, capacity], added to the logits of the unit's tokens.
        extra: optional estimate of attention over what was left out, merged as if its tokens had been attended.
        full: no row is padded. Readers then need no check, which on a device would make the host wait.
        rest: optional estimate of all that stays unseen, for methods that know its share of the attention: the answer
            is (1 - share) times attention over what is visible, plus share times the value.
        for_above: chosen for the layers above alone; the layer that chose sees everything.
    """

    units: Tensor
    unit_size: int
    log_weight: Tensor | None = None
    extra: Part | None = None
    full: bool = False
    rest: Rest | None = None
    for_above: bool = False

    def to_mask(self, num_tokens: int) -> Tensor:
        """bool [num_heads, num_tokens], for tests and plots. Never on a hot path."""
        tokens = self.units.unsqueeze(-1) * self.unit_size + torch.arange(self.unit_size, device=self.units.device)
        seen = torch.zeros(self.units.shape[0], num_tokens + self.unit_size, dtype=torch.bool, device=self.units.device)
        seen.scatter_(1, tokens.masked_fill(self.units.unsqueeze(-1) < 0, num_tokens).flatten(1), True)
        return seen[:, :num_tokens]


class Moved(NamedTuple):
    """Other positions, from which sinks and selected tokens are seen. RoPE being a rotation, turning the queries (and
    the keys, if all of them are to stand at one place) is as if they had stood there from the beginning."""

    queries: Tensor  # int64 [num_queries]
    keys: int | None = None  # of every sink and selected token; None: where they are


class KVReader(Protocol):
    """What a method may read of one sequence in one layer: logical order, never addresses."""

    @property
    def length(self) -> int:
        """Tokens cached so far."""

    def keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, stop - start, head_dim]; everything by default."""

    def values(self, start: int, stop: int) -> Tensor:
        """[num_kv_heads, stop - start, head_dim]"""

    def paged_keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys of the positions start to stop where they are stored, for kernels that read through a table:
        [num_kv_heads, num_pages, page_size, head_dim], and the page of each logical one, int32."""

    def borrow(self, start: int, stop: int) -> Tensor:
        """Keys, to be read in part: ``count_bytes`` says how much of it was."""

    def borrow_in_place(self, start: int, stop: int) -> Any:
        """As ``borrow``, for the compiled core: a tensor or rows of a pool, ``native.shapes.HeadRows``."""

    def count_bytes(self, num_bytes: int) -> None:
        """So many bytes were read to choose, of what was borrowed."""

    def summary(self, kind: str, units: slice | Tensor) -> Tensor:
        """Packed summary rows of pages (``kernels.page_summary``), [num_kv_heads, len(units), width]; of pages chosen
        per head, int64 [num_heads, count], num_heads a multiple of the KV heads: [num_heads, count, width]."""

    def keys_of(self, pages: Tensor) -> Tensor:
        """Keys of complete pages chosen per head, int64 [num_heads, count], num_heads a multiple of the KV heads:
        [num_heads, count * page_size, head_dim]."""

    def from_below(self) -> Tensor | None:
        """What the method passed up for the same queries in this forward pass, in the nearest layer below where it
        chose; None in the first one."""

    def from_layer(self, layer: int) -> Tensor | None:
        """What the method passed up to be kept, for the same queries in this forward pass, in a layer below; None if
        it did not choose there."""

    def pass_up(self, message: Tensor, keep: bool = False) -> None:
        """Leave something for the layers above, for the same queries in this forward pass: until another layer passes
        something up, or for ``from_layer`` until the pass ends if it is to be kept. It is gone then, so a fork or a
        roll-back has nothing to do."""

    def counted(self, remembered: Tensor) -> Tensor:
        """What a method reads of its own memory, handed back as it is: it counts among the bytes read to choose."""
