"""Captured steps of models with sliding windows, linear attention and experts, run as they are: the same tokens and
counters as the composed path, whatever joins, leaves or is taken again."""

import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine.test_decode_steps import COUNTERS, QUEST, SAMPLED, TEXTS, answers, tokens
from engine.tiny_directory import text_of, write_model
from torch.utils._python_dispatch import TorchDispatchMode

from kvsift import LLM
from kvsift.engine.graphs import sequence_groups
from kvsift.engine.graphs.sequence_groups import LAUNCHED_AHEAD, SequenceGroup
from kvsift.engine.graphs.slots import Slots
from kvsift.models.hf import forward_step
from kvsift.models.hf.forward_step import ConstantTensors, kind_of_step
from kvsift.models.hf.slot_states import KEPT_STEPS

SKETCH = "sketch:budget=64:window=16:page_size=8:dense_layers=none"
LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
DELTA = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], **LINEAR}
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {},
    "Ministral3": {"sliding_window": None},
    "Gemma3": SLIDING,
    "GptOss": SLIDING,  # sink logits
    "Gemma4": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32, "num_hidden_layers": 4,
               "global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96,
               "num_kv_shared_layers": 2},
    "Gemma4 31B": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32,
                   "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 64, "num_global_key_value_heads": 1,
                   "attention_k_eq_v": True, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0},
    "Qwen3_5": DELTA,
    "Qwen3_5Moe": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_ff_dim": 32},
    "NemotronH": {"layers_block_type": ["mamba", "attention", "moe", "mamba"], "num_hidden_layers": 4, **ROUTED,
                  "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1,
                  "moe_shared_expert_intermediate_size": 16},
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "Qwen3Next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "OlmoHybrid": DELTA,
    "Lfm2Moe": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "num_dense_layers": 1, **EXPERTS},
    "Lfm3": {},
    "Ministral": SLIDING,
    "Olmo3": SLIDING,
    "Gemma2": SLIDING,
    "MiniMaxM2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Glm4Moe": {**ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "Bamba": {**MAMBA, "attn_layer_indices": [1], "mamba_chunk_size": 16},
    "GraniteMoeHybrid": {**MAMBA, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4,
                         "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    "Jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
              "num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False},
    "Gemma3n": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32,
                "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
                "vocab_size_per_layer_input": 96, "altup_num_inputs": 2, "intermediate_size": [32] * 4,
                "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]},
}  # fmt: skip
ASKS_THE_HOST = {"_local_scalar_dense", "lift_fresh", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2",
                 "item"}  # fmt: skip


class AskingTheHost(TorchDispatchMode):
    """Collects the places in transformers' code where a step would make the host wait for a GPU; torch.distributions
    checks its numbers on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, asks = func.__name__.split(".")[0], False
        if name in ("index", "index_put", "index_put_"):  # by a mask
            asks = any(each is not None and each.dtype == torch.bool for each in args[1])
        if asks or name in ASKS_THE_HOST or "fallback" in name:
            self.places |= set(_first_place())
        return func(*args, **(kwargs or {}))


def _first_place() -> list[str]:
    """Where the innermost frame of transformers or kvsift is, if it is one of transformers'."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if any(part in path for part in ("/kvsift/", "/transformers/", "/torch/distributions/")):
            return [f"{path}:{frame.f_lineno}"] if "/transformers/" in path else []
        frame = frame.f_back  # type: ignore[assignment]
    return []


def write_family(folder: Path, family: str) -> Path:
    """A random model of one of ``FAMILIES`` or ``MORE`` that never ends by itself."""
    name = family.split()[0]
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return write_model(folder, name, eos_token_id=None, **{**FAMILIES, **MORE}[family])


def compare(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the paths of a family, and look for what its steps ask the host, but for the first, which is not
    captured."""
    directory, run = write_family(folder, family), Slots._run
    asking, warm = AskingTheHost(), list[Any]()

    def watched(slots: Slots, *given: Any) -> Any:
        if slots._step not in warm:
            warm.append(slots._step)
            return run(slots, *given)
        with asking:
            return run(slots, *given)

    slow = answers(LLM(directory, QUEST, dtype="float32"), sampling=SAMPLED)
    monkeypatch.setattr(Slots, "_run", watched)
    fast = answers(LLM(directory, QUEST, path="eager", dtype="float32"), sampling=SAMPLED)
    assert {answer.path for answer in fast} == {"eager"}
    assert tokens(fast) == tokens(slow)
    assert len({token for answer in fast for token in answer.token_ids}) > 20, "or nothing is compared"
    for one, other in zip(fast, slow):
        assert {key: one.decode(key) for key in COUNTERS} == {key: other.decode(key) for key in COUNTERS}
    assert not asking.places


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_answer_as_on_the_composed_path_without_the_host(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(tmp_path, family, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("family", MORE)
def test_more_families_do(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(tmp_path, family, monkeypatch)


def test_numbers_go_to_a_device_once() -> None:
    made, devices = ConstantTensors(), (torch.device("meta"), torch.device("cpu"))
    for _ in range(2):
        with made:
            found = [[torch.tensor(number).to(device) for device in devices] for number in (1, 1.0, -0.0, 0.0, True)]
    assert [meta.dtype for meta, _ in found] == [cpu.dtype for _, cpu in found]
    assert [cpu.item() for _, cpu in found] == [1, 1.0, -0.0, 0.0, True]
    assert [bool(cpu.signbit()) for _, cpu in found] == [False, False, True, False, False]
    assert len(made._made) == 5 + 5, "each number, and its copy"


@pytest.mark.parametrize(("place", "named"), [(("meta",), {}), ((), {"device": "meta"}), ((0,), {})])
def test_numbers_go_to_a_device_by_name_or_index_once(
    place: tuple[Any, ...], named: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, copies = ConstantTensors(), list[Any]()
    monkeypatch.setattr(torch.Tensor, "to", lambda number, *_, **__: copies.append(number.item()) or number)
    for _ in range(3):
        with made:  # as torch calls it, which has no device 0 here
            made.__torch_function__(torch.Tensor.to, (), (torch.tensor(7), *place), named)
    assert copies == [7]


def test_numbers_that_change_from_step_to_step_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ConstantTensors()
    for number in range(100):
        monkeypatch.setattr(forward_step, "_captures", lambda captures=number == 40: captures)
        with made:
            found = [torch.tensor(each).item() for each in (0.5, number)]
        assert found == [0.5, number]
    assert [key[1] for key in made._made] == ["0.5", "40", "98", "99"], "the last two passes', and what a graph reads"


@pytest.fixture(scope="module", params=["Gemma3", "Gemma4", "Gemma4 31B", "Qwen3_5", "GptOss"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def pair(hybrid: Path) -> Iterator[tuple[LLM, LLM]]:
    fast, slow = (LLM(hybrid, SKETCH, path=path, dtype="float32") for path in ("eager", "auto"))
    yield fast, slow
    assert not fast.loop.pages.faults([])


def test_streams_that_join_and_leave_go_on_as_alone(pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_groups, "MOVE_STEPS", 1)
    (fast, slow), numbers = pair, (40, 9, 25, 13)
    expected = [slow.generate(text, max_new_tokens=number).text for text, number in zip(TEXTS, numbers)]
    streams, texts = list[Any](), [""] * len(TEXTS)
    for turn in range(60):
        if turn % 3 == 0 and len(streams) < len(TEXTS):
            streams.append(fast.stream(TEXTS[len(streams)], max_new_tokens=numbers[len(streams)]))
        for index, stream in enumerate(streams):
            texts[index] += next(stream, "")
    assert texts == expected


@pytest.mark.parametrize("fails", [False, True])
def test_steps_that_are_forgotten_are_taken_again(
    fails: bool, pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = pair
    expected, step, numbers = tokens(answers(slow, sampling=SAMPLED)), SequenceGroup.step, count()

    def disturbed(group: SequenceGroup, seqs: Any) -> list[int]:
        number = next(numbers)
        if number % 3 == 0 and not fails:
            group.recall()
        chosen = step(group, seqs)
        if number % 7 == 3 and fails and len(seqs) > 1:
            raise RuntimeError("after a step was read")
        return chosen

    monkeypatch.setattr(SequenceGroup, "step", disturbed)
    assert tokens(answers(fast, sampling=SAMPLED)) == expected
    assert next(numbers) > 20
    assert KEPT_STEPS > LAUNCHED_AHEAD, "and the last one that was read"


def test_a_pool_that_grows_takes_nothing_from_others(pair: tuple[LLM, LLM]) -> None:
    fast, slow = pair
    stream = fast.stream(TEXTS[1], max_new_tokens=60)
    text = "".join(next(stream) for _ in range(10))
    fast.generate(text_of(1500), max_new_tokens=3)
    assert text + "".join(stream) == slow.generate(TEXTS[1], max_new_tokens=60).text


def test_documents_answer_as_on_the_composed_path(pair: tuple[LLM, LLM]) -> None:
    fast, slow = (llm.read(TEXTS[0] * 2) for llm in pair)
    for question in ("How many sacks?", "Which of the mills?", "How many sacks?"):
        one, other = (document.ask(question, max_new_tokens=12) for document in (fast, slow))
        assert one.path == "eager"
        assert one.token_ids == other.token_ids


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("MiMoV2Flash", {}, "has values of another width than its keys"),
        ("FalconH1", {}, "has layers that no captured step takes (HybridLayer)"),
        ("Llama4Text", {}, "has layers with chunked attention"),
    ],
)
def test_other_layers_are_named(family: str, changes: dict[str, Any], says: str) -> None:
    model_type = type(family, (), {"config": getattr(transformers, f"{family}Config")(**changes)})
    assert kind_of_step(model_type())[1][-1] == f"{family} {says}"
