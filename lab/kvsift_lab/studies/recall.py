"""What selections find of what exact search finds, while the embedded model decodes.

``GenerationRecall``: a document of the facts task is prefilled; then tokens are generated at temperature 1, so that
they do not repeat, under RetrievalAttention at 640 + 100 visible tokens in every layer. At every fourth step each
layer's answer is compared with an exact search for the same queries. What the index serves counts: steps that were
audited are answered by a scan and exact; "index" leaves them out.

``SummaryRecall``: questions about documents are decoded densely; at every fourth step each layer takes the selections
of all plans that are compared. Every plan has the same queries, and no plan's errors change the next step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvsift.api.llm import LLM, Document
from kvsift.engine.sampling import Sampling
from kvsift.errors import UnsupportedPlan
from kvsift.indexes.flat import exact_search
from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.probe import probe
from kvsift.layer.selection import CountingReader
from kvsift.methods.common.indexed_keys import IndexedKeys
from kvsift.methods.pages import PagedMethod
from kvsift.methods.retrieval_attention import RetrievalAttention
from kvsift.methods.traits import Traits
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan
from kvsift.tokenization.prompt import question_text
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection
from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Study
from kvsift_lab.eval.contexts import Contexts
from kvsift_lab.eval.recipe import EvalRecipe, Job
from kvsift_lab.eval.tasks import make_sample
from kvsift_lab.numbers import table
from kvsift_lab.studies.exact import without_end
from kvsift_lab.studies.recipes import GenerationRecallRecipe, SummaryRecallRecipe

EVERY, STRETCH = 4, 250  # steps, of which neighbouring ones are nearly the same; generated tokens
VISIBLE = Budget(tokens=740, sinks=128, window=512, dense_layers=())


def hits(exact: Tensor, found: Tensor) -> tuple[float, float]:
    """Shares of an exact search's keys, and of its ten best, that were found; both [num_lists, k], the best first."""
    is_found = (exact.unsqueeze(2) == found.unsqueeze(1)).any(2).float()
    return float(is_found.mean()), float(is_found[:, :10].mean())


class ServedStep(NamedTuple):
    token: int  # how many were generated before
    found: float  # share of the 100 keys of an exact search
    heaviest: float  # of its ten best
    audited: bool


@dataclass(frozen=True)
class WatchedDecode(RetrievalAttention):
    """Reports what its answers lack."""

    report: Callable[[ServedStep], None] = print
    prompt: int = 0

    def _search(
        self, state: IndexedKeys, shape: LayerShape, queries: Tensor, candidates: Candidates, k: int, reader: KVReader
    ) -> tuple[Tensor, Tensor]:
        audits = len(state.audits.log)
        ids, scores = super()._search(state, shape, queries, candidates, k, reader)
        token = reader.length - self.prompt
        if token % EVERY == 0:
            exact, _ = exact_search(queries, reader.keys(candidates.first, candidates.stop), k)
            self.report(ServedStep(token, *hits(exact, ids), len(state.audits.log) > audits))
        return ids, scores


class GenerationRecall(Study):
    """A point for each index."""

    kind = "generation-recall"
    recipe: GenerationRecallRecipe
    indexes: ClassVar[dict[str, dict[str, Any]]] = {
        "auto": {},
        "graph": {"index": "graph"},
        "graph, never audited": {"index": "graph", "audit": 0},
    }

    def run(self) -> Iterator[dict[str, Any]]:
        recipe, llm = self.recipe, LLM(None, "dense", placement="host")
        encode = lambda text: llm.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        sample = make_sample("facts", recipe.length, recipe.seed, encode, 8, prefix=(llm.tokenizer.bos_token_id,))
        text = sample.context.rstrip() + question_text(sample.questions[0].text)
        sampling = Sampling(temperature=1.0, seed=recipe.seed)
        length = len(llm.tokenizer(text)["input_ids"])
        for name, settings in self.indexes.items():
            steps: list[ServedStep] = []
            method = WatchedDecode(**settings, report=steps.append, prompt=length)
            plan = Plan(decode=Rule(method, VISIBLE))
            with without_end():
                answer = llm.generate(text, plan=plan, max_new_tokens=recipe.tokens, sampling=sampling)
            yield {"name": name, "tokens": len(answer.token_ids), "stretches": stretches(steps)}

    def closing(self, result: dict[str, Any]) -> str:
        return generation_table(result)


def stretches(steps: Sequence[ServedStep]) -> list[dict[str, float]]:
    """Return means over stretches of tokens: recall as served, of the index alone, and the share of audited steps."""
    groups: dict[int, list[ServedStep]] = defaultdict(list)
    for step in steps:
        groups[step.token // STRETCH].append(step)
    made = []
    for number, own in sorted(groups.items()):
        alone = [step for step in own if not step.audited]
        means = {
            "served": fmean(step.found for step in own),
            "audited": fmean(step.audited for step in own),
            "index": fmean(step.found for step in alone) if alone else float("nan"),
            "index_ten_best": fmean(step.heaviest for step in alone) if alone else float("nan"),
        }
        made.append({"from": STRETCH * number, **{key: round(mean, 4) for key, mean in means.items()}})
    return made


def generation_table(result: dict[str, Any]) -> str:
    """Return recall by stretches of generated tokens."""
    rows = []
    for point in result["points"]:
        own = point["stretches"]
        rows.append([point["name"], *(f"{stretch['served']:.3f}" for stretch in own)])
        if any(stretch["audited"] for stretch in own):
            alone = [f"{stretch['index']:.3f}" for stretch in own]
            rows.append([f"{point['name']}, steps that were not audited", *alone])
            rows.append(["audited", *(f"{stretch['audited']:.0%}" for stretch in own)])
    return table(["tokens from", *(f"{each['from']:,}" for each in result["points"][0]["stretches"])], rows)


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


class SelectionQuality(NamedTuple):
    """Quality of one plan's selection at one step of one layer."""

    plan: str
    recall: float  # share of the ten heaviest tokens that were visible
    recovery: float  # attention mass on visible tokens
    overlap: float  # share of its pages that the first plan of the same budget selects too
    bytes_read: float  # to select


@dataclass(frozen=True)
class CompareSummaries(PagedMethod):
    """Reports the selection of every rule, and selects everything."""

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
        first: dict[int | None, Selection] = {}
        compared = zip(self.rows, self.rules, state.states, strict=True) if start % EVERY == 0 else ()
        for (plan, size), rule, memory in compared:
            counted = CountingReader(reader, LayerMessages(), (0, shape.layer, None))  # type: ignore[arg-type]
            own = Limit(min(rule.budget.units(start, self.page_size), candidates.count))
            selection = rule.method.select(memory, shape, queries, start, candidates, own, counted)
            spans = rule.budget.always(start, self.page_size)
            quality = probe(shape, queries, reader.keys(), spans, selection)
            overlap = hits(selection.units, first.setdefault(size, selection).units)[0]
            self.report(SelectionQuality(plan, *quality, overlap, counted.bytes_read))
        everything = torch.arange(candidates.first, candidates.stop).expand(shape.num_kv_heads, -1)
        return Selection(everything, candidates.unit_size)


class SummaryRecall(Study):
    """A point for each plan and budget, with a sample for each question."""

    kind = "summary-recall"
    recipe: SummaryRecallRecipe

    def __init__(self, recipe: SummaryRecallRecipe) -> None:
        super().__init__(recipe)
        self._evaluation = EvalRecipe.load(Path(recipe.recipe))
        for row in self._evaluation.rows:
            rule = parse_plan(row.plan).decode
            if rule is None or not isinstance(rule.method, PagedMethod):
                raise UnsupportedPlan(
                    f"bench summary-recall compares which pages plans choose in decode, and {row.plan} ranks none. "
                    "Leave it out of the recipe; kvsift eval measures any plan."
                )
        self._llm = LLM(
            self._evaluation.model, "dense", device=self._evaluation.device, dtype=self._evaluation.dtype, probe_every=0
        )

    def environment(self) -> dict[str, Any]:
        return machine.environment(self._llm.device) | {"evaluation": asdict(self._evaluation)}

    def run(self) -> Iterator[dict[str, Any]]:
        contexts = Contexts(self._evaluation, self._llm.tokenizer)
        samples: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for job in contexts.jobs():
            for plan, sample in self._samples(contexts, job):
                samples[plan].append(sample)
        for row in self._evaluation.rows:
            own = samples[row.plan]
            means = {measure: sum(each[measure] for each in own) / len(own) for measure in MEASURES}
            yield {"name": row.name, "plan": row.plan, "budget": row.budget, **means, "samples": own}

    def _samples(self, contexts: Contexts, job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
        """Means over the steps and layers of each question of one context; bytes are the median, because the first step
        of a question merges blocks, which a longer decode does once in 256 tokens."""
        rows = tuple((row.plan, row.budget) for row in self._evaluation.rows)
        always = parse_plan(rows[0][0]).decode
        assert always is not None
        # the smallest budget: sparse wherever any of the plans is
        budget = Budget(ratio=1e-9, sinks=always.budget.sinks, window=always.budget.window)
        steps: dict[str, list[SelectionQuality]] = defaultdict(list)
        method = CompareSummaries(rows=rows, report=lambda step: steps[step.plan].append(step))
        plan, sample = Plan(decode=Rule(method, budget)), contexts.sample(job)
        ids = list(sample.context_ids)
        document = Document(self._llm, ids, lambda text: ids + contexts.encode(question_text(text)), self._llm.plan)
        for index, question in enumerate(sample.questions):
            document.ask(question.text, plan=plan, max_new_tokens=question.max_new_tokens, question_phase="decode")
            for name, own in steps.items():
                means = {
                    key: round(fmean(getattr(s, key) for s in own), 5) for key in ("recall", "recovery", "overlap")
                }
                about = {"task": job.task, "seed": job.seed, "question": index, "steps": len(own)}
                yield name, {**about, **means, "bytes_read": median(step.bytes_read for step in own)}
            steps.clear()

    def closing(self, result: dict[str, Any]) -> str:
        return summary_table(result)


MEASURES = {
    "recall": "top-10 token recall",
    "recovery": "attention mass recovered",
    "overlap": "pages that {first} selects too",
    "bytes_read": "bytes read to select, of those of {first}",
}


def summary_table(result: dict[str, Any]) -> str:
    """Return a table per measure: a row per plan, a column per budget, means over questions."""
    points = {(point["name"], point["budget"]): point for point in result["points"]}
    names, budgets = (list(dict.fromkeys(keys)) for keys in zip(*points))
    tables = []
    for measure, title in MEASURES.items():
        whole = {b: points[names[0], b][measure] if measure == "bytes_read" else 1.0 for b in budgets}
        rows = [[name, *(f"{points[name, b][measure] / whole[b]:.3f}" for b in budgets)] for name in names]
        tables.append(table([title.format(first=names[0]), *map(str, budgets)], rows))
    return "\n\n".join(tables)
