"""Texts whose ends are decoded to calibrate layers: contexts with questions and their answers, or any texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsift.engine.calibration import pieces_of_texts
from kvsift.engine.layer_calibration import DecodedText
from kvsift.engine.model_runner import ModelRunner
from kvsift.engine.prompt import answer_text
from kvsift.errors import InputError
from kvsift.texts import TASKS, make_sample
from kvsift.texts.sample import Sample

QUESTIONS, ROOM = 8, 384  # of a context, and the most tokens that they and their answers take
DECODED = 128  # tokens at the end of a text


def task_texts(tokenizer: Any, tokens: int, length: int) -> tuple[list[DecodedText], dict[str, str]]:
    """Contexts of ``length`` tokens, questions and answers included, which are decoded; and the contexts by name.

    Raises:
        InputError: if a context is too short for a task.
    """
    texts, sources = [], {}
    encode = lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # noqa: E731
    prefix = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = min(ROOM, length // 2)
    for seed in range(max(tokens // length, 1)):
        task = list(TASKS.values())[seed % len(TASKS)]
        try:
            sample = make_sample(task, length - room, seed, encode, QUESTIONS, prefix)
        except ValueError as error:
            raise InputError(
                f"task {task.name!r} cannot be made of {length} tokens: {error}. Give a longer --length."
            ) from error
        texts.append(_answered(sample, encode, room))
        sources[f"{task.name} {seed}"] = sample.context
    return texts, sources


def ends(runner: ModelRunner, texts: Mapping[str, str], tokens: int, length: int) -> list[DecodedText]:
    """Pieces of at most ``length`` tokens, the ends of which are decoded."""
    pieces = pieces_of_texts(runner, texts, tokens, length)
    return [DecodedText(piece, len(piece) - min(DECODED, len(piece) // 2)) for piece in pieces]


def _answered(sample: Sample, encode: Any, room: int) -> DecodedText:
    ids: list[int] = []
    for question in sample.questions:
        asked: Sequence[int] = [*encode(question.tail), *encode(answer_text(question.answer))]
        if len(ids) + len(asked) > room:
            break
        ids += asked
    return DecodedText([*sample.context_ids, *ids], len(sample.context_ids))
