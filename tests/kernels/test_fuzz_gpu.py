"""A thousand random decode steps on a GPU against the reference, most of them by the single launch.

What a kernel is compiled for is drawn from a few dozen combinations, because every one takes a second to compile;
everything else is drawn anew for each step. One seed: the same steps in every run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import pytest
import torch
from kernels.conftest import DEVICE
from kernels.decode_cases import DecodeCase, draw_case
from kernels.decode_checks import check_step

from kvsift.kernels.cuda_module import have_nvrtc
from kvsift.kernels.page_summary import SUMMARIES
from kvsift.kernels.sifted_attention import FEWEST_KEYS, GROUP_PAGES, SiftSpace, sifted_attention, single_launch_runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not have_nvrtc(), reason="needs an NVIDIA GPU of the Hopper generation or later"),
]

CASES = 1000
SINGLE, TRITON = 30, 10  # variants of the single launch, and of the three kernels for what it does not take
LONGEST = 20_000
TABLE_STEP = 16  # pages; Triton compiles anew for a table that is no multiple


class Variant(NamedTuple):
    """What kernels are compiled for."""

    single: bool
    group: int
    head_dim: int
    page_size: int
    kind: str
    dtype: torch.dtype
    capacity: int  # of a list
    softcap: bool
    sink_logit: bool
    shared: bool
    num_kv_heads: int | None  # None: any

    @classmethod
    def draw(cls, rng: random.Random, single: bool) -> Variant:
        dtype, page_size = rng.choice([torch.bfloat16, torch.bfloat16, torch.float16]), rng.choice([8, 16, 16, 32])
        softcap, sink_logit = rng.random() < 0.3, rng.random() < 0.3
        if single:
            kind = rng.choice([kind for kind in SUMMARIES if kind != "centroid_radius"])
            head_dim = rng.choice([64, 128, 256, 512])
            group = rng.randint(1, 8 if head_dim == 512 else 16)
            capacity = rng.choice([5, 16, 40, 100, 128, FEWEST_KEYS // GROUP_PAGES])
            shape = (group, head_dim, page_size, kind, dtype, capacity, softcap, sink_logit)
            return cls(True, *shape, shared=True, num_kv_heads=None)
        kind, capacity = rng.choice([*SUMMARIES, "centroid_radius"]), rng.choice([16, 128])
        shape = (rng.randint(1, 8), rng.choice([80, 96, 192]), page_size, kind, dtype, capacity, softcap, sink_logit)
        return cls(False, *shape, shared=rng.random() < 0.5, num_kv_heads=rng.choice([1, 2, 4]))


def draw_step(variant: Variant, rng: random.Random, seed: int) -> tuple[DecodeCase, dict[str, Any]]:
    """A step for a variant: how many rows and heads, how long, what is shown of each, where it lies."""
    batch, num_kv_heads = rng.randint(1, 4), variant.num_kv_heads or rng.randint(1, 8)
    lengths = [int(LONGEST ** rng.random()) for _ in range(batch)]  # as many below 140 tokens as above
    if variant.single and rng.random() < 0.05:  # more candidates than are compared at once
        lengths, num_kv_heads = [rng.randint(FEWEST_KEYS, FEWEST_KEYS * GROUP_PAGES) * variant.page_size], 1
    spans = []
    for _ in range(batch):
        window = rng.randint(1, max(variant.capacity // 3, 1))
        sinks = rng.randint(0, variant.capacity // 3)
        room = variant.capacity - sinks - window
        spans.append((sinks, window, rng.choice([0, 1, room, room, rng.randint(0, room)])))
    held = -(-max(lengths) // variant.page_size)
    case = draw_case(
        lengths, num_kv_heads, variant.group, variant.head_dim, variant.page_size, variant.dtype, kind=variant.kind,
        spans=spans[: len(lengths)], foreign=rng.random() < 0.3, seed=seed,
        table_pages=-(-held // TABLE_STEP) * TABLE_STEP,
    )  # fmt: skip
    how: dict[str, Any] = {}
    if variant.softcap:
        how["softcap"] = rng.choice([2.0, 30.0])
    if variant.sink_logit:
        how["sink_logit"] = 3 * torch.randn(case.queries.shape[1], device=DEVICE).to(variant.dtype)
    return case, how


def run_step(variant: Variant, case: DecodeCase, how: dict[str, Any]) -> tuple[float, int]:
    """At once and early, over one workspace; the largest error, and the pages in dispute."""
    pages, _ = case.new_lists(variant.shared, variant.capacity)
    assert single_launch_runs(case.queries, case.kv, case.summary, pages, case.kind) == variant.single
    space = SiftSpace.make(case.kv, variant.group)
    late, early = (
        check_step(sifted_attention, case, variant.shared, variant.capacity, space=space, early=early, **how)
        for early in (False, True)
    )
    assert torch.equal(late.output, early.output), "early launches answer otherwise"
    assert set(space.launches[:, 0].tolist()) == {2 if variant.single else 0}
    return max(late.error, early.error), late.disputed


def test_a_thousand_random_steps(record_property: Callable[[str, object], None]) -> None:
    rng, started = random.Random(0), perf_counter()
    variants = [Variant.draw(rng, single=True) for _ in range(SINGLE)]
    variants += [Variant.draw(rng, single=False) for _ in range(TRITON)]
    errors, disputed, tokens = [], Counter[int](), 0
    for index in range(CASES):
        variant = variants[index % len(variants)]
        case, how = draw_step(variant, rng, index)
        try:
            error, pages = run_step(variant, case, how)
        except AssertionError as failure:
            lengths = case.kv.lengths.tolist()
            raise AssertionError(f"step {index} {variant} {lengths} {case.spans.tolist()} {how}: {failure}") from None
        errors.append(error)
        disputed[index] += pages
        tokens += int(case.kv.lengths.sum())
    record_property(
        "measured",
        f"{CASES} random steps, {len(variants)} variants, {tokens} tokens cached, {perf_counter() - started:.0f} s; at "
        f"worst {max(errors):.2f} times the reference's error (2 are allowed); {sum(disputed.values())} pages in "
        f"dispute in {sum(map(bool, disputed.values()))} steps",
    )
