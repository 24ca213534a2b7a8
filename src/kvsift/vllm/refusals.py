"""What vLLM can do and kvsift cannot do in it: refused when the server starts, and when a request names a plan."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvsift.errors import UnsupportedPlan
from kvsift.layer.paged_decode import list_capacity
from kvsift.plan.capabilities import reason, reasons
from kvsift.plan.plan import Plan, Rule
from kvsift.types import Objections
from kvsift.vllm.settings import Settings

TAKE_DENSE = "Or start vLLM without the kvsift settings."
WIDE, FP8 = ("auto", "float16", "bfloat16"), ("fp8", "fp8_e4m3")  # vLLM's names of cache dtypes


class Served(NamedTuple):
    """A plan under vLLM: that of a server, a further one, or that of a request of so many tokens.

    Attributes:
        device, dtype: those of the model.
        cache_dtype: what a checkpoint asks for has taken the place of auto.
    """

    plan: Plan
    settings: Settings
    max_length: int = 0
    config: Any = None
    device: str = "cuda"
    dtype: str = ""
    cache_dtype: str = ""

    def overflow(self) -> tuple[int, int] | None:
        """Return the tokens that the plan may show and those that lists of the server hold, if these are fewer."""
        if self.plan.decode is None or reason(self, OTHER_DECODE):
            return None
        shown, *held = map(self._list_tokens, (self.plan.decode, *self.settings.decode_rules))
        return (shown, max(held)) if shown > max(held) else None

    def _list_tokens(self, rule: Rule) -> int:
        size = rule.method.unit_size
        return list_capacity(rule.budget, -(-self.max_length // size), size) * size


CONFIGS: Objections = (
    (lambda config: config.model_config.use_mla,
     "This model has multi-head latent attention (MLA), whose cache holds no keys; kvsift needs GQA or MHA."),
    (lambda config: config.model_config.runner_type == "pooling",
     "A pooling model decodes nothing, so there is nothing to select."),
    (lambda config: getattr(config.model_config, "is_encoder_decoder", False),
     "An encoder-decoder model has cross attention, which kvsift does not select for."),
    (lambda config: config.speculative_config is not None,
     "Speculative decoding verifies several tokens at once, and kvsift decodes one. Leave it out."),
    (lambda config: getattr(config.model_config, "enable_sleep_mode", False)
     or getattr(config.model_config, "enable_cumem_allocator", False),
     "Sleep mode takes memory that steps read. Leave out --enable-sleep-mode and --enable-cumem-allocator."),
    (lambda config: getattr(config.cache_config, "prefix_match_unit", None) is not None,
     "Blocks that vLLM copies have no page summaries. Leave out --prefix-match-unit."),
    (lambda config: config.kv_transfer_config is not None,
     "A KV connector fills the cache without page summaries. Leave out --kv-transfer-config."),
    *((lambda config, name=name: getattr(config.parallel_config, name, 1) > 1,
       f"{name} divides a sequence among ranks, and kvsift selects within one. Take tensor parallelism.")
      for name in ("decode_context_parallel_size", "prefill_context_parallel_size")),
)  # fmt: skip
SERVERS: Objections = (
    (lambda served: served.device not in ("cpu", "cuda"),
     "Under vLLM plans run on CPUs and NVIDIA GPUs, and this engine is on {it.device}."),
    (lambda served: served.device == "cuda" and served.cache_dtype not in WIDE + FP8,
     f"kvsift reads no cache of {{it.cache_dtype}} here, but of {', '.join(WIDE + FP8)}. Take --kv-cache-dtype "
     "{it.dtype}."),
    (lambda served: served.device != "cuda" and served.cache_dtype not in WIDE,
     f"kvsift reads no cache of {{it.cache_dtype}} here, but of {', '.join(WIDE)}. Take --kv-cache-dtype auto, and a "
     "checkpoint without a quantised cache."),
    (lambda served: served.cache_dtype in FP8 and getattr(served.config.cache_config, "calculate_kv_scales", False),
     "Scales that the first step measures come after CUDA graphs were captured. Leave out --calculate-kv-scales."),
    (lambda served: served.cache_dtype in FP8 and served.dtype == "float16"
     and "log_mass" in dict(served.settings.summaries),
     "Variances of fp8 keys, which log_mass keeps, overflow float16. Take --dtype bfloat16."),
)  # fmt: skip
GPU_SERVERS: Objections = (
    (lambda served: getattr(backend := served.config.attention_config.backend, "name", backend) != "CUSTOM",
     "On a GPU plans are carried out by kvsift's own attention backend. Add --attention-backend CUSTOM."),
    (lambda served: getattr(served.config.parallel_config, "use_ubatching", False),
     "Two micro-batches at once could wait for each other for ever. Leave out --enable-dbo."),
    (lambda served: (rule := served.plan.decode) is not None
     and rule.budget.window < (size := rule.method.summary_page_size) > rule.method.unit_size and size,
     "On a GPU pages of {found} tokens are summarised when they are full. Take window={found} or more."),
    (lambda served: served.plan.prefill is not None and served.plan.decode is None,
     "On a GPU prefill={it.plan.prefill} needs a sparse rule of decode beside it. Add decode=quest."),
    (lambda served: len(kinds := served.settings.summaries) > 1
     and " and ".join(f"{kind} over pages of {size}" for kind, size in kinds),
     "On a GPU one kind of page summary is kept, and these plans read {found}. Take plans that share one."),
)  # fmt: skip
CPU_PLANS: Objections = (
    (lambda served: served.plan.prefill is not None,
     "On a CPU vLLM reads prompts densely. Leave out prefill={it.plan.prefill}."),
)  # fmt: skip
OTHER_DECODE: Objections = (  # on a GPU one kernel decodes all sequences
    (lambda served: served.plan.decode is not None and served.settings.plan.decode is None,
     "On a GPU {it.plan.decode} needs a server whose own plan names its method: start it with that plan."),
    (lambda served: None not in (pair := (served.plan.decode, served.settings.plan.decode))
     and (kinds := [(rule.method, rule.budget.dense_layers) for rule in pair])[0] != kinds[1],
     "On a GPU sequences of one batch differ in budget, sinks, window and min_context alone; {it.plan.decode} has "
     "another method or other dense layers than {it.settings.plan.decode}."),
)  # fmt: skip
FURTHER_PLANS: Objections = (
    (lambda served: served.plan.prefill not in (None, served.settings.plan.prefill),
     "On a GPU all prompts are prefilled by the server's rule or densely: leave out prefill={it.plan.prefill}."),
    *OTHER_DECODE,
)  # fmt: skip
GPU_REQUESTS: Objections = (
    (lambda served: served.plan.prefill not in (None, own := served.settings.plan.prefill)
     and ("densely" if own is None else f"densely, or by prefill={own}"),
     "This server reads prompts {found}; got prefill={it.plan.prefill}."),
    (lambda served: served.plan.decode is None and not served.settings.allows_dense,
     "On a GPU a server must be told that requests may be dense: add dense to its plans."),
    *OTHER_DECODE,
    (lambda served: served.overflow(),
     "{it.plan.decode} may show {found[0]} tokens, and the lists of this server hold {found[1]}. Add it to the plans "
     "of the server."),
)  # fmt: skip


def check_config(config: Any, settings: Settings) -> None:
    """Refuse a ``VllmConfig`` that plans cannot run under (``InputError``, with every reason)."""
    device, dtype = config.device_config.device_type, str(config.model_config.dtype).removeprefix("torch.")
    server = Served(settings.plan, settings, 0, config, device, dtype, str(config.cache_config.cache_dtype))
    found = [*reasons(config, CONFIGS), *reasons(server, SERVERS, GPU_SERVERS if device == "cuda" else CPU_PLANS)]
    for plan in settings.plans:
        found += reasons(server._replace(plan=plan), FURTHER_PLANS if device == "cuda" else CPU_PLANS)
    if found:
        raise UnsupportedPlan(" ".join([*found, TAKE_DENSE]))


def check_block_size(block_size: int, settings: Settings) -> None:
    """Refuse pages that do not fill a block of vLLM's cache (``InputError``)."""
    for kind, page_size in settings.summaries:
        if block_size % page_size:
            raise UnsupportedPlan(
                f"blocks of {block_size} tokens are not whole pages of {page_size} ({kind}). Take page_size=16 in the "
                f"plan, or --block-size {-(-block_size // page_size) * page_size}."
            )
