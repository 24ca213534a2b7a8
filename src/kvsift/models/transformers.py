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

from kvsift.errors import InputError
from kvsift.methods.base import Phase
from kvsift.models.transformers_adapter import Adapter, register
from kvsift.models.transformers_cache import PlanSpec, SparseCache, SparseRun
from kvsift.models.transformers_origin import origin_of
from kvsift.runtime.sequence import Placement
from kvsift.runtime.spec import parse_plan
from kvsift.runtime.stats import RunStats

__all__ = ["PlanSpec", "SparseCache", "SparseRun", "feeding", "make_cache", "register", "sparse"]


@contextmanager
def sparse(
    model: PreTrainedModel, plan: PlanSpec, *, strict: bool = False, probe_every: int = 16, reserve: int = 0,
    placement: Placement = "device",
) -> Iterator[SparseRun]:  # fmt: skip
    """Run a transformers model under a plan: generate(), pipelines and plain forward calls alike.

    Args:
        model: a decoder whose attention goes through transformers' attention interface.
        plan: for instance "quest:budget=1024"; see ``kvsift.runtime.spec``.
        strict: raise ``NothingSkipped`` at the end if a sparse phase skipped nothing (otherwise warn).
        probe_every: compare every so many sparse decode steps with exact attention; 0 never.
        reserve: tokens the context is expected to reach; saves copies.
        placement: where KV lives: "device", "split", "offload" or "host", with knobs if need be (``runtime.places``).

    Yields:
        The run, with ``.stats`` and ``.report()``.

    Raises:
        InputError: for a plan that makes no sense, or a model that cannot be taken over, before anything runs.
    """
    run = SparseRun(parse_plan(plan), RunStats(probe_every), reserve, placement=placement)
    run.origin = origin_of(model)
    adapter = Adapter.attach(model)
    if adapter.run is not None:
        raise InputError("this model already runs under kvsift.sparse; leave that block before entering another.")
    try:
        run.know_rope(adapter.rope, adapter.no_rope)
        adapter.run = run
        yield run
    finally:
        adapter.run = None
        if not adapter.stays:
            adapter.detach()
    run.check(strict)


def make_cache(
    model: PreTrainedModel, plan: PlanSpec, *, probe_every: int = 16, reserve: int = 0, rows: Sequence[int] = (),
    placement: Placement = "device",
) -> SparseCache:  # fmt: skip
    """A cache that runs ``model`` under a plan wherever it is passed as ``past_key_values``.

    The model's attention becomes "kvsift" and stays so; without such a cache it is exact and dense. With ``rows``,
    lengths that they will not exceed, a ragged batch is fed one row at a time (``SparseCache.turn_to``).
    """
    run = SparseRun(parse_plan(plan), RunStats(probe_every), reserve, rows, placement=placement)
    run.origin = origin_of(model)
    adapter = Adapter.attach(model)
    try:
        run.know_rope(adapter.rope, adapter.no_rope)
        cache = SparseCache(model.config, run)
    except InputError:
        if adapter.run is None and not adapter.stays:
            adapter.detach()
        raise
    adapter.stays = True
    return cache


@contextmanager
def feeding(model: PreTrainedModel, phase: Phase) -> Iterator[None]:
    """Forward calls in this block carry tokens of one phase, however many come at once."""
    adapter = Adapter.attach(model)
    adapter.feeding = phase
    try:
        yield
    finally:
        adapter.feeding = None
