"""GGUF files: settings and packed tensors, read where they lie in the file.

A file is a header (settings by name, then the name, shape, type and offset of every tensor) and the data of the
tensors. A large model is split into several files; each has a header, and the settings are in the first. Nothing that a
header says is trusted: lengths, offsets, types and names are checked against the file before a tensor is returned.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from kvsift.errors import DamagedFile, InputError, MissingFile, MissingPackage, UnreadableFile, WrongFile, one_line

MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # type -> struct
STRING, ARRAY = 8, 9  # the other two types of settings
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
MOST_DIMENSIONS = 4
EXPANDED_AT_ONCE = 1 << 20  # numbers: the package works in several temporary arrays of float32


@dataclass(frozen=True)
class GgufTensor:
    """A packed matrix or vector.

    Attributes:
        type: number of its type in the ``gguf`` package, such as 3 for Q4_1.
        shape: as in torch: the last dimension is that of a row, which is packed by itself.
        packed: uint8 [num_rows, bytes of a row], a view of the mapped file.
    """

    type: int
    shape: tuple[int, ...]
    packed: np.ndarray

    def expand(self, start: int, stop: int) -> np.ndarray:
        """Return rows as float32 [stop - start, numbers in a row]."""
        from gguf import GGMLQuantizationType, dequantize

        kind, packed = GGMLQuantizationType(self.type), self.packed[start:stop]
        plain = {"F32": np.float32, "F16": np.float16}.get(kind.name)  # the package expects these as numbers
        with np.errstate(all="ignore"):  # damaged scales: what is not finite is for the reader of logits
            return dequantize(packed if plain is None else packed.view(plain), kind)

    @property
    def rows_at_once(self) -> int:
        """Number of rows to expand in one call, so that temporary arrays stay small."""
        return max(1, EXPANDED_AT_ONCE // self.shape[-1])


@dataclass(frozen=True)
class GgufFile:
    """A model in one GGUF file, or in all parts of one that is split.

    Attributes:
        path: the file, or the first part.
        settings: settings by name; arrays are lists.
        tensors: tensors of all parts, by name.
    """

    path: Path
    settings: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the headers and map the tensors.

        Raises:
            InputError: if a file is missing, damaged, cut off or of an unknown kind, or the package ``gguf`` is not
                installed.
        """
        first = cls._read(path)
        count = first.settings.get("split.count", 1)
        if count == 1:
            return first
        if not isinstance(count, int) or not 1 < count < 100_000:
            raise DamagedFile(f"{path} says that it is one of {count!r:.40} parts of a model, which cannot be.")
        name = PART.search(path.name)
        if not name or int(name[1]) != 1 or int(name[2]) != count or first.settings.get("split.no", 0) != 0:
            raise WrongFile(
                f"{path} is one of {count} parts of a model. Give the first, whose name ends in "
                f"-00001-of-{count:05}.gguf, with the others in the same folder."
            )
        tensors = dict(first.tensors)
        for number in range(2, count + 1):
            part = path.with_name(f"{path.name[: name.start()]}-{number:05}-of-{count:05}.gguf")
            if not part.is_file():
                raise MissingFile(f"{path} is the first of {count} parts, and {part.name} is missing.")
            other = cls._read(part)
            if other.settings.get("split.no") != number - 1 or tensors.keys() & other.tensors.keys():
                raise WrongFile(f"{part} is not part {number} of the model in {path}.")
            tensors |= other.tensors
        total = first.settings.get("split.tensors.count", len(tensors))
        if total != len(tensors):
            raise DamagedFile(f"{path} and its parts hold {len(tensors)} tensors, and its header says {total}.")
        return cls(path, first.settings, tensors)

    @classmethod
    def _read(cls, path: Path) -> GgufFile:
        try:
            with path.open("rb") as opened:
                data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise UnreadableFile(f"{path} cannot be read as a GGUF file: {one_line(error)}.") from error
        header = _Header(data)
        try:
            return cls(path, *header.read())
        except struct.error:
            raise DamagedFile(f"{path} ends within its header. Is the download complete?") from None
        except InputError:  # the package is missing
            raise
        except (ValueError, OverflowError) as error:
            raise WrongFile(f"{path} is not a GGUF file that kvsift can read: {one_line(error)}.") from error


def is_gguf(path: Path) -> bool:
    """Whether a file has the name or the first bytes of a GGUF file."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


class _Header:
    """The header of a mapped file, read from front to end. ``struct.error``: the file ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._data[: len(MAGIC)] != MAGIC:
            raise ValueError("it does not begin with the letters GGUF")
        self._at = len(MAGIC)
        if (version := self._number("I")) not in VERSIONS:
            raise ValueError(f"its version is {version}, and those that can be read are 2 and 3")
        num_tensors, num_settings = self._number("Q"), self._number("Q")
        settings = {}
        for _ in range(num_settings):
            name = self._text()
            if name in settings:
                raise ValueError(f"it has two settings {name:.80}")
            settings[name] = self._value(self._number("I"))
        alignment = settings.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r:.40}")
        found = [self._entry() for _ in range(self._bounded(num_tensors, 24))]
        data_start = -(-self._at // alignment) * alignment
        tensors = {name: self._tensor(name, shape, kind, data_start + at) for name, shape, kind, at in found}
        if len(tensors) != len(found):
            raise ValueError("two of its tensors have one name")
        return settings, tensors

    def _number(self, code: str) -> Any:
        [value] = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _bounded(self, count: int, num_bytes: int) -> int:
        """Return a count of things which take at least so many bytes each, if the file is long enough for them."""
        if count * num_bytes > len(self._data) - self._at:
            raise struct.error
        return count

    def _text(self) -> str:
        length = self._bounded(self._number("Q"), 1)
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind != ARRAY:
            raise ValueError(f"a setting has the type {kind}, which does not exist")
        kind, count = self._number("I"), self._number("Q")
        if kind == STRING:
            return [self._text() for _ in range(self._bounded(count, 8))]
        if kind not in NUMBERS:
            raise ValueError(f"an array of its settings has elements of type {kind}, which cannot be read")
        code, size = NUMBERS[kind], struct.calcsize(NUMBERS[kind])
        values = struct.unpack_from(f"<{self._bounded(count, size)}{code}", self._data, self._at)
        self._at += count * size
        return list(values)

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, type and offset of a tensor."""
        name, num_dimensions = self._text(), self._number("I")
        if not 1 <= num_dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"its tensor {name:.80} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]  # the file begins with that of a row
        return name, shape, self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        try:
            block_size, block_bytes = _block(kind)
        except InputError:
            raise
        except ValueError as error:
            raise ValueError(f"its tensor {name:.80} has the {error}") from error
        if prod(shape) < 1 or shape[-1] % block_size:
            raise ValueError(f"its tensor {name:.80} has the shape {list(shape)}, in blocks of {block_size}")
        num_rows, row_bytes = prod(shape[:-1]), shape[-1] // block_size * block_bytes
        stop = start + num_rows * row_bytes
        if stop > len(self._data):
            raise ValueError(
                f"its tensor {name:.80} ends at byte {stop:,}, and the file has {len(self._data):,}; "
                "the download may not be complete"
            )
        packed = np.frombuffer(self._data, np.uint8, stop - start, start).reshape(num_rows, row_bytes)
        return GgufTensor(kind, shape, packed)


@cache
def _block(kind: int) -> tuple[int, int]:
    """Return numbers and bytes of a block of a type that can be expanded.

    Raises:
        ValueError: for another type.
    """
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
    except ImportError as error:
        raise MissingPackage("GGUF files need the package gguf: pip install 'kvsift[gguf]'.") from error
    known = {type_.value: type_ for type_ in GGMLQuantizationType}
    if kind not in known:
        raise ValueError(f"type {kind}, which the package gguf does not know")
    block_size, block_bytes = GGML_QUANT_SIZES[known[kind]]
    try:
        if known[kind] not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):  # always expanded
            dequantize(np.zeros((1, block_bytes), np.uint8), known[kind])
    except NotImplementedError:
        raise ValueError(f"type {known[kind].name}, which the package gguf does not expand") from None
    return block_size, block_bytes
