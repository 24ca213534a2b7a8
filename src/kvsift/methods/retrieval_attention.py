"""RetrievalAttention: tokens that an index of the keys finds for each query (https://arxiv.org/abs/2409.10516).

Sinks and a window are always visible, 128 + 512 tokens; of what lies between, each query head sees the keys with the
largest inner products, 100 by default, which an index finds without looking at all of them. The index is made of
queries of the prompt: they say which keys are wanted together.

Deviations from the paper, unless ``compat="paper"``:
- the queries that the graph is built from are turned to the positions where decoding will ask (RoPE is a rotation), and
  their nearest keys are sought among all keys, not among those before them;
- the query heads of a KV head share a graph;
- ``index="auto"`` measures the graph against a scan of all keys, which often is faster.
In either case the window is the most recent 512 tokens, generated ones included, and what leaves it can be found again:
the paper keeps 512 tokens of the prompt and all generated ones in view.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvsift import native
from kvsift.errors import InputError
from kvsift.indexes.audits import Audits, is_due
from kvsift.indexes.auto import AutoIndex
from kvsift.indexes.base import Index, best, merged
from kvsift.indexes.faiss_index import load_faiss
from kvsift.indexes.flat import FlatIndex, exact_search
from kvsift.indexes.from_samples import DECODE_POSITIONS, lists_for, why_no_graph
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.hnsw import HNSWIndex
from kvsift.indexes.ivf import IVFIndex
from kvsift.indexes.recorder import QueryRecorder
from kvsift.methods import knobs
from kvsift.methods.base import Method
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection

TAIL = 8192  # tokens that are scanned behind an index before they get an index of their own
WANTED = 100  # keys per query that an index is tuned for when it is built before anybody asks


@dataclass(frozen=True)
class Part:
    """An index over the tokens ``first`` to ``stop``."""

    index: Index
    first: int
    stop: int
    length: int  # tokens cached when it was built: what is cropped to fewer may come back different
    why: str


@dataclass
class Found:
    """Memory of one sequence in one layer: queries of the prompt, and indexes over what they may want."""

    recorder: QueryRecorder
    parts: list[Part] = field(default_factory=list)
    completed: int = 0  # searches that an index came back from with too few, answered by a scan
    audits: Audits = field(default_factory=Audits)

    def fork(self) -> Found:
        parts = [replace(part, index=part.index.fork()) for part in self.parts]
        return Found(self.recorder.fork(), parts, self.completed, self.audits.fork())

    def crop(self, length: int) -> None:
        self.recorder.crop(length)
        self.parts = [part for part in self.parts if part.length <= length]
        self.audits.crop(length)
        self.widen()

    @property
    def walking(self) -> list[GraphIndex | AutoIndex]:
        """Indexes that may miss something and can search wider."""
        indexes = [part.index for part in self.parts]
        return [of for of in indexes if isinstance(of, GraphIndex) or (isinstance(of, AutoIndex) and of.walks)]

    def widen(self) -> None:
        """Let the indexes search as wide as the audits say."""
        for index in self.walking:
            index.widen(self.audits.widths)


@dataclass(frozen=True)
class RetrievalAttention(Method):
    """Tokens by an index of the keys, in decode; prefill is dense.

    Attributes:
        index: "auto": graph or scan, whichever is faster at 95 % recall, for each KV head. "graph": the
            attention-aware graph. "flat", "flat_int8": a scan of all keys, or of 8-bit codes of them. "ivf", "hnsw":
            the usual indexes, through faiss.
        heads: each "query" head has its own selection, or the query heads of a "kv" head share one.
        per: a graph per "kv_head" or per "query_head".
        samples: queries of the prompt, per query head, that a graph is built from, at most.
        degree: links per key of the graph.
        beam: keys that a search of the graph follows; chosen for 95 % recall by "auto", four times the selection
            in "graph" when it is left out.
        audit: every so many tokens, and more often at first, a step is answered by a scan of all keys, and heads whose
            graph would have missed more than 2 % search wider from then on, until none does; 0 never.
        compat: "paper": a graph per query head, built from queries as they stood and the keys before them; no audits.
    """

    source: ClassVar[str] = "arXiv 2409.10516"
    on_host: ClassVar[bool] = True
    wants_queries: ClassVar[bool] = True  # a cache that was filled without it has no queries to build from
    no_mass: ClassVar[str] = "knows nothing of the keys that its index left out"

    index: Literal["auto", "graph", "flat", "flat_int8", "ivf", "hnsw"] = "auto"
    heads: Literal["query", "kv"] = "query"
    per: Literal["kv_head", "query_head"] = "kv_head"
    samples: int = 8192
    degree: int = 32
    beam: int | None = None
    audit: int = 64
    compat: Literal["paper"] | None = None

    def __post_init__(self) -> None:
        knobs.one_of("index", self.index, ("auto", "graph", "flat", "flat_int8", "ivf", "hnsw"))
        knobs.one_of("heads", self.heads, ("query", "kv"))
        knobs.one_of("per", self.per, ("kv_head", "query_head"))
        knobs.whole("samples", self.samples, 2)
        knobs.whole("degree", self.degree, 4)
        if self.beam is not None:
            knobs.whole("beam", self.beam, 1)
        knobs.whole("audit", self.audit, 0)
        if self.compat not in (None, "paper"):
            raise InputError(f"compat={self.compat!r} must be 'paper' or left out.")
        if self.compat is not None:
            if self.index not in ("auto", "graph") or self.heads != "query":
                raise InputError(
                    "compat='paper' means index='graph', heads='query' and per='query_head'; leave those out, or "
                    "compat."
                )
            object.__setattr__(self, "index", "graph")
            object.__setattr__(self, "per", "query_head")
            object.__setattr__(self, "audit", 0)
        if self.beam is not None and self.index != "graph":
            raise InputError(f"beam={self.beam} is of index='graph'; index={self.index!r} takes none.")
        if self.index in ("ivf", "hnsw"):
            load_faiss()
        if self.index in ("graph", "flat_int8") and not native.available():
            raise InputError(f"index={self.index!r} cannot be had: {native.why_missing()} Or use index='flat'.")

    @property
    def budget_defaults(self) -> dict[str, Any]:
        static = {"sinks": 128, "window": 512, "tokens": 740}
        return static if self.compat is None else {**static, "dense_layers": ()}

    def new_state(self, shape: LayerShape) -> Found:
        return Found(QueryRecorder(self.samples))

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        """Of what the index holds besides the keys; the queries of the prompt, at most ``samples``, do not grow."""
        copy = 4 * shape.head_dim  # faiss keeps float32, and 8 bytes of id in a list or 64 links
        links = 4 * self.degree * (shape.group_size if self.per == "query_head" else 1)
        of_index = {"flat": 0, "flat_int8": shape.head_dim, "ivf": copy + 8, "hnsw": copy + 256}
        return shape.num_kv_heads * of_index.get(self.index, links)

    def observe(
        self, state: Any, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        if self.index in ("auto", "graph"):
            state.recorder.observe(queries, start, start + keys.shape[1])

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        if limit.units >= candidates.count:
            every = torch.arange(candidates.first, candidates.stop, device=queries.device)
            return Selection(every.unsqueeze(0), 1, full=True)
        self._cover(state, shape, reader, candidates, limit.units)
        ids, scores = self._search(state, shape, queries[:, 0], candidates, limit.units, reader)
        if self.heads == "kv":
            ids = _shared(ids, scores, shape.num_kv_heads, limit.units)
        return Selection((ids + candidates.first).sort(-1).values, 1, full=True)

    def prepare(
        self, state: Any, shape: LayerShape, candidates: Candidates, reader: KVReader, limit: Limit | None = None
    ) -> None:
        """Build before the first question, over the tokens that may be chosen then, for as many as ``limit`` says."""
        there = Candidates(candidates.first, min(candidates.stop, reader.length) - candidates.first, 1)
        if there.count > 0:
            self._cover(state, shape, reader, there, WANTED if limit is None else limit.units)

    def describe(self, state: Any) -> dict[str, Any]:
        """What was built and used: "level" (instruction set, or "torch"), "samples" (queries kept per head),
        "completed" (searches that a scan had to finish), "audits", "indexes": one ``statistics()`` and "why" each."""
        kept = state.recorder.take()
        return {
            "level": native.level() if native.available() else "torch",
            "samples": 0 if kept is None else len(kept.positions),
            "completed": state.completed,
            "audits": state.audits.describe(),
            "indexes": [{**part.index.statistics(), "why": part.why} for part in state.parts],
        }

    def _cover(self, state: Found, shape: LayerShape, reader: KVReader, candidates: Candidates, k: int) -> None:
        """Index the candidates, if none are indexed or too many have come since."""
        first = state.parts[-1].stop if state.parts else candidates.first
        if state.parts and candidates.stop - first <= TAIL:
            return
        keys = reader.borrow(first, candidates.stop)  # what is built once is not read to choose
        if keys.device.type != "cpu":
            raise InputError(
                f"retrieval_attention searches host memory, and this cache is on {keys.device}. Read the document with "
                "placement=split."
            )
        index, why = self._build(state, shape, keys, first, reader.length, k)
        state.parts.append(Part(index, first, candidates.stop, reader.length, why))
        state.widen()

    def _build(
        self, state: Found, shape: LayerShape, keys: Tensor, first: int, length: int, k: int
    ) -> tuple[Index, str]:
        if self.index == "flat":
            return FlatIndex.build(keys), "as asked"
        if self.index == "flat_int8":
            return FlatIndex.build(keys, codes="int8"), "as asked"
        if self.index == "ivf":
            return IVFIndex.build(keys), "as asked"
        if self.index == "hnsw":
            return HNSWIndex.build(keys), "as asked"
        if state.recorder.unseen_stop:
            return FlatIndex.build(keys), "a scan: the cache was filled before, and its queries are not known"
        samples, rope = state.recorder.take(), None if self.compat else shape.rope
        why_not = why_no_graph(keys, samples)
        if why_not or samples is None:
            return FlatIndex.build(keys), why_not
        # a query sees what follows the rows without the index; the paper's lists do not leave that out
        window = 0 if self.compat else length - first - keys.shape[1]
        if self.index == "auto":
            auto = AutoIndex.build(
                keys, samples, k=k, first=first, rope=rope, scale=shape.scale, degree=self.degree, window=window,
                num_samples=self.samples, per=self.per,
            )  # fmt: skip
            return auto, auto.why
        graph = GraphIndex.build(
            keys, samples, rope=rope, decode_positions=DECODE_POSITIONS, first_position=first, window=window,
            degree=self.degree, lists=lists_for(k), num_samples=self.samples, per=self.per, compat=self.compat,
            beam=self.beam or 4 * k,
        )  # fmt: skip
        return graph, "as asked"

    def _search(
        self, state: Found, shape: LayerShape, queries: Tensor, candidates: Candidates, k: int, reader: KVReader
    ) -> tuple[Tensor, Tensor]:
        """The k best candidates of each query head, none missing: ids count from the first candidate."""
        found: tuple[Tensor, Tensor] | None = None
        for part, stop in _with_stops(state.parts, candidates.stop):
            before = part.index.bytes_read
            own = part.index.search(queries, reader.borrow(part.first, stop), k)
            reader.count_bytes(part.index.bytes_read - before)
            found = own if found is None else merged(found, own, part.first - candidates.first, k)
        assert found is not None
        if bool((found[0][:, -1] < 0).any()):  # what the graph cannot reach
            state.completed += 1
            return exact_search(queries, reader.keys(candidates.first, candidates.stop), k)
        due = self.audit and (state.audits.failed or is_due(candidates.stop - state.parts[0].stop, self.audit))
        if not due or not state.walking:
            return found
        exact = exact_search(queries, reader.keys(candidates.first, candidates.stop), k)
        state.audits.take(reader.length, found[0], exact[0], shape.num_kv_heads)
        state.widen()
        return exact


def _with_stops(parts: list[Part], stop: int) -> Iterator[tuple[Part, int]]:
    """Each part with where the next one begins; the last one goes on to ``stop``."""
    for part, following in zip(parts, [*parts[1:], None]):
        yield part, stop if following is None else following.first


def _shared(ids: Tensor, scores: Tensor, num_kv_heads: int, k: int) -> Tensor:
    """The k ids of each KV head with the largest score of any of its query heads, int64 [num_kv_heads, k].

    ids and scores [num_query_heads, k], the best of each query head: what is best for the group is among them.
    """
    ids, scores = (tensor.unflatten(0, (num_kv_heads, -1)).flatten(1) for tensor in (ids, scores))
    # the largest score of an id first, so that the others of the same id can be told by their neighbour
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(1, ids.gather(1, order).sort(dim=-1, stable=True).indices)
    ids, scores = ids.gather(1, order), scores.gather(1, order)
    again = torch.nn.functional.pad(ids[:, 1:] == ids[:, :-1], (1, 0), value=False)
    return best(ids.masked_fill(again, -1), scores, k)[0]
