"""Directories whose linear weights are 8-bit floats: what their configuration says, checked against their files.

Two spellings are read: compressed-tensors' "float-quantized", and transformers' own ("fp8"), which is that of Qwen and
DeepSeek. Scales of activations are not used: rows are rounded by their own numbers, if they are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kvsift.errors import DamagedFile, InputError, WrongFile, one_line
from kvsift.kernels.int4_weight import Int4Weight
from kvsift.kernels.scaled_weight import ScaledWeight, keeps_fp8
from kvsift.kernels.skinny_product import BLOCK_INS
from kvsift.models.decoder_step import MODEL_TYPES

log = logging.getLogger("kvsift")
STORED = "F8_E4M3"  # in files
SCALE_DTYPES = "F32", "BF16", "F16"
UNUSED = "input_scale", "output_scale", "activation_scale", "q_scale", "k_scale", "v_scale"
Block = tuple[int | None, int | None]  # outputs and inputs that share a scale, None for all


@dataclass(frozen=True)
class Fp8Format:
    """What a configuration says about 8-bit weights.

    Attributes:
        blocks: of scales, each of a group of layers.
        suffix: of the names of scales.
        kept: names of modules with other weights, or "re:" and a pattern.
        asks_for_kv: whether keys and values are to have 8 bits too.
    """

    blocks: tuple[Block, ...]
    suffix: str
    kept: tuple[str, ...]
    asks_for_kv: bool = False

    @classmethod
    def of(cls, given: Any, file: Path) -> Fp8Format | None:
        """Read a ``quantization_config``; None for a format that transformers may know.

        Raises:
            InputError: for one that contradicts itself or is incomplete.
        """
        settings = given if isinstance(given, Mapping) else given.to_dict()
        readers: dict[str, Callable[[Mapping[str, Any]], Fp8Format | None]] = {
            "fp8": cls._of_transformers, "compressed-tensors": cls._of_compressed_tensors,
        }  # fmt: skip
        read = readers.get(str(settings.get("quant_method")))
        try:
            return None if read is None else read(settings)
        except InputError as error:
            raise DamagedFile(f"quantization_config in {file} {error}") from None
        except (TypeError, ValueError, AttributeError, KeyError, re.error) as error:
            raise DamagedFile(f"quantization_config in {file} cannot be used: {one_line(error)}.") from error

    @classmethod
    def _of_transformers(cls, settings: Mapping[str, Any]) -> Fp8Format | None:
        if (stored := settings.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
            raise DamagedFile(f"says fmt={stored!r}; kvsift reads e4m3.")
        size = settings.get("weight_block_size")
        block: Block = (None, None)
        if size is not None:
            block = _pair("weight_block_size", size)
        kept = settings.get("modules_to_not_convert") or settings.get("ignored_layers") or ()
        return cls((block,), "weight_scale_inv", tuple(map(str, kept))) if _is_taken(block) else None

    @classmethod
    def _of_compressed_tensors(cls, settings: Mapping[str, Any]) -> Fp8Format | None:
        if settings.get("format") != "float-quantized":
            return None
        groups = settings.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise DamagedFile("has no config_groups, so it does not say how weights are stored.")
        weights = [group.get("weights") or {} for group in groups.values()]
        floats = [each.get("type") == "float" and each.get("num_bits") == 8 for each in weights]
        if not all(floats):
            raise DamagedFile("says format=float-quantized, and has a group whose weights are not floats of 8 bits.")
        if any(each.get("symmetric") is False for each in weights):
            raise DamagedFile("has 8-bit floats with zero points (symmetric=false), which kvsift does not read.")
        blocks = tuple(_block_of(each) for each in weights)
        if not all(map(_is_taken, blocks)):
            return None
        kept = tuple(map(str, settings.get("ignore") or ()))
        for name in kept:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        return cls(blocks, "weight_scale", kept, bool(settings.get("kv_cache_scheme")))

    def keeps(self, module: str) -> bool:
        """Whether the configuration says that a module has other weights."""
        return any(
            re.match(name[3:], module) is not None if name.startswith("re:") else name == module for name in self.kept
        )


def _block_of(weights: Mapping[str, Any]) -> Block:
    strategy = weights.get("strategy")
    if strategy == "block":
        shape = weights.get("block_structure")
        return _pair("block_structure", shape.split("x") if isinstance(shape, str) else shape)
    if strategy == "group":
        return 1, int(weights["group_size"])
    if strategy not in ("tensor", "channel"):
        raise DamagedFile(f"says strategy={strategy!r} of weights; kvsift reads tensor, channel, group and block.")
    return (None, None) if strategy == "tensor" else (1, None)


def _pair(name: str, given: Any) -> Block:
    outs, ins = map(int, given)
    if outs < 1 or ins < 1:
        raise DamagedFile(f"says {name}={given!r}; a block has at least one output and one input.")
    return outs, ins


def _is_taken(block: Block) -> bool:
    return block[1] in (None, BLOCK_INS)


@dataclass(frozen=True)
class Fp8Checkpoint:
    """8-bit weights in the files of a directory.

    Attributes:
        files: of the directory.
        blocks: name of an 8-bit weight -> outputs and inputs that share a scale.
        suffix: of the names of scales.
        num_values: numbers in 8-bit weights.
    """

    files: tuple[Path, ...]
    blocks: Mapping[str, Block]
    suffix: str
    num_values: int
    name = "fp8"
    needs = "NVIDIA GPUs of compute capability 8.9 or higher"

    @property
    def num_bytes(self) -> int:
        """Of 8-bit weights, in the files."""
        return self.num_values

    @property
    def shapes(self) -> Iterable[str]:
        """Names of 8-bit weights."""
        return self.blocks

    def stays(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether weights stay in 8 bits on a device, with rows of a dtype."""
        return keeps_fp8(device, dtype)

    @classmethod
    def of(cls, config: Any, files: Sequence[Path], config_file: Path) -> Fp8Checkpoint | None:
        """Check the weights of a directory; None if they are none that kvsift multiplies itself.

        Raises:
            InputError: if configuration and files contradict each other.
        """
        given = getattr(config, "quantization_config", None)
        stored = None if given is None or config.model_type not in MODEL_TYPES else Fp8Format.of(given, config_file)
        if stored is None:
            return None
        if any(file.suffix != ".safetensors" for file in files):
            raise WrongFile(f"{config_file.parent} has 8-bit weights, which are read from *.safetensors alone.")
        entries: dict[str, tuple[str, tuple[int, ...]]] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                slices = ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118
                entries |= {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices}
        blocks, num_values = {}, 0
        for name, (dtype, shape) in entries.items():
            if dtype != STORED or not name.endswith(".weight"):
                continue
            blocks[name] = _checked(name, shape, entries, stored, config_file)
            num_values += shape[0] * shape[1]
        scaled = {name.removesuffix("weight") + stored.suffix for name in blocks}
        lone = sorted(name for name in entries if name.endswith(f".{stored.suffix}") and name not in scaled)
        if lone:
            raise DamagedFile(f"{config_file.parent} has {lone[0]}, and no 8-bit floats ({STORED}) that it belongs to.")
        if not blocks:
            raise DamagedFile(
                f"{config_file} says that weights are 8-bit floats, and the files have none ({STORED}). Remove its "
                "quantization_config if they are plain weights."
            )
        if stored.asks_for_kv:
            log.warning("%s asks for keys and values in 8 bits (kv_cache_scheme); they keep --dtype", config_file)
        return cls(tuple(files), blocks, stored.suffix, num_values)

    def weights(self, dtype: torch.dtype, stays: bool) -> dict[str, Any]:
        """Return what transformers reads, by name: 8-bit weights expanded when they are asked for; if they ``stay``,
        NaN without memory in their places."""
        found = {}
        for name, file in self._places.items():
            _, _, last = name.rpartition(".")
            if last == self.suffix or last in UNUSED:
                continue
            stored = self._opened[file].get_slice(name)
            found[name] = stored
            if name in self.blocks:
                found[name] = WeightToRead(partial(self.read, name), stored.get_shape(), dtype, stays)
        return found

    def read(self, name: str, device: torch.device) -> ScaledWeight:
        """Return an 8-bit weight on a device.

        Raises:
            InputError: if it is not finite.
        """
        scale = name.removesuffix("weight") + self.suffix
        values = self._opened[self._places[name]].get_tensor(name).to(device)
        scales = self._opened[self._places[scale]].get_tensor(scale).to(device, torch.float32)
        (num_out, num_in), (outs, ins) = values.shape, self.blocks[name]
        if not scales.isfinite().all() or (values.view(torch.uint8) & 0x7F == 0x7F).any():
            raise DamagedFile(f"{name} in {self._places[name]} or its scales hold numbers that are not finite.")
        if outs is None:  # as many as outputs, so that it can be joined with others
            return ScaledWeight(values, scales.reshape(1, 1).expand(num_out, 1).contiguous(), 1, num_in)
        return ScaledWeight(values, scales.reshape(-(-num_out // outs), -1), outs, ins or num_in)

    @cached_property
    def _opened(self) -> dict[Path, Any]:
        return {file: safe_open(file, framework="pt") for file in self.files}

    @cached_property
    def _places(self) -> dict[str, Path]:
        return {name: file for file, opened in self._opened.items() for name in opened.keys()}  # noqa: SIM118


class WeightToRead:
    """A weight of a checkpoint that transformers reads by ``weight[...]``, as one of safetensors; only then is it
    expanded.

    Args:
        read: returns the weight on a device.
        shape: [out, in].
        dtype: of the expanded weight.
        stays: whether it is to be replaced, so that transformers reads NaN without memory.
    """

    def __init__(
        self, read: Callable[[torch.device], ScaledWeight | Int4Weight], shape: Sequence[int], dtype: torch.dtype,
        stays: bool,
    ) -> None:  # fmt: skip
        self._read, self._shape, self._dtype, self._stays = read, list(shape), dtype, stays

    def get_shape(self) -> list[int]:
        return self._shape

    def __getitem__(self, _: object) -> Tensor:
        if self._stays:
            return torch.full((1,), torch.nan, dtype=self._dtype).expand(self._shape)
        return self._read(torch.device("cpu")).expanded(self._dtype)


def _checked(
    name: str, shape: tuple[int, ...], entries: Mapping[str, tuple[str, tuple[int, ...]]], stored: Fp8Format,
    config_file: Path,
) -> Block:  # fmt: skip
    """Return the block of an 8-bit weight that has the scales that the configuration says."""
    folder, module = config_file.parent, name.removesuffix(".weight")
    if stored.keeps(module):
        raise DamagedFile(f"{config_file} says that {module} has no 8-bit weights, and the files have them.")
    if len(shape) != 2:
        raise DamagedFile(f"{name} in {folder} has 8-bit floats of the shape {list(shape)}, and should be a matrix.")
    scale = f"{module}.{stored.suffix}"
    if scale not in entries:
        raise DamagedFile(f"{name} in {folder} has no scales: {scale} is missing. Is the download complete?")
    dtype, found = entries[scale]
    if dtype not in SCALE_DTYPES:
        raise WrongFile(f"{scale} in {folder} is {dtype}; kvsift reads scales of {', '.join(SCALE_DTYPES)}.")
    expected = []
    for block in stored.blocks:
        outs, ins = (of or whole for of, whole in zip(block, shape))
        counts = -(-shape[0] // outs), -(-shape[1] // ins)
        is_list = counts[1] == 1 and found == counts[:1]
        if found == counts or is_list or (counts == (1, 1) and found == ()):
            return block
        expected.append(list(counts))
    wanted = " or ".join(map(str, expected))
    raise DamagedFile(f"{scale} in {folder} is {list(found)}, and {config_file.name} calls for {wanted}.")
