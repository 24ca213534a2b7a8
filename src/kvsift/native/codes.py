"""Keys in 8 bits per number, in the layout of a scan.

key[j] is about centre[j] + scale[j] * (code - 128). Each KV head and channel has its own centre and scale, so that a
few large channels do not cost the others precision. A query is multiplied by the scales; the centres add the same to
every key and do not change their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsift.errors import InvalidTensor
from kvsift.native.shapes import check_rows

ROWS = 16  # per block: one register of 32-bit sums, 4 channels at a time
LARGEST = 2.0**120  # number that has a code of its own: sums of two are finite in float32
MARGIN = 1.25  # factor of a range that new keys exceed, so that it does not grow with each token
_CHUNK = 8192  # rows per step of coding, which bounds the temporary memory


@dataclass
class Codes:
    """Codes of one layer and sequence.

    Attributes:
        blocks: uint8 [num_kv_heads, capacity, head_dim / 4, 16, 4], block b holding the keys 16 b to 16 b + 15.
        scale: float32 [num_kv_heads, head_dim], the step of a channel.
        centre: float32 [num_kv_heads, head_dim].
        length: number of keys.
    """

    blocks: Tensor
    scale: Tensor
    centre: Tensor
    length: int

    @classmethod
    def of(cls, keys: Tensor) -> Codes:
        """Codes of keys [num_kv_heads, n, head_dim], bf16 or float32."""
        check_rows("keys", keys)
        heads, _, dim = keys.shape
        empty = torch.zeros(heads, dim)
        codes = cls(torch.empty(heads, 0, dim // 4, ROWS, 4, dtype=torch.uint8), empty, empty.clone(), 0)
        codes.extend(keys)
        return codes

    def extend(self, keys: Tensor) -> None:
        """Code the keys from ``length`` on; keys are all keys, [num_kv_heads, n, head_dim].

        If new keys exceed the range of a KV head, all its keys are coded again over a range wider by MARGIN.
        """
        check_rows("keys", keys)
        heads, n, dim = keys.shape
        if (heads, dim) != tuple(self.scale.shape) or n < self.length:
            raise InvalidTensor(
                f"keys are {list(keys.shape)}; codes hold {self.length} keys of {list(self.scale.shape)} channels, "
                "and grow by keys that come after these. Call crop(length) first if keys were removed."
            )
        if n == self.length:
            return
        self._reserve(n)
        new = keys[:, self.length :]
        top, bottom = new.amax(1).float(), new.amin(1).float()  # [num_kv_heads, head_dim]
        if not (torch.maximum(top, -bottom) <= LARGEST).all():
            top, bottom = self._coded_extremes(new)
        reach = 127 * self.scale
        outside = (top > self.centre + reach) | (bottom < self.centre - reach)
        for head in range(heads):
            start = self.length
            if start == 0 or bool(outside[head].any()):
                top[head] = torch.maximum(top[head], (self.centre + reach)[head]) if start else top[head]
                bottom[head] = torch.minimum(bottom[head], (self.centre - reach)[head]) if start else bottom[head]
                self.centre[head] = (top[head] + bottom[head]) / 2
                widened = torch.where(outside[head], MARGIN, 1.0) if start else 1.0
                self.scale[head] = ((top[head] - bottom[head]) / 2 / 127 * widened).clamp_min(1e-30)
                start = 0
            self._write(head, keys[head], start)
        self.length = n

    def crop(self, length: int) -> None:
        """Drop the keys from ``length`` on."""
        self.length = min(self.length, length)

    def fork(self) -> Codes:
        """Copy the codes; the copy shares no memory."""
        used = (self.length + ROWS - 1) // ROWS
        return Codes(self.blocks[:, :used].clone(), self.scale.clone(), self.centre.clone(), self.length)

    @property
    def nbytes(self) -> int:
        """Bytes, unused capacity included."""
        return self.blocks.numel() + 2 * self.scale.numel() * 4

    def _coded_extremes(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest and smallest number of each channel that has a code of its own. Infinities and numbers
        nearly as large get the outermost codes: as bounds they would make all other codes of a channel equal."""
        coded = keys.abs() <= LARGEST  # False for NaN
        top, bottom = keys.masked_fill(~coded, -torch.inf).amax(1), keys.masked_fill(~coded, torch.inf).amin(1)
        some = coded.any(1)
        return torch.where(some, top.float(), self.centre), torch.where(some, bottom.float(), self.centre)

    def _reserve(self, length: int) -> None:
        needed = (length + ROWS - 1) // ROWS
        if needed <= self.blocks.shape[1]:
            return
        capacity = needed if self.length == 0 else max(needed, 2 * self.blocks.shape[1])
        grown = self.blocks.new_zeros(self.blocks.shape[0], capacity, *self.blocks.shape[2:])
        grown[:, : self.blocks.shape[1]] = self.blocks
        self.blocks = grown

    def _write(self, head: int, keys: Tensor, start: int) -> None:
        """Code keys [n, head_dim] of one head from ``start`` on."""
        flat = self.blocks[head].permute(0, 2, 1, 3)  # [capacity, 16, head_dim / 4, 4]
        for first in range(start - start % ROWS, keys.shape[0], _CHUNK):
            rows = keys[first : first + _CHUNK].float()
            code = ((rows - self.centre[head]) / self.scale[head]).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
            whole = torch.nn.functional.pad(code, (0, 0, 0, -code.shape[0] % ROWS))
            block = first // ROWS
            flat[block : block + whole.shape[0] // ROWS] = whole.view(-1, ROWS, keys.shape[1] // 4, 4)
