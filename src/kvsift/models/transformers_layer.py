"""One attention layer inside a transformers model: the cache layer, the attention function and the mask function.

Modeling code calls ``cache.update(k, v, layer)`` and hands the result to the attention function untouched. So
``SparseLayer.update`` returns itself twice, and the attention function finds the whole paged store where a tensor
used to be; no modeling file is changed.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from kvsift.errors import InputError
from kvsift.kernels.attention import attention_reference
from kvsift.kernels.merge import with_sink_logit
from kvsift.models.transformers_run import Run
from kvsift.runtime.sequence import SparseAttention
from kvsift.types import Chunk, LayerShape, Origin, Rope

NAME = "kvsift"  # of the attention implementation


class UnsupportedModel(InputError, AttributeError):
    """A model whose attention cannot be taken over; says which and why."""


class AttendingLayer(CacheLayerMixin):
    """A layer of a transformers cache that answers attention itself, for the tokens that ``update`` brought."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    rope: Rope | None = None  # of the model
    peers: tuple[int, ...] = ()  # layers like this one
    origin: Origin | None = None

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self._pending: tuple[Tensor, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedModel(
            f"this model's attention reads {name!r} of what its cache returned, so kvsift cannot stand in for the "
            "keys. Models whose attention passes the cache's result straight to the attention function work."
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._pending = key_states, value_states
        return self, self

    def taken(self) -> tuple[Tensor, Tensor]:
        """What ``update`` brought, once."""
        if self._pending is None:
            raise UnsupportedModel("attention was called twice for one cache update; kvsift cannot follow this model.")
        pending, self._pending = self._pending, None
        return pending

    @abstractmethod
    def attend(self, shape: LayerShape, queries: Tensor, mask: Tensor | None, sink_logit: Tensor | None) -> Tensor:
        """Store the tokens that ``update`` brought and attend them: [batch, num_query_heads, num_new, head_dim]."""

    def get_max_length(self) -> int:
        return -1


class SparseLayer(AttendingLayer):
    """A layer of a transformers cache that keeps its tokens in a paged store and answers attention itself.

    transformers counts columns, padding included; the store holds real tokens only, so a left-padded row answers
    as it does alone.
    """

    def __init__(self, run: Run, layer: int) -> None:
        super().__init__(layer)
        self.run, self.rope, self.peers, self.origin = run, run.rope, run.peers, run.origin
        self.foreseen: Tensor | None = None  # what the coming tokens would ask of the input of the layer below
        self.columns = 0
        self.valid: Tensor | None = None  # bool [batch, columns] on the host; None while nothing was padding
        self.rotation: int | None = None  # of the keys (``transformers_pinning``); None: not decided
        self.attention: SparseAttention | None = None

    def __getattr__(self, name: str) -> Any:
        in_use = "" if "run" not in self.__dict__ else self.run.attention_in_use()
        if in_use not in ("", NAME):
            raise UnsupportedModel(
                f"a cache of kvsift reached the attention implementation {in_use!r} of its model, which reads {name!r} "
                "of it. Its kvsift.sparse block has ended, or set_attn_implementation was called. For a cache that "
                "outlives a block use kvsift.make_cache(model, plan)."
            )
        return super().__getattr__(name)

    # properties, but made by calls: transformers' constructor assigns None to both
    keys = property(lambda self: self._gathered(0), lambda self, tensor: self._refuse_setting(tensor))
    values = property(lambda self: self._gathered(1), lambda self, tensor: self._refuse_setting(tensor))

    def _refuse_setting(self, tensor: Tensor | None) -> None:
        if tensor is not None:
            raise InputError("a layer of kvsift's cache stores tokens by update(); its keys and values cannot be set.")

    def _gathered(self, which: int) -> Tensor | None:
        """A copy of all keys (0) or values (1), [batch, num_kv_heads, columns, head_dim], 0 in columns of padding."""
        if self.attention is None:
            return None
        rows = [self.attention.stored(row)[which] for row in range(self.attention.store.num_rows)]
        columns = max(self.columns, *(row.shape[1] for row in rows))
        found = rows[0].new_zeros(len(rows), rows[0].shape[0], columns, rows[0].shape[2], device=self.device)
        for row, tokens in enumerate(rows):
            where = slice(tokens.shape[1]) if self.valid is None else self.valid[row].to(self.device)
            found[row, :, where] = tokens.to(self.device)
        return found

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.columns += key_states.shape[2]
        return super().update(key_states, value_states)

    def check_rows(self, num_rows: int) -> None:
        """Refuse a batch of another size than what is cached; nothing has been stored yet."""
        cached = num_rows if self.attention is None or self.run.rows else self.attention.store.num_rows
        if num_rows != cached:
            raise InputError(
                f"this cache holds {cached} rows and the input has {num_rows} (beams and returned sequences are rows). "
                "Pass as many rows, or call the cache's batch_repeat_interleave or batch_select_indices first."
            )

    def check_mask(self, mask: Tensor) -> None:
        """Refuse a mask, as the model was given it, that we cannot follow; nothing has been stored yet."""
        if mask.ndim != 2:
            raise _row_per_query(mask)
        if self.columns:
            _check_cached(mask[:, : self.columns].bool().cpu(), self._valid_so_far(len(mask), self.columns))

    def attend(self, shape: LayerShape, queries: Tensor, mask: Tensor | None, sink_logit: Tensor | None) -> Tensor:
        """Store the tokens that ``update`` brought and attend them: [batch, num_query_heads, num_new, head_dim].

        queries [batch, num_query_heads, num_new, head_dim]; mask bool [batch, 1, 1, columns], True is a real token.
        """
        keys, values = self.taken()
        foreseen, self.foreseen = self._foresight(), None
        if mask is not None and (mask.dtype != torch.bool or mask.shape[1:3] != (1, 1)):
            raise _row_per_query(mask)
        batch, _, num_new, _ = keys.shape
        if self.attention is None:
            num_rows = len(self.run.rows) or batch
            run = self.run
            self.attention = SparseAttention(
                shape, run.plan, num_rows, keys, run.stats, run.reserve, run.relay, run.placement
            )
            if self.run.rows:
                self.attention.store.reserve_rows(self.run.rows)
        new = self._new_valid(mask, batch, num_new)
        if new is None:
            chunk = Chunk(queries, keys, values, [num_new] * batch, foreseen)
            return self.attention.attend(chunk, min(self.run.decode_tokens, num_new), sink_logit, self.run.row)
        # Padding goes behind the real tokens for the store, and the answers back to their columns.
        order = (~new).to(torch.int8).sort(dim=1, stable=True).indices.to(keys.device)  # [batch, num_new]
        lengths, foreseen = new.sum(1).tolist(), None if foreseen is None else _take(foreseen, order)
        chunk = Chunk(_take(queries, order), _take(keys, order), _take(values, order), lengths, foreseen)
        packed = self.attention.attend(chunk, min(self.run.decode_tokens, num_new), sink_logit)
        output = torch.zeros_like(packed).scatter_(2, order[:, None, :, None].expand_as(packed), packed)
        for row in (~new).any(1).nonzero().flatten().tolist():
            # Generation goes on from the last column of a prompt, which only drafts follow: if that one is padding, it
            # is the last to be so.
            column = int((~new[row]).nonzero()[-1])
            here, behind = slice(column, column + 1), int(new[row, column:].sum())
            length = self.attention.store.lengths[row] - behind
            output[row, :, here] = self.attention.attend_stored(row, queries[row, :, here], length, sink_logit)
        return output

    def _foresight(self) -> Tensor | None:
        """What the coming tokens would ask of the input of the layer below, where that is wanted and one lies below."""
        run = self.run
        if self.foreseen is None and run.foresees and self.layer != run.peers[0]:
            raise UnsupportedModel(
                f"the queries of layer {self.layer} were not foreseen: this model's attention modules are not called "
                f"with their cache by name, and the plan {run.plan} needs to hear from the layer below."
            )
        return self.foreseen

    def _new_valid(self, mask: Tensor | None, batch: int, num_new: int) -> Tensor | None:
        """Which of the new columns are real tokens, None for all; remembers them."""
        past = self.columns - num_new
        if mask is None and self.valid is None:
            return None
        before = self._valid_so_far(batch, past)
        now = (
            torch.ones(batch, self.columns, dtype=torch.bool) if mask is None else mask[:, 0, 0].expand(batch, -1).cpu()
        )
        if mask is not None:
            _check_cached(now[:, :past], before)
        self.valid = torch.cat([before, now[:, past:]], 1)
        new = now[:, past:]
        return None if bool(new.all()) else new

    def _valid_so_far(self, batch: int, columns: int) -> Tensor:
        return torch.ones(batch, columns, dtype=torch.bool) if self.valid is None else self.valid

    def turn_to(self, row: int) -> None:
        """What comes next belongs to this row alone; ``columns`` are its own from now on."""
        self.columns = 0 if self.attention is None else self.attention.store.lengths[row]
        if self.attention is not None:
            self.attention.stats = self.run.stats

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def reset(self) -> None:
        self.columns, self.valid, self.attention, self._pending = 0, None, None, None
        self.is_initialized, self.rotation = False, None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end: -n removes n; a positive n keeps n (transformers 5.17 still calls it so)."""
        amount = int(tokens_to_remove)
        columns = min(amount, self.columns) if amount > 0 else self.columns + amount
        if columns < 0:
            raise InputError(f"cannot remove {-amount} tokens from a cache that holds {self.columns}.")
        if self.attention is not None:
            for row, length in enumerate(self._lengths(columns)):
                self.attention.crop(row, length)
        self.valid = None if self.valid is None else self.valid[:, :columns]
        self.columns, self.rotation = columns, self.rotation if columns else None

    @property
    def num_padding(self) -> int:
        """Columns that are padding in the row that has the fewest."""
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
        raise InputError("kvsift keeps KV on the device; a cache with offloading=True cannot hold its layers.")

    prefetch = offload


@torch.compiler.disable  # a compiled model runs it as it is: it changes with every length
def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function registered as "kvsift": sparse for our cache layers, exact dense for everything else."""
    if torch.is_grad_enabled() and query.requires_grad:
        raise InputError("kvsift is for inference: call the model under torch.inference_mode() or torch.no_grad().")
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    if isinstance(key, AttendingLayer):
        if not getattr(module, "is_causal", True):
            raise UnsupportedModel(
                "its attention sees both ways (is_causal=False); kvsift answers causal attention only."
            )
        if key._pending is None:
            raise UnsupportedModel("a layer attends what another layer has cached; kvsift gives every layer its own.")
        sizes = key.layer, query.shape[1], key._pending[0].shape[1], query.shape[3]
        shape = LayerShape(*sizes, scale, softcap, key.rope, key.peers, key.origin)
        output = key.attend(shape, query, attention_mask, s_aux)
    else:
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal  # a vision tower sees both ways
        output = _attend_tensors(query, key, value, attention_mask, scale, softcap, s_aux, causal)
    return output.transpose(1, 2).contiguous(), None


@torch.compiler.disable
def mask_forward(
    *, attention_mask: Tensor | None, mask_function: Any, local_size: int | None = None, **kwargs: Any
) -> Tensor | None:
    """Full layers: None, or bool [batch, 1, 1, columns] where there is padding. Local layers: their usual 4-D mask."""
    if local_size is not None:
        kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(attention_mask=attention_mask, mask_function=mask_function, local_size=local_size, **kwargs)
    if mask_function is bidirectional_mask_function:
        raise UnsupportedModel(
            "the model makes a mask for attention that is not plainly causal (of an encoder, or across to one); kvsift "
            "answers causal attention only."
        )
    if mask_function is not causal_mask_function:
        raise InputError(
            "this input needs attention that is not plainly causal (images seen both ways, or packed sequences); "
            "kvsift answers causal attention only. Pass one sequence per row, text only."
        )
    if (
        kwargs["kv_length"] != kwargs["q_offset"] + kwargs["q_length"]
    ):  # a static cache, which is longer than its tokens
        kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(attention_mask=attention_mask, mask_function=mask_function, **kwargs)
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask[:, None, None, : kwargs["kv_length"]].bool()


def _attend_tensors(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float | None,
    sink_logit: Tensor | None, causal: bool,
) -> Tensor:  # fmt: skip
    """Dense attention over plain tensors: local layers, and models run without a kvsift cache."""
    num_new, num_keys = query.shape[2], key.shape[2]
    visible = mask
    if causal and (mask is None or mask.shape[2] == 1 < num_new):
        past = torch.ones(num_new, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_new)
        visible = past if mask is None else past & mask
    if softcap is None and sink_logit is None:
        groups = query.shape[1] // key.shape[1]
        keys, values = (t.repeat_interleave(groups, 1) for t in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scale)
        return torch.nan_to_num(out)  # rows that are padding see nothing
    part = attention_reference(query, key, value, scale, mask=visible, softcap=softcap)
    return (part if sink_logit is None else with_sink_logit(part, sink_logit)).output


def _row_per_query(mask: Tensor) -> InputError:
    return InputError(
        f"kvsift takes a mask of real tokens, [batch, tokens]; {list(mask.shape)} has a row per query. Pass the 2-D "
        "mask; causality is implied."
    )


def _check_cached(now: Tensor, before: Tensor) -> None:
    if not torch.equal(now, before):
        raise InputError(
            "the attention mask hides or shows tokens that were cached the other way. Pass the mask of the whole "
            "sequence, as it was, with new columns at its end."
        )


def _take(tensor: Tensor, order: Tensor) -> Tensor:
    return tensor.gather(2, order[:, None, :, None].expand_as(tensor))
