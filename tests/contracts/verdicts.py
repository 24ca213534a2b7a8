"""Every verdict of kvsift on what a plan can do where it runs: plans x devices x placements x paths x models.

Nothing is run: a GPU is a device that is described, and a model a tiny one. ``tests/contracts/verdicts.txt`` holds the
answers; ``python tests/contracts/verdicts.py`` writes it anew.
"""

import json
import logging
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
from models.tiny import tiny

import kvsift
from kvsift.api import saved_document
from kvsift.cli.methods import method_row
from kvsift.engine import prefill_sharing
from kvsift.engine.executor import Executor
from kvsift.engine.graphs import fast_path
from kvsift.engine.model_runner import ModelRunner
from kvsift.engine.speculative import exactness
from kvsift.errors import KVSiftError
from kvsift.kernels.page_summary import SUMMARIES
from kvsift.layer import paged_decode
from kvsift.methods import catalogue
from kvsift.methods.base import Method
from kvsift.methods.common.anchors import AnchorMap, Reuse
from kvsift.methods.common.anchors import write as write_anchors
from kvsift.methods.pages import PagedMethod, SummaryMethod
from kvsift.methods.quest import Quest
from kvsift.methods.sketch import Sketch
from kvsift.methods.traits import Traits
from kvsift.models.captured_step import NO_STEP
from kvsift.models.decoder import Decoder
from kvsift.models.fused_step import FusedStep
from kvsift.models.hf.forward_step import TransformersStep
from kvsift.models.hf.unwrap import refuse_unsupported
from kvsift.plan.budget import Budget
from kvsift.plan.capabilities import NO_PROBES, NO_ROPE, ONLY_DRAFTS, PlanCase, check, reason, reasons
from kvsift.plan.placement import Placement
from kvsift.plan.plan import PHASES, Plan, Rule
from kvsift.plan.syntax import parse_plan
from kvsift.vllm import refusals as vllm_refusals
from kvsift.vllm import settings as vllm_settings
from kvsift.vllm.engine_state import EngineState
from kvsift.vllm.settings import Settings

FILE = Path(__file__).with_suffix(".txt")
WIDTH = 118

Answers = dict[str, str]  # plan, or model -> sentence; "" where there is no objection
Verdicts = dict[str, Answers]  # question -> answers


class OwnScore(SummaryMethod):
    def score(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError


class OwnPages(Quest):
    def select(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError


class OwnSketch(Sketch):
    def select(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError


class TwoSummaries(PagedMethod):
    summaries = ("minmax", "mean_std")


class Unranked(Method):
    summaries = ("minmax",)


class WideRows(PagedMethod):
    summaries = ("wide_rows",)


class Learner(Method):
    traits = Traits(wants_queries=True, to_share="seals=true")


OWN = {cls.__name__: cls for cls in (OwnScore, OwnPages, OwnSketch, TwoSummaries, Unranked, WideRows, Learner)}

OPTIONS = (
    "", "evict=true", "mass=0.9", "head_budgets=adaptive", "layer_budgets=pyramid", "window=0",
    "window=8", "min_recovery=0.9", "page_size=32", "page_size=24", "page_size=256", "dense_layers=0", "heads=query",
    "budget=32", "head_budgets=adaptive:evict=true", "min_recovery=0.9:evict=true",
)  # fmt: skip
FURTHER = (
    "dense", "both=dense", "quest:prefilter=8", "quest:score_by=log_mass", "quest:score_by=minmax_fp8", "sketch:bits=2",
    "sketch:rest=false", "sketch:anchors={anchors}", "sketch:anchors={anchors}:dense_layers=0", "sketch:anchors={wide}",
    "tidal_decode:anchors={anchors}", "less_is_more:correction=7", "less_is_more:correction=none",
    "streaming_llm:positions=remapped", "infllm:positions=absolute", "snapkv:compat=paper", "quest:dense_below=7",
    "sketch:seed=1", "prefill=quoka:prefilter=8", "prefill=critiprefill:rest=true", "prefill=quoka:mass=0.9",
    "prefill=quoka:min_recovery=0.9", "prefill=quoka:window=0", "prefill=quoka,decode=quest",
    "prefill=quoka:prefilter=8,decode=quest", "prefill=quoka:mass=0.9,decode=quest",
    "prefill=critiprefill:rest=true,decode=quest", "prefill=critiprefill,decode=quest",
    "prefill=critiprefill:page_size=32,decode=quest", "prefill=critiprefill,decode=sketch",
    "prefill=streaming_llm,decode=quest", "prefill=streaming_llm,decode=h2o:evict=true",
    "prefill=keydiff,decode=magicpig", "prefill=dense,decode=quest", "streaming_llm:positions=cache",
    "retrieval_attention:block=16384", "both=streaming_llm:positions=cache", "quest:budget=2048",
    "quest:dense_layers=0+1", "sketch:budget=2048",
    "prefill=quoka,decode=quest:budget=2048", "quest:min_context=4000", "h2o:mode=prompt",
    "prefill=quoka,decode=retrieval_attention", "prefill=quoka,decode=infinigen",
    "prefill=quoka,decode=quest:heads=query",
    "prefill=h2o:evict=true", "prefill=h2o:evict=true,decode=quest", "both=h2o:evict=true:layer_budgets=pyramid",
    "prefill=quoka,decode=dense", "prefill=critiprefill,decode=verify", "prefill=h2o,decode=quest",
)  # fmt: skip
FEW = (
    "dense", "quest", "quest:mass=0.9", "quest:page_size=32", "sketch", "magicpig", "verify", "h2o:evict=true",
    "prefill=quoka,decode=quest",
)  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Qwen3Moe", "Gemma2", "GptOss")},
    "Llama with gelu": ("Llama", {"hidden_act": "gelu"}),
    "Mistral with a sliding window": ("Mistral", {"sliding_window": 64}),
    "Qwen2 with sliding layers": ("Qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}),
    "Llama with dynamic RoPE": (
        "Llama", {"rope_parameters": {"rope_theta": 1e4, "factor": 4.0, "rope_type": "dynamic"}},
    ),
    "Llama with longrope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_theta": 1e4, "factor": 4.0, "rope_type": "longrope", "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8, "original_max_position_embeddings": 512,
            }
        },
    ),
}  # fmt: skip


def answer(question: Callable[..., Any], *arguments: Any) -> str:
    """What a question says: the message of its refusal, or what it returns as text."""
    try:
        found = question(*arguments)
    except KVSiftError as error:
        return f"refused: {error}"
    if isinstance(found, Iterator | list):
        return " ".join(found)
    return "" if found is None else str(found)


@contextmanager
def described() -> Iterator[Path]:
    """A folder of anchor files, a kind of summary with wide rows, and no warnings of composed steps."""
    wide = SUMMARIES["minmax"]._replace(width=lambda head_dim: 3 * head_dim)
    logger = logging.getLogger("kvsift")
    level = logger.level
    with tempfile.TemporaryDirectory() as name, patch.dict(SUMMARIES, {"wide_rows": wide}):
        logger.setLevel(logging.ERROR)
        try:
            yield Path(name)
        finally:
            logger.setLevel(level)


def plans(folder: Path) -> dict[str, Plan | str]:
    """Every spelling of a plan with the plan, or with why there is none."""
    made = SimpleNamespace(name="tiny", sample=lambda: torch.zeros(1))
    for name, reuse in {"anchors": {1: Reuse(0, (0, 0), 1.0)}, "wide": {9: Reuse(8, (0, 0), 1.0)}}.items():
        anchors = [0] if name == "anchors" else [8]
        write_anchors(folder / f"{name}.json", AnchorMap.of(made, anchors, reuse, (), {}))  # type: ignore[arg-type]
    names = [name for name, entry in catalogue().items() if entry.package is None or not entry.package]
    specs = [f"{name}:{option}".rstrip(":") for name in names for option in OPTIONS]
    for phase in ("prefill", "decode", "both"):
        specs += [f"{phase}={name}" for name in names]
    specs += [f"both={name}:evict=true" for name in names] + list(FURTHER)
    found: dict[str, Plan | str] = {}
    for spec in dict.fromkeys(specs):
        text = spec.format(anchors=folder / "anchors.json", wide=folder / "wide.json")
        try:
            found[spec] = parse_plan(text)
        except KVSiftError as error:
            if "unknown key" not in str(error) and "takes no settings" not in str(error):
                found[spec] = str(error)
    for name, cls in OWN.items():
        found[name] = Plan(None, Rule(cls(), Budget(tokens=256)))
    return found


def models() -> dict[str, Any]:
    """Tiny models, by what they are."""
    found: dict[str, Any] = {name: tiny(family, **changes) for name, (family, changes) in FAMILIES.items()}

    class Linear8bitLt(nn.Linear):
        state = SimpleNamespace(threshold=6.0)

    found["Llama in int8"] = tiny()
    found["Llama in int8"].model.layers[0].mlp.down_proj = Linear8bitLt(32, 32, bias=False)
    found["Llama in tensor parallelism"] = tiny()
    found["Llama in tensor parallelism"]._tp_size = 2
    found["Llama on two devices"] = tiny()
    found["Llama on two devices"].lm_head.to("meta")
    found["Llama that cannot be captured"] = tiny()
    return found


def unsupported() -> dict[str, Any]:
    """Models that kvsift cannot run."""
    t5 = transformers.T5Config(vocab_size=96, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    mla = transformers.DeepseekV3Config(
        vocab_size=96, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    mamba = transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, state_size=4)
    return {
        "T5": transformers.T5ForConditionalGeneration(t5),
        "DeepSeek V3": transformers.DeepseekV3ForCausalLM(mla),
        "Mamba": transformers.MambaForCausalLM(mamba),
    }


def runner(
    model: Any, device: str = "cpu", path: str = "auto", place: str = "device", deterministic: bool = False,
    applied: str = "", joins: bool = True, dense_below: int | str = "auto",
) -> ModelRunner:  # fmt: skip
    """A model runner that has loaded a model, on a device that need not exist."""
    directory: Any = SimpleNamespace(
        tokenizer=lambda: None, name="tiny", full_layers=(), window_bytes=lambda dtype, count: 0,
    )  # fmt: skip
    made = ModelRunner(
        directory, torch.device(device), torch.bfloat16, Placement.of(place), 512, 16, dense_below, path, deterministic,
        None,  # type: ignore[arg-type]
    )  # fmt: skip
    made._model, made._settings = model, SimpleNamespace(applied=applied)  # type: ignore[assignment]
    fused = reason(model, made.fast_path.not_fused, NO_STEP) is None
    made.fast_path.forward_pass = lambda model: SimpleNamespace(joins=joins) if fused else None  # type: ignore[assignment]
    return made


def trial(self: Any, plan: Plan, model: Any, fails: Any = None) -> str | None:
    return "a step of it cannot be captured (a stand-in)" if model is fails else None


def of_sequence(made: ModelRunner, plan: Plan, **row: Any) -> str | None:
    request = SimpleNamespace(logprobs=row.pop("logprobs", None), plan=plan)
    settings = {"observer": None, "decoder": None, "in_pool": True, "no_reuse": "", "prefix": None, **row}
    found: Any = Executor(made)._reason_sequence_uncaptured(SimpleNamespace(request=request, **settings))  # type: ignore[arg-type]
    return None if found is None else str(found)


def placed(name: str, on_gpu: bool, plan: Plan) -> Iterator[str]:
    case = PlanCase(plan, Placement.of(name), on_gpu)
    return reasons(case, case.place.store.objections)


def of_plans(known: dict[str, Plan]) -> Iterator[tuple[str, Callable[[Plan], Any]]]:
    """Questions that a plan answers alone."""
    for name in ("device", "split", "offload", "host", "host:kv_dtype=int8", "device:kv_dtype=int8"):
        yield f"placement {name}", partial(placed, name, False)
        yield f"placement {name} on a GPU", partial(placed, name, True)
    yield "drafts", lambda plan: check(plan, ONLY_DRAFTS)
    yield "no probes", lambda plan: check(PlanCase(plan), NO_PROBES)
    yield "probes", lambda plan: check(PlanCase(plan, probe_every=16), NO_PROBES)
    yield "RoPE unknown, and why", lambda plan: check(PlanCase(plan, rope="its forward takes no position_ids"), NO_ROPE)
    yield "model of 2 layers", lambda plan: plan.check_layers(range(2))
    yield "model of layers 1, 3", lambda plan: plan.check_layers((1, 3))
    yield "captured steps", paged_decode.reason_against
    yield "shared pages", lambda plan: plan.not_shared
    yield "newest tokens can be undone", lambda plan: plan.can_undo
    yield "learns from the prompt", prefill_sharing.learns_from_prompt
    yield "vLLM", lambda plan: check(plan, vllm_settings.PLANS)
    for name in ("quest", "snapkv", "prefill=quoka"):
        shares = prefill_sharing.can_share_prefill
        yield f"prefilled under {name}", partial(shares, known[name])
        yield f"prefilled for {name}", lambda plan, other=known[name], shares=shares: shares(plan, other)


def of_engine(built: dict[str, Any]) -> Iterator[tuple[str, Callable[[Plan], Any]]]:
    """Questions to a model on a device, under a placement and a path."""
    llama = built["Llama"]
    settings = [
        (device, path, place)
        for device in ("cpu", "cuda")
        for path in ("auto", "captured", "composed", "eager")
        for place in ("device", "split", "offload", "host", "offload:host_values=int8")
        if (device, place) != ("cuda", "host")  # the model is on a CPU then
    ]
    for device, path, place in settings:
        where = f"{device}, path={path}, {place}"
        made = runner(llama, device, path, place)
        yield f"steps: {where}", made.reason_uncaptured
        yield f"exact: {where}", lambda plan, made=made: exactness.check_exact(made, plan, True)
        steady = runner(llama, device, path, place, deterministic=True)
        yield f"exact: {where}, deterministic", lambda plan, made=steady: exactness.check_exact(made, plan, True)
        blocks = steady.fast_path.takes_blocks
        yield f"blocks: {where}, deterministic", lambda plan, blocks=blocks: blocks(plan, False, llama)
        yield f"exact blocks: {where}, deterministic", lambda plan, blocks=blocks: blocks(plan, True, llama)
    yield "not exact", lambda plan: exactness.check_exact(runner(llama), plan, False)
    packed = ("offload:host_values=int8", "split:host_values=int8", "host:kv_dtype=int8", "device:kv_dtype=int8")
    for place in ("device", "split", "offload", "host", *packed):
        made = runner(llama, place=place)
        yield f"pool: {place}", made.reason_apart
        yield f"saved: {place}", lambda plan, made=made: saved_document.check_saving(made, plan, 0, Path())
        yield f"opened: {place}", lambda plan, made=made: saved_document._check_place(made, "opened")
    made = runner(llama, "cuda", applied="repetition_penalty=1.3")
    yield "steps: cuda, with generation settings", made.reason_uncaptured


def of_models_under_plans(built: dict[str, Any]) -> Iterator[tuple[str, Callable[[Plan], Any]]]:
    """Questions to all models, and to rows of one; of a few plans."""
    for name, model in built.items():
        for deterministic in (False, True):
            made = runner(model, "cuda", deterministic=deterministic)
            kind = f"{name}, deterministic" if deterministic else name
            if not deterministic:
                yield f"steps: cuda, {name}", made.reason_uncaptured
            yield f"exact: cuda, {kind}", lambda plan, made=made: exactness.check_exact(made, plan, True)
        for joins in (True, False):
            made = runner(model, joins=joins)
            kind = name if joins else f"{name} without core"
            yield f"exact: cpu, {kind}", lambda plan, made=made: exactness.check_exact(made, plan, True)
    for device in ("cpu", "cuda"):
        for deterministic in (False, True):
            made = runner(built["Llama"], device, deterministic=deterministic)
            row = partial(of_sequence, made)
            kind = f"{device}, deterministic" if deterministic else device
            yield f"row: {kind}", row
            yield f"row: {kind}, observed", partial(row, observer=True)
            yield f"row: {kind}, exact", partial(row, decoder=True)
            yield f"row: {kind}, log probabilities", partial(row, logprobs=2)
            yield f"row: {kind}, pages of its own", partial(row, in_pool=False, no_reuse="it is another's")


def config(device: str = "cuda", backend: str | None = "CUSTOM", **changes: Any) -> Any:
    """A VllmConfig; ``changes`` are "part__name"."""
    parts: dict[str, Any] = {
        "model_config": {"use_mla": False, "runner_type": "generate", "dtype": "torch.bfloat16"},
        "cache_config": {"cache_dtype": "auto"},
        "parallel_config": {"rank": 0, "tensor_parallel_size": 1},
        "device_config": {"device_type": device},
        "attention_config": {"backend": backend},
    }
    whole: dict[str, Any] = {"speculative_config": None, "kv_transfer_config": None}
    for key, value in changes.items():
        part, _, name = key.partition("__")
        if name:
            parts[part][name] = value
        else:
            whole[part] = value
    return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()}, **whole)


def of_vllm(known: dict[str, Plan]) -> Iterator[tuple[str, Callable[[Plan], Any]]]:
    """Questions to vLLM."""
    for name, where in {"cpu": config("cpu"), "cuda": config(), "xpu": config("xpu")}.items():
        yield f"vLLM on {name}", lambda plan, where=where: vllm_refusals.check_config(where, Settings(plan))
    yield "vLLM on cuda, another backend", lambda plan: vllm_refusals.check_config(config(backend=None), Settings(plan))
    for name in ("quest", "dense", "prefill=quoka,decode=quest"):
        for device in ("cpu", "cuda"):
            yield f"vLLM on {device}, beside {name}", partial(
                lambda device, server, plan: vllm_refusals.check_config(config(device), Settings(server, (plan,))),
                device, known[name],
            )  # fmt: skip
            for more in ((), (Plan(),)):
                settings = Settings(known[name], more)
                state = EngineState(settings, max_length=4096, on_gpu=device == "cuda")
                beside = " and dense" if more else ""
                yield f"vLLM request on {device}, server of {name}{beside}", partial(vllm_request, state)
    for size in (16, 24, 64):
        yield f"vLLM blocks of {size}", lambda plan, size=size: vllm_refusals.check_block_size(size, Settings(plan))


def vllm_request(state: EngineState, plan: Plan) -> str:
    with patch("kvsift.vllm.settings.read_plan", lambda spec, plans: spec):
        return str(state.plan_for(plan)) and ""


VLLM: dict[str, dict[str, Any]] = {
    "MLA": {"model_config__use_mla": True},
    "pooling": {"model_config__runner_type": "pooling"},
    "encoder-decoder": {"model_config__is_encoder_decoder": True},
    "speculative": {"speculative_config": 1},
    "sleep mode": {"model_config__enable_sleep_mode": True},
    "copied blocks": {"cache_config__prefix_match_unit": 1},
    "connector": {"kv_transfer_config": 1},
    "context parallel": {"parallel_config__decode_context_parallel_size": 2},
    "prefill context parallel": {"parallel_config__prefill_context_parallel_size": 2},
    "tensor parallel": {"parallel_config__tensor_parallel_size": 2},
    "pipeline parallel": {"parallel_config__pipeline_parallel_size": 2},
    "micro-batches": {"parallel_config__use_ubatching": True},
    "fp8": {"cache_config__cache_dtype": "fp8"},
    "fp8, scales": {"cache_config__cache_dtype": "fp8", "cache_config__calculate_kv_scales": True},
    "fp8, float16": {"cache_config__cache_dtype": "fp8", "model_config__dtype": "torch.float16"},
    "fp8_e4m3": {"cache_config__cache_dtype": "fp8_e4m3"},
    "fp8_e5m2": {"cache_config__cache_dtype": "fp8_e5m2"},
    "nvfp4": {"cache_config__cache_dtype": "nvfp4"},
    "all at once": {"model_config__use_mla": True, "speculative_config": 1, "parallel_config__use_ubatching": True},
}  # fmt: skip


def of_models(built: dict[str, Any]) -> Iterator[tuple[str, Answers]]:
    """Questions about models, and about servers of vLLM."""
    checks: dict[str, Callable[[Any], Any]] = {
        "model: fused steps": lambda model: reason(model, FusedStep.objections),
        "model: fused layers on a CPU": lambda model: reason(model, Decoder.objections),
        "model: any captured step": lambda model: reason(model, NO_STEP),
        "model: steps of its own": lambda model: reason(model, TransformersStep.objections),
    }
    for question, objection in checks.items():
        skipped = {"Llama on two devices", "Llama in int8"} if "own" in question else set()
        yield question, {name: answer(objection, model) for name, model in built.items() if name not in skipped}
    all_models = {**{name: built[name] for name in FAMILIES}, **unsupported()}
    yield "model: supported", {name: answer(refuse_unsupported, model) for name, model in all_models.items()}
    small = {name: model for name, model in all_models.items() if "sliding" in name or name not in FAMILIES}
    yield "model: taken", {name: answer(lambda m: bool(kvsift.make_cache(m, "quest")), m) for name, m in small.items()}
    for device in ("cpu", "cuda"):
        for spec in ("quest", "quest:score_by=log_mass"):
            settings = Settings(parse_plan(spec))
            yield (
                f"vLLM server on {device}, {spec}",
                {
                    name: answer(vllm_refusals.check_config, config(device, **changes), settings)
                    for name, changes in VLLM.items()
                },
            )
    listed = {name: method_row(name) for name, entry in catalogue().items() if not entry.package}
    yield (
        "kvsift methods",
        {
            name: json.dumps([row["phases"], row["granularity"], row["keeps"], list(row["budget"])])
            for name, row in listed.items()
        },
    )


def verdicts() -> Verdicts:
    """All answers to all questions."""
    with described() as folder:
        spelled = plans(folder)
        known = {spec: plan for spec, plan in spelled.items() if isinstance(plan, Plan)}
        built = models()
        fails = built["Llama that cannot be captured"]
        found: Verdicts = {"plan": {s: f"refused: {p}" if isinstance(p, str) else "" for s, p in spelled.items()}}
        with (
            patch.object(fast_path.FastPath, "_trial", lambda self, plan, model: trial(self, plan, model, fails)),
            patch.object(fast_path, "HAVE_TRITON", True),
        ):
            for question, ask in [*of_plans(known), *of_engine(built)]:
                found[question] = {spec: answer(ask, plan) for spec, plan in known.items()}
            for question, ask in of_models_under_plans(built):
                found[question] = {spec: answer(ask, known[spec]) for spec in FEW}
            able = {spec: plan for spec, plan in known.items() if not found["vLLM"][spec]}
            for question, ask in of_vllm(able):
                found[question] = {spec: answer(ask, plan) for spec, plan in able.items()}
        with patch.object(fast_path, "HAVE_TRITON", False):
            found["steps: cuda without Triton"] = {
                spec: answer(runner(built["Llama"], "cuda").reason_uncaptured, plan) for spec, plan in known.items()
            }
        found |= dict(of_models(built))
        names = {who: names_of(who, known.get(who)) for who in {who for answers in found.values() for who in answers}}
    return {
        question: {who: general(text, names[who]).replace(f"{folder}/", "") for who, text in answers.items()}
        for question, answers in found.items()
    }


def names_of(subject: str, plan: Plan | None) -> list[tuple[str, str]]:
    """Patterns of what is special to a plan, the longest first, and what stands in their places."""
    names = {"plan": subject if plan is None else str(plan)}
    if plan is None:
        names["name"] = subject.partition("=")[2].partition(":")[0] or subject.partition(":")[0]
    else:
        names |= {phase: str(rule) for phase in PHASES if (rule := plan.rule(phase)) is not None}
        names |= {f"{key}'s name": value.partition(":")[0] for key, value in names.items() if key != "plan"}
    found = sorted(((key, name) for key, name in names.items() if name != "dense"), key=lambda pair: -len(pair[1]))
    return [
        (re.escape(name) if ":" in name else rf"(?<![\w:]){re.escape(name)}(?![\w:=])", f"<{key}>")
        for key, name in found
    ]


def general(text: str, names: list[tuple[str, str]]) -> str:
    """A sentence without the names of its plan, so that plans which are answered alike have one."""
    for pattern, name in names if text else ():
        text = re.sub(pattern, name, text)
    return text


def rendered(found: Verdicts) -> str:
    """The verdicts as text. Questions that are answered alike stand together, and plans that are answered alike to all
    of them are a group, named by its first. "others" are those that no other answer names."""
    named: dict[tuple[str, ...], list[str]] = {}  # by their answers
    parsed = [spec for spec, text in found["plan"].items() if not text]
    questions = [question for question, answers in found.items() if answers.keys() == set(parsed)]
    for spec in parsed:
        named.setdefault(tuple(found[question][spec] for question in questions), []).append(spec)
    first = {group[0]: group for group in named.values()}
    sentences: dict[str, int] = {"no objection": 0}
    alike: dict[str, list[str]] = {}
    for question, answers in found.items():
        if question in questions:
            answers = {spec: answers[spec] for spec in first}
        alike.setdefault(_listed(answers, sentences), []).append(question)
    parts = [
        [f"{sum(map(len, found.values()))} verdicts. Groups of plans that all questions treat alike, by their first:"],
        [" ".join(group) for group in named.values()],
        ["Answers:"],
        [f"{number}: {sentence}" for sentence, number in sentences.items()],
        *([*(f"# {question}" for question in asked), body] for body, asked in alike.items()),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _listed(answers: Answers, sentences: dict[str, int]) -> str:
    """The numbers of answers to a question, and which plans get them; "others" are those that no other line names."""
    groups: dict[int, list[str]] = {}
    for subject, text in answers.items():
        number = sentences.setdefault(text or "no objection", len(sentences))
        groups.setdefault(number, []).append(subject.replace(" ", "_"))
    most = max(groups, key=lambda number: (len(groups[number]), number))
    return "\n".join(f"{number}: {'others' if number == most else ' '.join(who)}" for number, who in groups.items())


if __name__ == "__main__":
    FILE.write_text(rendered(verdicts()))
