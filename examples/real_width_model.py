"""A model of Llama-3-8B's attention shape with random weights: real width to measure on, nothing to download.

    python examples/real_width_model.py /tmp/llama-shaped                             two layers, 0.9 GiB
    python examples/real_width_model.py /tmp/llama-shaped --layers 32 --vocab 128256  all of it, 15 GiB
    kvsift ask --model /tmp/llama-shaped --context manual.txt --question "Why?" --plan quest:budget=1024

Hidden size 4096, 32 query heads on 8 KV heads of 128, rotary base 500000, bfloat16: what Llama-3.1-8B has. Times,
bytes and memory are those of such a model; its answers are noise. Layers are made and written one at a time, so memory
holds one of them. The tokenizer is the embedded model's, or a token per byte where that is not installed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from kvsift.models.hf.model_directory import embedded_model

HIDDEN, HEAD_DIM, QUERY_HEADS, KV_HEADS = 4096, 128, 32, 8
POSITIONS = 131_072
SPREAD = 0.02  # of the weights, as Llama's are initialised; attention logits then spread by about 1.6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="directory to write; it must not exist, or be empty")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers (8B has 32); default %(default)s")
    parser.add_argument("--mlp", type=int, default=14_336, help="width of the MLP (8B has 14336); default %(default)s")
    parser.add_argument("--vocab", type=int, default=4096, help="entries (8B has 128256); default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the weights; default %(default)s")
    given = parser.parse_args()
    if min(given.layers, given.mlp, given.vocab) < 1:
        parser.error("--layers, --mlp and --vocab must be 1 or more")
    if given.out.exists() and (not given.out.is_dir() or any(given.out.iterdir())):
        parser.error(f"{given.out} is there already and not an empty directory")
    given.out.mkdir(parents=True, exist_ok=True)
    num_tokens = write_tokenizer(given.out)
    if num_tokens > given.vocab:
        parser.error(f"--vocab {given.vocab} is too small for the tokenizer's {num_tokens} entries")
    num_bytes = write_weights(given.out, given.layers, given.mlp, given.vocab, given.seed)
    write_config(given.out, given.layers, given.mlp, given.vocab)  # last: without it the directory is no model
    print(f"{given.out}: {given.layers} layers, {num_bytes / (1 << 30):.2f} GiB of weights")


def write_config(out: Path, num_layers: int, mlp: int, vocabulary: int) -> None:
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=HIDDEN,
        intermediate_size=mlp,
        num_hidden_layers=num_layers,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=vocabulary,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    config.save_pretrained(out)


def write_weights(out: Path, num_layers: int, mlp: int, vocabulary: int, seed: int) -> int:
    """Write one file per layer and one for the embeddings, and their index; return the bytes of the weights."""
    generator = torch.Generator().manual_seed(seed)
    files, num_bytes = {}, 0
    for number, tensors in enumerate(parts(num_layers, mlp, vocabulary, generator), 1):
        name = f"model-{number:05}-of-{num_layers + 1:05}.safetensors"
        save_file(tensors, out / name, {"format": "pt"})
        files |= dict.fromkeys(tensors, name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return num_bytes


def parts(num_layers: int, mlp: int, vocabulary: int, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of the embeddings, then of each layer, by their names in transformers."""

    def random(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, SPREAD, generator=generator)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    yield {
        "model.embed_tokens.weight": random(vocabulary, HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": random(vocabulary, HIDDEN),
    }
    sizes = {
        "self_attn.q_proj": (QUERY_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, QUERY_HEADS * HEAD_DIM),
        "mlp.gate_proj": (mlp, HIDDEN),
        "mlp.up_proj": (mlp, HIDDEN),
        "mlp.down_proj": (HIDDEN, mlp),
    }
    for layer in range(num_layers):
        tensors = {f"{name}.weight": random(*size) for name, size in sizes.items()}
        tensors |= {f"{name}.weight": ones.clone() for name in ("input_layernorm", "post_attention_layernorm")}
        yield {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors.items()}


def write_tokenizer(out: Path) -> int:
    """Write the embedded model's tokenizer, or a token per byte; return its number of entries."""
    names = ("tokenizer.json", "tokenizer_config.json")
    if all((embedded_model() / name).is_file() for name in names):
        for name in names:
            shutil.copy(embedded_model() / name, out / name)
        return Tokenizer.from_file(str(out / names[0])).get_vocab_size()
    tokenizer = Tokenizer(
        models.BPE({byte: n for n, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(out)
    return tokenizer.get_vocab_size()


if __name__ == "__main__":
    main()
