"""The official scorers, against values worked out by hand from the published definitions."""

import sys

import pytest
from kvsift_lab.eval.scorers import SCORERS, cleaned, score
from refusals import refused

CLASSES = ("Animal", "Animal organ", "City")

CASES = [
    # kvsift's own: the first line, without case, spacing and a final stop
    ("exact", " Oslo.\nAnd more", ["Oslo"], 1.0),
    ("exact", "oslo", ["Bergen", "Oslo"], 1.0),
    ("exact", "Oslo and Bergen", ["Oslo"], 0.0),
    ("exact", "", ["Oslo"], 0.0),
    # for chat models: in the text as whole words
    ("contains", "The special magic word for grey otter is: Elegant-Notebook.", ["elegant-notebook"], 1.0),
    ("contains", "The number is 412.", ["41"], 0.0),
    ("contains", "It is Oslo  Lake\nHouse", ["Bergen", "oslo lake house."], 1.0),
    ("contains", "They are 12, 34 and 56.", ["12, 34, 56"], 1.0),
    ("contains", "They are 34, 12 and 56.", ["12, 34, 56"], 0.0),
    ("contains", "", ["Oslo"], 0.0),
    # RULER: share of references that are substrings
    ("string_match_all", "they are 12 and 34.", ["12", "34", "56", "78"], 0.5),
    ("string_match_all", "PARIS", ["Paris"], 1.0),
    ("string_match_all", "", ["12"], 0.0),
    ("string_match_all", "1. apple\n2. pear", ["pear", "apple"], 1.0),
    ("string_match_all", "New\tYork", ["New York"], 0.0),  # a control character becomes a newline,
    ("string_match_all", "New\tYork", ["New\nYork"], 1.0),
    ("string_match_all", "71\x0032", ["7132"], 0.0),  # and is not dropped
    ("string_match_all", "\n\x07 7132 \n", ["7132"], 1.0),
    ("string_match_part", "it was Lyon", ["Paris", "Lyon", "Rome"], 1.0),
    ("string_match_part", "it was Bonn", ["Paris", "Lyon", "Rome"], 0.0),
    ("string_match_part", "", ["Paris"], 0.0),
    # LongBench, F1 of words: {cat sat on mat} and {cat on mat}: P 3/4, R 1
    ("qa_f1", "The cat sat on a mat.", ["cat on the mat"], 6 / 7),
    ("qa_f1", "yes, yes", ["Yes"], 2 / 3),  # P 1/2, R 1
    ("qa_f1", "U.S.A.", ["France", "usa"], 1.0),  # the best reference
    ("qa_f1", "the", ["The"], 0.0),  # nothing is left of either
    ("qa_f1", "", ["Paris"], 0.0),
    ("qa_f1", "Paris\nLyon", ["Paris"], 2 / 3),
    ("qa_f1_first_line", "\nParis\nLyon", ["Paris"], 1.0),
    ("qa_f1_first_line", " \nParis", ["Paris"], 0.0),  # leading newlines go, a line of space does not
    # ROUGE-L: {the cat} of {the cat sat} and {the cat ran away}: P 2/3, R 2/4
    ("rouge_l", "the cat sat", ["the cat ran away"], 4 / 7),
    ("rouge_l", "a b. c d", ["c d. a b"], 1.0),  # the union over sentences
    ("rouge_l", "b a", ["a b"], 1 / 2),  # one word in order: P 1/2, R 1/2
    ("rouge_l", "a a a", ["a b"], 2 / 3),  # distinct words: P 1/1, R 1/2
    ("rouge_l", "A b", ["a b"], 1 / 2),  # case counts
    ("rouge_l", "", ["a b"], 0.0),
    ("rouge_l", "...", ["a b"], 0.0),
    ("rouge_l", "a. ", ["a"], 2 / 3),  # the space after the stop is a sentence of an empty word: P 1/2, R 1
    ("rouge_l_first_line", "\nthe cat\nthe dog", ["the cat"], 1.0),
    # LongBench, classes: the answer, then all of them
    ("classification", "Animal organ", ["Animal organ", *CLASSES], 1.0),  # Animal is part of the answer
    ("classification", "Animal organ", ["Animal", *CLASSES], 1 / 2),
    ("classification", "City or Animal", ["City", *CLASSES], 1 / 2),
    ("classification", "City\nAnimal", ["City", *CLASSES], 1.0),  # the first line
    ("classification", "city", ["City", *CLASSES], 0.0),
    ("classification", "", ["City", *CLASSES], 0.0),
    ("classification", "a b c", ["a b c", "a", "b", "a b c"], 1 / 2),  # "b" is skipped after "a" was removed
    ("retrieval", "Paragraph 7, or is it 12?", ["Paragraph 7"], 1 / 2),
    ("retrieval", "07", ["Paragraph 7"], 0.0),
    ("retrieval", "", ["Paragraph 7"], 0.0),
    ("retrieval_zh", "段落3", ["段落3"], 1.0),
    ("count", "5, no: 5, or 3", ["5"], 2 / 3),
    ("count", "five", ["5"], 0.0),
    ("code_sim", "```python\n# a comment\nreturn x\nreturn y", ["return x"], 1.0),
    ("code_sim", "\n\nreturn y", ["return x"], 0.88),  # 2 * 7 / 16 = 0.875, rounded to the even per cent
    ("code_sim", " return x", ["return x"], 0.94),  # 16 / 17
    ("code_sim", "# a\nb // c\n`d`", ["return x"], 0.0),  # no line is left
    ("code_sim", "", ["return x"], 0.0),
    # InfiniteBench
    ("first_number", "The pass key is 71432. Remember 71432.", ["71432"], 1.0),
    ("first_number", "Of the 2 keys, 71432", ["71432"], 0.0),
    ("first_number", "071432", ["71432"], 0.0),  # as text
    ("first_number", "none", ["71432"], 0.0),
    ("first_number", "", ["71432"], 0.0),
    ("word_match", 'The value is: "9f-0a".', ["9f-0a"], 1.0),
    ("word_match", '{"k":"9f-0a"}', ["9f-0a"], 1.0),
    ("word_match", "9f-0ab", ["9f-0a"], 0.0),
    ("word_match", "9F-0A", ["9f-0a"], 0.0),
    ("word_match", "", ["9f-0a"], 0.0),
    ("math_find", "47, I think, not 48", ["47"], 1.0),
    ("math_find", "-47", ["47"], 1.0),  # signs are not read
    ("math_find", "3.5", ["3.5"], 1.0),
    ("math_find", "3", ["3.0"], 1.0),
    ("math_find", "47.0", ["47"], 0.0),  # the published code stops here
    ("math_find", "", ["47"], 0.0),
    ("math_calc", "12, 9 and then 30", ["12", "9", "31"], 2 / 3),
    ("math_calc", "The first is 12", ["12", "9", "31"], 1 / 3),
    ("math_calc", "9, 12, 31", ["12", "9", "31"], 0.0),  # nothing counts behind the first that is wrong
    ("math_calc", "007, 0", ["7", "0"], 1.0),
    ("math_calc", "1" * 5000, ["12"], 0.0),  # more digits than Python makes a number of
    ("math_calc", "", ["12"], 0.0),
    ("summary", "The cat sat.\nThe dog ran", ["the dog RAN\nthe cat sat!"], 1.0),  # by lines, in any order
    ("summary", "a b c d", ["a c x"], 4 / 7),  # P 2/4, R 2/3
    ("summary", "b a", ["a b"], 0.5),  # the longest common subsequence has one word
    ("summary", "a a a", ["a"], 0.5),  # every word counts once
    ("summary", "... !", ["a"], 0.0),
    ("code_debug", "B. merge", ["merge", "B"], 1.0),
    ("code_debug", " B: because", ["merge", "B"], 1.0),
    ("code_debug", "B", ["merge", "B"], 0.0),  # the letter alone is no answer without a cue
    ("code_debug", "The answer is: merge", ["merge", "B"], 1.0),
    ("code_debug", "The answer is: C. No, it is: B", ["merge", "B"], 0.0),  # the first cue of the list decides
    ("code_debug", "The correct option is: **B**", ["merge", "B"], 1.0),  # "correct is: B" once cleaned
    ("code_debug", "The answer is:", ["merge", "B"], 0.0),
    ("code_debug", "", ["merge", "B"], 0.0),
    ("code_run", "The return value is: 12.", ["12"], 1.0),
    ("code_run", "It is -12", ["12"], 0.0),
    ("code_run", "12 it is", ["12"], 0.0),
    ("code_run", "", ["12"], 0.0),
    ("choice", "B", ["Ann", "B"], 1.0),
    ("choice", "A. Ann", ["Ann", "B"], 0.0),
    ("choice", "Because of Bob", ["Ann", "B"], 1.0),  # its first letter is B: as published
    ("choice", "Ann", ["Ann", "C"], 0.0),  # and here A
    ("choice", "the answer is: Ann", ["Ann", "B"], 1.0),
    ("choice", "it must be B", ["Ann", "B"], 1.0),
    ("choice", " \n", ["Ann", "B"], 0.0),
    ("speaker", "It is Jack.", ["JACK"], 1.0),
    ("speaker", "Jackson", ["JACK"], 0.0),
    ("qa_f1_characters", "北京。", ["北京市"], 0.8),  # P 1, R 2/3
    ("qa_f1_characters", "", ["北京"], 0.0),
]


@pytest.mark.parametrize(("name", "prediction", "references", "expected"), CASES)
def test_scorers_give_the_values_worked_out_by_hand(
    name: str, prediction: str, references: list[str], expected: float
) -> None:
    assert score(name, prediction, references) == pytest.approx(expected, abs=1e-7)


def test_every_scorer_has_a_case() -> None:
    assert {name for name, *_ in CASES} == set(SCORERS) - {"qa_f1_zh", "rouge_l_zh"}


def test_control_characters_become_newlines() -> None:
    assert cleaned(" a\tb\x1fc\r\n ") == "a\nb\nc"
    assert cleaned("a\x7fb é") == "a\x7fb é"  # not a control character to RULER


def test_chinese_is_scored_by_words() -> None:
    pytest.importorskip("jieba")
    assert score("qa_f1_zh", "中国的首都是北京", ["中国的首都是北京。"]) == 1.0
    assert score("rouge_l_zh", "北京", ["上海"]) == 0.0


def test_chinese_without_jieba_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    with refused("missing_package"):
        score("qa_f1_zh", "北京", ["北京"])


@pytest.mark.parametrize(
    ("name", "references", "says"),
    [
        ("string_match_al", ["a"], "unknown_name: did you mean 'string_match_all'"),
        ("qa_f1", [], "missing_input"),
        ("retrieval", ["seven"], "wrong_file"),  # it names no paragraph
    ],
)
def test_what_cannot_be_scored_is_refused(name: str, references: list[str], says: str) -> None:
    with refused(says):
        score(name, "7", references)
