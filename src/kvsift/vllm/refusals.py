"""What vLLM can do and kvsift cannot do in it: refused when the server starts, and when a request names a plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvsift.checkpoint import embedding_sample, local_directory
from kvsift.errors import UnsupportedPlan
from kvsift.layer.paged_decode import list_capacity
from kvsift.methods.common.anchors import AGAIN, AnchorMap, listed
from kvsift.methods.common.calibration import is_of
from kvsift.plan.capabilities import reason, reasons
from kvsift.plan.plan import Plan, Rule
from kvsift.types import Objections, Origin
from kvsift.vllm.settings import Settings, anchors_of

NOT_FULL = ("sliding", "chunked", "linear")  # beginnings of layer_types
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

    def dense_anchor(self) -> tuple[int, int] | None:
        """Return a layer that reuses a selection, and the layer that is to select and is dense, if there is one."""
        rule = self.plan.decode
        found = None if rule is None else self.settings.anchors.get(anchors_of(rule) or "")
        if rule is None or found is None:
            return None
        dense, pairs = rule.budget.dense_layers, ((layer, reuse.anchor) for layer, reuse in found.reuse.items())
        return next(((layer, anchor) for layer, anchor in pairs if anchor in dense and layer not in dense), None)

    def overflow(self) -> tuple[int, int] | None:
        """Return the tokens that the plan may show and those that lists of the server hold, if these are fewer."""
        if self.plan.decode is None or reason(self, OTHER_DECODE):
            return None
        shown, *held = map(self._list_tokens, (self.plan.decode, *self.settings.decode_rules))
        return (shown, max(held)) if shown > max(held) else None

    def _list_tokens(self, rule: Rule) -> int:
        size = rule.method.unit_size
        return list_capacity(rule.budget, -(-self.max_length // size), size) * size


class AnchorFile(NamedTuple):
    """An anchor file that a plan names, and a ``VllmConfig``."""

    name: str
    found: AnchorMap
    config: Any

    @property
    def kinds(self) -> list[str] | None:
        """Kind of each layer of the model; None if the layers are not known."""
        text = getattr(self.config.model_config, "hf_text_config", None)
        count = getattr(text, "num_hidden_layers", None)
        return count and list(map(str, getattr(text, "layer_types", None) or [""] * count))

    def lacking(self) -> str:
        """Return the layers of the file that the model lacks, or whose attention is not over the whole context."""
        if (kinds := self.kinds) is None:
            return ""
        return listed(layer for layer in self.found.layers if layer >= len(kinds) or kinds[layer].startswith(NOT_FULL))

    def other_heads(self) -> tuple[int, int] | None:
        """Return a number of KV heads that the file maps, and that of the model, if they differ; layers of several
        kinds may differ, and are compared when they first attend (``Settings.reuse``)."""
        count = getattr(self.config.model_config, "get_total_num_kv_heads", None)
        if count is None or len(set(self.kinds or ())) != 1:
            return None
        mapped = {len(reuse.heads) for reuse in self.found.reuse.values()} - {count()}
        return (min(mapped), count()) if mapped else None

    def is_of_other(self) -> bool:
        """Whether the model has another token embedding, as far as its directory is here and has one."""
        model = self.config.model_config
        directory = local_directory(str(getattr(model, "model", "")), getattr(model, "revision", None))
        sample = [] if directory is None else embedding_sample(directory)
        name, numbers = self.found.model
        return bool(sample) and not is_of(Origin(name, torch.tensor(sample)), name, torch.tensor(numbers))


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


ANCHORS: Objections = (  # to plans
    (lambda served: served.dense_anchor(),
     "By the anchors of {it.plan} layer {found[0]} reuses the selection of layer {found[1]}, which its dense_layers "
     "leave nothing to select; under vLLM they are true indices. Leave {found[1]} out of dense_layers."),
)  # fmt: skip
ANCHOR_FILES: Objections = (
    *((lambda it, name=name: getattr(it.config.parallel_config, name, 1) > 1,
       f"By anchors={{it.name}} layers reuse selections of others, {what}. Leave out anchors, or take {name}=1.")
      for name, what in (("pipeline_parallel_size", "which may be on other ranks"),
                         ("tensor_parallel_size", "head by head, and other heads may be on other ranks"))),
    (AnchorFile.lacking,
     f"{{it.name}} is for a model with layers {{found}}, which kvsift does not attend in this one. {AGAIN}"),
    (AnchorFile.other_heads, f"{{it.name}} maps {{found[0]}} KV heads, and layers here have {{found[1]}}. {AGAIN}"),
    (AnchorFile.is_of_other, f"{{it.name}} is for another model ({{it.found.model[0]}}) than this one. {AGAIN}"),
)  # fmt: skip


def check_config(config: Any, settings: Settings) -> None:
    """Refuse a ``VllmConfig`` that plans cannot run under (``InputError``, with every reason)."""
    device, dtype = config.device_config.device_type, str(config.model_config.dtype).removeprefix("torch.")
    server = Served(settings.plan, settings, 0, config, device, dtype, str(config.cache_config.cache_dtype))
    found = [
        *reasons(config, CONFIGS),
        *reasons(server, SERVERS, ANCHORS, GPU_SERVERS if device == "cuda" else CPU_PLANS),
    ]
    for plan in settings.plans:
        found += reasons(server._replace(plan=plan), ANCHORS, FURTHER_PLANS if device == "cuda" else CPU_PLANS)
    for name, anchors in settings.anchors.items():
        found += reasons(AnchorFile(name, anchors, config), ANCHOR_FILES)
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
