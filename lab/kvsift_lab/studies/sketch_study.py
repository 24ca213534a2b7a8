"""What the parts of a sketch are worth: bits, tokens per mean, precision of means and factors, votes.

    python -m kvsift_lab.studies.sketch_study lab/recipes/sketch-study.toml results/sketch-study.json

Every question is decoded densely. At every fourth step each layer ranks all tokens by every variant and by exact
logits, and estimates attention with 128 visible tokens: every variant has the same queries.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvsift.engine.llm import LLM, Document
from kvsift.engine.prompt import question_text
from kvsift.engine.provenance import versions_and_machine
from kvsift.kernels.sketch import ERROR
from kvsift.methods.base import Method
from kvsift.methods.oracle import exact_logits
from kvsift.methods.scoring import top_units
from kvsift.methods.traits import Traits
from kvsift.native.sketch_format import rotation
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection
from kvsift_lab.eval.contexts import Contexts
from kvsift_lab.eval.recipe import EvalRecipe, Job

EVERY = 4  # steps; neighbouring ones are nearly the same
BUDGET, SINKS, WINDOW = 128, 4, 16
AMONG = (128, 256, 512, 1024)
TILE = 64  # tokens in the largest group


class SketchVariant(NamedTuple):
    """One way to code keys; ``votes``: who shares a selection."""

    bits: int = 1
    group: int = 16  # tokens per mean; 0: no mean
    mean: str = "int8"
    factor_bits: int = 16
    rotated: bool = True
    votes: str = "group"

    @property
    def num_bytes(self) -> float:
        """Per token and KV head of 128 channels, without the values' means."""
        means = 0 if not self.group else (128 + (2 if self.mean == "int8" else 0)) / self.group
        return 16 * self.bits + self.factor_bits / 8 + means


VARIANTS = {
    **{
        f"bits={bits}, {group} tokens per mean": SketchVariant(bits, group) for bits in (1, 2) for group in (16, 32, 64)
    },
    "bits=1, no mean": SketchVariant(group=0),
    "bits=2, no mean": SketchVariant(2, group=0),
    "bits=1, 16, means in fp8": SketchVariant(mean="fp8"),
    "bits=1, 16, factors in 8 bits": SketchVariant(factor_bits=8),
    "bits=1, 16, not rotated": SketchVariant(rotated=False),
    "bits=1, 16, every query head alone": SketchVariant(votes="head"),
    "bits=2, 16, every query head alone": SketchVariant(2, votes="head"),
}


def estimates(variant: SketchVariant, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and variances, float32 [num_query_heads, num_tokens], of scaled queries [num_query_heads, head_dim]."""
    heads, num_tokens, dim = keys.shape
    turn = rotation(dim, keys.device) if variant.rotated else torch.eye(dim, device=keys.device)
    rotated = keys.float() @ turn
    size = variant.group or num_tokens
    means = (
        rotated.unflatten(1, (-1, size)).mean(2, keepdim=True) if variant.group else rotated.new_zeros(heads, 1, 1, dim)
    )
    means = _rounded(means, variant.mean)
    x = (rotated.unflatten(1, (-1, size)) - means).flatten(1, 2)
    most = 2**variant.bits - 1
    step = x.norm(dim=-1, keepdim=True).clamp_min(1e-30) / math.sqrt(dim)
    codes = torch.where(x >= 0, 1.0, -1.0) if variant.bits == 1 else 2 * ((x / step).floor() + 2).clamp(0, most) - most
    factors = x.square().sum(-1) / (x * codes).sum(-1).clamp_min(1e-30)
    if variant.factor_bits == 8:  # sixteen steps per doubling
        factors = torch.exp2((factors.clamp_min(2.0**-8).log2() * 16).round() / 16)
    q = (queries.float() @ turn).unflatten(0, (heads, -1))  # [num_kv_heads, group, dim]
    logits = (q @ codes.mT) * factors.unsqueeze(1) + (q @ means.squeeze(2).mT).repeat_interleave(size, -1)
    variance = q.square().sum(-1, keepdim=True) * ERROR[variant.bits] * factors.square().unsqueeze(1)
    return logits.flatten(0, 1), variance.flatten(0, 1)


def _rounded(means: Tensor, form: str) -> Tensor:
    if form == "fp8":
        return means.to(torch.float8_e4m3fn).float()
    scale = means.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (means / scale).round() * scale


@dataclass(frozen=True)
class Study(Method):
    """A method that compares all variants, and selects everything."""

    traits: ClassVar[Traits] = Traits()

    found: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        if start % EVERY == 0:
            for name, number, value in comparisons(shape, queries, reader):
                self.found[name, number].append(value)
        every = torch.arange(candidates.first, candidates.stop, device=queries.device)
        return Selection(every.expand(shape.num_kv_heads, -1), 1)


def comparisons(shape: LayerShape, queries: Tensor, reader: KVReader) -> Iterator[tuple[str, str, float]]:
    """Name of a variant, what was measured, and the number."""
    stop = reader.length // TILE * TILE  # every group is whole
    keys, values = reader.keys(0, stop), reader.values(0, stop).float()
    logits = exact_logits(shape, queries, keys)[:, 0]
    window = stop - WINDOW
    shares = logits.softmax(-1)
    dense = _attended(shares, values)
    for name, variant in VARIANTS.items():
        guess, variance = estimates(variant, queries[:, 0] * shape.scale, keys)
        lists = shape.num_query_heads if variant.votes == "head" else shape.num_kv_heads
        ranked = _votes((guess - variance / 2)[:, SINKS:window], lists)
        wanted = top_units(_votes(logits[:, SINKS:window], lists), BUDGET)
        for among in AMONG:
            near = top_units(ranked, among)
            yield name, f"recall {among}", float((wanted.unsqueeze(2) == near.unsqueeze(1)).any(2).float().mean())
        seen = torch.zeros(lists, stop, dtype=torch.bool, device=keys.device)
        seen.scatter_(1, top_units(ranked, BUDGET - SINKS - WINDOW) + SINKS, True)
        seen[:, :SINKS] = seen[:, window:] = True
        seen = seen.repeat_interleave(shape.num_query_heads // lists, 0)
        yield name, "recovered", float((shares * seen).sum(-1).mean())
        for what, weights in (("estimated", guess - variance / 2), ("without the variance", guess)):
            yield name, what, _error(logits, weights, seen, values, dense)
        visible = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        yield name, "left out", _distance(_attended(visible, values), dense)


def _votes(logits: Tensor, lists: int) -> Tensor:
    return logits.softmax(-1).unflatten(0, (lists, -1)).mean(1)


def _attended(weights: Tensor, values: Tensor) -> Tensor:
    return (weights.unflatten(0, (len(values), -1)) @ values).flatten(0, 1)


def _error(logits: Tensor, guess: Tensor, seen: Tensor, values: Tensor, dense: Tensor) -> float:
    """Distance from dense attention with the unseen tokens as groups of 16 of equal values."""
    merged = torch.where(seen, logits, guess).softmax(-1)
    alike = values.unflatten(1, (-1, 16)).mean(2).repeat_interleave(16, 1)
    return _distance(_attended(merged * seen, values) + _attended(merged * ~seen, alike), dense)


def _distance(output: Tensor, dense: Tensor) -> float:
    """Squared, as a share of the dense answer's square."""
    return float(((output - dense).square().sum(-1) / dense.square().sum(-1)).mean())


def samples_of(recipe: EvalRecipe, llm: LLM, job: Job) -> Iterator[dict[str, Any]]:
    """Means over the steps and layers of each question of one context."""
    contexts = Contexts(recipe, llm.tokenizer)
    sample = contexts.sample(job)
    ids = list(sample.context_ids)
    document = Document(llm, ids, lambda question: ids + contexts.encode(question_text(question)), llm.plan)
    budget = Budget(ratio=1e-9, sinks=SINKS, window=WINDOW, dense_layers=())
    for index, question in enumerate(sample.questions):
        method = Study()
        plan = Plan(decode=Rule(method, budget))
        document.ask(question.text, plan=plan, max_new_tokens=question.max_new_tokens, question_phase="decode")
        for name in VARIANTS:
            numbers = {number: round(fmean(v), 5) for (of, number), v in method.found.items() if of == name}
            yield {"task": job.task, "seed": job.seed, "question": index, "variant": name, **numbers}


def main() -> None:
    recipe, out = EvalRecipe.load(Path(sys.argv[1])), Path(sys.argv[2])
    llm = LLM(recipe.model, "dense", device=recipe.device, dtype=recipe.dtype, probe_every=0)
    samples: list[dict[str, Any]] = []
    for job in Contexts(recipe, llm.tokenizer).jobs():
        samples += samples_of(recipe, llm, job)
        print(f"{job.task} {job.seed} done", file=sys.stderr)
    sizes = {name: variant.num_bytes for name, variant in VARIANTS.items()}
    head = {"kind": "sketch study", "recipe": asdict(recipe), "bytes": sizes, **versions_and_machine(llm.device)}
    lines = ",\n".join(json.dumps(sample) for sample in samples)
    out.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "samples": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
