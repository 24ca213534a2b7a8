"""The catalogue of tasks: exact lengths, determinism, families, and the old tasks unchanged."""

import hashlib
import re
from pathlib import Path

import pytest
from kvsift_lab.eval import tasks
from kvsift_lab.eval.loaders import LOADERS
from kvsift_lab.eval.scorers import SCORERS
from kvsift_lab.eval.tasks import FAMILIES, TASKS, Question, find_task, framed, make_sample, task_names
from lab.eval.task_tools import BOS, LONG, encode, encode_words, sample

from kvsift import texts
from kvsift.errors import InputError

NEW = [name for name in TASKS if name not in FAMILIES["own"]]

# Made before there were other tasks: results and the embedded model depend on them. None has prose, which is Python's.
UNCHANGED = {
    ("needle", 2): "2bc27a3ed2b7539c",
    ("multi_value", 2): "7bd9b64af7db3237",
    ("key_value", 0): "499ce15b570362fe",
    ("facts", 0): "6e36c1a69c430e31",
    ("variables", 3): "78e5a403bf4c5aa3",
    ("passkey", 3): "616905d03639ae21",
}


@pytest.mark.parametrize(("task", "seed"), UNCHANGED)
def test_the_first_tasks_never_change(task: str, seed: int) -> None:
    made = sample(task, 3000, seed, num_questions=6)
    content = made.context, made.context_ids, [(q.text, q.answer, q.depth) for q in made.questions]
    assert hashlib.sha256(repr(content).encode()).hexdigest()[:16] == UNCHANGED[task, seed]


@pytest.mark.parametrize("task", NEW)
@pytest.mark.parametrize("length", [8192, 12345, LONG])  # 8192 bytes are about 2000 tokens of a real tokenizer
def test_context_has_exactly_the_length(task: str, length: int) -> None:
    made = sample(task, length)
    assert len(made.context_ids) == length
    assert made.context_ids == (BOS, *encode(made.context))


@pytest.mark.parametrize("task", NEW)
def test_length_is_exact_when_tokens_are_words(task: str) -> None:
    assert len(make_sample(task, 3001, 1, encode_words).context_ids) == 3001


@pytest.mark.parametrize("task", NEW)
def test_same_seed_gives_the_same_sample(task: str) -> None:
    assert sample(task, seed=3) == sample(task, seed=3)
    assert sample(task, seed=3) != sample(task, seed=4)


@pytest.mark.parametrize("task", NEW)
@pytest.mark.parametrize("seed", range(3))
def test_questions_do_not_hold_their_answers(task: str, seed: int) -> None:
    for question in sample(task, seed=seed).questions:
        if task != "infinite_code_debug":  # which offers it as one of four options
            assert not any(f" {reference}" in question.tail for reference in question.references)
        assert 0 <= question.depth <= 1


@pytest.mark.parametrize("task", [task for task in NEW if task != "perplexity"])  # any text has a next token
def test_a_context_that_is_too_short_is_refused(task: str) -> None:
    with pytest.raises(ValueError, match=r"token|needles"):
        make_sample(task, 20, 0, encode)


def test_a_family_names_its_tasks() -> None:
    assert len(FAMILIES["ruler"]) == 13
    assert task_names(["needle", "ruler", "niah_single_1", "needle"]) == ("needle", *FAMILIES["ruler"])
    assert [name for family in FAMILIES.values() for name in family] == list(TASKS)


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'niah_single_1'"):
        find_task("niah_single1")
    with pytest.raises(InputError, match="did you mean 'ruler'"):
        task_names(["rulers"])


def test_every_file_with_tasks_is_listed_once() -> None:
    with_tasks = [
        f"{package.__name__}.{file.stem}"
        for package in (tasks, texts)
        for file in Path(package.__file__).parent.glob("*.py")
        if re.search("^TASKS = ", file.read_text(), re.MULTILINE)
    ]
    assert sorted(tasks.MODULES) == sorted(with_tasks)


def test_every_task_says_what_it_is() -> None:
    assert all(task.about and "\n" not in task.about and len(task.about) < 90 for task in TASKS.values())


def test_a_question_without_references_has_its_answer_as_the_only_one() -> None:
    assert Question("Where?", "Oslo", 0.5).references == ("Oslo",)
    assert Question("Where?", "Oslo", 0.5, ("Oslo", "Norway")).references == ("Oslo", "Norway")


def test_a_tail_is_framed_unless_the_question_brings_its_own_format() -> None:
    assert Question("Where?", "Oslo", 0.5, answer_prefix=" In").tail == "\n\nQuestion: Where?\nAnswer: In"
    assert Question("\nWhere? ", "Oslo", 0.5, answer_prefix="In", is_framed=False).tail == "\nWhere? In"


def test_a_framed_question_asks_the_same_in_the_own_format() -> None:
    made = sample("qa_1")
    (question,), (before,) = framed(made).questions, made.questions
    asked = before.text.rpartition("Question: ")[2]
    assert question.tail == f"\n\nQuestion: {asked}\nAnswer:"
    assert (question.references, question.scorer, question.stop) == (before.references, before.scorer, "\n")
    assert "Question" not in framed(sample("niah_single_1")).questions[0].text
    assert framed(sample("needle")) == sample("needle")


def test_the_docs_list_every_task_kind_of_file_and_scorer() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text()
    for name, task in TASKS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert task.kind == "perplexity" or row.endswith(f"| `{task.style.scorer}` |")
    names = set(re.findall(r"`(\w+)`", page))
    assert {*SCORERS, *LOADERS, *FAMILIES} <= names
