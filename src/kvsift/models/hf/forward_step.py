"""A decode step of any model that the adapter takes, by its own forward pass.

Slower than ``fused_step``, whose launches are fused, but captured in a CUDA graph it costs no Python either. The
forward pass gets a cache whose layers append and attend on the device; positions come from the lengths there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import Cache

from kvsift.kernels.append import append
from kvsift.layer.accounting import RunStats
from kvsift.layer.paged_decode import DecodeBatch, DecodeLayer, StepMode
from kvsift.models.fused_step import FusedStep
from kvsift.models.hf.attention import AttendingLayer
from kvsift.models.hf.cache import SparseCache
from kvsift.models.hf.experts import take_experts
from kvsift.models.hf.rope import RopeLimits
from kvsift.models.hf.run import SparseRun
from kvsift.models.hf.slot_states import SlotStates, not_taken
from kvsift.models.hf.unwrap import device_of_inputs
from kvsift.plan.capabilities import verdict
from kvsift.plan.plan import Plan
from kvsift.types import LayerShape, Objections


class StepLayer(AttendingLayer):
    """A layer that appends one token per sequence and attends it through ``decode``."""

    def __init__(
        self, decode: DecodeLayer, summaries: Mapping[str, Tensor], mode: StepMode, watched: list[Tensor] | None
    ) -> None:
        super().__init__(decode.shape.layer)
        self._decode, self._summaries, self._mode, self._watched = decode, summaries, mode, watched

    def attend(self, shape: LayerShape, queries: Tensor, mask: Tensor | None, sink_logit: Tensor | None) -> Tensor:
        keys, values = self.taken()
        append(self._decode.kv, keys[:, :, 0], values[:, :, 0], self._summaries)
        queries = queries[:, :, 0].contiguous()
        if self._watched is not None:
            self._watched.append(queries)
        self._decode.sink_logit = sink_logit
        return self._decode.attend(queries, self._mode).unsqueeze(2)

    def attend_again(self, queries: Tensor) -> Tensor:
        return self._decode.attend(queries[:, :, 0].contiguous(), "dense").unsqueeze(2)


class ConstantTensors(TorchFunctionMode):
    """Keeps the tensors that a forward pass makes of a number on the host, and copies to its device, for the next pass:
    a capture forbids such copies (``Gemma3n``). Those that a capture asks for stay, since its CUDA graph reads them."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[Any, Tensor] = {}
        self._asked, self._captured = set[Any](), set[Any]()  # keys: of the last pass, of all captures

    def __enter__(self) -> Self:
        self._made = {key: made for key, made in self._made.items() if key in self._asked | self._captured}
        self._asked = set()
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given: Any = args[0] if args else None
        kind: Any
        if func == torch.tensor and isinstance(given, Number):
            number, kind = given, type(given)
        elif func == Tensor.to and given.device.type == "cpu" and given.numel() == 1 and _leaves_cpu(args, kwargs):
            number, kind = given.item(), (given.dtype, given.shape)
        else:
            return func(*args, **kwargs)
        key = func, repr(number), kind, args[1:], *sorted(kwargs.items())
        if key not in self._made:
            self._made[key] = func(*args, **kwargs)
        (self._captured if _captures() else self._asked).add(key)
        return self._made[key].clone()  # the model may write to it


def _captures() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _leaves_cpu(args: Any, kwargs: Any) -> bool:
    where = kwargs.get("device", args[1] if len(args) > 1 else None)
    return isinstance(where, int) or (isinstance(where, str | torch.device) and torch.device(where).type != "cpu")


class TransformersStep:
    """A ``Step`` by the model's own forward pass.

    Args:
        model: one that ``Adapter.attach`` has taken, and to which there are no ``objections``.
        rotation: rotation of the cache (``models.hf.pinning``).
    """

    objections: ClassVar[Objections] = (  # to models
        (lambda model: "chunked_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()),
         "{it.__class__.__name__} has layers with chunked attention"),
        (lambda model: not_taken(SparseCache(model.config, SparseRun(Plan(), RunStats())).layers),
         "{it.__class__.__name__} has layers that no captured step takes ({found})"),
        (lambda model: (width := getattr(config := model.config.get_text_config(), "v_head_dim", None)) is not None
         and width != getattr(config, "head_dim", width),
         "{it.__class__.__name__} has values of another width than its keys"),
        (lambda model: (limits := RopeLimits.of(model)) is not None and limits.dynamic and limits,  # a step has one
         "{it.__class__.__name__} has RoPE frequencies of its own for every length ({found})"),
    )  # fmt: skip
    writes_states = False
    keeps_bits = False  # libraries add up products of one row and of several in other orders

    def __init__(self, model: Any, rotation: int | None = None) -> None:
        self._model, self._rotation, self._constants = model, rotation, ConstantTensors()
        take_experts(model)

    def angles(self, num_positions: int) -> Tensor:
        """Return an empty tensor: the model computes its own angles."""
        return torch.empty(0, device=device_of_inputs(self._model))

    def __call__(
        self, tokens: Tensor, angles: Tensor, batch: DecodeBatch, attention: Sequence[DecodeLayer],
        summaries: Sequence[Mapping[str, Tensor]], states: SlotStates, mode: StepMode,
        watched: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the logits after one more token per sequence."""
        layers = states.layers(batch)
        for layer, pools in zip(attention, summaries, strict=True):
            layers[layer.shape.layer] = StepLayer(layer, pools, mode, watched)
        cache = Cache(layers=[layers[index] for index in range(len(layers))])
        cache.rotation = self._rotation
        with self._constants:
            output = self._model(
                input_ids=tokens.unsqueeze(1),
                position_ids=(batch.lengths - 1).long().unsqueeze(1),
                past_key_values=cache,
                use_cache=True,
            )
        logits: Tensor = output.logits[:, -1].float()
        return logits


def kind_of_step(model: Any) -> tuple[str, list[str]]:
    """Return the ``Step`` of a model, "fused" or "own", "" if none can be captured, and why it is not a better one."""
    return verdict(model, {"fused": FusedStep.objections, "own": TransformersStep.objections})
