"""Answers of every plan to the questions of a context, which is prefilled once for all plans that can share it."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp
from typing import Any

import torch

from kvsift.api.llm import LLM, Document
from kvsift.engine.prefill_sharing import prefill_key
from kvsift.methods.base import Phase
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan
from kvsift.threads import use as use_threads
from kvsift.tokenization.prompt import answer_text
from kvsift_lab.eval.contexts import Contexts
from kvsift_lab.eval.fidelity import fidelity, predictions
from kvsift_lab.eval.plan_rows import PlanRow
from kvsift_lab.eval.recipe import Done, EvalRecipe, Job, Result
from kvsift_lab.eval.scorers import score
from kvsift_lab.eval.tasks import Question, Sample
from kvsift_lab.numbers import digits


class Evaluator:
    """Evaluator of every plan of a recipe, with one model.

    Args:
        recipe: the recipe.
        threads: of torch and the compiled core; None: as many as other processes leave free, as in ``kvsift ask``.
    """

    def __init__(self, recipe: EvalRecipe, threads: int | None) -> None:
        use_threads(threads)
        self.recipe = recipe
        how: dict[str, Any] = {"device": recipe.device, "dtype": recipe.dtype, "placement": recipe.placement}
        self.llm = LLM(recipe.model, "dense", dense_below=0, **how)  # the plan is evaluated at every length
        self.contexts = Contexts(recipe, self.llm.tokenizer)
        self._dense: tuple[Sample, torch.Tensor] | None = None  # predictions of the targets of the latest sample

    def results(self, job: Job, done: Done) -> Iterator[Result]:
        """Yield the missing results of a context, one per row and question.

        Raises:
            InputError: for a context that cannot be made, or is too long.
        """
        sample = self.contexts.sample(job)
        document = self._document(sample)
        notes = {"notes": list(sample.notes)} if sample.notes else {}
        count = 1 if sample.targets else len(sample.questions)
        for row in sorted(self.recipe.rows, key=lambda row: prefill_key(parse_plan(row.plan))):  # stable
            missing = [index for index in range(count) if (row.plan, index) not in done]
            # a turn follows the answers before it, which are generated again if one is missing
            questions = range(max(missing) + 1) if missing and sample.in_turn else missing
            turns: list[int] = []
            for index in questions:
                if sample.targets:
                    result = self._predict(document, sample, row)
                else:
                    result = self._answer(document, sample, row, sample.questions[index], turns)
                if index in missing:
                    key = {**job._asdict(), "question": index, "questions": count, "setup": self.recipe.setup}
                    yield {**key, "plan": row.plan, "budget": row.budget, **notes, **result}

    def _document(self, sample: Sample) -> Document:
        if self.llm.tokenizer.chat_template and not sample.targets:
            return self.llm.read(sample.context, plan="dense")
        ids = list(sample.context_ids)
        ids = ids[:-1] if sample.targets else ids  # the plan decodes the last token to predict the first target
        return Document(self.llm, ids, lambda tail: ids + self.contexts.encode(tail), self.llm.plan)

    def _answer(self, document: Document, sample: Sample, row: PlanRow, question: Question, turns: list[int]) -> Result:
        """Answer one question; ``turns`` holds the tokens of the conversation so far and is extended in place.

        A chat model answers in sentences, so a short answer must be in its text and not the whole first line.
        """
        chat = bool(self.llm.tokenizer.chat_template)
        scorer = "contains" if chat and question.scorer == "exact" else question.scorer
        ids = turns + self.contexts.encode(question.tail) if turns else self._prompt(document, sample, question, row)
        self.llm.check([ids], question.max_new_tokens, row.plan)
        document = self._document_for(document, ids, row)
        answer = document.go_on(
            ids,
            plan=row.plan,
            max_new_tokens=question.max_new_tokens,
            stop=None if chat else question.stop,
            question_phase=self.recipe.question_phase,
        )
        if sample.in_turn:
            turns[:] = ids + self.contexts.encode(answer_text(answer.text.strip()))
        return {
            "depth": round(question.depth, 4),
            "asked": question.text,
            "expected": question.answer,
            "references": list(question.references),
            "scorer": scorer,
            "answer": answer.text.strip(),
            "score": score(scorer, answer.text, question.references),
            **_counters(answer.stats, document),
            **{key: digits(getattr(answer, key), 6) for key in ("ttft_s", "tpot_s", "kv_bytes", "peak_memory_bytes")},
            "path": answer.path,
        }

    def _prompt(self, document: Document, sample: Sample, question: Question, row: PlanRow) -> list[int]:
        """Return a whole prompt, in the model's chat format if it has one."""
        if not self.llm.tokenizer.chat_template:
            return [*sample.context_ids, *self.contexts.encode(question.tail)]
        ids = document.check(question.text, question.max_new_tokens, row.plan)
        return ids + (self.contexts.encode(question.answer_prefix) if question.answer_prefix else [])

    def _document_for(self, document: Document, ids: list[int], row: PlanRow) -> Document:
        """Return the document, or the whole prompt as one if the method learns from the prompt's last queries."""
        decode = parse_plan(row.plan).decode
        if self.recipe.setup != "whole_prompt" or decode is None or not decode.method.traits.wants_queries:
            return document
        return Document(self.llm, ids[:-1], lambda tail: ids, self.llm.plan)

    def _predict(self, document: Document, sample: Sample, row: PlanRow) -> Result:
        """Return the perplexity of the targets under the plan, and how far its predictions are from those of dense
        decoding, which are made once per context."""
        targets, last = sample.targets, sample.context_ids[-1]
        if self._dense is None or self._dense[0] is not sample:
            self._dense = sample, predictions(self.llm, document, last, targets, Plan())[0]
        predicted, stats = predictions(self.llm, document, last, targets, parse_plan(row.plan))
        found = fidelity(predicted, self._dense[1], targets)
        means = {"score": exp(-found.nll), "nll": found.nll, "kl": found.kl, "agreement": found.agreement}
        return {"depth": 1.0, "scorer": "perplexity", **digits(means, 6), **_counters(stats, document)}


def _counters(stats: dict[str, Any], document: Document) -> Result:
    """Return the counters of decode: over all layers, over the sparse layers, and of each layer."""
    decode = stats["phases"]["decode"]
    layers = [row for row in stats["layers"] if row["phase"] == "decode"]
    return {
        **{key: digits(decode[key], 6) for key in ("visible_tokens", "density", "recall", "recovery")},
        "sparse_layer_visible_tokens": _sparse_visible(stats["layers"], "decode"),
        "prefill_density": digits(document.read_stats["phases"]["prefill"]["density"], 6),
        "prefill_visible_tokens": _sparse_visible(document.read_stats["layers"], "prefill"),
        "layers": [[row["layer"], *(digits(row[key], 6) for key in ("visible_tokens", "recall", "recovery"))]
                   for row in layers],
        "read_s": digits(document.read_s, 6),
        **({"guard": stats["guard"]} if stats["guard"] else {}),
    }  # fmt: skip


def _sparse_visible(layers: list[dict[str, Any]], phase: Phase) -> float | None:
    """Return the visible tokens per query in the sparse layers, which the budget limits."""
    sparse = [row["visible_tokens"] for row in layers if row["phase"] == phase and row["sparse_queries"]]
    return digits(sum(sparse) / len(sparse), 6) if sparse else None
