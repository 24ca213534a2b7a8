"""What the loop needs of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from kvsift.batching.exact.step import ExactModel
from kvsift.batching.row import Row
from kvsift.models.transformers_cache import SparseCache
from kvsift.plan.plan import Plan
from kvsift.stores.kv_pool import KVPool
from kvsift.stores.page_pool import Run
from kvsift.stores.page_table import PageTable


class RowModel(ExactModel, Protocol):
    """What the loop needs of a model.

    Attributes:
        page_size: tokens of a page that rows share.
        steady: no bit of an answer may depend on other rows.
    """

    page_size: int
    steady: bool

    def reason_apart(self, row: Row) -> str | None:
        """Why a row has a pool of its own; None if its pages are in that of all rows."""

    def open(self, row: Row, table: PageTable | None) -> SparseCache:
        """An empty cache of one row, over the pages of ``table`` if there is one."""

    def adopt(self, cache: SparseCache, length: int, stale: bool, grid: int, sealed: Sequence[Any]) -> None:
        """Begin with ``length`` tokens, whose pages the cache's table has adopted; ``stale``: some of them lack
        summaries; ``sealed``: by the cache that has read them."""

    def restore(self, row: Row) -> None:
        """Let the source of a row fill its cache."""

    def root(self, row: Row) -> bytes:
        """Name of what the keys of a prompt depend on, besides its tokens."""

    @property
    def most_read(self) -> int:
        """Tokens of a prompt to read densely in one pass when no other row waits for it."""

    def forks(self, cache: SparseCache) -> bool:
        """Whether ``fork`` can copy a cache."""

    def fork(self, cache: SparseCache, length: int, row: Row) -> SparseCache:
        """A cache for a row that begins with the first ``length`` tokens of another one, whose full pages it shares."""

    def begin(self, row: Row, cache: SparseCache) -> None:
        """Set up a cache for the answer of a row."""

    def rewind(self, cache: SparseCache) -> bool:
        """Remove what follows the tokens of a pinned prefix, if that is possible; returns whether it was."""

    def fail(self) -> None:
        """Forget all captured steps and pools, after a fault."""

    def read(self, row: Row, ids: Sequence[int], pause: Callable[[], bool] | None = None) -> Tensor:
        """Store and attend tokens of a row's prompt; logits [vocabulary] of the last one.

        ``pause`` may be called at any time, and may decode other rows; it returns whether it has.
        """

    def pages_of(self, row: Row) -> int:
        """The most pages' worth of memory that a row needs."""

    @property
    def longest(self) -> int | None:
        """Pages of the longest row that the model has positions for; None: they are unlimited."""

    def groups(self, rows: Sequence[Row]) -> Sequence[Sequence[Row]]:
        """Rows that one pass decodes together, of all that decode; some may wait for the next step. New ones begin in
        their order, and have ``composed`` then: one that cannot begin is the first without."""

    def decode_rows(self, rows: Sequence[Row]) -> Sequence[Tensor | int]:
        """Feed the next token of each row of a group: logits [vocabulary] of each, or the token that was chosen."""

    def recall(self, row: Row) -> None:
        """Let a row that takes captured steps go on from its ``num_cached`` tokens, whatever was launched for it."""

    def leave(self, row: Row) -> None:
        """Count what a row has done in captured steps: it ends."""

    def release(self, kv: KVPool) -> None:
        """Let go of the tensors of a pool, which is about to grow; rows go on as after ``recall``."""

    def runs(self, kv: KVPool) -> Sequence[Run]:
        """Pages of a pool that the model keeps for itself."""

    @property
    def holds_pool(self) -> bool:
        """Whether steps are captured over the pool, so that it should stay while no row needs it."""

    def forget(self) -> None:
        """Drop captured steps that no row takes."""

    def prepare(self, kv: KVPool, plan: Plan, num_rows: int) -> int:
        """Capture the steps that up to so many rows under a plan will take over a pool; returns how many."""

    def spare(self, kv: KVPool) -> int:
        """Pages to allocate besides those that a pool has to grow to, so that it grows rarely."""

    def room(self, kv: KVPool) -> int | None:
        """Pages for which there is memory beside a pool; None if unknown."""
