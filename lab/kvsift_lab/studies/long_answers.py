"""Long answers of a chat model about real texts: where plans part from dense decoding, how much they repeat, how long
they get.

All prompts are answered at once, greedily, each as if it were alone (``deterministic``), under dense attention first.
The shares of repeats are of sixteen tokens in a row that the answer has had before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

from kvsift import LLM
from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Study
from kvsift_lab.eval.loaders.reading import leading
from kvsift_lab.numbers import grouped, table
from kvsift_lab.studies.recipes import LongAnswersRecipe

REQUEST = "\n\nContinue this text in the same style, at length."
RUN = 16  # tokens in a row


class LongAnswers(Study):
    """Answers of every plan, beside those of dense decoding."""

    kind = "long-answers"
    recipe: LongAnswersRecipe

    def __init__(self, recipe: LongAnswersRecipe) -> None:
        super().__init__(recipe)
        on_gpu = recipe.device != "cpu"
        # batch-invariant kernels need a GPU, and on a CPU prompts do not depend on each other
        self._llm = LLM(recipe.model, "dense", device=recipe.device, dense_below=0, deterministic=on_gpu)

    def environment(self) -> dict[str, Any]:
        return machine.host_environment() if self._llm.device.type == "cpu" else machine.gpu_environment(None)

    def run(self) -> Iterator[dict[str, Any]]:
        names, prompts = zip(*self._prompts())
        dense: list[list[int]] = []
        plans = [(plan, False) for plan in ("dense", *self.recipe.plans)]
        for plan, exact in [*plans, (self.recipe.exact, True)]:
            answers = self._llm.generate(list(prompts), plan=plan, exact=exact, max_new_tokens=self.recipe.new)
            dense = dense or [answer.token_ids for answer in answers]
            for name, answer, expected in zip(names, answers, dense):
                length = len(answer.token_ids)
                yield {
                    "plan": f"{plan}, exact=True" if exact else plan, "text": name,
                    "prompt_tokens": answer.prompt_tokens, "tokens": length, "ended": length < self.recipe.new,
                    "parts_at": parts_at(answer.token_ids, expected), "repeated": repeated(answer.token_ids),
                    "path": answer.path, "token_ids": answer.token_ids,
                }  # fmt: skip

    def _prompts(self) -> Iterator[tuple[str, str]]:
        tokenizer = self._llm.tokenizer
        encode = lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # noqa: E731
        for path in sorted(Path(self.recipe.texts).glob("*.txt"))[: self.recipe.prompts]:
            text = leading(path.read_text(encoding="utf-8"), self.recipe.tokens, encode)
            turns = [{"role": "user", "content": text + REQUEST}]
            yield path.stem, tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    def closing(self, result: dict[str, Any]) -> str:
        return long_answers_table(result)


def parts_at(tokens: list[int], dense: list[int]) -> int | None:
    """Return the first place where two answers differ; None if they are equal."""
    if tokens == dense:
        return None
    pairs = enumerate(zip(tokens, dense))
    return next((place for place, (one, other) in pairs if one != other), min(len(tokens), len(dense)))


def repeated(tokens: list[int]) -> float:
    """Return the share of runs of ``RUN`` tokens that the answer has had before."""
    runs = [tuple(tokens[start : start + RUN]) for start in range(len(tokens) - RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def long_answers_table(result: dict[str, Any]) -> str:
    """Return a row per plan: answers equal to dense, where the others part, lengths and repeats."""
    rows = []
    for plan, own in grouped(result["points"], "plan").items():
        parted = [point["parts_at"] for point in own if point["parts_at"] is not None]
        places = f"{median(parted):,.0f} ({min(parted):,} to {max(parted):,})" if parted else "-"
        lengths = [point["tokens"] for point in own]
        numbers = f"{fmean(lengths):,.0f}", f"{sum(point['ended'] for point in own)}"
        repeats = f"{100 * fmean(point['repeated'] for point in own):.0f} %"
        rows.append([plan, f"{len(own) - len(parted)} of {len(own)}", places, *numbers, repeats])
    heads = ["", "as dense", "parts at token, median (range)", "tokens, mean", "ended", "repeated"]
    return table(heads, rows)
