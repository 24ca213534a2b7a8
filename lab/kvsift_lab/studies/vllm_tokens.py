"""Tokens of vLLM under a plan, and how those of two engines differ: over one GPU and over two, or stock and ours.

    kvsift bench vllm-tokens --plan quest:budget=512 --out one
    kvsift bench vllm-tokens --plan quest:budget=512 --tp 2 --against one

Weights are random and the same for any number of ranks. Each prompt is answered under the plan alone, then all of them
in one batch, under the plan and densely in turns. Ranks add up in another order, so a token may differ where the two
best are as likely as each other: ``--against`` tells such ties from the rest, and fails if there is a rest.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvsift.errors import InputError
from kvsift_lab.bench import machine, stored
from kvsift_lab.bench.bench import Study
from kvsift_lab.studies.recipes import VllmTokensRecipe
from kvsift_lab.studies.vllm_engine import LLAMA_3_8B, engine

SHAPE = LLAMA_3_8B | {"num_hidden_layers": 8, "vocab_size": 32000}
NEW, TOP = 64, 5  # tokens of an answer; most likely ones that are kept of each
TIE = 0.02  # most nats between the two best tokens of a tie

Answer = dict[str, Any]  # prompt_length, plan, tokens, top: TOP pairs of token and log probability for each token


class VllmTokens(Study):
    """A point for each answer."""

    kind = "vllm-tokens"
    recipe: VllmTokensRecipe

    def environment(self) -> dict[str, Any]:
        return machine.environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def run(self) -> Iterator[Answer]:
        other, differ = self.recipe.against and stored.load(Path(self.recipe.against))["points"], 0
        for number, answer in enumerate(self._answers()):
            # stock answers are dense, ours only where a request says so
            if other and other[number]["plan"] == answer["plan"]:
                is_equal, line = compare(other[number], answer)
                answer["compared"] = line
                differ += not is_equal
            yield answer
        if differ:
            raise InputError(f"{differ} answers differ from those of {self.recipe.against} by more than a tie.")

    def _answers(self) -> Iterator[Answer]:
        """Yield the answers of one engine."""
        from vllm import SamplingParams

        recipe, lengths = self.recipe, self.recipe.lengths
        shape, longest, is_ours = SHAPE | json.loads(recipe.shape), max(lengths) + NEW, recipe.plan != "stock"
        llm = engine(
            shape, recipe.plan, ranks=recipe.tp, tokens=16 * -(-longest // 16) * (len(lengths) + 1), plans=("dense",),
            dtype=recipe.dtype, max_model_len=longest, max_num_batched_tokens=2048,
        )  # fmt: skip
        rng = random.Random(3)
        prompts = [[rng.randrange(shape["vocab_size"]) for _ in range(length)] for length in lengths]
        plan = recipe.plan if is_ours else "dense"
        mixed = [(prompt, "dense" if row % 2 else plan) for row, prompt in enumerate(prompts)]
        how = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True, "detokenize": False, "logprobs": TOP}
        for rows in [*([(prompt, plan)] for prompt in prompts), mixed]:
            extra = [{"kvsift": "dense"} if is_ours and own == "dense" else None for _, own in rows]
            params = [SamplingParams(**how, extra_args=each) for each in extra]
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in rows], params, use_tqdm=False)
            for (prompt, own), output in zip(rows, outputs):
                [found] = output.outputs
                yield {
                    "prompt_length": len(prompt), "plan": own, "together": len(rows) > 1,
                    "tokens": list(found.token_ids), "top": [best(each) for each in found.logprobs],
                }  # fmt: skip

    def text(self, point: Answer, result: dict[str, Any]) -> str:
        return str(point.get("compared") or f"{point['prompt_length']} tokens, {point['plan']}")


def best(logprobs: Any) -> list[tuple[int, float]]:
    """The most likely tokens of a step, the first one first."""
    pairs = [(token, each.logprob) for token, each in logprobs.items()]
    return sorted(pairs, key=lambda pair: -pair[1])[:TOP]


def compare(first: Answer, second: Answer) -> tuple[bool, str]:
    """Return whether two answers are equal up to a tie, and a line about them."""
    row = f"{first['prompt_length']:>6} tokens, {first['plan']}{', in a batch' if first['together'] else ''}: "
    pairs = list(zip(first["tokens"], second["tokens"]))
    place = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
    tops = list(zip(first["top"], second["top"]))
    apart = max((abs(one[0][1] - other[0][1]) for one, other in tops[:place]), default=0.0)
    until = f"log probabilities of the {place} tokens before at most {apart:.4f} apart"
    if place == len(pairs):
        return True, f"{row}equal; {until}"
    gaps = [each[0][1] - each[1][1] for each in tops[place]]
    # a tie has the same two tokens on top of both
    is_tie = max(gaps) <= TIE and {each[0] for each in tops[place][0][:2]} == {each[0] for each in tops[place][1][:2]}
    kind = "a tie" if is_tie else "no tie"
    return (
        is_tie,
        f"{row}differ from token {place} on, {kind} (two best {gaps[0]:.4f} and {gaps[1]:.4f} apart); {until}",
    )
