"""Chats about long documents on one machine: tokens per second of all, and waits beside each other.

    python scripts/chats.py results/chats-cpu.json [chunk_size]

The embedded model and a document of 32K tokens for each of four chats. Every document is read once; then plans are
measured in turns: all chats decode; one alone; a second question comes beside three that decode; another document is
read beside three that decode.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from torch import Tensor

from kvsift import LLM
from kvsift.batching.row import FinishReason, Row
from kvsift.cli.demo import make_document
from kvsift.engine.memory import available_bytes
from kvsift.engine.provenance import versions_and_machine
from kvsift.plan.syntax import parse_plan
from kvsift.threads import report

RECIPE: dict[str, Any] = {
    "tokens": 32768,
    "chats": 4,
    "plans": ["dense", "sketch:budget=1024:dense_layers=none", "quest:budget=1024:dense_layers=none"],
    "steps": 32,
    "rounds": 5,
    "max_new_tokens": 2000,
}


class Timed:
    """An output that takes the likeliest token, whatever it is, and the times."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.times: list[float] = []

    def read(self, num_tokens: int) -> None:
        pass

    def take(self, logits: Tensor, probe_s: float) -> tuple[int, FinishReason]:
        self.times.append(perf_counter())
        return int(logits.argmax()), "length" if len(self.times) == self.num_tokens else ""


def start(llm: LLM, ids: list[int], plan: str, num_tokens: int) -> Row:
    row = Row(ids, parse_plan(plan), num_tokens, Timed(num_tokens))
    llm.loop.submit(row)
    return row


def step_until(llm: LLM, *rows: Row, tokens: int) -> None:
    """Take steps until each of these rows has so many tokens."""
    while any(len(row.output.times) < tokens and not row.is_ended for row in rows):
        llm.loop.step(unless=lambda: False)


def measure(llm: LLM, documents: list[list[int]], question: list[int], new: list[int], plan: str) -> dict[str, Any]:
    """One round of a plan."""
    steps, most = RECIPE["steps"], RECIPE["max_new_tokens"]
    found: dict[str, Any] = {}
    rows = [start(llm, document + question, plan, most) for document in documents]
    step_until(llm, *rows, tokens=2)
    for name, count in (("all", len(rows)), ("alone", 1)):
        for row in rows[count:]:
            llm.loop.close(row)
        begun = [len(row.output.times) for row in rows[:count]]
        started = perf_counter()
        for _ in range(steps):
            llm.loop.step(unless=lambda: False)
        made = sum(len(row.output.times) for row in rows[:count]) - sum(begun)
        found[f"{name}_tokens_per_s"] = made / (perf_counter() - started)
    llm.loop.close(rows[0])
    rows = [start(llm, document + question, plan, most) for document in documents[1:]]
    step_until(llm, *rows, tokens=2)
    for name, ids in (("second_question_s", documents[0] + question[::-1]), ("new_document_s", new + question)):
        begun = [len(row.output.times) for row in rows]
        started = perf_counter()
        asked = start(llm, ids, plan, 4)
        step_until(llm, asked, tokens=1)
        found[name] = asked.output.times[0] - started
        found[f"{name[:-2]}_reused"] = asked.num_reused
        between = [
            after - before
            for row, first in zip(rows, begun)
            for before, after in zip(row.output.times[first - 1 :], row.output.times[first:])
        ]
        found[f"itl_beside_{name}"] = {"median": median(between), "p99": quantiles(between, n=100)[98]}
        llm.loop.close(asked)
    for row in rows:
        llm.loop.close(row)
    return found


def main() -> None:
    out, chunk = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None
    llm = LLM(device="cpu", chunk_size=chunk, keep_tokens=6 * RECIPE["tokens"], probe_every=0)
    llm.load()
    result = {"kind": "chats", "recipe": RECIPE, **versions_and_machine(llm.device), "threads": report()}
    result["free_bytes"], result["grid"] = available_bytes(llm.device), llm.loop.grid
    ids = llm.tokenizer(make_document(RECIPE["tokens"]))["input_ids"]
    question = llm.tokenizer("\n\nQuestion: What is the access code?\nAnswer:", add_special_tokens=False)["input_ids"]
    documents = [[number + 300, *ids] for number in range(RECIPE["chats"])]  # no two begin alike
    result["read_s"] = []
    for document in documents:
        started = perf_counter()
        row = start(llm, document + question, "dense", 1)
        step_until(llm, row, tokens=1)
        llm.loop.close(row)
        result["read_s"].append(perf_counter() - started)
        print(f"read {len(document)} tokens in {result['read_s'][-1]:.1f} s", flush=True)
    result["rounds"] = []
    for number in range(RECIPE["rounds"]):
        plans = RECIPE["plans"][number % 3 :] + RECIPE["plans"][: number % 3]
        for place, plan in enumerate(plans):
            new = [400 + 3 * number + place, *ids[:8192]]
            found = {"plan": plan, **measure(llm, documents, question, new, plan)}
            result["rounds"].append(found)
            print(
                {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()},
                flush=True,
            )
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
