"""Foreseen queries: approximate queries of a layer, computed from the input of the layer below.

The inputs of two consecutive attention modules are similar, because a layer adds little to the residual stream.
Foreseen queries come from the module's own forward pass over the lower input, up to its attention function, so norms,
biases and positions are those of the model, whatever its architecture.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor, nn
from transformers import Cache

from kvsift.errors import UnsupportedModel
from kvsift.models.hf.attention import AttendingLayer
from kvsift.models.hf.layer import SparseLayer
from kvsift.types import LayerShape


class Foresight:
    """Hooks on the attention modules of a model that give every layer of a cache its foreseen queries.

    Args:
        model: a model with kvsift's attention.

    Raises:
        UnsupportedModel: if it has no known attention modules.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = attentions_of(model)
        if not modules:
            raise UnsupportedModel(
                f"{type(model).__name__} has no attention modules whose layer is known, so the queries of a layer "
                "cannot be foreseen; infinigen cannot run on it."
            )
        self._handles = [m.register_forward_pre_hook(self._before_attention, with_kwargs=True) for m in modules]

    def detach(self) -> None:
        """Remove the hooks."""
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


class QueryCapture(AttendingLayer):
    """A substitute for a cache that keeps the queries, stores nothing and returns 0."""

    queries: Tensor

    def attend(self, shape: LayerShape, queries: Tensor, mask: Tensor | None, sink_logit: Tensor | None) -> Tensor:
        self.queries = queries
        return queries.new_zeros(*queries.shape[:3], self.taken()[1].shape[3])


def foreseen(attention: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the queries, after RoPE, of an attention module for other hidden states than those of its arguments.

    hidden [batch, num_new, hidden] -> [batch, num_query_heads, num_new, head_dim].
    """
    capture = QueryCapture(int(attention.layer_idx))  # type: ignore[arg-type]
    changed = {name: capture if isinstance(value, Cache) else value for name, value in kwargs.items()}
    if args:
        args = (hidden, *args[1:])
    else:
        changed["hidden_states"] = hidden
    attention.forward(*args, **changed)  # not a call, which would run the hook again
    return capture.queries


def attentions_of(model: nn.Module) -> list[nn.Module]:
    """Return the innermost modules with a layer index whose forward takes hidden states."""

    def is_indexed(module: nn.Module) -> bool:
        return isinstance(getattr(module, "layer_idx", None), int)

    def is_innermost(module: nn.Module) -> bool:
        return not any(is_indexed(inner) for inner in module.modules() if inner is not module)

    modules = [module for module in model.modules() if is_indexed(module) and is_innermost(module)]
    return [module for module in modules if "hidden_states" in signature(module.forward).parameters]
