"""Exact decoding by the embedded model: its speed beside dense decoding, and which of its drafts are accepted.

``ExactBench`` reads a document of prose with facts in it once. Prose is continued after it, greedily and sampled at
temperature 1, without an end; and its six questions are answered. Each round takes dense decoding and every plan in
turns. Acceptance is that of drafts of four tokens without repeats, in a run of its own.

``AcceptanceBench`` reads each context of a task once, and answers its questions. Plans draft four tokens a cycle with
5 % of the context. Where a text repeats itself, what followed is proposed instead, so that the shares of drafts leave
such stretches out. Every answer of both must be that of dense decoding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby, product
from statistics import median
from typing import Any
from unittest.mock import patch

from kvsift import LLM, Sampling
from kvsift.api.answer import Answer
from kvsift.api.document import Document
from kvsift.cli.demo import FACTS, make_document
from kvsift.engine.speculative.pace import Amount, Measured, Pace
from kvsift.engine.speculative.repeats import Repeats
from kvsift.models.hf.generation_config import GenerationSettings
from kvsift.plan.syntax import parse_plan
from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Study
from kvsift_lab.eval.tasks import make_sample, task_names
from kvsift_lab.numbers import table
from kvsift_lab.studies.recipes import AcceptanceRecipe, ExactRecipe

TEXTS = {"greedy": None, "temperature 1": Sampling(1.0, seed=11)}
PROSE = {"prose, greedy": None, "prose, temperature 1": Sampling(1.0, seed=7)}
PROSE_TOKENS, DRAFTS, SEEDS = 400, 4, (17, 18)
COUNTS = ("drafts_accepted", "drafts_wrong", "repeats_accepted", "repeated")


@contextmanager
def fixed_drafts(count: int, with_repeats: bool) -> Iterator[None]:
    """Draft so many tokens, whether they pay or not; where a text repeats itself, what followed instead, or none."""

    def choose(self: Pace, repeat: int, repeated: int, most: int) -> Amount:
        return Amount(0.0, repeated, True) if with_repeats and repeated else Amount(0.0, min(count, most))

    with patch.object(Pace, "choose", choose), patch.object(Measured, "decide", lambda *_: None):
        yield


def without_repeats() -> AbstractContextManager[Any]:
    """Drafts alone."""
    return patch.object(Repeats, "find", lambda *_: (0, []))


def without_end() -> AbstractContextManager[Any]:
    """Answers that go on to their last token."""
    ends = property(lambda settings: frozenset(), lambda settings, own: vars(settings).update(ends=own))
    return patch.object(GenerationSettings, "ends", ends, create=True)


def document_of(llm: LLM, ids: list[int]) -> Document:
    return Document(llm, ids, lambda question: ids, parse_plan("dense"))


def checked(answers: list[Answer], expected: list[list[int]], plan: str) -> list[Answer]:
    """Return answers that are those of dense decoding."""
    assert [answer.token_ids for answer in answers] == expected, f"{plan} is not exact"
    return answers


class ExactBench(Study):
    """Times of exact and dense decoding in turns."""

    kind = "exact"
    recipe: ExactRecipe

    def run(self) -> Iterator[dict[str, Any]]:
        for task, answer in self._tasks().items():
            expected = [one.token_ids for one in answer("dense", False)]
            accepted = dict[str, float | None]()
            for plan in self.recipe.plans:
                with fixed_drafts(DRAFTS, with_repeats=False):
                    answers = checked(answer(plan, True), expected, plan) if plan != "dense" else []
                right, wrong = (sum(each.exact[key] for each in answers if each.exact) for key in COUNTS[:2])
                accepted[plan] = right / (right + wrong) if answers else None
            dense, times = list[float](), defaultdict[str, list[float]](list)
            drafted, last = defaultdict[str, list[float]](list), dict[str, Any]()
            for _ in range(self.recipe.rounds):
                dense.append(seconds(answer("dense", False)))
                for plan in self.recipe.plans:
                    answers = checked(answer(plan, True), expected, plan)
                    times[plan].append(seconds(answers))
                    last[plan] = [each.exact for each in answers]
                    with without_repeats():
                        drafted[plan].append(seconds(answer(plan, True)))
            for plan in self.recipe.plans:
                yield {
                    "task": task, "plan": plan, "tokens": sum(map(len, expected)), "accepted": accepted[plan],
                    "speedup": median(one / exact for one, exact in zip(dense, times[plan])),
                    "speedup_without_repeats": median(one / exact for one, exact in zip(dense, drafted[plan])),
                    "seconds": times[plan], "seconds_without_repeats": drafted[plan], "dense_seconds": dense,
                    "last": last[plan],
                }  # fmt: skip

    def _tasks(self) -> dict[str, Callable[[str, bool], list[Answer]]]:
        """Answers under a plan, exact or not, by task."""
        llm = LLM(probe_every=0)
        llm.load()
        text = make_document(self.recipe.tokens)
        ids = llm.tokenizer(text)["input_ids"][: self.recipe.tokens]
        prompt = [*ids, *llm.tokenizer(" The", add_special_tokens=False)["input_ids"]]
        prose, asked = document_of(llm, ids), llm.read(text, plan="dense")

        def continued(sampling: Sampling | None) -> Callable[[str, bool], list[Answer]]:
            def run(plan: str, exact: bool) -> list[Answer]:
                with without_end():
                    options: dict[str, Any] = {"max_new_tokens": self.recipe.new, "sampling": sampling}
                    return [prose.go_on(prompt, plan=plan, exact=exact, **options)]

            return run

        def questions(plan: str, exact: bool) -> list[Answer]:
            return [asked.ask(question, plan=plan, exact=exact) for _, _, question in FACTS]

        return {**{f"prose, {name}": continued(sampling) for name, sampling in TEXTS.items()}, "facts": questions}

    def closing(self, result: dict[str, Any]) -> str:
        return exact_table(result)


def seconds(answers: list[Answer]) -> float:
    """Per token after the first of each answer."""
    gaps = [gap for answer in answers for gap in answer.itl_s]
    return sum(gaps) / len(gaps)


def exact_table(result: dict[str, Any]) -> str:
    """Return accepted drafts and the speed of exact decoding over dense decoding, by task and plan."""
    rows = []
    for row in result["points"]:
        passes = sum(sum(report["verified"].values()) for report in row["last"])
        drafts = ["none", ""] if row["accepted"] is None else [f"`{row['plan']}`", f"{row['accepted']:.3f}"]
        speeds = [f"{row[key]:.2f}x" for key in ("speedup", "speedup_without_repeats")]
        rows.append([row["task"], *drafts, *speeds, f"{row['tokens'] / max(passes, 1):.1f}"])
    return table(["text", "drafts by", "accepted", "speed-up", "without repeats", "tokens a pass"], rows)


class AcceptanceBench(Study):
    """Counts of drafts, by task and plan."""

    kind = "exact-acceptance"
    recipe: AcceptanceRecipe

    def __init__(self, recipe: AcceptanceRecipe) -> None:
        super().__init__(recipe)
        on_gpu = recipe.device != "cpu"
        self._llm = LLM(device=recipe.device, dtype=recipe.dtype, probe_every=0, deterministic=on_gpu)
        self._llm.load()

    def environment(self) -> dict[str, Any]:
        return machine.host_environment() if self._llm.device.type == "cpu" else machine.gpu_environment(None)

    def run(self) -> Iterator[dict[str, Any]]:
        for length in self.recipe.lengths:
            budget = int(self.recipe.share * length)
            for task, cases in groupby(self._cases(length), lambda case: case[0]):
                counts: dict[str, Counter[str]] = defaultdict(Counter)
                for _, document, asked in cases:
                    for prompt, options in asked:
                        self._count(counts, document, prompt, options, budget, task in PROSE)
                for plan, sums in counts.items():
                    yield {"length": length, "task": task, "plan": plan, **sums}

    def _count(
        self, counts: dict[str, Counter[str]], document: Document, prompt: list[int], options: Any, budget: int,
        is_endless: bool,
    ) -> None:  # fmt: skip
        end = without_end() if is_endless else nullcontext()
        with fixed_drafts(self.recipe.drafts, with_repeats=True), end:
            expected = [document.go_on(prompt, plan="dense", **options).token_ids]
            for plan in self.recipe.plans:
                spec = f"{plan}:budget={budget}:dense_layers=none"
                [answer] = checked([document.go_on(prompt, plan=spec, exact=True, **options)], expected, spec)
                assert answer.exact is not None
                found = {key: answer.exact[key] for key in COUNTS}
                counts[plan].update({"tokens": len(answer.token_ids), **found})

    def _cases(self, length: int) -> Iterator[tuple[str, Document, list[tuple[list[int], dict[str, Any]]]]]:
        """Task, document, and the whole prompts after it with their options."""
        llm, tasks = self._llm, self.recipe.tasks
        encode = lambda text: llm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # noqa: E731
        for task, seed in product(task_names([name for name in tasks if name != "prose"]), SEEDS):
            sample = make_sample(task, length, seed, encode, 2, [llm.tokenizer.bos_token_id])
            ids = list(sample.context_ids)
            asked = [
                ([*ids, *encode(each.tail)], {"max_new_tokens": each.max_new_tokens, "stop": each.stop})
                for each in sample.questions
            ]
            yield task, document_of(llm, ids), asked
        ids = llm.tokenizer(make_document(length))["input_ids"][:length]
        for name, sampling in PROSE.items() if "prose" in tasks else ():
            options = {"max_new_tokens": PROSE_TOKENS, "sampling": sampling}
            yield name, document_of(llm, ids), [([*ids, *encode(" The")], options)]

    def closing(self, result: dict[str, Any]) -> str:
        return acceptance_table(result)


def acceptance_table(result: dict[str, Any]) -> str:
    """Return the shares of drafts that were accepted, by length, text and plan; RULER's tasks together."""
    known = Counter[tuple[str, str, str, str]]()
    for case in result["points"]:
        is_own = case["task"] in ("needle", "facts") or case["task"].startswith("prose")
        length = f"{case['length']:,}" + (", float32" if case.get("dtype") == "float32" else "")
        for key, count in case.items():
            if isinstance(count, int):
                known[length, case["task"] if is_own else "RULER, 13 tasks", case["plan"], key] += count
    plans, rows = list(dict.fromkeys(case["plan"] for case in result["points"])), []
    for where in dict.fromkeys(key[:2] for key in known):
        total = {key: known[*where, plans[0], key] for key in ("tokens", "repeated", "repeats_accepted")}
        shares = []
        for plan in plans:
            right, wrong = (known[*where, plan, key] for key in COUNTS[:2])
            shares.append(f"{right / (right + wrong):.3f} of {right + wrong}" if right + wrong else "")
        repeated = total["repeated"]
        repeats = f"{total['repeats_accepted'] / repeated:.2f} of {repeated}" if repeated else ""
        rows.append([*where, str(total["tokens"]), *shares, repeats])
    return table(["tokens", "text", "answers", *(f"`{plan}`" for plan in plans), "repeats"], rows)
