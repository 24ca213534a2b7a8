"""RULER's thirteen tasks: the official structure, whatever the words."""

import re
from collections import Counter

import pytest
from kvsift_lab.eval.tasks import FAMILIES, TASKS, make_sample
from kvsift_lab.eval.tasks.ruler_needles import NOISE_BLOCK, VARIANTS
from kvsift_lab.eval.tasks.ruler_qa import ROLES, TRAITS
from kvsift_lab.eval.tasks.ruler_words import zeta_counts
from lab.eval.task_tools import BOS, LONG, encode_words, sample

NEEDLE = re.compile(r"One of the special magic (\w+) for ([\w-]+) is: ([\w-]+)\.")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
KINDS = {"words": re.compile("[a-z]+-[a-z]+"), "numbers": re.compile(r"\d{7}"), "uuids": UUID}
SEEDS = range(3)

# scripts/synthetic.yaml of NVIDIA/RULER: haystack, keys, values, keys, values of each, queries
OFFICIAL = {
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}


def test_scorers_and_new_tokens_are_the_official_ones() -> None:
    tokens = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
    for name in FAMILIES["ruler"]:
        style = TASKS[name].style
        assert style.max_new_tokens == tokens[name.split("_")[0]]
        assert style.scorer == ("string_match_part" if name.startswith("qa") else "string_match_all")


@pytest.mark.parametrize("task", OFFICIAL)
@pytest.mark.parametrize("seed", SEEDS)
def test_needles_are_those_of_the_official_table(task: str, seed: int) -> None:
    haystack, keys, values, num_keys, num_values, num_queries = OFFICIAL[task]
    made = sample(task, seed=seed)
    (question,) = made.questions
    assert set(VARIANTS) == set(OFFICIAL)
    found = NEEDLE.findall(made.context)
    assert all(what == values and KINDS[keys].fullmatch(k) and KINDS[values].fullmatch(v) for what, k, v in found)
    if haystack != "needle":
        assert Counter(key for _, key, _ in found) == dict.fromkeys({key for _, key, _ in found}, num_values)
        assert len(found) == num_keys * num_values
    else:
        assert len(found) > 50
    queried = [key for key in dict.fromkeys(key for _, key, _ in found) if key in question.text]
    assert len(queried) == num_queries
    assert all(key in question.answer_prefix for key in queried)
    assert sorted(question.answers) == sorted(value for _, key, value in found if key in queried)


@pytest.mark.parametrize("task", OFFICIAL)
def test_haystack_is_of_its_kind(task: str) -> None:
    lines = sample(task).context.split("\n")[1:]  # the introduction comes first
    if OFFICIAL[task][0] == "essay":
        assert len(lines) == 1  # needles and sentences of prose in one paragraph
        return
    is_needle = [bool(NEEDLE.fullmatch(line)) for line in lines[:-1]]  # the last line is cut
    if OFFICIAL[task][0] == "needle":
        assert all(is_needle)
    else:
        assert sum(is_needle) == 1
        assert {line for line, needle in zip(lines[:-1], is_needle) if not needle} == {NOISE_BLOCK}


@pytest.mark.parametrize("seed", SEEDS)
def test_variables_are_a_chain_of_four_hops_after_an_example(seed: int) -> None:
    made = sample("vt", seed=seed)
    (question,) = made.questions
    number = re.search(r"value (\d{5})\?", question.text)
    assert number is not None
    chains = re.findall(r"^VAR ([A-Z]+) = (?:VAR )?(\w+)$", made.context, re.MULTILINE)
    example, chain = chains[:5], chains[5:]
    assert [len(name) for name, _ in example] == [3] * 5
    assert [name for name, _ in chain] == list(question.answers)
    assert [source for _, source in chain] == [number[1], *question.answers[:4]]
    assert all(len(name) == 5 for name in question.answers)
    assert f"namely: {' '.join(name for name, _ in example)}\n" in made.context  # the example is solved
    assert f"5 variables are assigned the value {number[1]}" in question.answer_prefix
    assert number[1] != example[0][1]


def numbered_words(text: str) -> list[str]:
    entries = re.findall(r"(\d+)\. ([a-z]+)(?= |\.*$)", text)  # stops may fill up the end
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    return [word for _, word in entries]


@pytest.mark.parametrize(("length", "common", "other"), [(4000, 6, 1), (4096, 30, 3), (9000, 30, 3)])
def test_common_words_stand_as_often_as_they_should(length: int, common: int, other: int) -> None:
    made = make_sample("cwe", length, 0, encode_words, prefix=(BOS,))
    (question,) = made.questions
    example, listed = made.context.split("\nThis is a numbered list")
    words = numbered_words(listed.split("\n", 1)[1])
    counts = Counter(words)
    assert len(question.answers) == 10
    assert all(counts[word] == common for word in question.answers)
    rest = Counter(count for word, count in counts.items() if word not in question.answers)
    assert set(rest) <= {1, other}  # a few once, at the end, to reach the length
    assert rest[other] > 10 * (other > 1)
    times = Counter(Counter(numbered_words(example.split("\n")[1])).values())
    assert times == ({10: 10, 3: 30} if length >= 4096 else {3: 10, 1: 10})
    assert not example.endswith(":")  # it is solved
    assert " ".join(f"{i}. " for i in (1, 2))[:2] in example.split("list are:")[1]


def test_coded_words_follow_a_zeta_distribution() -> None:
    # n / (k^2 pi^2/6) for n = 100: 60.79, 15.20, 6.75, 3.80, 2.43
    assert zeta_counts(100, 5) == [60, 15, 6, 3, 2]
    assert zeta_counts(53, 5) == [32, 8, 3, 2, 1]  # the fewest words: the fourth is still ahead of the fifth
    made = sample("fwe")
    (question,) = made.questions
    text = made.context.split(" ones. ")[1]
    counts = Counter(word for word in text.split() if word.strip("."))
    assert tuple(word for word, _ in counts.most_common(3)) == question.answers
    ordered = [count for _, count in counts.most_common()]
    assert ordered[2] > ordered[3]
    total = next(n for n in range(53, 10_000) if zeta_counts(n, 327)[1:4] == ordered[:3])  # 16384 // 50 words
    assert [count for count in zeta_counts(total, 327)[1:] if count] == ordered
    assert text.count("...") >= zeta_counts(total, 327)[0]  # the first rank is noise; more of it reaches the length
    assert all(re.fullmatch("[a-z]{6}", word) for word in counts)


def documents(context: str) -> list[str]:
    first, *others = re.split(r"\n\nDocument (\d+):\n", context)[1:]
    assert [int(number) for number in (first, *others[1::2])] == list(range(1, len(others) // 2 + 2))
    return others[0::2]


@pytest.mark.parametrize("seed", SEEDS)
def test_one_document_answers(seed: int) -> None:
    made = sample("qa_1", seed=seed)
    (question,) = made.questions
    found = documents(made.context)
    assert len(found) > 20
    assert any(question.answer.lower() in document.lower() for document in found)
    assert question.answer.lower() in made.context.lower()[int(question.depth * LONG) :][:1500]
    assert made.context.startswith(question.text.strip().split("\n")[0])  # the instruction stands before and after


@pytest.mark.parametrize("seed", range(4))
def test_two_documents_together_answer(seed: int) -> None:
    made = sample("qa_2", seed=seed)
    (question,) = made.questions
    found = documents(made.context)
    asked = re.search(rf"the ({'|'.join(ROLES)}) of the (\w+ \w+)", question.text)
    (place,) = [document for document in found if document.startswith(f"The {asked[2]}\n")]
    person = re.search(rf"The {asked[1]} of the {asked[2]} is ([\w ]+)\.", place)
    (life,) = [document for document in found if document.startswith(f"{person[1]}\n")]
    sentences = {statement.format(p=person[1], v=question.answer) for statement, _ in TRAITS.values()}
    assert any(sentence in life for sentence in sentences)
    assert question.answer not in place.replace(asked[2], "")
    later = max(made.context.index(document) for document in (place, life))
    assert abs(question.depth - later / LONG) < 0.002
