"""Tokens of vLLM under a plan, and how those of two engines differ: over one GPU and over two, or stock and ours.

    python -m kvsift_lab.studies.vllm_tokens run one.json --plan quest:budget=512
    python -m kvsift_lab.studies.vllm_tokens run two.json --plan quest:budget=512 --tp 2
    python -m kvsift_lab.studies.vllm_tokens compare one.json two.json

Weights are random and the same for any number of ranks. Each prompt is answered under the plan alone, then all of them
in one batch, under the plan and densely in turns. Ranks add up in another order, so a token may differ where the two
best are as likely as each other: compare tells such ties from the rest, and ends with status 1 if there is a rest.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from kvsift_lab.studies.vllm_engine import LLAMA_3_8B, engine

SHAPE = LLAMA_3_8B | {"num_hidden_layers": 8, "vocab_size": 32000}
LENGTHS = "300,1100,3001,8192,20000"  # of prompts
NEW, TOP = 64, 5  # tokens of an answer; most likely ones that are kept of each
TIE = 0.02  # most nats between the two best tokens of a tie

Answer = dict[str, Any]  # prompt_length, plan, tokens, top: TOP pairs of token and log probability for each token


def run(options: argparse.Namespace) -> list[Answer]:
    """Return the answers of one engine."""
    from vllm import SamplingParams

    lengths = [int(length) for length in options.lengths.split(",")]
    shape, longest = SHAPE | json.loads(options.shape), max(lengths) + NEW
    llm = engine(
        shape, options.plan, ranks=options.tp, tokens=16 * -(-longest // 16) * (len(lengths) + 1), plans=("dense",),
        dtype=options.dtype, max_model_len=longest, max_num_batched_tokens=2048,
    )  # fmt: skip
    rng = random.Random(3)
    prompts = [[rng.randrange(shape["vocab_size"]) for _ in range(length)] for length in lengths]

    def answers(rows: list[tuple[list[int], str]]) -> list[Answer]:
        extra = [{"kvsift": "dense"} if options.plan and plan == "dense" else None for _, plan in rows]
        params = [
            SamplingParams(
                temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=TOP, extra_args=each
            )
            for each in extra
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in rows], params, use_tqdm=False)
        return [
            {
                "prompt_length": len(prompt), "plan": plan, "together": len(rows) > 1,
                "tokens": list(output.outputs[0].token_ids), "top": [best(each) for each in output.outputs[0].logprobs],
            }
            for (prompt, plan), output in zip(rows, outputs)
        ]  # fmt: skip

    plan = options.plan or "dense"
    alone = [answer for prompt in prompts for answer in answers([(prompt, plan)])]
    mixed = [(prompt, "dense" if row % 2 else plan) for row, prompt in enumerate(prompts)]
    return [*alone, *answers(mixed)]


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


def main() -> None:
    """Run an engine, or compare two runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    running, comparing = parts.add_parser("run"), parts.add_parser("compare")
    running.add_argument("out", type=Path)
    running.add_argument("--plan", default="", help="vLLM's own attention without one")
    running.add_argument("--tp", type=int, default=1, help="GPUs that share the heads")
    running.add_argument("--dtype", default="float16")
    running.add_argument("--lengths", default=LENGTHS)
    running.add_argument("--shape", default="{}", help="changes to the model's config.json")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    options = parser.parse_args()
    if options.part == "run":
        answers = run(options)
        record = {"plan": options.plan or "stock", "ranks": options.tp, "dtype": options.dtype, "answers": answers}
        options.out.write_text(json.dumps(record))
        return
    first, second = (json.loads(path.read_text())["answers"] for path in (options.first, options.second))
    pairs = zip(first, second, strict=True)  # stock answers are dense, ours only where a request says so
    results = [compare(one, other) for one, other in pairs if one["plan"] == other["plan"]]
    print("\n".join(line for _, line in results))
    sys.exit(not all(equal for equal, _ in results))


if __name__ == "__main__":
    main()
