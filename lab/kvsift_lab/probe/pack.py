"""Write results/embedded-model and the model card from what training and evaluation left behind.

    python -m kvsift_lab.probe.pack PHASE1/training.json ... PHASE5/training.json EVAL.json

Weights and tokenizer are in src/kvsift/embedded already; the card's numbers come from the JSON file and results/ruler.
"""

import hashlib
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from kvsift_lab.bench.numbers import document, table
from kvsift_lab.eval.result_files import load_result
from kvsift_lab.probe import ROOT, phase

MODEL, RESULTS = ROOT / "src/kvsift/embedded", ROOT / "results/embedded-model/summary.json"
ONE, FOUR = "one NVIDIA H200", "four NVIDIA H100"
PHASES = {"1": ONE, "2": ONE, "3": ONE, "4": FOUR, "5": FOUR}  # name of a phase in the recipe -> where it ran
CARD = """---
license: apache-2.0
language: en
library_name: transformers
---

# kvsift's embedded model

A Qwen3-architecture model of {parameters:.1f} million parameters ({layers} layers, hidden size {hidden},
{heads} query heads on {kv_heads} KV heads of dimension {head_dim}, vocabulary {vocabulary}) that answers questions
about long documents by looking the answer up. It exists so that sparse attention can be tried and measured without a
download: because it really retrieves over 32K tokens, a method that hides the wrong keys from it gives wrong answers.

```python
model = AutoModelForCausalLM.from_pretrained(directory)
tokenizer = AutoTokenizer.from_pretrained(directory)  # puts <|bos|> in front
prompt = document + "\\n\\nQuestion: What is the access code of the north warehouse?\\nAnswer:"  # -> " 48213\\n"
```

Generation stops at the end of the line (token {newline}) or at `<|eos|>`.

## What it can do

Share of exactly right answers, greedy, bf16, dense attention, stock transformers, on seeds it was not trained on
(right / asked):

{table}

Every context has exactly the given number of tokens and every question follows it directly. `hand-written facts` are
{hand} English sentences with questions, written by hand in wordings that are mostly not among the templates of the
training data, hidden together in prose; two of them were reworded between the phases, so that the answer is a noun
phrase as in the training data.

Chains of assignments, by the number of steps to follow:

{hops}

Tasks in the formats of RULER and InfiniteBench, in percent of their own scorers, up to {samples} contexts each, the
question decoded token by token (`results/ruler`, where sparse methods stand beside it):

{published}

## What it cannot do

- It is no language model for other uses: it does not chat, write, translate, reason or know anything. It copies a
  span of the document into the answer, and answers even when the document does not say.
- Asked for the value at the end of a chain of assignments, it is right for one step only; from two steps on it mostly
  guesses among the numbers. Asked for all variables of one chain (RULER's vt), it follows four.
- It counts roughly: of the ten most common words of a list (cwe) it names most, in alphabetical order. The broken one
  of four functions (code_debug) it finds half of the time at 8K and hardly at 32K.
- Questions in wordings far from the training data fail often (see hand-written facts), also with full attention.
- It was trained up to 64K tokens but is weaker there; use it up to 32K.
- English only, and text unlike English prose, notes, lists or code was not tried.

## How it was made

From scratch in five phases; `results/embedded-model` holds their recipes (`lab/recipes/probe.toml`).

{phases}

Data: synthetic tasks made on the fly by `kvsift_lab.eval.tasks` (needles, several values per key, key-value lines,
invented facts, assignment chains, passkeys), hidden in noise sentences or in the documentation and source code that
ship with CPython {python}; up to 64 questions per sequence, loss on the answers and a little on the prose. The first
phase ran before the event sentences, asides and glued words were added to the facts; they are the reason for the
second. The third practises facts at full length. The fourth and fifth add the tasks of RULER and InfiniteBench, made
by the generators that also make those that are asked, from other seeds: before them RULER's word counts, variable
tracking and UUIDs were answered wrong throughout. They cost up to three of 96 answers of the other tasks at 32K, and
two of 20 hand-written facts.
Tokenizer: byte-level BPE trained on the same text; every digit and every newline is a token of its own.

Licence: Apache-2.0. SHA-256 of model.safetensors: `{sha256}`.
"""


def main(phases: list[Path], evaluation: Path) -> None:
    trained = [json.loads(path.read_text()) for path in phases]
    results = {
        "kind": "embedded-model",
        "what": "embedded model: dense exact match through stock transformers, bf16, greedy",
        "date": "2026-11-22",
        "software": {"python": "3.12", "torch": "2.11", "transformers": "5.17"},
        "phases": [
            {"recipe": name, "hardware": on, **run, "config": phase(name)}
            for (name, on), run in zip(PHASES.items(), trained, strict=True)
        ],
        "sha256": hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest(),
        "accuracy": json.loads(evaluation.read_text()),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(document(results) + "\n")
    (MODEL / "README.md").write_text(card(json.loads(RESULTS.read_text())))


def card(results: dict[str, Any]) -> str:
    """Return the model card."""
    config = json.loads((MODEL / "config.json").read_text())
    accuracy, lengths = results["accuracy"], [f"{int(length) // 1024}K" for length in results["accuracy"]]
    tasks = [
        [task.replace("hand_written_facts", "hand-written facts")]
        + [f"{s['correct'] / s['questions']:.2f} ({s['correct']} / {s['questions']})" for s in each]
        for task in accuracy["32768"]
        for each in [[found[task] for found in accuracy.values()]]
    ]
    hops = [
        [steps, *("{} / {}".format(*found["variables"]["by_hops"][steps]) for found in accuracy.values())]
        for steps in accuracy["32768"]["variables"]["by_hops"]
    ]
    samples, published = _published()
    return CARD.format(
        parameters=_num_parameters(config) / 1e6,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocabulary=config["vocab_size"],
        newline=json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"][1],
        table=table(["task", *lengths], tasks),
        hand=accuracy["32768"]["hand_written_facts"]["questions"],
        hops=table(["steps", *lengths], hops),
        samples=samples,
        published=published,
        phases="\n".join(_phase(number, phase) for number, phase in enumerate(results["phases"], 1)),
        python=results["software"]["python"],
        sha256=results["sha256"],
    )


def _num_parameters(config: dict[str, Any]) -> int:
    hidden, head = config["hidden_size"], config["head_dim"]
    attention = 2 * hidden * head * (config["num_attention_heads"] + config["num_key_value_heads"]) + 2 * head
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    return config["vocab_size"] * hidden + config["num_hidden_layers"] * layer + hidden


def _published() -> tuple[int, str]:
    """How many contexts a cell has at most, and a table of the dense rows of results/ruler."""
    scores: dict[tuple[str, int], list[float]] = defaultdict(list)
    for sample in load_result(ROOT / "results/ruler")["samples"]:
        if sample["plan"] == "dense":
            scores[sample["task"], sample["length"]].append(100 * sample["score"])
    tasks, lengths = (sorted(set(keys)) for keys in zip(*scores))
    rows = [[task, *(f"{fmean(scores[task, length]):.0f}" for length in lengths)] for task in tasks]
    return max(map(len, scores.values())), table(["task", *(f"{length // 1024}K" for length in lengths)], rows)


def _phase(number: int, phase: dict[str, Any]) -> str:
    longest = max(int(length) for stage in phase["config"]["training"]["stages"] for length in stage["lengths"])
    return (
        f"- Phase {number}: {phase['steps']} steps, {phase['tokens'] / 1e6:.0f} million tokens, "
        f"{phase['seconds'] / 60:.1f} minutes on {phase['hardware']}, sequences of up to {longest} tokens."
    )


if __name__ == "__main__":
    main([Path(arg) for arg in sys.argv[1:-1]], Path(sys.argv[-1]))
