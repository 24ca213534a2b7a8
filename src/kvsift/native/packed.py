"""Matrices of packed weights, and their products in the compiled core.

Weights have 4 or 8 bits; each block of 32 inputs of an output has a scale (or one for each half of it) and perhaps a
minimum: ``weight = scale * (code - 128) + minimum``. Inputs are rounded to 8 bits with a scale per block of 32. Sums
within a block are exact, and those over blocks have one order, so that a row has the same bits in every product,
whatever the number of rows or threads and the instruction set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsift.errors import InvalidValue
from kvsift.native.loader import core, num_threads
from kvsift.native.memory import HugeRoom
from kvsift.native.product import NO_NORM, Norm, numbers_of
from kvsift.native.shapes import ROW_DTYPES

PACKED_INS, TILE, CENTRE = 32, 16, 128  # inputs of a block, outputs of a tile, the code of a weight of 0
HALF_ROUNDING, NOTHING = 2.0**-11, 2.0**-40  # of scales in float16: their relative error, and what is as good as 0
LEAST_SHARE = 2.0**-14  # of the largest scale or minimum: an error of that size is as good as none


@dataclass(frozen=True)
class PackedCodes:
    """Weights as codes, of some outputs.

    Attributes:
        codes: uint8 [outputs, inputs]; places in the table if there is one, else weights plus 128.
        scales: float32 [outputs, blocks], or [outputs, 2 * blocks], of 16 inputs each.
        minima: float32 [outputs, blocks], or None.
        table: uint8 [16], weights plus 128 of codes of 4 bits; None: codes have 8 bits.
    """

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None = None
    table: np.ndarray | None = None

    def tiles(self) -> np.ndarray | None:
        """Return uint8 [tiles, blocks, bytes of a block], as csrc/isa/isa.hpp describes it; None if float16 does not
        hold the scales or minima: those of damaged files, or tiny ones."""
        numbers = [each for each in (self.scales, self.minima) if each is not None]
        with np.errstate(all="ignore"):
            halves = [each.astype(np.float16) for each in numbers]
            for exact, rounded in zip(numbers, halves):
                sizes, error = np.abs(exact), np.abs(exact - rounded.astype(np.float32))
                fits = error <= HALF_ROUNDING * sizes + LEAST_SHARE * sizes.max() + NOTHING
                if not (fits & np.isfinite(rounded)).all():
                    return None
        num_out, num_in = self.codes.shape
        num_tiles, num_blocks = -(-num_out // TILE), num_in // PACKED_INS
        codes = _whole_tiles(self.codes).view(np.uint32)  # of four inputs
        quads: np.ndarray = codes.reshape(num_tiles, TILE, num_blocks, PACKED_INS // 4).transpose(0, 2, 3, 1)
        if self.table is not None:
            quads = quads[:, :, :4] | quads[:, :, 4:] << 4
        parts = [np.ascontiguousarray(quads).reshape(num_tiles, num_blocks, -1).view(np.uint8)]
        for half in halves:
            of_blocks = _whole_tiles(half).reshape(num_tiles, TILE, num_blocks, -1).transpose(0, 2, 3, 1)
            parts.append(np.ascontiguousarray(of_blocks).reshape(num_tiles, num_blocks, -1).view(np.uint8))
        return np.concatenate(parts, 2)


def _whole_tiles(rows: np.ndarray) -> np.ndarray:
    """Rows of whole tiles: those past the end are 0."""
    missing = -len(rows) % TILE
    return np.ascontiguousarray(np.pad(rows, ((0, missing), (0, 0))) if missing else rows)


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix of packed weights on the CPU.

    Attributes:
        tiles: uint8 [tiles, blocks, bytes of a block], contiguous.
        table: 16 bytes, for codes of 4 bits; empty: they have 8 bits.
        num_out: number of outputs.
        affine: blocks have minima.
        halves: blocks have two scales.
    """

    tiles: Tensor
    table: bytes
    num_out: int
    affine: bool
    halves: bool

    @classmethod
    def of(cls, parts: Iterable[PackedCodes], room: HugeRoom | None = None) -> PackedMatrix | None:
        """Pack codes, given as one or in parts, of whole tiles of outputs but the last, perhaps into a room with
        others; None where float16 does not hold scales or minima."""
        tiles, num_out = list[np.ndarray](), 0
        for part in parts:
            some = part.tiles()
            if some is None:
                return None
            tiles.append(some)
            num_out += len(part.codes)
        table = b"" if part.table is None else part.table.tobytes()
        halves = part.scales.shape[1] * PACKED_INS > part.codes.shape[1]
        sizes = sum(map(len, tiles)), *tiles[0].shape[1:]
        whole = torch.empty(sizes, dtype=torch.uint8) if room is None else room.take(sizes)
        np.concatenate(tiles, out=whole.numpy())
        return cls(whole, table, num_out, part.minima is not None, halves)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy reads tiles of its own
        return PackedMatrix, (self.tiles.clone(), self.table, self.num_out, self.affine, self.halves)

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs]."""
        return self.num_out, self.tiles.shape[1] * PACKED_INS

    @cached_property
    def core(self) -> Any:
        """What the compiled core knows of it; lives no longer than the tiles."""
        bits = 4 if self.table else 8
        return core.PackedMatrix(self.tiles.data_ptr(), self.table, *self.shape, bits, self.affine, self.halves)

    def rows(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Return weights of outputs, int64 [...], rounded to bfloat16 or float32: [..., inputs].

        Raises:
            InputError: for an output that there is not.
        """
        flat = outputs.reshape(-1).contiguous()
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.num_out:
            asked = f"rows {int(flat.min())} to {int(flat.max())}"
            raise InvalidValue(f"there are {self.num_out} rows of packed weights, and {asked} were asked for.")
        wide = dtype if dtype in ROW_DTYPES else torch.float32
        rows = torch.empty(len(flat), self.shape[1], dtype=wide)
        self.core.unpack(wide == torch.bfloat16, flat.data_ptr(), len(flat), rows.data_ptr())
        return rows.to(dtype).view(*outputs.shape, -1)


def packed_product(
    x: Tensor, parts: Sequence[PackedMatrix], bias: Tensor | None = None, *, norm: Norm | None = None,
    residual: Tensor | None = None, gated: bool = False, gelu: bool = False, threads: int | None = None,
) -> Tensor:  # fmt: skip
    """As ``native.product`` with the rows of all parts, for any number of rows of x.

    Args:
        x: [rows, in], bfloat16 or float32.
        parts: matrices of one number of inputs; gated: two of one shape.
        bias, norm, residual, gated, gelu, threads: see ``native.product``.
    """
    num_in, num_out = parts[0].shape[1], sum(part.num_out for part in parts)
    assert x.dtype in ROW_DTYPES
    assert x.shape[1] == num_in
    assert not gated or (len(parts) == 2 and parts[0].shape == parts[1].shape)
    x = x.contiguous()
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = x.new_empty(len(x), num_out // 2 if gated else num_out)
    if len(x):
        core.multiply_packed(
            x.dtype == torch.bfloat16, x.data_ptr(), len(x), [part.core for part in parts],
            *(NO_NORM if norm is None else numbers_of(norm)), 0 if bias is None else bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            gated, gelu, num_threads(threads), out.data_ptr(),
        )  # fmt: skip
    return out
