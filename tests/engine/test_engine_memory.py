"""Memory is foretold before weights are loaded, and foretold about right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stories
import torch
from engine.test_hybrid_steps import write_family
from engine.tiny_directory import text_of, write_model
from refusals import refused
from transformers import BltConfig, Gemma3TextConfig, Gemma4TextConfig, MambaConfig, Qwen3NextConfig, XLNetConfig

from kvsift import LLM
from kvsift.engine.executor import Executor
from kvsift.engine.memory import (
    GIB,
    RUNTIME_BYTES,
    _cgroup,
    available_bytes,
    predict_bytes,
    require_memory,
    summary_share,
)
from kvsift.models.hf.model_directory import LayerKV, ModelDirectory
from kvsift.plan.placement import Placement
from kvsift.plan.syntax import parse_plan
from kvsift.stores.kv_pool import KVPool
from kvsift.stores.reader import DECODED_TOKENS

# Reads a text of argv[2] bytes and prints what was held before, at the peak, and foretold.
MEASURE = """
import json, sys, torch
from kvsift import LLM
from kvsift.engine.memory import peak_bytes, predict_bytes
torch.set_num_threads(1)
llm = LLM(sys.argv[1], "quest:budget=256:dense_layers=none", chunk_size=512)
text = "ab cd ef. " * (int(sys.argv[2]) // 10)
before = peak_bytes(llm.device)
answer = llm.generate(text, max_new_tokens=2)
foretold = predict_bytes(llm.directory, llm.device, llm.dtype, answer.prompt_tokens + 2, 512)
print(json.dumps([before, answer.peak_memory_bytes, foretold]))
"""


# Reads a text under path argv[2] and prints the peak, and what was foretold.
MEASURE_OF_STATES = """
import ctypes, sys, torch
from kvsift import LLM
from kvsift.engine.memory import predict_bytes
ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: else glibc keeps nearly as much of what was freed
torch.set_num_threads(1)
llm = LLM(sys.argv[1], "dense", dtype="float32", chunk_size=64, path=sys.argv[2])
answer = llm.generate("ab cd ef. " * 40, max_new_tokens=8)
given = llm.directory, llm.device, llm.dtype, answer.prompt_tokens + 8, 64
print(answer.peak_memory_bytes, predict_bytes(*given, captured=answer.path == "eager"))
"""


@pytest.mark.usefixtures("no_weights")
def test_a_run_that_cannot_fit_is_refused_before_the_weights_are_loaded(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsift.engine.memory.available_bytes", lambda device: 50 << 20)
    llm = LLM(llama)
    with refused("not_enough_memory: float32"):
        llm.generate(text_of(300), max_new_tokens=12)
    with refused("not_enough_memory: --dtype bfloat16"):
        llm.read(text_of(300)).ask("Why?")


@pytest.mark.usefixtures("no_weights")
def test_positions_are_checked_before_the_weights_are_loaded(llama: Path) -> None:
    llm = LLM(llama)
    with refused("context_length_exceeded: generate 95 at most, or shorten the context by 5"):
        llm.generate(text_of(4000), max_new_tokens=100)


@pytest.mark.parametrize(
    ("positions", "rope", "expected"),
    [
        (400, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 320}, 1280),  # Qwen3's cards
        (400, {"rope_type": "yarn", "factor": 4.0}, 1600),  # the original length is then max_position_embeddings
        (1600, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 400}, 1600),  # as DeepSeek's
        (400, {"rope_type": "dynamic", "factor": 2.0}, 800),
        (400, {"rope_type": "default"}, 400),
    ],
)
@pytest.mark.usefixtures("no_weights")
def test_the_last_position_may_be_used_and_yarn_and_dynamic_ntk_extend_them(
    positions: int, rope: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    parameters = {**rope, "rope_theta": 10000.0}
    directory = write_model(tmp_path, "Qwen3", max_position_embeddings=positions, rope_parameters=parameters)
    assert ModelDirectory.check(directory).max_positions == expected
    with pytest.raises(AssertionError, match="the weights were loaded"):
        LLM(directory).generate(text_of(expected - 11), max_new_tokens=10)
    with refused(f"context_length_exceeded: length is {expected} tokens"):
        LLM(directory).generate(text_of(expected - 10), max_new_tokens=10)


@pytest.mark.usefixtures("no_weights")
def test_a_tokenizer_with_more_entries_than_the_model_is_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path, vocab_size=100)
    with refused("other_model: 130"):
        LLM(directory).generate("zébra")


def test_what_is_available_is_known_here() -> None:
    available = available_bytes(torch.device("cpu"))
    assert available is None or 0 < available < 1 << 50


def test_pages_of_files_are_free_memory_of_a_container(tmp_path: Path) -> None:
    files = {"memory.max": "1000\n", "memory.current": "900\n", "memory.stat": "anon 500\ninactive_file 300\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert _cgroup(tmp_path) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert _cgroup(tmp_path) is None


def test_memory_that_nobody_knows_refuses_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsift.engine.memory.available_bytes", lambda device: None)
    assert LLM(llama).generate("Once", max_new_tokens=1).token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_foretold_memory_grows_with_the_context_by_its_keys_values_and_summaries(
    llama: Path, dtype: torch.dtype
) -> None:
    directory = ModelDirectory.check(llama)
    short, long = (predict_bytes(directory, torch.device("cpu"), dtype, n, 64) for n in (1000, 17_000))
    assert long - short == pytest.approx(directory.kv_bytes_per_token(dtype) * 16_000 * 1.08, abs=1)


def test_sparse_prefill_of_8_bits_decodes_all_of_a_layer_at_once(tmp_path: Path) -> None:
    """Half a GB after 128K tokens of 8 KV heads of 128 channels; dense attention decodes 16K tokens at a time."""
    directory = ModelDirectory.check(write_model(tmp_path, num_attention_heads=8, num_key_value_heads=8, head_dim=128))
    given = directory, torch.device("cuda"), torch.bfloat16, 1 << 17, 8192, Placement("device", kv_dtype="int8")
    dense, sparse = (predict_bytes(*given, parse_plan(plan)) for plan in ("quest", "prefill=quoka,decode=quest"))
    assert sparse - dense == ((1 << 17) - DECODED_TOKENS) * 2 * 8 * 128 * 2

    one, four = (predict_bytes(*given, parse_plan("prefill=quoka,decode=quest"), num_seqs) for num_seqs in (1, 4))
    assert one - four == (3 << 15) * 2 * 8 * 128 * 2, "of four sequences one prefills at a time"


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("method", ["sketch", "quest"])
def test_summaries_are_no_larger_than_is_foretold(method: str, kv_dtype: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, head_dim=64)
    llm = LLM(directory, f"{method}:budget=128", device="cpu", dtype="bfloat16", kv_dtype=kv_dtype)
    stores = [each.store for each in llm.read(text_of(2000)).prefill(llm.plan).attentions]
    assert len(stores) > 1
    for store in stores:
        summaries = sum(rows.nbytes for rows in store.pools().summaries.values())
        kept = store.pools().keys.nbytes + store.pools().values.nbytes
        assert 0 < summaries <= kept * summary_share(llm.place)


def test_a_run_that_fits_since_most_layers_keep_a_window_alone_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 layers, four of them with full attention, as in Gemma 3: 6.1 GiB of keys and values, and not 73."""
    layers = {"num_hidden_layers": 48, "layer_types": (["sliding_attention"] * 11 + ["full_attention"]) * 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 64}
    config = Gemma3TextConfig(vocab_size=259, hidden_size=64, intermediate_size=96, **heads, **layers)
    directory = replace(ModelDirectory.check(write_model(tmp_path)), config=config)
    token = 2 * 8 * 128 * 4  # bytes in one layer
    assert directory.kv_bytes_per_token(torch.float32) == 4 * token
    assert directory.window_bytes(torch.float32, 200_000) == 44 * 64 * token
    assert directory.window_bytes(torch.float32, 10) == 44 * 10 * token
    kept = 4 * token * 200_000
    needed = predict_bytes(directory, torch.device("cpu"), torch.float32, 200_000, 512)
    assert kept < needed < 1.2 * kept
    monkeypatch.setattr("kvsift.engine.memory.available_bytes", lambda device: 8 * GIB)
    require_memory(directory, torch.device("cpu"), torch.float32, 200_000, 512)


def test_memory_is_counted_layer_by_layer() -> None:
    text = {"vocab_size": 259, "hidden_size": 64, "num_attention_heads": 4, "sliding_window": 32}
    kinds = ["sliding_attention", "full_attention"]
    gemma4 = Gemma4TextConfig(
        **text, num_hidden_layers=4, num_key_value_heads=2, head_dim=16, global_head_dim=32,
        num_global_key_value_heads=1, layer_types=kinds * 2, num_kv_shared_layers=2, attention_k_eq_v=True,
    )  # fmt: skip
    assert LayerKV.of_layers(gemma4) == (LayerKV(0, 2, 16, window=32), LayerKV(1, 1, 32))  # others read these
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    hybrid = Qwen3NextConfig(
        **text, **linear, num_hidden_layers=4, num_key_value_heads=2, head_dim=16,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )  # fmt: skip
    assert LayerKV.of_layers(hybrid) == (LayerKV(3, 2, 16),)
    assert LayerKV.of_layers(MambaConfig(num_hidden_layers=2)) == ()


@pytest.mark.usefixtures("no_weights")
def test_a_configuration_without_a_list_of_layers_is_refused_by_its_name(tmp_path: Path) -> None:
    """Blt has three decoders, and its configuration no number of layers."""
    directory = write_model(tmp_path)
    BltConfig().save_pretrained(directory)
    with refused("unsupported_model: 'BltConfig' object has no attribute 'num_hidden_layers"):
        LLM(directory)


def test_a_model_without_a_maximum_of_positions_is_not_made_for_none(tmp_path: Path) -> None:
    directory = replace(ModelDirectory.check(write_model(tmp_path)), config=XLNetConfig())
    assert directory.max_positions is None


def test_weights_count_in_the_dtype_they_will_have(tmp_path: Path) -> None:
    directory = ModelDirectory.check(write_model(tmp_path, hidden_size=64))
    wide, narrow = (
        predict_bytes(directory, torch.device("cpu"), dtype, 0, 1) - RUNTIME_BYTES
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert wide == directory.num_weight_bytes == 2 * narrow


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # read as stored, and widened while loading
def test_the_foretold_peak_is_about_the_real_one(tmp_path: Path, dtype: str) -> None:
    directory = write_model(
        tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, head_dim=128, dtype=getattr(torch, dtype),
    )  # fmt: skip
    before, peak, foretold = json.loads(stories.run(MEASURE, str(directory), "1500").stdout)
    assert 0.6 < foretold / peak < 1.7
    growth, foretold_growth = peak - before, foretold - RUNTIME_BYTES
    assert foretold_growth > 0.1 * GIB  # or this would measure the interpreter
    assert 0.5 < foretold_growth / growth < 2


def test_states_count_in_the_dtype_they_will_have(tmp_path: Path) -> None:
    """Convolutions keep that of the model, delta nets float32."""
    lfm2, qwen = (ModelDirectory.check(write_family(tmp_path / name, name)) for name in ("Lfm2", "Qwen3_5"))
    wide, narrow = (lfm2.linear_state_bytes(dtype) for dtype in (torch.float32, torch.bfloat16))
    assert wide == 2 * narrow > 0
    wide, narrow = (qwen.linear_state_bytes(dtype) for dtype in (torch.float32, torch.bfloat16))
    assert narrow < wide < 2 * narrow


@pytest.mark.parametrize("path", ["auto", "eager"])
def test_states_of_the_next_sequence_are_no_room_for_pages(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = list[int]()
    for states in (0, 1 << 30):
        monkeypatch.setattr(ModelDirectory, "linear_state_bytes", lambda self, dtype, states=states: states)
        executor = Executor(LLM(write_model(tmp_path), path=path, device="cpu", dtype="float32"))
        monkeypatch.setattr("kvsift.engine.executor.available_bytes", lambda device: 16 << 30)
        rooms.append(executor.room(KVPool()))
    copies = {"auto": 1, "eager": 1 + 1 + 3}[path]  # in its cache, and in a slot with three steps that may be forgotten
    assert rooms[1] / rooms[0] == pytest.approx(1 - copies / 16, abs=1e-4)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("path", ["auto", "eager"])
def test_prompts_that_fit_one_after_the_other_are_not_refused(
    path: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(llama, path=path, device="cpu", dtype="float32")
    ids = [0] * 2000
    needed = predict_bytes(llm.directory, llm.device, llm.dtype, 2004, llm.chunk_size)
    monkeypatch.setattr("kvsift.engine.memory.available_bytes", lambda device: needed)
    llm.check([ids] * 9, 4)
    with refused("not_enough_memory: float32"):
        llm.check([ids, [0] * 2001], 4)


@pytest.mark.parametrize("path", ["auto", "eager"])
def test_states_of_linear_layers_are_foretold(path: str, tmp_path: Path) -> None:
    """Eleven of 8.4 MB in float32: in the cache, in snapshots, and four times in the slots of captured steps."""
    layers = {"num_hidden_layers": 12, "layer_types": ["linear_attention"] * 11 + ["full_attention"]}
    dims = {"linear_num_key_heads": 2, "linear_key_head_dim": 256, "linear_value_head_dim": 256}
    found = list[list[int]]()
    for heads in (2, 32):
        directory = write_model(tmp_path / str(heads), "Qwen3_5", **layers, **dims, linear_num_value_heads=heads)
        state = ModelDirectory.check(directory).linear_state_bytes(torch.float32)
        assert state == pytest.approx(11 * heads * 256 * 256 * 4, rel=0.05)  # and convolutions
        found.append([*map(int, stories.run(MEASURE_OF_STATES, str(directory), path).stdout.split())])
    peak, foretold = (large - small for small, large in zip(*found))
    assert 0.6 < foretold / peak < 1.4, (found, state)
