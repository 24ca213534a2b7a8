"""Recall of each plan of a recipe on the queries and keys of dense attention over real contexts.

    python -m kvsift_lab.studies.summary_recall lab/recipes/summary-recall-32k.toml results/summary-recall-32k.json

Every question is decoded densely. At every fourth step each sparse layer takes the selections of all plans and compares
them with exact attention: every plan has the same queries, and no plan's errors change the next step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvsift.engine.llm import LLM, Document
from kvsift.engine.prompt import question_text
from kvsift.engine.provenance import versions_and_machine
from kvsift.layer.counting_reader import CountingReader
from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.probe import probe
from kvsift.methods.pages import PagedMethod
from kvsift.methods.traits import Traits
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection
from kvsift_lab.eval.contexts import Contexts
from kvsift_lab.eval.recipe import EvalRecipe, Job

EVERY = 4  # steps; neighbouring ones are nearly the same


class SelectionQuality(NamedTuple):
    """Quality of one plan's selection at one step of one layer."""

    plan: str
    recall: float  # share of the ten heaviest tokens that were visible
    recovery: float  # attention mass on visible tokens
    overlap: float  # share of its pages that the first plan of the same budget selects too
    bytes_read: float  # to select


@dataclass
class ComparedStates:
    """States of all compared methods."""

    states: list[Any]

    def fork(self) -> ComparedStates:
        return ComparedStates([None if state is None else state.fork() for state in self.states])

    def crop(self, length: int) -> None:
        for state in self.states:
            if state is not None:
                state.crop(length)


@dataclass(frozen=True)
class Compare(PagedMethod):
    """A method that reports the selection of every rule, and selects everything."""

    traits: ClassVar[Traits] = Traits(granularity="page")

    rows: tuple[tuple[str, int | None], ...] = ()
    report: Callable[[SelectionQuality], None] = print

    @property
    def rules(self) -> list[Rule]:
        rules = [parse_plan(plan).decode for plan, _ in self.rows]
        return [rule for rule in rules if rule is not None]

    @property
    def summaries(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(kind for rule in self.rules for kind in rule.method.summaries))

    def new_state(self, shape: LayerShape) -> ComparedStates:
        return ComparedStates([rule.method.new_state(shape) for rule in self.rules])

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        everything = torch.arange(candidates.first, candidates.stop).expand(shape.num_kv_heads, -1)
        if start % EVERY == 0:
            self._compare(state, shape, queries, start, candidates, reader)
        return Selection(everything, candidates.unit_size)

    def _compare(
        self,
        state: ComparedStates,
        shape: LayerShape,
        queries: Tensor,
        start: int,
        candidates: Candidates,
        reader: KVReader,
    ) -> None:
        first: dict[int | None, Selection] = {}
        for (plan, size), rule, memory in zip(self.rows, self.rules, state.states, strict=True):
            counted = CountingReader(reader, LayerMessages(), (0, shape.layer, None))  # type: ignore[arg-type]
            limit = Limit(min(rule.budget.units(start, self.page_size), candidates.count))
            selection = rule.method.select(memory, shape, queries, start, candidates, limit, counted)
            spans = rule.budget.always(start, self.page_size)
            recall, recovery = probe(shape, queries, reader.keys(), spans, selection)
            overlap = _overlap(selection.units, first.setdefault(size, selection).units)
            self.report(SelectionQuality(plan, recall, recovery, overlap, counted.bytes_read))


def _overlap(units: Tensor, others: Tensor) -> float:
    return float((units.unsqueeze(2) == others.unsqueeze(1)).any(2).float().mean())


def samples_of(recipe: EvalRecipe, llm: LLM, job: Job) -> list[dict[str, Any]]:
    """Return means over the steps and layers of each question of one context; bytes are the median, because the first
    step of a question merges blocks, which a longer decode does once in 256 tokens."""
    contexts = Contexts(recipe, llm.tokenizer)
    sample = contexts.sample(job)
    ids = list(sample.context_ids)
    document = Document(llm, ids, lambda question: ids + contexts.encode(question_text(question)), llm.plan)
    rows = tuple((row.plan, row.budget) for row in recipe.rows)
    always = parse_plan(rows[0][0]).decode
    assert always is not None
    # the smallest budget: sparse wherever any of the plans is
    budget = Budget(ratio=1e-9, sinks=always.budget.sinks, window=always.budget.window)
    results = []
    for index, question in enumerate(sample.questions):
        samples: list[SelectionQuality] = []
        plan = Plan(decode=Rule(Compare(rows=rows, report=samples.append), budget))
        document.ask(question.text, plan=plan, max_new_tokens=question.max_new_tokens, question_phase="decode")
        for name, size in rows:
            own = [sample for sample in samples if sample.plan == name]
            means = {key: round(fmean(getattr(s, key) for s in own), 5) for key in ("recall", "recovery", "overlap")}
            results.append(
                {"task": job.task, "seed": job.seed, "question": index, "plan": name, "budget": size, "steps": len(own)}
                | means
                | {"bytes_read": median(sample.bytes_read for sample in own)}
            )
    return results


def main() -> None:
    recipe, out = EvalRecipe.load(Path(sys.argv[1])), Path(sys.argv[2])
    llm = LLM(recipe.model, "dense", device=recipe.device, dtype=recipe.dtype, probe_every=0)
    samples = []
    for job in Contexts(recipe, llm.tokenizer).jobs():
        samples += samples_of(recipe, llm, job)
        print(f"{job.task} {job.seed} done", file=sys.stderr)
    head = {"kind": "recall", "recipe": asdict(recipe), **versions_and_machine(llm.device)}
    lines = ",\n".join(json.dumps(sample) for sample in samples)
    out.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "samples": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
