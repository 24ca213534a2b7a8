"""Whether an LLM decodes by captured steps, and what it keeps for them from one call to the next."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kvsift.engine.crossover import measure_crossover
from kvsift.engine.session import Session, Step, row_lengths
from kvsift.engine.slots import Slots, StepKind
from kvsift.engine.transcript import Request
from kvsift.errors import InputError, unknown
from kvsift.kernels.triton_shim import HAVE_TRITON
from kvsift.models.decoder_prefill import DecoderPrefill
from kvsift.models.decoder_step import DecoderStep, placement_reason
from kvsift.models.transformers import SparseCache, feeding, make_cache
from kvsift.models.transformers_step import TransformersStep
from kvsift.runtime.paged_decode import reason_against, rule_of
from kvsift.runtime.plan import Plan
from kvsift.runtime.sequence import DEFAULT_PAGE_SIZE, Placement

if TYPE_CHECKING:
    from kvsift.engine.llm import LLM

log = logging.getLogger("kvsift")
PATHS = ("auto", "captured", "composed", "eager")
T = TypeVar("T")
SPARE_TOKENS = 4  # steps that run before the host knows that a row has ended need a place to write to


def in_turns(turn: AbstractContextManager[object], steps: Generator[T]) -> Iterator[T]:
    """The steps, each of them in a turn of its own, the closing too."""
    try:
        while True:
            with turn:
                try:
                    step = next(steps)
                except StopIteration:
                    return
            yield step
    finally:
        with turn:
            steps.close()


class FastPath:
    """Captured steps of one model.

    Args:
        path: see ``LLM``.
        device: of the model.
        dense_below: see ``LLM``.
        placement: see ``LLM``.

    Attributes:
        turn: held by the thread that uses the GPU. Capturing a graph and waiting for the device do not go together, so
            threads take turns there; on a CPU they do not.
    """

    def __init__(
        self, path: str, device: torch.device, dense_below: int | str, placement: Placement = "device"
    ) -> None:
        if path not in PATHS:
            raise unknown("path", str(path), PATHS)
        self._path, self._device, self._dense_below, self._placement = path, device, dense_below, placement
        self.turn: AbstractContextManager[object] = RLock() if device.type == "cuda" else nullcontext()
        self._making = RLock()  # of what all threads share: the step, and the trial
        self._step: DecoderStep | None = None
        self._prefill: DecoderPrefill | None = None
        self._model_reason: str | None = None  # against any step of the model; "" if there is none
        self._kept: Session | None = None  # of the last call that brought its own prompts
        self._crossovers: dict[object, int] = {}
        self._logged: set[str] = set()

    @property
    def name(self) -> str:
        """What an answer calls this path."""
        return "eager" if self._path == "eager" else "captured"

    @property
    def wanted(self) -> bool:
        """Whether steps are captured if plan and model allow it."""
        if self._placement != "device":
            return self._path == "captured"  # which refuses
        return self._path in ("captured", "eager") or (self._path == "auto" and self._device.type == "cuda")

    def reason_against(self, plan: Plan, model: Any) -> str | None:
        """Why decoding goes the composed path; None if it does not.

        Raises:
            InputError: if it must not.
        """
        if self._path == "composed":
            return "asked for"
        if self._placement != "device":
            reason: str | None = "its keys and values are in host memory"
        elif self._device.type != "cuda" and self._path != "eager":
            reason = "no NVIDIA GPU"
        elif self._device.type == "cuda" and not HAVE_TRITON:
            reason = "Triton is not installed"
        else:
            reason = reason_against(plan) or self._reason_against(plan, model)
        if reason is not None and self._path == "captured":
            raise InputError(f"decoding cannot be captured: {reason}. Leave out path='captured', or change the plan.")
        if reason is not None and self.wanted and reason not in self._logged:
            self._logged.add(reason)
            log.warning("decoding goes the composed path: %s", reason)
        return reason

    def fused(self, model: Any) -> DecoderPrefill | None:
        """The fused forward pass, for prompt chunks, and on a CPU for generated tokens; None where they go through
        transformers."""
        uncaptured = self._path == "auto"
        if not (self.wanted or uncaptured) or (self._device.type == "cuda" and not HAVE_TRITON):
            return None
        with self._making:
            if self._prefill is None and DecoderStep.reason_against(model) is None and placement_reason(model) is None:
                self._prefill = DecoderPrefill(self._fused_step(model))
            return self._prefill

    def take(self, llm: LLM, plan: Plan, requests: Sequence[Request]) -> tuple[SparseCache, Session | None]:
        """An empty cache for requests that RoPE rotates alike, to be fed one by one, and captured steps over it if
        there are any: those of the last call, if they will do. They are the caller's until it gives them to ``keep``.
        """
        page_size, length = plan.page_size or DEFAULT_PAGE_SIZE, max(request.length for request in requests)
        totals = [len(request.ids) + request.max_new_tokens for request in requests]
        rows = row_lengths([total + SPARE_TOKENS for total in totals], page_size)
        with self._making:  # no two threads take the same
            kept = self._kept
            self.release()
        if (
            kept is not None
            and kept.cache.run.plan == plan
            and kept.cache.rotation == llm.rotation(length)
            and kept.has_room(rows)
        ):
            kept.cache.clear(rows)
            return kept.cache, kept
        del kept  # its memory is free before the new cache grows
        return llm.new_cache(plan, 0, rows, length), None

    def release(self) -> None:
        """Give back the pools and graphs of the last call."""
        self._kept = None

    def keep(self, session: Session) -> None:
        """For the next call."""
        self._kept = session

    def session(self, model: Any, cache: SparseCache, kept: Session | None) -> Session:
        """Captured steps over a cache: those at hand if they still hold."""
        if kept is not None and kept.cache is cache and kept.holds:
            return kept
        return Session(self._step_of(model, cache), cache, self._crossover, capture=self._path != "eager")

    def extend(self, model: Any, cache: SparseCache, length: int, kept: Session | None) -> Session:
        """Captured steps over a cache of one row, which will grow to a length: those at hand if they still hold."""
        if kept is not None and not (kept.has_room([length + SPARE_TOKENS]) and kept.holds):
            kept.forget()  # old pools are free before new ones grow
        for attention in cache.attentions:
            attention.store.reserve_rows([length + SPARE_TOKENS])
        return self.session(model, cache, kept)

    def _step_of(self, model: Any, cache: SparseCache) -> Step:
        if DecoderStep.reason_against(model) is not None:
            return TransformersStep(model, cache.rotation)
        return self._fused_step(model)

    def _fused_step(self, model: Any) -> DecoderStep:
        with self._making:
            if self._step is None:
                self._step = DecoderStep(model)
            return self._step

    def _reason_against(self, plan: Plan, model: Any) -> str | None:
        with self.turn, self._making:
            if self._model_reason is None:
                reason = placement_reason(model)
                if reason is None and DecoderStep.reason_against(model) is not None:
                    reason = TransformersStep.reason_against(model)
                if reason is None and self._path != "eager":
                    reason = self._trial(plan, model)
                self._model_reason = reason or ""
            return self._model_reason or None

    def _trial(self, plan: Plan, model: Any) -> str | None:
        """Capture a step on a cache of its own: whether a model's code or a quantisation allows it shows only then."""
        page_size = plan.page_size or DEFAULT_PAGE_SIZE
        cache = make_cache(model, plan, rows=row_lengths([4 * page_size], page_size))
        with torch.inference_mode(), feeding(cache, "prefill"):
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=self._device), past_key_values=cache)
        slots = Session(self._step_of(model, cache), cache, lambda cache, slots: 0).slots(1)
        try:
            slots.prepare(StepKind(dense=rule_of(plan) is None, sampled=False))
        except Exception as error:  # of the model's code, of a compiler, of a quantisation: whatever it is, it is said
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return f"a step of {type(model).__name__} cannot be captured ({first})"
        return None

    def _crossover(self, cache: SparseCache, slots: Slots) -> int:
        if isinstance(self._dense_below, int):
            return self._dense_below
        if self._path == "eager":
            return 0
        store, key = cache.attentions[0].store, (slots.num_slots, str(rule_of(cache.run.plan)))
        reserved = max(len(store.table.planned(row)) for row in range(store.num_rows)) * store.page_size
        if key not in self._crossovers:
            measured = measure_crossover(slots, reserved)
            if measured is None:  # this cache is too small to tell
                return reserved + 1
            log.info("lists pay from %d tokens on, for %d rows", measured, slots.num_slots)
            self._crossovers[key] = measured
        return min(self._crossovers[key], reserved + 1)
