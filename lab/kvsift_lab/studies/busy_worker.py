"""The process of a setting of ``busy.py``: it measures for each line of stdin. It may import torch before kvsift.

    python -m kvsift_lab.studies.busy_worker CONTEXT [torch-first]

A line is {"tokens": per plan, "questions": of the job, 0 for none}.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

PLANS = ("quest:budget=256", "dense")
SENTENCE = "The harbour master of the northern port counted ninety-seven crates before noon. "
QUESTION = "How many crates did the harbour master count?"


def main(context: int) -> None:
    from kvsift import LLM, threads
    from kvsift.models.hf.generation_config import GenerationSettings

    class Endless(LLM):
        """An engine that generates beyond the end of an answer."""

        @property
        def generation_settings(self) -> GenerationSettings:
            settings = super().generation_settings
            settings.ends = frozenset()
            return settings

    how: dict[str, Any] = {"probe_every": 0, "dense_below": 0}
    llm, endless = LLM(**how), Endless(**how)
    ids = llm.tokenizer(SENTENCE * (context // 8), verbose=False)["input_ids"][:context]
    text = llm.tokenizer.decode(ids, skip_special_tokens=True)
    document = endless.read(text)

    def itl_s(plan: str, tokens: int) -> list[float]:
        ids = document.check(QUESTION, tokens, plan)
        return list(document.go_on(ids, plan=plan, max_new_tokens=tokens).itl_s)

    def job_s(questions: int) -> float:
        llm.load()
        started = time.perf_counter()
        read = llm.read(text)
        for plan in PLANS * questions:
            read.ask(QUESTION, plan=plan)
        return time.perf_counter() - started

    for plan in PLANS:
        itl_s(plan, 3)
    print(json.dumps(threads.report()), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        sample: dict[str, Any] = {"itl_s": {plan: itl_s(plan, request["tokens"] + 1) for plan in PLANS}}
        if request["questions"]:
            sample["job_s"] = job_s(request["questions"])
        print(json.dumps(sample), flush=True)


if __name__ == "__main__":
    if "torch-first" in sys.argv:
        import torch  # noqa: F401
    main(int(sys.argv[1]))
