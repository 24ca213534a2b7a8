"""Seconds for the lists that an index is built from, on the host and on the GPU.

    python -m kvsift_lab.studies.list_times results/lists-h200.json

A layer of Llama-3-8B's shape: the nearest 200 of its keys, in host memory, for 2048 of the queries of each of 32 heads.
Then whole prefills of a document by the embedded model with KV in host memory, where lists are a small part.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvsift import LLM, native
from kvsift.engine.provenance import versions_and_machine
from kvsift.indexes import graph
from kvsift.indexes.sample_lists import sample_lists
from kvsift.indexes.samples import QuerySamples

ROUNDS = 4  # the first warms up
PLAN = "retrieval_attention:index=graph:budget=740:dense_layers=none"


def layer_times(context: int) -> dict[str, Any]:
    """Time the lists of one layer, host and GPU in turns."""
    generator = torch.Generator().manual_seed(context)
    keys, queries = (torch.randn(*shape, 128, generator=generator).bfloat16() for shape in ((8, context), (32, 8192)))
    positions = torch.arange(8192) * context // 8192
    seconds: dict[str, list[float]] = {"cpu": [], "cuda": []}
    for _ in range(ROUNDS):
        for where, samples in seconds.items():
            query_samples = QuerySamples(queries.to(where), positions)
            torch.cuda.synchronize()
            started = perf_counter()
            sample_lists(keys, query_samples, 2048, 200)
            samples.append(perf_counter() - started)
    return {"context": context, **{where: samples[1:] for where, samples in seconds.items()}}


def prefill_times(tokens: int) -> dict[str, Any]:
    """Time whole prefills, lists on host and GPU in turns."""
    llm = LLM(plan=PLAN, placement="split", probe_every=0)
    text = " ".join(f"The harbour master of port {i} counted {i * 7 % 97} crates before noon." for i in range(9000))
    share = tokens / len(llm.tokenizer(text, verbose=False)["input_ids"])
    seconds: dict[str, list[float]] = {"cpu": [], "cuda": []}
    for _ in range(ROUNDS):
        for where, samples in seconds.items():
            graph.sample_lists = on_host if where == "cpu" else sample_lists
            document = llm.read(text[: int(len(text) * share)])
            document.prefill(llm.plan)
            samples.append(document.read_s)
    return {"tokens": document.num_tokens, **{where: samples[1:] for where, samples in seconds.items()}}


def on_host(keys: Tensor, samples: QuerySamples, *given: Any, **named: Any) -> Tensor:
    """Call ``sample_lists`` with queries on the host."""
    return sample_lists(keys, samples._replace(queries=samples.queries.cpu()), *given, **named)


def main() -> None:
    head = {"kind": "lists", "host_threads": torch.get_num_threads(), "level": native.level()}
    about = {**head, **versions_and_machine(torch.device("cuda"))}
    layers = [layer_times(context) for context in (32768, 131072)]
    readings = [prefill_times(tokens) for tokens in (32000, 120000)]
    Path(sys.argv[1]).write_text(json.dumps({**about, "layer": layers, "read": readings}, indent=1) + "\n")


if __name__ == "__main__":
    main()
