"""Exact match of many plans on the same contexts: the table that separates the methods.

Per context: prefill once for every way of prefilling that the plans have, densely or not; then every plan answers
every question from such a cache. The question's own tokens are decoded under the plan as well (``question_phase =
"decode"``), so a method cannot lean on a dense look at them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import active_children, get_context
from signal import SIG_IGN, SIGINT, signal
from typing import Any

from kvsift.engine.prompt import exact_match, question_text
from kvsift.errors import InputError
from kvsift.eval.recipe import Recipe
from kvsift.eval.tasks import make_sample
from kvsift.methods.base import Phase

MAX_NEW_TOKENS = 40


def run(
    recipe: Recipe, workers: int, on_job: Callable[[int, int], None], max_seconds: float | None = None
) -> dict[str, Any]:
    """Run a recipe, contexts in parallel; ``on_job`` is told (contexts done, contexts in all).

    After ``max_seconds`` contexts under way are dropped, and what is not done is listed as left out.

    Returns:
        A JSON document: recipe, versions, machine and one sample per question and cell.

    Raises:
        InputError: before anything runs for a model or device that cannot be used; later if a worker dies.
    """
    from kvsift.engine.llm import LLM

    LLM(recipe.model, "dense", device=recipe.device, dtype=recipe.dtype)
    jobs = recipe.jobs()
    samples: list[dict[str, Any]] = []
    left = list(jobs)
    threads = max(1, (os.cpu_count() or 1) // workers)
    others = active_children()
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_leave_interruptions_to_the_parent) as pool:
        try:
            running = {pool.submit(run_job, recipe, task, seed, threads): (task, seed) for task, seed in jobs}
            for done, future in enumerate(as_completed(running, max_seconds), 1):
                samples.extend(future.result())
                left.remove(running[future])
                on_job(done, len(jobs))
        except TimeoutError:
            _stop(pool, others)
        except BrokenProcessPool as error:  # the pool ends and joins its other workers itself
            raise InputError(
                f"a worker died, probably for lack of memory. {workers} ran at a time; give fewer --workers."
            ) from error
        except BaseException:  # an interruption too: do not wait for contexts nobody will look at
            _stop(pool, others)
            raise
    samples.sort(key=lambda s: (s["task"], s["seed"], s["plan"], s["question"]))
    left_out = [{"task": task, "seed": seed} for task, seed in left]
    return {"kind": "quality", "recipe": asdict(recipe), **provenance(recipe), "left_out": left_out, "samples": samples}


def _stop(pool: ProcessPoolExecutor, others: list[Any]) -> None:
    """End a pool whose workers are busy."""
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in [child for child in active_children() if child not in others]:
        worker.terminate()
        worker.join()


def _leave_interruptions_to_the_parent() -> None:
    signal(SIGINT, SIG_IGN)


def run_job(recipe: Recipe, task: str, seed: int, threads: int) -> list[dict[str, Any]]:
    """All plans on one context."""
    import torch

    from kvsift.engine.llm import LLM, Document

    torch.set_num_threads(threads)
    # what is judged is the plan, not when it pays: short contexts are sifted too
    llm = LLM(recipe.model, "dense", device=recipe.device, dtype=recipe.dtype, dense_below=0)

    def encode(text: str) -> list[int]:
        ids: list[int] = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    bos = llm.tokenizer.bos_token_id
    prefix = [] if bos is None else [bos]
    try:
        sample = make_sample(task, recipe.length, seed, encode, recipe.questions_per_context, prefix)
    except ValueError as error:
        raise InputError(f"task {task!r} cannot be made: {error}") from error
    ids = list(sample.context_ids)
    document = Document(llm, ids, lambda question: ids + encode(question_text(question)), llm.plan)
    results = []
    for spec, budget in recipe.rows():
        for index, question in enumerate(sample.questions):
            answer = document.ask(
                question.text, plan=spec, max_new_tokens=MAX_NEW_TOKENS, question_phase=recipe.question_phase
            )
            results.append(
                {
                    "task": task,
                    "seed": seed,
                    "question": index,
                    "depth": round(question.depth, 4),
                    "plan": spec,
                    "budget": budget,
                    "expected": question.answer,
                    "answer": answer.text,
                    "correct": exact_match(answer.text, question.answer),
                    **{key: answer.decode(key) for key in ("visible_tokens", "density", "recall", "recovery")},
                    "sparse_layer_visible_tokens": _sparse_visible(answer.stats["layers"], "decode"),
                    "prefill_visible_tokens": _sparse_visible(document.read_stats["layers"], "prefill"),
                }
            )
    return results


def provenance(recipe: Recipe) -> dict[str, Any]:
    """Where and with what numbers were made."""
    from kvsift.engine.provenance import versions_and_machine
    from kvsift.models.transformers_load import choose_device

    return versions_and_machine(choose_device(recipe.device))


def _sparse_visible(layers: list[dict[str, Any]], phase: Phase) -> float | None:
    """Visible tokens per query in the layers that were not dense: what the budget is about."""
    sparse = [row for row in layers if row["phase"] == phase and row["sparse_queries"]]
    return sum(row["visible_tokens"] for row in sparse) / len(sparse) if sparse else None
