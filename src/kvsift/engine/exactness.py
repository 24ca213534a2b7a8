"""Whether the answers of a model can be exact, and the decoder that makes them so."""

from __future__ import annotations

from kvsift.batching.exact.decoder import ExactDecoder
from kvsift.batching.sharing import can_undo
from kvsift.engine.model_runner import ModelRunner
from kvsift.engine.transcript import Request
from kvsift.errors import InputError
from kvsift.models.decoder_step import DecoderStep
from kvsift.plan.plan import Plan
from kvsift.plan.refusals import check_drafts


def check_exact(runner: ModelRunner, plan: Plan, exact: bool) -> None:
    """Refuse exact decoding where it cannot be promised, and plans that only draft where it was not asked for.

    Raises:
        InputError: with the reason.
    """
    if not exact:
        check_drafts(plan)
    elif reason := _reason_of_plan(plan) or _reason_of_model(runner, plan):
        raise InputError(f"exact=True: {reason}")


def exact_decoder(runner: ModelRunner, request: Request, plan: Plan) -> ExactDecoder | None:
    """The decoder of a request's row; None if it is not to be exact."""
    if not request.exact:
        return None
    if request.logprobs is not None and runner.fast_path.enabled:
        raise InputError("exact=True: steps choose tokens on the GPU and keep no probabilities. Leave out logprobs.")
    learns = plan.decode is not None and plan.decode.method.traits.drafts_only
    pace = runner.paces.begin(str(plan), len(request.ids))
    return ExactDecoder(request.ids, pace, drafts=plan.decode is not None, learns=learns)


def _reason_of_plan(plan: Plan) -> str | None:
    prefill, decode = (str(rule).partition(":")[0] for rule in (plan.prefill, plan.decode))
    if plan.prefill is not None:
        return (
            f"the plan reads prompts by {prefill}, and an answer after that is not the one of dense attention. Leave "
            "the rule of prefill out."
        )
    if not can_undo(plan):
        return (
            f"{decode} never sees tokens again that it has left out, so rejected drafts could not be taken back. Name "
            "a method that keeps all, such as sketch, without evict=true."
        )
    if plan.is_guarded:
        return "every token is verified, so min_recovery has nothing to guard. Leave it out."
    if plan.wants_hidden:
        return f"{decode} foresees queries in passes that cannot verify. Name another method, such as sketch."
    return None


def _reason_of_model(runner: ModelRunner, plan: Plan) -> str | None:
    if runner.placement not in ("device", "host"):
        return f"placement={runner.placement} is not supported. Leave it out."
    if runner.fast_path.enabled:
        return _reason_of_steps(runner, plan)
    if runner.device.type == "cuda":
        return "on a GPU, drafts are verified in captured steps. Leave path out."
    fused = runner.fast_path.fused(runner.model)
    if fused is None or not fused.joins:
        return (
            "verification needs the compiled core (see kvsift doctor) and a model whose layers it multiplies: Llama, "
            "Mistral, Qwen2 or Qwen3 in bfloat16 or float32. This is "
            f"{type(runner.model).__name__} in {runner.dtype}. Leave exact out, with plan='dense'."
        )
    return None


def _reason_of_steps(runner: ModelRunner, plan: Plan) -> str | None:
    if not runner.deterministic:
        return (
            "on a GPU the sums of a pass depend on its number of tokens, so that drafts could not be verified to the "
            "last bit. Open the model with deterministic=True (kvsift serve --deterministic), or leave exact out, with "
            "plan='dense'."
        )
    if reason := runner.composed_reason(plan) or runner.reason_apart(plan):
        return f"on a GPU, drafts are verified in captured steps, and {reason}. Name another plan, or plan='dense'."
    if reason := DecoderStep.reason_against(runner.model):
        return f"{reason}. Leave exact out, with plan='dense'."
    return None
