"""Sequences with decode rules of their own in one batch, through the engine's loop, without its public API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvsift.engine.graphs.accounting import CapturedSequence
from kvsift.engine.graphs.captured_sequences import CapturedSequences
from kvsift.engine.graphs.session import Session, sequence_lengths
from kvsift.engine.sampling import Sampling
from kvsift.layer.accounting import RunStats
from kvsift.layer.paged_decode import rule_of
from kvsift.models.decoder_step import DecoderStep
from kvsift.models.hf.sparse import feeding, make_cache
from kvsift.plan.syntax import parse_plan

KEYS = ("queries", "visible_tokens", "density", "sparse_queries", "kv_bytes_read", "recall")


def decode(
    model: Any, plans: Sequence[str], prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], *,
    steps: int, dense_below: int = 0, capture: bool = False, fewer: Sequence[int] = (),
    doubled: list[list[str]] | None = None,
) -> list[tuple[list[int], dict[str, Any]]]:  # fmt: skip
    """Decode prompts side by side, each by its own plan; the last plan is the cache's, and sparse in most layers.
    Sequences take so many steps, or ``fewer``; what their budgets became is added to ``doubled``.

    Returns:
        Tokens and counters of each sequence.
    """
    rules = [rule_of(parse_plan(plan)) for plan in plans]
    lengths = sequence_lengths([len(prompt) + steps + 8 for prompt in prompts], parse_plan(plans[-1]).page_size or 16)
    cache = make_cache(model, plans[-1], rows=lengths)
    seqs = []
    for number, (prompt, sampling, rule) in enumerate(zip(prompts, samplings, rules)):
        num_new = steps + 1 - (fewer[number] if fewer else 0)
        stats = RunStats(probe_every=4)
        cache.turn_to(number, stats)
        with torch.inference_mode(), feeding(cache, "prefill"):
            ids = torch.tensor([prompt], device=model.device)
            logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        token = sampling.chooser(model.device)(logits[0, -1])
        seqs.append(CapturedSequence(cache, number, stats, len(prompt), num_new - 1, token, rule, sampling))
    session = Session(DecoderStep(model), cache, lambda *_: dense_below, capture, rules)
    captured, tokens = CapturedSequences(session), {seq.place: [seq.token] for seq in seqs}
    while running := [seq for seq in seqs if not seq.done]:
        for seq, token in zip(running, captured.step(running)):
            tokens[seq.place].append(token)
            if seq.steps == seq.most:
                captured.leave(seq)
    if doubled is not None:
        doubled += [[widening.after for widening in seq.stats.widenings] for seq in seqs]
    reports = [seq.stats.report()["phases"]["decode"] for seq in seqs]
    return [(tokens[seq.place], {key: report[key] for key in KEYS}) for seq, report in zip(seqs, reports)]
