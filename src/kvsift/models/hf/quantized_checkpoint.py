"""Directories whose linear weights have 8 or 4 bits: the files checked against their configuration, and read."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvsift.errors import DamagedFile, WrongFile
from kvsift.kernels.scaled_weight import ScaledStack, ScaledWeight
from kvsift.models.fused_step import GEMMA_TYPES, MODEL_TYPES
from kvsift.models.hf.late_weight import LateWeight
from kvsift.models.hf.quantized_formats import Block, Shape, StoredFormat
from kvsift.models.quantized import FORMATS, GroupedCodes, Held

log = logging.getLogger("kvsift")
LINEAR_TYPES = (*MODEL_TYPES, "ministral", *GEMMA_TYPES, "qwen3_5_text")  # read in any format
# with experts, which are read in 8-bit floats; those of gpt-oss in MXFP4 (``float4_checkpoint``)
EXPERT_TYPES = "glm4_moe", "gpt_oss", "minimax_m2", "mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"
# In the files of models that also see or hear: names of their decoder's weights, and what they are called in a model
# that is no more than that; beginnings of all other names
DECODER_NAMES = {"^model.language_model.": "model.", "^language_model.model.": "model.",
                 "^language_model.lm_head": "lm_head"}  # fmt: skip
OTHERS = ("mtp.", *(f"{outer}{part}." for outer in ("", "model.") for part in (
    "visual", "vision_tower", "multi_modal_projector", "embed_vision", "audio_tower", "embed_audio"
)))  # fmt: skip
EXPERT = re.compile(r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)")
PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
UNUSED = "input_scale", "output_scale", "activation_scale", "q_scale", "k_scale", "v_scale", "weight_shape"


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """Weights of few bits in the files of a directory.

    Attributes:
        files: files of the directory.
        format: format of the weights.
        blocks: name of a layer -> outputs and inputs that share a scale.
        shapes: name of a layer -> [out, in].
    """

    files: tuple[Path, ...]
    format: StoredFormat
    blocks: Mapping[str, Block]
    shapes: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, config: Any, files: Sequence[Path], config_file: Path) -> QuantizedCheckpoint | None:
        """Check the weights of a directory; None if they are none that kvsift multiplies itself.

        Raises:
            InputError: if configuration and files contradict each other.
        """
        given, kind = getattr(config, "quantization_config", None), config.get_text_config(decoder=True).model_type
        types = (*LINEAR_TYPES, *EXPERT_TYPES)
        stored = None if given is None or kind not in types else StoredFormat.of(given, config_file)
        if stored is None or (kind in EXPERT_TYPES and stored.name != "fp8"):
            return None
        stored = replace(stored, kept=tuple(map(_own_name, stored.kept)))
        names = stored.names
        entries = entries_of(files, config_file, stored)
        layers = stored.layers(entries)
        blocks = {layer: stored.check(layer, entries, config_file) for layer in layers}
        lone = sorted(name for name in entries if name.endswith(f".{names.scales}")
                      and name.removesuffix(f".{names.scales}") not in blocks)  # fmt: skip
        if lone:
            raise DamagedFile(
                f"{config_file.parent} has {lone[0]}, and no {names.values} of {names.dtype} that it belongs to."
            )
        if not layers:
            raise DamagedFile(
                f"{config_file} says that weights are {stored.in_words}, and the files have no {names.values} of "
                f"{names.dtype}. Remove its quantization_config if they are plain weights."
            )
        if stored.asks_for_kv:
            log.warning("%s asks for keys and values in 8 bits (kv_cache_scheme); they keep --dtype", config_file)
        return cls(tuple(files), stored, blocks, {layer: stored.shape_of(layer, entries) for layer in layers})

    @property
    def num_values(self) -> int:
        """Numbers in weights of few bits."""
        return sum(num_out * num_in for num_out, num_in in self.shapes.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of few bits in the files; in memory about as many, where they stay."""
        num_scales = 0
        for layer, (num_out, num_in) in self.shapes.items():
            outs, ins = self.blocks[layer]
            num_scales += -(-num_out // (outs or num_out)) * -(-num_in // (ins or num_in))
        return self.num_values * self.format.bits // 8 + 2 * num_scales

    def stays(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether weights stay in few bits on a device, with rows of a dtype."""
        return FORMATS[self.format.name].stays(device, dtype) and not self.format.has_order

    @property
    def why_expanded(self) -> str:
        """What to do where they do not stay."""
        if self.format.has_order:
            return "Their groups have inputs from everywhere (desc_act, actorder): take a checkpoint made without"
        return f"They stay so on {FORMATS[self.format.name].where}"

    def weights(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """Return what transformers reads, by name.

        Raises:
            InputError: if scales or values are not finite.
        """
        names, stays, found = self.format.names, self.stays(device, dtype), dict[str, Any]()
        parts = {names.values, names.scales, names.zeros, names.order}
        for name, (file, stored) in self._places.items():
            layer, _, last = name.rpartition(".")
            if last not in UNUSED and not (layer in self.blocks and last in parts):
                shape = self._opened[file].get_slice(stored).get_shape()
                found[name] = LateWeight(shape, dtype, partial(self._plain, name))
        experts = self._experts()
        of_experts = {layer for own in experts.values() for layers in own for layer in layers}
        for name, own in experts.items():
            sizes = len(own), sum(self.shapes[layer][0] for layer in own[0]), self.shapes[own[0][0]][1]
            scaled = ([self._scaled(layer, device) for layer in layers] for layers in own)
            stack = ScaledStack.joined([*scaled]) if stays else None
            found[name] = LateWeight(sizes, dtype, partial(self._expanded_experts, own, dtype), stack)
        for layer, shape in self.shapes.items():
            if layer in of_experts:
                continue
            held = self.held(layer, device, dtype) if stays else None
            if stays and held is None:
                log.warning("%s is expanded: float16 does not hold its scales", layer)
            found[f"{layer}.weight"] = LateWeight(shape, dtype, partial(self.expanded, layer, dtype), held)
        return found

    def _experts(self) -> dict[str, list[list[str]]]:
        """Return the layers of each expert that one parameter of transformers has, by the name of that.

        Raises:
            InputError: if an expert lacks one, or theirs are not alike.
        """
        parts = {part: (name, place) for name, ways in PARTS.items() for way in ways for place, part in enumerate(way)}
        places: dict[str, dict[tuple[int, int], str]] = {}
        for layer in self.shapes:
            if (match := EXPERT.fullmatch(layer)) is not None:
                name, place = parts[match[3]]
                places.setdefault(f"{match[1]}.mlp.experts.{name}", {})[int(match[2]), place] = layer
        found = {}
        for name, own in places.items():
            numbers, parts_of_one = 1 + max(number for number, _ in own), len(PARTS[name.rpartition(".")[2]][0])
            layers = [[own.get((number, place), "") for place in range(parts_of_one)] for number in range(numbers)]
            is_whole = all(map(all, layers))
            outs = {tuple(self.shapes[layer][0] for layer in row) for row in layers if is_whole}
            ins = {(self.shapes[layer][1], self.blocks[layer][1]) for row in layers for layer in row if is_whole}
            if len(outs) != 1 or len(ins) != 1:
                raise DamagedFile(f"the experts of {name} in {self.files[0].parent} are not all there, or not alike.")
            found[name] = layers
        return found

    def _scaled(self, layer: str, device: torch.device) -> ScaledWeight:
        weight = self._read(layer, device)
        assert isinstance(weight, ScaledWeight), "other weights of experts are not read"
        return weight

    def _expanded_experts(self, experts: Sequence[Sequence[str]], dtype: torch.dtype) -> Tensor:
        return torch.stack([torch.cat([self.expanded(layer, dtype) for layer in own]) for own in experts])

    def close(self) -> None:
        """Let go of the files, whose pages would count as memory of the process; they are opened again when needed."""
        vars(self).pop("_opened", None)

    def _plain(self, name: str) -> Tensor:
        return self._stored(name).clone()  # no view of the file, which would keep all of it

    def held(self, layer: str, device: torch.device, dtype: torch.dtype) -> Held | None:
        """Return a weight as products on a device take it; None where float16 does not hold its scales."""
        read = self._read(layer, device)
        return read if isinstance(read, ScaledWeight) else read.held(device, dtype)

    def expanded(self, layer: str, dtype: torch.dtype) -> Tensor:
        """Return a weight [out, in] in a dtype, on the CPU."""
        return self._read(layer, torch.device("cpu")).expanded(dtype)

    def _read(self, layer: str, device: torch.device) -> ScaledWeight | GroupedCodes:
        names, (num_out, num_in), (outs, ins) = self.format.names, self.shapes[layer], self.blocks[layer]
        values, scales = (self._tensor(layer, part, device) for part in (names.values, names.scales))
        is_float = self.format.name == "fp8"
        if not scales.isfinite().all() or (is_float and (values.view(torch.uint8) & 0x7F == 0x7F).any()):
            file, _ = self._places[f"{layer}.{names.values}"]
            raise DamagedFile(f"{layer}.{names.values} in {file} or its scales hold numbers that are not finite.")
        scales = scales.t() if names.by_input and scales.dim() > 1 else scales
        if outs is None:  # as many as outputs, so that it can be joined with others
            scales, outs = scales.reshape(1, 1).expand(num_out, 1), 1
        scales = scales.reshape(-(-num_out // outs), -1).contiguous()
        if is_float:
            return ScaledWeight(values, scales.float(), outs, ins or num_in)
        codes, zeros = self.format.codes(
            values, self._tensor(layer, names.zeros, device) if self.format.has_zeros else None
        )
        if zeros is not None and (zeros == 1 << self.format.bits - 1).all():
            zeros = None
        return GroupedCodes(codes, scales, zeros, self.format.bits, self._order(layer, scales.shape[1], device))

    def _order(self, layer: str, num_groups: int, device: torch.device) -> Tensor | None:
        """The groups of a layer's inputs, if they do not follow one another."""
        name, num_in = f"{layer}.{self.format.names.order}", self.shapes[layer][1]
        if name not in self._places:
            return None
        groups = self._tensor(layer, self.format.names.order, device).long()
        if torch.equal(groups, torch.arange(num_in, device=device) * num_groups // num_in):
            return None
        is_known = groups.shape == (num_in,) and 0 <= int(groups.min()) <= int(groups.max()) < num_groups
        if not (self.format.has_order and is_known):
            raise DamagedFile(
                f"{name} in {self._places[name][0]} does not give {num_in} inputs the {num_groups} groups that the "
                "configuration calls for."
            )
        return groups

    def _tensor(self, layer: str, part: str, device: torch.device) -> Tensor:
        return self._stored(f"{layer}.{part}").to(device)

    def _stored(self, name: str) -> Tensor:
        file, stored = self._places[name]
        tensor: Tensor = self._opened[file].get_tensor(stored)
        return tensor

    @cached_property
    def _opened(self) -> dict[Path, Any]:
        return {file: safe_open(file, framework="pt") for file in self.files}

    @cached_property
    def _places(self) -> dict[str, tuple[Path, str]]:
        """The file of each tensor, and its name there."""
        opened = self._opened.items()
        return {name: (file, stored) for file, each in opened for name, stored in _own_names(each)}


def entries_of(files: Sequence[Path], config_file: Path, stored: StoredFormat) -> dict[str, tuple[str, Shape]]:
    """Return dtype and shape of each tensor of files, by its name in transformers' text model (``InputError``)."""
    if any(file.suffix != ".safetensors" for file in files):
        raise WrongFile(f"{config_file.parent} has {stored.in_words}, which are read from *.safetensors alone.")
    entries: dict[str, tuple[str, Shape]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            slices = ((name, opened.get_slice(stored)) for name, stored in _own_names(opened))
            entries |= {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices}
    return entries


def has_head(files: Sequence[Path]) -> bool:
    """Whether safetensors files have a decoder's head; files of other kinds are not looked into."""
    for file in files:
        with suppress(SafetensorError), safe_open(file, framework="pt") as opened:
            if any(name == "lm_head.weight" for name, _ in _own_names(opened)):
                return True
    return False


def _own_names(opened: Any) -> Iterator[tuple[str, str]]:
    """The name of each tensor of an opened file in transformers' text model, and in the file; others are left out."""
    names = (name for name in opened.keys() if not name.startswith(OTHERS))  # noqa: SIM118
    return ((_own_name(name), name) for name in names)


def _own_name(name: str) -> str:
    for pattern, own in DECODER_NAMES.items():
        name = re.sub(pattern, own, name)
    return name
