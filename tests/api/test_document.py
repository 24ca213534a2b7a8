"""Documents: read once, asked often; every question finds the cache as if it were the first."""

from pathlib import Path
from time import sleep
from typing import Any

import pytest
from engine.tiny_directory import text_of
from refusals import refused

from kvsift import LLM, InputError
from kvsift.api.answer import Answer
from kvsift.api.llm import Document
from kvsift.methods import pqcache

TEXT = text_of(700)
QUESTIONS = ("How many sacks?", "Which of the mills by the river grinds the least corn in a day?")
BUDGET = "budget=128:dense_layers=none"
PQCACHE = "pqcache:budget=128:dense_layers=none"
PLANS = (
    f"quest:{BUDGET}:window=16",
    "dense",
    f"quest:{BUDGET}:window=16:page_size=8",
    f"quest:{BUDGET}:window=16:page_size=32:score_by=mean_std",
    f"streaming_llm:{BUDGET}",
    f"random:{BUDGET}:window=16:page_size=4",
    f"oracle_tokens:{BUDGET}:window=16",
    f"prefill=streaming_llm:{BUDGET},decode=quest:{BUDGET}:window=16",
    "quest:budget=128:window=16:dense_layers=0",
)
FAMILIES = ["llama", "gemma", "chatty"]


def facts(answer: Answer) -> dict[str, Any]:
    """What must not depend on what was asked before; times and capacities may."""
    counted = ("visible_tokens", "density", "kv_bytes_read", "kv_bytes_dense", "recall", "recovery", "sparse_queries")
    return {
        "text": answer.text,
        "tokens": answer.token_ids,
        "prompt": (answer.prompt_tokens, answer.new_prompt_tokens),
        "plan": answer.plan,
        **{key: answer.decode(key) for key in counted},
    }


def ask(document: Document, question: str, plan: str, **options: Any) -> dict[str, Any]:
    return facts(document.ask(question, plan=plan, max_new_tokens=10, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_does_not_depend_on_what_was_asked_before(family: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(family)
    fresh = {
        (question, plan): ask(LLM(directory).read(TEXT), question, plan) for question in QUESTIONS for plan in PLANS
    }
    document = LLM(directory).read(TEXT)
    for plan in (*PLANS, *reversed(PLANS)):
        for question in QUESTIONS:
            assert ask(document, question, plan) == fresh[question, plan]


def test_the_plans_that_are_compared_do_differ(llama: Path) -> None:
    document = LLM(llama).read(TEXT)
    assert len({str(ask(document, QUESTIONS[0], plan)["tokens"]) for plan in PLANS}) > len(PLANS) / 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", [PLANS[0], PLANS[7]])
def test_the_size_of_prompt_chunks_does_not_change_the_answer(
    family: str, plan: str, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(family)
    first, *others = (
        ask(LLM(directory, chunk_size=size).read(TEXT), QUESTIONS[1], plan)["tokens"] for size in (2048, 256, 100)
    )
    assert others == [first, first]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dense_answer_is_what_the_whole_prompt_generates(family: str, request: pytest.FixtureRequest) -> None:
    llm = LLM(request.getfixturevalue(family), "dense")
    answer = llm.read(TEXT).ask(QUESTIONS[0], max_new_tokens=10)
    if llm.tokenizer.chat_template:
        turn = [{"role": "user", "content": f"{TEXT}\n\n{QUESTIONS[0]}"}]
        prompt = llm.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        assert prompt == f"<bos>[user] {TEXT}\n\n{QUESTIONS[0]}\n[assistant] "
        prompt = prompt.removeprefix("<bos>")
    else:
        prompt = f"{TEXT}\n\nQuestion: {QUESTIONS[0]}\nAnswer:"
    whole = llm.generate(prompt, max_new_tokens=10, stop=None if llm.tokenizer.chat_template else "\n")
    assert answer.token_ids == whole.token_ids
    assert answer.text == whole.text.strip()
    assert answer.prompt_tokens == whole.prompt_tokens


def test_only_the_question_is_fed_after_the_document(llama: Path) -> None:
    document = LLM(llama).read(TEXT)
    answer = document.ask(QUESTIONS[0], max_new_tokens=4)
    assert document.num_tokens == 1 + len(TEXT) + len("\n\nQuestion: ")
    assert answer.new_prompt_tokens == len(QUESTIONS[0]) + len("\nAnswer:")
    assert answer.prompt_tokens == document.num_tokens + answer.new_prompt_tokens


def test_the_document_is_read_again_only_for_another_prefill(llama: Path) -> None:
    notified: list[tuple[int, int]] = []
    llm = LLM(llama, chunk_size=256)
    document = llm.read(TEXT, progress=lambda done, total: notified.append((done, total)))
    assert notified == []  # reading happens with the first question
    total = document.num_tokens
    for plan in PLANS[:7]:
        ask(document, QUESTIONS[0], plan)
    once = len(notified)  # 3 where the client keeps up: the engine does not wait for it
    assert notified[-1] == (total, total)
    assert notified == sorted(notified)
    ask(document, QUESTIONS[0], PLANS[7])
    again = notified[once:]
    ask(document, QUESTIONS[1], PLANS[7])
    assert again[-1] == (total, total)
    assert again == sorted(again) == notified[once:]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupted_reading_is_started_again(family: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(family)
    expected = ask(LLM(directory).read(TEXT), QUESTIONS[0], PLANS[0])
    stops = [False, True]

    def progress(done: int, total: int) -> None:
        if stops and stops.pop():
            raise KeyboardInterrupt

    document = LLM(directory, chunk_size=256).read(TEXT, progress=progress)
    with pytest.raises(KeyboardInterrupt):
        document.ask(QUESTIONS[0], plan=PLANS[0])
    assert ask(document, QUESTIONS[0], PLANS[0])["tokens"] == expected["tokens"]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupted_answer_leaves_nothing_behind(family: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(family)
    document = LLM(directory).read(TEXT)
    expected = ask(document, QUESTIONS[0], PLANS[0])

    def interrupt(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        document.ask(QUESTIONS[1], plan=PLANS[2], max_new_tokens=200, on_text=interrupt)
    assert ask(document, QUESTIONS[0], PLANS[0]) == expected


def test_a_timeout_counts_from_the_document_that_was_read(llama: Path) -> None:
    times: list[float] = []
    document = LLM(llama, chunk_size=64).read(TEXT, progress=lambda done, total: sleep(0.2))
    for _ in range(2):
        answer = document.ask(QUESTIONS[0], max_new_tokens=6, timeout_s=1.5)
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 6)
        times.append(answer.ttft_s)
    assert document.read_s > 1.5 > max(times)
    answer = document.ask(QUESTIONS[0], max_new_tokens=6, timeout_s=1e-6)
    assert (answer.finish_reason, len(answer.token_ids)) == ("deadline", 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_question_phase_decode_sifts_the_question_too(family: str, request: pytest.FixtureRequest) -> None:
    llm = LLM(request.getfixturevalue(family))
    document = llm.read(TEXT)
    layers = {layer["layer"] for layer in document.ask(QUESTIONS[1], max_new_tokens=2).stats["layers"]}

    def queries(phase: str, question_phase: Any) -> int:
        answer = document.ask(QUESTIONS[1], plan=PLANS[0], max_new_tokens=5, question_phase=question_phase)
        assert answer.stats["phases"][phase]["queries"] % len(layers) == 0
        return answer.stats["phases"][phase]["queries"] // len(layers)

    fed = document.ask(QUESTIONS[1], max_new_tokens=1).new_prompt_tokens
    assert (queries("prefill", "prefill"), queries("decode", "prefill")) == (fed, 4)
    assert (queries("prefill", "decode"), queries("decode", "decode")) == (0, fed + 4)


@pytest.mark.parametrize("first", ["dense", PQCACHE])
def test_building_an_index_is_in_ttft_whether_its_plan_comes_first_or_not(
    llama: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    fit = pqcache.fit_centroids

    def slow(*args: Any) -> Any:
        sleep(0.1)
        return fit(*args)

    document = LLM(llama, first).read(TEXT)
    monkeypatch.setattr(pqcache, "fit_centroids", slow)
    if first == "dense":
        document.ask(QUESTIONS[0], max_new_tokens=2)
        assert document.read_s > 0
    answer = document.ask(QUESTIONS[0], plan=PQCACHE, max_new_tokens=5)
    assert answer.ttft_s > answer.build_s >= 0.3, "a fit per layer"
    assert max(answer.itl_s) < 0.1
    again = document.ask(QUESTIONS[0], plan=PQCACHE, max_new_tokens=5)
    assert again.build_s < 0.1, "built once"
    assert again.token_ids == answer.token_ids


def test_an_answer_says_whether_it_was_cut(llama: Path) -> None:
    llm = LLM(llama)
    assert llm.generate(TEXT, max_new_tokens=3).finish_reason == "length"
    text = llm.generate(TEXT, max_new_tokens=8).text
    stopped = llm.generate(TEXT, max_new_tokens=8, stop=text[3])
    assert (stopped.finish_reason, stopped.as_dict()["finish_reason"]) == ("stop", "stop")


def prompts_of(llm: LLM, **form: Any) -> str:
    """What is fed for a question, special tokens in it."""
    ids = llm.read(TEXT, **form).check(" Why? ", 1)
    return str(llm.tokenizer.decode(ids))


def test_the_prompt_is_what_its_user_makes_it(llama: Path, chatty: Path) -> None:
    plain, chat = LLM(llama), LLM(chatty)
    for llm in (plain, chat):
        assert prompts_of(llm, template="T: {context} Q: {question}!") == f"<bos>T: {TEXT} Q: Why?!"
        assert prompts_of(llm, template="<bos>{context}{question}") == f"<bos>{TEXT}Why?", "one bos token"
        assert prompts_of(llm, template="{context} {context} {question}") == f"<bos>{TEXT} {{context}} Why?"
    assert prompts_of(chat, system="Be {question}.") == (
        f"<bos>[system] Be {{question}}.\n[user] {TEXT}\n\nWhy?\n[assistant] "
    )


@pytest.mark.parametrize(
    ("family", "form", "says"),
    [
        ("llama", {"template": "{question} {context}"}, "needs {context} and, after it, {question}"),
        ("llama", {"template": "{context}"}, "needs {context} and, after it, {question}"),
        ("llama", {"system": "Be brief."}, "a system message is part of a chat template, and this model has none"),
        ("chatty", {"system": "Be brief.", "template": "{context}{question}"}, "and a prompt template replaces it"),
    ],
)
def test_a_prompt_that_cannot_be_made_is_refused(
    family: str, form: dict[str, str], says: str, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(InputError) as refusal:
        LLM(request.getfixturevalue(family)).read(TEXT, **form)  # type: ignore[arg-type]
    assert says in str(refusal.value)


def test_a_chat_template_that_takes_no_system_message_says_so(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(chatty)
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('System role not supported') }}")
    with refused("unsupported_prompt: System role not supported"):
        llm.read(TEXT, system="Be brief.")


def test_a_stop_of_ones_own_ends_an_answer(llama: Path) -> None:
    llm = LLM(llama)
    whole = llm.read(TEXT, template="{context}\n{question}\nA:").ask("Why?", max_new_tokens=8)
    stop = next(each for each in whole.text[1:] if each.isalnum())
    cut = llm.read(TEXT, template="{context}\n{question}\nA:", stop=stop).ask("Why?", max_new_tokens=8)
    assert cut.text == whole.text.partition(stop)[0].strip()
    assert cut.finish_reason == "stop"


def test_bytes_that_are_no_text_are_refused_before_the_tokenizer_sees_them(llama: Path) -> None:
    llm = LLM(llama)
    for ask, what in (
        (lambda text: llm.read(TEXT).ask(text), "question"),
        (lambda text: llm.read(text), "context"),
        (lambda text: llm.generate(text), "prompt"),
    ):
        with refused(f"invalid_text: {what}"):
            ask("Why \udcff")


def test_a_short_text_may_be_asked_a_longer_question(llama: Path) -> None:
    assert LLM(llama).read("It is 5.").ask("Is it 5?", max_new_tokens=2).prompt_tokens > 0, "shorter than its template"
    document, question = LLM(llama).read(text_of(40)), text_of(300)
    assert document.ask(question, max_new_tokens=4).token_ids
    with refused("invalid_value"):
        document.ask(question * 3)


def test_a_tokenizer_that_joins_the_question_to_the_document_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = LLM(llama).read(TEXT)
    monkeypatch.setattr(document, "_encode", lambda question: [5] * 900)
    with refused("unsupported_prompt: 'How many sacks?'"):
        document.ask(QUESTIONS[0])


def test_more_tokens_than_were_reserved_are_generated(llama: Path) -> None:
    document = LLM(llama).read(TEXT)
    short = document.ask(QUESTIONS[0], plan=PLANS[0], max_new_tokens=300)
    fresh = LLM(llama).read(TEXT).ask(QUESTIONS[0], plan=PLANS[0], max_new_tokens=700)
    long = document.ask(QUESTIONS[0], plan=PLANS[0], max_new_tokens=700)
    assert long.token_ids[: len(short.token_ids)] == short.token_ids
    assert long.token_ids == fresh.token_ids
