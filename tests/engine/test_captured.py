"""On a GPU: captured steps give the tokens of the same steps run one by one, and those of the composed path."""

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import loop_sequences
from engine.test_hybrid_steps import FAMILIES, MORE, write_family
from engine.tiny_directory import text_of, write_anchors, write_model
from refusals import refused

import kvsift
from kvsift import LLM, Sampling
from kvsift.api.answer import Answer
from kvsift.calibration.fidelity import DecodedText, FidelityScorer
from kvsift.engine.graphs import fast_path, sequence_groups
from kvsift.engine.graphs.slots import Slots
from kvsift.engine.sampling import CHOICES
from kvsift.engine.sequence import EngineSequence
from kvsift.plan.syntax import parse_plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

QUEST = "quest:budget=256:window=32:dense_layers=0"
PLANS = (
    QUEST,
    "dense",
    "quest:budget=256:window=32:page_size=32:heads=query:dense_layers=none",
    "quest:budget=256:window=32:score_by=minmax_fp8:dense_layers=none",
    "quest:ratio=0.3:window=32:score_by=mean_std:dense_layers=1",
    "sketch:budget=128:window=32:dense_layers=none",
)
TEXTS = [text_of(1500), text_of(701), text_of(44), text_of(1250)[::-1], text_of(990)]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 8}
SAMPLED = Sampling(0.8, 0.9, seed=3)
ROUNDING = 0.25  # of the spread of the logits: what bfloat16 may cost a token; one drawn at random costs about 3


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> None:
    """Not here."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("wide"), **SIZES)


def llm(directory: Path, path: str = "captured", dtype: str = "float32", **options: Any) -> LLM:
    return LLM(directory, QUEST, device="cuda", dtype=dtype, path=path, **{"dense_below": 0, **options})


def answers(model: LLM, texts: Any = TEXTS, **options: Any) -> list[Answer]:
    found: list[Answer] = model.generate(texts, **{"max_new_tokens": 40, **options})
    return found


def tokens(found: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in found]


def replay(
    model: LLM, plan: str, text: str, new_ids: list[int], placement: str = "device", probe_every: int = 16
) -> tuple[float, float | None]:
    """The same tokens on the composed path: how much less likely than the best they were at worst, as the difference of
    logits over their spread; and the recovery."""
    ids = model.tokenizer(text)["input_ids"]
    cache, worst = kvsift.make_cache(model.model, plan, placement=placement, probe_every=probe_every), 0.0
    with torch.inference_mode():
        given = torch.tensor([ids], device="cuda")
        for token in new_ids:
            logits = model.model(given, past_key_values=cache, logits_to_keep=1).logits[0, -1].float()
            worst = max(worst, float((logits.max() - logits[token]) / logits.std()))
            given = torch.tensor([[token]], device="cuda")
    return worst, cache.run.report()["phases"].get("decode", {}).get("recovery")


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral"])
def test_tokens_equal_those_of_the_adapter(family: str, tmp_path: Path) -> None:
    model = llm(write_model(tmp_path, family, **SIZES))
    answer = model.generate(TEXTS[0], max_new_tokens=60)
    assert answer.path == "captured"
    ids = torch.tensor([model.tokenizer(TEXTS[0])["input_ids"]], device="cuda")
    with kvsift.sparse(model.model, QUEST) as run:
        expected = model.model.generate(ids, max_new_tokens=60, do_sample=False)[0, ids.shape[1] :]
    whole = expected.tolist()
    end = model.tokenizer.eos_token_id  # ends our answer, whether or not the model's own settings say so
    assert answer.token_ids == (whole[: whole.index(end)] if end in whole else whole)
    if end in whole:
        return
    assert answer.decode("density") == pytest.approx(run.report()["phases"]["decode"]["density"])


FULL = {"layer_types": ["full_attention"] * 3, "sliding_window": 32}
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(32)], "long_factor": [2.0 + i for i in range(32)]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 900}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Phi3", {}), ("Olmo2", {}), ("Gemma2", FULL),
        ("Llama", {"rope_parameters": {**LONGROPE, **FACTORS}}),  # some of the prompts are longer, some shorter
    ],
)  # fmt: skip
def test_other_architectures_answer_as_on_the_composed_path(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    directory = write_model(tmp_path, family, **{**SIZES, **settings})
    fast, slow = (answers(llm(directory, path)) for path in ("auto", "composed"))
    assert tokens(fast) == tokens(slow)
    assert [answer.decode("density") for answer in fast] == [answer.decode("density") for answer in slow]
    assert {answer.path for answer in fast} == {"captured"}


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_hybrids_are_captured(family: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path, family)
    fast, slow = (answers(llm(directory, path), sampling=SAMPLED) for path in ("captured", "composed"))
    assert {answer.path for answer in fast} == {"captured"}
    assert tokens(fast) == tokens(slow)
    assert [answer.decode("density") for answer in fast] == [answer.decode("density") for answer in slow]


@pytest.mark.parametrize("quantize", [None, "fp8"])
@pytest.mark.parametrize("family", ["Qwen3_5", "Gemma3", "Gemma4 31B"])
def test_fused_steps_of_hybrids_lose_what_rounding_costs(family: str, quantize: str | None, tmp_path: Path) -> None:
    """Alone, and in a batch, whose products are others."""
    settings = {**SIZES, **FAMILIES[family], "head_dim": 64}
    directory = write_model(tmp_path, family.split()[0], eos_token_id=None, **settings)
    fast, slow = (llm(directory, path, "bfloat16", quantize=quantize) for path in ("captured", "composed"))
    for text, answer in zip(TEXTS[:1] + TEXTS, answers(fast, TEXTS[:1], plan="dense") + answers(fast, plan="dense")):
        assert answer.path == "captured"
        assert replay(slow, "dense", text, answer.token_ids)[0] < ROUNDING


def test_layers_that_reuse_are_captured(directory: Path, tmp_path: Path) -> None:
    models = [llm(directory, path) for path in ("captured", "eager", "composed")]
    plan = f"sketch:budget=128:window=32:dense_layers=none:anchors={write_anchors(tmp_path, models[0].model)}"
    captured, eager, composed = (answers(model, plan=plan, max_new_tokens=24) for model in models)
    assert {answer.path for answer in captured} == {"captured"}
    assert tokens(captured) == tokens(eager) == tokens(composed)
    for one, other in zip(captured, composed):
        assert one.decode("visible_tokens") == other.decode("visible_tokens")
        assert one.decode("sparse_queries") == other.decode("sparse_queries")
        assert one.decode("recovery") == (
            other.decode("recovery") and pytest.approx(other.decode("recovery"), abs=2e-3)
        )


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_equal_the_same_steps_run_one_by_one(plan: str, dtype: str, directory: Path) -> None:
    captured, eager = (answers(llm(directory, path, dtype), plan=plan) for path in ("captured", "eager"))
    assert {answer.path for answer in captured} == {"captured"}
    assert tokens(captured) == tokens(eager)
    for one, other in zip(captured, eager):
        for key in ("visible_tokens", "density", "sparse_queries", "kv_bytes_read", "recall"):
            assert one.decode(key) == other.decode(key)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sequences_of_a_ragged_batch_are_those_of_the_composed_path(plan: str, dtype: str, directory: Path) -> None:
    """Every step is probed: recoveries of single steps of random weights lie far apart."""
    model, alone = (llm(directory, path, dtype, probe_every=1) for path in ("captured", "composed"))
    together = answers(model, plan=plan)
    if dtype == "float32":
        expected = answers(alone, plan=plan)
        assert tokens(together) == tokens(expected)
        for fast, slow in zip(together, expected):
            for key in ("queries", "visible_tokens", "density", "sparse_queries", "kv_bytes_dense"):
                assert fast.decode(key) == slow.decode(key)
            assert fast.decode("recovery") == (
                slow.decode("recovery") and pytest.approx(slow.decode("recovery"), abs=1e-3)
            )
    for text, answer in zip(TEXTS, together):
        ids = answer.token_ids
        if dtype == "float32" or plan == "dense":
            assert replay(alone, plan, text, ids)[0] < (1e-3 if dtype == "float32" else ROUNDING)
        else:  # near ties fall either way, and random weights then say something else: in the mean they are as good
            fed = ids + ids[-1:] * (answer.finish_reason == "stop")  # an answer that stops has fed its last token too
            recovery = replay(alone, plan, text, fed, probe_every=1)[1]
            assert answer.decode("recovery") == (recovery and pytest.approx(recovery, abs=0.05))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("plan", [*PLANS, f"prefill=quoka:budget=256,decode={QUEST}"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_and_values_in_int8_are_attended_as_on_the_composed_path(
    plan: str, dtype: str, head_dim: int, tmp_path: Path
) -> None:
    """In bfloat16 by the single launches. Codes of near numbers differ, so tokens may, where two are as good."""
    directory = write_model(tmp_path, eos_token_id=None, **{**SIZES, "head_dim": head_dim})
    fast, slow = (llm(directory, path, dtype, kv_dtype="int8") for path in ("captured", "composed"))
    for text, answer in zip(TEXTS, answers(fast, plan=plan)):
        assert answer.path == "captured"
        worst, recovery = replay(slow, plan, text, answer.token_ids, "device:kv_dtype=int8")
        near = dtype == "float32"  # random weights enlarge what 16 bits round: on a CPU tokens are up to 1.1 worse
        assert answer.decode("recovery") == (recovery and pytest.approx(recovery, abs=0.05 if near else 0.15))
        assert plan != "dense" or worst < (ROUNDING if near else 1.5)


@pytest.mark.parametrize("sampling", [SAMPLED, [Sampling(), SAMPLED, Sampling(1.5), Sampling(0.5, 0.7, 2), SAMPLED]])
def test_samples_repeat_and_equal_those_of_the_composed_path(sampling: Any, directory: Path) -> None:
    model = llm(directory)
    first = tokens(answers(model, sampling=sampling))
    assert tokens(answers(model, sampling=sampling)) == first
    assert tokens(answers(llm(directory, "composed"), sampling=sampling)) == first
    assert tokens(answers(model)) != first


@pytest.mark.parametrize("sampling", [None, SAMPLED])
def test_what_is_left_moves_to_fewer_slots(
    sampling: Sampling | None, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_groups, "MOVE_STEPS", 1)
    free = answers(llm(directory), max_new_tokens=80)
    ends = [free[0].token_ids[5], free[3].token_ids[11], free[1].token_ids[20]]
    ending = write_model(tmp_path, eos_token_id=ends, **SIZES)
    moved, composed = (
        answers(llm(ending, path), max_new_tokens=80, sampling=sampling) for path in ("captured", "composed")
    )
    assert tokens(moved) == tokens(composed)
    assert [answer.decode("density") for answer in moved] == [answer.decode("density") for answer in composed]


def test_captured_steps_score_as_those_that_are_launched_one_by_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_path, "CAPTURED_TOKENS", 4)
    ids = torch.randint(3, 90, (3, 720), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [DecodedText(text, 700) for text in ids]
    captured, launched = (
        FidelityScorer(LLM(directory, "dense", device="cuda", probe_every=0, dense_below=0, path=path), texts)
        for path in ("captured", "eager")
    )
    for plan in ("dense", "quest:budget=128:dense_layers=1", "sketch:budget=128:dense_layers=none"):
        found, expected = (each.score(parse_plan(plan)) for each in (captured, launched))
        assert found.kl == pytest.approx(expected.kl, rel=1e-2, abs=1e-6)
        assert found.nll == pytest.approx(expected.nll, rel=1e-3)


def test_the_next_call_replays_what_was_captured(directory: Path) -> None:
    model = llm(directory)
    first = answers(model)
    assert first[0].setup_s > 0
    again = answers(model, TEXTS[::-1])
    assert tokens(again) == tokens(first)[::-1]
    assert min(again[0].setup_s, answers(model)[0].setup_s) < first[0].setup_s  # another process may delay one
    assert tokens(answers(model, TEXTS[:2])) == tokens(first)[:2]


@pytest.mark.parametrize("plan", PLANS)
def test_documents_answer_as_on_the_composed_path(plan: str, directory: Path) -> None:
    fast, slow = (llm(directory, path).read(TEXTS[0]) for path in ("captured", "composed"))
    for each in (plan, PLANS[2], plan):
        for question in ("How many sacks?", "Which of the mills by the river grinds the least corn in a day?"):
            one, other = (document.ask(question, plan=each, max_new_tokens=20) for document in (fast, slow))
            assert one.token_ids == other.token_ids
            assert one.decode("density") == other.decode("density")


def test_a_document_keeps_its_steps_from_question_to_question(directory: Path) -> None:
    document = llm(directory).read(TEXTS[0])
    questions = ("How many sacks?", "Which mill?", "Which river?", "How much corn?")
    first, *others = (document.ask(question, max_new_tokens=20).setup_s for question in questions)
    assert min(others) < first / 2  # each would capture anew; another process may delay one


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sequences_around_the_threshold_are_dense_or_sparse(plan: str, dtype: str, directory: Path) -> None:
    below, texts = 1000, [text_of(length) for length in (1500, 985, 960, 300, 1200)]
    captured, eager, composed = (
        answers(llm(directory, path, dtype, dense_below=below), texts, plan=plan)
        for path in ("captured", "eager", "composed")
    )
    assert {answer.path for answer in captured} == {"captured"}
    for fast, same, slow in zip(captured, eager, composed):
        assert fast.token_ids == same.token_ids
        assert fast.decode("visible_tokens") == same.decode("visible_tokens")
        if dtype == "float32":
            assert fast.token_ids == slow.token_ids
            for key in ("queries", "visible_tokens", "density", "sparse_queries", "kv_bytes_dense"):
                assert fast.decode(key) == slow.decode(key)
    assert captured[3].decode("density") == 1


def test_sequences_of_several_plans_answer_as_each_does_alone(directory: Path) -> None:
    plans = [
        "quest:budget=256:window=32:dense_layers=1",
        "dense",
        "quest:ratio=0.4:window=32:sinks=20:dense_layers=0+2",
        "quest:budget=512:window=16:dense_layers=none",
    ]
    cases = list(zip(TEXTS[:2] + TEXTS[3:], plans, [31] * len(plans), [Sampling(), SAMPLED] * 2))
    for dense_below in (0, 1270):
        model = loop_sequences.new_llm(directory, "captured", "cuda", dense_below=dense_below)
        for seq, case in zip(loop_sequences.together(model, cases), cases):
            lone = loop_sequences.alone(model, *case)
            assert loop_sequences.tokens(seq) == loop_sequences.tokens(lone)
            found, expected = (loop_sequences.counters(each) for each in (seq, lone))
            assert {**found, "recall": None} == {**expected, "recall": None}


def test_the_crossover_is_measured_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int | None] = []
    measure = kvsift.engine.graphs.fast_path.measure_crossover

    def watched(*args: Any) -> int | None:
        measured.append(measure(*args))
        return measured[-1]

    monkeypatch.setattr("kvsift.engine.graphs.fast_path.measure_crossover", watched)
    model = llm(directory, dense_below="auto")
    for _ in range(2):
        answer = model.generate(text_of(3500), plan="quest:budget=128:window=16", max_new_tokens=8)
    assert len(measured) == 1
    assert measured[0] is not None
    assert 0 <= answer.dense_below <= measured[0]


def test_what_cannot_be_captured_is_said(directory: Path) -> None:
    assert llm(directory, "auto").generate("Once", plan="oracle_tokens:budget=128").path.startswith("composed: oracle")
    with refused("unsupported_plan"):
        llm(directory).generate("Once", plan="oracle_tokens:budget=128")


def test_threads_that_share_a_model_get_their_own_answers(directory: Path) -> None:
    """Graphs are captured while other threads wait for their tokens, and documents are asked in between."""
    alone, shared = llm(directory), llm(directory)
    expected = [tokens([alone.generate(text, max_new_tokens=40)]) for text in TEXTS]
    questions = [f"Which of the {count} mills grinds the least corn?" for count in range(3)]
    said = [alone.read(TEXTS[0]).ask(question, max_new_tokens=20).token_ids for question in questions]
    document = shared.read(TEXTS[0])

    def generated(text: str) -> list[list[list[int]]]:
        return [tokens([shared.generate(text, max_new_tokens=40)]) for _ in range(3)]

    def streamed(text: str) -> list[list[int]]:
        stream = shared.stream(text, max_new_tokens=40)
        assert "".join(stream) == stream.answer.text
        return tokens([stream.answer])

    def asked(question: str) -> list[list[int]]:
        return [document.ask(question, max_new_tokens=20).token_ids for _ in range(3)]

    with ThreadPoolExecutor(12) as threads:
        jobs = [threads.map(generated, TEXTS), threads.map(streamed, TEXTS), threads.map(asked, questions)]
        found = [list(job) for job in jobs]
    assert found[0] == [[each] * 3 for each in expected]
    assert found[1] == expected
    assert found[2] == [[each] * 3 for each in said]


def test_after_a_warm_up_no_prompt_waits_for_a_capture(directory: Path) -> None:
    warm, cold = llm(directory), llm(directory)
    assert warm.warm_up(["dense"]).num_steps == 4 * 3 * len(CHOICES)
    moves = warm.loop.pages.kv.moves
    for options in ({"plan": QUEST}, {"plan": "dense"}, {"plan": QUEST, "sampling": SAMPLED}):
        for text in TEXTS:
            first, expected = (each.generate(text, max_new_tokens=20, **options) for each in (warm, cold))
            assert first.token_ids == expected.token_ids
            assert first.path == "captured"
            assert first.setup_s < 0.1
    assert warm.loop.pages.kv.moves == moves


def test_no_graph_is_destroyed_while_another_is_captured(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As garbage that a collection finds: CUDA does not permit it, and says so on stderr."""
    expected = tokens(answers(llm(directory)))
    runs, collecting = Slots._run, list[bool]()

    def run(self: Slots, *arguments: Any) -> Any:
        collecting.append(gc.isenabled())
        return runs(self, *arguments)

    monkeypatch.setattr(Slots, "_run", run)
    thresholds = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        for _ in range(3):
            cycle: list[Any] = [llm(directory)]
            assert tokens(answers(cycle[0])) == expected
            cycle.append(cycle)
    finally:
        gc.set_threshold(*thresholds)
    assert collecting
    assert not any(collecting)
    assert "not permitted" not in capfd.readouterr().err


@pytest.mark.parametrize("deterministic", [False, True])
def test_sequences_of_the_loop_answer_as_alone_whoever_joins_and_leaves(directory: Path, deterministic: bool) -> None:
    """Unless it is deterministic, a step over other sequences rounds products differently, and tokens that are nearly
    tied may change places."""
    how = {"deterministic": deterministic}
    single, model = (loop_sequences.new_llm(directory, "auto", "cuda", keep_tokens=keep, **how) for keep in (0, 1024))
    known, equal, total = dict[tuple[Any, ...], EngineSequence](), 0, 0
    for seed in range(200):
        for seq, case in loop_sequences.history(model, random.Random(seed)):
            assert seq.error is None
            if case not in known:
                known[case] = loop_sequences.alone(single, *case)
            found, expected = loop_sequences.tokens(seq), loop_sequences.tokens(known[case])
            if deterministic:
                loop_sequences.assert_equal(seq, known[case])
            equal, total = equal + (found == expected[: len(found)]), total + 1
            if seq.finish_reason == "length":
                assert seq.path.startswith("composed") == case[1].startswith("snapkv") or len(expected) == 1
                queries = [loop_sequences.counters(each)["queries"] for each in (seq, known[case])]
                assert queries[0] == queries[1]
    assert equal >= 0.95 * total > 300, (equal, total)
