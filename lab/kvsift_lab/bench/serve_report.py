"""Results of servers under load, as text for a terminal and as a Markdown table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from kvsift_lab.bench.numbers import table, tokens
from kvsift_lab.bench.serve_numbers import percentile

Turn = dict[str, Any]
COLUMNS = ("context", "plan", "tokens/s in all", "over dense", "ITL p50", "p99", "first token, cold", "second question",
           "ITL p99 beside a document")  # fmt: skip


def plans_of(point: dict[str, Any]) -> list[str]:
    """Return the plans of a point, dense first."""
    return list(
        dict.fromkeys(turn["plan"] for turn in sorted(point["turns"], key=lambda turn: turn["plan"] != "dense"))
    )


def turns_of(point: dict[str, Any], plan: str) -> list[Turn]:
    """Return the turns of a plan, by round."""
    return sorted((turn for turn in point["turns"] if turn["plan"] == plan), key=lambda turn: turn["round"])


def rate(turn: Turn) -> float:
    """Return tokens per second of all clients while all get tokens, or else from first to last."""
    return float(turn["load"]["together_tokens_per_s"] or turn["load"]["tokens_per_s"])


def over_dense(point: dict[str, Any], plan: str, number: Callable[[Turn], float] = rate) -> float:
    """Return how many times the number of dense a plan's is, in the same round; the median of rounds."""
    pairs = zip(turns_of(point, plan), turns_of(point, "dense"))
    return median(number(one) / number(dense) for one, dense in pairs)


def gaps_of(turns: Sequence[Turn], part: str) -> list[float]:
    """Return the gaps between tokens of all turns in a part: load, second or other."""
    return [gap for turn in turns if part in turn for gap in turn[part]["itl_s"]]


def overhead(point: dict[str, Any], plan: str) -> float | None:
    """Return the tokens per second of the engine alone over those of the server, the median of rounds; None if it was
    not measured."""
    pairs = [(rate({"load": turn["direct"]}), rate(turn)) for turn in turns_of(point, plan) if "direct" in turn]
    return median(alone / served for alone, served in pairs) if pairs else None


def serve_table(points: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: a row per context and plan."""
    rows = []
    for point in points:
        for plan in plans_of(point) if "turns" in point else ():
            rows.append(_row(point, plan))
    return table(COLUMNS, rows)


def _row(point: dict[str, Any], plan: str) -> list[str]:
    turns = turns_of(point, plan)
    load, beside = gaps_of(turns, "load"), gaps_of(turns, "other")
    seconds = [turn["second"]["ttft_s"] for turn in turns if "second" in turn]
    return [
        tokens(point["context"]),
        f"`{plan}`",
        f"{median(map(rate, turns)):.0f}",
        "" if plan == "dense" else f"{over_dense(point, plan):.2f}x",
        _ms(percentile(load, 0.5)),
        _ms(percentile(load, 0.99)),
        f"{median(each['ttft_s'] for each in point['cold']):.1f} s",
        f"{median(seconds):.2f} s" if seconds else "-",
        _ms(percentile(beside, 0.99)) if beside else "-",
    ]


def point_text(point: dict[str, Any]) -> str:
    """Render a point for a terminal: a line per plan, the busy share of others, and the cost of the server."""
    title = f"{tokens(point['context'])} tokens"
    if "turns" not in point:
        return f"{title}: not measured, {point['reason']}"
    lines = [f"{title}: documents read in {median(each['ttft_s'] for each in point['cold']):.1f} s each; {busy(point)}"]
    for plan in plans_of(point):
        _, _, speed, ratio, half, most, _, second, beside = _row(point, plan)
        line = f"  {plan}: {speed} tokens/s{f' ({ratio})' if ratio else ''}, ITL {half}, p99 {most}"
        line += f"; second question {second}; ITL p99 beside a document {beside}"
        alone = overhead(point, plan)
        lines.append(line + ("" if alone is None else f"; the engine alone {alone:.2f}x as fast"))
    return "\n".join(lines)


def busy(point: dict[str, Any]) -> str:
    """Render the share of the processors that other processes used."""
    shares = [turn["others"] for turn in point["turns"] if turn["others"] is not None]
    if not shares:
        return "use by other processes unknown"
    return f"other processes used {100 * median(shares):.0f} % of the processors (at most {100 * max(shares):.0f} %)"


def closing_table(result: dict[str, Any]) -> str:
    """Return the table of all points, if one is measured."""
    points = [point for point in result["points"] if "turns" in point]
    return "\n" + serve_table(points) if points else ""


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"
