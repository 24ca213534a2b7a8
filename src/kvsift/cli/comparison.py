"""Answers and their numbers side by side, a column per plan."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsift.cli.numbers_table import print_columns
from kvsift.cli.printing import cell, console, counted
from kvsift.errors import NothingSkipped

if TYPE_CHECKING:
    from kvsift.api.answer import Answer
    from kvsift.api.llm import LLM, Document
    from kvsift.methods.base import Phase
    from kvsift.plan.plan import Plan

PHASES: tuple[Phase, ...] = ("prefill", "decode")  # plan.plan has them, and imports torch


class Reading(NamedTuple):
    """Time and density of the prefill of a document."""

    seconds: float = 0.0
    density: float | None = None  # of prefill


NOISE = 1.05  # a ratio of times that is no difference


class Column(NamedTuple):
    """The answers under one plan."""

    plan: Plan
    answers: Sequence[Answer]
    read: Reading

    def summary(self) -> dict[str, Any]:
        """Return the numbers, for JSON and tables: TTFT of the first answer with the document, means, sums of bytes."""
        answers, read = self.answers, self.read
        itl = [gap for answer in answers for gap in answer.itl_s]
        proposed = Counter[str]()  # and accepted tokens, of exact decoding
        for answer in answers:
            proposed.update({name: count for name, count in (answer.exact or {}).items() if type(count) is int})
        return {
            "plan": answers[0].plan,
            "path": answers[0].path,
            "host": answers[0].host,
            "index": answers[0].index,
            "dense_below": answers[0].dense_below,
            "prompt_tokens": max(answer.prompt_tokens for answer in answers),
            "ttft_s": read.seconds + answers[0].ttft_s,
            "read_s": read.seconds,
            "read_density": read.density,
            "ttft_cached_s": sum(answer.ttft_s - answer.build_s for answer in answers) / len(answers),
            "build_s": sum(answer.build_s for answer in answers),
            "tpot_s": sum(itl) / len(itl) if itl else None,
            "visible_tokens": _mean(answers, "visible_tokens"),
            "density": _mean(answers, "density"),
            **_sparse_layers(answers),
            "generated_tokens": sum(len(answer.token_ids) for answer in answers),
            "finish_reasons": dict(Counter(answer.finish_reason for answer in answers)),
            "kv_bytes_read": sum(answer.decode("kv_bytes_read") for answer in answers),
            "kv_bytes_dense": sum(answer.decode("kv_bytes_dense") for answer in answers),
            "recall": _mean(answers, "recall"),
            "recovery": _mean(answers, "recovery"),
            "exact": dict(+proposed),  # what is above 0
            "estimated_share": _mean(answers, "estimated_share"),
            "select_s": sum(answer.decode("select_s") for answer in answers),
            "kv_bytes": max(answer.kv_bytes for answer in answers),
            "peak_memory_bytes": max(answer.peak_memory_bytes for answer in answers),
            "phases": [answer.stats["phases"] for answer in answers],
            "layers": answers[0].stats["layers"],
            "guard": [answer.guard for answer in answers],
        }

    @property
    def decodes_sparsely(self) -> bool:
        """Whether tokens are generated under a rule of the plan, and not densely or as dense decoding would."""
        rule = self.plan.decode
        is_exact = any(answer.exact is not None for answer in self.answers)
        return rule is not None and not rule.method.traits.unbounded and not is_exact

    def check_skipped(self, strict: bool) -> None:
        """Say, or warn where that is not to be expected, that the plan is sparse in a phase and skipped nothing there.

        Raises:
            NothingSkipped: under ``strict``.
        """
        for phase in PHASES:
            rule = self.plan.rule(phase)
            if phase == "decode" and any(answer.exact is not None for answer in self.answers):
                continue  # every token is attended densely, and drafts pause where they do not pay
            densities = [answer.stats["phases"][phase]["density"] for answer in self.answers]
            densities += [self.read.density] if phase == "prefill" else []
            ran = [density for density in densities if density is not None]
            if rule is None or rule.method.traits.unbounded or not ran or min(ran) < 1:
                continue
            message, dense = self.plan.skipped_nothing(phase), ""
            if phase == "decode" and (below := max(answer.dense_below for answer in self.answers)):
                dense = (
                    f"contexts below {below:,} tokens are decoded densely here; --dense-below 0 makes them sparse too."
                )
            if strict:
                raise NothingSkipped(f"{message} Moreover, {dense}" if dense else message)
            context = max(answer.prompt_tokens + len(answer.token_ids) for answer in self.answers)
            prompt, size = max(answer.prompt_tokens for answer in self.answers), rule.method.segment_size
            first = (prompt - 1) // size * size  # query of the last segment
            if rule.budget.limit(context) >= context:
                message = (
                    f"{rule} skipped nothing in {phase}: the {context:,} tokens of context are within its budget, so "
                    "it does what dense attention does."
                )
            elif phase == "prefill" and rule.budget.limit(first + 1) > first:
                message = (
                    f"{rule} skipped nothing in prefill: up to {size:,} queries share a selection, and no such segment "
                    f"of the {prompt:,} tokens of prompt begins beyond its budget, so it does what dense attention "
                    "does."
                )
            else:
                message = dense or f"WARNING: {message}"
            print(f"kvsift: {message}", file=sys.stderr)


def print_reading(llm: LLM, document: Document) -> None:
    """Print the size of the document, its prefill time and the model."""
    by = f"{llm.directory.name} on {llm.device} ({llm.precision})"
    read = f"read in {document.read_s:.1f} s"
    how = f"opened in {document.open_s:.1f} s, once {read}" if document.open_s else read
    console().print(cell(f"{document.num_tokens:,} tokens {how} by {by}\n"))


def print_answers(questions: Sequence[str], columns: Sequence[Column]) -> None:
    """Print questions and answers side by side, a column per plan."""
    texts = [
        [column.answers[0].plan, *((answer.text or "(nothing)") + cut_mark(answer) for answer in column.answers)]
        for column in columns
    ]
    print_columns(console(), ["question", *questions], texts, between_rows=True)


def print_slower(columns: Sequence[Column], to_stderr: bool) -> None:
    """Print which plans took longer for a token than dense decoding in the same run, a line each."""
    dense = next((column for column in columns if not column.decodes_sparsely), None)
    least = None if dense is None else dense.summary()["tpot_s"]
    if least is None:
        return
    for column in columns:
        numbers = column.summary()
        if not column.decodes_sparsely or numbers["density"] == 1 or (numbers["tpot_s"] or 0.0) <= NOISE * least:
            continue
        console(to_stderr).print(cell(
            f"At {numbers['prompt_tokens']:,} tokens this plan saves no time here: a token took "
            f"{1e3 * numbers['tpot_s']:.1f} ms under {numbers['plan']} and {1e3 * least:.1f} ms under dense. Plans pay "
            "in longer contexts; --dense-below N decodes those below N tokens densely."
        ), soft_wrap=True)  # fmt: skip


def print_guard(columns: Sequence[Column], to_stderr: bool) -> None:
    """Print where budgets doubled, a line each time."""
    several = sum(len(column.answers) for column in columns) > 1
    for column in columns:
        for number, answer in enumerate(column.answers, 1):
            name = f"answer {number} under {answer.plan}: " if several else ""
            for event in answer.guard:
                low = f"recovery {event['recovery']:.2f} < {event['min_recovery']:g} at token {event['token']}"
                console(to_stderr).print(cell(f"{name}{low}: {event['from']} -> {event['to']}"), soft_wrap=True)


def cut_mark(answer: Answer) -> str:
    """Return the mark after the text of an answer that ``max_new_tokens`` has cut."""
    return f" [cut after {counted(len(answer.token_ids), 'token')}]" if answer.finish_reason == "length" else ""


def _mean(answers: Sequence[Answer], key: str) -> float | None:
    values = [value for answer in answers if (value := answer.decode(key)) is not None]
    return sum(values) / len(values) if values else None


def _sparse_layers(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return visible tokens and density of decode in sparse layers, and the number of those layers."""
    rows = [row for answer in answers for row in answer.stats["layers"] if row["phase"] == "decode"]
    sparse = [row for row in rows if row["sparse_queries"]]
    means = {
        key: sum(row[key] for row in sparse) / len(sparse) if sparse else None for key in ("visible_tokens", "density")
    }
    return {
        **{f"sparse_layer_{key}": value for key, value in means.items()},
        "num_layers": len({row["layer"] for row in rows}),
        "num_sparse_layers": len({row["layer"] for row in sparse}),
    }
