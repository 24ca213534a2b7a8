"""Tiny random models of every family, the inputs they are given, and the plans they run under."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvsift
from kvsift.models.hf.sparse import SparseCache, SparseRun

VERSION = tuple(int(number) for number in transformers.__version__.split(".")[:2])
VOCABULARY = 96
COVERING = "quest:budget=4096:page_size=8:dense_layers=none"  # sees every context here
SPARSE = "quest:budget=48:page_size=8:window=8:dense_layers=none"  # a third of a context of 150

SLIDING = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Mistral": {"sliding_window": None},
    "Gemma2": {**SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},  # low, so that it bites
    "Gemma3": {**SLIDING, "query_pre_attn_scalar": 16},
    "Phi3": {},
    "GptOss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},  # sink logits
}
OTHERS: dict[str, dict[str, Any]] = {  # that are like one of these to a cache
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Ministral": SLIDING,
    "Ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    },
    "Glm4Moe": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
    },
}
# families whose plain name is that of a multimodal configuration
TEXT_CONFIGS = "Gemma3", "Gemma3n", "Gemma4", "Qwen3_5", "Qwen3_5Moe"
# What a cache can tell apart: full attention alone, sliding layers beside it, and these with sink logits. Tests of what
# caches go through take these; that each family attends as it should is the matter of ``test_families``.
CACHED = ["Llama", "Gemma2", "GptOss"]
WITH_SLIDING_LAYERS = [name for name, changes in FAMILIES.items() if "layer_types" in changes]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # else some families repeat one token for ever
}


def tiny(family: str = "Llama", seed: int = 1, **changes: Any) -> PreTrainedModel:
    """A random model of a family, with eager attention, ready for inference."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}{'Text' if family in TEXT_CONFIGS else ''}Config")
    settings = {**SIZES, **(FAMILIES | OTHERS).get(family, {}), **changes}
    return randomised(getattr(transformers, f"{family}ForCausalLM")(config(**settings)))


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """The model ready for inference with eager attention, and random weights that make attention choosy: logits
    spread by about 2, sink logits by 1, so that scales, caps, norms and sinks that go missing show."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
        else:
            spread = {"q_proj": 0.25, "k_proj": 0.25, "qkv_proj": 0.25, "sinks": 1.0}
            torch.nn.init.normal_(parameter, 0, next((s for part, s in spread.items() if part in name), 0.15))
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):  # Gemma 4, of a layer's output
            buffer.uniform_(0.7, 1.3)
    model.set_attn_implementation("eager")
    return model.eval()


def prompt(num_tokens: int = 150, seed: int = 0) -> Tensor:
    """[1, num_tokens] random tokens, none of them padding."""
    return torch.randint(1, VOCABULARY, (1, num_tokens), generator=torch.Generator().manual_seed(seed))


def ragged(*lengths: int, side: str = "left") -> dict[str, Tensor]:
    """A padded batch, row i being ``prompt(lengths[i], seed=i)``, and its mask."""
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        real = slice(width - length, None) if side == "left" else slice(length)
        ids[row, real], mask[row, real] = prompt(length, seed=row)[0], 1
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model: PreTrainedModel, input_ids: Tensor, num_new: int = 10, **options: Any) -> Tensor:
    """The generated tokens alone, [rows, num_new]."""
    options.setdefault("attention_mask", torch.ones_like(input_ids))  # else generate() guesses one from the pad token
    tokens = model.generate(input_ids, max_new_tokens=num_new, do_sample=False, **options)
    return tokens[:, input_ids.shape[1] :]


def logits(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> Tensor:
    """[rows, tokens, vocabulary] of one forward pass."""
    with torch.no_grad():
        return model(input_ids=input_ids, **options).logits


def drafting(model: PreTrainedModel) -> PreTrainedModel:
    """The model as an assistant that drafts five tokens a round, however unsure it is."""
    settings = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
    model.generation_config.update(**settings, assistant_confidence_threshold=0.0)
    return model


def empty_cache(model: PreTrainedModel) -> DynamicCache:
    """The cache that generate() would make."""
    return DynamicCache(config=model.config)


def fed(model: PreTrainedModel, *pieces: Tensor) -> SparseCache:
    """An explicit cache that has seen the pieces, each in a forward call of its own: one token is a decode step."""
    cache = kvsift.make_cache(model, SPARSE)
    for piece in pieces:
        logits(model, piece, past_key_values=cache)
    return cache


@contextmanager
def covered(model: PreTrainedModel) -> Iterator[SparseRun]:
    """A run that could be sparse, over contexts that its budget covers; it says so, which is not news here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*skipped nothing")
        with kvsift.sparse(model, COVERING) as run:
            yield run


def assert_sparse(run: SparseRun) -> None:
    """Decode read less than 0.6 of its context, in every query of every layer that the run counted."""
    report = run.report()
    assert report["phases"]["decode"]["density"] < 0.6
    assert all(row["sparse_queries"] == row["queries"] for row in report["layers"] if row["phase"] == "decode")


def take_over(model: PreTrainedModel, way: str, plan: Any = SPARSE) -> None:
    """Put kvsift on a model by "make_cache", or by "sparse" and off again."""
    if way == "make_cache":
        kvsift.make_cache(model, plan)
    else:
        with kvsift.sparse(model, plan):
            pass


@contextmanager
def left_alone(model: PreTrainedModel) -> Iterator[None]:
    """Asserts that the block leaves the model exactly as it was."""
    before = _state(model)
    try:
        yield
    finally:
        assert _state(model) == before


def _state(model: PreTrainedModel) -> dict[str, Any]:
    configs = {"": model.config} | {key: getattr(model.config, key) for key in model.config.sub_configs}
    return {
        "attributes": {name: id(value) for name, value in model.__dict__.items()},
        "attention": {key: config._attn_implementation for key, config in configs.items() if config is not None},
        "hooks": {name: [*part._forward_pre_hooks, *part._forward_hooks] for name, part in model.named_modules()},
        "training": {name: part.training for name, part in model.named_modules()},
        "parameters": {name: parameter._version for name, parameter in model.named_parameters()},
        "generation": model.generation_config.to_dict() if model.can_generate() else None,
    }
