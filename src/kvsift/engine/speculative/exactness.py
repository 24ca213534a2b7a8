"""Whether the answers of a model can be exact, and the decoder that makes them so."""

from __future__ import annotations

import torch

from kvsift.engine.model_runner import ModelRunner
from kvsift.engine.request import Request
from kvsift.engine.speculative.decoder import ExactDecoder
from kvsift.errors import Conflict, UnsupportedPlan
from kvsift.models.fused_step import FusedStep
from kvsift.plan.capabilities import ONLY_DRAFTS, PlanCase, check, reason
from kvsift.plan.plan import Plan
from kvsift.types import Objections

EXACT_PLANS: Objections = (
    (lambda case: case.plan.prefill is not None,
     "the plan reads prompts by {it.plan.prefill.name}, and an answer after that is not the one of dense attention. "
     "Leave the rule of prefill out."),
    (lambda case: not case.plan.can_undo,
     "{it.plan.decode.name} never sees tokens again that it has left out, so rejected drafts could not be taken back. "
     "Name a method that keeps all, such as sketch, without evict=true."),
    (lambda case: case.plan.is_guarded,
     "every token is verified, so min_recovery has nothing to guard. Leave it out."),
    (lambda case: case.plan.wants_hidden,
     "{it.plan.decode.name} foresees queries in passes that cannot verify. Name another method, such as sketch."),
)  # fmt: skip
EXACT_PLACES: Objections = (
    (lambda case: case.place.in_host_memory, "placement={it.place.name} is not supported. Leave it out."),
    (lambda case: case.runner.fast_path.is_composed,
     "path='composed' has no pass that verifies drafts. Leave path out."),
    (lambda case: not case.runner.fast_path.enabled
     and (own := case.runner.fast_path.forward_pass(case.runner.model)) and not own.joins,
     "verification needs the compiled core (see kvsift doctor), which multiplies bfloat16 and float32. This is "
     "{it.runner.model.__class__.__name__} in {it.runner.dtype}. Leave exact out, with plan='dense'."),
    (lambda case: not case.runner.fast_path.enabled and case.runner.dtype != torch.float32
     and case.runner.fast_path.forward_pass(case.runner.model) is None,
     "the modules of {it.runner.model.__class__.__name__} round a pass of several tokens otherwise than single ones, "
     "which only float32 makes small enough. Give dtype=float32, or leave exact out, with plan='dense'."),
)  # fmt: skip
EXACT_STEPS: Objections = (  # captured
    (lambda case: not case.runner.deterministic,
     "on a GPU the sums of a pass depend on its number of tokens, so that drafts could not be verified to the last "
     "bit. Open the model with deterministic=True (kvsift serve --deterministic), or leave exact out, with "
     "plan='dense'."),
    (lambda case: case.runner.reason_uncaptured(case.plan) or case.runner.reason_apart(case.plan),
     "on a GPU, drafts are verified in captured steps, and {found}. Name another plan, or plan='dense'."),
    (lambda case: reason(case.runner.model, FusedStep.objections, FusedStep.one_by_one),
     "{found}. Leave exact out, with plan='dense'."),
)  # fmt: skip


def check_exact(runner: ModelRunner, plan: Plan, exact: bool) -> None:
    """Refuse exact decoding where it cannot be promised, and plans that only draft where it was not asked for.

    Raises:
        InputError: with the reason.
    """
    if not exact:
        check(plan, ONLY_DRAFTS)
        return
    case = PlanCase(plan, runner.place, runner.device.type == "cuda", runner=runner)
    steps = EXACT_STEPS if runner.fast_path.enabled else ()
    if why := reason(case, EXACT_PLANS, EXACT_PLACES, steps):
        raise UnsupportedPlan(f"exact=True: {why}")


def exact_decoder(runner: ModelRunner, request: Request) -> ExactDecoder | None:
    """The decoder of a request's sequence; None if it is not to be exact."""
    if not request.exact:
        return None
    if request.logprobs is not None and runner.fast_path.enabled:
        raise Conflict("exact=True: steps choose tokens on the GPU and keep no probabilities. Leave out logprobs.")
    plan = request.plan
    learns = plan.decode is not None and plan.decode.method.traits.drafts_only
    pace = runner.paces.begin(str(plan), len(request.ids))
    return ExactDecoder(request.ids, pace, drafts=plan.decode is not None, learns=learns)
