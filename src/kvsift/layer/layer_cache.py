"""What one attention layer keeps of a running batch: its store, and the memories of the methods."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from kvsift.errors import EvictedTokens
from kvsift.layer.accounting import RunStats
from kvsift.layer.guards import Guards
from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.method_states import MethodStates
from kvsift.methods.base import Phase
from kvsift.plan.capabilities import NO_ROPE, UNKNOWN_ROPE, PlanCase, check, check_placement
from kvsift.plan.layer_budgets import layer_plan
from kvsift.plan.placement import Placement, PlacementSpec
from kvsift.plan.plan import PHASES, Plan
from kvsift.stores.background import submit
from kvsift.stores.base import Store
from kvsift.stores.evicting import EvictingStore
from kvsift.stores.page_table import PageTable
from kvsift.stores.paged import PagedStore
from kvsift.stores.reader import RowReader
from kvsift.types import Chunk, LayerShape

DEFAULT_PAGE_SIZE = 16


class LayerCache:
    """The cache of one layer: what is stored and remembered, and how both change together.

    Args:
        shape: the layer.
        plan: rules by phase.
        num_rows: sequences in the batch.
        like: a tensor with the device and dtype of the keys.
        stats: counters.
        reserve: tokens a sequence is expected to reach.
        messages: messages between the layers of the model, for methods that send some; by default this layer is alone.
        placement: where KV is (``plan.placement``).
        table: pages of the sequences, which all layers of a cache share; by default this layer has its own.
        guards: guards of the sequences, likewise.

    Attributes:
        store: keys, values and page summaries.
        number: that of the layer among those with full attention, from 0.
    """

    def __init__(
        self, shape: LayerShape, plan: Plan, num_rows: int, like: Tensor, stats: RunStats, reserve: int = 0,
        messages: LayerMessages | None = None, placement: PlacementSpec = "device", table: PageTable | None = None,
        guards: Guards | None = None,
    ) -> None:  # fmt: skip
        check_placement(plan, placement, like.is_cuda)
        self.shape, self.stats, self.plan = shape, stats, _plan_in_layer(plan, shape)
        self.number = shape.attention_index
        self.messages = LayerMessages() if messages is None else messages
        self.guards = Guards() if guards is None else guards
        self._forks = self.guards.forks
        place, page_size = Placement.of(placement), self.plan.page_size or _page_size_of(table) or DEFAULT_PAGE_SIZE
        evicts = self.plan.evicts_in(shape)
        if evicts and self.plan.evicts_prompt:
            reserve = 0  # not even the prompt is ever stored as a whole
        arguments = shape, num_rows, page_size, like, self.plan.summaries, reserve
        table = None if evicts else table  # sequences that evict have pages of their own
        self.store: Store = place.store(*arguments, table, **dict(place.knobs))
        if evicts:
            self.store = EvictingStore.of(self.store)
        self._like = like.new_empty(0)
        self._preparer: ThreadPoolExecutor | None = None  # is to prepare for decode once the next chunk is attended
        self._preparing: Future[None] | None = None
        self._states = MethodStates(self.plan, shape, num_rows)

    def _append(self, row: int, queries: Tensor, keys: Tensor, values: Tensor) -> int:
        """Store and observe new tokens; the position of the first of them."""
        start = self.store.lengths[row]
        self.store.append(row, keys, values)
        if self.store.rounds and self._states.observes(PHASES):
            reader = self.store.reader(row)
            keys, values = reader.keys(start), reader.values(start)
        self._states.observe(row, queries, keys, values, start)
        return start

    def stored(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens of a sequence, each [num_kv_heads, tokens, head_dim], on the store's device.

        Raises:
            InputError: if some were evicted.
        """
        reader = self._whole(row)
        return reader.keys(), reader.values()

    def rows(self, row: int) -> tuple[Tensor, Tensor]:
        """As ``stored``, in the form in which they are stored, for ``restore``."""
        return self._whole(row).rows()

    def _whole(self, row: int) -> RowReader:
        self._wait()
        if self.store.num_stored(row) < self.store.lengths[row]:
            raise EvictedTokens(
                f"layer {self.shape.layer} has dropped tokens for good (evict=true), so not all of its keys and values "
                "can be read. Leave evict=true out to keep them."
            )
        return self.store.reader(row)

    @property
    def watches(self) -> bool:
        """Whether some method of the plan observes or follows generated tokens."""
        return self._states.watches

    @property
    def like(self) -> Tensor:
        """An empty tensor with the device and dtype of the keys."""
        return self._like

    def sealed(self, length: int) -> dict[Phase, Any]:
        """What methods remember of the first ``length`` tokens of the only sequence, for ``adopt``."""
        return self._states.sealed(0, length)

    def adopt(self, length: int, stale: bool, chunk_size: int, sealed: Mapping[Phase, Any]) -> None:
        """Begin the only sequence with ``length`` tokens of pages that the table has adopted, some without summaries if
        ``stale``. Methods start from what others have ``sealed``, or observe them in chunks, as if they were read."""
        assert isinstance(self.store, PagedStore), "rows that share pages keep them in a pool"
        self.store.adopt(0, length, stale)
        self._observe_stored(chunk_size, [phase for phase in PHASES if phase not in sealed])
        self._states.adopt(0, sealed)

    def begin_as(self, other: LayerCache, length: int) -> None:
        """Begin the only sequence as a copy of the first ``length`` tokens of another one, whose pages the table has
        adopted."""
        assert isinstance(self.store, PagedStore), "rows that share pages keep them in a pool"
        self.store.begin_copy(0, length)
        self._states.begin_as(other._states, length)

    def summaries(self, row: int) -> dict[str, Tensor]:
        """Summaries of all pages of a sequence that are maintained: kind -> [num_kv_heads, num_pages, width]."""
        self._wait()
        reader, num_pages = self.store.reader(row), -(-self.store.lengths[row] // self.store.page_size)
        return {kind: reader.summary(kind, slice(0, num_pages)) for kind in self.store.kinds}

    def restore(self, keys: Tensor, values: Tensor, summaries: Mapping[str, Tensor], chunk_size: int) -> None:
        """Begin the only sequence with ``rows`` of another cache and the summaries of its pages; methods
        observe them in chunks, as if they were read."""
        self.store.restore(0, keys, values, summaries)
        self._observe_stored(chunk_size)

    def _observe_stored(self, chunk_size: int, phases: Collection[Phase] = PHASES) -> None:
        if not self._states.observes(phases):
            return
        reader = self.store.reader(0)
        for start in range(0, reader.length, chunk_size):
            tokens = start, min(start + chunk_size, reader.length)
            self._states.observe(0, None, reader.keys(*tokens), reader.values(*tokens), start, phases)

    def take(self, chunk: Chunk) -> None:
        """Store the tokens of a prompt, observed by the methods, without attending them."""
        self._wait()
        for row, length in enumerate(chunk.lengths):
            self.messages.begin(row, self.shape.layer)
            self._append(row, *(tensor[row, :, :length] for tensor in chunk[:3]))
            self._states.follow(row, length, "prefill", self.store, self.messages, self.stats)
            self._states.settle(row, self.store, self.messages)

    def prepare(self) -> None:
        """Let the method of decode build its structures over what is stored; captured steps may follow."""
        if not self._wait():
            self._prepare()
        for row in range(self.store.num_rows):
            self.store.summarise_open_page(row)

    def prepare_after_next(self, thread: ThreadPoolExecutor) -> None:
        """Do that in a thread once the next chunk is attended, while the layers above continue; the next call of this
        layer waits for it."""
        self._preparer = thread

    def _start_preparing(self) -> None:
        assert self._preparer is not None
        thread, self._preparer = self._preparer, None
        self._preparing = submit(self._prepare, thread)

    def _wait(self) -> bool:
        """Wait for what the thread prepares; whether it has prepared anything."""
        running, self._preparing = self._preparing, None
        if running is None:
            return False
        running.result()
        return True

    def _prepare(self) -> None:
        for row in range(self.store.num_rows):
            self._states.prepare(row, self.store.reader(row), self.messages)

    def state(self, phase: Phase, row: int) -> Any:
        """The state of a phase's method for a sequence."""
        return self._states.of(phase, row)

    def describe(self) -> list[dict[str, Any]]:
        """The decode method's report on every sequence."""
        return self._states.describe()

    @property
    def table(self) -> PageTable | None:
        """Pages of the sequences; None where every sequence has pages of its own, because it may evict."""
        return self.store.table

    def replan(self, plan: Plan, table: PageTable | None = None) -> None:
        """Continue with another plan over what is stored. Methods of new rules start from the stored keys. A store that
        need not evict any more continues in ``table``."""
        self._wait()
        plan = _plan_in_layer(plan, self.shape)
        if plan == self.plan:
            return
        self.guards.clear()
        self.store.repage(plan.page_size or self.store.page_size, plan.summaries)
        evicts = plan.evicts_in(self.shape)
        if evicts and not self.store.evicts:
            self.store = EvictingStore.of(self.store)
        elif not evicts and isinstance(self.store, EvictingStore):
            self.store = self.store.whole(table)
        self.plan = plan
        self._states, new = self._states.under(plan, self.store.num_rows)
        for row in range(self.store.num_rows):
            if self.store.lengths[row]:
                reader = self.store.reader(row)
                self._states.observe(row, None, reader.keys(), reader.values(), 0, new)

    def fork(self, sources: Sequence[int]) -> None:
        """Sequence i becomes a copy of sequence ``sources[i]``."""
        self._wait()
        self.store.fork(sources)
        self.messages.clear()
        self._forks = self.guards.fork(sources, self._forks)
        self._states.fork(sources)

    def crop(self, row: int, length: int) -> None:
        """Forget the tokens of a sequence from position ``length`` on."""
        self._wait()
        self.store.crop(row, length)
        self.messages.clear()
        self.guards.crop(row, length)
        self._states.crop(row, length)

    def checkpoint(self) -> None:
        """Remember the present lengths: sequences may be rolled back to them."""
        self._states.checkpoint()
        self.store.checkpoint()


def _page_size_of(table: PageTable | None) -> int | None:
    """Tokens of a page of the pool of a table; None if it has none yet."""
    return None if table is None else next((pool.page_size for pool in table.kv.layers.values()), None)


def _plan_in_layer(plan: Plan, shape: LayerShape) -> Plan:
    """The plan with the budgets of one layer; refused if it cannot run there (``InputError``)."""
    check(PlanCase(plan, rope=shape.rope or UNKNOWN_ROPE), NO_ROPE)
    return layer_plan(plan, shape)
