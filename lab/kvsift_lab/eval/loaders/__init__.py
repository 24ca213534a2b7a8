"""Loaders of local files in the published formats of benchmarks. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path

from kvsift.errors import InvalidValue, MissingFile, WrongFile, unknown
from kvsift.texts.layout import Encode
from kvsift_lab.eval.loaders import documents, infinitebench, longbench, ruler
from kvsift_lab.eval.loaders.reading import ContextFitter, JsonLine, depth_of, read_lines
from kvsift_lab.eval.sample import Question, Sample
from kvsift_lab.eval.tasks.perplexity import NUM_TARGETS

OWN_TOKENS = 64
"""The most tokens of an answer to an own question."""

Loader = Callable[[Path, ContextFitter], Iterator[Sample]]


def load_own(path: Path, fitting: ContextFitter) -> Iterator[Sample]:
    """Own questions: lines with context, question and answer, a text or a list of texts of which any is right.

    Consecutive lines with one context are questions about one sample, which is prefilled once.
    """
    for context, lines in groupby(read_lines(path), lambda line: line.text("context")):
        yield fitting.sample("jsonl", context, *(_own_question(line, context) for line in lines))


def _own_question(line: JsonLine, context: str) -> Question:
    answer = line.values.get("answer")
    answers = line.texts("answer") if isinstance(answer, list) else (line.text("answer"),)
    for key, text in (("question", line.text("question")), *(("answer", text) for text in answers)):
        if not text.strip():
            raise line.error(f"{key!r} is empty.")
    depth = depth_of(context, answers[:1])
    return Question(line.text("question"), " | ".join(answers), depth, answers, max_new_tokens=OWN_TOKENS)


LOADERS: dict[str, Loader] = {
    "ruler": ruler.load,
    "longbench": longbench.load,
    "infinitebench": infinitebench.load,
    "pg19": documents.load_texts,
    "texts": documents.load_texts,
    "squad": documents.load_squad,
    "hotpotqa": documents.load_hotpotqa,
    "jsonl": load_own,
}


def load_file(
    kind: str,
    path: str | Path,
    encode: Encode,
    limit: int | None = None,
    max_tokens: int | None = None,
    prefix: Sequence[int] = (),
    targets: int = NUM_TARGETS,
) -> list[Sample]:
    """Return the samples of a file, in its order.

    Args:
        kind: a name in ``LOADERS``.
        path: a file; for pg19 and texts a directory of .txt files, or one of them.
        encode: token ids of a piece of text without special tokens.
        limit: the most samples to load.
        max_tokens: of a whole prompt without the answer. Longer contexts lose their middle, as in LongBench, and the
            sample's ``notes`` say so. It is the exact length where the file leaves it open: pg19 and texts (with
            targets), squad and hotpotqa (without the question); 32,768 by default.
        prefix: first ids of every context, such as bos.
        targets: tokens that are predicted after each text, for pg19 and texts.

    Raises:
        InputError: if a line is not in the format, with file and line; if there is no sample.
    """
    if kind not in LOADERS:
        raise unknown("kind of file", kind, LOADERS)
    for name, number in (("limit", limit), ("max_tokens", max_tokens), ("targets", targets)):
        if number is not None and number < 1:
            raise InvalidValue(f"{name}={number}: give a number above 0, or leave it out.")
    path = Path(path).expanduser()
    if not path.exists():
        raise MissingFile(f"there is no {path}.")
    fitting = ContextFitter(encode, max_tokens, tuple(prefix), targets)
    samples = list(islice(LOADERS[kind](path, fitting), limit))
    if not samples:
        raise WrongFile(f"{path} has no samples.")
    return samples
