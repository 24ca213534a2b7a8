"""kvsift bench decode: the engine's decode loop end to end, dense and sparse on one model and one set of pools."""

from __future__ import annotations

from dataclasses import dataclass

from kvsift.errors import InputError, unknown
from kvsift_lab.bench import recipe as r

MODEL = "Hugging Face model directory, or a model's name on huggingface.co, such as Qwen/Qwen3-4B; replaces --shape."


def _directory(model: str, flag: str) -> tuple[str, bool]:
    return model, False


@dataclass(frozen=True)
class DecodeRecipe(r.BenchRecipe):
    """Decoding end to end, dense and by a plan in turns, on random keys and values; --model replaces --shape."""

    measured_by = "kvsift_lab.bench.decode_measure:DecodeBench"

    model: str = r.shape()
    random: bool = r.option(
        None, MODEL, flag="--model", kind=str | None, value=True, parse=_directory, targets=("model", "random")
    )
    contexts: tuple[int, ...] = r.contexts("32K,128K")
    batches: tuple[int, ...] = r.option("1,4", "Sequences, for instance 1,4.", flag="--batch", parse=r.counts)
    plan: str = r.option("quest:budget=2048", "Plan that is compared with dense.")
    anchors: int | None = r.option(
        None, "Layers that select for the others, evenly spaced, to measure time; calibrate --layers finds good ones.",
        kind=int | None, minimum=1,
    )  # fmt: skip
    steps: int = r.option(32, "Tokens decoded for a sample.", minimum=2)
    repeats: int = r.repeats(5)
    profile: bool = r.option(False, "Also sum the kernels of a step by name.")
    bandwidth: float | None = r.bandwidth()
    max_seconds: float | None = r.max_seconds()

    def __post_init__(self) -> None:
        from kvsift.layer.paged_decode import reason_against, rule_of
        from kvsift.methods.anchors import AnchoredMethod
        from kvsift.models.transformers_random import SHAPES
        from kvsift.plan.syntax import parse_plan

        if self.random and self.model not in SHAPES:
            raise unknown("shape", self.model, SHAPES)
        r.require_some(self.contexts, self.batches, names="context and batch")
        plan = parse_plan(self.plan)
        reason = "it skips nothing" if rule_of(plan) is None else reason_against(plan)
        if reason is not None:
            raise InputError(f"plan {self.plan!r} cannot be measured against dense captured steps: {reason}.")
        if self.anchors and not (plan.decode and isinstance(plan.decode.method, AnchoredMethod)):
            raise InputError(f"--anchors {self.anchors}: no layer reuses selections under {self.plan!r}; sketch can.")
