"""kvsift inside a transformers model (5.17 to 5.23), without touching a modeling file.

    with kvsift.sparse(model, "sketch:budget=1024") as run:
        model.generate(**inputs)
    print(run.report())

``sparse`` gives every fresh cache of the model kvsift layers. An explicit cache does the same for one conversation:
``model.generate(..., past_key_values=kvsift.make_cache(model, "sketch:budget=1024"))``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from shlex import quote

from transformers import PreTrainedModel

from kvsift.checkpoint import local_directory
from kvsift.layer.accounting import RunStats
from kvsift.methods import checks
from kvsift.methods.base import Phase
from kvsift.models.hf.adapter import Adapter, register
from kvsift.models.hf.cache import PlanSpec, SparseBlock, SparseCache
from kvsift.models.hf.run import SparseRun
from kvsift.models.hf.unwrap import device_of_inputs, unwrapped
from kvsift.plan.capabilities import ONLY_DRAFTS, check
from kvsift.plan.placement import PlacementSpec
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import is_auto, parse_plan
from kvsift.plan.tuned_plan import ModelPlans
from kvsift.threads import give_back

__all__ = ["PlanSpec", "SparseBlock", "SparseCache", "SparseRun", "feeding", "make_cache", "register", "sparse"]


@contextmanager
def sparse(
    model: PreTrainedModel, plan: PlanSpec, *, strict: bool = False, probe_every: int = 16, reserve: int = 0,
    placement: PlacementSpec = "device",
) -> Iterator[SparseBlock]:  # fmt: skip
    """Run a transformers model under a plan: generate(), pipelines and plain forward calls alike.

    Args:
        model: a decoder whose attention goes through transformers' attention interface; a PEFT, torch.compile or data
            parallel wrapper around one is unwrapped.
        plan: for instance "sketch:budget=1024"; see ``kvsift.plan.syntax``. "auto" is the plan that ``kvsift tune``
            found for the checkpoint that the model was loaded from, else the default one with a guard, which is logged.
        strict: raise ``NothingSkipped`` at the end if a sparse phase skipped nothing (otherwise warn).
        probe_every: compare every Nth sparse decode step with exact attention; 0 never.
        reserve: expected tokens of the context; saves copies, and decides how RoPE rotates where that depends on the
            length.
        placement: where KV lives: "device", "split", "offload" or "host", with its options (``plan.placement``).

    Yields:
        The block, with ``.stats`` and ``.report()``, which sum over its caches. Threads may run the model side by side.

    Raises:
        InputError: for an invalid plan, or a model whose attention cannot be replaced, before anything runs.
    """
    parsed = _plan_of(model, plan, probe_every)
    check(parsed, ONLY_DRAFTS)
    checks.flag("strict", strict)
    run = SparseRun(parsed, RunStats(probe_every), reserve, placement=placement)
    try:
        with Adapter.block_of(model, run) as block:
            yield block
    finally:
        give_back()
    block.check(strict)


def make_cache(
    model: PreTrainedModel, plan: PlanSpec, *, probe_every: int = 16, reserve: int = 0, rows: Sequence[int] = (),
    placement: PlacementSpec = "device",
) -> SparseCache:  # fmt: skip
    """Return a cache that runs ``model`` under a plan wherever it is passed as ``past_key_values``.

    The model's attention becomes "kvsift" and stays so; without such a cache it is exact and dense. ``rows``
    are maximum lengths of sequences, for which pages are reserved. Where RoPE depends on the length, ``reserve`` and
    ``rows`` decide how it rotates.
    """
    parsed = _plan_of(model, plan, probe_every)
    check(parsed, ONLY_DRAFTS)
    return make_drafting_cache(model, parsed, probe_every=probe_every, reserve=reserve, rows=rows, placement=placement)


def make_drafting_cache(
    model: PreTrainedModel, plan: PlanSpec, *, probe_every: int = 16, reserve: int = 0, rows: Sequence[int] = (),
    placement: PlacementSpec = "device",
) -> SparseCache:  # fmt: skip
    """As ``make_cache``, also under plans that only draft; for callers that verify."""
    run = SparseRun(_plan_of(model, plan, probe_every), RunStats(probe_every), reserve, rows, placement=placement)
    return Adapter.explicit(model, run)


def _plan_of(model: PreTrainedModel, plan: PlanSpec, probe_every: int) -> Plan:
    """Return a plan for a model, whose checkpoint is looked for where it was loaded from if the plan is ``auto``."""
    if not is_auto(plan):
        return parse_plan(plan)
    inner = unwrapped(model)
    name = str(inner.config.name_or_path)
    directory = local_directory(name, getattr(inner.config, "_commit_hash", None)) if name else None
    no_guard = "" if probe_every else "probe_every=0 checks none"
    return ModelPlans(directory, device_of_inputs(inner).type, model=name and quote(name), no_guard=no_guard).auto


@contextmanager
def feeding(cache: SparseCache, phase: Phase) -> Iterator[None]:
    """Make all tokens fed with this cache in this block tokens of one phase, whatever their number."""
    cache.run.feeding = phase
    try:
        yield
    finally:
        cache.run.feeding = None
