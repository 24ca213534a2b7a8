# ruff: noqa: RUF001  (Chinese prompts have Chinese punctuation)
"""Loader of LongBench's files, version 1: JSON lines with input, context, answers, length, dataset, language,
all_classes, _id.

A file may hold several data sets; those of LongBench-E, whose names end in ``_e``, are scored like the others. If
LongBench's ``dataset2prompt.json`` is in the file's folder, its prompts replace ours.

The structure of each prompt (what comes before and after the context, that question answering repeats its instruction,
the cue at the end), the scorers, the numbers and samsum's end at a newline are LongBench's (``config/*.json``,
``eval.py``, ``pred.py``); the wording is ours. Other few-shot data sets end at a newline here, which changes no score:
their scorers read one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from kvsift.errors import UnreadableFile, WrongFile, unknown
from kvsift_lab.eval.loaders.reading import ContextFitter, JsonLine, QuestionFormat, read_lines
from kvsift_lab.eval.sample import Sample

PROMPTS = "dataset2prompt.json"


def load(path: Path, fitting: ContextFitter) -> Iterator[Sample]:
    prompts = _prompts(path.parent / PROMPTS)
    return (_sample(line, fitting, prompts) for line in read_lines(path))


def _sample(line: JsonLine, fitting: ContextFitter, prompts: Mapping[str, str]) -> Sample:
    dataset = line.text("dataset").removesuffix("_e")
    if dataset not in FORMATS:
        raise line.error(str(unknown("LongBench data set", dataset, FORMATS)))
    own = FORMATS[dataset]
    form = replace(own, prompt=prompts.get(dataset, own.prompt))
    answers = line.texts("answers")
    references = _references(line, own.scorer, answers)
    return fitting.asked(dataset, line, form, {"{input}": line.text("input")}, answers, references)


def _references(line: JsonLine, scorer: str, answers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the references of the scorer: the answers; for a classification, the answer and then all classes."""
    if scorer != "classification":
        return answers
    classes = line.texts("all_classes")
    if len(answers) > 1:
        raise line.error(f"a classification has one answer; 'answers' has {len(answers)}.")
    return (*answers, *classes)


def _prompts(path: Path) -> dict[str, str]:
    """Return LongBench's own prompts, if present."""
    if not path.exists():
        return {}
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableFile(f"{path} cannot be read as JSON: {error}.") from None
    good = isinstance(prompts, dict) and all(isinstance(text, str) and "{context}" in text for text in prompts.values())
    if not good:
        raise WrongFile(f"{path} must be an object of prompts, each with {{context}} in it.")
    return dict(prompts)


def _question(before: str, source: str, instruction: str, end: str) -> str:
    """Return a prompt of question answering: the instruction, the text, the instruction again, the question."""
    return f"{before} {instruction}\n\n{source}{{context}}\n\n{instruction}\n\nQuestion: {{input}}{end}"


def _summary(what: str, title: str, instruction: str) -> str:
    return f"{what} {instruction}\n\n{title}:\n{{context}}\n\n{instruction}\n\nSummary:"


_BRIEF = "Answer the question in as few words as you can, with a single phrase if possible, and explain nothing."
_ARTICLE = (
    "Answer the question in as few words as you can, with a phrase or a sentence. Write yes or no where the question "
    'can be answered so, and "unanswerable" where the article does not say. Explain nothing.'
)
_ONLY = "Write the answer and nothing else."
_PASSAGES = _question("Some passages and a question follow.", "The passages:\n", _ONLY, "\nAnswer:")
_PAGE = "Write a summary of one page."

FORMATS: dict[str, QuestionFormat] = {
    "narrativeqa": QuestionFormat(
        _question("Here are a story and a question.", "Story: ", _BRIEF, "\n\nAnswer:"), "qa_f1", 128
    ),
    "qasper": QuestionFormat(
        _question("Here are a scientific article and a question.", "Article: ", _ARTICLE, "\n\nAnswer:"), "qa_f1", 128
    ),
    "multifieldqa_en": QuestionFormat(
        _question("Here are a text and a question.", "", _ONLY, "\nAnswer:"), "qa_f1", 64
    ),
    "multifieldqa_zh": QuestionFormat(
        "请阅读下面的文字，并用中文简短作答。\n\n{context}\n\n请根据上面的文字回答问题，只写出答案，不要写别的内容。\n\n"
        "问题：{input}\n回答：",
        "qa_f1_zh",
        64,
    ),
    "hotpotqa": QuestionFormat(_PASSAGES, "qa_f1", 32),
    "2wikimqa": QuestionFormat(_PASSAGES, "qa_f1", 32),
    "musique": QuestionFormat(_PASSAGES, "qa_f1", 32),
    "dureader": QuestionFormat(
        "请根据下面的文章回答问题。\n\n文章：{context}\n\n请根据上面的文章作答。\n\n问题：{input}\n回答：",
        "rouge_l_zh",
        128,
    ),
    "gov_report": QuestionFormat(_summary("Here is a report of a government agency.", "Report", _PAGE), "rouge_l", 512),
    "qmsum": QuestionFormat(
        "Here are the transcript of a meeting and a query about it. Answer the query in one or more sentences.\n\n"
        "Transcript:\n{context}\n\nAnswer the query about this meeting in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
        "rouge_l",
        512,
    ),
    "multi_news": QuestionFormat(_summary("Here are several news articles.", "News", _PAGE), "rouge_l", 512),
    "vcsum": QuestionFormat(
        "请阅读下面的会议记录，并写一段话总结会议内容。\n会议记录：\n{context}\n\n会议总结：", "rouge_l_zh", 512
    ),
    "trec": QuestionFormat(
        "Say of what type the last question is. Some examples come first.\n\n{context}\n{input}",
        "classification",
        64,
        "\n",
    ),
    "triviaqa": QuestionFormat(
        f"Answer the question from the passage. {_ONLY} Some examples come first.\n\n{{context}}\n\n{{input}}",
        "qa_f1_first_line",
        32,
        "\n",
    ),
    "samsum": QuestionFormat(
        "Sum up the dialogue in a few short sentences. Some examples come first.\n\n{context}\n\n{input}",
        "rouge_l_first_line",
        128,
        "\n",
    ),
    "lsht": QuestionFormat(
        "请判断最后一条新闻属于哪个类别，前面是一些例子。\n\n{context}\n{input}", "classification", 64, "\n"
    ),
    "passage_count": QuestionFormat(
        "Here are paragraphs from Wikipedia, some of which occur more than once. How many different ones are there?"
        "\n\n{context}\n\nWrite the number of different paragraphs and nothing else, for instance 1 or 2.\n\n"
        "The number is: ",
        "count",
        32,
    ),
    "passage_retrieval_en": QuestionFormat(
        "Here are 30 paragraphs from Wikipedia and an abstract of one of them. Which one is it?\n\n{context}\n\n"
        'The abstract:\n\n{input}\n\nWrite the number of the paragraph in the form "Paragraph 1" or "Paragraph 2".\n\n'
        "The answer is: ",
        "retrieval",
        32,
    ),
    "passage_retrieval_zh": QuestionFormat(
        "下面是若干段落，以及其中某一段的摘要。请指出摘要属于哪一段。\n\n{context}\n\n摘要如下\n\n{input}\n\n"
        '请写出该段落的编号，格式为"段落1"、"段落2"等\n\n答案：',
        "retrieval_zh",
        32,
    ),
    "lcc": QuestionFormat("Continue this code. \n{context}The next line:\n", "code_sim", 64),
    "repobench-p": QuestionFormat("Continue this code. \n{context}{input}The next line:\n", "code_sim", 64),
}
