"""Chats about long documents on one machine: tokens per second of all, and waits beside each other.

On a CPU the embedded model; on a GPU an 8B model's shape with random weights. Every document is read once; then plans
are measured in turns: all chats decode; one alone; a second question comes beside the others; another document is read
beside them. ``vllm_chats.py`` puts the same load on vLLM.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvsift import LLM
from kvsift.cli.demo import make_document
from kvsift.engine.memory import available_bytes
from kvsift.engine.request import Request
from kvsift.engine.sequence import EngineSequence, FinishReason
from kvsift.models.embedded import embedded_model
from kvsift.plan.syntax import parse_plan
from kvsift.threads import report
from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Study
from kvsift_lab.bench.random_models import random_model
from kvsift_lab.bench.timing import rotated
from kvsift_lab.numbers import digits, grouped, table, tokens
from kvsift_lab.studies.recipes import ChatsRecipe

MODEL, MOST = "llama-3-8b", 2000  # most tokens of an answer


class Timed:
    """An output that takes the likeliest token, whatever it is, and the times."""

    constraint = None

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.times: list[float] = []

    def note_prefilled(self, num_tokens: int) -> None:
        pass

    def foresee(self, logits: Tensor, ahead: int) -> int:
        return int(logits.argmax())

    def take(self, logits: Tensor | int, probe_s: float) -> tuple[int, FinishReason]:
        token = logits if isinstance(logits, int) else int(logits.argmax())
        self.times.append(perf_counter())
        return token, "length" if len(self.times) == self.num_tokens else ""


class MeasuredChats(ABC):
    """Prompts of one recipe over an engine, which reads the documents with the first of them."""

    def __init__(self, recipe: ChatsRecipe, documents: list[list[int]], question: list[int]) -> None:
        self.recipe, self.documents, self.question = recipe, documents, question

    @abstractmethod
    def start(self, ids: list[int], plan: str, num_tokens: int = MOST) -> Any:
        """Ask for so many tokens; the sequence has ``output.times``, ``num_reused``, ``is_ended`` and ``error``."""

    @abstractmethod
    def step(self) -> None:
        """Let the engine take a step."""

    @abstractmethod
    def close(self, *seqs: Any) -> None:
        """End answers."""

    @abstractmethod
    def state(self, seq: Any) -> dict[str, Any]:
        """What else to note while all decode."""

    def step_until(self, *seqs: Any, tokens: int) -> None:
        """Take steps until each of these sequences has so many tokens."""
        while any(len(seq.output.times) < tokens and not seq.is_ended for seq in seqs):
            self.step()
        for seq in seqs:
            if seq.error is not None:
                raise seq.error

    def prompt(self, chat: int) -> list[int]:
        return [*self.documents[chat % len(self.documents)], 500 + chat, *self.question]

    def read(self, ids: list[int]) -> float:
        """Seconds to the first token of a prompt, with nothing beside it."""
        started = perf_counter()
        seq = self.start(ids, "dense", 1)
        self.step_until(seq, tokens=1)
        self.close(seq)
        return perf_counter() - started

    def measure(self, plan: str, new: list[int]) -> dict[str, Any]:
        """One round of a plan."""
        found: dict[str, Any] = {}
        seqs = [self.start(self.prompt(chat), plan) for chat in range(self.recipe.chats)]
        self.step_until(*seqs, tokens=4)
        found |= self.state(seqs[0])
        for name, count in (("all", len(seqs)), ("alone", 1)):
            self.close(*seqs[count:])
            self.step_until(*seqs[:count], tokens=len(seqs[0].output.times) + 4)
            begun = [len(seq.output.times) for seq in seqs[:count]]
            started = perf_counter()
            for _ in range(self.recipe.steps):
                self.step()
            made = sum(len(seq.output.times) for seq in seqs[:count]) - sum(begun)
            found[f"{name}_tokens_per_s"] = made / (perf_counter() - started)
        self.close(seqs[0])
        again = [*self.documents[0], *self.question[::-1]]
        started = perf_counter()
        asked = self.start(again, plan, 4)
        self.step_until(asked, tokens=1)
        found["second_question_alone_s"] = asked.output.times[0] - started
        self.close(asked)
        seqs = [self.start(self.prompt(chat), plan) for chat in range(1, self.recipe.chats)]
        self.step_until(*seqs, tokens=4)
        found |= self.beside(seqs, "second_question", again, plan)
        if new:
            found |= self.beside(seqs, "new_document", new, plan)
        self.close(*seqs)
        return found

    def read_beside(self, number: int, ids: list[int], new_plan: str, plan: str) -> dict[str, Any]:
        """Another document, the ``number``-th, is read beside all chats but one."""
        seqs = [self.start(self.prompt(chat), plan) for chat in range(1, self.recipe.chats)]
        self.step_until(*seqs, tokens=4)
        found = self.beside(seqs, "new_document", [600 + number, *ids], new_plan)
        self.close(*seqs)
        return {"new": new_plan, "others": plan, **found}

    def beside(self, seqs: list[Any], name: str, ids: list[int], plan: str) -> dict[str, Any]:
        """A prompt that comes beside sequences that decode: its first token, and what they wait."""
        begun, started = [len(seq.output.times) for seq in seqs], perf_counter()
        asked = self.start(ids, plan, 4)
        self.step_until(asked, tokens=1)
        self.close(asked)
        self.step_until(*seqs, tokens=max(map(len, (seq.output.times for seq in seqs))) + 3)
        between = [
            after - before
            for seq, first in zip(seqs, begun)
            for before, after in zip(seq.output.times[first - 1 :], seq.output.times[first:])
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

    def start(self, ids: list[int], plan: str, num_tokens: int = MOST) -> EngineSequence:
        seq = EngineSequence(Request(ids, num_tokens, parse_plan(plan)), Timed(num_tokens))
        self.llm.loop.submit(seq)
        return seq

    def step(self) -> None:
        self.llm.loop.step()

    def close(self, *seqs: EngineSequence) -> None:
        for seq in seqs:
            self.llm.loop.close(seq)

    def state(self, seq: EngineSequence) -> dict[str, Any]:
        pages = self.llm.loop.counts()["pages"]
        return {"pages": pages | {"held": pages["unshared"] + pages["kept"]}, "path": seq.path}


def gpu_llm(bench: str, folder: Path, **options: Any) -> LLM:
    """Random weights of a known shape, with the embedded model's tokenizer.

    Raises:
        InputError: naming the bench, if there is no NVIDIA GPU.
    """
    model = random_model(MODEL, machine.require_gpu(bench), torch.bfloat16)
    model.config.save_pretrained(folder)
    for path in embedded_model().glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    llm = LLM(folder, dtype="bfloat16", **options)
    llm._model = model
    return llm


def load_of(recipe: ChatsRecipe, tokenizer: Any) -> tuple[list[int], list[list[int]], list[int]]:
    """Return tokens of a recipe: a text, the documents that are made of it, and the end of every question."""
    ids = tokenizer(make_document(recipe.tokens))["input_ids"]
    question = tokenizer("\n\nQuestion: What is the access code?\nAnswer:", add_special_tokens=False)["input_ids"]
    return ids, [[number + 300, *ids] for number in range(recipe.documents)], question  # no two share a prefix


class ChatsBench(Study):
    """Chats of an LLM."""

    kind = "chats"
    recipe: ChatsRecipe

    def __init__(self, recipe: ChatsRecipe) -> None:
        super().__init__(recipe)
        self._folder, self._on_gpu = TemporaryDirectory(), recipe.load != "cpu"
        how: dict[str, Any] = {"keep_tokens": 2 * recipe.documents * recipe.tokens, "probe_every": 0, "dense_below": 0}
        self._llm = (
            gpu_llm(f"chats --load {recipe.load}", Path(self._folder.name), **how)
            if self._on_gpu
            else LLM(device="cpu", **how)
        )
        self._llm.load()

    def environment(self) -> dict[str, Any]:
        own = machine.gpu_environment(None) if self._on_gpu else machine.host_environment() | {"waiting": report()}
        return own | {"free_bytes": available_bytes(self._llm.device), "grid": self._llm.loop.grid}

    def run(self) -> Iterator[dict[str, Any]]:
        recipe, plans = self.recipe, self.recipe.plans
        ids, documents, question = load_of(recipe, self._llm.tokenizer)
        chats = Chats(self._llm, recipe, documents, question)
        if self._on_gpu:
            chats.read([7, *ids[:2048]])  # compiles
        for chat in range(recipe.documents):
            yield digits({"part": "document", "seconds": chats.read(chats.prompt(chat))}, 4)
        for _ in range(recipe.chunk_reads):  # beside the documents, which takes as much memory as one of them
            yield digits({"part": "document in chunks of 8192", "seconds": self._read_in_chunks(documents[0])}, 4)
        for number in range(recipe.rounds):
            for place, plan in enumerate(rotated(plans, number)):
                new = [400 + number * len(plans) + place, *ids[: recipe.new_tokens]] if recipe.new_tokens else []
                yield digits({"part": "round", "plan": plan, **chats.measure(plan, new)}, 4)
        for number, (new_plan, plan) in enumerate(recipe.read_beside):
            yield digits({"part": "beside", **chats.read_beside(number, ids, new_plan, plan)}, 4)

    def _read_in_chunks(self, ids: list[int]) -> float:
        cache, started = self._llm.new_cache(parse_plan("dense"), self.recipe.tokens + 64), perf_counter()
        self._llm.feed(cache, ids)
        torch.cuda.synchronize()
        return perf_counter() - started

    def closing(self, result: dict[str, Any]) -> str:
        return chats_table([result])


COLUMNS = ["", "chats", "documents", "plan", "tokens/s", "over dense", "second question alone", "beside the others"]
TIMES = "all_tokens_per_s", "second_question_alone_s", "second_question_s"


def chats_table(results: Sequence[dict[str, Any]]) -> str:
    """Return what chats beside each other get, medians of the rounds: a row per plan, all results in one table. Loads
    of one size are compared with the dense plan among them."""
    rows, dense = [], dict[tuple[Any, ...], float]()
    for result in results:
        rounds = grouped((point for point in result["points"] if point["part"] == "round"), "plan")
        recipe, [where] = result["recipe"], re.findall(r"H\d+|\d+ cores", result["machine"])
        load = where, recipe["chats"], f"{recipe['documents']} of {tokens(recipe['tokens'])}"
        for plan in [each for each in dict.fromkeys([*recipe["plans"], *rounds]) if each in rounds]:
            speed, *questions = [median(each[key] for each in rounds[plan]) for key in TIMES]
            if plan == "dense":
                dense[load] = speed
            ratio = f"{speed / dense[load]:.2f}x" if plan != "dense" and load in dense else ""
            times = [f"{seconds:.2f} s" for seconds in questions]
            rows.append([*map(str, load), f"`{plan}`", f"{speed:,.0f}", ratio, *times])
    return table(COLUMNS, rows)
