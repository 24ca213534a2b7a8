"""Attention of one decode step in one layer: ours against the best dense kernels, over shapes and context lengths."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

from kvsift.benchmarks.attention_check import check_dense, check_sifted, exact_dense
from kvsift.benchmarks.attention_point import Buffers, Point
from kvsift.benchmarks.attention_variants import BASELINES, Attend, Sifted, separate_kernels
from kvsift.benchmarks.timing import Clock, Timer, interleaved
from kvsift.engine.memory import available_bytes
from kvsift.errors import InputError, unknown
from kvsift.kernels.score_pages import KINDS

LARGEST_ERROR = 0.05  # bfloat16 costs a tenth of it; who is further from float32 answers something else
KEPT_FREE = 1 / 5  # of the memory that is free: graphs, references and libraries want some
NOT_EARLY = "single launch, not early"


@dataclass(frozen=True)
class Recipe:
    """Everything a result depends on.

    Attributes:
        shapes: (query heads, KV heads).
        contexts: tokens.
        batch, head_dim, page_size: of every point.
        budget: tokens that a list may show.
        score_by: kinds of summary, a variant each.
        baselines: dense variants, names in ``BASELINES``.
        repeats: samples of each variant.
        breakdown: also time the kernels that the single launch replaces.
        max_seconds: no point is begun after so long.
        seed: of the buffers.
    """

    shapes: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]
    batch: int = 1
    head_dim: int = 128
    page_size: int = 16
    budget: int = 2048
    score_by: tuple[str, ...] = ("minmax", "minmax_fp8")
    baselines: tuple[str, ...] = tuple(BASELINES)
    repeats: int = 15
    breakdown: bool = False
    max_seconds: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for kind in self.score_by:
            if kind not in KINDS:
                raise unknown("summary", kind, KINDS)
        for name in self.baselines:
            if name not in BASELINES:
                raise unknown("baseline", name, BASELINES)
        if not self.score_by or not self.shapes or not self.contexts:
            raise InputError("there is nothing to measure: name at least one shape, context and summary.")
        self.points()

    def points(self) -> list[Point]:
        """Short contexts first, shape by shape."""
        return [
            Point(*shape, context, self.batch, self.head_dim, self.page_size, self.budget)
            for shape in self.shapes
            for context in sorted(self.contexts)
        ]


def run(recipe: Recipe, clock: Clock, device: torch.device) -> Iterator[dict[str, Any]]:
    """Point by point as they are measured; those left out with their reason."""
    started = perf_counter()
    for point in recipe.points():
        here = {"num_query_heads": point.num_query_heads, "num_kv_heads": point.num_kv_heads, "context": point.context}
        here["batch"] = point.batch
        seconds = perf_counter() - started
        if recipe.max_seconds is not None and seconds > recipe.max_seconds:
            measured: dict[str, Any] = {"reason": f"--max-seconds {recipe.max_seconds:g} had passed"}
        else:
            measured = _measured(recipe, point, clock, device)
        _free(device)
        yield {**here, **measured}


def _measured(recipe: Recipe, point: Point, clock: Clock, device: torch.device) -> dict[str, Any]:
    """A point, or why there is none."""
    try:
        return _measure(recipe, point, clock, device)
    except (InputError, torch.OutOfMemoryError) as error:
        return {"reason": _first_line(error)}


@torch.inference_mode()
def _measure(recipe: Recipe, point: Point, clock: Clock, device: torch.device) -> dict[str, Any]:
    started = perf_counter()
    kinds = list(recipe.score_by)
    free = available_bytes(device) or 0
    num_sets = point.num_sets(kinds, int(free * (1 - KEPT_FREE)))
    sets = [Buffers.random(point, kinds, device, recipe.seed + number) for number in range(num_sets)]
    variants = [*_sifted(point, sets, kinds, clock), *_dense(point, sets, recipe.baselines, clock)]
    separate = [piece for kind in kinds for piece in _separate(point, sets, kind, clock)] if recipe.breakdown else []
    _sample([*variants, *separate], recipe.repeats)
    candidates, visible = point.counted
    return {
        "candidate_pages": candidates,
        "visible_tokens": visible * point.page_size,
        "num_sets": num_sets,
        "variants": variants,
        "breakdown": separate,
        "seconds": round(perf_counter() - started, 1),
    }


def _sifted(point: Point, sets: Sequence[Buffers], kinds: list[str], clock: Clock) -> Iterator[dict[str, Any]]:
    for kind in kinds:
        facts = {"name": f"quest-{kind}", "role": "sparse", "bytes": point.sparse_bytes(kind)}
        build = partial(Sifted, point, sets, kind)
        yield _variant(facts, build, partial(check_sifted, point, sets), clock, len(sets))


def _dense(point: Point, sets: Sequence[Buffers], names: Sequence[str], clock: Clock) -> Iterator[dict[str, Any]]:
    if not names:
        return
    exact = exact_dense(point, sets[0])
    for name, build in [each for baseline in names for each in BASELINES[baseline].items()]:
        facts = {"name": name, "role": "dense", "bytes": point.dense_bytes}
        yield _variant(facts, partial(build, point, sets), partial(check_dense, exact), clock, len(sets))


def _separate(point: Point, sets: Sequence[Buffers], kind: str, clock: Clock) -> Iterator[dict[str, Any]]:
    """The kernels of one kind alone, and the single launch without a head start."""
    summary, whole = point.summary_bytes(kind), point.sparse_bytes(kind)
    num_bytes = {"score_pages": summary, "visible_pages": 0, "page_attention": whole - summary, NOT_EARLY: whole}
    try:
        pieces: dict[str, Attend] = separate_kernels(point, sets, kind)
        pieces[NOT_EARLY] = Sifted(point, sets, kind, early=False)
        timers = {name: clock(piece, len(sets)) for name, piece in pieces.items()}
    except Exception as error:
        yield {"name": "all", "score_by": kind, "reason": _first_line(error)}
        return
    for name, timer in timers.items():
        yield {"name": name, "score_by": kind, "bytes": num_bytes[name], "timer": timer}


def _variant(
    facts: dict[str, Any], build: Callable[[], Any], check: Callable[[Any], dict[str, Any]], clock: Clock, num_sets: int
) -> dict[str, Any]:
    """What can be said about a variant, with a timer; without one if it does not run or is not right."""
    try:
        attend = build()
        facts |= check(attend)
        if not facts.get("error", 0.0) <= LARGEST_ERROR:  # NaN is not
            return facts | {"reason": f"its output is {facts['error']:.2g} away from float32's"}
        return facts | {"timer": clock(attend, num_sets)}
    except Exception as error:  # whatever a library that cannot do this shape raises
        return facts | {"reason": _first_line(error)}


def _sample(variants: Sequence[dict[str, Any]], repeats: int) -> None:
    """Replace timers by samples in seconds, taken in turns."""
    timers: dict[str, Timer] = {
        str(number): variant.pop("timer") for number, variant in enumerate(variants) if "timer" in variant
    }
    for number, samples in interleaved(timers, repeats).items():
        variants[int(number)]["samples_s"] = [float(f"{sample:.5g}") for sample in samples]


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def head(recipe: Recipe) -> dict[str, Any]:
    """What a result file begins with."""
    return {"kind": "attention", "recipe": asdict(recipe)}
