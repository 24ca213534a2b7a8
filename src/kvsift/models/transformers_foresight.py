"""Queries foreseen one layer below: what a layer would ask, had it read what the attention below it read.

The input of an attention is nearly that of the one below, because a layer adds little to the residual stream. A layer's
queries of that input are its own forward pass with that input, cut short where attention would begin, so that norms,
biases and positions are the model's, whatever its architecture.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor, nn
from transformers import Cache

from kvsift.models.transformers_layer import AttendingLayer, SparseLayer, UnsupportedModel
from kvsift.types import LayerShape


class Foresight:
    """Hooks on the attentions of a model that tell every layer of a cache what it would have asked.

    Args:
        model: whose attention kvsift has taken over.

    Raises:
        UnsupportedModel: if its attentions cannot be found.
    """

    def __init__(self, model: nn.Module) -> None:
        found = attentions_of(model)
        if not found:
            raise UnsupportedModel(
                f"{type(model).__name__} has no attention modules whose layer is known, so the queries of a layer "
                "cannot be foreseen; infinigen cannot run on it."
            )
        self._handles = [each.register_forward_pre_hook(self._before_attention, with_kwargs=True) for each in found]

    def detach(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    def _before_attention(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
        run = getattr(cache, "run", None)
        if cache is None or run is None or not run.foresees:
            return
        below, run.hidden_below = run.hidden_below, args[0] if args else kwargs["hidden_states"]
        layer = cache.layers[attention.layer_idx]
        if below is not None and isinstance(layer, SparseLayer):
            layer.foreseen = foreseen(attention, below, args, kwargs)


class Listener(AttendingLayer):
    """Stands in for a cache: remembers what is asked of it, stores nothing and answers 0."""

    queries: Tensor

    def attend(self, shape: LayerShape, queries: Tensor, mask: Tensor | None, sink_logit: Tensor | None) -> Tensor:
        self.queries = queries
        return queries.new_zeros(*queries.shape[:3], self.taken()[1].shape[3])

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def reset(self) -> None:
        self._pending = None


def foreseen(attention: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What an attention that is called with these arguments would ask of other hidden states, after RoPE.

    hidden [batch, num_new, hidden] -> [batch, num_query_heads, num_new, head_dim].
    """
    listener = Listener(int(attention.layer_idx))  # type: ignore[arg-type]
    given = {name: listener if isinstance(value, Cache) else value for name, value in kwargs.items()}
    if args:
        args = (hidden, *args[1:])
    else:
        given["hidden_states"] = hidden
    attention.forward(*args, **given)  # not a call, which would come by the hook again
    return listener.queries


def attentions_of(model: nn.Module) -> list[nn.Module]:
    """Modules that attend for one layer: those that know their layer, hold none that does, and read hidden states."""

    def knows(module: nn.Module) -> bool:
        return isinstance(getattr(module, "layer_idx", None), int)

    found = [
        m for m in model.modules() if knows(m) and not any(knows(inner) for inner in m.modules() if inner is not m)
    ]
    return [m for m in found if "hidden_states" in signature(m.forward).parameters]
