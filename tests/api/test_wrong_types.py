"""What is no text, no whole number or no option is refused with what was given, not with an internal error."""

import copy
import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.tiny_directory import text_of
from refusals import refused

import kvsift
from kvsift import LLM, Budget, KVSiftError, Plan, Rule, Sampling
from kvsift.api.llm import MOST_CHUNK
from kvsift.engine.executor import Executor
from kvsift.engine.options import GenerateOptions
from kvsift.methods.quest import Quest


@pytest.fixture(scope="module")
def llm(llama: Path) -> LLM:
    return LLM(llama, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["Once"], {"max_tokens": 5}, "unknown_name: 'max_tokens'; did you mean 'max_new_tokens'?"),
        (["Once"], {"max_new_tokens": 4.5}, "invalid_value: max_new_tokens=4.5"),
        (["Once"], {"max_new_tokens": True}, "invalid_value: max_new_tokens=True"),
        (["Once"], {"m": 5}, "unknown_name: exact, grammar, logprobs, max_new_tokens, n, on_text"),
        (["Once"], {"sampling": {"temperature": 1}}, "invalid_value: dict"),
        (["Once"], {"stop": 5}, "invalid_value: stop=5"),
        (["Once"], {"stop": [None]}, "invalid_value: stop=[None]"),
        (["Once"], {"exact": "yes"}, "invalid_value: exact='yes'"),
        ([[1, 2]], {}, "invalid_value: prompt"),
        ([None], {}, "invalid_value: NoneType"),
        ([b"Once"], {}, "invalid_value: prompt"),
        ([[]], {}, "empty_text: there is no prompt"),
        ([""], {}, "empty_text: the prompt is empty"),
        ([["a", ""]], {}, "empty_text: prompt 2 of 2 is empty"),
        ([["a", "b"]], {"on_text": print}, "conflict"),
        (["Once"], {"max_new_tokens": 0}, "invalid_value: max_new_tokens=0"),
    ],
)
def test_a_prompt(llm: LLM, arguments: list[Any], options: dict[str, Any], message: str) -> None:
    with refused(message):
        llm.generate(*arguments, **options)


def test_the_name_of_a_file_in_place_of_its_text_is_mentioned(
    llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "manual.txt").write_text(text_of(100))
    for begin in (llm.read, llm.chat):
        for text in (str(tmp_path / "missing.txt"), "/" + "x" * 300, "a\0b"):
            begin(text)
        assert not caplog.messages
        begin(str(tmp_path / "manual.txt"))
        assert f"{str(tmp_path / 'manual.txt')!r} is the name of a file" in caplog.messages[0]
        caplog.clear()


ANYTHING: list[Any] = [
    None, 5, -1, "x", "", [], {}, float("nan"), float("inf"), -float("inf"), 10**400, True, np.int64(3),
    np.float32(0.5), Path("x"), b"x", object(), torch.tensor(3), [None], "x" * 5000, "a\0b",
]  # fmt: skip
LLM_OPTIONS = (
    *("device", "dtype", "path", "placement", "deterministic"),
    *("chunk_size", "probe_every", "dense_below", "keep_tokens"),
)


def set_turns(llm: LLM, turns: Any) -> None:
    chat = llm.chat("A text.")
    chat.turns = turns
    chat.ask("Why?", max_new_tokens=1)


def sparsely(llm: LLM, **options: Any) -> None:
    with kvsift.sparse(llm.model, "quest:budget=128", **options):
        llm.model(torch.tensor([[5, 6, 7]]))


ENTRIES: dict[str, Callable[[LLM, Any], object]] = {
    "model": lambda llm, given: LLM(given, device="cpu"),
    "plan": lambda llm, given: LLM(llm.directory.path, given, device="cpu"),
    **{
        name: lambda llm, given, name=name: LLM(llm.directory.path, **{"device": "cpu", name: given})
        for name in LLM_OPTIONS
    },
    **{
        f"{name} of generate": lambda llm, given, name=name: llm.generate("Once", **{"max_new_tokens": 1, name: given})
        for name in (*GenerateOptions.__dataclass_fields__, "n", "progress", "on_text")
    },
    **{
        name: lambda llm, given, name=name: Sampling(**{"temperature": 1.0, name: given})
        for name in ("temperature", "top_p", "seed")
    },
    **{
        f"{field.name} of a budget": lambda llm, given, name=field.name: llm.generate(
            "Once", max_new_tokens=1, plan=Rule(Quest(), Budget(**{name: given}))
        )
        for field in fields(Budget)
    },
    "prompt": lambda llm, given: llm.generate(given, max_new_tokens=1),
    "stream": lambda llm, given: list(llm.stream(given, max_new_tokens=1)),
    "prompts": lambda llm, given: llm.check(given, 1),
    "prompt of tokens": lambda llm, given: llm.check([given], 1),
    "max_new_tokens of check": lambda llm, given: llm.check([[5]], given),
    "plans": lambda llm, given: llm.warm_up(given),
    "num_tokens": lambda llm, given: llm.warm_up(num_tokens=given),
    "context": lambda llm, given: llm.read(given),
    "template": lambda llm, given: llm.read("A text.", template=given),
    "system": lambda llm, given: llm.read("A text.", system=given),
    "progress": lambda llm, given: llm.read("A text.", progress=given),
    "opened": lambda llm, given: llm.open(given),
    "saved": lambda llm, given: llm.read("A text.").save(
        Path("/nowhere") / given if isinstance(given, str | Path) else given
    ),
    "question": lambda llm, given: llm.read("A text of some length.").ask(given, max_new_tokens=1),
    "question_phase": lambda llm, given: llm.read("A text.").ask("Why?", question_phase=given),
    "tokens": lambda llm, given: llm.read("A text.").go_on(given, max_new_tokens=1),
    "a chat's context": lambda llm, given: llm.chat(given),
    "a chat's stop": lambda llm, given: llm.chat("A text.", stop=given),
    "a chat's question": lambda llm, given: llm.chat("A text.").ask(given, max_new_tokens=1),
    "turns": set_turns,
    "turn": lambda llm, given: set_turns(llm, [given]),
    "question of a turn": lambda llm, given: set_turns(llm, [(given, "So.")]),
    "answer of a turn": lambda llm, given: set_turns(llm, [("Why?", given)]),
    "parse_plan": lambda llm, given: kvsift.parse_plan(given),
    "prefill": lambda llm, given: Plan(prefill=given),
    "decode": lambda llm, given: Plan(decode=given),
    "method": lambda llm, given: Rule(given),
    "budget": lambda llm, given: Rule(Quest(), given),
    "strict": lambda llm, given: sparsely(llm, strict=given),
    "probe_every of sparse": lambda llm, given: sparsely(llm, probe_every=given),
    "reserve": lambda llm, given: sparsely(llm, reserve=given),
    "placement of sparse": lambda llm, given: sparsely(llm, placement=given),
    "rows": lambda llm, given: kvsift.make_cache(llm.model, "dense", rows=given),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_whatever_is_given_is_taken_or_refused_by_name(entry: str, llm: LLM) -> None:
    for given in ANYTHING:
        with suppress(KVSiftError):
            ENTRIES[entry](llm, given)


@pytest.mark.parametrize(
    ("entry", "given", "message"),
    [
        ("model", 5, "invalid_value: model=5"),
        ("opened", None, "invalid_value: path=None"),
        ("context", b"abc", "invalid_value: context"),
        ("context", Path("manual.txt"), "invalid_value: PosixPath"),
        ("question", ["a", "b"], "invalid_value: question"),
        ("path", "fast", "unknown_name: 'fast'"),
        ("dense_below", -1, "invalid_value: dense_below=-1"),
        ("dense_below", "never", "invalid_value: dense_below='never'"),
        ("chunk_size", 0, "invalid_value: chunk_size=0"),
        ("chunk_size", MOST_CHUNK + 1, "invalid_value: chunk_size"),
        ("chunk_size", "64", "invalid_value: chunk_size='64'"),
        ("probe_every", -1, "invalid_value: probe_every=-1"),
        ("probe_every", "x", "invalid_value: probe_every='x'"),
        ("timeout_s of generate", 10**400, "invalid_value: timeout_s=1000"),
        ("plans", "dense", "invalid_value: plans='dense'"),
        ("a chat's stop", 5, "invalid_value: stop=5"),
        ("question_phase", "decod", "unknown_name: 'decod'; did you mean 'decode'?"),
        ("turns", None, "invalid_value: NoneType"),
        ("turn", None, "invalid_value: None"),
        ("answer of a turn", None, "invalid_value: answer of an earlier turn"),
        ("tokens", [], "invalid_value"),
        ("tokens", [5, 6, -1], "invalid_value: token=-1"),
        ("decode", "quest", "invalid_value: decode='quest'"),
        ("sinks of a budget", None, "invalid_value: sinks=None"),
        ("progress of generate", 5, "invalid_value: progress=5"),
        ("deterministic", "yes", "invalid_value: deterministic='yes'"),
        ("strict", "yes", "invalid_value: strict='yes'"),
        ("reserve", "x", "invalid_value: reserve='x'"),
    ],
)
def test_what_is_said(entry: str, given: Any, message: str, llm: LLM) -> None:
    with refused(message):
        ENTRIES[entry](llm, given)


def test_numbers_of_numpy_are_numbers(llm: LLM) -> None:
    directory, text = llm.directory.path, text_of(200)
    other = LLM(directory, device="cpu", chunk_size=np.int64(64), keep_tokens=np.int32(128), probe_every=np.uint8(4))
    plan = {"method": "quest", "budget": np.int64(128), "window": np.int16(16), "dense_layers": np.array([0])}
    answer = other.generate(text, plan=plan, max_new_tokens=np.int64(4), timeout_s=np.float32(90), logprobs=np.int8(1))
    assert answer.plan == "quest:budget=128:window=16:dense_layers=0"
    assert json.dumps(answer.as_dict())
    cold = llm.generate(text, plan=answer.plan, max_new_tokens=4)
    assert answer.token_ids == cold.token_ids
    drawn, again = Sampling(np.float32(0.5), np.float64(0.5), np.int64(7)), Sampling(0.5, 0.5, 7)
    assert drawn == again
    assert type(drawn.seed) is int


def test_a_stream_that_failed_has_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream("Once", max_new_tokens=4)
    monkeypatch.setattr(Executor, "decode_sequences", lambda executor, seqs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(stream)
    assert list(stream) == []
    assert stream.answer is None


@pytest.mark.parametrize("path", ["auto", "composed", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_the_calling_thread_changes_no_answer(path: str, dtype: torch.dtype, llama: Path) -> None:
    plan = "sketch:budget=80:window=16:dense_layers=0"

    def answers() -> list[Any]:
        llm = LLM(llama, plan, device="cpu", chunk_size=64, dtype="float32", path=path)
        document, chat = llm.read(text_of(150)), llm.chat(text_of(150))
        texts = [text_of(150), text_of(100)]
        every = [document.ask("Why?", max_new_tokens=5), chat.ask("Why?", max_new_tokens=5)]
        return [answer.token_ids for answer in [*every, *llm.generate(texts, max_new_tokens=5)]]

    expected = answers()
    with torch.autocast("cpu", dtype=dtype):
        assert answers() == expected


@pytest.mark.parametrize("name", ["sketch", "quest", "snapkv", "h2o", "tova", "random", "magicpig", "sparq", "infllm"])
def test_default_dtype_and_device_of_the_calling_thread_change_no_answer(name: str, llama: Path) -> None:
    plan = f"{name}:budget=80:sinks=4:window=16:dense_layers=none{':block=16' if name == 'infllm' else ''}"

    def answer() -> Any:
        found = LLM(llama, plan, device="cpu", chunk_size=64, dtype="float32").generate(text_of(300), max_new_tokens=5)
        return found.token_ids, [found.decode(key) for key in ("density", "recall")]

    expected, before = answer(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert answer() == expected
    finally:
        torch.set_default_dtype(before)
    llm = LLM(llama, plan, device="cpu", chunk_size=64, dtype="float32")
    llm.load()
    with torch.device("meta"):
        assert llm.generate(text_of(300), max_new_tokens=5).token_ids == expected[0]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_belongs_to_a_process_is_not_copied(how: Callable[[Any], Any], llm: LLM) -> None:
    for owned, instead in [
        (llm, "loads its own weights"),
        (llm.read(text_of(100)), "Write it to a file with save"),
        (llm.chat(text_of(100)), "give it these turns"),
        (llm.stream(text_of(100)), "come once"),
    ]:
        with refused(f"unsupported_call: {instead}"):
            how(owned)
    assert how(llm.generate(text_of(100), max_new_tokens=2))


@pytest.mark.parametrize("path", ["auto", "eager"])
def test_callbacks_run_as_the_calling_thread_does(path: str, llama: Path) -> None:
    llm, seen = LLM(llama, device="cpu", chunk_size=64, dtype="float32", path=path), list[tuple[bool, bool]]()

    def on_text(piece: str) -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))

    with torch.autocast("cpu"):
        llm.generate(text_of(100), max_new_tokens=5, on_text=on_text)
        llm.read(text_of(100)).ask("Why?", max_new_tokens=5, on_text=on_text)
        llm.chat(text_of(100)).ask("Why?", max_new_tokens=5, on_text=on_text)
    assert len(seen) >= 3
    assert set(seen) == {(False, True)}


def test_a_dtype_may_be_one_of_torch(llama: Path) -> None:
    assert LLM(llama, device="cpu", dtype=torch.float32).dtype == torch.float32  # type: ignore[arg-type]


def test_what_there_is_can_be_listed() -> None:
    assert {"LLM", "sparse", "Sampling"} <= set(dir(kvsift))
