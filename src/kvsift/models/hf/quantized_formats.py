"""What a ``quantization_config`` says about linear weights of 8 or 4 bits, and how the files have them.

Read are compressed-tensors' "float-quantized", "int-quantized" and "pack-quantized", transformers' own "fp8" (that of
Qwen and DeepSeek), GPTQ, and AWQ's "gemm". Other formats are left to transformers. Scales of activations are not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.errors import DamagedFile, InputError, WrongFile, one_line
from kvsift.kernels.skinny_product import SCALE_INS
from kvsift.native.packed import PACKED_INS

Shape = tuple[int, ...]
Block = tuple[int | None, int | None]  # outputs and inputs that share a scale, None for all
Entries = Mapping[str, tuple[str, Shape]]  # name of a tensor -> dtype and shape
SCALE_DTYPES = "F32", "BF16", "F16"
AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7  # where a word has the codes of consecutive outputs


class Spelling(NamedTuple):
    """How the files have a layer: the last parts of the names of its tensors.

    Attributes:
        kind: kind of its values: "float", or "int" and the numbers of bits that are read.
        values, dtype: its values, and their dtype as safetensors names it; words of 32 bits have several.
        order: groups of the inputs.
        by_input: whether values and scales have a row per input.
    """

    kind: tuple[str, tuple[int, ...]]
    values: str
    dtype: str
    scales: str
    zeros: str = "weight_zero_point"
    order: str = "weight_g_idx"
    by_input: bool = False


SPELLINGS = {
    "fp8": Spelling(("float", (8,)), "weight", "F8_E4M3", "weight_scale_inv"),
    "float-quantized": Spelling(("float", (8,)), "weight", "F8_E4M3", "weight_scale"),
    "int-quantized": Spelling(("int", (8,)), "weight", "I8", "weight_scale"),
    "pack-quantized": Spelling(("int", (4, 8)), "weight_packed", "I32", "weight_scale"),
    "gptq": Spelling(("int", (4, 8)), "qweight", "I32", "scales", "qzeros", "g_idx", by_input=True),
    "awq": Spelling(("int", (4,)), "qweight", "I32", "scales", "qzeros", by_input=True),
    "mxfp4": Spelling(("float", (4,)), "blocks", "U8", "scales"),
}


@dataclass(frozen=True)
class StoredFormat:
    """What a configuration says.

    Attributes:
        spelling: key of ``SPELLINGS``.
        bits: bits of a weight.
        blocks: blocks of scales, each for a group of layers.
        has_zeros: whether there are zero points.
        offset: number that is added to stored zero points.
        kept: names of modules with other weights, or "re:" and a pattern.
        has_order: whether the inputs of a group need not follow one another.
        asks_for_kv: whether keys and values are to have 8 bits too.
    """

    spelling: str
    bits: int
    blocks: tuple[Block, ...]
    has_zeros: bool = False
    offset: int = 0
    kept: tuple[str, ...] = ()
    has_order: bool = False
    asks_for_kv: bool = False

    @classmethod
    def of(cls, given: Any, file: Path) -> StoredFormat | None:
        """Read a ``quantization_config``; None for a format that transformers may know.

        Raises:
            InputError: for one that contradicts itself or is incomplete.
        """
        settings = given if isinstance(given, Mapping) else given.to_dict()
        readers = {
            "fp8": _of_transformers,
            "compressed-tensors": _of_compressed_tensors,
            "gptq": _of_gptq,
            "awq": _of_awq,
        }
        read = readers.get(str(settings.get("quant_method")))
        try:
            found = None if read is None else read(settings)
        except InputError as error:
            raise DamagedFile(f"quantization_config in {file} {error}") from None
        except (TypeError, ValueError, AttributeError, KeyError, re.error) as error:
            raise DamagedFile(f"quantization_config in {file} cannot be used: {one_line(error)}.") from error
        return found if found is not None and found._is_taken else None

    @property
    def _is_taken(self) -> bool:
        if self.names.kind[0] == "float":
            return all(ins in (None, SCALE_INS) for _, ins in self.blocks)
        sizes = [
            outs in (1, None) and (ins is None or (ins > 0 and ins % PACKED_INS == 0)) for outs, ins in self.blocks
        ]
        return all(sizes) and self.bits in self.names.kind[1]

    @property
    def names(self) -> Spelling:
        """How the files have a layer."""
        return SPELLINGS[self.spelling]

    @property
    def name(self) -> str:
        """Key of ``FORMATS``."""
        if self.names.kind[0] == "float":
            return "fp8" if self.bits == 8 else "mxfp4"
        return f"int{self.bits}"

    @property
    def in_words(self) -> str:
        return f"{self.names.kind[0]}s of {self.bits} bits"

    @property
    def _per_word(self) -> int:
        return 32 // self.bits if self.names.dtype == "I32" else 1

    def layers(self, entries: Entries) -> list[str]:
        """Return the names of layers with such weights."""
        end, dtype = f".{self.names.values}", self.names.dtype
        plain = self.names.values == "weight"  # as other weights are called too
        return [name.removesuffix(end) for name, (stored, _) in entries.items()
                if name.endswith(end) and not (plain and stored != dtype)]  # fmt: skip

    def shape_of(self, layer: str, entries: Entries) -> tuple[int, int]:
        """Return [out, in] of a layer."""
        first, second = entries[f"{layer}.{self.names.values}"][1]
        per_word = self._per_word
        if self.spelling == "awq":
            return per_word * second, first
        return (second, per_word * first) if self.names.by_input else (first, per_word * second)

    def check(self, layer: str, entries: Entries, config_file: Path) -> Block:
        """Return the block of a layer that has the parts that the configuration says, and refuse others
        (``InputError``)."""
        folder, names = config_file.parent, self.names
        dtype, shape = entries[values := f"{layer}.{names.values}"]
        if any(re.match(name[3:], layer) if name.startswith("re:") else name == layer for name in self.kept):
            raise DamagedFile(f"{config_file} says that {layer} has no {self.in_words}, and the files have them.")
        if dtype != names.dtype or len(shape) != 2:
            raise DamagedFile(
                f"{values} in {folder} is {dtype} {list(shape)}, and should be a matrix of {names.dtype}."
            )
        num_out, num_in = self.shape_of(layer, entries)
        needed = [names.scales, *([names.zeros] if self.has_zeros else []), *([names.order] if self.has_order else [])]
        for part in needed:
            if f"{layer}.{part}" not in entries:
                raise DamagedFile(
                    f"{layer} in {folder} has no {part}: {layer}.{part} is missing. Is the download complete?"
                )
        dtype, found = entries[scales := f"{layer}.{names.scales}"]
        if dtype not in SCALE_DTYPES:
            raise WrongFile(f"{scales} in {folder} is {dtype}; kvsift reads scales of {', '.join(SCALE_DTYPES)}.")
        expected, is_float = [], names.kind[0] == "float"
        blocks = [block for block in self.blocks if is_float or num_in % (block[1] or PACKED_INS) == 0]
        if not blocks:
            size = self.blocks[0][1] or PACKED_INS
            raise DamagedFile(f"{layer} in {folder} has {num_in} inputs, which are not whole groups of {size}.")
        for outs, ins in blocks:
            counts = -(-num_out // (outs or num_out)), -(-num_in // (ins or num_in))
            wanted = counts[::-1] if names.by_input else counts
            if found == wanted or (counts[1] == 1 and found == counts[:1]) or (counts == (1, 1) and found == ()):
                break
            expected.append(list(wanted))
        else:
            wanted_or = " or ".join(map(str, expected))
            raise DamagedFile(f"{scales} in {folder} is {list(found)}, and {config_file.name} calls for {wanted_or}.")
        if self.has_zeros:
            words = -(-num_out // self._per_word)
            wanted = (counts[1], words) if names.by_input else (words, counts[1])
            dtype, found = entries[f"{layer}.{names.zeros}"]
            if (dtype, found) != (names.dtype, wanted):
                raise DamagedFile(
                    f"{layer}.{names.zeros} in {folder} is {dtype} {list(found)}, and {config_file.name} calls for "
                    f"{names.dtype} {list(wanted)}."
                )
        return outs, ins

    def codes(self, values: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return uint8 [out, in] and int16 [out, groups] of stored whole numbers and zero points."""
        if self.spelling == "int-quantized":
            whole, points = (None if each is None else each.to(torch.int16) + 128 for each in (values, zeros))
            assert whole is not None
            return whole.to(torch.uint8), points
        codes, points = self._unpacked(values), None if zeros is None else self._unpacked(zeros)
        if self.spelling == "pack-quantized":
            codes = codes.flatten(1)
            points = None if points is None else points.transpose(1, 2).flatten(0, 1)[: len(codes)]
        else:
            is_awq = self.spelling == "awq"
            codes = codes[..., AWQ_ORDER].flatten(1).t() if is_awq else codes.transpose(0, 1).flatten(1)
            if points is not None:
                points = (points[..., AWQ_ORDER] if is_awq else points).flatten(1).t()[: len(codes)]
        return codes.contiguous(), None if points is None else points.to(torch.int16) + self.offset

    def _unpacked(self, words: Tensor) -> Tensor:
        """uint8 [..., codes of a word] of int32 [...]; the first is in the lowest bits."""
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32, device=words.device)
        return (words.unsqueeze(-1) >> shifts & (1 << self.bits) - 1).to(torch.uint8)


def _of_transformers(settings: Mapping[str, Any]) -> StoredFormat | None:
    if (stored := settings.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise DamagedFile(f"says fmt={stored!r}; kvsift reads e4m3.")
    size = settings.get("weight_block_size")
    block: Block = (None, None) if size is None else _pair("weight_block_size", size)
    kept = settings.get("modules_to_not_convert") or settings.get("ignored_layers") or ()
    return StoredFormat("fp8", 8, (block,), kept=tuple(map(str, kept)))


def _of_compressed_tensors(settings: Mapping[str, Any]) -> StoredFormat | None:
    spelling = str(settings.get("format"))
    if spelling not in ("float-quantized", "int-quantized", "pack-quantized"):
        return None
    kind, groups = SPELLINGS[spelling].kind[0], settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise DamagedFile("has no config_groups, so it does not say how weights are stored.")
    weights = [group.get("weights") or {} for group in groups.values()]
    bits = {int(each.get("num_bits") or 0) for each in weights}
    if any(each.get("type") != kind for each in weights) or (kind == "float" and bits != {8}):
        what = "floats of 8 bits" if kind == "float" else "whole numbers"
        raise DamagedFile(f"says format={spelling}, and has a group whose weights are not {what}.")
    has_zeros = {each.get("symmetric") is False for each in weights}
    if kind == "float" and True in has_zeros:
        raise DamagedFile("has 8-bit floats with zero points (symmetric=false), which kvsift does not read.")
    blocks = tuple(_block_of(each) for each in weights)
    kept = tuple(map(str, settings.get("ignore") or ()))
    for name in kept:
        re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
    if len(bits) > 1 or len(has_zeros) > 1:
        return None
    has_order = any(each.get("actorder") in ("group", True) for each in weights)
    return StoredFormat(
        spelling, bits.pop(), blocks, has_zeros.pop(), kept=kept, has_order=has_order,
        asks_for_kv=bool(settings.get("kv_cache_scheme")),
    )  # fmt: skip


def _of_gptq(settings: Mapping[str, Any]) -> StoredFormat | None:
    ins, version = int(settings["group_size"]), settings.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2") or settings.get("dynamic"):  # layers with settings of their own
        return None
    block, has_order = (1, None if ins < 0 else ins), bool(settings.get("desc_act")) and ins > 0
    return StoredFormat("gptq", int(settings["bits"]), (block,), True, version == "gptq", has_order=has_order)


def _of_awq(settings: Mapping[str, Any]) -> StoredFormat | None:
    bits = settings["bits"] if "bits" in settings else settings["w_bit"]
    ins = int(settings["group_size"] if "group_size" in settings else settings["q_group_size"])
    if str(settings.get("version", "gemm")).lower() != "gemm":
        return None
    return StoredFormat("awq", int(bits), ((1, None if ins < 0 else ins),), bool(settings.get("zero_point", True)))


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
