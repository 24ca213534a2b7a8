"""What an index is, and what all of them share: how results are ordered and how scanned keys are counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvsift.errors import InputError

NOTHING = -1  # id of a result that is missing


class Index(Protocol):
    """Finds the keys with the largest inner products, in one layer of one sequence.

    It does not own the keys: [num_kv_heads, n, head_dim], passed to every call. Query head h reads KV head
    h // group size. Results come by score, the largest first, ties to the lower id; what is missing is id -1 with
    score -inf, at the end of a row.
    """

    def search(self, queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Ids int64 [num_query_heads, k], rows of ``keys``, and scores float32 [num_query_heads, k], q.k unscaled, for
        queries [num_query_heads, head_dim]. Rows that the index was not built over are scanned exactly."""

    def extend(self, keys: Tensor) -> None:
        """Rows have been added to the keys; an index may take them in, or leave them to be scanned."""

    def crop(self, length: int) -> None:
        """Rows from ``length`` on are gone."""

    def fork(self) -> Index:
        """An index that goes its own way; what is large is shared until one of them changes it. It has not searched."""

    @property
    def bytes_read(self) -> int:
        """Of keys and codes, in all searches so far; what is read once for a group of query heads counts once."""

    def statistics(self) -> dict[str, Any]:
        """ "kind", "rows" it was built over, "bytes" beside the keys, "build_seconds", "searches", and "scanned": mean
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


def check_search(queries: Tensor, keys: Tensor, k: int) -> None:
    """Refuse what no index can answer.

    Raises:
        InputError: for shapes that do not fit, k below 1, tensors that are not in host memory, or a query that is not
            finite.
    """
    if queries.ndim != 2 or keys.ndim != 3 or queries.shape[1] != keys.shape[2] or queries.shape[0] % keys.shape[0]:
        raise InputError(
            f"queries {list(queries.shape)} do not fit keys {list(keys.shape)}: give [num_query_heads, head_dim] and "
            "[num_kv_heads, n, head_dim], the query heads a multiple of the KV heads."
        )
    if k < 1:
        raise InputError(f"k={k} keys cannot be searched for; ask for 1 or more.")
    if queries.device.type != "cpu" or keys.device.type != "cpu":
        raise InputError(f"an index searches host memory, and the keys are on {keys.device}; copy them there first.")
    if not bool(torch.isfinite(queries).all()):
        raise InputError("a query holds NaN or an infinite number: no key is nearest to it. Check what made it.")


def check_keys(keys: Tensor) -> None:
    """Refuse keys [num_kv_heads, n, head_dim] that cannot be ranked; called when an index takes them in.

    Raises:
        InputError: if one is not finite.
    """
    # one sum reads them once and makes nothing; it may overflow though all are finite
    if not bool(keys.sum(dtype=torch.float32).isfinite()) and not bool(keys.isfinite().all()):
        raise InputError("keys hold NaN or infinite numbers: no query can rank them. Check what made them.")


def best(ids: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of some results, in order: ids and scores [num_heads, count] -> [num_heads, k].

    No id may occur twice in a row; -1 is no result, whatever its score.
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
    """Results of two searches over rows that follow one another; the ids of the second count from ``offset``."""
    ids = torch.where(second[0] < 0, second[0], second[0] + offset)
    return best(torch.cat([first[0], ids], 1), torch.cat([first[1], second[1]], 1), k)
