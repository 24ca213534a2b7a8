"""RetrievalAttention: tokens that an index of the keys finds for each query (https://arxiv.org/abs/2409.10516).

Sinks and a window are always visible, 128 + 512 tokens; of the tokens between, each query head sees the keys with the
largest inner products, 100 by default, which an index finds without scoring all keys. The index is built from queries
of the prompt: keys that the same queries attend to are linked.

Deviations from the paper, unless ``compat="paper"``:
- the queries that the graph is built from are rotated to the positions of decode queries (RoPE is a rotation), and
  their nearest keys are searched among all keys, not only among earlier ones;
- the query heads of a KV head share a graph;
- ``index="auto"`` times the graph against a scan of all keys, which is often faster;
- with ``block`` there is an index per block of the prompt, built from the queries of that block.
In both cases the window is the most recent 512 tokens, generated ones included, and tokens that leave it are searched:
in the paper 512 tokens of the prompt and all generated ones are visible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvsift import native
from kvsift.errors import Conflict, InvalidTensor, InvalidValue, MissingPackage, UnusedOption
from kvsift.indexes.audits import is_due
from kvsift.indexes.auto import AutoIndex
from kvsift.indexes.base import Index, best_of_groups, merged
from kvsift.indexes.faiss_index import HNSWIndex, IVFIndex, load_faiss
from kvsift.indexes.flat import FlatIndex, exact_search
from kvsift.indexes.from_samples import DECODE_POSITIONS, LEAST_SAMPLES, lists_for, why_no_graph
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.samples import BlockRecorder, QueryRecorder, QuerySamples
from kvsift.methods.base import Method
from kvsift.methods.checks import knob
from kvsift.methods.common.indexed_keys import IndexedBlocks, IndexedKeys, IndexedSpan
from kvsift.methods.traits import Traits
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection

RECOMMENDED_BLOCK = 16384  # tokens
SPACING = 8  # a block keeps one query for every 8 tokens; 16 found 0.01 less than 4 (2026-11-25)
TAIL = 8192  # newer tokens than an index covers that are scanned, before they get an index of their own
WANTED = 100  # keys per query that an index is tuned for when it is built before the first query

WITHOUT_QUERIES: dict[str, Callable[[Tensor], Index]] = {
    "flat": FlatIndex.build,
    "flat_int8": partial(FlatIndex.build, codes="int8"),
    "ivf": IVFIndex.build,
    "hnsw": HNSWIndex.build,
}


@dataclass(frozen=True)
class RetrievalAttention(Method):
    """Tokens by an index of the keys, in decode; prefill is dense.

    Attributes:
        index: "auto": graph or scan, whichever is faster at 95 % recall, for each KV head. "graph": the
            attention-aware graph. "flat", "flat_int8": a scan of all keys, or of 8-bit codes of them. "ivf", "hnsw":
            the usual indexes, through faiss.
        heads: each "query" head has its own selection, or the query heads of a "kv" head share one.
        per: a graph per "kv_head" or per "query_head".
        block: tokens of a block, 64 or more; 0: one index over the prompt. Sequences whose prompts share a prefix can
            share blocks; prompts that are kept for later sequences then keep their queries and indexes, too.
        samples: queries of the prompt, per query head, that a graph is built from, at most.
        degree: links per key of the graph.
        beam: keys that a search of the graph follows; chosen for 95 % recall by "auto", four times the selection
            in "graph" when it is left out.
        audit: tokens between two audits, fewer at first: a scan of all keys answers a step, and heads whose graph
            would have missed more than 2 % widen their search until none does; 0 never.
        compat: "paper": a graph per query head, built from unrotated queries and the keys before them; no audits.
    """

    source: ClassVar[str] = "arXiv 2409.10516"

    index: Literal["auto", "graph", "flat", "flat_int8", "ivf", "hnsw"] = knob("auto")
    heads: Literal["query", "kv"] = knob("query")
    per: Literal["kv_head", "query_head"] = knob("kv_head")
    block: int = knob(0, 0)
    samples: int = knob(8192, 2)
    degree: int = knob(32, 4)
    beam: int | None = knob(None, 1)
    audit: int = knob(64, 0)
    compat: Literal["paper"] | None = knob(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.block < LEAST_SAMPLES:
            raise InvalidValue(
                f"block={self.block} must be {LEAST_SAMPLES} tokens or more, as a graph is built from as many queries; "
                "0 is one index over the prompt."
            )
        if self.compat is not None:
            if self.index not in ("auto", "graph") or self.heads != "query":
                raise Conflict(
                    "compat='paper' means index='graph', heads='query' and per='query_head'; leave those out, or "
                    "compat."
                )
            self._imply(index="graph", per="query_head", audit=0)
        if self.block and self.compat is not None:
            raise Conflict("compat='paper' builds one index over the prompt; leave out block, or compat.")
        if self.block and not self.learns:
            raise Conflict(
                f"block={self.block} is of the indexes that learn from queries; index={self.index!r} shares prefixes "
                "without it."
            )
        if self.beam is not None and self.index != "graph":
            raise UnusedOption(f"beam={self.beam} is of index='graph'; index={self.index!r} takes none.")
        if self.index in ("ivf", "hnsw"):
            load_faiss()
        if self.index in ("graph", "flat_int8") and not native.available():
            raise MissingPackage(f"index={self.index!r} cannot be had: {native.why_missing()} Or use index='flat'.")

    @property
    def learns(self) -> bool:
        """Whether the index is built from queries of the prompt, and not from its keys alone."""
        return self.index in ("auto", "graph")

    @property
    def traits(self) -> Traits:
        return Traits(
            on_host=True,
            wants_queries=self.learns,  # a cache that another plan filled has no queries to build from
            seals=self.block > 0,
            to_share="" if self.compat else f"block={RECOMMENDED_BLOCK}",
            no_mass="does not score the keys that its index left out",
        )

    @property
    def budget_defaults(self) -> dict[str, Any]:
        static = {"sinks": 128, "window": 512, "tokens": 740}
        return static if self.compat is None else {**static, "dense_layers": ()}

    def new_state(self, shape: LayerShape) -> IndexedKeys:
        if self.block:
            capacity = min(self.samples, max(self.block // SPACING, 2 * LEAST_SAMPLES))
            return IndexedBlocks(BlockRecorder(self.block, capacity))
        return IndexedKeys(QueryRecorder(self.samples))

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        """Bytes of the index beside the keys, and of the queries of blocks; those of a whole prompt, at most
        ``samples``, do not grow."""
        copy = 4 * shape.head_dim  # faiss keeps float32, and 8 bytes of id in a list or 64 links
        links = 4 * self.degree * (shape.group_size if self.per == "query_head" else 1)
        index_bytes = {"flat": 0, "flat_int8": shape.head_dim, "ivf": copy + 8, "hnsw": copy + 256}
        queries = 2 * shape.num_query_heads * shape.head_dim / SPACING if self.block else 0
        return shape.num_kv_heads * index_bytes.get(self.index, links) + queries

    def observe(
        self, state: Any, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        if self.learns:
            state.recorder.observe(queries, start, start + keys.shape[1])

    def checkpoint(self, state: Any) -> None:
        if isinstance(state, IndexedBlocks):
            state.recorder.checkpoint()

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
            ids = best_of_groups(ids, scores, shape.num_kv_heads, limit.units)
        return Selection((ids + candidates.first).sort(-1).values, 1, full=True)

    def prepare(
        self, state: Any, shape: LayerShape, candidates: Candidates, reader: KVReader, limit: Limit | None = None
    ) -> None:
        """Build before the first query, over the tokens that it may select, for ``limit`` tokens per selection."""
        stored = Candidates(candidates.first, min(candidates.stop, reader.length) - candidates.first, 1)
        if stored.count > 0:
            self._cover(state, shape, reader, stored, WANTED if limit is None else limit.units)

    def describe(self, state: Any) -> dict[str, Any]:
        return state.describe()

    def _cover(self, state: IndexedKeys, shape: LayerShape, reader: KVReader, candidates: Candidates, k: int) -> None:
        """Index the candidates, if none are indexed or too many are new; of blocks, those that are complete."""
        if isinstance(state, IndexedBlocks):
            self._cover_blocks(state, shape, reader, candidates, k)
            return
        first = state.spans[-1].stop if state.spans else candidates.first
        if state.spans and candidates.stop - first <= TAIL:
            return
        keys = _on_host(reader, first, candidates.stop)
        index, why = self._build(state, shape, keys, first, reader.length, k)
        state.spans.append(IndexedSpan(index, first, candidates.stop, reader.length, why))
        state.widen()

    def _cover_blocks(
        self, state: IndexedBlocks, shape: LayerShape, reader: KVReader, candidates: Candidates, k: int
    ) -> None:
        missing = list(state.missing(candidates))
        for number, first, stop in missing:
            keys, samples = _on_host(reader, first, stop), state.recorder.of_block(number)
            index, why = self._index(keys, samples, shape, first, 0, k, None)
            if samples is None:
                why = "a scan: the queries of this block are not known"
            state.spans.append(IndexedSpan(index, first, stop, stop, why))
        if missing:
            state.widen()

    def _build(
        self, state: IndexedKeys, shape: LayerShape, keys: Tensor, first: int, length: int, k: int
    ) -> tuple[Index, str]:
        if self.index in WITHOUT_QUERIES:
            return WITHOUT_QUERIES[self.index](keys), "as asked"
        if state.recorder.unseen_stop:
            return FlatIndex.build(keys), "a scan: the cache was filled before, and its queries are not known"
        # later tokens than the rows are visible without the index; the lists of the paper include them
        window = 0 if self.compat else length - first - keys.shape[1]
        return self._index(keys, state.recorder.take(), shape, first, window, k, DECODE_POSITIONS)

    def _index(
        self, keys: Tensor, samples: QuerySamples | None, shape: LayerShape, first: int, window: int, k: int,
        positions: int | None,
    ) -> tuple[Index, str]:  # fmt: skip
        """An index that learns from samples, for queries at ``distances`` of these positions; and why it is this."""
        rope, reason = None if self.compat else shape.rope, why_no_graph(keys, samples)
        if reason or samples is None:
            return FlatIndex.build(keys), reason
        if self.index == "auto":
            auto = AutoIndex.build(
                keys, samples, k=k, first=first, rope=rope, scale=shape.scale, degree=self.degree, window=window,
                num_samples=self.samples, per=self.per, decode_positions=positions, timed=not self.block,
            )  # fmt: skip
            return auto, auto.why
        graph = GraphIndex.build(
            keys, samples, rope=rope, decode_positions=positions, first_position=first, window=window,
            degree=self.degree, lists=lists_for(k), num_samples=self.samples, per=self.per, compat=self.compat,
            beam=self.beam or 4 * k,
        )  # fmt: skip
        return graph, "as asked"

    def _search(
        self, state: IndexedKeys, shape: LayerShape, queries: Tensor, candidates: Candidates, k: int, reader: KVReader
    ) -> tuple[Tensor, Tensor]:
        """The k best candidates of each query head, none missing: ids count from the first candidate."""
        best: tuple[Tensor, Tensor] | None = None
        for index, first, stop in state.parts(candidates):
            before = index.bytes_read
            scans = isinstance(index, FlatIndex) and index.codes is None
            keys = reader.borrow_in_place(first, stop) if scans else reader.borrow(first, stop)
            results = index.search(queries, keys, k)
            reader.count_bytes(index.bytes_read - before)
            best = results if best is None else merged(best, results, first - candidates.first, k)
        assert best is not None
        if bool((best[0][:, -1] < 0).any()):  # keys that the graph cannot reach
            state.completed += 1
            return _scan(queries, reader, candidates, k)
        due = self.audit and (state.audits.failed or is_due(state.age(candidates, reader.length), self.audit))
        if not due or not state.can_miss(candidates):
            return best
        exact = _scan(queries, reader, candidates, k)
        state.audits.take(reader.length, best[0], exact[0], shape.num_kv_heads)
        state.widen()
        return exact


def _scan(queries: Tensor, reader: KVReader, candidates: Candidates, k: int) -> tuple[Tensor, Tensor]:
    """The k best candidates of each query head, by all their keys."""
    keys = reader.borrow_in_place(candidates.first, candidates.stop)
    reader.count_bytes(prod(keys.shape) * keys.dtype.itemsize)
    return exact_search(queries, keys, k)


def _on_host(reader: KVReader, first: int, stop: int) -> Tensor:
    """Keys to build from: bytes read to build are not read to select."""
    keys = reader.borrow(first, stop)
    if keys.device.type != "cpu":
        raise InvalidTensor(
            f"retrieval_attention searches host memory, and this cache is on {keys.device}. Read the document with "
            "placement=split."
        )
    return keys
