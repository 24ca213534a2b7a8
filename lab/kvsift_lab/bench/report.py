"""What the reports of all benches share: medians, cells, the table of a point, and quiet rounds. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from statistics import median
from typing import Any

from kvsift_lab.numbers import spread, table

QUIET = 0.05  # share of the processors that other processes take, at most
FEWEST_QUIET = 3  # rounds; with fewer, all rounds count, and the result says so

Point = dict[str, Any]  # of a result
Variant = dict[str, Any]  # of a point


def medians(point: Point, key: str = "samples_s") -> dict[str, float]:
    """Return the median seconds of every timed variant by its name."""
    return {v["name"]: float(median(v[key])) for v in point.get("variants", []) if v.get(key)}


def cell(number: float | None, spec: str = ".2f", unit: str = "") -> str:
    """Return a number as text; "-" for None and for what is not finite."""
    return "-" if number is None or not isfinite(number) else f"{number:{spec}}{unit}"


def ratio(one: float | None, other: float | None, spec: str = ".2f", unit: str = "") -> str:
    """Return one number over another as text; "-" where either is missing or the other is 0."""
    return cell(one / other, spec, unit) if one is not None and other else "-"


def us(seconds: float | None) -> str:
    """Return microseconds."""
    return "-" if seconds is None else cell(1e6 * seconds, ".1f")


def ms(seconds: float | None, spec: str = ".2f") -> str:
    """Return milliseconds."""
    return "-" if seconds is None else cell(1e3 * seconds, spec)


def spread_text(samples: Sequence[float]) -> str:
    """Return the interquartile range as a share of the median."""
    return f"{100 * spread(samples):.1f} %" if len(samples) > 1 else "1 sample"


def point_text(title: str, point: Point, cells: Callable[[Variant], dict[str, str]]) -> str:
    """Return a point for the terminal: its title, a Markdown table of what was measured, and reasons of the rest.

    Args:
        title: of the point.
        point: with variants, or with the reason why it was not measured.
        cells: returns the cells of a variant by column.
    """
    if "reason" in point:
        return f"{title}: not measured, {point['reason']}"
    variants = [*point["variants"], *point.get("breakdown", [])]
    rows = [{"": name_of(variant), **cells(variant)} for variant in variants if "reason" not in variant]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    reasons = [f"{name_of(variant)}: not measured, {variant['reason']}" for variant in variants if "reason" in variant]
    return "\n".join([f"{title}:", table(columns, [[row.get(c, "") for c in columns] for row in rows]), *reasons])


def name_of(variant: Variant) -> str:
    """Return the name of a variant; of a kernel alone, with the summary that it is of."""
    return f"{variant['score_by']} {variant['name']}" if "score_by" in variant else str(variant["name"])


def quiet_rounds(others: Sequence[float | None], most: float = QUIET) -> list[int]:
    """Return the rounds that count: those with at most such a share of load from other processes, or all if these are
    too few."""
    quiet = [number for number, share in enumerate(others) if share is None or share <= most]
    return quiet if len(quiet) >= FEWEST_QUIET else list(range(len(others)))


def middle(samples: Sequence[float], others: Sequence[float | None]) -> float:
    """Return the median over quiet rounds."""
    return median(samples[number] for number in quiet_rounds(others))


def commit_of(result: Mapping[str, Any]) -> str:
    """Return the commit of a result or a session in ten characters, and whether its tree had changes."""
    commit: str = result["commit"]
    return commit[:10] + (" with changes" if commit.endswith("+changes") else "")


def conditions(bandwidth: Sequence[float], others: Sequence[float | None]) -> str:
    """Render the state of the machine during the rounds in a line."""
    speed = f"{middle(bandwidth, others) / 1e9:.0f} GB/s"
    known = [share for share in others if share is not None]
    quiet = sum(share <= QUIET for share in known)
    if not known:
        return f"{speed}, {len(others)} rounds"
    if quiet < FEWEST_QUIET:
        return f"{speed}, {len(others)} rounds; THE MACHINE WAS BUSY: others took {median(known):.0%} of it"
    return f"{speed}, {quiet} of {len(others)} rounds were quiet and count"
