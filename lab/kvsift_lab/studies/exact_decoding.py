"""Exact decoding beside dense decoding: equal tokens, accepted drafts, times in turns. Writes results/exact-cpu.json.

    python -m kvsift_lab.studies.exact_decoding [--tokens 32000] [--new 200] [--rounds 5] [--out results/exact-cpu.json]

A document of prose with facts in it is read once by the embedded model. Prose is continued after it, greedily and
sampled at temperature 1, without an end; and its six questions are answered. Each round takes dense decoding and every
plan in turns. Acceptance is that of drafts of four tokens without repeats, in a run of their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvsift import LLM, Sampling
from kvsift.batching.exact.decoder import ExactDecoder
from kvsift.batching.exact.pace import Amount, Measured, Pace
from kvsift.cli.demo import FACTS, make_document
from kvsift.engine.document import Document
from kvsift.engine.result import Answer
from kvsift.plan.syntax import parse_plan
from kvsift_lab.bench.machine import host_environment

PLANS = (
    "sketch:budget=512:dense_layers=none",
    "sketch:budget=1600:dense_layers=none",
    "quest:budget=1600:dense_layers=none",
    "verify:budget=1600:dense_layers=none",
    "dense",
)
DRAFTS = 4
TEXTS = {"greedy": None, "temperature 1": Sampling(1.0, seed=11)}


@contextmanager
def fixed_drafts() -> Iterator[None]:
    """Drafts of four tokens, whether they pay or not, and no repeats."""
    choose = patch.object(Pace, "choose", lambda self, repeat, repeated, most: Amount(0.0, min(DRAFTS, most)))
    with choose, patch.object(Measured, "decide", lambda *_: None):
        yield


@contextmanager
def without_repeats() -> Iterator[None]:
    """Drafts alone."""
    begin = ExactDecoder.__init__
    with patch.object(ExactDecoder, "__init__", lambda *given, **named: begin(*given, **named | {"repeats": False})):
        yield


def share_of(answers: list[Answer]) -> float:
    """The share of drafts that were accepted, of those after accepted ones."""
    reports = [answer.exact for answer in answers if answer.exact is not None]
    accepted, wrong = (sum(report[name] for report in reports) for name in ("drafts_accepted", "drafts_wrong"))
    return accepted / (accepted + wrong)


class ExactBench:
    """A document and what follows it.

    Args:
        tokens: of the document.
        new: tokens that continue it.
    """

    def __init__(self, tokens: int, new: int) -> None:
        self._new, self._llm = new, LLM(probe_every=0)
        self._llm.load()
        text = make_document(tokens)
        ids = self._llm.tokenizer(text)["input_ids"][:tokens]
        self._prompt = [*ids, *self._llm.tokenizer(" The", add_special_tokens=False)["input_ids"]]
        self._prose = Document(self._llm, ids, lambda question: ids, parse_plan("dense"))
        self._asked = self._llm.read(text, plan="dense")

    def tasks(self) -> dict[str, Callable[[str, bool], list[Answer]]]:
        """Answers under a plan, exact or not, by task."""

        def continued(sampling: Sampling | None) -> Callable[[str, bool], list[Answer]]:
            def run(plan: str, exact: bool) -> list[Answer]:
                with patch.object(type(self._llm), "_end_ids", lambda runner: frozenset()):
                    options: dict[str, Any] = {"max_new_tokens": self._new, "sampling": sampling}
                    return [self._prose.go_on(self._prompt, plan=plan, exact=exact, **options)]

            return run

        def questions(plan: str, exact: bool) -> list[Answer]:
            return [self._asked.ask(question, plan=plan, exact=exact) for _, _, question in FACTS]

        return {**{f"prose, {name}": continued(sampling) for name, sampling in TEXTS.items()}, "facts": questions}


def seconds(answers: list[Answer]) -> float:
    """Per token after the first of each answer."""
    gaps = [gap for answer in answers for gap in answer.itl_s]
    return sum(gaps) / len(gaps)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--out", type=Path, default=Path("results/exact-cpu.json"))
    options = parser.parse_args()
    bench, rows = ExactBench(options.tokens, options.new), list[dict[str, Any]]()
    for task, run in bench.tasks().items():
        expected = [answer.token_ids for answer in run("dense", False)]
        accepted: dict[str, float] = {}
        for plan in options.plans:
            if plan != "dense":
                with fixed_drafts():
                    answers = run(plan, True)
                accepted[plan] = share_of(answers)
                assert [answer.token_ids for answer in answers] == expected, f"{plan} is not exact"
        times: dict[str, list[float]] = {"": [], **{plan: [] for plan in options.plans}}
        drafted: dict[str, list[float]] = {plan: [] for plan in options.plans}
        reports: dict[str, Any] = {}
        for _ in range(options.rounds):
            times[""].append(seconds(run("dense", False)))
            for plan in options.plans:
                answers = run(plan, True)
                assert [answer.token_ids for answer in answers] == expected, f"{plan} is not exact"
                times[plan].append(seconds(answers))
                reports[plan] = [answer.exact for answer in answers]
                with without_repeats():
                    drafted[plan].append(seconds(run(plan, True)))
        for plan in options.plans:
            ratio, alone = (
                statistics.median(dense / exact for dense, exact in zip(times[""], samples))
                for samples in (times[plan], drafted[plan])
            )
            share = accepted.get(plan)
            rows.append(
                {"task": task, "plan": plan, "tokens": sum(map(len, expected)), "accepted": share, "speedup": ratio,
                 "speedup_without_repeats": alone, "seconds": times[plan], "seconds_without_repeats": drafted[plan],
                 "dense_seconds": times[""], "last": reports[plan]}
            )  # fmt: skip
            told = "-" if share is None else f"{share:.3f}"
            print(f"{task:22} {plan:40} accepted {told} {ratio:.2f}x, without repeats {alone:.2f}x", flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine = host_environment()
    result = {"commit": commit, "machine": machine, "context": options.tokens, "new": options.new, "rows": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
