"""Exact search: every key is scored; the keys of a KV head are read once for its group of queries."""

from __future__ import annotations

from math import ceil, prod
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from kvsift import native
from kvsift.errors import InputError, MissingPackage
from kvsift.indexes.base import SearchCount, best, check_keys, check_search, merged
from kvsift.native.shapes import HeadRows, PooledRows, check_rows

CodeKind = Literal["int8"]


def overfetch(k: int) -> float:
    """Return the number of candidates per result. Rounding to codes changes the rank of a key by a few dozen, a smaller
    share of larger k. For k of a thousand and more, 1.15 missed no key on S, T and P (``bench index``)."""
    return 1.5 if k < 1000 else 1.25


def core_takes(keys: HeadRows) -> bool:
    """Whether the compiled core is available and supports the layout of keys [num_kv_heads, n, head_dim]."""
    if not native.available():
        return False
    try:
        check_rows("keys", keys)
    except InputError:
        return False
    return True


def exact_search(queries: Tensor, keys: HeadRows, k: int) -> tuple[Tensor, Tensor]:
    """Find the k best keys of each query head (``Index.search``), with the compiled core or else with torch."""
    if core_takes(keys):
        return native.scan(queries, keys, k)
    return scan_in_torch(queries, keys.gather() if isinstance(keys, PooledRows) else keys, k)


def scan_in_torch(queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Search exactly with float32 products and topk."""
    grouped = queries.float().unflatten(0, (keys.shape[0], -1))
    scores = torch.stack([torch.mm(group, rows.float().T) for group, rows in zip(grouped, keys)]).flatten(0, 1)
    count = min(k, keys.shape[1])
    if count == 0:
        return best(scores.new_empty(scores.shape[0], 0, dtype=torch.int64), scores, k)
    values, ids = scores.topk(count, dim=-1)
    least = values[:, -1:]
    # topk returns any of the keys that tie for the last places: only ties need a stable sort
    if torch.equal((scores == least).sum(-1), (values == least).sum(-1)):
        return best(ids, values, k)
    ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return best(ids, scores.gather(1, ids), k)


class FlatIndex:
    """A scan of all keys. With ``codes="int8"`` candidates come from 8-bit codes, more than k of them (``overfetch``),
    and are scored again from the keys.

    Rows without codes are scanned exactly, and so are keys for which the compiled core has no codes: other dtypes than
    bf16 and float32, and head sizes that are no multiple of 8 or above 256.
    """

    def __init__(self, codes: CodeKind | None = None) -> None:
        self.codes = codes
        self._coded: native.Codes | None = None  # of the first rows
        self._shared = False  # with a fork: neither changes them
        self._rows = 0
        self._build_seconds = 0.0
        self._count = SearchCount()

    @classmethod
    def build(cls, keys: Tensor, *, codes: CodeKind | None = None) -> FlatIndex:
        """Build over keys [num_kv_heads, n, head_dim].

        Raises:
            InputError: if codes need the compiled core and it is missing, or for keys that are not finite.
        """
        if codes is not None and not native.available():
            raise MissingPackage(f"a scan of {codes} codes needs the compiled core: {native.why_missing()}")
        index = cls(codes)
        index.extend(keys)
        return index

    def search(self, queries: Tensor, keys: HeadRows, k: int) -> tuple[Tensor, Tensor]:
        """As of every index; without codes the keys may be rows of a pool."""
        check_search(queries, keys, k)
        rows = 0 if self._coded is None else self._coded.length
        if self._coded is None or rows == 0:
            self._count.add(keys.shape[1], prod(keys.shape) * keys.dtype.itemsize)
            return exact_search(queries, keys, k)
        assert isinstance(keys, Tensor)
        coded = keys[:, :rows].numel() + ceil(overfetch(k) * k) * queries.numel() * keys.element_size()
        self._count.add(keys.shape[1], coded + keys[:, rows:].numel() * keys.element_size())
        nearest = native.scan_codes(queries, self._coded, keys[:, :rows], k, overfetch(k))
        if rows == keys.shape[1]:
            return nearest
        return merged(nearest, exact_search(queries, keys[:, rows:], k), rows, k)

    def extend(self, keys: Tensor) -> None:
        started = perf_counter()
        check_keys(keys[:, self._rows :])
        self._rows = keys.shape[1]
        if self.codes is not None and core_takes(keys):
            if self._coded is None:
                self._coded = native.Codes.of(keys)
            else:
                self._own_codes().extend(keys)
        self._build_seconds += perf_counter() - started

    def crop(self, length: int) -> None:
        self._rows = min(self._rows, length)
        if self._coded is not None and length < self._coded.length:
            self._own_codes().crop(length)

    def fork(self) -> FlatIndex:
        copy = FlatIndex(self.codes)
        copy._coded, copy._rows, copy._build_seconds = self._coded, self._rows, self._build_seconds
        copy._shared = self._shared = self._coded is not None
        return copy

    def _own_codes(self) -> native.Codes:
        assert self._coded is not None
        if self._shared:
            self._coded, self._shared = self._coded.fork(), False
        return self._coded

    @property
    def bytes_read(self) -> int:
        return self._count.bytes_read

    def statistics(self) -> dict[str, Any]:
        kind, num_bytes = ("flat", 0) if self._coded is None else (f"flat_{self.codes}", self._coded.nbytes)
        return self._count.statistics(kind, self._rows, num_bytes, build_seconds=self._build_seconds)
