"""Recall of an index built from a prompt, against exact search, while the model generates.

    python -m kvsift_lab.studies.generation_recall results/generation-recall-cpu.json [TOKENS]

A 32K-token document of the facts task is prefilled; then the embedded model generates 2,000 tokens at temperature 1, so
that they do not repeat, under RetrievalAttention at 640 + 100 visible tokens in every layer. At every fourth step each
layer's answer is compared with an exact search for the same queries. What the index serves counts: steps that were
audited are answered by a scan and exact; "index" leaves them out.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.engine.llm import LLM
from kvsift.engine.prompt import prompt
from kvsift.engine.provenance import versions_and_machine
from kvsift.engine.sampling import Sampling
from kvsift.indexes.flat import exact_search
from kvsift.methods.indexed_keys import IndexedKeys
from kvsift.methods.retrieval_attention import RetrievalAttention
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.types import Candidates, KVReader, LayerShape
from kvsift_lab.eval.tasks import make_sample

LENGTH, EVERY, STRETCH, SEED = 32768, 4, 250, 700000
ROWS: dict[str, dict[str, Any]] = {
    "auto": {},
    "graph": {"index": "graph"},
    "graph, never audited": {"index": "graph", "audit": 0},
}


class RecordedStep(NamedTuple):
    token: int  # how many were generated before
    layer: int
    found: float  # share of the 100 keys of an exact search
    heaviest: float  # of its ten best
    audited: bool


@dataclass(frozen=True)
class WatchedDecode(RetrievalAttention):
    """Reports what its answers lack."""

    report: Callable[[RecordedStep], None] = print
    prompt: int = 0

    def _search(
        self, state: IndexedKeys, shape: LayerShape, queries: Tensor, candidates: Candidates, k: int, reader: KVReader
    ) -> tuple[Tensor, Tensor]:
        audits = len(state.audits.log)
        ids, scores = super()._search(state, shape, queries, candidates, k, reader)
        token = reader.length - self.prompt
        if token % EVERY == 0:
            exact, _ = exact_search(queries, reader.keys(candidates.first, candidates.stop), k)
            hits = (exact.unsqueeze(2) == ids.unsqueeze(1)).any(2).float()
            served = float(hits.mean()), float(hits[:, :10].mean())
            self.report(RecordedStep(token, shape.layer, *served, len(state.audits.log) > audits))
        return ids, scores


class EndlessAnswers(LLM):
    """An engine that generates beyond the end of an answer."""

    def _end_ids(self) -> frozenset[int]:
        return frozenset()


def stretches(steps: list[RecordedStep]) -> list[dict[str, float]]:
    """Return means over stretches of tokens: recall as served, of the index alone, and the share of audited steps."""
    groups: dict[int, list[RecordedStep]] = defaultdict(list)
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


def main() -> None:
    out, tokens = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    llm = EndlessAnswers(None, "dense", placement="host")
    encode = lambda text: llm.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    sample = make_sample("facts", LENGTH, SEED, encode, 8, prefix=(llm.tokenizer.bos_token_id,))
    text, rows = prompt(sample.context, sample.questions[0].text), []
    length = len(llm.tokenizer(text)["input_ids"])
    for name, settings in ROWS.items():
        steps: list[RecordedStep] = []
        method = WatchedDecode(**settings, report=steps.append, prompt=length)
        plan = Plan(decode=Rule(method, Budget(tokens=740, sinks=128, window=512, dense_layers=())))
        answer = llm.generate(text, plan=plan, max_new_tokens=tokens, sampling=Sampling(temperature=1.0, seed=SEED))
        rows.append({"name": name, "tokens": len(answer.token_ids), "stretches": stretches(steps)})
        print(json.dumps(rows[-1]), file=sys.stderr)
    recipe = {"length": LENGTH, "tokens": tokens, "seed": SEED, "every": EVERY, "threads": torch.get_num_threads()}
    head = {"kind": "generation-recall", "recipe": recipe, **versions_and_machine(llm.device), "rows": rows}
    out.write_text(json.dumps(head, indent=1) + "\n")


if __name__ == "__main__":
    main()
