"""A results directory: samples that survive whatever ends a run, and the summary beside them.

samples.jsonl   a JSON object per sample and line, appended, each on the disk before the next begins
summary.json    recipe, fingerprint, sessions and the tables made from the samples; replaced as a whole
recipe.toml     the recipe as it was given

The first two are packed when nothing is left to do and they are large: samples.jsonl.xz, summary.json.xz.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvsift.errors import InputError
from kvsift.eval.appended import Lines
from kvsift.eval.durable import reason, write_atomically
from kvsift.eval.fingerprint import asks_for_more, difference, document_of, fingerprint
from kvsift.eval.packed import pack_large, packed_path, read_stored, stored
from kvsift.eval.recipe import Job, Recipe

SAMPLES, SUMMARY, RECIPE = "samples.jsonl", "summary.json", "recipe.toml"

Result = dict[str, Any]
"""One sample: what was asked under which plan, the answer, its score and its counters."""

Done = frozenset[tuple[str, int]]
"""(plan, question) of the samples of a context that are there already."""


class ResultsDirectory:
    """Opened for a recipe: made new, or gone on with; the recipe may have grown.

    Attributes:
        path: of the directory.
        samples: those that are there.
        sessions: where and when it was worked on, this time last.
        dropped: bytes of a line that a killed process left unfinished; the file no longer has them.

    Raises:
        InputError: if it holds results of another recipe, or cannot be read or written; nothing is changed then.
    """

    def __init__(self, path: Path, recipe: Recipe, text: str) -> None:
        self.path = path
        self._recipe = document_of(recipe)
        before = self._before()
        self.sessions: list[dict[str, Any]] = before.get("sessions", [])
        self._whole = False
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lines = Lines(path / SAMPLES)
        except OSError as error:
            raise _no_place(path, error) from None
        try:
            self.samples = parse_samples(self._lines.text, self._lines.source)
            if not before or before["fingerprint"] != fingerprint(self._recipe):
                write_atomically(path / RECIPE, text)
        except OSError as error:
            self._lines.close()
            raise _no_place(path, error) from None
        except InputError:
            self._lines.close()
            raise
        self.dropped = self._lines.dropped
        self._done: dict[Job, set[tuple[str, int]]] = {}
        for sample in self.samples:
            self._note(sample)

    def _before(self) -> dict[str, Any]:
        if not stored(self.path / SUMMARY).exists():
            samples = stored(self.path / SAMPLES)
            if samples.exists() and samples.stat().st_size:
                raise InputError(
                    f"{self.path} holds {samples.name} but no {SUMMARY}: it is no results directory of kvsift."
                )
            return {}
        before = read_summary(self.path)
        same = before["fingerprint"] == fingerprint(self._recipe)
        if not same and not asks_for_more(before["recipe"], self._recipe):
            raise InputError(
                f"{self.path} holds results of another recipe: {difference(before['recipe'], self._recipe)}. Give "
                f"another --out, or the recipe that was used before, {self.path / RECIPE}."
            )
        return before

    def append(self, result: Result) -> None:
        """Put one more sample on the disk.

        Raises:
            InputError: if it has no room; the file then ends with the last sample that had.
        """
        try:
            self._lines.append(json.dumps(result))
        except OSError as error:
            raise self._no_room(error) from error
        self.samples.append(result)
        self._note(result)

    def write_summary(self, tables: dict[str, Any]) -> None:
        """Replace the summary, unless it says the same.

        Raises:
            InputError: if the disk has no room; the older summary stays.
        """
        head = {"kind": "evaluation", "fingerprint": fingerprint(self._recipe), "recipe": self._recipe}
        text = json.dumps({**head, "sessions": self.sessions, **tables}, indent=1) + "\n"
        self._whole = not tables.get("left_out", True)
        summary = self.path / SUMMARY
        try:
            if stored(summary).exists() and read_stored(summary) == text.encode():
                return
            write_atomically(summary, text)
            packed_path(summary).unlink(missing_ok=True)  # an older one
        except OSError as error:
            raise self._no_room(error) from error

    def done(self, job: Job) -> Done:
        """What of a context is there already."""
        return frozenset(self._done.get(job, ()))

    def close(self) -> None:
        """Let others write. If nothing is left to do, pack what is large."""
        with suppress(OSError):  # where there is no room it stays plain
            try:
                if self._whole:
                    pack_large(self.path / SUMMARY)
            finally:
                self._lines.close(self._whole)

    def _note(self, sample: Result) -> None:
        self._done.setdefault(job_of(sample), set()).add((sample["plan"], sample["question"]))

    def _no_room(self, error: OSError) -> InputError:
        return InputError(
            f"{self.path}: {reason(error)}. The {len(self.samples):,} samples so far are safe; make room and give the "
            "same command again to go on."
        )


def _no_place(path: Path, error: OSError) -> InputError:
    return InputError(f"{path} cannot hold results: {error.strerror}.")


def parse_samples(text: str, path: Path) -> list[Result]:
    """The samples of whole lines.

    Raises:
        InputError: if a line is no sample.
    """
    samples = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            sample = json.loads(line)
            job_of(sample)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(
                f"line {number} of {path} is no sample: something else wrote there, or the disk lost it. Take the line "
                "out, and the same command makes that sample again."
            ) from None
        samples.append(sample)
    return samples


def job_of(sample: Result) -> Job:
    """The context that a sample is about."""
    return Job(sample["task"], sample["length"], sample["seed"])


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a results directory.

    Raises:
        InputError: if it is none.
    """
    try:
        found = json.loads(read_stored(path / SUMMARY))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is no results directory: {SUMMARY} cannot be read ({error}).") from None
    if not isinstance(found, dict) or found.get("kind") != "evaluation":
        raise InputError(f"{path / SUMMARY} is no summary of an evaluation.")
    return found
