"""Directories whose linear weights have 4 bits in groups of inputs: what their configuration says, checked against the
files.

Three spellings are read: compressed-tensors' "pack-quantized", GPTQ without a permutation of inputs, and AWQ's "gemm".
All pack eight codes into an int32, the first one lowest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kvsift.errors import DamagedFile, one_line
from kvsift.kernels.int4_weight import Int4Weight
from kvsift.kernels.triton_shim import HAVE_TRITON
from kvsift.models.decoder_step import MODEL_TYPES
from kvsift.models.hf.fp8_checkpoint import WeightToRead

PER_WORD = 8
AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7  # where a word has the codes of consecutive outputs
PARTS = {  # of a layer: codes, scales, zero points, and what is not needed
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", ("weight_shape",)),
    "gptq": ("qweight", "scales", "qzeros", ("g_idx",)),
    "awq": ("qweight", "scales", "qzeros", ()),
}
Entries = Mapping[str, tuple[int, ...]]  # name of a tensor -> its shape


@dataclass(frozen=True)
class Int4Format:
    """What a configuration says about weights of 4 bits.

    Attributes:
        kind: key of ``PARTS``.
        ins: inputs of a group; None: all.
        has_zeros: whether groups have zero points.
        offset: that is added to stored zero points.
    """

    kind: str
    ins: int | None
    has_zeros: bool
    offset: int = 0

    @classmethod
    def of(cls, given: Any, file: Path) -> Int4Format | None:
        """Read a ``quantization_config``; None for a format that transformers may know.

        Raises:
            InputError: for one that is incomplete.
        """
        settings = given if isinstance(given, Mapping) else given.to_dict()
        readers: dict[str, Callable[[Mapping[str, Any]], Int4Format | None]] = {
            "compressed-tensors": cls._of_compressed_tensors, "gptq": cls._of_gptq, "awq": cls._of_awq,
        }  # fmt: skip
        read = readers.get(str(settings.get("quant_method")))
        try:
            found = None if read is None else read(settings)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise DamagedFile(f"quantization_config in {file} cannot be used: {one_line(error)}.") from error
        return None if found is None or (found.ins is not None and found.ins % 32) else found

    @classmethod
    def _of_compressed_tensors(cls, settings: Mapping[str, Any]) -> Int4Format | None:
        if settings.get("format") != "pack-quantized":
            return None
        found = set()
        for group in settings["config_groups"].values():
            weights = group["weights"]
            if weights.get("num_bits") != 4 or weights.get("type") != "int" or weights.get("actorder") == "group":
                return None
            if weights.get("strategy") not in ("group", "channel"):
                return None
            ins = int(weights["group_size"]) if weights["strategy"] == "group" else None
            found.add(cls("compressed-tensors", ins, weights.get("symmetric") is False))
        return found.pop() if len(found) == 1 else None

    @classmethod
    def _of_gptq(cls, settings: Mapping[str, Any]) -> Int4Format | None:
        if int(settings["bits"]) != 4 or settings.get("desc_act"):
            return None
        ins, version = int(settings["group_size"]), settings.get("checkpoint_format") or "gptq"
        if version not in ("gptq", "gptq_v2"):
            return None
        return cls("gptq", None if ins < 0 else ins, True, 1 if version == "gptq" else 0)

    @classmethod
    def _of_awq(cls, settings: Mapping[str, Any]) -> Int4Format | None:
        bits = settings["bits"] if "bits" in settings else settings["w_bit"]
        ins = int(settings["group_size"] if "group_size" in settings else settings["q_group_size"])
        if int(bits) != 4 or str(settings.get("version", "gemm")).lower() != "gemm":
            return None
        return cls("awq", None if ins < 0 else ins, bool(settings.get("zero_point", True)))

    def shape_of(self, codes: tuple[int, ...]) -> tuple[int, int]:
        """Return [out, in] of a weight with codes of a shape."""
        first, second = codes
        if self.kind == "compressed-tensors":
            return first, PER_WORD * second
        return (second, PER_WORD * first) if self.kind == "gptq" else (PER_WORD * second, first)

    def check(self, layer: str, entries: Entries, folder: Path) -> None:
        """Refuse a layer whose parts are missing or of other shapes (``InputError``)."""
        codes, scales, zeros, _ = PARTS[self.kind]
        if len(entries[f"{layer}.{codes}"]) != 2:
            raise DamagedFile(f"{layer}.{codes} in {folder} should be a matrix.")
        num_out, num_in = self.shape_of(entries[f"{layer}.{codes}"])
        groups, rest = divmod(num_in, self.ins or num_in)
        if rest or num_in % 32:
            raise DamagedFile(f"{layer} in {folder} has {num_in} inputs, which are not whole groups of {self.ins}.")
        expected = {scales: (num_out, groups), zeros: (-(-num_out // PER_WORD), groups)}
        for part, shape in expected.items():
            if part == zeros and not self.has_zeros:
                continue
            name, wanted = f"{layer}.{part}", shape if self.kind == "compressed-tensors" else shape[::-1]
            if name not in entries:
                raise DamagedFile(f"{layer} in {folder} has no {part}: {name} is missing. Is the download complete?")
            if entries[name] != wanted:
                raise DamagedFile(f"{name} in {folder} is {list(entries[name])}, and should be {list(wanted)}.")

    def weight(self, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Int4Weight:
        """Return a weight from its parts as they are stored."""
        every, points = _codes(codes), None if zeros is None else _codes(zeros)
        if self.kind == "compressed-tensors":
            every = every.flatten(1)
            points = None if points is None else points.transpose(1, 2).flatten(0, 1)[: len(every)]
        elif self.kind == "gptq":
            every, scales = every.transpose(0, 1).flatten(1), scales.t()
            points = None if points is None else points.flatten(1).t()
        else:
            every, scales = every[..., AWQ_ORDER].flatten(1).t(), scales.t()
            points = None if points is None else points[..., AWQ_ORDER].flatten(1).t()
        points = None if points is None else (points + self.offset).contiguous()
        return Int4Weight.of(every.contiguous(), scales.contiguous(), points, self.ins or every.shape[1])


def _codes(words: Tensor) -> Tensor:
    """uint8 [..., 8] of int32 [...]."""
    shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts & 15).to(torch.uint8)


@dataclass(frozen=True)
class Int4Checkpoint:
    """Weights of 4 bits in the files of a directory.

    Attributes:
        files: of the directory.
        format: of the weights.
        shapes: name of a weight, as the model has it -> [out, in].
        num_bytes: in the files.
    """

    files: tuple[Path, ...]
    format: Int4Format
    shapes: Mapping[str, tuple[int, int]]
    num_bytes: int
    name = "int4"
    needs = "NVIDIA GPUs"

    @classmethod
    def of(cls, config: Any, files: Sequence[Path], config_file: Path) -> Int4Checkpoint | None:
        """Check the weights of a directory; None if they are none that kvsift multiplies itself.

        Raises:
            InputError: if configuration and files contradict each other.
        """
        given = getattr(config, "quantization_config", None)
        stored = None if given is None or config.model_type not in MODEL_TYPES else Int4Format.of(given, config_file)
        if stored is None or any(file.suffix != ".safetensors" for file in files):
            return None
        entries: dict[str, tuple[int, ...]] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                entries |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        codes = PARTS[stored.kind][0]
        layers = [name.removesuffix(f".{codes}") for name in entries if name.endswith(f".{codes}")]
        if not layers:
            raise DamagedFile(f"{config_file} says that weights have 4 bits, and the files have no {codes}.")
        shapes, num_bytes = {}, 0
        for layer in layers:
            stored.check(layer, entries, config_file.parent)
            num_out, num_in = shapes[f"{layer}.weight"] = stored.shape_of(entries[f"{layer}.{codes}"])
            num_bytes += num_out * num_in // 2 + 2 * num_out * num_in // (stored.ins or num_in)
        return cls(tuple(files), stored, shapes, num_bytes)

    @property
    def num_values(self) -> int:
        """Numbers in weights of 4 bits."""
        return sum(num_out * num_in for num_out, num_in in self.shapes.values())

    def stays(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether weights stay in 4 bits on a device, with rows of a dtype."""
        return HAVE_TRITON and device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)

    def weights(self, dtype: torch.dtype, stays: bool) -> dict[str, Any]:
        """As ``Fp8Checkpoint.weights``."""
        *parts, others = PARTS[self.format.kind]
        found: dict[str, Any] = {
            name: WeightToRead(partial(self.read, name), shape, dtype, stays) for name, shape in self.shapes.items()
        }
        layers = {name.removesuffix(".weight") for name in self.shapes}
        for name, file in self._places.items():
            layer, _, last = name.rpartition(".")
            if layer not in layers or last not in (*parts, *others):
                found[name] = self._opened[file].get_slice(name)
        return found

    def read(self, name: str, device: torch.device) -> Int4Weight:
        """Return a weight on a device.

        Raises:
            InputError: if its scales are not finite.
        """
        layer, parts = name.removesuffix(".weight"), PARTS[self.format.kind][:3]
        codes, scales, zeros = (f"{layer}.{part}" for part in parts)
        found = self._tensor(scales, device)
        if not found.isfinite().all():
            raise DamagedFile(f"{scales} in {self._places[scales]} holds numbers that are not finite.")
        points = self._tensor(zeros, device) if self.format.has_zeros else None
        return self.format.weight(self._tensor(codes, device), found, points)

    def _tensor(self, name: str, device: torch.device) -> Tensor:
        tensor: Tensor = self._opened[self._places[name]].get_tensor(name)
        return tensor.to(device)

    @cached_property
    def _opened(self) -> dict[Path, Any]:
        return {file: safe_open(file, framework="pt") for file in self.files}

    @cached_property
    def _places(self) -> dict[str, Path]:
        return {name: file for file, opened in self._opened.items() for name in opened.keys()}  # noqa: SIM118
