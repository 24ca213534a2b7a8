"""The tasks: exact length, determinism, answers that are where they claim to be, and the catalogue of all."""

import hashlib
import random
import re
from itertools import islice
from pathlib import Path

import pytest
from kvsift_lab.eval import tasks
from kvsift_lab.eval.loaders import LOADERS
from kvsift_lab.eval.scorers import SCORERS
from kvsift_lab.eval.tasks import (
    FAMILIES,
    TASKS,
    find_task,
    framed,
    make_sample,
    task_names,
    variables,
)
from lab.eval.task_tools import BOS, LONG, encode, sample
from refusals import refused

from kvsift import texts
from kvsift.texts.facts import facts
from kvsift.texts.prose import document

OWN = FAMILIES["own"]
NEW = [name for name in TASKS if name not in OWN]

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


# short, odd, usual, long; 8192 bytes are about 2000 tokens of a real tokenizer
LENGTHS = [(task, length) for tasks, lengths in ((OWN, (512, 513, 4096, 32768)), (NEW, (8192, 12345, LONG)))
           for task in tasks for length in lengths]  # fmt: skip


@pytest.mark.parametrize(("task", "length"), LENGTHS)
def test_context_has_exactly_the_length(task: str, length: int) -> None:
    made = sample(task, length)
    assert len(made.context_ids) == length
    assert made.context_ids == (BOS, *encode(made.context))


@pytest.mark.parametrize("task", TASKS)
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


def test_an_unknown_task_names_the_nearest() -> None:
    with refused("unknown_name: did you mean 'niah_single_1'"):
        find_task("niah_single1")
    with refused("unknown_name: 'rulers'; did you mean 'ruler'?"):
        task_names(["rulers"])


def test_every_file_with_tasks_is_listed_once() -> None:
    with_tasks = [
        f"{package.__name__}.{file.stem}"
        for package in (tasks, texts)
        for file in Path(package.__file__).parent.glob("*.py")
        if re.search("^TASKS = ", file.read_text(), re.MULTILINE)
    ]
    assert sorted(tasks.MODULES) == sorted(with_tasks)


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


@pytest.mark.parametrize("task", ["needle", "key_value", "facts", "passkey"])
@pytest.mark.parametrize("seed", range(3))
def test_answer_stands_at_its_depth(task: str, seed: int) -> None:
    made = sample(task, 16384, seed)
    for question in made.questions:
        start = round(question.depth * 16384) - 1  # the bos is no byte of the text
        assert question.answer in made.context[start : start + 400]


@pytest.mark.parametrize("seed", range(3))
def test_all_values_of_a_key_are_wanted_in_order(seed: int) -> None:
    made = sample("multi_value", 16384, seed, num_questions=4)
    for question in made.questions:
        places = [made.context.index(value) for value in question.answer.split(", ")]
        assert 2 <= len(places) <= 4
        assert places == sorted(places)
        assert abs(places[-1] / 16384 - question.depth) < 0.02


@pytest.mark.parametrize("seed", range(3))
def test_variables_lead_to_their_number(seed: int) -> None:
    made = sample("variables", 8192, seed, num_questions=12)
    found = [variables.hops(question.text, made.context) for question in made.questions]
    assert set(found) <= {1, 2, 3, 4}
    assert 1 in found
    assert max(found) > 1
    assert all(question.answer in made.context for question in made.questions)


@pytest.mark.parametrize("task", OWN)
@pytest.mark.parametrize("seed", range(4))
def test_questions_are_unique(task: str, seed: int) -> None:
    texts = [question.text for question in sample(task, 32768, seed, num_questions=24).questions]
    assert len(set(texts)) == len(texts)
    assert len(texts) == (1 if task == "passkey" else 24)


@pytest.mark.parametrize("task", [task for task in OWN if task != "passkey"])
def test_depths_cover_the_context(task: str) -> None:
    depths = sorted(question.depth for question in sample(task, 32768, num_questions=16).questions)
    assert depths[0] < 0.45  # of multi-value: its answer is known at the last of its needles
    assert depths[-1] > 0.7


@pytest.mark.parametrize("seed", range(4))
def test_no_two_facts_of_a_document_answer_one_question(seed: int) -> None:
    made = list(islice(facts(random.Random(seed)), 200))
    assert len({fact.question for fact in made}) == len(made)
    assert all(fact.answer.lower() in fact.statement.lower() for fact in made)  # it may begin the sentence


def test_document_hides_facts_at_their_depths() -> None:
    hidden = ["The access code of the north warehouse is 48213.", "Mia lives in Oslo."]
    text = document(hidden, [0.9, 0.2], 4000, lambda piece: len(piece.split()))
    assert 4000 <= len(text.split()) < 4200
    assert abs(text.index(hidden[0]) / len(text) - 0.9) < 0.1
    assert abs(text.index(hidden[1]) / len(text) - 0.2) < 0.1
    assert text == document(hidden, [0.9, 0.2], 4000, lambda piece: len(piece.split()))
