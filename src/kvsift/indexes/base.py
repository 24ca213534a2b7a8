"""The protocol of an index, and the order of results and count of scanned keys that all indexes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvsift.errors import InvalidTensor, InvalidValue, NotFinite
from kvsift.native.shapes import HeadRows

NOTHING = -1  # id of a result that is missing


class Index(Protocol):
    """Search for the keys with the largest inner products, in one layer of one sequence.

    An index does not own the keys [num_kv_heads, n, head_dim], which every call receives. Query head h reads KV head
    h // group size. Results are ordered by score, the largest first, ties to the lower id; a missing result is id -1
    with score -inf, at the end of a row.
    """

    def search(self, queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find ids int64 [num_query_heads, k], rows of ``keys``, and scores float32 [num_query_heads, k], q.k unscaled,
        for queries [num_query_heads, head_dim]. Rows added after the build are scanned exactly."""

    def extend(self, keys: Tensor) -> None:
        """Take in rows that were added to the keys, or leave them to be scanned."""

    def crop(self, length: int) -> None:
        """Remove the rows from ``length`` on."""

    def fork(self) -> Index:
        """Return an independent index without searches; large tensors are shared until one of the two changes them."""

    @property
    def bytes_read(self) -> int:
        """Bytes of keys and codes read in all searches so far; what a group of query heads shares counts once."""

    def statistics(self) -> dict[str, Any]:
        """Return "kind", "rows" of the build, "bytes" beside the keys, "build_seconds", "searches", and "scanned": mean
        number of keys scored per query head and search."""


@dataclass
class SearchCount:
    """Searches so far, keys scored in them, and bytes read."""

    searches: int = 0
    keys: float = 0.0  # per query head, summed over searches
    bytes_read: int = 0

    def add(self, keys_per_head: float, bytes_read: int) -> None:
        self.searches += 1
        self.keys += keys_per_head
        self.bytes_read += bytes_read

    @property
    def mean(self) -> float:
        return self.keys / self.searches if self.searches else 0.0

    def statistics(self, kind: str, rows: int, num_bytes: int, **seconds: float) -> dict[str, Any]:
        """Return what every ``Index.statistics`` begins with."""
        counted = {"searches": self.searches, "scanned": self.mean}
        return {"kind": kind, "rows": rows, "bytes": num_bytes, **seconds, **counted}


def check_search(queries: Tensor, keys: HeadRows, k: int) -> None:
    """Refuse a search that no index can answer.

    Raises:
        InputError: for shapes that do not fit, k below 1, tensors that are not in host memory, or a query that is not
            finite.
    """
    fit = queries.ndim == 2 and len(keys.shape) == 3 and queries.shape[1] == keys.shape[2]
    if not fit or queries.shape[0] % keys.shape[0]:
        raise InvalidTensor(
            f"queries {list(queries.shape)} do not fit keys {list(keys.shape)}: give [num_query_heads, head_dim] and "
            "[num_kv_heads, n, head_dim], the query heads a multiple of the KV heads."
        )
    if k < 1:
        raise InvalidValue(f"k={k} keys cannot be searched for; ask for 1 or more.")
    if queries.device.type != "cpu" or keys.device.type != "cpu":
        raise InvalidTensor(f"an index searches host memory, and the keys are on {keys.device}; copy them there first.")
    if not bool(torch.isfinite(queries).all()):
        raise NotFinite("a query holds NaN or an infinite number: no key is nearest to it. Check what made it.")


def check_keys(keys: Tensor) -> None:
    """Refuse keys [num_kv_heads, n, head_dim] that cannot be ranked, before an index takes them in.

    Raises:
        InputError: if one is not finite.
    """
    # a sum reads them once without a temporary tensor; it may overflow though all are finite
    if not bool(keys.sum(dtype=torch.float32).isfinite()) and not bool(keys.isfinite().all()):
        raise NotFinite("keys hold NaN or infinite numbers: no query can rank them. Check what made them.")


def best(ids: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Order the k best results: ids and scores [num_heads, count] -> [num_heads, k].

    Ids are unique in a row; id -1 is no result, whatever its score.
    """
    missing = ids < 0
    by_id = ids.masked_fill(missing, torch.iinfo(torch.int64).max).sort(dim=-1, stable=True).indices
    ids, scores = ids.gather(1, by_id), scores.masked_fill(missing, -torch.inf).gather(1, by_id)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    ids, scores = ids.gather(1, order), scores.gather(1, order)
    short = k - ids.shape[1]
    if short > 0:
        ids = torch.nn.functional.pad(ids, (0, short), value=NOTHING)
        scores = torch.nn.functional.pad(scores, (0, short), value=-torch.inf)
    return ids, scores


def merged(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], offset: int, k: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Merge the results of two searches over consecutive rows; the ids of the second count from ``offset``."""
    ids = torch.where(second[0] < 0, second[0], second[0] + offset)
    return best(torch.cat([first[0], ids], 1), torch.cat([first[1], second[1]], 1), k)


def best_of_groups(ids: Tensor, scores: Tensor, num_kv_heads: int, k: int) -> Tensor:
    """Return the k ids of each KV head with the largest score of any of its query heads, int64 [num_kv_heads, k].

    ids and scores [num_query_heads, k] are the best of each query head, which include the best of the group.
    """
    ids, scores = (tensor.unflatten(0, (num_kv_heads, -1)).flatten(1) for tensor in (ids, scores))
    # the largest score of an id first: the others of the same id follow it
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(1, ids.gather(1, order).sort(dim=-1, stable=True).indices)
    ids, scores = ids.gather(1, order), scores.gather(1, order)
    repeated = torch.nn.functional.pad(ids[:, 1:] == ids[:, :-1], (1, 0), value=False)
    return best(ids.masked_fill(repeated, -1), scores, k)[0]
