"""Chats about long documents on one machine: tokens per second of all, and waits beside each other.

    python -m kvsift_lab.studies.chats cpu results/chats-cpu.json
    python -m kvsift_lab.studies.chats gpu results/chats-h200.json
    python -m kvsift_lab.studies.chats gpu-shared results/chats-shared-h200.json
    python -m kvsift_lab.studies.chats gpu chats.json --tokens 40960 --rounds 2 --plans dense quest:budget=2048

On a CPU the embedded model; on a GPU an 8B model's shape with random weights. Every document is read once; then plans
are measured in turns: all chats decode; one alone; a second question comes beside the others; another document is read
beside them. ``vllm_chats.py`` adds the same measurements of vLLM to a result.
"""

from __future__ import annotations

import argparse
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvsift import LLM
from kvsift.batching.row import FinishReason, Row
from kvsift.cli.demo import make_document
from kvsift.engine.memory import available_bytes
from kvsift.engine.provenance import versions_and_machine
from kvsift.engine.transcript import Request, Transcript
from kvsift.models.embedded import embedded_model
from kvsift.models.transformers_random import random_model
from kvsift.plan.syntax import parse_plan
from kvsift.threads import report
from kvsift_lab.bench import machine

PLANS = ["dense", "sketch:budget=1024:dense_layers=none", "quest:budget=1024:dense_layers=none"]
GPU_PLANS = ["dense", "sketch:budget=1024", "quest:budget=2048", PLANS[1], "quest:budget=2048:dense_layers=none"]
QUOKA = "prefill=quoka:budget=1024:chunk=512,decode=quest:budget=2048"
RECIPES: dict[str, dict[str, Any]] = {
    "cpu": {"tokens": 32768, "documents": 4, "chats": 4, "plans": PLANS, "steps": 32, "rounds": 5, "new_tokens": 8192},
    "gpu": {
        "tokens": 65536, "documents": 8, "chats": 8, "plans": GPU_PLANS, "steps": 64, "rounds": 5, "new_tokens": 0,
        "chunk_reads": 3,
    },
    "gpu-shared": {
        "tokens": 131072, "documents": 2, "chats": 8, "plans": GPU_PLANS[:3], "steps": 64, "rounds": 3, "new_tokens": 0,
        "chunk_reads": 3, "read_beside": [["dense", "quest:budget=2048"], [QUOKA, "quest:budget=2048"]],
    },
}  # fmt: skip
MODEL, MOST = "llama-3-8b", 2000


class Timed:
    """An output that takes the likeliest token, whatever it is, and the times."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.times: list[float] = []
        self.transcript = Transcript(Request([0], num_tokens), tokenizer=None)  # says how tokens are chosen

    def read(self, num_tokens: int) -> None:
        pass

    def foresee(self, logits: Tensor, ahead: int) -> int:
        return int(logits.argmax())

    def take(self, logits: Tensor | int, probe_s: float) -> tuple[int, FinishReason]:
        token = logits if isinstance(logits, int) else int(logits.argmax())
        self.times.append(perf_counter())
        return token, "length" if len(self.times) == self.num_tokens else ""


class Times(Protocol):
    """When the tokens of an answer came."""

    times: list[float]


class Asked(Protocol):
    """A prompt that an engine answers."""

    output: Times
    num_reused: int
    error: Exception | None

    @property
    def is_ended(self) -> bool: ...


class MeasuredChats(ABC):
    """Prompts of one recipe over an engine, which reads the documents with the first of them."""

    def __init__(self, recipe: dict[str, Any], documents: list[list[int]], question: list[int]) -> None:
        self.recipe, self.documents, self.question = recipe, documents, question

    @abstractmethod
    def start(self, ids: list[int], plan: str, num_tokens: int = MOST) -> Any:
        """Ask for an answer of so many tokens; returns an ``Asked``."""

    @abstractmethod
    def step(self) -> None:
        """Let the engine take a step."""

    @abstractmethod
    def close(self, *rows: Any) -> None:
        """End answers."""

    @abstractmethod
    def state(self, row: Any) -> dict[str, Any]:
        """What else to note while all decode."""

    def step_until(self, *rows: Asked, tokens: int) -> None:
        """Take steps until each of these rows has so many tokens."""
        while any(len(row.output.times) < tokens and not row.is_ended for row in rows):
            self.step()
        for row in rows:
            if row.error is not None:
                raise row.error

    def prompt(self, chat: int) -> list[int]:
        return [*self.documents[chat % len(self.documents)], 500 + chat, *self.question]

    def read(self, ids: list[int]) -> float:
        """Seconds to the first token of a prompt, with nothing beside it."""
        started = perf_counter()
        row = self.start(ids, "dense", 1)
        self.step_until(row, tokens=1)
        self.close(row)
        return perf_counter() - started

    def measure(self, plan: str, new: list[int]) -> dict[str, Any]:
        """One round of a plan."""
        found: dict[str, Any] = {}
        rows = [self.start(self.prompt(chat), plan) for chat in range(self.recipe["chats"])]
        self.step_until(*rows, tokens=4)
        found |= self.state(rows[0])
        for name, count in (("all", len(rows)), ("alone", 1)):
            self.close(*rows[count:])
            self.step_until(*rows[:count], tokens=len(rows[0].output.times) + 4)
            begun = [len(row.output.times) for row in rows[:count]]
            started = perf_counter()
            for _ in range(self.recipe["steps"]):
                self.step()
            made = sum(len(row.output.times) for row in rows[:count]) - sum(begun)
            found[f"{name}_tokens_per_s"] = made / (perf_counter() - started)
        self.close(rows[0])
        again = [*self.documents[0], *self.question[::-1]]
        started = perf_counter()
        asked = self.start(again, plan, 4)
        self.step_until(asked, tokens=1)
        found["second_question_alone_s"] = asked.output.times[0] - started
        self.close(asked)
        rows = [self.start(self.prompt(chat), plan) for chat in range(1, self.recipe["chats"])]
        self.step_until(*rows, tokens=4)
        found |= self.beside(rows, "second_question", again, plan)
        if new:
            found |= self.beside(rows, "new_document", new, plan)
        self.close(*rows)
        return found

    def read_beside(self, number: int, ids: list[int], new_plan: str, plan: str) -> dict[str, Any]:
        """Another document, the ``number``-th, is read beside all chats but one."""
        rows = [self.start(self.prompt(chat), plan) for chat in range(1, self.recipe["chats"])]
        self.step_until(*rows, tokens=4)
        found = self.beside(rows, "new_document", [600 + number, *ids], new_plan)
        self.close(*rows)
        return {"new": new_plan, "others": plan, **found}

    def beside(self, rows: list[Any], name: str, ids: list[int], plan: str) -> dict[str, Any]:
        """A prompt that comes beside rows that decode: its first token, and what they wait."""
        begun, started = [len(row.output.times) for row in rows], perf_counter()
        asked = self.start(ids, plan, 4)
        self.step_until(asked, tokens=1)
        self.close(asked)
        self.step_until(*rows, tokens=max(map(len, (row.output.times for row in rows))) + 3)
        between = [
            after - before
            for row, first in zip(rows, begun)
            for before, after in zip(row.output.times[first - 1 :], row.output.times[first:])
        ]
        return {
            f"{name}_s": asked.output.times[0] - started,
            f"{name}_reused": asked.num_reused,
            f"itl_beside_{name}_s": {
                "tokens": len(between), "median": median(between), "p99": quantiles(between, n=100)[98]
            },
        }  # fmt: skip


class Chats(MeasuredChats):
    """Rows over the loop of an LLM."""

    def __init__(self, llm: LLM, *load: Any) -> None:
        super().__init__(*load)
        self.llm = llm

    def start(self, ids: list[int], plan: str, num_tokens: int = MOST) -> Row:
        row = Row(ids, parse_plan(plan), num_tokens, Timed(num_tokens))
        self.llm.loop.submit(row)
        return row

    def step(self) -> None:
        self.llm.loop.step(unless=lambda: False)

    def close(self, *rows: Row) -> None:
        for row in rows:
            self.llm.loop.close(row)

    def state(self, row: Row) -> dict[str, Any]:
        pages = self.llm.loop.books().pages
        return {"pages": pages | {"held": pages["rows"] + pages["kept"]}, "path": row.composed or "captured"}


def digits(found: Any) -> Any:
    """Numbers with four digits."""
    if isinstance(found, dict):
        return {key: digits(value) for key, value in found.items()}
    return (
        [digits(value) for value in found]
        if isinstance(found, list)
        else float(f"{found:.4g}")
        if isinstance(found, float)
        else found
    )


def gpu_llm(folder: Path, **options: Any) -> LLM:
    """Random weights of a known shape, with the embedded model's tokenizer."""
    model = random_model(MODEL, torch.device("cuda"), torch.bfloat16)
    model.config.save_pretrained(folder)
    for path in embedded_model().glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    llm = LLM(folder, dtype="bfloat16", **options)
    llm._model = model
    return llm


def load_of(recipe: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[list[int]], list[int]]:
    """Return tokens of a recipe: a text, the documents that are made of it, and the end of every question."""
    ids = tokenizer(make_document(recipe["tokens"]))["input_ids"]
    question = tokenizer("\n\nQuestion: What is the access code?\nAnswer:", add_special_tokens=False)["input_ids"]
    return ids, [[number + 300, *ids] for number in range(recipe["documents"])], question  # no two begin alike


def saver(result: dict[str, Any], out: Path) -> Callable[..., None]:
    """Return a function that adds what was found to the lists of a result, prints it and writes the file."""

    def save(**found: Any) -> None:
        print({key: digits(value) for key, value in found.items()}, flush=True)
        for key, value in found.items():
            result.setdefault(key, []).append(digits(value))
        out.write_text(json.dumps(result, indent=1) + "\n")

    return save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("out", type=Path)
    for name in ("tokens", "documents", "chats", "rounds", "chunk-reads"):
        parser.add_argument(f"--{name}", type=int, help="instead of the recipe's")
    parser.add_argument("--plans", nargs="+", help="instead of the recipe's; dense among them")
    options = parser.parse_args()
    given = {key: value for key, value in vars(options).items() if key not in ("recipe", "out") and value is not None}
    recipe, on_gpu = RECIPES[options.recipe] | given, options.recipe != "cpu"
    how = {"keep_tokens": 2 * recipe["documents"] * recipe["tokens"], "probe_every": 0}
    with TemporaryDirectory() as folder:
        llm = gpu_llm(Path(folder), **how) if on_gpu else LLM(device="cpu", **how)
        llm.load()
        result: dict[str, Any] = {"kind": "chats", "recipe": recipe, **versions_and_machine(llm.device)}
        result |= machine.gpu_environment(None) if on_gpu else {"threads": report()}
        result |= {"free_bytes": available_bytes(llm.device), "grid": llm.loop.grid}
        run(llm, recipe, saver(result, options.out), on_gpu)


def run(llm: LLM, recipe: dict[str, Any], save: Callable[..., None], on_gpu: bool) -> None:
    ids, documents, question = load_of(recipe, llm.tokenizer)
    chats = Chats(llm, recipe, documents, question)
    if on_gpu:
        chats.read([7, *ids[:2048]])  # compiles
    for chat in range(recipe["documents"]):
        save(read_s=chats.read(chats.prompt(chat)))
    if on_gpu:
        for _ in range(recipe["chunk_reads"]):  # beside the documents, which takes as much memory as one of them
            cache, started = llm.new_cache(parse_plan("dense"), recipe["tokens"] + 64), perf_counter()
            llm.prefill(cache, documents[0])
            torch.cuda.synchronize()
            save(read_in_chunks_of_8192_s=perf_counter() - started)
            del cache
    for number in range(recipe["rounds"]):
        shift = number % len(recipe["plans"])
        for place, plan in enumerate([*recipe["plans"][shift:], *recipe["plans"][:shift]]):
            new = [400 + number * len(recipe["plans"]) + place, *ids[: recipe["new_tokens"]]]
            save(rounds={"plan": plan, **chats.measure(plan, new if recipe["new_tokens"] else [])})
    for number, (new_plan, plan) in enumerate(recipe.get("read_beside", [])):
        save(read_beside=chats.read_beside(number, ids, new_plan, plan))


if __name__ == "__main__":
    main()
