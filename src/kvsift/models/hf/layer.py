"""A layer of a transformers cache over a paged store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kvsift.errors import InputError, InvalidValue, UnsupportedCall, UnsupportedModel
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.methods.base import Phase
from kvsift.models.hf.attention import NAME, AttendingLayer, check_gradients
from kvsift.models.hf.run import SparseRun
from kvsift.types import Chunk, LayerShape


class SparseLayer(AttendingLayer):
    """A layer of a transformers cache that stores its tokens in pages and attends them itself.

    transformers counts columns, padding included; the store holds real tokens only, so a left-padded row gets the
    answer that it gets alone.
    """

    def __init__(self, run: SparseRun, layer: int) -> None:
        super().__init__(layer)
        self.run, self.rope, self.peers, self.origin = run, run.rope, run.peers, run.origin
        self.foreseen: Tensor | None = None  # queries of the next chunk, of the input of the layer below
        self.columns = 0
        self.valid: Tensor | None = None  # bool [batch, columns] on the host; None without padding
        self.rotation: int | None = None  # of the keys (``models.hf.pinning``); None: not set yet
        self.attention: SparseAttention | None = None

    def __getattr__(self, name: str) -> Any:
        in_use = "" if "run" not in self.__dict__ else self.run.attention_in_use()
        if in_use not in ("", NAME):
            raise UnsupportedCall(
                f"a cache of kvsift reached the attention implementation {in_use!r} of its model, which reads {name!r} "
                "of it. Its kvsift.sparse block has ended, or set_attn_implementation was called. For a cache that "
                "outlives a block use kvsift.make_cache(model, plan)."
            )
        return super().__getattr__(name)

    # properties with setters, since transformers' constructor assigns None to both
    keys = property(lambda self: self._gathered(0), lambda self, tensor: self._refuse_setting(tensor))
    values = property(lambda self: self._gathered(1), lambda self, tensor: self._refuse_setting(tensor))

    def _refuse_setting(self, tensor: Tensor | None) -> None:
        if tensor is not None:
            raise UnsupportedCall(
                "a layer of kvsift's cache stores tokens by update(); its keys and values cannot be set."
            )

    def _gathered(self, which: int) -> Tensor | None:
        """Return a copy of all keys (0) or values (1), [batch, num_kv_heads, columns, head_dim], 0 for padding."""
        if self.attention is None:
            return None
        rows = [self.attention.stored(row)[which] for row in range(self.attention.store.num_rows)]
        columns = max(self.columns, *(row.shape[1] for row in rows))
        copies = rows[0].new_zeros(len(rows), rows[0].shape[0], columns, rows[0].shape[2], device=self.device)
        for row, tokens in enumerate(rows):
            real = slice(tokens.shape[1]) if self.valid is None else self.valid[row].to(self.device)
            copies[row, :, real] = tokens.to(self.device)
        return copies if which == 0 else copies[..., : self.value_dim]

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        check_gradients(key_states)
        self.columns += key_states.shape[2]
        return super().update(key_states, value_states)

    def check_rows(self, num_rows: int) -> None:
        """Refuse a batch of another size than the cached one, before anything is stored."""
        cached = num_rows if self.attention is None else self.attention.store.num_rows
        if num_rows != cached:
            raise UnsupportedCall(
                f"this cache holds {cached} rows and the input has {num_rows} (beams and returned sequences are rows). "
                "Pass as many rows, or call the cache's batch_repeat_interleave or batch_select_indices first."
            )

    def check_mask(self, mask: Tensor) -> None:
        """Refuse an unsupported attention mask of the model's caller, before anything is stored."""
        if mask.ndim != 2:
            raise _row_per_query(mask)
        if self.columns:
            _check_cached(mask[:, : self.columns].bool().cpu(), self._valid_so_far(len(mask), self.columns))

    def attend(self, shape: LayerShape, queries: Tensor, mask: Tensor | None, sink_logit: Tensor | None) -> Tensor:
        """Store the tokens that ``update`` brought and attend them: [batch, num_query_heads, num_new, head_dim].

        Args:
            shape: shape of the layer.
            queries: [batch, num_query_heads, num_new, head_dim].
            mask: bool [batch, 1, 1, columns], True for real tokens; None: as before, and all new tokens are real.
            sink_logit: see ``SparseAttention``.
        """
        keys, values = self.taken()
        batch, _, num_new, _ = keys.shape
        decode_tokens = min(self.run.decode_tokens, num_new)
        foreseen, self.foreseen = self.foreseen, None
        if foreseen is None and decode_tokens and self.run.plan.wants_hidden and self.layer != self.run.peers[0]:
            raise UnsupportedModel(
                f"the queries of layer {self.layer} were not foreseen: this model's attention modules are not called "
                f"with their cache by name, and the plan {self.run.plan} needs the queries of the layer below."
            )
        if mask is not None and (mask.dtype != torch.bool or mask.shape[1:3] != (1, 1)):
            raise _row_per_query(mask)
        attention = self.attention = self.attention or self._new_attention(shape, keys)
        real = self._new_valid(mask, batch, num_new)
        chunk = Chunk(queries, keys, values, [num_new] * batch, foreseen)
        if real is None:
            return attention.attend(chunk, decode_tokens, sink_logit, exact=self.run.exact)
        return _attend_padded(attention, chunk, real, decode_tokens, sink_logit)

    def attend_again(self, queries: Tensor) -> Tensor:
        """As ``AttendingLayer``: densely, whatever the plan, which is about layers with tokens of their own."""
        assert self.attention is not None
        if self.valid is not None:
            raise UnsupportedCall(
                "layers of this model share keys and values, and are attended without padding. Pass prompts one by one."
            )
        return self.attention.attend_again(queries)

    def attend_new(
        self, queries: Tensor, keys: Tensor, values: Tensor, decode_tokens: int, scale: float, softcap: float | None
    ) -> Tensor:
        """As ``update`` and ``attend`` of a ``ForwardPass``, whose tokens are all real; the last ones are generated.

        queries [batch, num_query_heads, num_new, head_dim] -> the same shape; keys, values [batch, num_kv_heads,
        num_new, head_dim]; scale, softcap: of ``LayerShape``.
        """
        batch, num_kv_heads, num_new, head_dim = keys.shape
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.columns += num_new
        if self.valid is not None:
            self._new_valid(None, batch, num_new)
        if self.attention is None:
            sizes = self.layer, queries.shape[1], num_kv_heads, head_dim, scale, softcap
            shape = LayerShape(*sizes, self.run.rope, self.run.peers, self.run.origin)
            self.attention = self._new_attention(shape, keys)
        chunk = Chunk(queries, keys, values, [num_new] * batch)
        return self.attention.attend(chunk, decode_tokens, exact=self.run.exact)

    def adopt(
        self, shape: LayerShape, like: Tensor, length: int, stale: bool, chunk_size: int, sealed: Mapping[Phase, Any]
    ) -> None:
        """As ``SparseCache.adopt``, in a layer of this shape, keys of which are like ``like``."""
        self.lazy_initialization(like, like)
        self.attention = self._new_attention(shape, like.new_empty(1, 0))
        self.attention.adopt(length, stale, chunk_size, sealed)
        self.columns = length

    def open_like(self, other: SparseLayer) -> None:
        """Be ready to store the tokens of one sequence, in a layer like another one that has some."""
        assert other.attention is not None
        like = other.attention.like
        self.lazy_initialization(like, like)
        self.attention = self._new_attention(other.attention.shape, like.new_empty(1, 0))

    def begin_as(self, other: SparseLayer, length: int) -> None:
        """As ``SparseCache.begin_as``, once every layer is open."""
        assert self.attention is not None
        assert other.attention is not None
        self.attention.begin_as(other.attention, length)
        self.columns = length

    def undo(self, length: int) -> None:
        """As ``SparseCache.undo``; of a layer that has a state beside its tokens, those alone."""
        rotation, self._pending, self.foreseen = self.rotation, None, None
        SparseLayer.crop(self, length - self.columns)
        self.rotation = rotation

    def restore(
        self, shape: LayerShape, keys: Tensor, values: Tensor, summaries: Mapping[int, Mapping[str, Tensor]],
        device: torch.device, dtype: torch.dtype, chunk_size: int,
    ) -> None:  # fmt: skip
        """Begin an empty layer of one sequence with tokens that were cached elsewhere (``LayerCache.restore``).

        Args:
            shape: shape of the layer, without what belongs to the model.
            keys, values: [num_kv_heads, num_tokens, width], on any device.
            summaries: page size -> kind -> [num_kv_heads, num_pages, width]; those that are missing are computed.
            device, dtype: those of the model.
            chunk_size: tokens that methods observe at once.
        """
        like = torch.empty(1, 0, dtype=dtype, device=device)
        self.lazy_initialization(like, like)
        shape = shape._replace(layer=self.layer, rope=self.rope, peers=self.peers, origin=self.origin)
        self.attention = attention = self._new_attention(shape, like)
        if not attention.store.is_remote:
            keys, values = keys.to(device), values.to(device)
        attention.restore(keys, values, summaries.get(attention.store.page_size, {}), chunk_size)
        self.columns = keys.shape[1]

    def _new_attention(self, shape: LayerShape, keys: Tensor) -> SparseAttention:
        run, num_rows = self.run, len(self.run.rows) or len(keys)
        attention = SparseAttention(
            shape, run.plan, num_rows, keys, run.stats, run.reserve, run.messages, run.placement,
            run.table_of(num_rows), run.guards,
        )  # fmt: skip
        if run.rows:
            attention.store.reserve_rows(run.rows)
        return attention

    def _new_valid(self, mask: Tensor | None, batch: int, num_new: int) -> Tensor | None:
        """Return which of the new columns are real tokens, None for all, and extend ``valid`` by them."""
        past = self.columns - num_new
        if mask is None and self.valid is None:
            return None
        before = self._valid_so_far(batch, past)
        every = torch.ones(batch, self.columns, dtype=torch.bool) if mask is None else mask[:, 0, 0].expand(batch, -1)
        every = every.cpu()
        if mask is not None:
            _check_cached(every[:, :past], before)
        new = every[:, past:]
        self.valid = torch.cat([before, new], 1)
        return None if bool(new.all()) else new

    def _valid_so_far(self, batch: int, columns: int) -> Tensor:
        return torch.ones(batch, columns, dtype=torch.bool) if self.valid is None else self.valid

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def reset(self) -> None:
        self.columns, self.valid, self.attention, self._pending = 0, None, None, None
        self.is_initialized, self.rotation, self.run.table = False, None, None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end: -n removes n; a positive n keeps n (calls of transformers 5.17)."""
        amount = int(tokens_to_remove)
        columns = min(amount, self.columns) if amount > 0 else self.columns + amount
        if columns < 0:
            raise InvalidValue(f"cannot remove {-amount} tokens from a cache that holds {self.columns}.")
        if self.attention is not None:
            for row, length in enumerate(self._lengths(columns)):
                self.attention.crop(row, length)
        self.valid = None if self.valid is None else self.valid[:, :columns]
        self.columns, self.rotation = columns, self.rotation if columns else None

    @property
    def num_padding(self) -> int:
        """Padding columns of the row with the fewest of them."""
        return 0 if self.attention is None or self.valid is None else self.columns - max(self._lengths(self.columns))

    def _lengths(self, columns: int) -> list[int]:
        assert self.attention is not None
        if self.valid is None:
            return [columns] * self.attention.store.num_rows
        return [int(n) for n in self.valid[:, :columns].sum(1)]

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.attention is None:
            return
        rows = torch.arange(self.attention.store.num_rows)[indices.cpu()]
        self.attention.fork(rows.tolist())
        self.valid = None if self.valid is None else self.valid[rows]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.attention is not None:
            self.batch_select_indices(torch.arange(self.attention.store.num_rows).repeat_interleave(repeats))

    def offload(self) -> None:
        raise UnsupportedCall(
            "a cache with offloading=True cannot hold kvsift's layers; use placement='offload' instead."
        )

    prefetch = offload


class HybridLayer(SparseLayer, LinearAttentionLayer):
    """A layer with kvsift's attention beside a recurrent state, such as Mamba's, which stays transformers' own."""

    is_croppable = False

    def __init__(self, run: SparseRun, layer: int, number_of_states: int = 1) -> None:
        SparseLayer.__init__(self, run, layer)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *tokens: Tensor, **states: Any) -> None:
        """Prepare for keys and values, which are given by position, or for a state, which is given by name."""
        if tokens:
            SparseLayer.lazy_initialization(self, *tokens)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        SparseLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        raise UnsupportedCall(
            f"layer {self.layer} has a recurrent state, from which no token can be removed. Start with an empty cache."
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        SparseLayer.batch_select_indices(self, indices)
        LinearAttentionLayer.reorder_cache(self, indices)


def _attend_padded(
    attention: SparseAttention, chunk: Chunk, real: Tensor, decode_tokens: int, sink_logit: Tensor | None
) -> Tensor:
    """Attend a chunk with padding, real bool [batch, num_new]: the store takes padding after the real tokens, and
    outputs return to their columns."""
    queries, keys, values, _, foreseen = chunk
    order = (~real).to(torch.int8).sort(dim=1, stable=True).indices.to(keys.device)  # [batch, num_new]
    lengths, foreseen = real.sum(1).tolist(), None if foreseen is None else _take(foreseen, order)
    chunk = Chunk(_take(queries, order), _take(keys, order), _take(values, order), lengths, foreseen)
    packed = attention.attend(chunk, decode_tokens, sink_logit)
    output = torch.zeros_like(packed).scatter_(2, order[:, None, :, None].expand_as(packed), packed)
    for row in (~real).any(1).nonzero().flatten().tolist():
        # Generation continues from the last column of a prompt, followed only by drafts: if that column is padding,
        # it is the last padding of its row. It gets the output of the real token before it.
        column = int((~real[row]).nonzero()[-1])
        last, num_after = slice(column, column + 1), int(real[row, column:].sum())
        length = attention.store.lengths[row] - num_after
        output[row, :, last] = attention.attend_padding(row, queries[row, :, last], length, sink_logit)
    return output


def _row_per_query(mask: Tensor) -> InputError:
    return UnsupportedCall(
        f"kvsift takes a mask of real tokens, [batch, tokens]; {list(mask.shape)} has a row per query. Pass the 2-D "
        "mask; causality is implied."
    )


def _check_cached(now: Tensor, before: Tensor) -> None:
    if not torch.equal(now, before):
        raise UnsupportedCall(
            "the attention mask hides or shows tokens that were cached the other way. Pass the mask of the whole "
            "sequence, as it was, with new columns at its end."
        )


def _take(tensor: Tensor, order: Tensor) -> Tensor:
    return tensor.gather(2, order[:, None, :, None].expand_as(tensor))
