"""Models in GGUF files: the weights, logits and tokenizers of their directories, and refusals of what is not one."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from models.gguf_files import ARCHITECTURES, TOKENS, write_gguf
from refusals import refused
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel

from kvsift import LLM, InputError, native
from kvsift.engine.memory import predict_bytes
from kvsift.gguf_file import GgufFile
from kvsift.models.hf.gguf_model import config_of
from kvsift.models.hf.gguf_tokenizer import LLAMA3, QWEN2, TEKKEN, tokenizer_of
from kvsift.models.hf.model_directory import ModelDirectory
from kvsift.models.packed_linear import PackedEmbedding, PackedExperts, PackedLinear

CPU = torch.device("cpu")
TEXT = "It's 2024: two  spaces,\n\n\na\ttab, DON'T, ünïcödé, 你好 and 12345678 sheep  \r\n \U0001f600 end "


def _loaded(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return ModelDirectory.check(path).load(CPU, dtype)


def _require_same(model: PreTrainedModel, expected: PreTrainedModel, rtol: float = 0.0) -> None:
    """Weights and logits are equal; Gemma's norms have been rounded next to 1, and packed weights multiply inputs in
    8 bits."""
    weights = expected.state_dict()
    assert model.state_dict().keys() == weights.keys()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=rtol, atol=rtol)
    ids = torch.randint(3, len(TOKENS), (1, 100), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found, exact = model(ids).logits, expected(ids).logits
    if any(isinstance(module, PackedLinear | PackedExperts) for module in model.modules()):
        assert (found - exact).norm() < 0.1 * exact.norm()
    else:
        torch.testing.assert_close(found, exact, rtol=10 * rtol, atol=100 * rtol)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_has_the_logits_of_the_model_that_it_was_made_of(family: str, tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "model.gguf", family)
    _require_same(_loaded(tmp_path / "model.gguf"), expected, rtol=1e-6 if family.startswith("Gemma") else 0.0)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_1, Kind.Q8_0])
def test_experts_of_a_type_are_those_of_the_file(kind: Kind, family: str, tmp_path: Path) -> None:
    top_k = 2 if kind == Kind.F16 else 4  # all: which are the best of some depends on the rounding of inputs
    expected = write_gguf(tmp_path / "model.gguf", family, kind, num_experts_per_tok=top_k)
    model = _loaded(tmp_path / "model.gguf")
    _require_same(model, expected)
    assert isinstance(model.model.layers[1].mlp.experts, PackedExperts) == (kind != Kind.F16)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_matrices_of_a_type_have_the_rows_of_their_heads_in_order(kind: Kind, tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "model.gguf", kind=kind)
    _require_same(_loaded(tmp_path / "model.gguf"), expected)
    rounded = _loaded(tmp_path / "model.gguf", torch.bfloat16).state_dict()
    assert all(torch.equal(rounded[name], weight.bfloat16()) for name, weight in expected.state_dict().items())


def test_biases_and_tied_embeddings_are_those_of_the_file(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "model.gguf", attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert expected.model.layers[0].self_attn.q_proj.bias.abs().max() > 0
    _require_same(_loaded(tmp_path / "model.gguf"), expected)


def test_a_large_matrix_is_packed_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsift.gguf_file.EXPANDED_AT_ONCE", 7 * 64)
    expected = write_gguf(tmp_path / "model.gguf", kind=Kind.Q8_0)
    _require_same(_loaded(tmp_path / "model.gguf"), expected)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_that_of_its_directory(factor: float, tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    expected = write_gguf(tmp_path / "plain.gguf", rope_parameters=rope)
    plain = GgufFile.open(tmp_path / "plain.gguf")
    base = 500_000.0 ** (-torch.arange(0, 16, 2) / 16)
    divisors = (base / expected.model.rotary_emb.inv_freq).numpy()[None]
    entry = type(plain.tensors["output_norm.weight"])(0, (8,), divisors.astype(np.float32).view(np.uint8))
    scaled = GgufFile(plain.path, plain.settings, {**plain.tensors, "rope_freqs.weight": entry})
    assert config_of(scaled).rope_parameters == rope
    entry.packed.view(np.float32)[0, 3] *= 1.5
    with refused("unsupported_model"):
        config_of(scaled)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"llama.expert_count": 8}, "unsupported_model"),
        ({"llama.rope.scaling.type": "longrope"}, "unsupported_model: 'longrope'"),
        ({"llama.rope.dimension_count": 8}, "unsupported_model"),
        ({"llama.attention.value_length": 8}, "unsupported_model"),
        ({"llama.rope.scaling.type": "linear"}, "unsupported_model: llama.rope.scaling.factor='nothing'"),
    ],
)
def test_what_is_computed_otherwise_is_refused(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", settings=settings)
    with refused(says):
        ModelDirectory.check(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama.block_count", "damaged_file: blk.4000000000.attn_norm.weight"),
        ("llama.embedding_length", "damaged_file: [260, 4000000001]"),
        ("llama.feed_forward_length", "damaged_file: blk.0.ffn_up.weight"),
        ("llama.attention.head_count_kv", "damaged_file: blk.0.attn_k.weight"),
    ],
)
def test_sizes_that_lie_are_refused_before_memory_is_allocated(name: str, says: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    content = bytearray((tmp_path / "model.gguf").read_bytes())
    at = content.index(name.encode()) + len(name) + 4  # the type of the value
    content[at : at + 4] = (4_000_000_001).to_bytes(4, "little")
    (tmp_path / "model.gguf").write_bytes(content)
    with refused(says):
        ModelDirectory.check(tmp_path / "model.gguf")


def test_settings_that_are_not_used_are_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_gguf(tmp_path / "model.gguf", settings={"llama.attention.scale": 0.5})
    ModelDirectory.check(tmp_path / "model.gguf")
    assert caplog.messages == [f"{tmp_path}/model.gguf has settings that kvsift does not use: attention.scale"]


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    content, length = (tmp_path / "model.gguf").read_bytes(), b"\5\0\0\0\0\0\0\0"
    (tmp_path / "model.gguf").write_bytes(content.replace(length + b"llama", length + b"mamba", 1))
    with refused("unknown_name: gemma2, gemma3, llama, qwen2, qwen3"):
        ModelDirectory.check(tmp_path / "model.gguf")


def test_a_missing_weight_is_never_made_up(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    content = (tmp_path / "model.gguf").read_bytes().replace(b"blk.1.attn_v.weight", b"blk.1.attn_w.weight", 1)
    (tmp_path / "model.gguf").write_bytes(content)
    with refused("damaged_file: model.layers.1.self_attn.v_proj.weight"):
        _loaded(tmp_path / "model.gguf")


def test_damaged_files_give_a_sentence_and_no_crash(tmp_path: Path) -> None:
    """Truncated, with bits turned and with lengths that lie, mostly in the header; some in the packed weights."""
    write_gguf(tmp_path / "model.gguf", kind=Kind.Q8_0, num_hidden_layers=1)
    content, drawn, refused = (tmp_path / "model.gguf").read_bytes(), random.Random(0), 0
    header = content.index(b"output_norm.weight") + 200
    for case in range(200):
        damaged = bytearray(content)
        at = drawn.randrange(header)
        if case % 4 == 0:
            del damaged[drawn.choice((at, drawn.randrange(len(content)))) :]
        elif case % 4 == 1:
            damaged[at : at + 8] = drawn.choice((2**64 - 1, 2**63, 2**40, 2**20, 0)).to_bytes(8, "little")
        else:
            for _ in range(drawn.choice((1, 4))):
                damaged[drawn.randrange(len(content) if case % 8 == 3 else header)] = drawn.randrange(256)
        path = tmp_path / f"{case}.gguf"
        path.write_bytes(damaged)
        said = _refusal(path)
        refused += bool(said)
        assert "\n" not in said
        assert len(said) < 700
    assert refused > 100


def _refusal(path: Path) -> str:
    """Why a file is refused; empty: it is loaded."""
    try:
        directory = ModelDirectory.check(path)
        directory.tokenizer()
        directory.load(CPU, torch.float32)
    except InputError as error:
        return str(error)
    return ""


def _byte_level(split: str | None) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer trained here, and the settings of its file."""
    core = Tokenizer(models.BPE())
    regex = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [*regex, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    core.train_from_iterator([TEXT, "the sheep and the 2024 spaces, and the tabs"] * 3, trainer)
    core.add_tokens(["<think>"])
    state = json.loads(core.to_str())
    tokens = sorted(core.get_vocab(), key=core.get_vocab().get)
    return core, {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 3), 4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


@pytest.mark.parametrize(
    ("name", "split", "has_bos"),
    [("gpt-2", None, False), ("llama-bpe", LLAMA3, True), ("qwen2", QWEN2, False), ("tekken", TEKKEN, True)],
)
def test_a_tokenizer_of_bytes_has_the_tokens_of_the_one_it_was_made_of(
    name: str, split: str | None, has_bos: bool
) -> None:
    core, settings = _byte_level(split)
    tokenizer = tokenizer_of({**settings, "tokenizer.ggml.pre": name})
    for text in (TEXT, "<|start|>user\nHi<|im_end|>", "so <think>the sheep</think>", ""):
        expected = core.encode(text).ids
        assert tokenizer(text)["input_ids"] == [0] * has_bos + expected
        assert tokenizer.decode(expected) == core.decode(expected, skip_special_tokens=False)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|start|>", "<|im_end|>", None)
    assert not tokenizer.added_tokens_decoder[len(tokenizer) - 1].special
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi"


def test_digits_are_apart_in_smollm() -> None:
    _, settings = _byte_level(None)
    assert tokenizer_of({**settings, "tokenizer.ggml.pre": "smollm"}).tokenize("2024") == [*"2024"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer.ggml.pre": "unheard"}, "it splits words as 'unheard'; gpt-2, smollm, llama-bpe"),
        ({"tokenizer.ggml.pre": None}, "it splits words as None"),
        ({"tokenizer.ggml.model": "bert"}, "its tokenizer is of the kind 'bert', and gpt2 and llama can be read"),
        ({"tokenizer.ggml.token_type": [1]}, "it has 1 types of"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(change: dict[str, Any], says: str) -> None:
    _, settings = _byte_level(None)
    with pytest.raises(ValueError, match=says):
        tokenizer_of({**settings, **change})


def test_sentencepiece_merges_the_highest_score_first() -> None:
    pieces = {"▁the": -1.0, "▁t": -2.0, "he": -3.0, "▁he": -4.0, "es": -5.0, "▁": -6.0, "t": -7.0, "h": -8.0, "e": -9.0,
              "s": -10.0}  # fmt: skip
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    settings = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = tokenizer_of(settings)
    assert tokenizer.convert_ids_to_tokens(tokenizer("the hes é")["input_ids"]) == [
        "<s>", "▁the", "▁he", "s", "▁", "<0xC3>", "<0xA9>"
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer("the hes é")["input_ids"], skip_special_tokens=True) == "the hes é"
    bare = tokenizer_of({**settings, "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    assert bare.tokenize("the hes") == ["t", "he", "▁he", "s"]


def test_all_tokens_that_end_a_turn_are_ends(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", settings={"tokenizer.ggml.eot_token_id": 2})
    file = GgufFile.open(tmp_path / "model.gguf")
    assert config_of(file).eos_token_id == [1, 2]


def test_a_file_answers_chats_and_opens_its_saved_documents(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf", kind=Kind.Q8_0)
    llm = LLM(tmp_path / "tiny.gguf", "quest:budget=112", dtype="float32", device="cpu")
    ids = torch.tensor([llm.tokenizer("Once upon a time")["input_ids"]])
    answer = llm.generate("Once upon a time", max_new_tokens=8, plan="dense")
    assert answer.token_ids == expected.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    assert llm.directory.name == "tiny"
    assert llm.chat().ask("Hi", max_new_tokens=4).token_ids
    document = llm.read("The mill grinds corn. " * 20)
    asked = document.ask("What?", max_new_tokens=8).token_ids
    document.save(tmp_path / "document.kvsift")
    again = LLM(str(tmp_path / "tiny.gguf"), "quest:budget=112", dtype="float32", device="cpu")
    assert again.open(tmp_path / "document.kvsift").ask("What?", max_new_tokens=8).token_ids == asked
    write_gguf(tmp_path / "other.gguf", seed=2)
    other = LLM(tmp_path / "other.gguf", "quest:budget=112", dtype="float32", device="cpu")
    with refused("other_model: Open it with the model that read it"):
        other.open(tmp_path / "document.kvsift")


def test_the_memory_that_is_predicted_is_that_of_the_weights_as_they_are_loaded(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", kind=Kind.Q8_0)
    directory, num_numbers = ModelDirectory.check(tmp_path / "model.gguf"), sum(p.numel() for p in model.parameters())
    assert directory.config.dtype == torch.bfloat16
    assert directory.num_weight_bytes == 2 * num_numbers
    assert directory.weight_bytes(torch.device("cuda"), torch.float32) == 4 * num_numbers
    if native.available():
        loaded = directory.load(CPU, torch.float32)
        tiles = {
            module.matrix.tiles for module in loaded.modules() if isinstance(module, PackedLinear | PackedEmbedding)
        }
        others = sum(parameter.numel() for parameter in loaded.parameters())
        assert directory.weight_bytes(CPU, torch.float32) == sum(each.numel() for each in tiles) + 4 * others
        assert directory.weight_bytes(CPU, torch.float32) < 1.2 * num_numbers
    narrow, wide = (
        predict_bytes(directory, torch.device("cuda"), dtype, 0, 1) for dtype in (torch.bfloat16, torch.float32)
    )
    assert wide - narrow >= 2 * num_numbers
