"""kvsift inside a transformers model (5.17 to 5.23), without touching a modeling file.

    with kvsift.sparse(model, "quest:budget=1024") as run:
        model.generate(**inputs)
    print(run.report())

``sparse`` gives every fresh cache of the model kvsift layers. An explicit cache does the same for one conversation:
``model.generate(..., past_key_values=kvsift.make_cache(model, "quest:budget=1024"))``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedModel

from kvsift.methods.base import Phase
from kvsift.models.transformers_adapter import Adapter, register
from kvsift.models.transformers_cache import PlanSpec, SparseBlock, SparseCache, SparseRun
from kvsift.runtime.sequence import Placement
from kvsift.runtime.spec import parse_plan
from kvsift.runtime.stats import RunStats

__all__ = ["PlanSpec", "SparseBlock", "SparseCache", "SparseRun", "feeding", "make_cache", "register", "sparse"]


@contextmanager
def sparse(
    model: PreTrainedModel, plan: PlanSpec, *, strict: bool = False, probe_every: int = 16, reserve: int = 0,
    placement: Placement = "device",
) -> Iterator[SparseBlock]:  # fmt: skip
    """Run a transformers model under a plan: generate(), pipelines and plain forward calls alike.

    Args:
        model: a decoder whose attention goes through transformers' attention interface; a PEFT, torch.compile or data
            parallel wrapper around one is unwrapped.
        plan: for instance "quest:budget=1024"; see ``kvsift.runtime.spec``.
        strict: raise ``NothingSkipped`` at the end if a sparse phase skipped nothing (otherwise warn).
        probe_every: compare every so many sparse decode steps with exact attention; 0 never.
        reserve: tokens the context is expected to reach; saves copies, and decides how RoPE rotates where that depends
            on the length.
        placement: where KV lives: "device", "split", "offload" or "host", with knobs if need be (``runtime.places``).

    Yields:
        The block, with ``.stats`` and ``.report()``, which sum over its caches. Threads may run the model side by side.

    Raises:
        InputError: for a plan that makes no sense, or a model that cannot be taken over, before anything runs.
    """
    run = SparseRun(parse_plan(plan), RunStats(probe_every), reserve, placement=placement)
    with Adapter.block_of(model, run) as block:
        yield block
    block.check(strict)


def make_cache(
    model: PreTrainedModel, plan: PlanSpec, *, probe_every: int = 16, reserve: int = 0, rows: Sequence[int] = (),
    placement: Placement = "device",
) -> SparseCache:  # fmt: skip
    """A cache that runs ``model`` under a plan wherever it is passed as ``past_key_values``.

    The model's attention becomes "kvsift" and stays so; without such a cache it is exact and dense. With ``rows``,
    lengths that they will not exceed, a ragged batch is fed one row at a time (``SparseCache.turn_to``). Where RoPE
    depends on the length, ``reserve`` and ``rows`` decide how it rotates.
    """
    run = SparseRun(parse_plan(plan), RunStats(probe_every), reserve, rows, placement=placement)
    return Adapter.explicit(model, run)


@contextmanager
def feeding(cache: SparseCache, phase: Phase) -> Iterator[None]:
    """Forward calls with this cache in this block carry tokens of one phase, however many come at once."""
    cache.run.feeding = phase
    try:
        yield
    finally:
        cache.run.feeding = None
