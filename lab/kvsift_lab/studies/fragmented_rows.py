"""Time of a decode step of one layer on the CPU, over rows whose pages are consecutive and rows whose pages are not.

    python -m kvsift_lab.studies.fragmented_rows results/fragmented-rows-cpu.json [repeats]

The layer has the shape of one of Llama 3 8B, and pages of 16 tokens. A step stores a token, selects and attends, dense
or with Quest. All layouts are timed in turns with a cold cache, and must give the same bits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvsift import native
from kvsift.engine.provenance import versions_and_machine
from kvsift.layer.accounting import RunStats
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.plan.syntax import parse_plan
from kvsift.stores.kv_pool import KVPool
from kvsift.stores.page_pool import Run
from kvsift.stores.page_table import SPARE_PAGES, PageTable
from kvsift.types import Chunk, LayerShape
from kvsift_lab.bench.host_timing import cold_rounds
from kvsift_lab.bench.recipe import COLD_BYTES
from kvsift_lab.bench.report import conditions, middle

PAGE_SIZE = 16
SHAPE = LayerShape(layer=2, num_query_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
PLANS = {"dense": "decode=dense", "quest": "decode=quest:budget=1024"}
CONSECUTIVE = "consecutive"


@dataclass(frozen=True)
class RowsSetup:
    """What a result depends on."""

    contexts: tuple[int, ...] = (16384, 32768)
    repeats: int = 40
    cold_bytes: int = COLD_BYTES
    seed: int = 0


def shuffled(num_pages: int, run_length: int, seed: int) -> list[Run]:
    """Runs of this many pages, in random order."""
    runs = [Run(first, min(first + run_length, num_pages)) for first in range(0, num_pages, run_length)]
    order = torch.randperm(len(runs), generator=torch.Generator().manual_seed(seed)).tolist()
    return [runs[place] for place in order]


def layouts(num_pages: int, seed: int) -> dict[str, list[Run]]:
    """Pages of a row by name of the layout."""
    half = num_pages // 2
    return {
        CONSECUTIVE: [Run(0, num_pages)],
        "2 runs": [Run(half, num_pages), Run(0, half)],
        "runs of 64 pages": shuffled(num_pages, 64, seed),
        "two rows in turns": [Run(page, page + 1) for page in range(0, 2 * num_pages, 2)],
        "runs of 1 page, shuffled": shuffled(num_pages, 1, seed),
    }


def filled_layer(plan: str, runs: list[Run], keys: Tensor, values: Tensor) -> SparseAttention:
    """A layer over a row that is stored in these pages, with pages at the end of the pool for new tokens."""
    end = max(run.stop for run in runs)
    kv = KVPool.of_size(end + SPARE_PAGES)
    kv.pages.allocate(end)
    table = PageTable(1, kv)
    table.adopt(0, runs)
    table.rows[0].spare = kv.pages.allocate(SPARE_PAGES)
    layer = SparseAttention(SHAPE, parse_plan(plan), 1, keys.new_empty(0), RunStats(0), table=table)
    pool = kv.layers[SHAPE.layer]
    pool.fit()
    for tensor in pool.tensors:
        tensor.zero_()  # pages of other rows are in memory, too
    layer.store.append(0, keys, values)
    return layer


def decode_step(layer: SparseAttention, chunk: Chunk) -> Callable[[], Tensor]:
    return lambda: layer.attend(chunk, 1)


@torch.inference_mode()
def measure(context: int, setup: RowsSetup) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(setup.seed)
    heads = SHAPE.num_kv_heads, SHAPE.num_kv_heads
    keys, values = (torch.randn(n, context, SHAPE.head_dim, generator=generator).bfloat16() for n in heads)
    token = [
        torch.randn(1, n, 1, SHAPE.head_dim, generator=generator).bfloat16() for n in (SHAPE.num_query_heads, *heads)
    ]
    chunk = Chunk(token[0], token[1], token[2], [1])
    pages = layouts(context // PAGE_SIZE, setup.seed)
    steps: dict[str, Callable[[], Tensor]] = {}
    for plan, spec in PLANS.items():
        first: Tensor | None = None
        for layout, runs in pages.items():
            step = decode_step(filled_layer(spec, runs, keys, values), chunk)
            output = step()
            first = output if first is None else first
            assert torch.equal(output, first), f"{plan} over {layout} has other bits"
            steps[f"{plan}, {layout}"] = step
    rounds = cold_rounds(steps, setup.repeats, setup.cold_bytes)
    medians = {name: middle(samples, rounds.others) for name, samples in rounds.seconds.items()}
    ratios = {
        name: [round(time / base, 4) for time, base in zip(samples, rounds.seconds[f"{plan}, {CONSECUTIVE}"])]
        for name, samples in rounds.seconds.items()
        for plan in [name.partition(",")[0]]
    }
    over_consecutive = {name: round(middle(samples, rounds.others), 4) for name, samples in ratios.items()}
    print(f"{context} tokens, {conditions(rounds.bandwidth, rounds.others)}", flush=True)
    for name, seconds in medians.items():
        print(f"  {name:32} {1e6 * seconds:8.0f} us   {over_consecutive[name]:.3f}", flush=True)
    return {"context": context, "median_s": medians, "over_consecutive": over_consecutive, **rounds.document()}


def main() -> None:
    path, repeats = Path(sys.argv[1]), [int(number) for number in sys.argv[2:]]
    setup = RowsSetup(repeats=repeats[0]) if repeats else RowsSetup()
    head = {
        "kind": "fragmented_rows",
        "recipe": asdict(setup) | {"plans": PLANS, "page_size": PAGE_SIZE, "layer": str(SHAPE), "dtype": "bfloat16"},
        "threads": torch.get_num_threads(),
        "level": native.level(),
    } | versions_and_machine(torch.device("cpu"))
    points = [measure(context, setup) for context in setup.contexts]
    path.write_text(json.dumps(head | {"points": points}, indent=1) + "\n")


if __name__ == "__main__":
    main()
