"""A sequence of the loop: one request from its arrival to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from kvsift.engine.pinned_prefix import PinnedPrefix
from kvsift.engine.prefix_tree import Node
from kvsift.engine.request import Request
from kvsift.engine.sampling import ConstrainedChooser
from kvsift.engine.speculative.decoder import ExactDecoder
from kvsift.layer.accounting import Observer, RunStats
from kvsift.models.hf.cache import SparseCache
from kvsift.models.hf.state_snapshot import StateSnapshot
from kvsift.plan.plan import Plan

State = Literal["waiting", "prefilling", "decoding", "ended"]
OPEN_STATES: tuple[State, ...] = "waiting", "prefilling", "decoding"
FinishReason = Literal["", "stop", "length", "cancelled", "deadline", "error"]


@dataclass(frozen=True)
class CacheReport:
    """What an answer says of the cache that it came from.

    Attributes:
        plan: the plan as it was resolved.
        stats: counters of the sequence.
        kv_bytes: bytes of keys, values and summaries.
        index: index of the plan's method, by layer.
    """

    plan: Plan
    stats: RunStats
    kv_bytes: int
    index: dict[int, list[dict[str, Any]]]

    @classmethod
    def of(cls, cache: SparseCache) -> CacheReport:
        """The report of a cache."""
        return cls(cache.run.plan, cache.stats, cache.num_bytes, cache.describe())


class SequenceOutput(Protocol):
    """What a client makes of the logits. The thread of the loop calls it; what it raises ends the sequence."""

    @property
    def constraint(self) -> ConstrainedChooser | None:
        """What changes the logits before a token is chosen, where steps choose it themselves; None: nothing does."""

    def note_prefilled(self, num_tokens: int) -> None:
        """So many tokens of the prompt are cached."""

    def foresee(self, logits: Tensor, ahead: int) -> int:
        """The token that ``take`` would choose from logits [vocabulary], ``ahead`` tokens from now."""

    def take(self, logits: Tensor | int, probe_s: float) -> tuple[int, FinishReason]:
        """Choose the next token from logits [vocabulary], after ``probe_s`` seconds of probes in all; "" goes on. Steps
        that choose tokens themselves give the token."""


@dataclass(eq=False)
class EngineSequence:
    """The state of a request from its arrival to its end.

    Attributes:
        request: what is asked for.
        output: takes the tokens, for the client.
        holds: once it has ended, it keeps what it has prefilled of its prompt until ``Loop.close``.
        decoder: verifies by dense attention what the plan drafts; None: the plan's own tokens are the answer.
        observer: records what its passes select.
        score: called with the logits [tokens, vocabulary] of its prompt's tokens from a position on, maybe repeatedly.
        source: fills its empty cache with the whole prompt as it was prefilled before, and is called if no chunk is
            found.
        prefix: begins its prompt; the sequence continues in its cache or in a copy of that.
        pins: the prefix that its prompt is; the sequence ends when that is cached, and chooses no token.
        decode_from: position from which the tokens of the prompt are attended as if they had been generated.
        call: identifies the sequences of one call, which decode together once all are prefilled. None: it is alone.
        on_end: called in the thread of the loop when the sequence has ended.
        state, finish_reason, error: its present state, and how it ended.
        num_cached: tokens that are cached; those of a step that failed are not.
        num_reused: tokens of the prompt that were prefilled before.
        no_reuse: why none could be; empty if that was possible.
        in_pool: its pages are in the pool that sequences share.
        report: report of the cache, once the sequence has ended.
        group: sequences that take captured steps with it; None: its steps are not captured.
        path: "captured" (or "eager"), "native", or "composed: " and the reasons; empty before it decodes.
        setup_s, dense_below: seconds in which steps were captured for it, and the length below which those were dense.
        fed: tokens of its last verification; ``before`` is the state of the layers before these, if some keep what
            belongs to one length.
        build_s: seconds in which the cache of its prefix built what decode needs under its plan.
    """

    request: Request
    output: SequenceOutput
    holds: bool = False
    decoder: ExactDecoder | None = None
    observer: Observer | None = None
    score: Callable[[int, Tensor], None] | None = None
    source: Callable[[SparseCache], None] | None = None
    prefix: PinnedPrefix | None = None
    pins: PinnedPrefix | None = None
    decode_from: int | None = None
    call: object = None
    on_end: Callable[[], object] = lambda: None
    key: int = 0
    state: State = "waiting"
    finish_reason: FinishReason = ""
    error: BaseException | None = None
    cache: SparseCache | None = None
    root: bytes = b""
    nodes: list[Node] = field(default_factory=list)
    token: int = 0  # the next to feed
    num_cached: int = 0
    num_reused: int = 0
    no_reuse: str = ""
    in_pool: bool = True
    report: CacheReport | None = None
    group: Any = None
    path: str = ""
    setup_s: float = 0.0
    build_s: float = 0.0
    dense_below: int = 0
    fed: Sequence[int] = ()
    before: StateSnapshot | None = None

    @property
    def counters(self) -> RunStats:
        """Its counters, while it has a cache."""
        assert self.cache is not None
        return self.cache.stats

    @property
    def is_ended(self) -> bool:
        return self.state == "ended"
