"""kvsift bench host: attention on the processor, by torch's forms, the compiled core and an index."""

from __future__ import annotations

from dataclasses import dataclass

from kvsift.errors import InputError, unknown
from kvsift_lab.bench import recipe as r

NO_INDEX = "none"
INDEX = "What finds the keys of a retrieval step: auto, graph, flat, ..., none."


@dataclass(frozen=True)
class HostRecipe(r.BenchRecipe):
    """Attention of one decode step in one layer on the processor: cold caches, all variants in turns."""

    measured_by = "kvsift_lab.bench.host_measure:HostBench"

    contexts: tuple[int, ...] = r.contexts("8K,32K,128K")
    num_query_heads: int = r.heads()
    num_kv_heads: int = 8
    head_dim: int = r.head_dim()
    budget: int = r.option(2048, "Tokens of a selection of pages.", minimum=1)
    page_size: int = r.option(16, "Tokens per page.", minimum=1)
    tokens: tuple[int, ...] = r.option("100,2000", "Tokens per query head of a selection of tokens.", parse=r.counts)
    sketch_tokens: int = r.option(128, "Tokens per KV head of a selection by sketches.", minimum=1)
    index: str = r.option("auto", INDEX)
    top: int = r.option(100, "Keys per query head that it finds.", minimum=1)
    data: str = r.option("S", "Data set of keys and queries: R, S or T.")
    samples: int = r.samples()
    threads: int | None = r.threads()
    repeats: int = r.repeats(20)
    cold_bytes: int = r.COLD_BYTES

    def __post_init__(self) -> None:
        from kvsift_lab.bench.index_cases import SYNTHETIC
        from kvsift_lab.bench.index_contenders import CONTENDERS

        r.require_some(self.contexts, names="context")
        r.check_groups(self.num_query_heads, self.num_kv_heads)
        if self.data not in SYNTHETIC:
            raise unknown("data set", self.data, SYNTHETIC)
        if self.budget < self.page_size:
            raise InputError(f"a budget of {self.budget} tokens is less than a page of {self.page_size}; give more.")
        if self.index not in (NO_INDEX, *CONTENDERS):
            raise unknown("index", self.index, [NO_INDEX, *CONTENDERS])
        if short := [context for context in self.contexts if context < 2 * self.budget]:
            raise InputError(
                f"{short[0]} tokens are less than twice the budget, {self.budget}: there is little to select. Give "
                "longer --contexts, or a smaller --budget."
            )
