"""The fast path of one model: whether decode steps are captured, and the forward pass of prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import Any, ClassVar

import torch

from kvsift.engine.graphs.crossover import measure_crossover
from kvsift.engine.graphs.session import OpenCache, Session, fixed_slots
from kvsift.engine.graphs.slots import Slots, StepKind
from kvsift.errors import UnsupportedPlan, unknown
from kvsift.kernels.triton_shim import HAVE_TRITON
from kvsift.layer.layer_cache import DEFAULT_PAGE_SIZE
from kvsift.layer.paged_decode import reason_against, rule_of
from kvsift.models.captured_step import NO_STEP, Step
from kvsift.models.decoder import Decoder
from kvsift.models.forward_pass import ForwardPass
from kvsift.models.fused_step import FusedStep
from kvsift.models.hf.forward_step import TransformersStep, kind_of_step
from kvsift.models.hf.generation_config import FILE, GenerationSettings
from kvsift.models.hf.sparse import SparseCache, feeding, make_cache
from kvsift.models.inference import inference
from kvsift.plan.capabilities import PlanCase, reason, verdict
from kvsift.plan.placement import Placement
from kvsift.plan.plan import Plan, Rule
from kvsift.stores.kv_pool import KVPool
from kvsift.types import Objections

log = logging.getLogger("kvsift")
PATHS = ("auto", "captured", "composed", "eager")
DEVICE = Placement()
GPU_TURN = RLock()  # of all models: a capture forbids copies to the whole process
SPARE_TOKENS = 4  # room for steps that are launched before the host reads that a sequence has ended
CAPTURED_TOKENS = 32  # from so many on a step is captured for them: capturing takes as long as some steps


class FastPath:
    """Captured decode steps and forward pass of one model.

    Args:
        device: device of the model.
        path, dense_below, deterministic: see ``LLM``.
        place: where KV lives.

    Attributes:
        turn: lock of the thread that uses the GPU: no thread may synchronise while another captures. On a CPU
            it does nothing.
    """

    objections: ClassVar[Objections] = (  # to captured decode steps, of a case with the fast path
        (lambda case: case.fast_path.is_composed, "requested"),
        (lambda case: case.place.in_host_memory and not case.place.store.captures,
         "its keys and values are in host memory"),
        (lambda case: not case.place.store.captures, "placement={it.place.name} has no pools for captured steps"),
        (lambda case: not case.on_gpu and case.fast_path._path != "eager", "no NVIDIA GPU"),
        (lambda case: case.on_gpu and not HAVE_TRITON, "Triton is not installed"),
        (lambda case: case.settings.applied,
         f"{FILE} asks for {{found}}, which is applied to the logits of each step on the host"),
        (lambda case: reason_against(case.plan), "{found}"),
        (lambda case: reason(case, case.place.store.not_captured), "{found}"),
        (lambda case: case.fast_path._reason_of_model(case.plan, case.model), "{found}"),
    )  # fmt: skip

    def __init__(
        self, path: str, device: torch.device, dense_below: int | str, place: Placement = DEVICE,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        if path not in PATHS:
            raise unknown("path", str(path), PATHS)
        self.deterministic = deterministic
        self._path, self._device, self._dense_below, self._place = path, device, dense_below, place
        self.turn: AbstractContextManager[object] = GPU_TURN if device.type == "cuda" else nullcontext()
        self._making = RLock()  # of what threads share: the step and the trial
        self._step: FusedStep | None = None
        self._forward_pass: ForwardPass | None = None
        self._model_reason: str | None = None  # why no step of the model is captured; "" if none
        self._crossovers: dict[object, int] = {}
        self._logged: set[str] = set()

    @property
    def name(self) -> str:
        """Name of the path in answers."""
        return "eager" if self._path == "eager" else "captured"

    @property
    def is_composed(self) -> bool:
        """Whether composed steps were asked for, by the modules of transformers."""
        return self._path == "composed"

    @property
    def is_required(self) -> bool:
        """Whether sequences that cannot take captured steps are refused."""
        return self._path in ("captured", "eager")

    @property
    def enabled(self) -> bool:
        """Whether steps are captured where plan and model allow it."""
        if not self._place.store.captures:
            return self._path == "captured"  # which is refused
        return self._path in ("captured", "eager") or (self._path == "auto" and self._device.type == "cuda")

    def takes_blocks(self, plan: Plan, exact: bool, model: Any) -> bool:
        """Whether sequences of a plan take steps of blocks (``block_groups``), where they take captured ones."""
        asked = self.enabled and self.deterministic and (exact or rule_of(plan) is None)
        return asked and reason(model, FusedStep.objections, FusedStep.one_by_one) is None

    def reason_plan_uncaptured(self, plan: Plan, model: Any, settings: GenerationSettings) -> str | None:
        """Why decode steps of a model with these settings are not captured; None: they are.

        Raises:
            InputError: if captured steps are required.
        """
        case = PlanCase(plan, self._place, self._device.type == "cuda", model=model, settings=settings, fast_path=self)
        _, against = verdict(case, {"captured": self.objections, "not captured": ()})
        for why in against:
            if self._path == "captured":
                raise UnsupportedPlan(
                    f"decoding cannot be captured: {why}. Leave out path='captured', or change the plan."
                )
            if self.enabled and why not in self._logged:
                self._logged.add(why)
                log.warning("decode steps are not captured: %s", why)
            return why
        return None

    @property
    def not_fused(self) -> Objections:
        """Objections to models whose forward pass is to be fused: on a CPU without captured steps more are."""
        if self.enabled or self._device.type == "cuda":
            return FusedStep.objections + FusedStep.few_rows + FusedStep.one_by_one
        return Decoder.objections

    def forward_pass(self, model: Any) -> ForwardPass | None:
        """The forward pass of prompt chunks, and on a CPU of generated tokens; None: that of transformers."""
        if not (self.enabled or self._path == "auto") or (self._device.type == "cuda" and not HAVE_TRITON):
            return None
        with self._making:
            if self._forward_pass is None and reason(model, self.not_fused, NO_STEP) is None:
                is_captured = reason(model, FusedStep.objections) is None
                self._forward_pass = ForwardPass(self._fused_step(model) if is_captured else Decoder(model))
            return self._forward_pass

    def for_tokens(self, model: Any, caches: Sequence[SparseCache], number: int) -> Slots:
        """Return slots for sequences of one plan, pool and rotation, and so many more tokens of each; for few, no step
        is captured."""
        cache = caches[0]
        for each in caches:
            each.reserve_rows([each.get_seq_length() + number + SPARE_TOKENS])
        capture = self._path != "eager" and number >= CAPTURED_TOKENS
        pages = max(each.table.longest for each in caches)
        return fixed_slots(self._step_of(model, cache.rotation), cache, len(caches), pages, capture)

    def over_pool(self, model: Any, kv: KVPool, open_cache: OpenCache, rotation: int | None, steady: bool) -> Session:
        """Return captured steps over a pool, whose keys are rotated so (``Session``)."""
        step = self._step_of(model, rotation)
        return Session(kv, step, open_cache, self._crossover, self._path != "eager", steady)

    def _step_of(self, model: Any, rotation: int | None) -> Step:
        is_fused = reason(model, FusedStep.objections) is None
        return self._fused_step(model) if is_fused else TransformersStep(model, rotation)

    def _fused_step(self, model: Any) -> FusedStep:
        with self._making:
            if self._step is None:
                self._step = FusedStep(model)
            return self._step

    def _reason_of_model(self, plan: Plan, model: Any) -> str | None:
        with self.turn, self._making:
            if self._model_reason is None:
                kind, against = kind_of_step(model)
                why = reason(model, NO_STEP) or (None if kind else against[-1])
                if why is None and self._path != "eager":
                    why = self._trial(plan, model)
                self._model_reason = why or ""
            return self._model_reason or None

    def _trial(self, plan: Plan, model: Any) -> str | None:
        """Capture a step on a cache of its own, to learn whether the model's code and quantisation allow it."""
        cache = make_cache(model, plan, rows=[4 * (plan.page_size or DEFAULT_PAGE_SIZE)])
        with inference(), feeding(cache, "prefill"):
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=self._device), past_key_values=cache)
        slots = fixed_slots(self._step_of(model, cache.rotation), cache, 1, cache.table.longest, capture=True)
        try:
            slots.prepare(StepKind("dense" if rule_of(plan) is None else "sparse"))
        except Exception as error:  # anything that the model's code, a compiler or a quantisation raises is reported
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return f"a step of {type(model).__name__} cannot be captured ({line})"
        return None

    def _crossover(self, slots: Slots, rule: Rule) -> int:
        if isinstance(self._dense_below, int):
            return self._dense_below
        if self._path == "eager" or self.deterministic:  # what is measured differs from time to time
            return 0
        key = (slots.num_slots, str(rule))
        reserved = slots.batch.table.shape[1] * slots.batch.page_size
        if key not in self._crossovers:
            measured = measure_crossover(slots, rule, reserved)
            if measured is None:  # this cache is too small to measure
                return reserved + 1
            log.info("sparse decode is faster from %d tokens on, for %d sequences", measured, slots.num_slots)
            self._crossovers[key] = measured
        return min(self._crossovers[key], reserved + 1)
