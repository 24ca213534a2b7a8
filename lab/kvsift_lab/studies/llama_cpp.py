"""Decoding and prefill of one GGUF file beside llama.cpp, in turns, with the same threads.

llama.cpp is measured by its own ``llama-bench`` (``--binary``; built for this processor, for instance from the sources
in PyPI's ``llama-cpp-python``): random tokens, flash attention on and off, keys and values in f16 and q8_0, its own
choice of row counts. The first round tries all of these, and the later ones the fastest for the context. kvsift decodes
behind a text of as many tokens, whose KV no other plan shares; its probes are off.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from kvsift import LLM, threads
from kvsift.api.document import Document
from kvsift.errors import FailedProcess, MissingFile
from kvsift.plan.syntax import parse_plan
from kvsift.texts.prose import document
from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Study
from kvsift_lab.bench.host_timing import OtherProcesses
from kvsift_lab.bench.report import commit_of
from kvsift_lab.numbers import table
from kvsift_lab.studies.recipes import LlamaCppRecipe

SETTINGS = (("1", "f16"), ("1", "q8_0"), ("0", "f16"))  # flash attention, which packed values need; type of KV


class LlamaCppBench(Study):
    """A point for each context and round."""

    kind = "llama-cpp"
    recipe: LlamaCppRecipe

    def __init__(self, recipe: LlamaCppRecipe) -> None:
        super().__init__(recipe)
        if not Path(recipe.binary).is_file():
            raise MissingFile(f"{recipe.binary} is not a file. Build llama.cpp's llama-bench, and name it by --binary.")
        threads.use(recipe.threads)
        self._llm = LLM(recipe.model, "dense", device="cpu", probe_every=0, kv_dtype=recipe.kv_dtype)
        self._best: dict[int, tuple[str, str]] = {}  # context -> the fastest settings of llama.cpp

    def environment(self) -> dict[str, Any]:
        peer = self._llama_cpp(64, "1", "f16", 1)
        facts = {name: peer[name] for name in ("build_commit", "build_number", "model_type", "model_size", "cpu_info")}
        return machine.host_environment() | {"threads": torch.get_num_threads(), "llama_cpp": facts}

    def run(self) -> Iterator[dict[str, Any]]:
        recipe, load = self.recipe, OtherProcesses()
        with self._llm as llm:
            llm.load()
            ids = llm.encode(document((), (), max(recipe.contexts), lambda text: len(llm.encode(text))))
            for number, context in product(range(recipe.rounds), recipe.contexts):
                point = {"context": context, "round": number, **self._ours(ids[:context])}
                peers = {setting: self._peer(context, setting) for setting in self._settings(context)}
                self._best[context] = min(peers, key=lambda setting: median(peers[setting]["itl_s"]))
                yield point | {"llama_cpp": {name_of(each): peers[each] for each in peers}, "others": load.share()}
                load = OtherProcesses()

    def _settings(self, context: int) -> Sequence[tuple[str, str]]:
        return [self._best[context]] if context in self._best else SETTINGS

    def _ours(self, ids: list[int]) -> dict[str, Any]:
        llm, recipe = self._llm, self.recipe
        read = Document(llm, ids, lambda text: llm.encode(text), llm.plan)
        started = perf_counter()
        read.prefill(llm.plan, recipe.tokens + 1)
        prefill_s, samples = perf_counter() - started, dict[str, list[float]]()
        for plan in (*recipe.plans, *recipe.plans):  # in turns
            samples.setdefault(plan, []).extend(read.itl_s(parse_plan(plan), recipe.tokens))
        return {"prefill_s": prefill_s, "itl_s": samples}

    def _peer(self, context: int, setting: tuple[str, str]) -> dict[str, Any]:
        """Seconds per token of llama.cpp, and of its prefill, which only the first round measures."""
        tokens = self.recipe.tokens
        found = {"itl_s": [ns / 1e9 / tokens for ns in self._llama_cpp(context, *setting, tokens)["samples_ns"]]}
        if context not in self._best:
            found["prefill_s"] = [ns / 1e9 for ns in self._llama_cpp(context, *setting, 0)["samples_ns"]]
        return found

    def _llama_cpp(self, context: int, flash: str, kv: str, tokens: int) -> dict[str, Any]:
        """What llama-bench says of decoding ``tokens`` behind a context, or of its prefill if there are none."""
        work = ["-p", "0", "-n", str(tokens), "-d", str(context)] if tokens else ["-p", str(context), "-n", "0"]
        command = [
            self.recipe.binary, "-m", self.recipe.model, "-t", str(torch.get_num_threads()), "-fa", flash, "-ctk", kv,
            "-ctv", kv, "-o", "json", "-r", str(self.recipe.repeats if tokens else 1), *work,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise FailedProcess(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")
        return dict(json.loads(done.stdout)[0])

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        ours = ", ".join(f"{plan} {1e3 * median(samples):.1f}" for plan, samples in point["itl_s"].items())
        peers = ", ".join(f"{name} {1e3 * median(each['itl_s']):.1f}" for name, each in point["llama_cpp"].items())
        return f"{point['context']:,} tokens, ms per token: {ours}; llama.cpp {peers}"

    def closing(self, result: dict[str, Any]) -> str:
        return f"{peer_table(result)}\n\n{conditions(result)}"


def name_of(setting: tuple[str, str]) -> str:
    """Name of settings of llama.cpp."""
    return f"flash attention {'on' if setting[0] == '1' else 'off'}, {setting[1]}"


def peer_table(result: dict[str, Any]) -> str:
    """Milliseconds per token and seconds of prefill, by context; in brackets how many times faster than llama.cpp's
    fastest settings of the same round."""
    plans, rows = result["recipe"]["plans"], []
    for context in result["recipe"]["contexts"]:
        rounds = [point for point in result["points"] if point["context"] == context]
        best = [min(median(each["itl_s"]) for each in point["llama_cpp"].values()) for point in rounds]
        cells = [f"{context:,}", f"{1e3 * median(best):.1f}"]
        for plan in plans:
            ours = [median(point["itl_s"][plan]) for point in rounds]
            gain = median(peer / own for peer, own in zip(best, ours))
            cells.append(f"{1e3 * median(ours):.1f} ({gain:.2f}x)")
        prefills = [s for point in rounds for each in point["llama_cpp"].values() for s in each.get("prefill_s", ())]
        own = median(point["prefill_s"] for point in rounds)
        rows.append([*cells, f"{min(prefills):.1f} s", f"{own:.1f} s ({min(prefills) / own:.2f}x)"])
    heads = ["context", "llama.cpp", *(f"`{plan}`" for plan in plans), "prefill, llama.cpp", "prefill, kvsift"]
    return table(heads, rows)


def conditions(result: dict[str, Any]) -> str:
    """Return a line on the file, the machine and the rounds."""
    peer, recipe = result["llama_cpp"], result["recipe"]
    busiest = max(point["others"] or 0 for point in result["points"])
    kv = ", KV in int8" if recipe.get("kv_dtype") == "int8" else ""
    return (
        f"`{Path(recipe['model']).name}` ({peer['model_type']}); {result['machine']}, {result['threads']} threads; "
        f"llama.cpp {peer['build_commit']} by llama-bench, the fastest of flash attention on and off, KV in f16 and "
        f"q8_0; kvsift at commit {commit_of(result)}{kv}; medians of {recipe['rounds']} rounds in turns, in which "
        f"other processes took {busiest:.0%} of the processors at most."
    )
