"""The synthetic tasks: exact length, determinism, and answers that are where they claim to be."""

import random
import time
from itertools import islice

import pytest
from kvsift_lab.eval.tasks import FAMILIES, make_sample, variables
from lab.eval.task_tools import BOS, encode, encode_words, sample

from kvsift.engine.prompt import answer_text, exact_match, parse_answer, prompt, question_text
from kvsift.texts.facts import facts
from kvsift.texts.prose import document, paragraphs

OWN = FAMILIES["own"]


@pytest.mark.parametrize("task", OWN)
@pytest.mark.parametrize("length", [512, 513, 4096, 32768])  # short, odd, usual, long
def test_context_has_exactly_the_length(task: str, length: int) -> None:
    made = sample(task, length)
    assert len(made.context_ids) == length
    assert made.context_ids == (BOS, *encode(made.context))


@pytest.mark.parametrize("task", OWN)
@pytest.mark.parametrize("length", [512, 2048])
def test_length_is_exact_when_tokens_are_words(task: str, length: int) -> None:
    assert len(make_sample(task, length, 1, encode_words).context_ids) == length


@pytest.mark.parametrize("task", OWN)
def test_same_seed_gives_the_same_sample(task: str) -> None:
    assert sample(task, 2048, seed=3) == sample(task, 2048, seed=3)
    assert sample(task, 2048, seed=3) != sample(task, 2048, seed=4)


@pytest.mark.parametrize("task", ["needle", "key_value", "facts", "passkey"])
@pytest.mark.parametrize("seed", range(5))
def test_answer_stands_at_its_depth(task: str, seed: int) -> None:
    made = sample(task, 16384, seed)
    for question in made.questions:
        start = round(question.depth * 16384) - 1  # the bos is no byte of the text
        assert question.answer in made.context[start : start + 400]


@pytest.mark.parametrize("seed", range(5))
def test_all_values_of_a_key_are_wanted_in_order(seed: int) -> None:
    made = sample("multi_value", 16384, seed, num_questions=4)
    for question in made.questions:
        places = [made.context.index(value) for value in question.answer.split(", ")]
        assert 2 <= len(places) <= 4
        assert places == sorted(places)
        assert abs(places[-1] / 16384 - question.depth) < 0.02


@pytest.mark.parametrize("seed", range(5))
def test_variables_lead_to_their_number(seed: int) -> None:
    made = sample("variables", 8192, seed, num_questions=12)
    found = [variables.hops(question.text, made.context) for question in made.questions]
    assert set(found) <= {1, 2, 3, 4}
    assert 1 in found
    assert max(found) > 1
    assert all(question.answer in made.context for question in made.questions)


@pytest.mark.parametrize("task", OWN)
@pytest.mark.parametrize("seed", range(10))
def test_questions_are_unique(task: str, seed: int) -> None:
    texts = [question.text for question in sample(task, 32768, seed, num_questions=24).questions]
    assert len(set(texts)) == len(texts)
    assert len(texts) == (1 if task == "passkey" else 24)


@pytest.mark.parametrize("task", [task for task in OWN if task != "passkey"])
def test_depths_cover_the_context(task: str) -> None:
    depths = sorted(question.depth for question in sample(task, 32768, num_questions=16).questions)
    assert depths[0] < 0.45  # of multi-value: its answer is known at the last of its needles
    assert depths[-1] > 0.7


def test_short_contexts_ask_fewer_questions() -> None:
    assert len(sample("needle", 512, num_questions=100).questions) < 10


def test_samples_are_made_quickly() -> None:
    paragraphs()  # read once per process
    start = time.process_time()
    for task in OWN:
        sample(task, 32768)
    assert time.process_time() - start < 5


def test_unknown_task_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'needle'.*key_value"):
        sample("needles", 512)


@pytest.mark.parametrize("seed", range(10))
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


def test_document_refuses_depths_outside_it() -> None:
    with pytest.raises(ValueError, match="one depth between 0 and 1 per fact"):
        document(["Mia lives in Oslo."], [1.5], 100, len)


def test_prompt_ends_where_the_answer_starts() -> None:
    text = prompt("Mia lives in Oslo.\n", "Where does Mia live?")
    assert text == "Mia lives in Oslo.\n\nQuestion: Where does Mia live?\nAnswer:"
    assert text.endswith(question_text("Where does Mia live?"))
    assert answer_text("Oslo") == " Oslo\n"


def test_answer_is_the_first_line() -> None:
    assert parse_answer(" Oslo\n\nQuestion: and?") == "Oslo"
    assert exact_match(" Oslo.\n", "Oslo")
    assert not exact_match(" Oslo and Bergen\n", "Oslo")
