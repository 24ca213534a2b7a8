"""kvsift ask: one JSON document with every number, the same answers however a plan is spelt, and no silent dense."""

import json
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from cli.watched import Outcome, Refused, Run

from kvsift import LLM
from kvsift.api.answer import Answer
from kvsift.api.document import Document
from kvsift.cli import comparison
from kvsift.cli.printing import plain
from kvsift.models.hf.model_directory import ModelDirectory

LOAD = ModelDirectory.load  # which ``refused`` replaces
PLAN = "quest:budget=128:window=16:dense_layers=none"
SENTENCE = "The mill by the river grinds corn every day of the year."
COVERING = "quest:budget=2048:dense_layers=none"


PROOF = {
    "density", "kv_bytes_dense", "kv_bytes_read", "prompt_tokens", "recall", "recovery", "tpot_s", "ttft_s",
    "visible_tokens",
}  # fmt: skip
KEYS = {"answers", "compare", "device", "document_tokens", "dtype", "model", "plan", "read_density", *PROOF}


ANSWER_KEYS = {"question", "text", "token_ids", *PROOF}


@pytest.fixture
def ask(run: Run, model: Path, text: Path) -> Run:
    """Ask "Why?", or whatever is given, of the manual."""

    def ask(*options: object, question: tuple[str, ...] = ("Why?",)) -> Outcome:
        questions = [part for each in question for part in ("--question", each)]
        return run("ask", "--model", model, "--context", text, *questions, "--max-new-tokens", 6, *options)

    return ask


def untimed(document: Any) -> Any:
    """A document without its seconds and its memory, which depend on the machine and on what else was asked."""
    if isinstance(document, dict):
        held = ("kv_bytes", "peak_memory_bytes")
        return {k: untimed(v) for k, v in document.items() if not k.endswith("_s") and k not in held}
    return [untimed(each) for each in document] if isinstance(document, list) else document


def test_json_holds_every_number_and_stdout_nothing_else(ask: Run) -> None:
    outcome = ask("--plan", PLAN, "--compare", "dense", "--json")
    document = outcome.document
    assert outcome.err == ""
    assert document.keys() >= KEYS
    assert document["answers"][0].keys() >= ANSWER_KEYS
    assert document["plan"] == PLAN
    assert (document["model"], document["device"], document["dtype"]) == ("tiny", "cpu", "float32")
    assert document["prompt_tokens"] == 901 + len("\n\nQuestion: Why?\nAnswer:")
    assert 100 < document["visible_tokens"] <= 128
    assert document["density"] == pytest.approx(document["visible_tokens"] / document["prompt_tokens"], rel=0.01)
    assert 0 < document["kv_bytes_read"] < document["kv_bytes_dense"]
    assert 0 < document["recovery"] < 1
    assert document["tpot_s"] > 0
    assert document["ttft_s"] == pytest.approx(document["read_s"] + document["build_s"] + document["ttft_cached_s"])


def test_compare_answers_under_the_other_plan_too(ask: Run) -> None:
    document = ask("--plan", PLAN, "--compare", "dense", "--json").document
    [compare] = document["compare"]
    assert (compare["plan"], compare["density"], compare["recovery"]) == ("dense", 1.0, None)
    assert compare["kv_bytes_read"] == compare["kv_bytes_dense"] == document["kv_bytes_dense"]
    assert untimed(compare["answers"]) == untimed(ask("--plan", "dense", "--json").document["answers"])
    assert ask("--plan", PLAN, "--json").document["compare"] == []


def test_exact_answers_stand_beside_plain_dense_ones(ask: Run) -> None:
    document = ask("--plan", PLAN, "--exact", "--compare", "dense", "--json").document
    [exact], [dense] = document["answers"], document["compare"][0]["answers"]
    assert exact["token_ids"] == dense["token_ids"]
    assert sum(exact["exact"]["verified"].values()) > 0
    assert dense["exact"] is None
    [alone] = ask("--plan", "dense", "--exact", "--json").document["answers"]
    assert alone["token_ids"] == dense["token_ids"]
    assert alone["exact"]["drafted"] == 0


def test_how_the_document_was_read_is_proved_too(ask: Run) -> None:
    sifted = "prefill=quoka:budget=64:chunk=64:window=16:dense_layers=none"
    document = ask("--plan", sifted, "--compare", "dense", "--json").document
    assert 0.1 < document["read_density"] < 0.5
    assert document["compare"][0]["read_density"] == 1
    shown = ask("--plan", sifted).out
    assert "prefill density" in shown
    assert f"{100 * document['read_density']:.1f} %" in shown


@pytest.mark.parametrize(
    "content",
    [
        f"plan = '{PLAN}'\n",
        "[plan]\nmethod = 'quest'\nbudget = 128\nwindow = 16\ndense_layers = []\n",
        f"[plan]\nprefill = 'dense'\ndecode = '{PLAN}'\n",
        "[plan.decode]\nmethod = 'quest'\nbudget = 128\nwindow = 16\ndense_layers = []\n",
    ],
)
def test_a_plan_in_a_file_is_the_plan_in_text(ask: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.toml").write_text(content)
    from_file = ask("--plan", "plan.toml", "--json").document
    from_text = ask("--plan", PLAN, "--json").document
    assert from_file["plan"].removeprefix("prefill=dense,decode=") == from_text["plan"]
    assert untimed(from_file["answers"]) == untimed(from_text["answers"])


def test_a_budget_above_the_context_is_said_aloud(ask: Run) -> None:
    outcome = ask("--plan", COVERING, "--json")
    document = outcome.document
    assert document["density"] == 1
    assert outcome.err == (
        f"kvsift: {COVERING} skipped nothing in decode: the {document['prompt_tokens'] + 6:,} tokens of context are "
        "within its budget, so it does what dense attention does.\n"
    )


def test_only_what_is_not_to_be_expected_is_a_warning(ask: Run) -> None:
    outcome = ask("--plan", "quest:budget=128:window=16:dense_layers=0+1+2", "--json")
    assert outcome.err.startswith("kvsift: WARNING: the plan quest:budget=128:window=16:dense_layers=0+1+2 skipped ")
    assert outcome.err.endswith("The context is shorter than the budget, or every layer is in dense_layers.\n")


def test_a_prompt_of_one_segment_is_named_as_the_reason(ask: Run) -> None:
    plan = "quoka:budget=128:chunk=4096:dense_layers=none"
    outcome = ask("--plan", f"prefill={plan}", "--question-phase", "decode", "--chunk-size", 4096, "--json")
    assert outcome.err == (
        f"kvsift: {plan} skipped nothing in prefill: up to 4,096 queries share a selection, and no such segment of "
        f"the {outcome.document['prompt_tokens']:,} tokens of prompt begins beyond its budget, so it does what dense "
        "attention does.\n"
    )


def test_a_plan_that_takes_longer_than_dense_says_so_beside_it(ask: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {PLAN: 0.09, "dense": 0.083}
    summary = comparison.Column.summary
    monkeypatch.setattr(
        comparison.Column, "summary", lambda column: {**summary(column), "tpot_s": times[column.answers[0].plan]}
    )
    out = ask("--plan", PLAN, "--compare", "dense").out
    assert f"a token took 90.0 ms under {PLAN} and 83.0 ms under dense. Plans pay in longer contexts; " in out
    assert "a token took" not in ask("--plan", "dense", "--compare", "dense").out
    assert "a token took" not in ask("--plan", PLAN, "--exact", "--compare", "dense").out
    read = "prefill=quoka:budget=64:chunk=64:window=16:dense_layers=none"
    times |= {read: 0.09, COVERING: 0.09}
    assert "a token took" not in ask("--plan", read, "--compare", "dense").out, "it decodes as dense does"
    assert "a token took" not in ask("--plan", COVERING, "--compare", "dense").out, "and so does this one"
    times["dense"] = 0.088
    assert "a token took" not in ask("--plan", PLAN, "--compare", "dense").out, "within the noise"
    assert "a token took" not in ask("--plan", PLAN).out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--plan", COVERING], f"kvsift: the plan {COVERING} skipped nothing in decode"),
        (["--plan", PLAN, "--compare", COVERING], f"kvsift: the plan {COVERING} skipped nothing in decode"),
        (["--plan", "prefill=quoka:budget=2048:dense_layers=none"], "skipped nothing in prefill"),
        (["--plan", COVERING, "--exact"], None),
        (["--plan", PLAN], None),
        (["--plan", "dense"], None),
        (["--plan", "streaming_llm:budget=64:dense_layers=0"], None),
    ],
)
def test_strict_fails_when_nothing_was_skipped_and_still_answers(
    ask: Run, options: list[str], says: str | None
) -> None:
    outcome = ask(*options, "--json", "--strict")
    assert '"answers"' in outcome.out
    assert (outcome.code, outcome.err.count("\n")) == (2 if says else 0, 1 if says else 0)
    assert not says or says in outcome.err


def test_a_question_may_be_sifted_and_not_probed(ask: Run) -> None:
    document = ask("--plan", PLAN, "--question-phase", "decode", "--probe-every", 0, "--json").document
    (phases,) = document["phases"]
    assert phases["prefill"]["queries"] == 0
    assert phases["decode"]["queries"] == 3 * (len("Why?\nAnswer:") + 5)
    assert document["recovery"] is document["recall"] is None


def test_for_a_person_there_is_a_table_with_questions_answers_and_proof(
    ask: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    outcome = ask("--plan", PLAN, "--compare", "dense", question=("Why?", "How many sacks?"))
    assert (outcome.code, outcome.err) == (0, "")
    for shown in ("Why?", "How many sacks?", PLAN, "dense", "TTFT", "TPOT", "density", "100.0 %", "KV cache"):
        assert shown in outcome.out


def test_the_proof_has_eight_rows_of_the_field_and_verbose_has_all(ask: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")

    def rows(*options: object) -> list[str]:
        table = ask("--plan", PLAN, *options).out.rpartition("┏")[2].splitlines()
        return [line.split("│")[1].strip() for line in table if line.startswith("│")]

    main = rows()
    assert main == [
        "TTFT", "TTFT (document cached)", "TPOT", "visible tokens (sparse layers)", "density (all layers)",
        "KV bytes read (with index)", "attention mass recovered", "KV cache",
    ]  # fmt: skip
    assert len(rows("--plan", "prefill=quoka:budget=64:chunk=64:window=16:dense_layers=none")) == 8
    assert {*main, "top-10 token recall", "decode path", "finish reason"} < {*rows("--verbose")}
    assert rows("--quiet") == []


def test_escapes_of_a_terminal_are_written_out(ask: Run) -> None:
    for compare in ((), ("--compare", "dense")):
        outcome = ask("--plan", PLAN, *compare, question=("Why\x1b[2J\x1b]0;mine\x07?",))
        assert not set("\x1b\x07") & set(outcome.out + outcome.err)
        assert "\\x1b[2J" in "".join(outcome.out.split("\n"))
    assert ask("--json", question=("Why\x1b?",)).document["answers"][0]["question"] == "Why\x1b?"


def test_a_question_that_is_no_text_is_refused(refused: Refused, model: Path, text: Path) -> None:
    said = refused("ask", "--model", model, "--context", text, "--question", "Why \udcff?")
    assert said.startswith("the question is not UTF-8 text (character 4 is ")


def test_an_answer_that_was_cut_says_so(ask: Run) -> None:
    assert "[cut after 6 tokens]" in ask("--plan", PLAN, "--raw").out
    answer = ask("--plan", PLAN, "--raw", "--json").document["answers"][0]
    assert (answer["finish_reason"], len(answer["token_ids"])) == ("length", 6)


def test_quiet_prints_answers_alone(ask: Run) -> None:
    answers = [each["text"] for each in ask("--plan", PLAN, "--json", question=("Why?", "Who?")).document["answers"]]
    outcome = ask("--plan", PLAN, "--quiet", question=("Why?", "Who?"))
    assert outcome.out == "".join(f"{plain(text) or '(nothing)'}\n" for text in answers)
    assert outcome.err == "[cut after 6 tokens]\n" * 2


def test_a_saved_document_is_asked_again(ask: Run, run: Run, model: Path) -> None:
    first = ask("--plan", PLAN, "--save", "manual.kvsift", "--json").document
    again = ("ask", "--model", model, "--context", "manual.kvsift", "--question", "Why?", "--max-new-tokens", 6)
    second = run(*again, "--plan", PLAN, "--json").document
    assert untimed(second) == untimed(first)
    assert second["read_s"] != first["read_s"]
    shown = run(*again, "--plan", PLAN, "--compare", "dense").out
    assert "tokens opened in 0." in shown
    assert ", once read in " in shown
    stop = first["answers"][0]["text"][0]
    assert run(*again, "--plan", PLAN, "--stop", stop, "--json").document["answers"][0]["text"] == ""


def test_a_saved_document_is_refused_before_weights_are_loaded(
    refused: Refused, model: Path, text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "manual.kvsift"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelDirectory, "load", LOAD)
        LLM(model, PLAN, device="cpu").read(text.read_text()).save(path)
    again = ("ask", "--model", model, "--context", path, "--question", "Why?")
    assert "saved with its prompt" in refused(*again, "--raw")
    assert "other files cannot be joined" in refused(*again, "--context", text)
    assert "the directory none does not exist" in refused(*again, "--save", "none/manual.kvsift")
    assert "was read in float32, and this LLM computes in bfloat16" in refused(*again, "--dtype", "bfloat16")
    path.write_bytes(path.read_bytes()[:-5])
    assert "is damaged" in refused(*again)


def test_several_files_and_stdin_are_one_context(
    ask: Run, run: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = text.read_text()
    Path("a.txt").write_text(words[:500] + "\n\n")
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(words[500:].encode())))
    given = ("ask", "--model", model, "--question", "Why?", "--max-new-tokens", 2, "--json")
    parts = run(*given, "--context", "a.txt", "--context", "-").document
    Path("whole.txt").write_text(f"{words[:500]}\n\n{words[500:]}")
    whole = run(*given, "--context", "whole.txt").document
    assert parts["answers"][0]["token_ids"] == whole["answers"][0]["token_ids"]
    assert parts["document_tokens"] == whole["document_tokens"]


def test_questions_of_a_file_are_answered_line_by_line(ask: Run) -> None:
    Path("questions.jsonl").write_text('"Why?"\n\n{"id": 7, "question": "Who?", "gold": ["the miller"]}\n')
    options = ("--plan", PLAN, "--compare", "dense", "--questions-file", "questions.jsonl")
    outcome = ask(*options, question=())
    lines = [json.loads(line) for line in outcome.out.splitlines()]
    assert [(each["question"], each["plan"]) for each in lines] == [
        ("Why?", PLAN), ("Who?", PLAN), ("Why?", "dense"), ("Who?", "dense"),
    ]  # fmt: skip
    assert (lines[1]["id"], lines[1]["gold"], lines[1]["finish_reason"]) == (7, ["the miller"], "length")
    assert "TPOT" in outcome.err
    assert ask(*options, "--quiet", question=()).err == ""
    shown = ask(*options, "--out", "answers.jsonl", "--json", question=()).document
    written = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert untimed(written) == untimed(lines)
    assert untimed(shown["answers"][1].items() >= {"id": 7, "question": "Who?"}.items())


def test_an_answer_is_written_before_the_next_is_asked(ask: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("questions.jsonl").write_text('"Why?"\n"Who?"\n')
    answers = Document.ask

    def interrupted(document: Document, question: str, **options: Any) -> Answer:
        if question == "Who?":
            raise KeyboardInterrupt
        return answers(document, question, **options)

    monkeypatch.setattr(Document, "ask", interrupted)
    outcome = ask("--questions-file", "questions.jsonl", "--out", "answers.jsonl", question=())
    assert outcome.code == 130
    assert "answers to --questions-file so far are whole lines" in outcome.err
    (line,) = Path("answers.jsonl").read_text().splitlines()
    assert json.loads(line)["question"] == "Why?"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_a_sentence(ask: Run) -> None:
    Path("questions.jsonl").write_text('"Why?"\n')
    outcome = ask("--questions-file", "questions.jsonl", "--out", "/dev/full", question=())
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("kvsift: the answer cannot be written: No space left on device. Those before it")


@pytest.mark.parametrize("line", ["Why?", "5", '{"q": "Why?"}', '{"question": 5}', "[" * 100_000])
def test_a_line_that_is_no_question_is_named(refused: Refused, model: Path, text: Path, line: str) -> None:
    Path("questions.jsonl").write_text(f'"Why?"\n{line}\n')
    said = refused("ask", "--model", model, "--context", text, "--questions-file", "questions.jsonl")
    assert said.startswith("line 2 of questions.jsonl is not a question; write a JSON string, or an object")


def test_out_takes_the_document_that_json_prints(ask: Run) -> None:
    printed = ask("--plan", PLAN, "--json").document
    outcome = ask("--plan", PLAN, "--out", "answers.json")
    assert "TTFT" in outcome.out
    assert untimed(json.loads(Path("answers.json").read_text())) == untimed(printed)
    assert ask("--plan", PLAN, "--json", "--output", "answers.json").out == ""


def test_the_prompt_is_in_the_json(ask: Run) -> None:
    def prompt(*options: object) -> str:
        return str(ask(*options, "--json").document["answers"][0]["prompt"])

    assert prompt() == "{context}\n\nQuestion: Why?\nAnswer:"
    assert prompt("--raw") == "{context}\n\nWhy?"
    assert prompt("--prompt-template", "<<{context}>> {question}!") == "<<{context}>> Why?!"
    Path("template.txt").write_text("{context}: {question}")
    assert prompt("--prompt-template", "template.txt") == "{context}: Why?"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--raw", "--prompt-template", "{context} {question}"], "are two prompts; give one of them"),
        (["--prompt-template", "{question}"], "needs {context} and, after it, {question}"),
        (["--prompt-template", "no.txt"], "the prompt template file no.txt does not exist"),
        (["--system", "Be brief."], "a system message is part of a chat template, and this model has none"),
        (["--out", "no/answers.json"], "--out no/answers.json: the directory no does not exist."),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(
    refused: Refused, model: Path, text: Path, options: list[str], says: str
) -> None:
    assert says in refused("ask", "--model", model, "--context", text, "--question", "Why?", *options)


def test_the_embedded_model_says_that_it_knows_no_language(run: Run, ask: Run) -> None:
    Path("short.txt").write_text(f"{SENTENCE} " * 5)
    given = ("ask", "--context", "short.txt", "--question", "Why?", "--max-new-tokens", 2, "--dense-below", 5000)
    outcome = run(*given, "--plan", "dense", "--json")
    assert outcome.err.startswith("kvsift: WARNING: the embedded model only copies planted facts")
    assert outcome.err.count("\n") == 1
    assert run(*given, "--plan", "dense", "--quiet").err in ("", "[cut after 2 tokens]\n")
    assert ask("--plan", PLAN).err == "", "another model is not warned about"
