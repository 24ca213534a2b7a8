"""Exact decoding: the tokens of dense attention, whatever the plan drafts."""

from pathlib import Path

import pytest
from ends import Dictated
from engine.exact_models import PATHS, new_llm, same
from engine.tiny_directory import text_of, write_model
from refusals import refused
from turns import in_turns

import kvsift
from kvsift import LLM, Sampling, native
from kvsift.engine.speculative.pace import Amount, Pace

SMALL = "budget=80:sinks=4:window=16:dense_layers=none"
PLANS = [
    f"sketch:{SMALL}",
    f"quest:{SMALL}",
    f"verify:{SMALL}",
    f"retrieval_attention:{SMALL}:index=flat",
    f"retrieval_attention:{SMALL}:index=graph:block=96:beam=9",
    f"infllm:{SMALL}:block=16:chunk=32",
    f"tidal_decode:{SMALL}",
    f"oracle_tokens:{SMALL}",
    f"random:{SMALL}",
    "dense",
]
SAMPLINGS = [None, Sampling(0.8, seed=3), Sampling(1.2, top_p=0.9, seed=4)]
PROMPT = text_of(450)
NEW = 24

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="verification needs the compiled core"),
    pytest.mark.usefixtures("eager_pace"),
]


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> None:
    """Not the captured steps."""


@pytest.fixture(scope="module", params=["Qwen3-bfloat16", "Qwen2-float32", *PATHS])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Composed steps by family and dtype, or steps of a graph."""
    family, _, dtype = request.param.partition("-")
    folder = tmp_path_factory.mktemp("exact")
    if not dtype:
        return new_llm(folder, family)
    return LLM(write_wide(folder, family), "dense", device="cpu", dtype=dtype, chunk_size=64)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide(tmp_path_factory.mktemp("exact"), "Qwen3")


def write_wide(folder: Path, family: str) -> Path:
    """A model of the head dimensions that the compiled core takes."""
    return write_model(folder, family, head_dim=32, hidden_size=64, num_hidden_layers=3)


@pytest.mark.parametrize(("plan", "sampling"), in_turns(PLANS, SAMPLINGS))
def test_answers_are_those_of_dense_attention(llm: LLM, plan: str, sampling: Sampling | None) -> None:
    in_graphs = llm.fast_path.is_required
    if in_graphs and not plan.startswith(("sketch", "quest", "dense")):
        pytest.skip("not captured")
    options = {"max_new_tokens": NEW, "sampling": sampling, "logprobs": None if in_graphs else 3}
    dense, exact = (llm.generate(PROMPT, **options, **chosen) for chosen in ({}, {"plan": plan, "exact": True}))
    assert same(exact, dense)
    assert not in_graphs or exact.path == dense.path == llm.fast_path.name
    assert exact.logprobs == dense.logprobs, "bit by bit"
    assert dense.exact is None
    assert exact.exact is not None
    report = exact.exact
    assert sum(report["verified"].values()) + report["drafts_accepted"] + report["repeats_accepted"] >= NEW - 1
    assert plan == "dense" or report["drafted"] > 0


def test_sequences_of_a_batch_are_exact_side_by_side(llm: LLM) -> None:
    prompts = [text_of(length) for length in (700, 130, 350, 90, 510)]
    samplings = [Sampling(), Sampling(1.0, seed=1), Sampling(), Sampling(0.7, seed=2), Sampling(1.0, seed=9)]
    dense = llm.generate(prompts, max_new_tokens=NEW, sampling=samplings)
    exact = llm.generate(prompts, max_new_tokens=NEW, sampling=samplings, plan=PLANS[0], exact=True)
    assert all(map(same, exact, dense))
    beside = llm.generate(prompts, max_new_tokens=NEW, sampling=samplings, plan="dense")
    assert all(map(same, beside, dense)), "nothing is left behind"
    alone = [llm.generate(prompt, max_new_tokens=NEW, sampling=each) for prompt, each in zip(prompts, samplings)]
    assert not llm.fast_path.is_required or all(map(same, dense, alone)), "steps of a graph are deterministic"


def test_samples_of_one_prompt_are_those_of_dense_attention(llm: LLM) -> None:
    sampling = Sampling(1.0, seed=5)
    dense = llm.generate(PROMPT, n=3, sampling=sampling, max_new_tokens=20)
    exact = llm.generate(PROMPT, n=3, sampling=sampling, max_new_tokens=20, plan=PLANS[1], exact=True)
    assert all(map(same, exact, dense))
    assert len({tuple(answer.token_ids) for answer in exact}) == 3


def test_streams_stops_and_lengths_are_those_of_dense_attention(llm: LLM) -> None:
    dense = llm.generate(PROMPT, max_new_tokens=NEW)
    stop = dense.text[10:13]
    for options in ({"stop": stop}, {"max_new_tokens": 1}, {"max_new_tokens": 2}, {"max_new_tokens": 7}):
        options = {"max_new_tokens": NEW, **options}
        pieces = list(llm.stream(PROMPT, plan=PLANS[0], exact=True, **options))
        expected = llm.generate(PROMPT, **options)
        assert "".join(pieces) == expected.text
        assert same(llm.generate(PROMPT, plan=PLANS[0], exact=True, **options), expected)


def test_nothing_is_drafted_behind_a_token_that_ends_the_answer(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(wide, "dense", device="cpu", chunk_size=64)
    ids = llm.generate(PROMPT, max_new_tokens=6, sampling=SAMPLINGS[1]).token_ids
    end = next(place for place in range(2, 6) if ids.index(ids[place]) == place)
    monkeypatch.setattr(Pace, "choose", lambda pace, repeat, repeated, most: Amount(0.0, most))
    options = {"max_new_tokens": 20, "sampling": SAMPLINGS[1], "stop_token_ids": [ids[end]]}
    exact = llm.generate(PROMPT, plan="quest:budget=4096:dense_layers=none", exact=True, **options)
    assert same(exact, llm.generate(PROMPT, **options))
    assert exact.exact["drafted"] == end
    assert exact.exact["drafts_wrong"] == 0


@pytest.mark.parametrize(("plan", "phase"), [(f"sketch:{SMALL}", "prefill"), (f"verify:{SMALL}", "decode")])
def test_documents_answer_exactly_and_stay_as_they_were(llm: LLM, plan: str, phase: str) -> None:
    if llm.fast_path.is_required and plan.startswith("verify"):
        pytest.skip("not captured")
    document = llm.read(text_of(600))
    options = {"question_phase": phase, "max_new_tokens": 24, "stop": None}
    before = document.ask("What grinds?", plan=f"sketch:{SMALL}", **options)
    dense = document.ask("What grinds?", plan="dense", **options)
    exact = document.ask("What grinds?", plan=plan, exact=True, **options)
    assert same(exact, dense)
    assert exact.exact is not None
    assert same(document.ask("What grinds?", plan=f"sketch:{SMALL}", **options), before)
    options["sampling"] = SAMPLINGS[1]
    dense = llm.read(text_of(600)).ask("Which mill?", plan="dense", **options)
    assert same(document.ask("Which mill?", plan=plan, exact=True, **options), dense)


def test_conversations_are_exact_in_every_turn(llm: LLM) -> None:
    exact, dense = llm.chat(text_of(400), stop="#"), llm.chat(text_of(400), stop="#")
    for question in ("What grinds?", "And then?", "Where?"):
        one = exact.ask(question, plan=PLANS[0], exact=True, max_new_tokens=12)
        other = dense.ask(question, plan="dense", max_new_tokens=12)
        assert same(one, other)
    assert exact.turns == dense.turns


def test_an_interrupted_answer_leaves_others_exact(llm: LLM) -> None:
    stream = llm.stream(PROMPT, plan=PLANS[0], exact=True, max_new_tokens=NEW)
    next(stream)
    del stream
    dense = llm.generate(PROMPT, max_new_tokens=NEW)
    assert same(llm.generate(PROMPT, plan=PLANS[0], exact=True, max_new_tokens=NEW), dense)


def test_counters_tell_drafts_and_verifications(llm: LLM) -> None:
    answer = llm.generate(PROMPT, plan=f"quest:{SMALL}", exact=True, max_new_tokens=NEW)
    report, layers = answer.exact, 3
    verified = sum(count * (proposed + 1) for proposed, count in report["verified"].items())
    assert answer.decode("queries") == layers * (verified + report["drafted"])
    assert answer.decode("sparse_queries") == layers * report["drafted"]
    assert 0 < answer.decode("kv_bytes_read") < answer.decode("kv_bytes_dense") * (verified + report["drafted"])
    assert answer.as_dict()["exact"] == report


def test_what_cannot_be_exact_is_refused_with_the_reason(wide: Path) -> None:
    llm = LLM(wide, "dense", device="cpu")
    with refused("unsupported_plan: snapkv"):
        llm.generate(PROMPT, plan=f"snapkv:{SMALL}", exact=True)
    with refused("unsupported_plan: snapkv"):
        llm.read(PROMPT).ask("What?", plan=f"snapkv:{SMALL}", exact=True)


def test_exact_answers_have_no_passages(llm: LLM) -> None:
    with refused("conflict"):
        llm.generate(PROMPT, plan=PLANS[0], exact=True, passages=True)


def test_a_plan_for_drafts_alone_is_refused_elsewhere(llm: LLM) -> None:
    for ask in (llm.generate, llm.read(PROMPT).ask):
        with refused("unsupported_plan: verify"):  # "captured" names another reason first
            ask("What?", plan="verify:budget=128")
    with refused("unsupported_plan: budget=128"):
        kvsift.make_cache(llm.model, "verify:budget=128")


def test_what_followed_the_same_text_before_is_proposed_and_accepted(llm: LLM) -> None:
    said = text_of(300)[40:110]
    answer = llm.generate(text_of(300), plan="dense", exact=True, max_new_tokens=60, sampling=Dictated(llm, said))
    assert answer.text == said[:60]
    assert answer.exact["drafted"] == 0
    assert answer.exact["repeats_accepted"] > 12, "the answer quotes the prompt"
    assert sum(answer.exact["verified"].values()) < 48, "a pass brings several tokens"
