"""Write results/embedded-model and the model card from what training and evaluation left behind.

    python -m kvsift_lab.probe.pack PHASE1/training.json ... PHASE5/training.json EVAL.json

Weights, packed by ``pack``, and tokenizer are in src/kvsift/embedded already; the card's numbers
come from the JSON file and results/ruler.
"""

import hashlib
import json
import struct
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from kvsift.models.embedded import WEIGHTS, embedded_model
from kvsift_lab.eval.results import load_result
from kvsift_lab.numbers import grouped, table
from kvsift_lab.probe import ROOT, phase
from kvsift_lab.stored import document

MODEL, RESULTS = ROOT / "src/kvsift/embedded", ROOT / "results/embedded-model/summary.json"
ONE, FOUR = "one NVIDIA H200", "four NVIDIA H100"
PHASES = {"1": ONE, "2": ONE, "3": ONE, "4": FOUR, "5": FOUR}  # name of a phase in the recipe -> where it ran
CARD = Path(__file__).with_name("card.md")


def pack(weights: Path, packed: Path) -> None:
    """Pack a safetensors file whose tensors are all bfloat16, for ``kvsift.models.embedded.unpack``."""
    data = weights.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    bits = np.frombuffer(data[start:], np.uint16)
    exponents, others = (bits >> 7) & 0xFF, (bits >> 8) & 0x80 | bits & 0x7F
    header = np.frombuffer(data[:start], np.uint8)
    np.savez_compressed(packed, header=header, exponents=exponents.astype(np.uint8), others=others.astype(np.uint8))


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
        "sha256": hashlib.sha256((embedded_model() / WEIGHTS).read_bytes()).hexdigest(),
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
    return CARD.read_text().format(
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
    dense = (sample for sample in load_result(ROOT / "results/ruler")["samples"] if sample["plan"] == "dense")
    cells = grouped(dense, "task", "length")
    tasks, lengths = (sorted(set(keys)) for keys in zip(*cells))
    rows = [
        [task, *(f"{fmean(100 * sample['score'] for sample in cells[task, length]):.0f}" for length in lengths)]
        for task in tasks
    ]
    return max(map(len, cells.values())), table(["task", *(f"{length // 1024}K" for length in lengths)], rows)


def _phase(number: int, phase: dict[str, Any]) -> str:
    longest = max(int(length) for stage in phase["config"]["training"]["stages"] for length in stage["lengths"])
    return (
        f"- Phase {number}: {phase['steps']} steps, {phase['tokens'] / 1e6:.0f} million tokens, "
        f"{phase['seconds'] / 60:.1f} minutes on {phase['hardware']}, sequences of up to {longest} tokens."
    )


if __name__ == "__main__":
    main([Path(arg) for arg in sys.argv[1:-1]], Path(sys.argv[-1]))
