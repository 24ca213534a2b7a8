"""kvsift bench host: attention on the processor, by torch's forms, the compiled core and an index; recipe and
report."""

from __future__ import annotations

from dataclasses import dataclass

from kvsift.errors import InvalidValue
from kvsift_lab.bench import recipe as r
from kvsift_lab.bench.report import Point, conditions, middle
from kvsift_lab.numbers import table, tokens

NO_INDEX = "none"
INDEX = "What finds the keys of a retrieval step: auto, graph, flat, ..., none."


RATIOS = (  # (variant, variant that it is compared with)
    ("native dense", "torch bmm-softmax-bmm"),
    ("native dense", "torch sdpa, group as rows"),
    ("native dense", "torch sdpa, enable_gqa"),
    ("native pages per KV head", "native dense"),
    ("native pages per KV head", "torch pages per KV head"),
    ("native pages per query head", "native dense"),
    ("native sketch1 per KV head", "native dense"),
    ("native sketch2 per KV head", "native dense"),
    ("step, quest", "step, dense"),
    ("step, sketch", "step, dense"),
    ("step, sketch", "step, quest"),
    ("retrieval step", "native dense"),
)


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
        from kvsift_lab.bench.index_cases import CONTENDERS
        from kvsift_lab.bench.index_data import SYNTHETIC

        r.require_some(self.contexts, names="context")
        r.check_groups(self.num_query_heads, self.num_kv_heads)
        r.require_known("data set", [self.data], SYNTHETIC)
        if self.budget < self.page_size:
            raise InvalidValue(f"a budget of {self.budget} tokens is less than a page of {self.page_size}; give more.")
        r.require_known("index", [self.index], [NO_INDEX, *CONTENDERS])
        if short := [context for context in self.contexts if context < 2 * self.budget]:
            raise InvalidValue(
                f"{short[0]} tokens are less than twice the budget, {self.budget}: there is little to select. Give "
                "longer --contexts, or a smaller --budget."
            )


def point_text(point: Point) -> str:
    """Render a heading, a row per variant, and ratios of their times; or why there are none."""
    if "reason" in point:
        return f"{tokens(point['context'])} tokens: {point['reason']}\n"
    lines = [
        f"{tokens(point['context'])} tokens; {conditions(point['bandwidth'], point['others'])}",
        point_table(point),
    ]
    if "index" in point:
        index = point["index"]
        text = f"index {index['kind']}, {index['scanned'] / point['context']:.2%} of the keys scanned, built in "
        lines.append(f"{text}{index['build_seconds']:.1f} s" + (f" ({index['why']})" if index.get("why") else ""))
    lines += point["missing"]
    lines += [f"{name} is {factor:.1f}x as fast as {other}" for name, other, factor in ratios(point)]
    return "\n".join(lines) + "\n"


def point_table(point: Point) -> str:
    """Return a Markdown table: milliseconds, the floor that memory sets, and its share."""
    seconds, bandwidth = times(point), middle(point["bandwidth"], point["others"])
    floors = {variant["name"]: variant["num_bytes"] / bandwidth for variant in point["variants"]}
    rows = [
        [name, f"{time * 1e3:.3f}", f"{floors[name] * 1e3:.3f}", f"{floors[name] / time:.0%}"]
        for name, time in seconds.items()
    ]
    return table(["", "ms", "floor", "of floor"], rows)


def times(point: Point) -> dict[str, float]:
    """Return the seconds by variant, medians over quiet rounds."""
    return {variant["name"]: middle(variant["samples_s"], point["others"]) for variant in point["variants"]}


def ratios(point: Point) -> list[tuple[str, str, float]]:
    """Return how many times faster the first variant of each pair is."""
    seconds = times(point)
    return [(one, two, seconds[two] / seconds[one]) for one, two in RATIOS if one in seconds and two in seconds]
