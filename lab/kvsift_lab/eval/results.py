"""Results directory of ``kvsift eval``: samples that survive an interrupted run, and their summary.

samples.jsonl   one JSON object per line and sample, each flushed to the disk before the next
summary.json    recipe, fingerprint, sessions and the tables of the samples; replaced as a whole
tables.md       the tables of a finished result
recipe.toml     the recipe as given

The samples of a finished result are compressed with xz, to a twentieth: samples.jsonl.xz.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvsift.atomic_files import reason, write_atomically
from kvsift.errors import DamagedFile, InputError, MissingFile, OtherModel, UnreadableFile, UnwritableFile, WrongFile
from kvsift.plan.syntax import parse_plan
from kvsift_lab.eval.recipe import Done, EvalRecipe, Job, Result, digest
from kvsift_lab.eval.summary import tables_of
from kvsift_lab.eval.tables import score_table
from kvsift_lab.stored import SUMMARY, SampleFile, compressed, read_json, stored, whole_lines

SAMPLES, TABLES, RECIPE = "samples.jsonl", "tables.md", "recipe.toml"
NOT_PART_OF_A_RESULT = {"device"}
MAY_GROW = {"tasks", "lengths", "plans", "budgets", "rows", "questions_per_task"}  # by further values


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
            self._lines = SampleFile(path / SAMPLES)
        except OSError as error:
            raise UnwritableFile(f"{path} cannot hold results: {error.strerror}.") from None
        try:
            self.samples = parse_samples(self._lines.text, stored(path / SAMPLES))
            if not before or before["fingerprint"] != fingerprint(self._recipe):
                write_atomically(path / RECIPE, text)
        except (OSError, InputError) as error:
            self._lines.close()
            if isinstance(error, InputError):
                raise
            raise UnwritableFile(f"{path} cannot hold results: {error.strerror}.") from None
        self.dropped = self._lines.dropped
        self._done: dict[Job, set[tuple[str, int]]] = {}
        for sample in self.samples:
            self._note(sample)

    def _earlier_summary(self) -> dict[str, Any]:
        if not stored(self.path / SUMMARY).exists():
            samples = stored(self.path / SAMPLES)
            if samples.exists() and samples.stat().st_size:
                raise WrongFile(
                    f"{self.path} holds {samples.name} but no {SUMMARY}: it is not a results directory of kvsift."
                )
            return {}
        before = read_summary(self.path)
        same = before["fingerprint"] == fingerprint(self._recipe)
        if not same and not is_extended(before["recipe"], self._recipe):
            raise OtherModel(
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
        """Replace the summary unless it is unchanged, and write the tables of a finished result.

        Raises:
            InputError: if the disk is full; the older summary stays.
        """
        head = {"kind": "evaluation", "fingerprint": fingerprint(self._recipe), "recipe": self._recipe}
        text = json.dumps({**head, "sessions": self.sessions, **tables}, indent=1) + "\n"
        self._finished = not tables.get("left_out", True)
        files = {SUMMARY: text}
        if self._finished:
            files[TABLES] = score_table(tables, self._recipe["budgets"]) + "\n"
        try:
            for name, content in files.items():
                path = self.path / name
                if not path.exists() or path.read_text() != content:
                    write_atomically(path, content)
                compressed(path).unlink(missing_ok=True)  # of an earlier version
            if not self._finished:
                (self.path / TABLES).unlink(missing_ok=True)
        except OSError as error:
            raise self._disk_error(error) from error

    def done(self, job: Job) -> Done:
        """Return the finished samples of a context."""
        return frozenset(self._done.get(job, ()))

    def close(self) -> None:
        """Release the lock; compress the samples of a finished result."""
        with suppress(OSError, ImportError):  # they stay plain on a full disk, and if Python has no lzma
            self._lines.close(self._finished)

    def _note(self, sample: Result) -> None:
        self._done.setdefault(Job.of(sample), set()).add((sample["plan"], sample["question"]))

    def _disk_error(self, error: OSError) -> InputError:
        return UnwritableFile(
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
            Job.of(sample)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DamagedFile(
                f"line {number} of {path} is not a sample: another program wrote it, or the disk lost it. Remove the "
                "line, and the same command makes that sample again."
            ) from None
        samples.append(sample)
    return samples


def read_summary(path: Path) -> dict[str, Any]:
    """Return the summary of a results directory.

    Raises:
        InputError: if there is none.
    """
    try:
        summary = read_json(path / SUMMARY)
    except (OSError, ValueError, RecursionError) as error:
        raise WrongFile(f"{path} is not a results directory: {SUMMARY} cannot be read ({error}).") from None
    if not isinstance(summary, dict) or summary.get("kind") != "evaluation":
        raise WrongFile(f"{path / SUMMARY} is not a summary of an evaluation.")
    return summary


def result_paths(path: Path) -> list[Path]:
    """Return a result, or the results directories inside of a directory that is none, by name: what ``--out`` names."""
    if not path.is_dir() or stored(path / SUMMARY).exists():
        return [path]
    return sorted(inner for inner in path.iterdir() if stored(inner / SUMMARY).exists()) or [path]


def load_result(path: Path) -> dict[str, Any]:
    """Return one evaluation: path, recipe, rows, samples, sessions and tables.

    Raises:
        InputError: if it is no results directory.
    """
    if not path.exists():
        raise MissingFile(f"the result {path} does not exist. Name a directory that kvsift eval wrote.")
    summary = read_summary(path)
    try:
        text = whole_lines(path / SAMPLES).decode(errors="replace")
    except OSError as error:
        raise UnreadableFile(f"{path / SAMPLES} cannot be read: {error.strerror}.") from None
    samples = parse_samples(text, stored(path / SAMPLES))
    jobs = [Job(*job) for job in summary["contexts"]]
    last = {key: summary["sessions"][-1][key] for key in ("commit", "versions", "machine")}
    tables = tables_of(summary["recipe"], samples, jobs)  # the summary of a killed run is older than its samples
    return {**summary, **last, **tables, "rows": summary["recipe"]["rows"], "samples": samples,
            "path": str(path)}  # fmt: skip


def document_of(recipe: EvalRecipe) -> dict[str, Any]:
    """Return a recipe for JSON, with its rows and the digests of its files."""
    digests = {path: digest(Path(path)) for path in [file.path for file in recipe.files] + _files_of_plans(recipe)}
    rows = [asdict(row) for row in recipe.rows]
    keys = {**asdict(recipe), "budgets": recipe.columns, "rows": rows, "digests": digests}
    document: dict[str, Any] = json.loads(json.dumps(keys))
    return document


def _files_of_plans(recipe: EvalRecipe) -> list[str]:
    plans = [parse_plan(row.plan) for row in recipe.rows]
    methods = [rule.method for plan in plans for rule in (plan.prefill, plan.decode) if rule is not None]
    named = {getattr(method, name, None) for method in methods for name in ("anchors", "calibration")}
    return sorted(str(path) for path in named if path is not None and Path(path).is_file())


def fingerprint(document: dict[str, Any]) -> str:
    """Return the digest of a recipe without its device."""
    parts = {key: value for key, value in document.items() if key not in NOT_PART_OF_A_RESULT}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def is_extended(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether every sample of a recipe is one of another, which may add contexts and rows."""

    def rest(document: dict[str, Any]) -> dict[str, Any]:
        known = {path: of_file for path, of_file in document["digests"].items() if path in before["digests"]}
        kept = {key: value for key, value in document.items() if key not in MAY_GROW | NOT_PART_OF_A_RESULT}
        return kept | {"digests": known}  # those of plans were not always kept

    more = before["questions_per_task"] <= now["questions_per_task"] and _rows(before) <= _rows(now)
    wider = all(set(before[key]) <= set(now[key]) for key in ("tasks", "lengths"))
    return rest(before) == rest(now) and more and wider


def _rows(document: dict[str, Any]) -> set[tuple[Any, ...]]:
    return {tuple(row[key] for key in ("plan", "budget", "role", "phase")) for row in document["rows"]}


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the changes from one recipe to another in words."""
    keys = [key for key in dict.fromkeys([*before, *now]) if key not in NOT_PART_OF_A_RESULT | {"rows"}]
    changed = [key for key in keys if before.get(key) != now.get(key)] or ["rows"]
    words = [f"{key} is {_text(now.get(key))} now and was {_text(before.get(key))}" for key in changed]
    lost = _rows(before) - _rows(now)
    if changed != ["rows"] and lost:
        words.append(f"rows are lost, {min(plan for plan, *_ in lost)} among them")
    return "; ".join(words)


def _text(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
