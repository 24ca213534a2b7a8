"""The base class of methods: each selects the units of earlier context that queries may see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from kvsift.errors import InvalidMethod
from kvsift.kernels.page_summary import row_format
from kvsift.methods import checks
from kvsift.methods.segment_batch import SegmentRequests
from kvsift.methods.traits import Traits
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Moved, Objections, Part, Selection

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Method:
    """Hyper-parameters of a method; frozen, shared by all layers and sequences.

    Memory of a sequence belongs to a state, which ``new_state`` makes for each layer and sequence. A state has
    ``fork() -> state`` and ``crop(length)``; None is a state too. A class attribute below may be a property where it
    depends on hyper-parameters.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("decode",)
    summaries: ClassVar[tuple[str, ...]] = ()  # kinds of page summary that the store maintains
    segment_size: ClassVar[int] = 256  # prefill queries that share a selection; segments begin at its multiples
    source: ClassVar[str] = ""  # paper
    not_captured: ClassVar[Objections] = (  # to captured steps, of a rule with summaries of one kind
        (lambda rule: True, "{it.name} does not rank pages by features of the query; the kernels rank by nothing else"),
    )
    not_in_batches: ClassVar[Objections] = (  # to prefill under vLLM, of a rule
        (lambda rule: True,
         "{it.name} does not choose for all segments of a chunk at once; take quoka or critiprefill"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        checks.of_knobs(self)

    @property
    def traits(self) -> Traits:
        """How the method differs from most; a class attribute or a property of the subclass."""
        return Traits()

    @property
    def unit_size(self) -> int:
        """Tokens per unit."""
        return 1

    @property
    def summary_page_size(self) -> int:
        """Tokens per page of the summaries; a unit may be several pages, or part of one."""
        return self.unit_size

    @property
    def budget_defaults(self) -> dict[str, Any]:
        """Fields of ``Budget`` whose defaults differ for this method."""
        return {}

    @property
    def evict(self) -> bool:
        """Whether the store frees what the method drops; a field of methods that drop tokens."""
        return False

    @property
    def reused(self) -> Mapping[int, int]:
        """By layer that reuses a selection, the layer that must have selected, both counted as ``Budget.dense_layers``;
        empty if layers select by themselves."""
        return {}

    def check_layers(self, layers: Sequence[int]) -> None:
        """Refuse a model by the true indices of its attention layers.

        Raises:
            InputError: if hyper-parameters name layers that the model lacks.
        """

    def _imply(self, **attributes: Any) -> None:
        """Set attributes that a knob determines; for ``__post_init__`` alone."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def new_state(self, shape: LayerShape) -> Any:
        """Make the state of one sequence in one layer."""
        return None

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        """Bytes that one layer needs per cached token besides its keys and values: those of page summaries by default.
        A method whose state grows adds to them."""
        widths = [row_format(kind, shape.head_dim, self.summary_page_size) for kind in self.summaries]
        row_bytes = sum(width * (2 if dtype is None else dtype.itemsize) for width, dtype in widths)
        return shape.num_kv_heads * row_bytes / self.summary_page_size

    def observe(
        self, state: Any, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        """Receive new tokens, each once and in order, right after they are stored; [num_heads, num_new, head_dim].

        ``queries`` is None for tokens of a cache that was filled without the method.
        """

    def checkpoint(self, state: Any) -> None:
        """Remember the present length: the sequence may be rolled back to it. Only states that discard something need
        this; ``crop`` alone rolls back the others."""

    def follow(self, state: Any, shape: LayerShape, start: int, stop: int, phase: Phase, reader: KVReader) -> None:
        """Receive the span of tokens that were answered in a phase, for states that depend on the phase or on earlier
        keys. Not called in dense layers, nor for a cache that was filled without the method."""

    def verified(self, state: Any, queries: Tensor, part: Part, shares: Tensor, length: int) -> None:
        """Receive dense attention of the last tokens up to ``length``, which were verified; of methods with
        ``Traits.drafts_only``.

        Args:
            queries: [1, num_query_heads, num_tokens, head_dim].
            part: their attention.
            shares: float32 [num_kv_heads, num_pages], of their attention by page of 16 tokens, summed over tokens and
                the query heads of a group.
        """

    def prepare(self, state: Any, shape: LayerShape, candidates: Candidates, reader: KVReader, limit: Limit) -> None:
        """Build what ``select`` needs once the prompt is stored. Optional: ``select`` must work without it."""

    def describe(self, state: Any) -> dict[str, Any]:
        """Statistics of this sequence and layer for a report, ready for JSON."""
        return {}

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        """Select from the candidates.

        Args:
            state: state of this sequence and layer.
            shape: the layer.
            queries: [num_query_heads, num_queries, head_dim] of one segment, after RoPE.
            start: position of the first query.
            candidates: units to choose from; at least one, and more than ``limit.units`` unless the limit is a mass.
            limit: how much may be chosen, at least one unit.
            reader: stored keys and page summaries.
        """
        raise InvalidMethod(f"{type(self).__name__} does not define select")

    def reposition(self, positions: Tensor, spans: Sequence[tuple[int, int]]) -> Moved:
        """Positions from which queries at ``positions`` attend sinks and selection, of a method that repositions.
        Recent tokens keep their true distances.

        ``spans`` holds (sinks_stop, window_start) of each query if the method slides, else of the first.
        """
        raise InvalidMethod(f"{type(self).__name__} does not define reposition")

    def select_segments(
        self, state: Any, shape: LayerShape, queries: Tensor, requests: SegmentRequests, reader: KVReader
    ) -> Sequence[Selection]:
        """Select for several consecutive segments of a chunk, all of one length.

        ``queries`` [num_query_heads, num_queries, head_dim] are those of all segments. A method that selects for all of
        them at once goes by ``requests.choices``, and reads through ``reader``, so that bytes read once count once.
        """
        return [self.select(state, shape, *request) for request in requests]


@dataclass(frozen=True)
class ChunkedMethod(Method):
    """A method defined for chunked prefill: the chunk of its paper is the segment whose queries share a selection.

    Attributes:
        chunk: prefill queries that share a selection. 128 in the papers; larger chunks choose less often.
    """

    chunk: int = checks.knob(128, 16)

    @property
    def segment_size(self) -> int:  # type: ignore[override]
        return self.chunk


def seen_by_all(start: int, num_queries: int) -> int:
    """Return how many tokens every query of a segment sees. A single query sees itself; in a longer segment the last
    token must not influence the first."""
    return start + 1 if num_queries == 1 else start
