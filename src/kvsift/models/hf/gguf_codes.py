"""The weights of packed GGUF tensors as codes, scales and minima, which stay packed in memory.

Types of 4 bits keep them; those of 5 and 6 bits take 8, as Q8_0 does. Matrices of the other types (2 and 3 bits, and
numbers that are not packed) are expanded.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import torch
from numpy import ndarray

from kvsift.gguf_file import GgufTensor
from kvsift.native.memory import HugeRoom
from kvsift.native.packed import CENTRE, TILE, PackedCodes, PackedMatrix

Parts = tuple[ndarray, ndarray, ndarray | None]  # of blocks: codes [n, size], scales [n, scales of a block], minima
EVEN = np.arange(16)
NON_LINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
FLOAT4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])


def packed_matrix(tensor: GgufTensor, room: HugeRoom | None = None) -> PackedMatrix | None:
    """Return a matrix with the weights of a tensor, packed, in a room; None where its type or its scales have no packed
    form."""
    if tensor.type not in TYPES or len(tensor.shape) != 2:
        return None
    step = max(TILE, tensor.rows_at_once // TILE * TILE)
    parts = (_codes(tensor, start, start + step) for start in range(0, len(tensor.packed), step))
    return PackedMatrix.of(parts, room)


def packed_experts(tensor: GgufTensor, room: HugeRoom | None = None) -> list[PackedMatrix] | None:
    """As ``packed_matrix`` of each expert of a tensor [experts, out, in]."""
    num_out, matrices = tensor.shape[1], list[PackedMatrix]()
    for start in range(0, len(tensor.packed), num_out):
        own = GgufTensor(tensor.type, tensor.shape[1:], tensor.packed[start : start + num_out])
        if (matrix := packed_matrix(own, room)) is None:
            return None
        matrices.append(matrix)
    return matrices


def num_bytes(tensor: GgufTensor, dtype: torch.dtype, stays_packed: bool) -> int:
    """Return the size in memory of a tensor, where those that can be packed are or are not."""
    if not stays_packed or tensor.type not in TYPES or len(tensor.shape) not in (2, 3):
        return prod(tensor.shape) * dtype.itemsize
    codes = _codes(tensor, 0, 1)
    numbers = codes.scales.size + (0 if codes.minima is None else codes.minima.size)
    *experts, num_out, num_in = tensor.shape
    row_bytes = num_in // (1 if codes.table is None else 2) + 2 * numbers
    return prod(experts) * -(-num_out // TILE) * TILE * row_bytes


def _codes(tensor: GgufTensor, start: int, stop: int) -> PackedCodes:
    rows = tensor.packed[start:stop]
    block_bytes, table, unpack = TYPES[tensor.type]
    with np.errstate(all="ignore"):  # scales of damaged files
        codes, *numbers = unpack(np.ascontiguousarray(rows).reshape(-1, block_bytes))
    scales, minima = (None if each is None else each.reshape(len(rows), -1) for each in numbers)
    assert scales is not None
    values = None if table is None else (table + CENTRE).astype(np.uint8)
    return PackedCodes(codes.reshape(len(rows), -1), scales, minima, values)


def _halves(numbers: ndarray) -> ndarray:
    return np.ascontiguousarray(numbers).view(np.float16).astype(np.float32)


def _nibbles(packed: ndarray, group: int = 16) -> ndarray:
    """Return the low four bits of each group of bytes, then the high ones."""
    groups = packed.reshape(len(packed), -1, group)
    return np.stack((groups & 15, groups >> 4), 2).reshape(len(packed), -1)


def _fifth_bits(packed: ndarray) -> ndarray:
    """Bit i of 32 as 16 of number i."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _eight(codes: ndarray, zero: int) -> ndarray:
    """PackedCodes of 8 bits, of those in which ``zero`` is a weight of 0."""
    return codes + np.uint8(CENTRE - zero)


def _q4_0(blocks: ndarray) -> Parts:  # and IQ4_NL, which has another table
    return _nibbles(blocks[:, 2:]), _halves(blocks[:, :2]), None


def _q4_1(blocks: ndarray) -> Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q5_0(blocks: ndarray) -> Parts:
    return _eight(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), 16), _halves(blocks[:, :2]), None


def _q5_1(blocks: ndarray) -> Parts:
    codes = _eight(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), 0)
    return codes, _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q8_0(blocks: ndarray) -> Parts:
    return _eight(blocks[:, 2:], 0), _halves(blocks[:, :2]), None


def _mxfp4(blocks: ndarray) -> Parts:
    return _nibbles(blocks[:, 1:]), np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128), None


def _k_scales(blocks: ndarray) -> tuple[ndarray, ndarray]:
    """Scales and minima of the eight blocks of 32 in one of Q4_K or Q5_K, [n, 8] both."""
    low, middle, high = np.split(blocks[:, 4:16], 3, axis=1)
    scales = np.concatenate((low & 63, high & 15 | low >> 2 & 48), 1)
    minima = np.concatenate((middle & 63, high >> 4 | middle >> 2 & 48), 1)
    return _halves(blocks[:, :2]) * scales, -_halves(blocks[:, 2:4]) * minima


def _q4_k(blocks: ndarray) -> Parts:
    return _nibbles(blocks[:, 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: ndarray) -> Parts:
    fifth = np.stack([blocks[:, 16:48] >> bit & 1 for bit in range(8)], 1).reshape(len(blocks), -1) << 4
    return _eight(_nibbles(blocks[:, 48:], 32) | fifth, 0), *_k_scales(blocks)


def _q6_k(blocks: ndarray) -> Parts:
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & 3
    codes = _nibbles(blocks[:, :128], 64) | high.reshape(len(blocks), -1) << 4
    return _eight(codes, 32), _halves(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8), None


def _iq4_xs(blocks: ndarray) -> Parts:
    low = _nibbles(blocks[:, 4:8], 1)
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
    return _nibbles(blocks[:, 8:]), _halves(blocks[:, :2]) * scales, None


# number of a type -> bytes of a block, weights of codes of 4 bits, and how blocks are unpacked
TYPES: dict[int, tuple[int, ndarray | None, Callable[[ndarray], Parts]]] = {
    2: (18, EVEN - 8, _q4_0),
    3: (20, EVEN, _q4_1),
    6: (22, None, _q5_0),
    7: (24, None, _q5_1),
    8: (34, None, _q8_0),
    12: (144, EVEN, _q4_k),
    13: (176, None, _q5_k),
    14: (210, None, _q6_k),
    20: (18, NON_LINEAR, _q4_0),
    23: (136, NON_LINEAR, _iq4_xs),
    39: (17, FLOAT4, _mxfp4),
}
