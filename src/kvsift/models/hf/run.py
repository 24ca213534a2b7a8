"""Settings and state that the layers of one transformers cache share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from typing import Any, Self

from torch import Tensor

from kvsift.errors import InvalidValue
from kvsift.layer.accounting import RunStats, SharedStats
from kvsift.layer.guards import Guards
from kvsift.layer.layer_messages import LayerMessages
from kvsift.methods import checks
from kvsift.methods.base import Phase
from kvsift.plan.capabilities import NO_PROBES, NO_ROPE, UNKNOWN_ROPE, PlanCase, check, check_placement
from kvsift.plan.placement import PlacementSpec
from kvsift.plan.plan import Plan
from kvsift.stores.kv_pool import KVPool
from kvsift.stores.page_table import PageTable
from kvsift.types import Exact, Origin, Rope


class SparseRun:
    """The plan and the counters of one cache, with a report for its user, and the state of the current forward pass.

    Args:
        plan: rules by phase.
        stats: counters.
        reserve: expected tokens of a sequence.
        rows: maximum lengths of the sequences of a ragged batch, which are fed one at a time, ``row`` next. Empty: all
            sequences are fed together, as many as the first chunk has.
        placement: see ``SparseAttention``.

    Raises:
        InputError: for a plan that does not support the placement, or needs probes where none are taken.
    """

    def __init__(
        self, plan: Plan, stats: RunStats, reserve: int = 0, rows: Sequence[int] = (),
        placement: PlacementSpec = "device",
    ) -> None:  # fmt: skip
        check_placement(plan, placement)
        checks.whole("probe_every", stats.probe_every, 0)
        check(PlanCase(plan, probe_every=stats.probe_every), NO_PROBES)
        self.plan = plan
        self.stats = stats
        self.block_stats: SharedStats | None = None  # counters of the block that this run is part of
        self.reserve = checks.whole("reserve", reserve, 0)
        if not isinstance(rows, list | tuple):
            raise InvalidValue(f"rows={rows!r} must be a list of lengths in tokens.")
        self.rows = tuple(checks.whole("rows", row, 0) for row in rows)
        self.rope: Rope | None = None  # how the model rotates queries and keys, if known
        self.no_rope = ""  # why it is not known
        self.placement = placement
        self.kv: KVPool | None = None  # pages shared with other caches; None: this cache has its own
        self.peers: tuple[int, ...] = ()  # indices of the model's layers that are kvsift's
        self.origin: Origin | None = None  # the model
        self.attention_in_use: Callable[[], str] = str  # the model's current attention implementation
        self.row = 0
        self.exact: Exact = ""  # of generated tokens, for now
        self._begin()

    def _begin(self) -> None:
        self.messages = LayerMessages()  # between the layers, within a forward pass
        self.guards = Guards()  # of the sequences
        self.table: PageTable | None = None  # pages of the sequences, of all layers
        self.feeding: Phase | None = None  # phase of all tokens; None: derived from each call of the model
        self.decode_tokens = 0  # generated tokens at the end of each sequence, in the current forward pass
        self.hidden_below: Tensor | None = None  # input of the attention below, in the current forward pass

    def fresh(self) -> Self:
        """Return a run with the same settings for another cache."""
        run = copy(self)
        run._begin()
        return run

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the run of a copied cache: counted by the same block; the description of the model is shared."""
        run = self.fresh()
        run.table, run.guards = deepcopy(self.table, memo), deepcopy(self.guards, memo)
        run.stats = deepcopy(self.stats, memo) if self.block_stats is None else self.block_stats.open(run)
        memo |= {id(self): run, id(self.stats): run.stats, id(self.messages): run.messages}
        memo |= {id(shared): shared for shared in (self.rope, self.origin)}
        return run

    def table_of(self, num_rows: int) -> PageTable:
        """Return the pages of the sequences; they are made when the first layer needs them."""
        if self.table is None:
            self.table = PageTable(num_rows, self.kv)
        return self.table

    @property
    def foresees(self) -> bool:
        """Whether the plan uses queries that are foreseen one layer below, in the current forward pass."""
        return self.plan.wants_hidden and self.decode_tokens > 0

    def set_rope(self, rope: Rope | None, no_rope: str) -> None:
        """Set how the model rotates queries and keys, or why that is not known.

        Raises:
            InputError: for a plan that depends on it.
        """
        check(PlanCase(self.plan, rope=rope or no_rope or UNKNOWN_ROPE), NO_ROPE)
        self.rope, self.no_rope = rope, no_rope

    def report(self) -> dict[str, Any]:
        """Return the plan and the counters, ready for JSON."""
        return {"plan": str(self.plan), **self.stats.report()}
