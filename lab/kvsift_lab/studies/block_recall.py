"""Recall of indexes by block of RetrievalAttention, against one index over the prompt, for questions about documents.

    python -m kvsift_lab.studies.block_recall results/block-recall-cpu.json

Questions about a document of each task are decoded densely by the embedded model, at 640 + 100 visible tokens under the
plans compared. At every fourth step each layer takes the selections of all plans for the same queries and compares them
with an exact search; audited plans select at every step.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvsift.engine.llm import LLM, Document
from kvsift.engine.prompt import question_text
from kvsift.engine.provenance import versions_and_machine
from kvsift.indexes.flat import exact_search
from kvsift.layer.counting_reader import CountingReader
from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.probe import probe
from kvsift.methods.base import Method
from kvsift.methods.traits import Traits
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection
from kvsift_lab.eval.tasks import make_sample

CONTEXTS = ("key_value", 32768), ("needle", 32768), ("facts", 32768), ("facts", 61440)
QUESTIONS, SEED, EVERY = 8, 700000, 4
BUDGET = Budget(tokens=740, sinks=128, window=512, dense_layers=())
WANTED = 100
BLOCKS = {"graph": (0, 4096, 8192, 16384, 32768), "auto": (0, 16384, 32768)}  # 0: one index over the prompt
PLANS = ["index=flat", "index=graph", "index=graph:block=16384"]
PLANS += [
    f"index={index}:audit=0" + (f":block={block}" if block else "")
    for index, blocks in BLOCKS.items()
    for block in blocks
]


class ComparedStep(NamedTuple):
    """One plan's selection at one step of one layer."""

    plan: str
    layer: int
    found: float  # share of the 100 keys of an exact search
    heaviest: float  # of its ten best
    recovery: float  # attention mass on visible tokens
    kib: float  # read to select
    ms: float  # to select


@dataclass
class ComparedIndexes:
    """States of all plans that are compared."""

    states: list[Any]

    def fork(self) -> ComparedIndexes:
        return ComparedIndexes([state.fork() for state in self.states])

    def crop(self, length: int) -> None:
        for state in self.states:
            state.crop(length)


@dataclass(frozen=True)
class CompareIndexes(Method):
    """Reports the selection of every plan, and selects everything."""

    traits: ClassVar[Traits] = Traits(wants_queries=True, seals=True)

    methods: tuple[Method, ...] = ()
    report: Callable[[ComparedStep], None] = print
    build_s: dict[int, float] | None = None
    prompt: int = 0  # tokens after which one index is built

    def new_state(self, shape: LayerShape) -> ComparedIndexes:
        return ComparedIndexes([method.new_state(shape) for method in self.methods])

    def observe(self, state: Any, shape: LayerShape, *tokens: Any) -> None:
        for method, own in zip(self.methods, state.states):
            method.observe(own, shape, *tokens)

    def checkpoint(self, state: Any) -> None:
        for method, own in zip(self.methods, state.states):
            method.checkpoint(own)

    def prepare(
        self, state: Any, shape: LayerShape, candidates: Candidates, reader: KVReader, limit: Limit | None = None
    ) -> None:
        assert self.build_s is not None
        for index, (method, own) in enumerate(zip(self.methods, state.states)):
            if getattr(method, "block", 0) or reader.length >= self.prompt:
                started = perf_counter()
                method.prepare(own, shape, candidates, reader, Limit(WANTED))
                self.build_s[index] += perf_counter() - started

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        spans, measured = BUDGET.always(start, 1), start % EVERY == 0
        exact = exact_search(queries[:, 0], reader.keys(candidates.first, candidates.stop), WANTED)[0]
        for index, (method, own) in enumerate(zip(self.methods, state.states)):
            if not measured and not getattr(method, "audit", 0):
                continue
            counted = CountingReader(reader._reader, LayerMessages(), (0, shape.layer, None))  # type: ignore[attr-defined]
            started = perf_counter()
            selection = method.select(own, shape, queries, start, candidates, Limit(WANTED), counted)
            ms = 1000 * (perf_counter() - started)
            if measured:
                hits = (exact.unsqueeze(2) == (selection.units - candidates.first).unsqueeze(1)).any(2).float()
                recovery = probe(shape, queries, reader.keys(), spans, selection)[1]
                found = float(hits.mean()), float(hits[:, :10].mean())
                self.report(ComparedStep(PLANS[index], shape.layer, *found, recovery, counted.bytes_read / 1024, ms))
        return Selection(torch.arange(candidates.first, candidates.stop).unsqueeze(0), 1)


def rows_of(llm: LLM, task: str, length: int) -> list[dict[str, Any]]:
    """Means over steps, layers and questions for every plan."""
    encode = lambda text: llm.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    sample = make_sample(task, length, SEED, encode, QUESTIONS, prefix=(llm.tokenizer.bos_token_id,))
    ids, steps, build_s = list(sample.context_ids), list[ComparedStep](), defaultdict[int, float](float)
    parsed = [parse_plan(f"retrieval_attention:{knobs}").decode for knobs in PLANS]
    methods = tuple(rule.method for rule in parsed if rule is not None)
    compared = CompareIndexes(methods, steps.append, build_s, len(ids) - 1)
    plan = Plan(decode=Rule(compared, Budget(ratio=1e-9, sinks=BUDGET.sinks, window=BUDGET.window, dense_layers=())))
    document = Document(llm, ids, lambda question: ids + encode(question_text(question)), plan)
    for question in sample.questions:
        document.ask(question.text, max_new_tokens=question.max_new_tokens, question_phase="decode")
    by_plan: dict[str, list[ComparedStep]] = defaultdict(list)
    for step in steps:
        by_plan[step.plan].append(step)
    return [
        {
            "task": task, "length": length, "plan": plan, "steps": len(own), "build_s": round(build_s[index], 2),
            "ms": round(sorted(step.ms for step in own)[len(own) // 2], 3),
            **{key: round(fmean(getattr(step, key) for step in own), 4) for key in ("found", "heaviest", "recovery")},
            "kib": round(fmean(step.kib for step in own)),
            "layers": [round(fmean(s.found for s in own if s.layer == layer), 4) for layer in {s.layer for s in own}],
        }
        for index, (plan, own) in enumerate(by_plan.items())
    ]  # fmt: skip


def main() -> None:
    out = Path(sys.argv[1])
    llm = LLM(None, "dense", placement="host", probe_every=0)
    rows: list[dict[str, Any]] = []
    for task, length in CONTEXTS:
        rows += rows_of(llm, task, length)
        print("\n".join(json.dumps(row) for row in rows[-len(PLANS) :]), file=sys.stderr)
    recipe = {"contexts": CONTEXTS, "questions": QUESTIONS, "seed": SEED, "every": EVERY}
    recipe["threads"] = torch.get_num_threads()
    head = {"kind": "block-recall", "recipe": recipe, **versions_and_machine(llm.device)}
    lines = ",\n".join(json.dumps(row) for row in rows)
    out.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
