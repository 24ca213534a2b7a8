"""The steps that a GPU captures, run as they are: the same tokens and counters as the composed path, sequence by
sequence."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.tiny_directory import text_of, write_anchors, write_model
from refusals import refused
from turns import in_turns

import kvsift
from kvsift import LLM, Sampling
from kvsift.api.answer import Answer
from kvsift.engine.graphs import sequence_groups
from kvsift.engine.graphs.fast_path import FastPath
from kvsift.engine.graphs.session import Session
from kvsift.engine.graphs.slots import Slots

QUEST = "quest:budget=128:window=16:dense_layers=0"
PLANS = (
    QUEST,
    "dense",
    "quest:budget=128:window=16:page_size=8:dense_layers=none",
    "quest:budget=144:window=16:page_size=32:score_by=mean_std:heads=query:dense_layers=none",
    "quest:budget=128:window=16:score_by=minmax_fp8:dense_layers=none",
    "quest:ratio=0.3:window=16:dense_layers=1",
    f"prefill=streaming_llm:budget=128,decode={QUEST}",
    "sketch:budget=64:window=16:page_size=8:dense_layers=none",  # pages of 16: the compiled core rounds queries
    "sketch:ratio=0.2:window=8:bits=2:page_size=8:rest=false:dense_layers=1",
)
TEXTS = [text_of(600), text_of(301), text_of(44), text_of(450)[::-1]]
COUNTERS = ("queries", "visible_tokens", "density", "sparse_queries", "kv_bytes_dense", "recall")
CLOSE = ("recovery", "estimated_share")
SAMPLED = Sampling(0.8, 0.9, seed=3)


def answers(llm: LLM, texts: Any = TEXTS, **options: Any) -> list[Answer]:
    found: list[Answer] = llm.generate(texts, **{"max_new_tokens": 24, **options})
    return found


def tokens(found: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in found]


@pytest.fixture(scope="module")
def eager(llama: Path) -> LLM:
    return LLM(llama, QUEST, path="eager")


@pytest.fixture(scope="module")
def composed(llama: Path) -> LLM:
    return LLM(llama, QUEST)


@pytest.mark.parametrize(
    ("family", "settings"),
    in_turns(
        ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral", "Glm4Moe"],
        [{}, {"tie_word_embeddings": True, "num_key_value_heads": 4}],
    ),
)
def test_tokens_equal_those_of_the_adapter(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    llm = LLM(write_model(tmp_path, family, **settings), QUEST, path="eager")
    ids = torch.tensor([llm.tokenizer(TEXTS[0])["input_ids"]])
    answer = llm.generate(TEXTS[0], max_new_tokens=40)
    assert answer.path == "eager"
    with kvsift.sparse(llm.model, QUEST) as run:
        expected = llm.model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
    assert answer.token_ids == expected.tolist()
    assert answer.decode("density") == pytest.approx(run.report()["phases"]["decode"]["density"])
    assert answer.decode("density") < 0.6


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ],
    ids=["biases", "yarn", "linear"],
)
def test_biases_and_scaled_positions_are_the_model_s_own(settings: dict[str, Any], tmp_path: Path) -> None:
    directory = write_model(tmp_path, **settings)
    fast, slow = (LLM(directory, QUEST, path=path).generate(TEXTS[0], max_new_tokens=24) for path in ("eager", "auto"))
    assert (fast.path, fast.token_ids) == ("eager", slow.token_ids)


FULL = {"layer_types": ["full_attention"] * 3, "sliding_window": 32}


@pytest.mark.parametrize(
    ("family", "settings"),
    [("Phi3", {}), ("Olmo2", {}), ("Gemma2", FULL)],
)
def test_other_architectures_take_steps_by_their_own_forward(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    directory = write_model(tmp_path, family, **settings)  # soft caps; test_hybrid_steps.py has other layers
    fast, slow = (answers(LLM(directory, QUEST, path=path)) for path in ("eager", "auto"))
    assert {answer.path for answer in fast} == {"eager"}
    assert tokens(fast) == tokens(slow)
    for one, other in zip(fast, slow):
        assert {key: one.decode(key) for key in COUNTERS} == {key: other.decode(key) for key in COUNTERS}


def random_plan(rng: random.Random) -> str:
    page_size = rng.choice([4, 8, 16, 32])
    knobs = {
        "window": str(rng.choice([1, page_size, 2 * page_size])),
        "sinks": str(rng.choice([0, 4, page_size])),
        "dense_layers": rng.choice(["none", "0", "0+1", "2"]),
        "min_context": rng.choice(["0", "100"]),
    }
    if rng.random() < 0.5:
        page_size = 8  # with pages of 16 the compiled core rounds queries
        knobs["window"] = str(rng.choice([8, 13]))  # captured steps write no sketch of the page being filled
        method, own = "sketch", {"bits": rng.choice("12"), "rest": rng.choice(["true", "false"])}
    else:
        scores = ["minmax", "mean_std", "log_mass", "centroid_radius", "minmax_fp8"]
        method, own = "quest", {"score_by": rng.choice(scores), "heads": rng.choice(["auto", "query", "kv"])}
    size = rng.choice([f"budget={rng.randint(5, 12) * 32 + rng.randint(0, page_size)}", "ratio=0.1", "ratio=0.5"])
    return f"{method}:{size}:page_size={page_size}:" + ":".join(map("=".join, {**knobs, **own}.items()))


@pytest.mark.parametrize("seed", range(2))
def test_random_plans_and_batches_answer_as_on_the_composed_path(seed: int, eager: LLM, composed: LLM) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        plan, num_seqs = random_plan(rng), rng.choice([1, 2, 3])
        sampling = [Sampling(rng.choice([0, 0.7, 1.3]), rng.choice([1, 0.8]), seed=each) for each in range(num_seqs)]
        options = {"plan": plan, "max_new_tokens": rng.randint(1, 30), "stop": rng.choice([None, "e", ["a", "th"]])}
        texts = [text_of(rng.randint(3, 400)) for _ in sampling]
        given = options, sampling
        fast, slow = (answers(llm, texts, sampling=sampling, **options) for llm in (eager, composed))
        assert tokens(fast) == tokens(slow), given
        for one, other in zip(fast, slow):
            assert (one.path in ("eager", ""), one.text) == (True, other.text), given
            for key in COUNTERS:
                assert one.decode(key) == (other.decode(key) and pytest.approx(other.decode(key))), (key, *given)


def test_layers_that_reuse_answer_as_on_the_composed_path(eager: LLM, composed: LLM, tmp_path: Path) -> None:
    plan = f"sketch:budget=64:window=16:page_size=8:dense_layers=none:anchors={write_anchors(tmp_path, eager.model)}"
    test_sequences_of_a_ragged_batch_answer_as_they_do_alone(plan, eager, composed)
    assert answers(eager, plan=plan)[0].decode("estimated_share") > 0, "of the layer that selects"


@pytest.mark.parametrize("plan", PLANS)
def test_sequences_of_a_ragged_batch_answer_as_they_do_alone(plan: str, eager: LLM, composed: LLM) -> None:
    together, alone = answers(eager, plan=plan), answers(composed, plan=plan)
    assert tokens(together) == tokens(alone)
    for fast, slow in zip(together, alone):
        assert {key: fast.decode(key) for key in COUNTERS} == {key: slow.decode(key) for key in COUNTERS}
        for key in CLOSE:
            # the compiled core settles near ties in its own way, by instruction set
            assert fast.decode(key) == (slow.decode(key) and pytest.approx(slow.decode(key), abs=2e-3))
        assert fast.stats["phases"]["prefill"]["queries"] == slow.stats["phases"]["prefill"]["queries"]
        assert (fast.plan, fast.prompt_tokens) == (slow.plan, slow.prompt_tokens)


@pytest.mark.parametrize("plan", [QUEST, "dense", PLANS[-2]])
def test_steps_over_keys_and_values_in_int8_are_those_of_the_composed_path(plan: str, llama: Path) -> None:
    place = "device:kv_dtype=int8"
    eager, composed = (LLM(llama, QUEST, path=path, dtype="float32", placement=place) for path in ("eager", "auto"))
    test_sequences_of_a_ragged_batch_answer_as_they_do_alone(plan, eager, composed)
    for text in TEXTS[:1]:
        test_bytes_are_counted_as_on_the_composed_path(plan, text, eager, composed)


def test_exact_answers_over_keys_and_values_in_int8_are_the_dense_ones(llama: Path) -> None:
    plan, place = "sketch:budget=64:window=16:dense_layers=none", "device:kv_dtype=int8"
    llm = LLM(llama, plan, path="eager", placement=place, deterministic=True)
    exact, dense = (answers(llm, **options) for options in ({"exact": True}, {"plan": "dense"}))
    assert tokens(exact) == tokens(dense)
    assert all(answer.exact and answer.exact["drafted"] for answer in exact)


@pytest.mark.parametrize(
    ("plan", "text"), in_turns([*PLANS[:3], *PLANS[-2:]], [TEXTS[0], text_of(120)]), ids=lambda each: each[:40]
)
def test_bytes_are_counted_as_on_the_composed_path(plan: str, text: str, eager: LLM, composed: LLM) -> None:
    fast, slow = (llm.generate(text, plan=plan, max_new_tokens=24) for llm in (eager, composed))
    for key in ("kv_bytes_attended", "kv_bytes_to_select", "kv_bytes_read"):
        assert fast.decode(key) == slow.decode(key)


@pytest.mark.parametrize(
    ("sampling", "count"),  # random numbers are drawn in blocks
    [([Sampling(), SAMPLED, Sampling(1.5, 1.0, 8), Sampling(0.5, 0.7, 2)], 24), (Sampling(1.2, 0.95, 5), 300)],
)
def test_samples_equal_those_of_the_composed_path(sampling: Any, count: int, eager: LLM, composed: LLM) -> None:
    sampled = tokens(answers(eager, sampling=sampling, max_new_tokens=count))
    assert sampled == tokens(answers(composed, sampling=sampling, max_new_tokens=count))
    assert sampled != tokens(answers(eager, max_new_tokens=count))


def test_sequences_end_where_they_say_so_themselves(llama: Path, composed: LLM, tmp_path: Path) -> None:
    free = answers(composed)
    end = free[1].token_ids[9]  # of one sequence; it may come up in others as well
    stop = free[3].text[5:7]
    directory = write_model(tmp_path, eos_token_id=end)
    fast, slow = (answers(LLM(directory, QUEST, path=path), stop=[stop, "never said"]) for path in ("eager", "auto"))
    assert tokens(fast) == tokens(slow)
    assert [answer.text for answer in fast] == [answer.text for answer in slow]
    assert [answer.decode("queries") for answer in fast] == [answer.decode("queries") for answer in slow]
    assert len(fast[1].token_ids) <= 9
    assert stop not in fast[3].text


def test_what_is_left_moves_to_fewer_slots(
    llama: Path, composed: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_groups, "MOVE_STEPS", 1)
    free = answers(composed, max_new_tokens=60)
    directory = write_model(tmp_path, eos_token_id=[free[0].token_ids[5], free[3].token_ids[11], free[1].token_ids[20]])
    llm = LLM(directory, QUEST, path="eager")
    used: list[int] = []
    slots = Session.slots

    def watched(session: Session, num_slots: int, rules: Any) -> Any:
        used.append(num_slots)
        return slots(session, num_slots, rules)

    monkeypatch.setattr(Session, "slots", watched)
    for sampling in (None, SAMPLED):
        moved = answers(llm, max_new_tokens=60, sampling=sampling)
        assert tokens(moved) == tokens(answers(LLM(directory, QUEST), max_new_tokens=60, sampling=sampling))
    assert len(set(used)) > 1
    assert [a.decode("density") for a in answers(llm, max_new_tokens=60)] == [
        a.decode("density") for a in answers(LLM(directory, QUEST), max_new_tokens=60)
    ]


def test_the_next_call_uses_pools_and_steps_again_if_it_fits(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(llama, QUEST, path="eager")
    first, made = answers(llm), list[Slots]()
    init = Slots.__init__
    monkeypatch.setattr(Slots, "__init__", lambda self, *given: made.append(self) or init(self, *given))
    moves = llm.loop.pages.kv.moves
    assert tokens(answers(llm, TEXTS[::-1])) == tokens(first)[::-1]
    assert tokens(answers(llm, TEXTS[:2])) == tokens(first)[:2]
    assert all(each.num_slots == 2 for each in made), "those of all prompts are used again"
    assert llm.loop.pages.kv.moves == moves
    answers(llm, [text_of(2000), "Once"])
    assert llm.loop.pages.kv.moves > moves
    assert tokens(answers(llm, plan=PLANS[2])) == tokens(answers(LLM(llama), plan=PLANS[2]))


def test_rows_whose_pages_have_another_size_share_a_pool_and_steps_that_stay(
    llama: Path, composed: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, made, init = f"{QUEST}:page_size=32", list[Slots](), Slots.__init__
    monkeypatch.setattr(Slots, "__init__", lambda self, *given: made.append(self) or init(self, *given))
    llm = LLM(llama, QUEST, path="eager")
    first = answers(llm, plan=plan)
    assert {answer.path for answer in first} == {"eager"}
    assert max(slots.num_slots for slots in made) >= len(TEXTS)
    assert tokens(first) == tokens(answers(composed, plan=plan))
    made.clear()
    assert tokens(answers(llm, plan=plan)) == tokens(first)
    assert not made
    llm.release()
    assert tokens(answers(llm, plan=plan)) == tokens(first)
    assert made


def test_an_interrupted_answer_leaves_nothing_behind(llama: Path, composed: LLM) -> None:
    llm = LLM(llama, QUEST, path="eager")
    stream = llm.stream(TEXTS[0], max_new_tokens=50)
    assert next(stream) + next(stream) == composed.generate(TEXTS[0], max_new_tokens=50).text[:2]
    del stream
    llm.loop.step()
    assert llm.loop.seqs == []
    assert llm.loop.pages.kv.pages.num_used == 1, "the scratch page of idle slots"
    assert tokens(answers(llm)) == tokens(answers(composed))


@pytest.mark.parametrize("path", ["eager", "auto"])
def test_streams_that_take_turns_do_not_mix(path: str, llama: Path, composed: LLM) -> None:
    llm = LLM(llama, QUEST, path=path)
    llm.generate(TEXTS[0], max_new_tokens=20)  # leaves something to use again
    streams = [llm.stream(text, max_new_tokens=20) for text in TEXTS[:2]]
    texts = ["", ""]
    for _ in range(20):
        for index, stream in enumerate(streams):
            texts[index] += next(stream, "")
    assert texts == [composed.generate(text, max_new_tokens=20).text for text in TEXTS[:2]]


@pytest.mark.parametrize("path", ["eager", "auto"])
def test_a_stream_that_is_closed_has_ended(path: str, llama: Path) -> None:
    llm = LLM(llama, QUEST, path=path)
    stream = llm.stream(TEXTS[0], max_new_tokens=50)
    next(stream)
    assert len(llm.loop.seqs) == 1
    stream.close()
    llm.loop.step()
    assert llm.loop.seqs == []
    assert list(stream) == []
    assert stream.answer is None
    unread = llm.stream(TEXTS[0], max_new_tokens=50)
    unread.close()
    assert list(unread) == []
    llm.loop.step()
    assert llm.loop.seqs == []


@pytest.mark.parametrize("plan", PLANS[::2])
def test_documents_answer_as_on_the_composed_path(plan: str, llama: Path) -> None:
    questions = ("How many sacks?", "Which of the mills by the river grinds the least corn in a day?")
    fast, slow = (LLM(llama, path=path).read(TEXTS[0] * 2) for path in ("eager", "auto"))
    turns = (plan, "prefill"), (plan, "decode"), (PLANS[2], "decode"), (plan, "prefill")
    for (each, phase), question in zip(turns, questions * 2):
        one, other = (
            document.ask(question, plan=each, max_new_tokens=10, question_phase=phase)  # type: ignore[arg-type]
            for document in (fast, slow)
        )
        assert one.token_ids == other.token_ids
        assert [one.decode(key) for key in COUNTERS] == [other.decode(key) for key in COUNTERS]
        assert one.new_prompt_tokens == other.new_prompt_tokens


def test_a_document_keeps_its_steps_from_question_to_question(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Slots] = []
    new = Slots.__init__

    def watched(slots: Slots, *arguments: Any) -> None:
        made.append(slots)
        new(slots, *arguments)

    monkeypatch.setattr(Slots, "__init__", watched)
    document = LLM(llama, QUEST, path="eager").read(TEXTS[0])
    for count in (5, 50):
        document.ask("How many sacks?", max_new_tokens=count)
        assert len(made) == 1
    long = document.ask("Which mill?", max_new_tokens=900)  # more than was reserved
    assert len(made) == 2
    assert long.token_ids == LLM(llama, QUEST).read(TEXTS[0]).ask("Which mill?", max_new_tokens=900).token_ids


@pytest.mark.parametrize("path", ["eager", "auto"])
def test_short_contexts_are_dense_where_the_user_says_so(path: str, llama: Path) -> None:
    answer = LLM(llama, QUEST, path=path, dense_below=len(TEXTS[0]) + 11).generate(TEXTS[0], max_new_tokens=30)
    assert answer.decode("sparse_queries") == 2 * 20  # layers 1 and 2, from the eleventh step on
    assert answer.dense_below == len(TEXTS[0]) + 11


@pytest.mark.parametrize("options", [{"logprobs": 0}, {"passages": True}])
def test_what_captured_steps_cannot_answer_is_dense_where_the_user_says_so_too(
    options: dict[str, Any], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where steps are captured unless the request asks for more."""
    monkeypatch.setattr(FastPath, "is_required", False)
    llm = LLM(llama, QUEST, path="eager", dense_below=len(TEXTS[0]) + 11)
    document = llm.read(TEXTS[0][:-1], template="{context}{question}")
    for ask, text in ((llm.generate, TEXTS[0]), (document.ask, ".")):
        answer = ask(text, max_new_tokens=30, **options)
        assert answer.path in ("native", "composed: what is selected is recorded")
        assert answer.decode("sparse_queries") == 2 * 20
        assert answer.dense_below == len(TEXTS[0]) + 11


def test_an_answer_says_which_path_it_took(llama: Path, gemma: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert LLM(llama).generate("Once", max_new_tokens=2).path == "native"
    assert LLM(llama, path="composed").generate("Once", max_new_tokens=2).path == "composed: requested"
    assert not LLM(llama).generate("Once", max_new_tokens=1).path, "no step was taken"
    assert LLM(llama).generate("Once", plan="oracle_tokens:budget=128", max_new_tokens=2).path == (
        "composed: no NVIDIA GPU; oracle_tokens ranks neither pages by their extremes nor tokens by their sketches"
    )
    assert LLM(gemma).generate("Once", max_new_tokens=2).path == "native"
    assert LLM(llama).generate("Once", max_new_tokens=8, exact=True).path == "native"
    assert LLM(gemma).generate("Once", max_new_tokens=8, exact=True).path == (
        "composed: drafts are verified; its layers with sliding windows are not verified by the core"
    )
    watched = LLM(llama).generate("Once", max_new_tokens=2, passages=True)
    assert watched.path == "composed: what is selected is recorded"
    kept = LLM(llama).generate("Once", max_new_tokens=2, logprobs=1)
    assert kept.path == "native", "only captured steps keep no probabilities"
    for directory, plan, says in (
        (llama, "oracle_tokens:budget=128", "oracle_tokens does not rank pages by a summary"),
        (llama, "quest:mass=0.9", "mass= chooses as many pages"),
    ):
        llm = LLM(directory, plan, path="eager")
        for _ in range(2):
            assert says in llm.generate("Once", max_new_tokens=2).path
        assert sum(says in record.message for record in caplog.records) == 1
        with refused("unsupported_plan: no NVIDIA GPU"):
            LLM(directory, plan, path="captured").generate("Once", max_new_tokens=1)


def test_the_model_works_on_after_its_weights_were_joined(eager: LLM, llama: Path) -> None:
    eager.generate(TEXTS[0], max_new_tokens=2)
    ids = torch.tensor([eager.tokenizer(TEXTS[0])["input_ids"]])
    fresh = LLM(llama).model
    with torch.no_grad():
        assert torch.equal(eager.model(ids).logits, fresh(ids).logits)
    attention = eager.model.model.layers[0].self_attn
    first, second = attention.q_proj.weight, attention.k_proj.weight
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
