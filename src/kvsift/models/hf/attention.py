"""kvsift's attention and mask functions for transformers, and the cache layers that they attend.

Modeling code calls ``cache.update(k, v, layer)`` and passes the result to the attention function unchanged. So
``AttendingLayer.update`` returns the layer itself twice, and the attention function receives the layer in place of the
keys; no modeling file is changed.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from kvsift.errors import UnsupportedCall, UnsupportedModel
from kvsift.kernels.attention import attention_reference
from kvsift.kernels.merge import with_sink_logit
from kvsift.types import LayerShape, Origin, Rope

NAME = "kvsift"  # of the attention implementation


class AttendingLayer(CacheLayerMixin):
    """A layer of a transformers cache that attends the tokens of its last ``update`` itself."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    rope: Rope | None = None  # of the model
    peers: tuple[int, ...] = ()  # indices of kvsift's layers
    origin: Origin | None = None

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.value_dim: int | None = None  # channels of values, which are stored as wide as keys; None: as many
        self._pending: tuple[Tensor, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedModel(
            f"this model's attention reads {name!r} of the keys from its cache, so kvsift cannot replace them. Models "
            "whose attention passes the cache's result unchanged to the attention function work. A cache works with "
            "the model that it was made for."
        )

    def to(self, device: torch.device) -> AttendingLayer:
        """Stay: transformers 5.17 moves keys that layers of Gemma 3n and 4 share to the device of each layer."""
        if device != self.device:
            raise UnsupportedModel(f"layers on {self.device} and {device} share keys. Keep the model on one device.")
        return self

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        head_dim, self.value_dim = key_states.shape[3], value_states.shape[3]
        if self.value_dim > head_dim:
            raise UnsupportedModel(
                f"its values have {self.value_dim} channels and its keys {head_dim}; kvsift stores values that are at "
                "most as wide as keys."
            )
        if self.value_dim < head_dim:  # stores and kernels have one width
            value_states = torch.nn.functional.pad(value_states, (0, head_dim - self.value_dim))
        self._pending = key_states, value_states
        return self, self

    @property
    def is_waiting(self) -> bool:
        """Whether the tokens of the last ``update`` were never attended."""
        return self._pending is not None

    def taken(self) -> tuple[Tensor, Tensor]:
        """Return and clear the keys and values of the last ``update``."""
        if self._pending is None:
            raise UnsupportedModel("attention was called twice for one cache update; kvsift cannot follow this model.")
        pending, self._pending = self._pending, None
        return pending

    @abstractmethod
    def attend(self, shape: LayerShape, queries: Tensor, mask: Tensor | None, sink_logit: Tensor | None) -> Tensor:
        """Store the tokens that ``update`` brought and attend them: [batch, num_query_heads, num_new, head_dim]."""

    def attend_again(self, queries: Tensor) -> Tensor:
        """Attend all tokens, those of the last ``update`` included, for a layer above that shares them: [batch,
        num_query_heads, num_new, head_dim]."""
        raise UnsupportedModel("queries of layers that share keys and values cannot be foreseen; name another method.")

    def get_max_length(self) -> int:
        return -1

    # Of a layer that keeps nothing: only masks ask for its lengths, and a single query needs none.

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def reset(self) -> None:
        self._pending = None


def check_gradients(tensor: Tensor) -> None:
    """Refuse a tensor through which gradients would flow (``InputError``)."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise UnsupportedCall(
            "kvsift supports inference only: call the model under torch.inference_mode() or torch.no_grad()."
        )


@torch.compiler.disable  # or it would be compiled anew for every length
def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend as the implementation "kvsift": sparsely for kvsift's cache layers, densely for everything else."""
    check_gradients(query)
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    if isinstance(key, AttendingLayer):
        if not getattr(module, "is_causal", True):
            raise UnsupportedModel(
                "its attention is bidirectional (is_causal=False); kvsift supports causal attention only."
            )
        if key._pending is not None:
            sizes = key.layer, query.shape[1], key._pending[0].shape[1], query.shape[3]
            shape = LayerShape(*sizes, scale, softcap, key.rope, key.peers, key.origin)
            output = key.attend(shape, query, attention_mask, s_aux)
        elif getattr(module, "is_kv_shared_layer", False):
            output = key.attend_again(query)
        else:
            raise UnsupportedModel("a layer attends the cache of another one, which this model does not say of itself.")
        output = output[..., : key.value_dim]
    else:
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal  # a vision tower is bidirectional
        output = attend_tensors(query, key, value, attention_mask, scale, softcap, s_aux, causal)
    return output.transpose(1, 2).contiguous(), None


@torch.compiler.disable
def mask_forward(
    *, attention_mask: Tensor | None, mask_function: Any, local_size: int | None = None, **kwargs: Any
) -> Tensor | None:
    """Return None for a full layer, or bool [batch, 1, 1, columns] with padding; for a local layer its 4-D mask."""
    if local_size is not None:
        kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(attention_mask=attention_mask, mask_function=mask_function, local_size=local_size, **kwargs)
    if mask_function is bidirectional_mask_function:
        raise UnsupportedModel(
            "the model makes a mask for attention that is not plainly causal (of an encoder, or cross-attention); "
            "kvsift supports causal attention only."
        )
    if mask_function is not causal_mask_function:
        raise UnsupportedCall(
            "this input needs attention that is not plainly causal (bidirectional over images, or packed sequences); "
            "kvsift supports causal attention only. Pass one sequence per row, text only."
        )
    if kwargs["kv_length"] != kwargs["q_offset"] + kwargs["q_length"]:  # a static cache is longer than its tokens
        kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(attention_mask=attention_mask, mask_function=mask_function, **kwargs)
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask[:, None, None, : kwargs["kv_length"]].bool()


def attend_tensors(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float | None,
    sink_logit: Tensor | None, causal: bool,
) -> Tensor:  # fmt: skip
    """Attend plain tensors densely: for local layers, and for models without a kvsift cache."""
    num_new, num_keys = query.shape[2], key.shape[2]
    visible = mask
    if causal and (mask is None or mask.shape[2] == 1 < num_new):
        past = torch.ones(num_new, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_new)
        visible = past if mask is None else past & mask
    if softcap is None and sink_logit is None:
        groups = query.shape[1] // key.shape[1]
        keys, values = (t.repeat_interleave(groups, 1) for t in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scale)
        return torch.nan_to_num(out)  # padding queries attend no key
    part = attention_reference(query, key, value, scale, mask=visible, softcap=softcap)
    return (part if sink_logit is None else with_sink_logit(part, sink_logit)).output
