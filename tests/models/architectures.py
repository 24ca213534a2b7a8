"""Compares the block and the engine with stock greedy generate() on small random models of many architectures.

    python -m models.architectures Class ...

prints a line of JSON for each class. The process is to be short-lived: some architectures keep memory for good.
"""

import json
import resource
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from engine.tiny_directory import text_of, write_tokenizer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvsift

NUM_TOKENS, NUM_NEW, VOCABULARY, END, PAD = 75, 8, 320, 1, 2  # padding is no token of the prompt
MOST_PARAMETERS = 90_000_000
PLANS = ("dense", "quest:budget=4096:dense_layers=none")
SMALL = {
    2: "num_experts_per_tok num_key_value_heads top_k num_experts_per_token num_kv_heads n_shared_experts moe_top_k "
       "mlp_layers_per_block num_codebooks linear_num_key_heads swa_num_key_value_heads",
    4: "num_hidden_layers num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
       "linear_num_value_heads linear_conv_kernel_dim decoder_layers decoder_attention_heads encoder_layers "
       "encoder_attention_heads n_mamba_heads num_linear_key_value_heads linear_num_heads swa_num_attention_heads "
       "altup_num_inputs num_layers num_heads n_layer n_head encoder_n_layers",
    8: "rotary_dim qk_rope_head_dim mamba_n_heads mamba_num_heads n_heads laurel_rank mamba_d_state ssm_state_size "
       "time_step_rank",
    16: "head_dim qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank linear_key_head_dim linear_value_head_dim "
        "mamba_d_head mamba_head_dim mamba_chunk_size chunk_size hidden_size_per_layer_input swa_head_dim d_kv "
        "qk_head_dim o_lora_rank index_head_dim index_topk conv_dim linear_head_dim",
    128: "mamba_d_ssm",
    32: "sliding_window attention_chunk_size moe_intermediate_size shared_expert_intermediate_size local_attention "
        "moe_shared_expert_intermediate_size expert_hidden_size ffn_hidden_size_moe shared_intermediate_size "
        "window_size",
    64: "hidden_size d_model word_embed_proj_dim n_embd embedding_size lru_width dim_model attention_hidden_size",
    96: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dim_ff prefix_dense_hidden_dim "
        "intermediate_size_mlp ffn_hidden_size block_ff_dim",
    512: "max_position_embeddings n_positions max_sequence_length",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    1: "n_group topk_group mamba_n_groups n_groups first_k_dense_replace moe_layer_start_index "
       "num_nextn_predict_layers",
    0: "num_kv_shared_layers",
}  # fmt: skip
SIZES = {name: size for size, names in SMALL.items() for name in names.split()}
LATENT = {
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "qk_head_dim": 24,
    "num_key_value_heads": 4,
}  # of models that cache latents
BY_LAYER = "layer_types", "per_layer_config", "mlp_layer_types", "no_rope_layers"  # values that follow from the others
ABSENT = object()  # a value that a class refuses
OWN: dict[str, dict[str, Any]] = {
    "BambaConfig": {"attn_layer_indices": [1, 3]},
    "BltConfig": {"encoder_hash_byte_group_vocab": 100, "encoder_hash_byte_group_size": [3]},
    "DbrxConfig": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"] * 2},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
    "Mamba2Config": {"num_heads": 8},
    "MusicgenDecoderConfig": {"num_codebooks": 1},
    "MusicgenMelodyDecoderConfig": {"num_codebooks": 1},
    "ProphetNetConfig": {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_hidden_layers": ABSENT},
    "XLNetConfig": {"max_position_embeddings": ABSENT},
    "XmodConfig": {"default_language": "en_XX"},
    "Zamba2Config": {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_head_dim": 32, "n_mamba_heads": 8,
                     "attention_hidden_size": 128},
    "ZambaConfig": {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_head_dim": 32,
                    "attention_hidden_size": 128},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "xLSTMConfig": {"num_heads": 2},
    "ReformerConfig": {"is_decoder": True},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]]},
    "Gemma4AssistantConfig": {"hidden_size_per_layer_input": 0},
}  # fmt: skip


class Outcome(NamedTuple):
    """What became of one architecture: equal, refused with a sentence, skipped for a reason, or else."""

    name: str
    block: str
    engine: str
    note: str = ""


def class_names() -> list[str]:
    """The causal language models of the installed transformers."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))


def small_model(name: str) -> PreTrainedModel:
    """A small random model of a class for which stock generate() works.

    Raises:
        Exception: what the last configuration that was tried has raised.
    """
    model_class = getattr(transformers, name)
    failure: Exception = ValueError("it has no configuration")
    for settings in _candidates(model_class.config_class):
        try:
            config = model_class.config_class(**settings)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model_class(config).parameters())
            if size > MOST_PARAMETERS:
                raise ValueError(f"its small configuration has {size:,} parameters")
            torch.manual_seed(1)
            model = model_class(config).float().eval()
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=0.15)
            model.generation_config.eos_token_id = END
            model.generation_config.bos_token_id, model.generation_config.pad_token_id = None, PAD
            _generated(model, torch.full((1, 8), 7))
        except Exception as error:
            failure = error
        else:
            return model  # type: ignore[no-any-return]
    raise failure


def _candidates(config_class: Any) -> Iterator[dict[str, Any]]:
    """Small configurations of a class, one of which may work."""
    default = config_class()
    sizes = _sizes(default)
    if kinds := list(dict.fromkeys(getattr(default, "layer_types", None) or ())):
        kinds += [] if set(kinds) - {"sliding_attention"} else ["full_attention"]
        yield {"layer_types": (kinds * 4)[:4], **sizes}
    elif "sliding_window" in sizes:
        yield {**sizes, "sliding_window": None}  # or nothing of these would be full attention
    yield sizes


def _sizes(default: Any) -> dict[str, Any]:
    """Small values of what the default configuration of a class has, configurations inside of it included."""
    found = {name: size for name, size in SIZES.items() if _has(default, name)}
    found |= LATENT if "qk_rope_head_dim" in found else {}
    found |= {"bos_token_id": 0, "eos_token_id": END, "pad_token_id": PAD, "tie_word_embeddings": False}
    for name in type(default).sub_configs:
        if (inner := getattr(default, name, None)) is not None:
            given = {key: value for key, value in inner.to_dict().items() if key not in BY_LAYER}
            found[name] = {**given, **_sizes(inner)}
    found |= OWN.get(type(default).__name__, {})
    return {name: value for name, value in found.items() if value is not ABSENT}


def _has(config: Any, name: str) -> bool:
    """Whether a configuration has a value that may be set."""
    own = getattr(type(config), name, None)
    if isinstance(own, property) and own.fset is None:
        return False
    try:
        return hasattr(config, name)
    except RuntimeError:  # it has one for each layer
        return True


def _generated(model: Any, ids: Tensor) -> list[int]:
    found: list[int] = model.generate(ids, max_new_tokens=NUM_NEW, do_sample=False)[0, ids.shape[1] :].tolist()
    return found[:-1] if found and found[-1] == END else found


def compare(name: str, folder: Path) -> Outcome:
    """Compare one class, below a folder for its files."""
    try:
        model = small_model(name)
    except Exception as error:
        return Outcome(name, "skipped", "skipped", f"{type(error).__name__}: {error}"[:160])
    tokenizer, text = write_tokenizer(folder), text_of(NUM_TOKENS)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    expected = _generated(model, ids)
    block, note = _block(model, ids, expected)
    model.save_pretrained(folder)
    del model
    engine, other = _engine(folder, text, expected)
    return Outcome(name, block, engine, other or note)


def _block(model: PreTrainedModel, ids: Tensor, expected: list[int]) -> tuple[str, str]:
    try:
        for plan in PLANS:
            with kvsift.sparse(model, plan):
                if (found := _generated(model, ids)) != expected:
                    return "different", f"block {plan}: {found} for {expected}"
    except kvsift.InputError as error:
        return "refused", str(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    return "equal", ""


def _engine(folder: Path, text: str, expected: list[int]) -> tuple[str, str]:
    try:
        for plan in PLANS:
            answer = kvsift.LLM(folder, plan, dtype="float32", chunk_size=32).generate(text, max_new_tokens=NUM_NEW)
            if answer.token_ids != expected:
                return "different", f"engine {plan}: {answer.token_ids} for {expected}"
    except kvsift.InputError as error:
        return "refused", str(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    return "equal", ""


def main() -> None:
    """Compare the classes that the command line names."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            outcome = compare(name, Path(folder))
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(json.dumps({**outcome._asdict(), "peak_mib": peak_mib}), flush=True)


if __name__ == "__main__":
    main()
