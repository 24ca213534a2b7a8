"""Plans and options that make no sense: one line that says what was given, what is possible and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.watched import Refused, Run

PLANS = [  # tests/plan/test_refused_plans.py has the others
    ("qest:budget=256", "unknown method 'qest'; did you mean 'quest'? Known: critiprefill, dense,"),
    ("quest:budget=0", "budget=0 must be a whole number, 1 or more."),
    ("", "a plan is text such as 'quest:budget=1024'"),
    ("plan.toml", "the plan file plan.toml does not exist."),
]

PLAN_FILES = [
    ("plan = ", "plan.toml is not TOML: "),
    ("", "the plan file plan.toml is empty."),
    ("[plans]\n", "plan.toml has no plan; it needs plan = 'quest:budget=1024' or a [plan] table."),
    ("plan = 5\n", "a plan is text such as 'quest:budget=1024', a table, a Plan, a Rule or a Method; got 5."),
    ("[plan]\ndecod = 'dense'\n", "unknown phase 'decod'; did you mean 'decode'?"),
    ("[plan.decode]\nbudget = 256\n", "a phase is given as text, a table with the key 'method', a Rule or a Method"),
    ("[plan.decode]\nmethod = 'quest'\nbudget = '256'\n", "budget='256' must be a whole number"),
    ("[plan]\nmethod = 'quest'\nbudget = 256\npage_sise = 8\n", "did you mean 'page_size'?"),
]

OPTIONS = [
    (["--device", "gpu"], "unknown device 'gpu'; did you mean 'cpu'? Known: auto, cpu, cuda"),
    (["--device", "meta"], "device 'meta' is not supported; choose cpu or cuda."),
    (["--dtype", "bf16"], "unknown dtype 'bf16'; did you mean 'bfloat16'? Known: auto, bfloat16, float16, float32"),
    (["--question-phase", "decod"], "unknown phase 'decod'; did you mean 'decode'? Known: decode, prefill"),
    (["--temperature", "-1"], "temperature=-1.0 must be a number, 0 (greedy) or more."),
    (["--top-p", "0"], "top_p=0.0 must be a number greater than 0 and at most 1."),
    (["--top-p", "0.9"], "--top-p 0.9 has no effect without --temperature above 0"),
    (["--compare", "dense", "--compare", "dense"], "--compare dense: this plan answers already."),
    (["--seed", "-1"], "seed=-1 must be a whole number, 0 or more"),
    (["--question", " \n"], "the question is empty."),
    (["--question", "why " * 300], "the question has 1,200 tokens and the context only 913. Were they swapped?"),
    (["--max-new-tokens", "5000"], "and up to 5,000 will be generated. To go on:"),
]

# What the option parser refuses before any of our code runs: a box with the same facts, and exit code 2 as well.
USAGE = [
    (["--max-new-tokens", "0"], "'--max-new-tokens'", "greater than or equal to 1"),
    (["--max-new-tokens", "ten"], "'--max-new-tokens'", "integer"),
    (["--chunk-size", "0"], "'--chunk-size'", "greater than or equal to 1"),
    (["--chunk-size", "65537"], "'--chunk-size'", "less than or equal to 65536"),
    (["--probe-every", "-1"], "'--probe-every'", "greater than or equal to 0"),
    (["--temperature", "warm"], "'--temperature'", "number"),
    (["--contxt", "x"], "--contxt", "--context"),
    (["--qestion", "x"], "--qestion", "--question"),
    (["--jsn"], "--jsn", "--json"),
]


@pytest.mark.parametrize(("plan", "says"), PLANS)
def test_a_plan_that_makes_no_sense_is_refused(refused: Refused, model: Path, text: Path, plan: str, says: str) -> None:
    assert says in refused("ask", "--model", model, "--context", text, "--question", "Why?", "--plan", plan)


@pytest.mark.parametrize(("content", "says"), PLAN_FILES)
def test_a_plan_file_that_makes_no_sense_is_refused(
    refused: Refused, model: Path, text: Path, tmp_path: Path, content: str, says: str
) -> None:
    (tmp_path / "plan.toml").write_text(content)
    assert says in refused("ask", "--model", model, "--context", text, "--question", "Why?", "--plan", "plan.toml")


@pytest.mark.parametrize(("options", "says"), OPTIONS)
def test_an_option_that_makes_no_sense_is_refused(
    refused: Refused, model: Path, text: Path, options: list[str], says: str
) -> None:
    question = [] if "--question" in options else ["--question", "Why?"]
    assert says in refused("ask", "--model", model, "--context", text, *question, *options)


def test_a_gpu_that_is_not_there_is_refused(
    refused: Refused, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("ask", "--model", model, "--context", text, "--question", "Why?", "--device")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert refused(*command, "cuda").endswith("torch finds no NVIDIA GPU. Use --device cpu.")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert refused(*command, "cuda:7") == "device 'cuda:7' is not available: there are 2 GPUs, from cuda:0."


@pytest.mark.parametrize(("options", "given", "possible"), USAGE)
def test_the_option_parser_says_what_is_wrong_and_what_is_possible(
    run: Run, model: Path, text: Path, options: list[str], given: str, possible: str
) -> None:
    outcome = run("ask", "--model", model, "--context", text, "--question", "Why?", *options)
    said = " ".join(outcome.err.replace("│", " ").split())
    assert outcome.code == 2
    assert outcome.out == ""
    assert given in said
    assert possible in said
    assert "Traceback" not in said


def test_a_demo_document_that_cannot_be_kept_is_refused(refused: Refused, tmp_path: Path) -> None:
    assert refused("demo", "--document", "no/document.txt") == (
        "--document no/document.txt: the directory no does not exist."
    )
    assert refused("demo", "--document", tmp_path) == f"--document {tmp_path}: no file can be written there."


def test_a_misspelt_command_gets_a_suggestion(run: Run) -> None:
    outcome = run("aks")
    assert outcome.code == 2
    assert "Did you mean 'ask'?" in outcome.err


@pytest.mark.parametrize("missing", ["--context", "--question"])
def test_what_ask_cannot_do_without_is_named(run: Run, text: Path, missing: str) -> None:
    given = {"--context": text, "--question": "Why?"}
    del given[missing]
    outcome = run("ask", *(part for pair in given.items() for part in pair))
    assert outcome.code == 2
    assert missing in outcome.err
