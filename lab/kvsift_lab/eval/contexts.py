"""Contexts of a recipe, generated or from files, for one tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kvsift.errors import TooShort
from kvsift_lab.eval.loaders import load_file
from kvsift_lab.eval.recipe import EvalRecipe, Job, TaskFile
from kvsift_lab.eval.tasks import Sample, find_task, framed, make_sample
from kvsift_lab.eval.tasks.perplexity import NUM_TARGETS


class Contexts:
    """Samples of a recipe by job."""

    def __init__(self, recipe: EvalRecipe, tokenizer: Any) -> None:
        self._recipe, self._tokenizer = recipe, tokenizer
        self._file_samples = lru_cache(maxsize=1)(self._load)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a piece of text without special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def jobs(self) -> list[Job]:
        """Return the jobs of all contexts, those of files included."""
        files = [
            Job(file.name, None, index) for file in self._recipe.files for index in range(len(self._file_samples(file)))
        ]
        return [*self._recipe.jobs, *files]

    def cost(self, job: Job) -> tuple[int, int]:
        """Return the tokens of a context, and how many are decoded after it under one plan at most."""
        if job.length is None:
            sample = self._from_file(job)
            answers = sum(question.max_new_tokens for question in sample.questions)
            return len(sample.context_ids), len(sample.targets) or answers
        task = find_task(job.task)
        num_questions = task.num_questions(job.length, self._recipe.questions_per_context)
        return job.length, NUM_TARGETS if task.kind == "perplexity" else num_questions * task.style.max_new_tokens

    def sample(self, job: Job) -> Sample:
        """Return the context of a job with its questions.

        Raises:
            InputError: if it cannot be made.
        """
        sample = self._from_file(job) if job.length is None else self._generated(job)
        return framed(sample) if self._recipe.framed else sample

    def _from_file(self, job: Job) -> Sample:
        file = next(file for file in self._recipe.files if file.name == job.task)
        return self._file_samples(file)[job.seed]

    def _generated(self, job: Job) -> Sample:
        assert job.length is not None
        try:
            return make_sample(
                job.task, job.length, job.seed, self.encode, self._recipe.questions_per_context, self._prefix
            )
        except ValueError as error:
            raise TooShort(f"task {job.task!r} cannot be made: {error}") from error

    @property
    def _prefix(self) -> list[int]:
        bos = self._tokenizer.bos_token_id
        return [] if bos is None else [bos]

    def _load(self, file: TaskFile) -> Sequence[Sample]:
        return load_file(file.kind, file.path, self.encode, file.limit, file.max_tokens, self._prefix, file.targets)
