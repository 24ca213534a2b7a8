"""Directories of gpt-oss, whose experts are stored in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvsift.errors import DamagedFile
from kvsift.kernels.float4_stack import BLOCK, MOST_EXPONENT, Float4Stack
from kvsift.models.hf.late_weight import LateWeight
from kvsift.models.hf.quantized_checkpoint import QuantizedCheckpoint, entries_of
from kvsift.models.hf.quantized_formats import StoredFormat

VALUES, SCALES = "_blocks", "_scales"  # ends of the names of tensors: uint8 [experts, out, blocks, 16] and without 16
FORMAT = StoredFormat("mxfp4", 4, ((1, BLOCK),))


def checkpoint_of(config: Any, files: Sequence[Path], config_file: Path) -> QuantizedCheckpoint | None:
    """As ``QuantizedCheckpoint.of``, of gpt-oss too."""
    given, kind = getattr(config, "quantization_config", None), config.get_text_config(decoder=True).model_type
    if given is None or kind != "gpt_oss":
        return QuantizedCheckpoint.of(config, files, config_file)
    settings = given if isinstance(given, Mapping) else given.to_dict()
    return Float4Checkpoint.of_files(files, config_file) if settings.get("quant_method") == "mxfp4" else None


@dataclass(frozen=True)
class Float4Checkpoint(QuantizedCheckpoint):
    """As ``QuantizedCheckpoint``.

    Attributes:
        stacks: name of a parameter of transformers -> [experts, out, in]; it has them as [experts, in, out].
    """

    stacks: Mapping[str, tuple[int, int, int]]

    @classmethod
    def of_files(cls, files: Sequence[Path], config_file: Path) -> Float4Checkpoint:
        """Check the experts of a directory.

        Raises:
            InputError: if there are none, or some lack their exponents.
        """
        entries, stacks = entries_of(files, config_file, FORMAT), {}
        for name in sorted(name for name in entries if name.endswith((VALUES, SCALES))):
            layer, _, last = name.rpartition("_")
            values, scales = entries.get(layer + VALUES), entries.get(layer + SCALES)
            shape = () if values is None else values[1]
            if values != ("U8", (*shape[:3], BLOCK // 2)) or len(shape) != 4 or scales != ("U8", shape[:3]):
                raise DamagedFile(
                    f"{layer} in {config_file.parent} has {last} {list(entries[name][1])} of {entries[name][0]}. MXFP4 "
                    f"calls for blocks [experts, out, in / {BLOCK}, {BLOCK // 2}] and scales [experts, out, in / "
                    f"{BLOCK}], both of U8. Is the download complete?"
                )
            stacks[layer] = shape[0], shape[1], BLOCK * shape[2]
        if not stacks:
            raise DamagedFile(
                f"{config_file} says that experts are {FORMAT.in_words}, and the files have no blocks of them. "
                "Remove its quantization_config if they are plain weights."
            )
        return cls(tuple(files), FORMAT, {}, {}, stacks)

    @property
    def num_values(self) -> int:
        return sum(map(prod, self.stacks.values()))

    @property
    def num_bytes(self) -> int:
        return self.num_values // 2 + self.num_values // BLOCK

    def weights(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        parts = {layer + part for layer in self.stacks for part in (VALUES, SCALES)}
        found = {}
        for name, (file, stored) in self._places.items():
            if name not in parts:
                shape = self._opened[file].get_slice(stored).get_shape()
                found[name] = LateWeight(shape, dtype, partial(self._plain, name))
        for layer, (experts, num_out, num_in) in self.stacks.items():
            held = self._float4(layer, device) if self.stays(device, dtype) else None
            expand = partial(self._transposed, layer, dtype)
            found[layer] = LateWeight((experts, num_in, num_out), dtype, expand, held)
        return found

    def _transposed(self, layer: str, dtype: torch.dtype) -> Tensor:
        return self._float4(layer, torch.device("cpu")).expanded(dtype).mT

    def _float4(self, layer: str, device: torch.device) -> Float4Stack:
        values, scales = (self._stored(layer + part).to(device) for part in (VALUES, SCALES))
        if int(scales.max()) > MOST_EXPONENT:
            raise DamagedFile(
                f"{layer}{SCALES} in {self._places[layer + SCALES][0]} has the exponent {int(scales.max()) - 127}, and "
                f"kvsift reads those up to {MOST_EXPONENT - 127}."
            )
        return Float4Stack.of_codes(values.flatten(2), scales)
