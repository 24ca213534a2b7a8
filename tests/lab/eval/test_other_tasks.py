"""InfiniteBench's tasks, the dialogue and perplexity."""

import json
import random
import re
from statistics import median

import pytest
from kvsift_lab.eval.sample import SampleRequest
from kvsift_lab.eval.scorers import score
from kvsift_lab.eval.tasks import TASKS, make_sample
from kvsift_lab.eval.tasks.infinite import FINDERS, numbers_of
from kvsift_lab.eval.tasks.perplexity import NUM_TARGETS, continued
from lab.eval.task_tools import LONG, encode, sample
from refusals import refused

SEEDS = range(3)


@pytest.mark.parametrize(
    ("task", "name", "count"), [("passkey", "pass key", 5), ("number_string", "sequence of digits", 10)]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_digits_stand_twice_in_a_line_of_their_own(task: str, name: str, count: int, seed: int) -> None:
    made = sample(f"infinite_{task}", seed=seed)
    (question,) = made.questions
    digits = question.answer
    assert re.fullmatch(rf"\d{{{count}}}", digits)
    line = f"The {name} is {digits}. Remember it. {digits} is the {name}."
    assert made.context.split("\n").count(line) == 1
    assert abs(question.depth - made.context.index(line) / LONG) < 0.001
    assert question.answer_prefix == f"The {name} is"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_key_has_its_value_in_the_object(seed: int) -> None:
    made = sample("infinite_kv_retrieval", seed=seed)
    (question,) = made.questions
    whole_pairs = made.context[made.context.index("{") : made.context.rindex('",') + 1]
    found = json.loads(whole_pairs + "}")
    key = re.search('Key: "(.+)"', question.text)
    assert found[key[1]] == question.answer
    assert len(found) > 100


@pytest.mark.parametrize("seed", range(6))
def test_the_number_wanted_is_that_of_the_list(seed: int) -> None:
    made = sample("infinite_math_find", seed=seed)
    (question,) = made.questions
    listed = made.context.split("\n\n")[1]
    numbers = [int(number) for number in listed.replace(",", " ").split()]
    assert numbers_of(made.context) == numbers
    ordered = sorted(set(numbers))
    wanted = {"smallest": ordered[0], "second smallest": ordered[1], "third smallest": ordered[2]}
    wanted |= {"largest": ordered[-1], "second largest": ordered[-2], "third largest": ordered[-3]}
    wanted |= {"median": median(numbers)}
    (asked,) = [name for name in wanted if f"the {name} number" in made.context]
    assert set(wanted) == set(FINDERS)
    assert float(question.answer) == wanted[asked]
    assert f"The {asked} number" in question.answer_prefix
    assert score(question.scorer, f" {question.answer}", question.references) == 1.0


@pytest.mark.parametrize("seed", range(6))
def test_exactly_one_function_does_not_run(seed: int) -> None:
    made = sample("infinite_code_debug", seed=seed)
    (question,) = made.questions
    complete = made.context[made.context.index("def ") : made.context.rindex("\ndef ")]
    functions: dict[str, object] = {}
    exec(complete, functions)
    names = re.findall(r"^def (\w+)", complete, re.MULTILINE)
    assert len(names) == len(set(names)) > 50
    assert [name for name in names if not _runs(functions[name])] == [question.answers[0]]
    options = dict(re.findall(r"^([A-D])\. (\w+)$", question.text, re.MULTILINE))
    assert set(options.values()) <= set(names)
    assert question.answers == (options[question.answers[1]], question.answers[1])
    assert score(question.scorer, f"{question.answers[1]}. it", question.references) == 1.0


def _runs(function: object) -> bool:
    assert callable(function)
    try:
        function([3, 1, 2])
        function([5])
    except (TypeError, NameError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("seed", SEEDS)
def test_a_dialogue_comes_back_to_its_first_turn(seed: int) -> None:
    made = sample("dialogue", seed=seed)
    first, second, third, again, more = made.questions
    assert made.in_turn
    assert again.answer == first.answer
    assert again.text != first.text
    assert len({first.answer, second.answer, third.answer, more.answer}) == 4
    key = re.search(r"for ([\w-]+) ", first.text)
    assert key[1] in again.text
    assert key[1] in more.text
    assert key[1] not in second.text + third.text
    for turn in (first, second, third, more):
        assert f"is: {turn.answer}." in made.context[round(turn.depth * LONG) - 1 :][:200]


def test_perplexity_predicts_what_follows() -> None:
    made = sample("perplexity", 3000)
    assert made.questions == ()
    assert TASKS["perplexity"].kind == "perplexity"
    assert len(made.targets) == NUM_TARGETS
    longer = sample("perplexity", 3000)
    assert made == longer
    words = [f" word{i}" for i in range(1000)]
    whole = "".join(words).lstrip()
    given = continued("words", SampleRequest(random.Random(0), 1001, 1, encode), iter(words))
    assert given.context == whole[:1001]  # cut inside a piece
    assert bytes(given.targets).decode() == whole[1001 : 1001 + NUM_TARGETS]


def test_a_text_that_ends_too_early_is_refused() -> None:
    for length in (900, 1100):  # the targets are missing, or some of the context
        with refused("too_short"):
            continued("short", SampleRequest(random.Random(0), length, 1, encode), iter([" word"] * 200))


def test_numbers_of_a_list_that_was_cut_are_those_that_are_there() -> None:
    made = make_sample("infinite_math_find", 100, 0, encode)
    assert numbers_of(made.context) == [int(number) for number in re.findall(r"\d+", made.context)]
