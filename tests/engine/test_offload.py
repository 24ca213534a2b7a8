"""KV in host memory that the device attends, values in 8 bits, and the CPU by its name."""

import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from contracts.harness import SHAPE, draw_tokens
from engine.apart import DEVICES, QUEST, llm
from engine.loop_sequences import pinned_caches
from engine.tiny_directory import text_of
from refusals import refused
from turns import in_turns

from kvsift import LLM
from kvsift.engine import memory
from kvsift.layer.accounting import RunStats
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.methods.quest import Quest
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.stores.catalogue import STORES
from kvsift.stores.offload import OffloadStore
from kvsift.stores.paged import PagedStore
from kvsift.stores.resident import SLACK_TOKENS
from kvsift.types import Chunk

PLANS = [
    QUEST,
    QUEST + ":prefilter=2:block_pages=4",
    "oracle_tokens:budget=120:dense_layers=none",
    "streaming_llm:budget=100",
    "retrieval_attention:index=flat:budget=120:sinks=16:window=32:dense_layers=0",
    "dense",
]
PER_TOKEN = 2 * 2 * 64 * 4  # keys and values of two KV heads in float32


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> None:
    """Where a test says so."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("plan", "placement"), in_turns(PLANS, ["split", "offload:device_cache=200"]))
def test_answers_are_those_of_kv_on_the_device(plan: str, placement: str, device: str, directory: Path) -> None:
    on_host = plan.startswith("retrieval")  # an index needs its keys in host memory
    beside = llm(directory, "cpu" if on_host else device, "device")
    apart = llm(directory, device, placement, chunk_size=512, dense_below=0)
    for text in (text_of(1500), text_of(601)):
        one, other = (model.generate(text, plan=plan, max_new_tokens=30) for model in (beside, apart))
        assert one.token_ids == other.token_ids
        assert one.decode("visible_tokens") == other.decode("visible_tokens")
        if placement == "split":
            assert other.path.startswith("composed: its keys and values are in host memory")
        elif device == "cpu":
            assert other.path.startswith("composed: no NVIDIA GPU; ")
        else:
            assert (other.path == "captured") == (plan == QUEST)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [0, 2], ids=["summaries", "keys"])
def test_plans_share_pools_that_the_first_one_laid_out(first: int, device: str, directory: Path) -> None:
    sketch = "sketch:budget=128:window=32:dense_layers="
    plans = [f"{sketch}0", f"{sketch}none", "oracle_tokens:budget=120:dense_layers=none", QUEST]
    beside, apart = (llm(directory, device, place, dense_below=0) for place in ("device", "offload"))
    documents = [model.read(text_of(700), plan=plans[first]) for model in (beside, apart)]
    for plan in plans[first:] + plans[:first]:
        one, other = (document.ask("How many sacks?", plan=plan, max_new_tokens=20) for document in documents)
        assert one.token_ids == other.token_ids, plan
    [cache] = pinned_caches(apart)
    assert {len(attention.store.pool.stored) for attention in cache.attentions} == {2 if first else 1}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("placement", ["split", "offload"])
def test_a_document_is_asked_again_and_again(placement: str, device: str, directory: Path) -> None:
    beside, apart = (llm(directory, device, place).read(text_of(1200)) for place in ("device", placement))
    for question in ("How many sacks?", "Which of the mills grinds the least corn in a day?", "How many sacks?"):
        one, other = (document.ask(question, max_new_tokens=20) for document in (beside, apart))
        assert one.token_ids == other.token_ids


@pytest.mark.parametrize("device", DEVICES)
def test_the_device_holds_what_is_always_seen_summaries_and_the_cache(device: str, directory: Path) -> None:
    model = llm(directory, device, "offload:device_cache=256", chunk_size=512, path="composed")
    document = model.read(text_of(1500))
    document.ask("How many sacks?", max_new_tokens=40)
    [cache] = pinned_caches(model)
    for attention in cache.attentions[1:]:
        store = attention.store
        assert isinstance(store, OffloadStore)
        assert store.keys.device.type == "cpu"
        assert {pool.device.type for pool in store.summaries.values()} == {device}
        summaries = sum(pool.numel() * pool.element_size() for pool in store.summaries.values())
        assert store.cache.num_bytes == 256 * PER_TOKEN
        assert 0 < store.num_device_bytes - summaries <= (256 + 16 + 32 + 16 + SLACK_TOKENS) * PER_TOKEN
    assert cache.num_device_bytes == sum(attention.store.num_device_bytes for attention in cache.attentions)


def test_a_run_reports_what_was_copied_and_what_was_there_already(directory: Path) -> None:
    small, large = (llm(directory, "cpu", f"offload:device_cache={size}") for size in (1, 4096))
    one, other = (model.generate(text_of(1500), max_new_tokens=20) for model in (small, large))
    assert one.token_ids == other.token_ids
    hits = [answer.decode("device_cache_hits") for answer in (one, other)]
    assert 0 < hits[0] < hits[1] < 1, "a random model asks for much the same pages from token to token"
    copied = [answer.decode("kv_bytes_copied") for answer in (one, other)]
    assert copied[1] < copied[0]
    (dense,) = (
        seq["kv_bytes_copied"] for seq in other.stats["layers"] if (seq["layer"], seq["phase"]) == (0, "decode")
    )
    assert dense == sum(range(1501, 1520)) * PER_TOKEN, "the dense layer has all but a step's own token brought"
    apart = llm(directory, "cpu", "split").generate(text_of(1500), max_new_tokens=20)
    assert apart.decode("device_cache_hits") is None
    assert apart.decode("kv_bytes_copied") < copied[1], "sinks and window, once"
    assert llm(directory, "cpu", "device").generate(text_of(600), max_new_tokens=2).decode("kv_bytes_copied") == 0


@pytest.mark.parametrize("placement", ["split", "offload"])
def test_values_in_8_bits_shift_an_output_by_half_a_step_at_most(placement: str) -> None:
    tokens = draw_tokens(600, 0)
    plan = Plan(decode=Rule(Quest(page_size=4), Budget(tokens=64, sinks=4, window=8, dense_layers=())))

    def outputs(knob: str) -> torch.Tensor:
        layer = SparseAttention(SHAPE, plan, 1, torch.empty(0), RunStats(0), placement=placement + knob)
        stops, found = [0, 128, 512, 560, *range(561, 601)], []
        for start, stop in pairwise(stops):
            chunk = Chunk(*(tensor.unsqueeze(0) for tensor in tokens.part(start, stop)), [stop - start])
            found.append(layer.attend(chunk, int(start >= 560)))
        return torch.cat(found, 2)[0]

    one, other = outputs(""), outputs(":host_values=int8")
    off = (one - other).abs()
    largest = tokens.values.abs().amax((1, 2)).repeat_interleave(2)  # an output is a mean of values
    assert bool((off.amax((1, 2)) <= largest / 254 + 1e-5).all())
    assert 1e-4 < float(off.norm() / one.norm()) < 0.01


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("placement", ["split", "offload"])
def test_values_in_8_bits_take_less_and_leave_answers_alone(placement: str, device: str) -> None:
    filler = "".join(f"Mill {n} by the river grinds {n * 37 % 101} sacks of corn a day. " for n in range(20))
    text = f"{filler}The access code of the old tower is 48213. {filler}"
    plain, packed = (
        LLM(plan=QUEST, device=device, dtype="float32", placement=placement + knob, path="composed")
        for knob in ("", ":host_values=int8")
    )
    one, other = (
        model.read(text).ask("What is the access code of the old tower?", max_new_tokens=12)
        for model in (plain, packed)
    )
    assert one.token_ids == other.token_ids
    assert one.text == "48213"
    # keys take 512 bytes per token and head, values 512 or 132, summaries 1024 per page of 16 tokens
    assert other.kv_bytes / one.kv_bytes == pytest.approx((512 + 132 + 64) / (1024 + 64), rel=1e-6)


def test_host_is_a_name_for_no_gpu(directory: Path) -> None:
    model = LLM(directory, QUEST, dtype="float32", placement="host")
    assert model.device.type == "cpu"
    answer = model.generate(text_of(900), max_new_tokens=10)
    assert answer.token_ids == llm(directory, "cpu", "device").generate(text_of(900), max_new_tokens=10).token_ids
    assert answer.path == "native"
    with refused("unsupported_device: not on cuda"):
        LLM(directory, QUEST, placement="host", device="cuda")


def test_what_cannot_be_is_refused(directory: Path) -> None:
    for placement in ("split", "offload"):
        with refused(f"unsupported_plan: with placement={placement} prefill is dense"):
            LLM(directory, "prefill=quoka:budget=512", placement=placement)
    with refused("unknown_name: placement"):
        LLM(directory, QUEST, placement="disk")  # type: ignore[arg-type]
    with refused("unsupported_plan: its keys and values are in host memory"):
        LLM(directory, QUEST, placement="split", path="captured").generate("Once")
    with refused("unsupported_plan: no NVIDIA GPU"):
        LLM(directory, QUEST, device="cpu", placement="offload", path="captured").generate("Once")
    with refused("unused_option: placement=offload"):
        LLM(directory, QUEST, placement="split:device_cache=5")


def test_a_context_that_does_not_fit_the_host_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLM(directory, QUEST, device="cpu", dtype="float32", placement="split")
    gpu, plenty = torch.device("cuda"), 1 << 40
    kv = 3 * PER_TOKEN * 1000
    for knob, needed in (("", kv), (":host_values=int8", kv * (256 + 68) / 512)):
        place = LLM(directory, QUEST, device="cpu", placement="split" + knob).place
        for room, fits in ((needed + 1, True), (needed - 1, False)):
            monkeypatch.setattr(memory, "available_bytes", lambda on, room=room: plenty if on == gpu else room)
            given = model.directory, gpu, torch.float32, 1000, 512, place
            if fits:
                memory.require_memory(*given)
                continue
            with refused("not_enough_memory: 1,000") as error:
                memory.require_memory(*given)
            assert ("--placement split:host_values=int8" in str(error.value)) is not bool(knob)


class Uncaptured(PagedStore):
    captures = False


def test_a_placement_without_pools_is_composed_and_says_so(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("uncaptured_placement")
    module.Uncaptured = Uncaptured  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(STORES, "uncaptured", "uncaptured_placement:Uncaptured")
    with refused("unsupported_plan: placement=uncaptured has no pools for captured steps"):
        LLM(directory, QUEST, placement="uncaptured", path="captured").generate("Once")
    expected = LLM(directory, QUEST).generate("Once", max_new_tokens=4).token_ids
    assert LLM(directory, QUEST, placement="uncaptured").generate("Once", max_new_tokens=4).token_ids == expected
