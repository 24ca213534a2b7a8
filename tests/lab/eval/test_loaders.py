"""Local files in their published formats: what they become, and what is said of a bad line."""

import json
from pathlib import Path
from typing import Any

import pytest
from kvsift_lab.eval.loaders import load_file
from kvsift_lab.eval.loaders.longbench import FORMATS
from kvsift_lab.eval.loaders.reading import ContextFitter
from kvsift_lab.eval.recipe import EvalRecipe
from kvsift_lab.eval.scorers import SCORERS
from kvsift_lab.eval.tasks import Question, Sample
from kvsift_lab.eval.tasks.perplexity import NUM_TARGETS
from lab.eval.task_tools import BOS, encode
from refusals import refused

from kvsift.errors import UnreadableFile, WrongFile

RULER_LINE = {"index": 0, "input": "Question: an example\nA text.\nQuestion: which ones?", "outputs": ["ABC", "DEF"]}


LONGBENCH_LINE = {
    "input": "Where is {it}?", "context": "Über Łódź: it is in Oslo.", "answers": ["Oslo", "in Oslo"],
    "dataset": "hotpotqa", "language": "en", "all_classes": None,
}  # fmt: skip
OWN_LINE = {"context": "Oslo is a city.", "question": "Which?", "answer": "Oslo"}


def write(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def only(samples: list[Sample]) -> tuple[Sample, Question]:
    (made,) = samples
    (question,) = made.questions
    return made, question


# RULER


@pytest.mark.parametrize("name", ["vt.jsonl", "vt/validation.jsonl"])
def test_ruler_splits_a_prompt_before_its_last_question(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, RULER_LINE | {"answer_prefix": " Answer: they are"})
    made, question = only(load_file("ruler", path, encode, prefix=(BOS,)))
    assert made.context == "Question: an example\nA text."
    assert made.context_ids == (BOS, *encode(made.context))
    assert question.tail == "\nQuestion: which ones? Answer: they are"
    assert (question.references, question.scorer) == (("ABC", "DEF"), "string_match_all")
    assert (question.max_new_tokens, question.stop) == (30, None)


# LongBench


def test_longbench_puts_context_and_input_into_a_prompt(tmp_path: Path) -> None:
    made, question = only(load_file("longbench", write(tmp_path / "any.jsonl", LONGBENCH_LINE), encode))
    before, after = FORMATS["hotpotqa"].prompt.split("{context}")
    assert made.task == "hotpotqa"
    assert made.context == before + LONGBENCH_LINE["context"]
    assert question.tail == after.replace("{input}", "Where is {it}?")
    assert question.tail.endswith("\n\nQuestion: Where is {it}?\nAnswer:")
    assert (question.references, question.scorer) == (("Oslo", "in Oslo"), "qa_f1")
    assert (question.max_new_tokens, made.notes) == (32, ())
    assert bytes(made.context_ids).decode() == made.context  # not ASCII


def test_every_longbench_data_set_has_a_prompt_and_a_scorer() -> None:
    assert len(FORMATS) == 21
    assert all(form.prompt.count("{context}") == 1 and form.scorer in SCORERS for form in FORMATS.values())
    always_the_same = {name for name, form in FORMATS.items() if "{input}" not in form.prompt}
    assert always_the_same == {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}


# InfiniteBench


def test_infinitebench_retrieval(tmp_path: Path) -> None:
    line = {"id": 0, "context": "The pass key is 71432.", "input": "What is it?", "answer": ["71432"], "options": []}
    made, question = only(load_file("infinitebench", write(tmp_path / "passkey.jsonl", line), encode))
    assert question.tail == "\n\nWhat is it?\n\nThe pass key is"
    assert (question.references, question.scorer, question.max_new_tokens) == (("71432",), "first_number", 6)
    assert made.context.endswith("\n\nThe pass key is 71432.")


def test_infinitebench_calls_are_found_in_the_input(tmp_path: Path) -> None:
    line = {"context": "def func_1(x): ...", "input": "Give func_1(-3), please.", "answer": 9}
    _, question = only(load_file("infinitebench", write(tmp_path / "code_run.jsonl", line), encode))
    assert question.tail.endswith("Work out the exact value of func_1(-3). The value of func_1(-3) is")
    assert question.references == ("9",)


# PG19, SQuAD, HotpotQA


def test_pg19_predicts_what_follows_the_beginning_of_each_book(tmp_path: Path) -> None:
    book = "\n\nPREFACE\n" + "\n".join(f"Line {i} of the böok." for i in range(200))
    (tmp_path / "b.txt").write_text(book, encoding="utf-8")
    (tmp_path / "a.txt").write_text("Short. " * 60, encoding="utf-8")
    (tmp_path / "notes.md").write_text("not a book")
    short, long = load_file("pg19", tmp_path, encode, max_tokens=1000, prefix=(BOS,))
    assert len(long.context_ids) + len(long.targets) == 1000
    assert bytes((*long.context_ids[1:], *long.targets)).decode(errors="ignore") in book
    assert long.notes == ()
    assert short.notes == ("the book has about 413 tokens only",)  # 420 bytes and bos, 8 spared
    assert len(short.context_ids) == 413 - NUM_TARGETS
    assert load_file("pg19", tmp_path / "b.txt", encode, max_tokens=1000, prefix=(BOS,)) == [long]
    with refused("too_short"):
        load_file("pg19", tmp_path, encode, max_tokens=200)


def test_so_many_tokens_are_predicted_after_a_text_as_the_recipe_asks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Some words. " * 60, encoding="utf-8")
    [sample] = load_file("texts", tmp_path, encode, max_tokens=300, targets=20)
    assert (len(sample.context_ids), len(sample.targets)) == (280, 20)
    text = f'plans = ["quest:budget=256"]\n[[files]]\nkind = "texts"\npath = "{tmp_path}"\nname = "own"\ntargets = '
    (tmp_path / "r.toml").write_text(text + "20")
    assert EvalRecipe.load(tmp_path / "r.toml").files[0].targets == 20
    (tmp_path / "r.toml").write_text(text.replace("texts", "jsonl") + "20")
    with refused("invalid_value"):
        EvalRecipe.load(tmp_path / "r.toml")


def test_squad_becomes_numbered_documents_of_the_length(tmp_path: Path) -> None:
    def asked(i: int, possible: bool = True) -> dict[str, Any]:
        answers = [{"text": f"answer {i}"}, {"text": f"the answer {i}"}]
        return {"question": f"What is {i}?", "is_impossible": not possible, "answers": answers if possible else []}

    def paragraph(i: int) -> dict[str, Any]:
        return {"context": f"The {i}th thing is answer {i}.", "qas": [asked(i), asked(99, possible=False)]}

    articles = [{"paragraphs": [paragraph(10 * a + i) for i in range(3)]} for a in range(4)]
    (tmp_path / "squad.json").write_text(json.dumps({"data": articles}))
    samples = load_file("squad", tmp_path / "squad.json", encode, max_tokens=900)
    assert len(samples) == 12  # those that have an answer
    for made, number in zip(samples, [10 * a + i for a in range(4) for i in range(3)]):
        (question,) = made.questions
        assert len(made.context_ids) == 900
        assert made.context.count(f"\nThe {number}th thing is answer {number}.") >= 1
        assert question.references == (f"answer {number}", f"the answer {number}")
        assert f"answer {number}." in made.context[round(question.depth * 900) :][:60]
        near = [10 * (number // 10) + i for i in range(3)]
        assert all(f"The {each}th thing" in made.context for each in near)  # its article's come before others


def test_hotpotqa_has_all_documents_of_its_question(tmp_path: Path) -> None:
    def asked(i: int) -> dict[str, Any]:
        context = [[f"Title {i}-{k}", ["One. ", f"Two {i}-{k}."]] for k in range(10)]
        return {"question": f"Q{i}?", "answer": f"Two {i}-3", "context": context}

    (tmp_path / "hotpot.json").write_text(json.dumps([asked(i) for i in range(3)]))
    samples = load_file("hotpotqa", tmp_path / "hotpot.json", encode, limit=2, max_tokens=1200)
    assert len(samples) == 2
    assert all(f"Title 1-{k}\nOne. Two 1-{k}." in samples[1].context for k in range(10))
    assert samples[1].questions[0].scorer == "string_match_part"


@pytest.mark.parametrize("text", ["[", '{"data": 5}', '{"versions": []}', '[{"question": "?"}]', "[5]"])
@pytest.mark.parametrize("kind", ["squad", "hotpotqa"])
def test_other_json_is_refused(tmp_path: Path, kind: str, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises((UnreadableFile, WrongFile), match=r"a\.json"):
        load_file(kind, tmp_path / "a.json", encode)


# Any file


def test_a_long_context_loses_its_middle() -> None:
    question = Question("asks", "", 0.5, is_framed=False)
    # half of 16 is 8: bos and 7 from the start; 4 and the 4 of the question from the end
    made = ContextFitter(encode, 16, (BOS,)).sample("any", "abcdefghijklmnopqrst", question)
    assert made.context == "abcdefg" + "qrst"
    assert made.context_ids == (BOS, *b"abcdefgqrst")
    assert made.notes == ("the middle of the context was left out: 16 of 25 prompt tokens remain",)
    whole = ContextFitter(encode, 25, (BOS,)).sample("any", "abcdefghijklmnopqrst", question)
    assert (whole.context, whole.notes) == ("abcdefghijklmnopqrst", ())


def test_a_question_longer_than_half_is_refused() -> None:
    with refused("invalid_value"):
        ContextFitter(encode, 16, ()).sample(
            "any", "abcdefghijklmnopqrst", Question("asks more", "", 0.5, is_framed=False)
        )


def infinite(**line: Any) -> dict[str, Any]:
    return {"context": "a", "input": "b", **line}


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("ruler/niah_single1", RULER_LINE, "unknown_name"),  # it must be named after its task
        ("ruler/vt", RULER_LINE | {"input": "A"}, "wrong_file: 'input' of vt must have its question after the context"),
        ("longbench/a", LONGBENCH_LINE | {"dataset": "hotpot"}, "wrong_file: 'hotpot'; did you mean 'hotpotqa'"),
        ("longbench/a", LONGBENCH_LINE | {"dataset": None}, "wrong_file: 'dataset' must be text, not None"),
        ("longbench/a", LONGBENCH_LINE | {"answers": "Oslo"}, "wrong_file: 'answers' must be a list of texts"),
        ("longbench/a", LONGBENCH_LINE | {"answers": []}, "wrong_file: 'answers' must be a list of texts"),
        ("longbench/a", LONGBENCH_LINE | {"context": 5}, "wrong_file: 'context' must be text, not 5"),
        (
            "longbench/a", LONGBENCH_LINE | {"dataset": "trec", "answers": ["a", "b"], "all_classes": ["a"]},
            "wrong_file: a classification has one answer",
        ),
        ("longbench/a", LONGBENCH_LINE | {"dataset": "trec", "answers": ["a"]}, "wrong_file: 'all_classes' must be"),
        ("longbench/a", {"dataset": "hotpotqa"}, "wrong_file: no 'answers'; there are 'dataset'"),
        ("longbench/a", ["a"], "wrong_file: a.jsonl"),
        ("infinitebench/math_calk", {}, "unknown_name: code_debug, code_run, kv_retrieval, longbook_choice_eng, lon"),
        ("infinitebench/passkey", infinite(), "wrong_file: must be text, a number or a list of these, not None"),
        ("infinitebench/passkey", infinite(answer=[]), "wrong_file: 'answer' must be text"),
        ("infinitebench/math_find", infinite(answer=1), "wrong_file: 'input' must have something like"),
        ("infinitebench/code_debug", infinite(answer="x", options=["x"]), "wrong_file: four texts; there are 1"),
        ("infinitebench/code_debug", infinite(answer="x", options=list("abcd")), "wrong_file: 'x' is none"),
        ("jsonl/a", OWN_LINE | {"answer": 5}, "wrong_file: 'answer' must be text, not 5"),
        ("jsonl/a", OWN_LINE | {"answer": []}, "wrong_file: 'answer' must be a list of texts, at least one, not []"),
        ("jsonl/a", OWN_LINE | {"question": " "}, "wrong_file: 'question' is empty"),
        ("jsonl/a", OWN_LINE | {"context": None}, "wrong_file: 'context' must be text, not None"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, name: str, line: Any, says: str) -> None:
    with refused(says):
        load_file(name.partition("/")[0], write(tmp_path / f"{name}.jsonl", line), encode)


@pytest.mark.parametrize("raw", [b"{", b"\xff\xfe", b"{'a': 1}", b'{"a": 1} {"b": 2}', b"\n", None])
def test_what_is_no_file_of_lines_is_refused(tmp_path: Path, raw: bytes | None) -> None:
    if raw is not None:
        (tmp_path / "a.jsonl").write_bytes(json.dumps(LONGBENCH_LINE).encode() * (raw != b"\n") + b"\n" + raw + b"\n")
    with refused("missing_file" if raw is None else "wrong_file: a.jsonl"):
        load_file("longbench", tmp_path / "a.jsonl", encode)
    for kind in ("longbench", "pg19"):
        with refused("wrong_file"):
            load_file(kind, tmp_path / "..", encode)


def test_what_is_asked_of_a_file_must_make_sense(tmp_path: Path) -> None:
    with refused("unknown_name: did you mean 'longbench'"):
        load_file("long_bench", tmp_path, encode)
    with refused("invalid_value: limit=0"):
        load_file("longbench", tmp_path, encode, limit=0)


# own questions


def test_own_questions_need_no_faked_benchmark(tmp_path: Path, model: Path) -> None:
    one = {"context": "The mill grinds nine sacks. Oslo is a city.", "question": "How many sacks?", "answer": "nine"}
    two = one | {"question": "Which city?", "answer": ["Oslo", "Kristiania"]}
    other = {"context": "Nothing here.", "question": "What?", "answer": "nothing"}
    path = write(tmp_path / "mine.jsonl", one, two, other)
    (first, second) = load_file("jsonl", path, encode, prefix=(BOS,))
    assert [question.tail for question in first.questions] == [
        "\n\nQuestion: How many sacks?\nAnswer:",
        "\n\nQuestion: Which city?\nAnswer:",
    ]
    assert [question.references for question in first.questions] == [("nine",), ("Oslo", "Kristiania")]
    assert (first.context, first.context_ids) == (one["context"], (BOS, *encode(one["context"])))
    assert second.context == "Nothing here."
    recipe = EvalRecipe.from_table(
        {"plans": ["dense", "quest:budget=128"], "files": [{"kind": "jsonl", "path": str(path)}], "model": str(model)}
    )
    assert (recipe.columns, recipe.files[0].name) == ((128,), "mine")
