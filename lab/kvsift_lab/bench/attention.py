"""kvsift bench attention: ours against the best dense kernels, over shapes and context lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvsift.errors import unknown
from kvsift_lab.bench import recipe as r

DENSE = "sdpa-flash,sdpa-cudnn,flashinfer,ours-dense"
CHART = "Draw the result here, SVG; needs matplotlib."


@dataclass(frozen=True)
class AttentionRecipe(r.BenchRecipe):
    """Attention of one decode step in one layer: cold caches, all variants in turns, the floor beside them."""

    measured_by = "kvsift_lab.bench.attention_measure:AttentionBench"

    shapes: tuple[tuple[int, int], ...] = r.option(
        "32/32,32/8",
        "Query heads/KV heads.",
        parse=lambda text, flag: tuple(r.head_counts(w, flag) for w in r.names(text)),
    )
    contexts: tuple[int, ...] = r.contexts("4K,8K,16K,32K,64K,128K,256K,512K")
    batch: int = r.option(1, "Sequences.", minimum=1)
    head_dim: int = r.option(128, "Numbers per head.", minimum=8)
    page_size: int = r.option(16, "Tokens per page.", minimum=1)
    budget: int = r.option(2048, "Visible tokens per list of pages.", minimum=1)
    sketch_budget: int = r.option(1024, "Visible tokens per list of tokens, which sketches choose.", minimum=1)
    score_by: tuple[str, ...] = r.option("minmax,minmax_fp8,sketch1", "Kinds of page summary.", parse=r.names)
    baselines: tuple[str, ...] = r.option(DENSE, "Dense kernels, or none.", parse=r.names)
    breakdown: bool = r.option(False, "Also time the separate kernels.")
    repeats: int = r.repeats(15)
    bandwidth: float | None = r.bandwidth()
    max_seconds: float | None = r.max_seconds()
    seed: int = 0  # of the buffers
    chart_path: str | None = r.option(None, CHART, flag="--chart", kind=Path | None, stored=False)

    def __post_init__(self) -> None:
        from kvsift.kernels.page_summary import SUMMARIES
        from kvsift.kernels.sketch import SKETCHES
        from kvsift_lab.bench.attention_measure import points
        from kvsift_lab.bench.attention_variants import BASELINES

        for kind in self.score_by:
            if kind not in (*SUMMARIES, *SKETCHES):
                raise unknown("summary", kind, (*SUMMARIES, *SKETCHES))
        for name in self.baselines:
            if name not in BASELINES:
                raise unknown("baseline", name, BASELINES)
        r.require_some(self.score_by, self.shapes, self.contexts, names="shape, context and summary")
        points(self)
