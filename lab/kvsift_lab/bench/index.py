"""kvsift bench index: search of all heads of one layer, index by index, at the same recall."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvsift.errors import InputError, unknown
from kvsift_lab.bench import recipe as r

DUMPED = "P"
SINKS, WINDOW = 128, 512  # of a document's tokens, always visible and in no index (arXiv 2409.10516)
DUMP = "File of kvsift bench dump; may be given more than once."
INDEXES = "flat,flat_int8,graph,graph_paper,auto,faiss_flat,ivf,hnsw"


@dataclass(frozen=True)
class IndexRecipe(r.BenchRecipe):
    """Search of one decode step in one layer: every index at the same recall, in turns, with cold caches."""

    measured_by = "kvsift_lab.bench.index_measure:IndexBench"

    data: tuple[str, ...] = r.option("S,T", "Sets: S peaky, T diffuse, R noise, P of --dump.", parse=r.names)
    contexts: tuple[int, ...] = r.contexts("32K,128K")
    ks: tuple[int, ...] = r.option("100,2000", "Keys to find.", flag="--k", parse=r.token_counts)
    num_query_heads: int = r.heads()
    num_kv_heads: int = 8
    head_dim: int = r.head_dim()
    indexes: tuple[str, ...] = r.option(INDEXES, "Names; graph_causal is another.", parse=r.names)
    dumps: tuple[str, ...] = r.option(
        None, DUMP, flag="--dump", kind=list[Path] | None, value=(), parse=lambda paths, flag: tuple(map(str, paths))
    )
    each_head: bool = r.option(False, "Measure and tune every KV head alone.")
    samples: int = r.samples()
    tokens: int = r.option(32, "Decode steps, half to tune, half to measure.", minimum=2)
    target: float = r.option(0.95, "Recall that indexes are tuned for.")
    seed: int = r.option(0, "Of the synthetic sets.")
    threads: int | None = r.threads()
    repeats: int = r.repeats(20)
    sinks: int = SINKS
    window: int = WINDOW
    cold_bytes: int = r.COLD_BYTES

    def __post_init__(self) -> None:
        from kvsift_lab.bench.index_cases import SYNTHETIC
        from kvsift_lab.bench.index_contenders import CONTENDERS

        for name in self.data:
            if name not in (*SYNTHETIC, DUMPED):
                raise unknown("data set", name, (*SYNTHETIC, DUMPED))
        for name in self.indexes:
            if name not in CONTENDERS:
                raise unknown("index", name, CONTENDERS)
        r.require_some(self.data, self.indexes, self.ks, names="data set, index and k")
        r.require_some(self.contexts or not set(self.data) & set(SYNTHETIC), names="context")
        if (DUMPED in self.data) != bool(self.dumps):
            raise InputError(
                "data set P and a dump belong together: kvsift bench dump --out FILE makes one, and --dump FILE "
                "reads it."
            )
        r.check_groups(self.num_query_heads, self.num_kv_heads)
        if self.tokens < 2 or self.samples < 1:
            raise InputError("give at least 2 --tokens, to tune and to measure apart, and 1 --samples.")
        if not 0 < self.target <= 1:
            raise InputError(f"--target {self.target:g} must be a recall above 0, and 1 at most.")
