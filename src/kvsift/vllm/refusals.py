"""What vLLM can do and kvsift cannot do in it: refused when the server starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvsift.errors import InputError
from kvsift.plan.plan import Plan, Rule
from kvsift.vllm.settings import Settings

TAKE_DENSE = "Or start vLLM without the kvsift settings."
WIDE, FP8 = ("auto", "float16", "bfloat16"), ("fp8", "fp8_e4m3")  # vLLM's names of cache dtypes


def check_config(config: Any, settings: Settings) -> None:
    """Refuse a ``VllmConfig`` that plans cannot run under (``InputError``, with every reason)."""
    if reasons := [*_reasons(config), *_reasons_of_device(config, settings)]:
        raise InputError(" ".join([*reasons, TAKE_DENSE]))


def _reasons(config: Any) -> Iterator[str]:
    model, parallel = config.model_config, config.parallel_config
    if model.use_mla:
        yield "This model has multi-head latent attention (MLA), whose cache holds no keys; kvsift needs GQA or MHA."
    if model.runner_type == "pooling":
        yield "A pooling model decodes nothing, so there is nothing to select."
    if getattr(model, "is_encoder_decoder", False):
        yield "An encoder-decoder model has cross attention, which kvsift does not select for."
    if config.speculative_config is not None:
        yield "Speculative decoding verifies several tokens at once, and kvsift decodes one. Leave it out."
    if getattr(model, "enable_sleep_mode", False) or getattr(model, "enable_cumem_allocator", False):
        yield "Sleep mode takes memory that steps read. Leave out --enable-sleep-mode and --enable-cumem-allocator."
    if getattr(config.cache_config, "prefix_match_unit", None) is not None:
        yield "Blocks that vLLM copies have no page summaries. Leave out --prefix-match-unit."
    if config.kv_transfer_config is not None:
        yield "A KV connector fills the cache without page summaries. Leave out --kv-transfer-config."
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield f"{name} divides a sequence among ranks, and kvsift selects within one. Take tensor parallelism."


def _reasons_of_device(config: Any, settings: Settings) -> Iterator[str]:
    device = config.device_config.device_type
    if device not in ("cpu", "cuda"):
        yield f"Under vLLM plans run on CPUs and NVIDIA GPUs, and this engine is on {device}."
    yield from _reasons_of_cache(config, settings, WIDE + FP8 * (device == "cuda"))
    if device != "cuda":
        for plan in (settings.plan, *settings.plans):
            yield from reasons_on_cpu(plan)
        return
    backend = config.attention_config.backend
    if getattr(backend, "name", backend) != "CUSTOM":
        yield "On a GPU plans are carried out by kvsift's own attention backend. Add --attention-backend CUSTOM."
    if getattr(config.parallel_config, "use_ubatching", False):
        yield "Two micro-batches at once could wait for each other for ever. Leave out --enable-dbo."
    rule = settings.plan.decode
    if rule is not None and rule.budget.window < rule.method.summary_page_size > rule.method.unit_size:
        size = rule.method.summary_page_size
        yield f"On a GPU pages of {size} tokens are summarised when they are full. Take window={size} or more."
    if settings.plan.prefill is not None and rule is None:
        yield f"On a GPU prefill={settings.plan.prefill} needs a sparse rule of decode beside it. Add decode=quest."
    if len(settings.summaries) > 1:
        kinds = " and ".join(f"{kind} over pages of {size}" for kind, size in settings.summaries)
        yield f"On a GPU one kind of page summary is kept, and these plans read {kinds}. Take plans that share one."
    for plan in settings.plans:
        if plan.prefill not in (None, settings.plan.prefill):
            yield f"On a GPU all prompts are read by the server's rule or densely: leave out prefill={plan.prefill}."
        if plan.decode is not None and (reason := reason_against_sharing(plan.decode, settings.plan)):
            yield reason


def _reasons_of_cache(config: Any, settings: Settings, dtypes: tuple[str, ...]) -> Iterator[str]:
    cache, model = config.cache_config, str(config.model_config.dtype).removeprefix("torch.")
    dtype = str(cache.cache_dtype)
    if dtype not in dtypes:  # what a checkpoint asks for has taken the place of auto
        nearest = model if "fp8" in dtypes else "auto, and a checkpoint without a quantised cache"
        yield f"kvsift reads no cache of {dtype} here, but of {', '.join(dtypes)}. Take --kv-cache-dtype {nearest}."
    if dtype not in FP8:
        return
    if getattr(cache, "calculate_kv_scales", False):
        yield "Scales that the first step measures come after graphs were captured. Leave out --calculate-kv-scales."
    if model == "float16" and "log_mass" in dict(settings.summaries):
        yield "Variances of fp8 keys, which log_mass keeps, overflow float16. Take --dtype bfloat16."


def reason_against_sharing(rule: Rule, server: Plan) -> str | None:
    """Return why rows under a rule cannot decode beside those of a server's plan on a GPU; None if they can."""
    if server.decode is None:
        return f"On a GPU {rule} needs a server whose own plan names its method: start it with that plan."
    same = rule.method == server.decode.method and rule.budget.dense_layers == server.decode.budget.dense_layers
    if same:
        return None
    return (
        f"On a GPU rows of one batch differ in budget, sinks, window and min_context alone; {rule} has another method "
        f"or other dense layers than {server.decode}."
    )


def reasons_on_cpu(plan: Plan) -> Iterator[str]:
    """Yield what vLLM on a CPU cannot do of a plan."""
    if plan.prefill is not None:
        yield f"On a CPU vLLM reads prompts densely. Leave out prefill={plan.prefill}."


def check_block_size(block_size: int, settings: Settings) -> None:
    """Refuse pages that do not fill a block of vLLM's cache (``InputError``)."""
    for kind, page_size in settings.summaries:
        if block_size % page_size:
            raise InputError(
                f"blocks of {block_size} tokens are not whole pages of {page_size} ({kind}). Take page_size=16 in the "
                f"plan, or --block-size {-(-block_size // page_size) * page_size}."
            )
