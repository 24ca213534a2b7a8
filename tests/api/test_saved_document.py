"""Saved documents: opened again, they answer as the document that was saved, bit for bit, or they are refused."""

import gc
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import stories
import torch
from engine.tiny_directory import CHAT_TEMPLATE, text_of, write_model
from lab.eval.test_results import file_size_limit
from models.ropes import rope
from refusals import refused
from safetensors import safe_open
from turns import in_turns

from kvsift import LLM
from kvsift.api import saved_header
from kvsift.api.document import Document
from kvsift.errors import DamagedFile, WrongFile
from kvsift.methods import BUILT_IN, method_class
from kvsift.plan.syntax import parse_plan

TEXT = text_of(1001)  # the last page is not full
QUESTION = "Which of the mills by the river grinds the least corn?"
BUDGET = "budget=128:window=16:dense_layers=none"
QUEST = f"quest:{BUDGET}"
QUOKA = f"prefill=quoka:{BUDGET}:chunk=64"
OTHER_BUDGETS = {
    "infllm": "budget=512:window=16:dense_layers=none",
    "streaming_llm": "budget=128",
    "retrieval_attention": "budget=200:window=16",
    "dense": "",
}
PLACES = ["device", "split", "offload", "host"]
NO_CACHE = "quest:budget=128:window=16:dense_layers=none:page_size=8"


def plan_of(name: str) -> str:
    budget = OTHER_BUDGETS.get(name, BUDGET)
    return ":".join(filter(None, [name, budget]))


LEARNERS = [name for name in BUILT_IN if method_class(name)().traits.wants_queries]
PLANS = [
    *(plan_of(name) for name in BUILT_IN if "decode" in method_class(name).phases and name not in LEARNERS),
    f"quest:{BUDGET}:score_by=minmax_fp8",
    f"quest:{BUDGET}:page_size=8:score_by=mean_std",
    f"sketch:{BUDGET}:mass=0.9".replace("budget=128:", ""),
    "streaming_llm:budget=128:evict=true",
    f"{QUEST}:min_recovery=0.9",
]


def logits(llm: LLM, document: Document, plan: str, num_new: int = 6) -> torch.Tensor:
    """Of the last token of a question and of greedy tokens after it, [num_new, vocabulary]."""
    ids = document.check(QUESTION, num_new)
    cache = document.prefill(parse_plan(plan), len(ids) + num_new - document.num_tokens)
    found = [llm.feed(cache, ids[document.num_tokens :])]
    for _ in range(num_new - 1):
        found.append(llm.feed(cache, [int(found[-1].argmax())], phase="decode"))
    return torch.cat([one.flatten(0, 1).float().cpu() for one in found])


def unread(done: int, total: int) -> None:
    raise AssertionError("the document was read again")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mills.kvsift"


@pytest.fixture(scope="module")
def saved(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A document read under QUEST."""
    path = tmp_path_factory.mktemp("saved") / "mills.kvsift"
    LLM(llama, QUEST).read(TEXT).save(path)
    return path


@pytest.mark.parametrize("plan", PLANS)
def test_an_opened_document_has_the_logits_of_the_saved_one(plan: str, llama: Path, path: Path) -> None:
    llm = LLM(llama, plan, chunk_size=256)
    document = llm.read(TEXT)
    expected = logits(llm, document, plan)
    if "evict" in plan:
        document = llm.read(TEXT)
    document.save(path)
    other = LLM(llama, plan, chunk_size=256)
    opened = other.open(path, progress=unread)
    assert torch.equal(logits(other, opened, plan), expected)


@pytest.mark.parametrize("plan", PLANS[::2])
def test_the_plan_of_the_saved_document_does_not_matter(plan: str, llama: Path, saved: Path) -> None:
    llm = LLM(llama, QUEST)
    document, opened = llm.read(TEXT), llm.open(saved, progress=unread)
    for model_plan in (plan, QUEST, plan):
        one, other = (logits(llm, each, model_plan) for each in (document, opened))
        assert torch.equal(one, other)
        if "evict" in plan:
            document, opened = llm.read(TEXT), llm.open(saved, progress=unread)


@pytest.mark.parametrize("prefill", [f"{name}:{BUDGET}" for name in ("quoka", "critiprefill", "oracle_tokens", "loki")])
def test_a_sparse_prefill_is_saved_and_continues(prefill: str, llama: Path, path: Path) -> None:
    plan = f"prefill={prefill},decode={QUEST}"
    llm = LLM(llama, plan, chunk_size=256)
    document = llm.read(TEXT)
    expected = logits(llm, document, plan)
    document.save(path)
    assert torch.equal(logits(llm, llm.open(path, progress=unread), plan), expected)
    with refused("other_model: the plan dense has dense prefill"):
        llm.open(path, plan="dense")


@pytest.mark.parametrize("family", ["gemma", "chatty", "gpt_oss"])
@pytest.mark.parametrize("plan", [QUEST, "dense"])
def test_models_of_every_kind_of_layer(family: str, plan: str, tmp_path: Path, request: Any, path: Path) -> None:
    directory = (
        write_model(tmp_path / "m", "GptOss", num_hidden_layers=2)
        if family == "gpt_oss"
        else request.getfixturevalue(family)
    )
    llm = LLM(directory, plan, chunk_size=256)
    document = llm.read(TEXT)
    expected = logits(llm, document, plan)
    document.save(path)
    opened = llm.open(path, progress=unread)
    assert torch.equal(logits(llm, opened, plan), expected)
    answers = [each.ask(QUESTION, max_new_tokens=10) for each in (document, opened)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].text == answers[1].text
    assert answers[0].decode("kv_bytes_read") == answers[1].decode("kv_bytes_read")
    assert answers[0].kv_bytes == answers[1].kv_bytes


@pytest.mark.parametrize("plan", [QUEST, NO_CACHE, "dense", "streaming_llm:budget=128:evict=true"])
@pytest.mark.parametrize("placement", ["device", "split", "offload"])
def test_an_opened_document_takes_the_memory_of_one_that_was_read(
    placement: str, plan: str, llama: Path, path: Path
) -> None:
    if placement != "device" and "evict" in plan:
        pytest.skip("what is in host memory is not evicted")
    llm = LLM(llama, plan, placement=placement)
    document = llm.read(TEXT)
    document.save(path)
    opened = llm.open(path, progress=unread)
    read, again = (each.ask(QUESTION, max_new_tokens=8).kv_bytes for each in (document, opened))
    assert again == read


@pytest.mark.parametrize(("placement", "later"), in_turns(PLACES, PLACES[1:] + PLACES[:1]))
def test_placements_share_a_file(placement: str, later: str, llama: Path, path: Path) -> None:
    llm = LLM(llama, QUEST, placement=placement)
    document = llm.read(TEXT)
    document.save(path)
    opened = LLM(llama, QUEST, placement=later).open(path, progress=unread)
    assert opened.ask(QUESTION, max_new_tokens=8).token_ids == document.ask(QUESTION, max_new_tokens=8).token_ids


def test_rounded_values_are_neither_saved_nor_opened(llama: Path, saved: Path, path: Path) -> None:
    llm = LLM(llama, QUEST, placement="split:host_values=int8")
    with refused("unsupported_plan: host_values=int8"):
        llm.read(TEXT).save(path)
    with refused("unsupported_plan: opened"):
        llm.open(saved)
    assert not path.exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plan", [QUEST, f"sketch:{BUDGET}", f"pqcache:{BUDGET}"])
def test_keys_and_values_in_8_bits_are_saved_as_they_are_stored(
    plan: str, dtype: str, llama: Path, saved: Path, path: Path
) -> None:
    llm = LLM(llama, plan, dtype=dtype, device="cpu", kv_dtype="int8")
    document = llm.read(TEXT)
    document.save(path)
    again = path.with_suffix(".again")
    opened = llm.open(path, progress=unread)
    opened.save(again)
    read, later = (each.ask(QUESTION, max_new_tokens=8) for each in (document, opened))
    assert later.token_ids == read.token_ids
    assert later.decode("density") == read.decode("density")
    assert path.stat().st_size < saved.stat().st_size
    with safe_open(path, "pt") as one, safe_open(again, "pt") as other:
        layers = [name for name in one.keys() if name.startswith("layers.")]  # noqa: SIM118 (no mapping)
        assert all(torch.equal(one.get_tensor(name), other.get_tensor(name)) for name in layers)
    with refused("other_model: with kv_dtype=int8, and this LLM has kv_dtype=auto. Give kv_dtype=int8"):
        LLM(llama, plan, dtype=dtype, device="cpu").open(path)


@pytest.mark.parametrize("plan", [QUEST, f"sketch:{BUDGET}"])
@pytest.mark.parametrize("later", ["host:kv_dtype=int8", "device:kv_dtype=int8"])
def test_keys_and_values_in_8_bits_move_between_devices(plan: str, later: str, llama: Path, path: Path) -> None:
    """Pages that GPUs read, and rows that the compiled core does, have the same bytes."""
    first = ({"host:kv_dtype=int8", "device:kv_dtype=int8"} - {later}).pop()
    document = LLM(llama, plan, device="cpu", placement=first).read(TEXT)
    document.save(path)
    llm, again = LLM(llama, plan, device="cpu", placement=later), path.with_suffix(".again")
    llm.open(path, progress=unread).save(again)
    opened = llm.open(again, progress=unread)
    with safe_open(path, "pt") as one, safe_open(again, "pt") as other:
        assert all(torch.equal(one.get_tensor(name), other.get_tensor(name)) for name in one.keys())  # noqa: SIM118
    assert opened.ask(QUESTION, max_new_tokens=1).token_ids == document.ask(QUESTION, max_new_tokens=1).token_ids


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_keys_keep_the_rotation_of_the_saved_document(kind: str, tmp_path: Path, path: Path) -> None:
    llm = LLM(write_model(tmp_path / "m", **rope(kind)), "dense")
    document = llm.read(text_of(200))
    expected = document.ask("Who?", max_new_tokens=8)
    document.save(path)
    opened = LLM(tmp_path / "m", "dense").open(path, progress=unread)
    assert opened.ask("Who?", max_new_tokens=8).token_ids == expected.token_ids


@pytest.mark.parametrize("plan", [QUEST, f"sketch:{BUDGET}", "dense", "streaming_llm:budget=128:evict=true"])
def test_an_opened_document_is_saved_as_the_same_file(plan: str, llama: Path, path: Path) -> None:
    llm = LLM(llama, plan)
    document = llm.read(TEXT)
    document.save(path)
    content = path.read_bytes()
    if "evict" not in plan:
        document.ask(QUESTION, plan=NO_CACHE, max_new_tokens=4)
    document.save(path)
    assert path.read_bytes() == content
    opened = llm.open(path)
    opened.save(path)  # over the file that it comes from
    assert path.read_bytes() == content
    opened.ask(QUESTION, max_new_tokens=4)
    if "evict" not in plan:
        opened.save(path.with_name("again.kvsift"))
        assert path.with_name("again.kvsift").read_bytes() == content


def test_the_file_is_not_needed_once_it_is_open(llama: Path, saved: Path, path: Path) -> None:
    shutil.copy(saved, path)
    llm = LLM(llama, QUEST)
    expected = llm.open(saved).ask(QUESTION, max_new_tokens=8).token_ids
    opened = llm.open(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    path.unlink()
    assert opened.ask(QUESTION, max_new_tokens=8).token_ids == expected


def test_what_is_known_of_the_reading_is_saved(llama: Path, path: Path) -> None:
    llm = LLM(llama, QUEST)
    document = llm.read(TEXT)
    document.save(path)  # reads it: nothing was asked
    assert document.read_s > 0
    opened = llm.open(path)
    assert (opened.read_s, opened.read_stats) == (document.read_s, json.loads(json.dumps(document.read_stats)))
    assert (opened.open_s > 0, document.open_s) == (True, 0)
    assert (opened.num_tokens, opened.text) == (document.num_tokens, document.text)


def test_the_prompt_is_saved(llama: Path, chatty: Path, path: Path) -> None:
    for directory, prompt in (
        (llama, {"template": "<{context}> {question} ü", "stop": "x"}),
        (chatty, {"system": "Be brief."}),
    ):
        llm = LLM(directory, QUEST)
        document = llm.read(TEXT, **prompt)
        document.save(path)
        opened = llm.open(path)
        assert opened.text == document.text
        assert opened.check(QUESTION, 4) == document.check(QUESTION, 4)


@pytest.mark.parametrize("stop", ["b", ["b", "a"], ("a",), {"b", "a"}, frozenset("ab")])
def test_stops_of_every_kind_are_saved(stop: Any, llama: Path, path: Path) -> None:
    document = LLM(llama, "dense", device="cpu").read(text_of(100), stop=stop)
    document.save(path)
    answer = LLM(llama, "dense", device="cpu").open(path).ask("Why?", max_new_tokens=20)
    assert answer.text == document.ask("Why?", max_new_tokens=20).text


def test_a_chat_template_with_the_date_keeps_the_day_of_reading(tmp_path: Path, path: Path, monkeypatch: Any) -> None:
    template = "{{ strftime_now('%d %b') }} " + CHAT_TEMPLATE
    llm = LLM(write_model(tmp_path / "m", chat_template=template), QUEST)
    document = llm.read(TEXT)
    prompt = document.check(QUESTION, 8)
    expected = document.ask(QUESTION, max_new_tokens=8).token_ids
    document.save(path)

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2031, 11, 9, tzinfo=UTC)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Later)
    assert llm.read(TEXT).check(QUESTION, 8) != prompt
    for each in (document, llm.open(path)):
        assert each.check(QUESTION, 8) == prompt
        assert each.ask(QUESTION, max_new_tokens=8).token_ids == expected


@pytest.mark.parametrize("name", LEARNERS)
def test_a_method_that_learns_from_prompt_queries_reads_again(name: str, llama: Path, saved: Path) -> None:
    plan = plan_of(name)
    with refused("other_model: learns from the queries of the prompt, which are not saved"):
        LLM(llama, plan).open(saved)
    llm, read = LLM(llama, QUEST), []
    opened = llm.open(saved, progress=lambda done, total: read.append(done))
    expected = llm.read(TEXT).ask(QUESTION, plan=plan, max_new_tokens=6).token_ids
    assert opened.ask(QUESTION, plan=plan, max_new_tokens=6).token_ids == expected
    assert read
    assert opened.open_s == 0


@pytest.mark.parametrize("name", LEARNERS)
def test_a_document_read_for_such_a_method_is_saved_for_others(name: str, llama: Path, path: Path) -> None:
    llm = LLM(llama, plan_of(name))
    document = llm.read(TEXT)
    document.ask(QUESTION, max_new_tokens=4)
    document.save(path)
    opened = llm.open(path, plan=QUEST, progress=unread)
    assert torch.equal(logits(llm, opened, QUEST), logits(llm, llm.read(TEXT), QUEST))


def test_dropped_tokens_cannot_be_saved(llama: Path, path: Path) -> None:
    llm = LLM(llama, "streaming_llm:budget=128:evict=true:dense_layers=none")
    document = llm.read(TEXT)
    document.ask(QUESTION, max_new_tokens=4)
    with refused("evicted_tokens"):
        document.save(path)
    for method in ("keydiff", "h2o"):
        dropping = LLM(llama, f"both={method}:{BUDGET}:evict=true").read(TEXT)
        with refused("unsupported_plan: drops tokens of the document"):
            dropping.save(path)
    with refused("unsupported_plan: learns from the document's queries"):
        LLM(llama, f"prefill=h2o:{BUDGET},decode=h2o:{BUDGET}").read(TEXT).save(path)
    assert not path.exists()


def test_a_document_made_of_tokens_has_no_text_to_save(llama: Path, path: Path) -> None:
    llm = LLM(llama, QUEST)
    with refused("unsupported_call"):
        Document(llm, [5] * 300, lambda question: [5] * 301, llm.plan).save(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "other_model: Give dtype=float32"),
        ({"chunk_size": 100}, "other_model: this LLM has chunk_size=100"),
        ({"plan": f"{QUOKA},decode={QUEST}"}, "other_model: the plan prefill=quoka"),
    ],
)
@pytest.mark.usefixtures("no_weights")
def test_another_way_of_reading_is_refused_before_weights_are_loaded(
    options: dict[str, Any], message: str, llama: Path, saved: Path
) -> None:
    llm = LLM(llama, **{"plan": QUEST, **options})
    with refused(message):
        llm.open(saved)


@pytest.mark.usefixtures("no_weights")
def test_another_model_is_refused_before_weights_are_loaded(llama: Path, chatty: Path, saved: Path) -> None:
    llm = LLM(chatty, QUEST)
    with refused(f"other_model: {chatty.name}"):
        llm.open(saved)


@pytest.mark.parametrize("change", ["seed", "config", "tokenizer"])
def test_a_change_of_the_files_is_noticed(
    change: str, llama: Path, saved: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    directory = tmp_path / "elsewhere" / llama.name
    shutil.copytree(llama, directory)
    LLM(directory, QUEST).open(saved)  # a copy is the same model
    if change == "seed":
        write_model(directory, seed=2)
    name = "config.json" if change == "config" else "tokenizer_config.json"
    content = json.loads((directory / name).read_text())
    content |= {"rms_norm_eps": 0.1} if change == "config" else {"model_max_length": 77}
    if change != "seed":
        (directory / name).write_text(json.dumps(content))
    request.getfixturevalue("no_weights")
    llm = LLM(directory, QUEST)
    with refused("other_model"):
        llm.open(saved)


def test_every_damaged_byte_is_noticed(llama: Path, saved: Path, path: Path) -> None:
    llm, content = LLM(llama, QUEST), saved.read_bytes()
    llm.open(saved)
    places = [0, 3, 8, 20, 200, *range(1000, len(content), len(content) // 60), len(content) - 1]
    for place in places:
        for byte in (content[place] ^ 1, content[place] ^ 0x80):
            path.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
            with pytest.raises((DamagedFile, WrongFile)):
                llm.open(path)


def test_a_truncated_or_longer_file_is_refused(llama: Path, saved: Path, path: Path) -> None:
    llm, content = LLM(llama, QUEST), saved.read_bytes()
    for length in (0, 4, 8, 30, 500, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises((DamagedFile, WrongFile)):
            llm.open(path)
    path.write_bytes(content + b"\0")
    with refused("damaged_file: is damaged"):
        llm.open(path)


@pytest.mark.usefixtures("no_weights")
def test_what_is_no_saved_document_is_refused(llama: Path, path: Path, tmp_path: Path) -> None:
    llm = LLM(llama, QUEST)
    path.write_text(TEXT)
    with refused("wrong_file"):
        llm.open(path)
    with refused("wrong_file"):
        llm.open(llama / "model.safetensors")
    with refused("missing_file: is a directory"):
        llm.open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with refused("missing_file: is no file"):
        llm.open(tmp_path / "pipe")
    with refused("missing_file: does not exist"):
        llm.open(str(tmp_path / "none.kvsift"))


@pytest.mark.parametrize(
    ("written", "remedy"),
    [
        (5, r"this kvsift reads format 4\. Update kvsift"),
        (1, r"can end turns\. Read its text again and save it"),
        (2, r"summaries have another layout\. Read its text again and save it"),
        (3, r"summaries have another layout\. Read its text again and save it"),
    ],
)
def test_another_format_is_refused(
    llama: Path, path: Path, monkeypatch: pytest.MonkeyPatch, written: int, remedy: str
) -> None:
    llm = LLM(llama, QUEST)
    with monkeypatch.context() as patch:
        patch.setattr(saved_header, "FORMAT", written)
        llm.read(TEXT).save(path)
    with refused(f"wrong_file: {written}"):
        llm.open(path)


def test_safetensors_reads_the_file(saved: Path) -> None:
    with safe_open(saved, framework="pt") as file:
        assert bytes(file.get_tensor("context").tolist()).decode() == TEXT
        assert file.get_tensor("layers.0.keys").shape == (2, len(file.get_tensor("tokens")), 16)
        assert "layers.2.summary.minmax.16" in file.keys()  # noqa: SIM118 (it is no mapping)


def test_a_full_disk_leaves_nothing_behind(llama: Path, path: Path) -> None:
    document = LLM(llama, QUEST).read(TEXT)
    for before in ([], [path]):
        with file_size_limit(100_000), refused("unwritable_file: the disk is full"):
            document.save(path)
        assert list(path.parent.iterdir()) == before
        document.save(path)
    assert LLM(llama, QUEST).open(path).ask(QUESTION, max_new_tokens=2).token_ids


@pytest.mark.usefixtures("no_weights")
def test_a_disk_without_room_is_refused_before_reading(llama: Path, path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore
    llm = LLM(llama, QUEST)
    with refused("unwritable_file: 0.0"):
        llm.read(TEXT).save(path)


def test_only_the_same_document_is_replaced(llama: Path, path: Path, saved: Path) -> None:
    llm = LLM(llama, QUEST)
    others = {"notes": b"mine", "another": saved.read_bytes(), "damaged": saved.read_bytes()[:5000]}
    for number, (name, content) in enumerate(others.items()):
        path.write_bytes(content)
        text = TEXT if number != 1 else text_of(300)
        with refused(f"unwritable_file: {path}"):
            llm.read(text).save(path)
        assert path.read_bytes() == content, name
    shutil.copy(saved, path)
    os.utime(path, (1, 1))
    llm.read(TEXT).save(path)
    assert path.stat().st_mtime > 1
    path.write_bytes(b"")  # as mktemp makes it
    llm.read(TEXT).save(path)
    assert saved_header.is_saved_document(path)


def test_an_interrupted_save_leaves_the_old_file(
    llama: Path, path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(saved, path)
    document = LLM(llama, QUEST).read(TEXT)

    def interrupt(*arguments: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvsift.api.saved_document.zlib.crc32", interrupt)
    with pytest.raises(KeyboardInterrupt):
        document.save(path)
    assert [file.read_bytes() for file in path.parent.iterdir()] == [saved.read_bytes()]


@pytest.mark.usefixtures("no_weights")
def test_places_where_no_file_can_be_written_are_refused_before_reading(llama: Path, tmp_path: Path) -> None:
    llm = LLM(llama, QUEST)
    document = llm.read(TEXT)
    for path in (tmp_path, "/dev/null", tmp_path / "none" / "d.kvsift", tmp_path / ("x" * 300)):
        with refused(f"unwritable_file: {path}"):
            document.save(path)


def test_a_link_is_written_through(llama: Path, path: Path, saved: Path) -> None:
    (path.parent / "store").mkdir()
    link, target = path, path.parent / "store" / "target.kvsift"
    link.symlink_to(target)
    LLM(llama, QUEST).open(saved).save(link)
    assert link.is_symlink()
    assert target.read_bytes() == saved.read_bytes()


def test_threads_ask_while_another_saves(llama: Path, path: Path, saved: Path) -> None:
    llm = LLM(llama, QUEST)
    expected = llm.open(saved).ask(QUESTION, max_new_tokens=8).token_ids
    document = llm.open(saved, progress=unread)

    def ask(number: int) -> list[int]:
        return document.ask(QUESTION, plan=QUEST, max_new_tokens=8).token_ids

    with ThreadPoolExecutor(6) as threads:
        saves = [threads.submit(document.save, path) for _ in range(4)]
        assert list(threads.map(ask, range(8))) == [expected] * 8
        assert [each.result() for each in saves] == [None] * 4
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == saved.read_bytes()


def test_a_document_is_saved_from_on_text(llama: Path, saved: Path, path: Path) -> None:
    document, first = LLM(llama, QUEST).open(saved), list[str]()

    def save(piece: str) -> None:
        if not first:
            document.save(path)
        first.append(piece)

    expected = document.ask(QUESTION, max_new_tokens=8).token_ids
    assert document.ask(QUESTION, max_new_tokens=8, on_text=save).token_ids == expected
    assert LLM(llama, QUEST).open(path).ask(QUESTION, max_new_tokens=8).token_ids == expected


def test_a_file_is_opened_twice_and_by_two_processes(llama: Path, saved: Path) -> None:
    llm = LLM(llama, QUEST, dense_below=0)
    one, other = llm.open(saved), llm.open(saved)
    expected = one.ask(QUESTION, max_new_tokens=8).token_ids
    assert other.ask(QUESTION, max_new_tokens=8).token_ids == expected
    code = (
        f"import kvsift; llm = kvsift.LLM({str(llama)!r}, {QUEST!r}, device='cpu', dense_below=0);"
        f"print(llm.open({str(saved)!r}).ask({QUESTION!r}, max_new_tokens=8).token_ids)"
    )
    assert json.loads(stories.run(code).stdout) == expected


@pytest.mark.parametrize("path_name", ["eager", "composed"])
def test_opened_documents_share_a_pool_with_others(path_name: str, llama: Path, path: Path) -> None:
    texts, llm = [text_of(900), text_of(301), text_of(650)], LLM(llama, QUEST, path=path_name)
    expected = [llm.read(text).ask(QUESTION, max_new_tokens=8).token_ids for text in texts]
    llm.read(texts[2]).save(path)
    documents = [llm.read(text) for text in texts[:2]]
    assert [each.ask(QUESTION, max_new_tokens=8).token_ids for each in documents] == expected[:2]
    del documents[0]  # its pages are free, in pieces
    gc.collect()
    documents.append(llm.open(path, progress=unread))
    assert [each.ask(QUESTION, max_new_tokens=8).token_ids for each in documents] == expected[1:]
    documents[-1].save(path.with_name("again.kvsift"))
    assert path.with_name("again.kvsift").read_bytes() == path.read_bytes()


def test_another_page_size_is_computed(llama: Path, saved: Path) -> None:
    plan = f"{QUEST}:page_size=32"
    llm = LLM(llama, plan)
    assert torch.equal(logits(llm, llm.open(saved, progress=unread), plan), logits(llm, llm.read(TEXT), plan))


def test_saved_summaries_are_not_computed_again(llama: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(llama, QUEST)
    llm.open(saved)  # the trial of the model is over
    with monkeypatch.context() as patch:
        patch.setattr("kvsift.stores.paged.summarise", None)
        opened = llm.open(saved)
    assert opened.ask(QUESTION, max_new_tokens=2).token_ids


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("placement", ["device", "split", "offload"])
def test_a_gpu_opens_what_it_saved(placement: str, llama: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # in spite of on_the_cpu
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    llm = LLM(llama, QUEST, device="cuda", dtype="bfloat16", placement=placement, dense_below=0)
    document = llm.read(TEXT)
    document.save(path)
    opened = llm.open(path, progress=unread)
    answers = [each.ask(QUESTION, max_new_tokens=16) for each in (document, opened)]
    assert answers[0].token_ids == answers[1].token_ids
