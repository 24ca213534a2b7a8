"""The contexts of a recipe, made or read from files, for one tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kvsift.errors import InputError
from kvsift.eval.loaders import load_file
from kvsift.eval.recipe import Job, Recipe
from kvsift.eval.task_files import TaskFile
from kvsift.eval.tasks import Sample, framed, make_sample


class Contexts:
    """Samples by their job."""

    def __init__(self, recipe: Recipe, tokenizer: Any) -> None:
        self._recipe, self._tokenizer = recipe, tokenizer
        self._of_file = lru_cache(maxsize=1)(self._load)

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text, special tokens not added."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def jobs(self) -> list[Job]:
        """Every context of the recipe, those of files included."""
        read = [Job(file.name, None, index) for file in self._recipe.files for index in range(len(self._of_file(file)))]
        return [*self._recipe.jobs, *read]

    def sample(self, job: Job) -> Sample:
        """The context of a job with its questions.

        Raises:
            InputError: if it cannot be made.
        """
        sample = self._read(job) if job.length is None else self._made(job)
        return framed(sample) if self._recipe.framed else sample

    def _read(self, job: Job) -> Sample:
        file = next(file for file in self._recipe.files if file.name == job.task)
        return self._of_file(file)[job.seed]

    def _made(self, job: Job) -> Sample:
        assert job.length is not None
        try:
            return make_sample(
                job.task, job.length, job.seed, self.encode, self._recipe.questions_per_context, self._prefix
            )
        except ValueError as error:
            raise InputError(f"task {job.task!r} cannot be made: {error}") from error

    @property
    def _prefix(self) -> list[int]:
        bos = self._tokenizer.bos_token_id
        return [] if bos is None else [bos]

    def _load(self, file: TaskFile) -> Sequence[Sample]:
        return load_file(file.kind, file.path, self.encode, file.limit, file.max_tokens, self._prefix)
