"""Which drafts of exact decoding are accepted, by task and length; every answer must be that of dense decoding.

    python -m kvsift_lab.studies.exact_acceptance [--lengths 4096 8192 16384 32768] [--out R.json]
    python -m kvsift_lab.studies.exact_acceptance --device cuda --plans sketch quest --out R.json

The embedded model reads each context once, and answers its questions, or continues prose without an end. Plans draft
four tokens a cycle with 5 % of the context. Where a text repeats itself, what followed is proposed instead, so that the
shares of drafts leave such stretches out.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvsift import LLM, Sampling
from kvsift.batching.exact.pace import Amount, Measured, Pace
from kvsift.cli.demo import make_document
from kvsift.engine.document import Document
from kvsift.engine.provenance import versions_and_machine
from kvsift.plan.syntax import parse_plan
from kvsift_lab.bench.machine import gpu_environment, host_environment
from kvsift_lab.eval.tasks import make_sample, task_names

TASKS = ("needle", "facts", "ruler", "prose")
SHARE, DRAFTS, NEW, SEEDS = 0.05, 4, 400, (17, 18)
PLANS = ("sketch", "quest", "verify")
PROSE = {"prose, greedy": None, "prose, temperature 1": Sampling(1.0, seed=7)}
KEYS = ("drafts_accepted", "drafts_wrong", "repeats_accepted", "repeated")


@contextmanager
def repeats_first() -> Iterator[None]:
    """Tokens that followed the same text, else four drafts, whether they pay or not."""

    def choose(self: Pace, repeat: int, repeated: int, most: int) -> Amount:
        return Amount(0.0, repeated, True) if repeated else Amount(0.0, min(DRAFTS, most))

    with patch.object(Pace, "choose", choose), patch.object(Measured, "decide", lambda *_: None):
        yield


class Texts:
    """What is decoded after contexts of one length."""

    def __init__(self, llm: LLM, tokens: int, tasks: Sequence[str]) -> None:
        self._llm, self._tokens, self._tasks = llm, tokens, tasks
        self._encode = lambda text: llm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def cases(self) -> Iterator[tuple[str, Document, list[tuple[list[int], dict[str, Any]]]]]:
        """Task, document, and the whole prompts after it with their options."""
        for task, seed in product(task_names([name for name in self._tasks if name != "prose"]), SEEDS):
            sample = make_sample(task, self._tokens, seed, self._encode, 2, [self._llm.tokenizer.bos_token_id])
            ids, asked = list(sample.context_ids), []
            for question in sample.questions:
                options = {"max_new_tokens": question.max_new_tokens, "stop": question.stop}
                asked.append(([*ids, *self._encode(question.tail)], options))
            yield task, self._document(ids), asked
        if "prose" not in self._tasks:
            return
        ids = self._llm.tokenizer(make_document(self._tokens))["input_ids"][: self._tokens]
        document = self._document(ids)
        for name, sampling in PROSE.items():
            prose: dict[str, Any] = {"max_new_tokens": NEW, "sampling": sampling}
            yield name, document, [([*ids, *self._encode(" The")], prose)]

    def _document(self, ids: list[int]) -> Document:
        return Document(self._llm, ids, lambda question: ids, parse_plan("dense"))


def measure(llm: LLM, tokens: int, tasks: Sequence[str], plans: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Counts of each task under each plan."""
    budget = int(SHARE * tokens)
    for task, cases in groupby(Texts(llm, tokens, tasks).cases(), lambda case: case[0]):
        ends = frozenset() if task in PROSE else llm._end_ids()
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for _, document, asked in cases:
            for prompt, options in asked:
                with patch.object(LLM, "_end_ids", lambda runner, ends=ends: ends), repeats_first():
                    dense = document.go_on(prompt, plan="dense", **options)
                    for plan in plans:
                        spec = f"{plan}:budget={budget}:dense_layers=none"
                        answer = document.go_on(prompt, plan=spec, exact=True, **options)
                        assert answer.token_ids == dense.token_ids, f"{task}, {tokens} tokens, {spec}: not exact"
                        assert answer.exact is not None
                        counts = {key: answer.exact[key] for key in KEYS}
                        found[plan].update({"tokens": len(answer.token_ids), **counts})
        for plan, sums in found.items():
            yield {"length": tokens, "task": task, "plan": plan, **sums}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--plans", nargs="+", default=PLANS, help="without a budget")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu", help="cuda: in captured steps")
    parser.add_argument("--out", type=Path, default=Path("results/exact-acceptance-cpu.json"))
    options = parser.parse_args()
    on_gpu = options.device != "cpu"
    llm = LLM(device=options.device, dtype=options.dtype, probe_every=0, deterministic=on_gpu)
    llm.load()
    result = {
        "kind": "exact acceptance", **versions_and_machine(llm.device),
        **(gpu_environment(None) if on_gpu else host_environment()), "dtype": options.dtype, "share": SHARE,
        "drafts": DRAFTS, "cases": [],
    }  # fmt: skip
    for tokens in options.lengths:
        for case in measure(llm, tokens, options.tasks, options.plans):
            tried = case["drafts_accepted"] + case["drafts_wrong"]
            print(case, f"{case['drafts_accepted'] / tried:.3f}" if tried else "-", flush=True)
            result["cases"].append(case)
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
