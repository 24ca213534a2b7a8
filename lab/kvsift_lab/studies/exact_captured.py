"""Exact decoding in captured steps beside the fastest dense decoding, with acceptance imposed.

An 8B model's shape, whose random weights accept no draft: the tokens of each verification are overwritten so that a
draft is accepted with a given probability. Everything else is as it is in an answer: drafts, verifications, and what
the controller decides from the times that it measures. Keys and values of the prompts are random, too. Dense steps
without ``deterministic=True``, dense steps with it, and exact ones take turns over the same cache.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from math import log
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvsift import LLM
from kvsift.engine.graphs.feeds import uploaded
from kvsift.engine.graphs.session import BLOCK_TOKENS
from kvsift.engine.graphs.slots import Slots, StepKind
from kvsift.engine.request import Request
from kvsift.engine.sequence import EngineSequence
from kvsift.engine.speculative.exactness import exact_decoder
from kvsift.engine.speculative.pace import Paces
from kvsift.models.hf.cache import SparseCache
from kvsift.models.hf.contents import fill
from kvsift.plan.syntax import parse_plan
from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Study
from kvsift_lab.bench.decode_case import with_anchors
from kvsift_lab.numbers import digits, table, tokens
from kvsift_lab.studies.chats import Chats, Timed, gpu_llm
from kvsift_lab.studies.recipes import CapturedRecipe

ANCHORS, ANCHORED = 6, "sketch:budget=1024:dense_layers=none"  # layers that select, in a last plan


class ImposedRate:
    """How many drafts are accepted; verifications follow it while there is a probability.

    Drafts in turn are drawn from a sequence that fills 0 to 1 evenly: by chance, a hundred verifications would differ
    by several percent.
    """

    share: float | None = None
    drawn = 0

    @classmethod
    def refused(cls, rows: int) -> Tensor:
        """Whether each draft of a verification is refused, bool [rows, BLOCK_TOKENS - 1]."""
        assert cls.share is not None
        even = (cls.drawn + torch.arange(1, rows + 1, dtype=torch.float64)) * (5**0.5 - 1) / 2 % 1
        cls.drawn += rows
        accepted = (even.log() / log(cls.share)).long()
        return torch.arange(BLOCK_TOKENS - 1) == accepted.unsqueeze(1)


@contextmanager
def imposed_acceptance() -> Iterator[None]:
    """What a verification chooses is what it was fed, up to the first draft that is refused."""
    run = Slots.run

    def imposed(slots: Slots, kind: StepKind, number: int) -> Any:
        fed = slots.tokens.clone()
        found = run(slots, kind, number)
        if ImposedRate.share is not None and slots.batch.block == BLOCK_TOKENS:  # plain steps have other blocks
            assert slots._step.keeps_bits
            proposed = fed.view(-1, BLOCK_TOKENS)[:, 1:]
            refused = uploaded(ImposedRate.refused(len(proposed)), fed.device)
            slots.tokens.view(-1, BLOCK_TOKENS)[:, :-1] = torch.where(refused, (proposed + 1) % 4096, proposed)
        return found

    with patch.object(Slots, "run", imposed):
        yield


class ImposedRows:
    """Rows of one length over the loop of an LLM."""

    def __init__(self, llm: LLM, tokens: int, rows: int) -> None:
        self._llm, self._tokens, self._rows = llm, tokens, rows
        ids = random.Random(tokens)  # of a random text, in which nothing is repeated
        self._prompts = [[ids.randrange(3, 4096) for _ in range(tokens)] for _ in range(rows)]
        self._chats = Chats(llm, None, [], [])
        self._held: list[Any] = []
        for prompt in self._prompts:  # its pages are kept for the rows that follow
            row = self._row(prompt, "dense", 1)
            row.source = self._fill
            self._wait([row], 1)
            self._held.append(row)

    def _fill(self, cache: SparseCache) -> None:
        config, device = self._llm.directory.config, self._llm.device
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        sizes = {"num_query_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads}
        numbers = [{**sizes, "head_dim": dim, "scale": dim**-0.5, "softcap": None}] * config.num_hidden_layers

        def drawn(layer: int) -> dict[str, Tensor]:
            shape = config.num_key_value_heads, self._tokens, dim
            return {name: torch.randn(shape, dtype=self._llm.dtype, device=device) for name in ("keys", "values")}

        fill(cache, numbers, drawn, device, self._llm.dtype, self._llm.chunk_size)

    def _row(self, prompt: list[int], plan: str, new: int, exact: bool = False) -> Any:
        request = Request(prompt, new, parse_plan(plan), exact=exact)
        return EngineSequence(request, Timed(new), decoder=exact_decoder(self._llm, request))

    def _wait(self, rows: list[Any], tokens: int) -> None:
        for row in rows:
            self._llm.loop.submit(row)
        self._chats.step_until(*rows, tokens=tokens)

    def close(self) -> None:
        for row in self._held:
            self._llm.loop.close(row)

    def measure(self, plan: str, new: int, seed: int, steady: bool, exact: bool) -> dict[str, Any]:
        """Seconds per token of a row, once all have their first, without captures; the seed is of what is accepted."""
        self._llm.fast_path.deterministic = self._llm.loop._executor.steady = steady
        ImposedRate.drawn = 997 * seed
        rows = [self._row(prompt, plan, new, exact) for prompt in self._prompts]
        self._wait(rows, 2)
        group = rows[0].group
        begun, setup_s, started = [len(row.output.times) for row in rows], group.setup_s, perf_counter()
        while not any(row.is_ended for row in rows):
            self._llm.loop.step()
        made = max(sum(len(row.output.times) for row in rows) - sum(begun), 1)  # none if all was compiled meanwhile
        setup_s = group.setup_s - setup_s  # captures: a process makes each once, this one whenever the method changes
        found: dict[str, Any] = {"seconds": len(rows) * (perf_counter() - started - setup_s) / made, "setup_s": setup_s}
        self._chats.step_until(*rows, tokens=new)
        if exact:
            reports = [row.decoder.report for row in rows if row.decoder is not None]
            cycles = sum(sum(report.verified.values()) for report in reports)
            drafts = sum(report.drafted for report in reports)
            found |= {
                "tokens_a_verification": sum(new - 1 for _ in rows) / cycles,
                "verified": dict(sorted(sum((report.verified for report in reports[1:]), reports[0].verified).items())),
                "draft_s": sum(report.draft_s for report in reports) / max(drafts, 1),
                "verify_s": sum(report.verify_s for report in reports) / cycles,
            }
        for row in rows:
            assert row.error is None, row.error
            self._llm.loop.close(row)
        return found


class CapturedBench(Study):
    """Dense decoding, and exact decoding under each plan at each acceptance, in turns."""

    kind = "exact-captured"
    recipe: CapturedRecipe

    def __init__(self, recipe: CapturedRecipe) -> None:
        super().__init__(recipe)
        self._folder = TemporaryDirectory()
        how: dict[str, Any] = {"keep_tokens": 1 << 22, "probe_every": 0, "deterministic": True}
        if recipe.embedded:
            self._llm = LLM(device="cpu", path="eager", dtype="float32", **how)
        else:
            self._llm = gpu_llm(self.kind, Path(self._folder.name), **how)
        self._llm.load()

    def environment(self) -> dict[str, Any]:
        return machine.host_environment() if self.recipe.embedded else machine.gpu_environment(None)

    def run(self) -> Iterator[dict[str, Any]]:
        llm, file = self._llm, Path(self._folder.name) / "anchors.json"
        plans = [*self.recipe.plans, str(with_anchors(parse_plan(ANCHORED), llm.model, ANCHORS, file))]
        runs: dict[str, tuple[str, bool, float | None]] = {  # plan, steady, share of accepted drafts
            "dense": ("dense", False, None),
            "dense, deterministic": ("dense", True, None),
        } | {
            f"{plan} {share}".replace(str(file), "FILE"): (plan, True, share)
            for plan in plans
            for share in self.recipe.accepted
        }
        with imposed_acceptance():
            for length, rows, *rounds in self.recipe.contexts:
                samples = self._in_turns(ImposedRows(llm, length, rows), runs, *rounds or [self.recipe.rounds])
                dense = [sample["seconds"] for sample in samples["dense"]]
                for name, own in samples.items():
                    ratio = median(one / sample["seconds"] for one, sample in zip(dense, own))
                    yield {"tokens": length, "rows": rows, "run": name, "ratio": digits(ratio, 4), "samples": own}
                llm.loop.pages.drop(1 << 30)
                llm.loop.release()

    def _in_turns(
        self, rows: ImposedRows, runs: dict[str, tuple[str, bool, float | None]], rounds: int
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the samples of every run; the first round captures."""
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
        paces: defaultdict[float | None, Paces] = defaultdict(Paces)
        for number in range(rounds + 1):
            for name, (plan, steady, share) in runs.items():
                ImposedRate.share, self._llm.paces = share, paces[share]
                found = digits(rows.measure(plan, self.recipe.new, number, steady, exact=share is not None), 4)
                if number:
                    samples[name].append(found)
        rows.close()
        return samples

    def closing(self, result: dict[str, Any]) -> str:
        return captured_table(result)


COLUMNS = ["tokens", "rows", "decoding", "accepted", "ms per token", "speed-up", "drafts", "ms each", "ms to verify"]


def captured_table(result: dict[str, Any]) -> str:
    """Return the speed of exact decoding over the fastest dense decoding, at acceptances that were imposed."""
    rows = []
    for case in sorted(result["points"], key=lambda case: (case["tokens"], case["rows"])):
        run, _, share = case["run"].rpartition(" ") if case["run"][-1].isdigit() else (case["run"], "", "")
        samples, verified = case["samples"], Counter[str]()
        for sample in samples:
            verified.update(sample.get("verified", {}))
        ms, draft_ms, verify_ms = (
            f"{1e3 * median(sample[key] for sample in samples):.2f}" if key in samples[0] else ""
            for key in ("seconds", "draft_s", "verify_s")
        )
        mean = sum(int(drafts) * count for drafts, count in verified.items()) / max(sum(verified.values()), 1)
        where = [tokens(case["tokens"]), str(case["rows"]), f"`{run}`" if share else run, share]
        rows.append([*where, ms, f"{case['ratio']:.2f}x", f"{mean:.1f}" if verified else "", draft_ms, verify_ms])
    return table(COLUMNS, rows)
