"""Results directory: samples that survive an interrupted run, and their summary.

samples.jsonl   one JSON object per line and sample, each flushed to the disk before the next
summary.json    recipe, fingerprint, sessions and the tables of the samples; replaced as a whole
recipe.toml     the recipe as given

Large files of a finished run are packed: samples.jsonl.xz, summary.json.xz.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvsift.engine.atomic_files import reason, write_atomically
from kvsift.errors import InputError
from kvsift_lab.eval.append_only_file import AppendOnlyFile
from kvsift_lab.eval.fingerprint import difference, document_of, fingerprint, is_extended
from kvsift_lab.eval.packed import pack_large, packed_path, read_stored, stored
from kvsift_lab.eval.recipe import EvalRecipe, Job

SAMPLES, SUMMARY, RECIPE = "samples.jsonl", "summary.json", "recipe.toml"

Result = dict[str, Any]
"""One sample: question, plan, answer, score and counters."""

Done = frozenset[tuple[str, int]]
"""(plan, question) of the finished samples of a context."""


class ResultsDirectory:
    """Results directory of a recipe, created or resumed; the recipe may be an extension of the earlier one.

    Attributes:
        path: of the directory.
        samples: the finished samples.
        sessions: machine and time of each run, the current one last.
        dropped: bytes of an unfinished line of a killed process, which is removed.

    Raises:
        InputError: if it has results of another recipe, or cannot be read or written; it is unchanged then.
    """

    def __init__(self, path: Path, recipe: EvalRecipe, text: str) -> None:
        self.path = path
        self._recipe = document_of(recipe)
        before = self._earlier_summary()
        self.sessions: list[dict[str, Any]] = before.get("sessions", [])
        self._finished = False
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lines = AppendOnlyFile(path / SAMPLES)
        except OSError as error:
            raise InputError(f"{path} cannot hold results: {error.strerror}.") from None
        try:
            self.samples = parse_samples(self._lines.text, self._lines.source)
            if not before or before["fingerprint"] != fingerprint(self._recipe):
                write_atomically(path / RECIPE, text)
        except OSError as error:
            self._lines.close()
            raise InputError(f"{path} cannot hold results: {error.strerror}.") from None
        except InputError:
            self._lines.close()
            raise
        self.dropped = self._lines.dropped
        self._done: dict[Job, set[tuple[str, int]]] = {}
        for sample in self.samples:
            self._note(sample)

    def _earlier_summary(self) -> dict[str, Any]:
        if not stored(self.path / SUMMARY).exists():
            samples = stored(self.path / SAMPLES)
            if samples.exists() and samples.stat().st_size:
                raise InputError(
                    f"{self.path} holds {samples.name} but no {SUMMARY}: it is not a results directory of kvsift."
                )
            return {}
        before = read_summary(self.path)
        same = before["fingerprint"] == fingerprint(self._recipe)
        if not same and not is_extended(before["recipe"], self._recipe):
            raise InputError(
                f"{self.path} holds results of another recipe: {difference(before['recipe'], self._recipe)}. Give "
                f"another --out, or the earlier recipe, {self.path / RECIPE}."
            )
        return before

    def append(self, result: Result) -> None:
        """Append a sample and flush it to the disk.

        Raises:
            InputError: if the disk is full; the file then ends with the sample before.
        """
        try:
            self._lines.append(json.dumps(result))
        except OSError as error:
            raise self._disk_error(error) from error
        self.samples.append(result)
        self._note(result)

    def write_summary(self, tables: dict[str, Any]) -> None:
        """Replace the summary unless it is unchanged.

        Raises:
            InputError: if the disk is full; the older summary stays.
        """
        head = {"kind": "evaluation", "fingerprint": fingerprint(self._recipe), "recipe": self._recipe}
        text = json.dumps({**head, "sessions": self.sessions, **tables}, indent=1) + "\n"
        self._finished = not tables.get("left_out", True)
        summary = self.path / SUMMARY
        try:
            if stored(summary).exists() and read_stored(summary) == text.encode():
                return
            write_atomically(summary, text)
            packed_path(summary).unlink(missing_ok=True)  # an older summary
        except OSError as error:
            raise self._disk_error(error) from error

    def done(self, job: Job) -> Done:
        """Return the finished samples of a context."""
        return frozenset(self._done.get(job, ()))

    def close(self) -> None:
        """Release the lock; pack the large files of a finished run."""
        with suppress(OSError):  # on a full disk they stay plain
            try:
                if self._finished:
                    pack_large(self.path / SUMMARY)
            finally:
                self._lines.close(self._finished)

    def _note(self, sample: Result) -> None:
        self._done.setdefault(job_of(sample), set()).add((sample["plan"], sample["question"]))

    def _disk_error(self, error: OSError) -> InputError:
        return InputError(
            f"{self.path}: {reason(error)}. The {len(self.samples):,} samples so far are safe; make room and give the "
            "same command again to go on."
        )


def parse_samples(text: str, path: Path) -> list[Result]:
    """Parse the samples of whole lines.

    Raises:
        InputError: if a line is not a sample.
    """
    samples = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            sample = json.loads(line)
            job_of(sample)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(
                f"line {number} of {path} is not a sample: another program wrote it, or the disk lost it. Remove the "
                "line, and the same command makes that sample again."
            ) from None
        samples.append(sample)
    return samples


def job_of(sample: Result) -> Job:
    """Return the job of a sample."""
    return Job(sample["task"], sample["length"], sample["seed"])


def read_summary(path: Path) -> dict[str, Any]:
    """Return the summary of a results directory.

    Raises:
        InputError: if there is none.
    """
    try:
        summary = json.loads(read_stored(path / SUMMARY))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a results directory: {SUMMARY} cannot be read ({error}).") from None
    if not isinstance(summary, dict) or summary.get("kind") != "evaluation":
        raise InputError(f"{path / SUMMARY} is not a summary of an evaluation.")
    return summary
