"""Sequences of the loop in captured steps, and histories of such sequences."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from engine.tiny_directory import text_of

from kvsift import LLM, Sampling
from kvsift.engine.executor import Executor
from kvsift.engine.loop import Loop
from kvsift.engine.options import GenerateOptions
from kvsift.engine.request import Request
from kvsift.engine.sequence import EngineSequence
from kvsift.engine.speculative.exactness import exact_decoder
from kvsift.engine.transcript import TextOutput
from kvsift.models.hf.cache import SparseCache
from kvsift.plan.syntax import parse_plan

GRID = 64
BELOW = 260
QUEST = "quest:budget=128:window=16:dense_layers=0"
PLANS = [
    QUEST,
    "dense",
    "quest:budget=96:window=16:dense_layers=1",
    "quest:ratio=0.4:window=32:sinks=20:dense_layers=0+2",
    "sketch:budget=64:window=16:dense_layers=none",
    "sketch:budget=80:bits=2:window=16:dense_layers=0",
    "snapkv:budget=128:window=16:evict=true",
    "quest:budget=64:window=16:dense_layers=none:min_recovery=0.97",
]
KEYS = ("queries", "visible_tokens", "density", "sparse_queries", "kv_bytes_to_select", "kv_bytes_dense", "recall")
GREEDY = Sampling()
PENALISED = Sampling(0.9, seed=6, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={80: 1.5})


def new_llm(directory: Path, path: str = "eager", device: str = "cpu", **options: Any) -> LLM:
    settings = {"device": device, "chunk_size": GRID, "dtype": "float32", "probe_every": 3, "dense_below": BELOW}
    return LLM(directory, "dense", path=path, **{**settings, **options})


def new_loop(llm: LLM, **options: Any) -> Executor:
    """Give an LLM a loop with these options; what that does with the model."""
    executor = Executor(llm)
    llm.loop = Loop(executor, GRID, **options)
    return executor


def new_sequence(
    llm: LLM, text: str, plan: str, num_tokens: int = 12, sampling: Sampling = GREEDY, client: str = "",
    exact: bool = False,
) -> EngineSequence:  # fmt: skip
    ids = llm.tokenizer(text)["input_ids"]
    parsed = parse_plan(plan)
    runs_as = llm.executed_plan(parsed, len(ids) + num_tokens, GenerateOptions(exact=exact))
    request = Request(ids, num_tokens, runs_as, sampling, client=client, exact=exact)
    return EngineSequence(request, TextOutput(request, llm.tokenizer, llm.device), decoder=exact_decoder(llm, request))


def take_steps(llm: LLM, seqs: list[EngineSequence], after_step: Callable[[], object] = lambda: None) -> None:
    while not all(seq.is_ended for seq in seqs):
        llm.loop.step()
        llm.loop.check()
        after_step()


def alone(llm: LLM, *arguments: Any, **options: Any) -> EngineSequence:
    seq = new_sequence(llm, *arguments, **options)
    llm.loop.submit(seq)
    take_steps(llm, [seq])
    llm.loop.close(seq)
    return seq


def together(llm: LLM, cases: Iterable[tuple[Any, ...]]) -> list[EngineSequence]:
    """Sequences that come at once, each with its arguments of ``new_sequence``."""
    seqs = [new_sequence(llm, *case) for case in cases]
    for seq in seqs:
        llm.loop.submit(seq)
    take_steps(llm, seqs)
    return seqs


def tokens(seq: EngineSequence) -> list[int]:
    found: list[int] = seq.output.transcript.new_ids  # type: ignore[attr-defined]
    return found


def counters(seq: EngineSequence) -> dict[str, Any]:
    report = seq.report.stats.report()
    guard = [(event["position"], event["from"], event["to"]) for event in report["guard"]]
    return {key: report["phases"]["decode"][key] for key in KEYS} | {"guard": guard}


def assert_equal(seq: EngineSequence, other: EngineSequence) -> None:
    assert seq.error is None
    assert tokens(seq) == tokens(other)[: len(tokens(seq))]
    if seq.finish_reason == other.finish_reason:
        assert counters(seq) == counters(other)


def pinned_caches(llm: LLM) -> list[SparseCache]:
    """Caches of the documents that were prefilled."""
    return [prefix.cache for prefix in llm.loop.pages.pinned if prefix.cache is not None]


def assert_nothing_left(llm: LLM) -> None:
    """No sequence keeps pages or captured steps."""
    llm.release()
    assert llm.loop.pages.kv.pages.num_pages == 0


def history(llm: LLM, rng: random.Random) -> list[tuple[EngineSequence, tuple[Any, ...]]]:
    """Let sequences come and go until all have ended; returns each with its arguments."""
    seqs: list[tuple[EngineSequence, tuple[Any, ...]]] = []

    def act() -> None:
        if rng.random() < 0.3 and len(seqs) < 8:
            sampling = rng.choice([GREEDY, Sampling(1.1, 0.9, seed=4), PENALISED])
            case = text_of(rng.choice([70, 200, 250, 330])), rng.choice(PLANS), rng.choice([1, 2, 7, 30]), sampling
            seq = new_sequence(llm, *case, client=str(rng.randint(0, 1)))
            llm.loop.submit(seq)
            seqs.append((seq, case))
        elif rng.random() < 0.1 and seqs:
            llm.loop.cancel(rng.choice(seqs)[0])

    while not seqs:
        act()
    take_steps(llm, [seq for seq, _ in seqs], act)
    take_steps(llm, [seq for seq, _ in seqs])
    return seqs
