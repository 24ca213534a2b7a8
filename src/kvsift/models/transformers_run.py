"""What the layers of one transformers cache share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from typing import Any, Self

from torch import Tensor

from kvsift.errors import InputError
from kvsift.methods.base import Phase
from kvsift.runtime.moved import check_rope
from kvsift.runtime.plan import Plan
from kvsift.runtime.relay import Relay
from kvsift.runtime.sequence import Placement, reason_against
from kvsift.runtime.stats import RunStats, SharedStats
from kvsift.types import Origin, Rope


class Run:
    """What all layers of one cache share: the plan, the counters, and the state of the forward pass under way.

    Args:
        plan: rules by phase.
        stats: where to count.
        reserve: tokens a row is expected to reach.
        rows: lengths that the rows of a ragged batch will not exceed; they are fed one at a time, ``row`` next.
            Empty: rows come together, as many as the first chunk has.
        placement: see ``SparseAttention``.

    Raises:
        InputError: for a plan that cannot run with its KV there.
    """

    def __init__(
        self, plan: Plan, stats: RunStats, reserve: int = 0, rows: Sequence[int] = (), placement: Placement = "device",
    ) -> None:  # fmt: skip
        if (reason := reason_against(placement, plan)) is not None:
            raise InputError(reason)
        self.plan = plan
        self.stats = stats
        self.block_stats: SharedStats | None = None  # of the block whose counters ``stats`` belong to
        self.reserve = reserve
        self.rows = tuple(rows)
        self.rope: Rope | None = None  # how the model rotates queries and keys, where that is known
        self.no_rope = ""  # why it is not
        self.placement = placement
        self.peers: tuple[int, ...] = ()  # true indices of the model's layers that are kvsift's
        self.origin: Origin | None = None  # the model
        self.attention_in_use: Callable[[], str] = str  # the model's attention implementation by now
        self.row = 0
        self._begin()

    def _begin(self) -> None:
        self.relay = Relay()  # between the layers, within a forward pass
        self.feeding: Phase | None = None  # what the tokens of coming forward passes are; None: to be found out
        self.decode_tokens = 0  # of the forward pass under way, at the end of each row
        self.hidden_below: Tensor | None = None  # what the attention below has read in it

    def fresh(self) -> Self:
        """The same settings for another cache."""
        run = copy(self)
        run._begin()
        return run

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """For the copy of a cache: a run of its own, counted by the same block; what describes the model is shared."""
        run = self.fresh()
        run.stats = deepcopy(self.stats, memo) if self.block_stats is None else self.block_stats.open(run)
        memo |= {id(self): run, id(self.stats): run.stats, id(self.relay): run.relay}
        memo |= {id(shared): shared for shared in (self.rope, self.origin)}
        return run

    @property
    def foresees(self) -> bool:
        """Whether layers want to know, in this forward pass, what they would ask of the input of the layer below."""
        return self.plan.wants_hidden and self.decode_tokens > 0

    def know_rope(self, rope: Rope | None, no_rope: str) -> None:
        """How the model rotates queries and keys, or why that is not known.

        Raises:
            InputError: for a plan that needs to know.
        """
        check_rope(self.plan, rope, no_rope)
        self.rope, self.no_rope = rope, no_rope
