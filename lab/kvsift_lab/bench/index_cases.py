"""What is searched, and what searches: keys of one layer with queries and their exact results, and the indexes of the
comparison, each with how it is built and which knob trades its time for recall."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift import native
from kvsift.errors import InvalidValue, TooShort
from kvsift.indexes.auto import AutoIndex
from kvsift.indexes.faiss_index import HNSWIndex, IVFIndex, load_faiss
from kvsift.indexes.flat import FlatIndex
from kvsift.indexes.from_samples import lists_for
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.samples import QuerySamples
from kvsift.types import Rope
from kvsift_lab.bench.index_data import index_data
from kvsift_lab.bench.qk_dump import Dump

LOGITS = 1 << 26  # in memory at a time
PAPER_ROWS = 1 << 15  # keys of a head; above, the paper's build takes too long
STEPS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)  # beams, in times k


class Case(NamedTuple):
    """One layer. Decoding starts behind the last key and the last sample."""

    name: str
    keys: Tensor  # [num_kv_heads, n, head_dim]
    samples: QuerySamples
    queries: Tensor  # [num_query_heads, num_decode, head_dim]
    rope: Rope | None
    scale: float
    first: int = 0  # position of the first key
    window: int = 512  # most recent positions, visible without an index

    @property
    def group_size(self) -> int:
        return self.queries.shape[0] // self.keys.shape[0]

    def decode_queries(self, start: int, step: int) -> Tensor:
        """Return the queries of every ``step``-th token, [tokens, num_query_heads, head_dim]."""
        return self.queries[:, start::step].transpose(0, 1).contiguous()

    def heads(self) -> Iterator[Case]:
        """Return a case for each KV head and its group."""
        for number, keys in enumerate(self.keys):
            group = slice(number * self.group_size, (number + 1) * self.group_size)
            samples = QuerySamples(self.samples.queries[group], self.samples.positions)
            name = f"{self.name} head {number}"
            yield self._replace(name=name, keys=keys.unsqueeze(0), samples=samples, queries=self.queries[group])


def _spread(count: int, most: int) -> Tensor:
    """Return at most ``most`` of ``count`` positions, evenly spread, with the last one."""
    number = min(count, most)
    return (torch.arange(number) + 1) * count // max(number, 1) - 1


class Truth(NamedTuple):
    """Exact results for some tokens' queries."""

    ids: Tensor  # int64 [tokens, num_query_heads, k], best first
    mass: Tensor  # float32 [tokens, num_query_heads], softmax mass of these keys among all
    lse: Tensor  # float32 [tokens, num_query_heads]


def synthetic(
    kind: str, context: int, num_query_heads: int, num_kv_heads: int, head_dim: int, samples: int, num_decode: int,
    seed: int = 0,
) -> Case:  # fmt: skip
    """Return a layer of a synthetic set (``index_data``); all keys are indexed."""
    data = index_data(
        kind, context, num_kv_heads=num_kv_heads, group_size=num_query_heads // num_kv_heads, head_dim=head_dim,
        num_samples=min(samples, context), num_queries=num_decode, seed=seed,
    )  # fmt: skip
    prompt = QuerySamples(data.samples, data.positions)
    return Case(kind, _on_huge_pages(data.keys), prompt, data.queries, data.rope, head_dim**-0.5)


def of_dump(dump: Dump, layer: int, samples: int, num_decode: int, sinks: int, window: int) -> Case:
    """Return a layer of a dump without its sinks and window.

    Args:
        samples: sampled queries, at most.
        num_decode: decode queries, at most.

    Raises:
        InputError: if no key is left, or there are too few decode queries.
    """
    recorded = dump.layer(layer)
    rows = dump.length - sinks - window
    if rows < 1:
        raise TooShort(
            f"{dump.path} has {dump.length} tokens, of which {sinks} sinks and a window of {window} are in no index. "
            "Dump a longer document."
        )
    num_queries = recorded.decode_queries.shape[1]
    if num_queries < 2:
        raise TooShort(f"{dump.path} has {num_queries} decode query; dump more questions, to tune and to test apart.")
    prompt, decode = _spread(len(recorded.positions), samples), _spread(num_queries, num_decode)
    return Case(
        f"P {dump.name} layer {layer}",
        _on_huge_pages(recorded.keys[:, sinks : sinks + rows]),
        QuerySamples(recorded.queries[:, prompt], recorded.positions[prompt]),
        recorded.decode_queries[:, decode],
        recorded.shape.rope,
        recorded.shape.scale,
        sinks,
        window,
    )


def _on_huge_pages(keys: Tensor) -> Tensor:
    """Return a copy on huge pages where the system has them: scattered reads miss the TLB otherwise."""
    copy = torch.empty(keys.shape, dtype=keys.dtype)
    if native.available():
        native.advise_huge(copy)
    return copy.copy_(keys)


@torch.inference_mode()
def exact(case: Case, queries: Tensor, k: int) -> Truth:
    """Return the k best keys of queries [tokens, num_query_heads, head_dim], by float32 products."""
    step = max(1, LOGITS // case.keys.shape[1])
    heads = []
    for head, rows in enumerate(queries.float().unbind(1)):
        keys, parts = case.keys[head // case.group_size].float().T, []
        for some in rows.split(step):
            logits = some @ keys * case.scale
            (best, ids), lse = logits.topk(min(k, keys.shape[1])), logits.logsumexp(-1)
            parts.append((ids, (best - lse.unsqueeze(-1)).exp().sum(-1), lse))
        heads.append([torch.cat(tensors) for tensors in zip(*parts, strict=True)])
    return Truth(*(torch.stack(tensors, 1) for tensors in zip(*heads, strict=True)))


def recall(found: Tensor, truth: Tensor) -> float:
    """Return the mean share of the true ids [.., k] among the found ones [.., any]; -1 is no id."""
    both = torch.cat([found, truth], -1).sort(-1).values
    hits = (both[..., 1:] == both[..., :-1]) & (both[..., 1:] >= 0)  # ids are unique on either side
    return float(hits.sum(-1).double().mean() / truth.shape[-1])


def mass_of(case: Case, queries: Tensor, found: Tensor, lse: Tensor) -> Tensor:
    """Return the softmax mass of keys found for one token: queries [num_query_heads, head_dim], found int64
    [num_query_heads, k], lse [num_query_heads] -> [num_query_heads]."""
    heads = torch.arange(len(queries)).unsqueeze(1) // case.group_size
    keys = case.keys[heads, found.clamp_min(0)].float()  # [num_query_heads, k, head_dim]
    logits = torch.einsum("hkd,hd->hk", keys, queries.float()) * case.scale
    return (logits - lse.unsqueeze(1)).exp().masked_fill(found < 0, 0).sum(1)


class Contender(NamedTuple):
    """A kind of index.

    Attributes:
        build: over a case, for searches of k keys.
        knob: attribute that trades time for recall; None if there is none, or the index sets it itself.
        values: of the knob, ascending, for n keys and k.
        by_k: whether a build serves one k only.
        row_bytes: (head_dim, itemsize) -> bytes read per key scanned; None where it depends on the head.
        shared: whether a key is read once for all query heads of its group.
        most_rows: largest number of keys of a head that it is built for.
    """

    build: Callable[[Case, int], Any]
    knob: str | None = None
    values: Callable[[int, int], list[int]] = lambda n, k: []
    by_k: bool = False
    row_bytes: Callable[[int, int], int] | None = lambda head_dim, itemsize: head_dim * itemsize
    shared: bool = False
    most_rows: int | None = None

    def built(self, case: Case, k: int) -> Any:
        """Build the index over a case.

        Raises:
            InputError: for too many keys, or where a package is missing.
        """
        n = case.keys.shape[1]
        if self.most_rows is not None and n > self.most_rows:
            raise InvalidValue(
                f"its build takes too long for {n} keys of a head; it is measured up to {self.most_rows}"
            )
        return self.build(case, k)

    def turn(self, index: Any, value: int) -> None:
        """Set the knob; a graph has a beam per KV head."""
        assert self.knob is not None
        is_per_head = isinstance(getattr(index, self.knob), list)
        setattr(index, self.knob, [value] * len(getattr(index, self.knob)) if is_per_head else value)


def beams(n: int, k: int) -> list[int]:
    """Return beam widths: k up to 32 k."""
    return sorted({min(max(round(k * step), 1), max(n, 1)) for step in STEPS})


def probes(n: int, k: int) -> list[int]:
    """Return numbers of clusters to scan, up to all, the square root of n."""
    most = max(int(n**0.5), 1)
    numbers, value = {most}, 1.0
    while value < most:
        numbers.add(round(value))
        value *= 1.25
    return sorted(numbers)


def keys_scored(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Return the keys that searches scored for a query head, from the statistics of an index before and after them."""
    return float(after["scanned"] * after["searches"] - before["scanned"] * before["searches"])


class FaissFlat:
    """faiss's exact search in float32, one index per KV head: the baseline of all others."""

    def __init__(self, keys: Tensor) -> None:
        faiss, started = load_faiss(), perf_counter()
        self._heads = []
        for rows in keys:
            self._heads.append(faiss.IndexFlatIP(keys.shape[2]))
            self._heads[-1].add(rows.float().contiguous().numpy())
        self._rows, self._bytes, self._searches = keys.shape[1], 4 * keys.numel(), 0  # searches since the build
        self._build_s = perf_counter() - started

    def search(self, queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self._searches += 1
        grouped = queries.float().unflatten(0, (len(self._heads), -1)).numpy()
        results = [head.search(group, k) for head, group in zip(self._heads, grouped, strict=True)]
        scores, ids = (torch.cat([torch.from_numpy(part) for part in parts]) for parts in zip(*results, strict=True))
        return ids, scores.masked_fill(ids < 0, -torch.inf)

    def statistics(self) -> dict[str, Any]:
        return {
            "kind": "faiss_flat", "rows": self._rows, "bytes": self._bytes, "build_seconds": self._build_s,
            "searches": self._searches, "scanned": float(self._rows),
        }  # fmt: skip


def _graph(case: Case, k: int, **options: Any) -> GraphIndex:
    return GraphIndex.build(case.keys, case.samples, **{**_given(case), "lists": lists_for(k), **options})


def _auto(case: Case, k: int) -> AutoIndex:
    given = _given(case)
    return AutoIndex.build(case.keys, case.samples, k=k, scale=case.scale, first=given.pop("first_position"), **given)


def _given(case: Case) -> dict[str, Any]:
    """Options of indexes that learn from the samples of a case: use all, however graphs are shared."""
    num_samples = case.samples.queries.shape[0] * len(case.samples.positions)
    return {"rope": case.rope, "first_position": case.first, "window": case.window, "num_samples": num_samples}


def _float32(head_dim: int, itemsize: int) -> int:
    return 4 * head_dim


CONTENDERS: dict[str, Contender] = {
    "flat": Contender(lambda case, k: FlatIndex.build(case.keys), shared=True),
    "flat_int8": Contender(
        lambda case, k: FlatIndex.build(case.keys, codes="int8"), row_bytes=lambda dim, size: dim, shared=True
    ),
    "graph": Contender(_graph, "beam", beams, by_k=True),
    "graph_causal": Contender(lambda case, k: _graph(case, k, rope=None), "beam", beams, by_k=True),
    "graph_paper": Contender(
        lambda case, k: _graph(case, k, rope=None, per="query_head", compat="paper"), "beam", beams,
        by_k=True, most_rows=PAPER_ROWS,
    ),
    "auto": Contender(_auto, by_k=True, row_bytes=None),
    "faiss_flat": Contender(lambda case, k: FaissFlat(case.keys), row_bytes=_float32, shared=True),
    "ivf": Contender(lambda case, k: IVFIndex.build(case.keys), "nprobe", probes, row_bytes=_float32),
    "hnsw": Contender(lambda case, k: HNSWIndex.build(case.keys), "beam", beams, row_bytes=_float32),
}  # fmt: skip
