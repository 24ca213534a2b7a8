"""How runs are shown: answers side by side, and the proof beneath them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsift.errors import NothingSkipped
from kvsift.runtime.plan import PHASES, Plan

if TYPE_CHECKING:
    from kvsift.engine.llm import LLM, Document
    from kvsift.engine.result import Answer


class Reading(NamedTuple):
    """What reading a document took, and what its tokens saw."""

    seconds: float = 0.0
    density: float | None = None  # of prefill


NOTHING_READ = Reading()


def summary(answers: Sequence[Answer], read: Reading = NOTHING_READ) -> dict[str, Any]:
    """One plan's numbers over its answers: first-answer TTFT with the document, means, sums of bytes; for JSON."""
    itl = [gap for answer in answers for gap in answer.itl_s]
    layers = {"visible_tokens": _mean(answers, "visible_tokens"), "density": _mean(answers, "density")}
    return {
        "plan": answers[0].plan,
        "path": answers[0].path,
        "host": answers[0].host,
        "index": answers[0].index,
        "dense_below": answers[0].dense_below,
        "prompt_tokens": max(answer.prompt_tokens for answer in answers),
        "ttft_s": read.seconds + answers[0].ttft_s,
        "read_s": read.seconds,
        "read_density": read.density,
        "ttft_cached_s": sum(answer.ttft_s for answer in answers) / len(answers),
        "tpot_s": sum(itl) / len(itl) if itl else None,
        **layers,
        "kv_bytes_read": sum(answer.decode("kv_bytes_read") for answer in answers),
        "kv_bytes_dense": sum(answer.decode("kv_bytes_dense") for answer in answers),
        "recall": _mean(answers, "recall"),
        "recovery": _mean(answers, "recovery"),
        "select_s": sum(answer.decode("select_s") for answer in answers),
        "kv_bytes": max(answer.kv_bytes for answer in answers),
        "peak_memory_bytes": max(answer.peak_memory_bytes for answer in answers),
        "phases": [answer.stats["phases"] for answer in answers],
        "layers": answers[0].stats["layers"],
    }


def print_answers(
    llm: LLM,
    document: Document,
    questions: Sequence[str],
    answers: Sequence[Sequence[Answer]],
    reads: Sequence[Reading],
) -> None:
    """Questions and answers, a column per plan, then the numbers."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    rows = [summary(asked, read) for asked, read in zip(answers, reads, strict=True)]
    console.print(
        f"{document.num_tokens:,} tokens read in {reads[0].seconds:.1f} s by {llm.directory.path.name} on {llm.device} "
        f"({str(llm.dtype).removeprefix('torch.')})"
    )
    table = Table("question", *(_wrapped(row["plan"]) for row in rows), show_lines=True)
    for index, question in enumerate(questions):
        table.add_row(question, *(asked[index].text or "(nothing)" for asked in answers))
    console.print(table)
    console.print(proof_table(rows))


def proof_table(rows: Sequence[dict[str, Any]]) -> Any:
    """What each plan cost and kept, a column per plan."""
    from rich.table import Table

    table = Table("", *(_wrapped(row["plan"]) for row in rows))
    lines = {
        "first token, document read (TTFT)": lambda r: f"{r['ttft_s']:.2f} s",
        "prefill density": lambda r: _percent(r["read_density"]),
        "first token, document cached": lambda r: f"{r['ttft_cached_s']:.2f} s",
        "per token after it (TPOT)": lambda r: "-" if r["tpot_s"] is None else f"{1e3 * r['tpot_s']:.1f} ms",
        "of it, choosing": _time_to_choose,
        "visible tokens per query": lambda r: "-" if r["visible_tokens"] is None else f"{r['visible_tokens']:,.0f}",
        "density": lambda r: _percent(r["density"]),
        "KV bytes read": lambda r: _bytes(r["kv_bytes_read"]),
        "of dense": lambda r: _percent(r["kv_bytes_read"] / r["kv_bytes_dense"] if r["kv_bytes_dense"] else None),
        "attention mass recovered": lambda r: _percent(r["recovery"]),
        "top-10 tokens seen": lambda r: _percent(r["recall"]),
        "KV held": lambda r: _bytes(r["kv_bytes"]),
        "decoded by": lambda r: _decoded_by(r["path"]),
        "host attention": lambda r: r["host"] or "-",
        "index": lambda r: _index(r["index"]),
        "peak memory of the process": lambda r: _bytes(r["peak_memory_bytes"]),
    }
    for name, show in lines.items():
        table.add_row(name, *(show(row) for row in rows))
    return table


def _wrapped(plan: str) -> Any:
    """A column header that shows all of a plan, however narrow the terminal."""
    from rich.table import Column

    return Column(plan, overflow="fold", min_width=8)


def check_skipped(plan: Plan, answers: Sequence[Answer], strict: bool, read: Reading = NOTHING_READ) -> None:
    """Say loudly that a plan that should have skipped something did not.

    Raises:
        NothingSkipped: under ``strict``.
    """
    for phase in PHASES:
        rule = plan.rule(phase)
        densities = [answer.stats["phases"][phase]["density"] for answer in answers]
        densities += [read.density] if phase == "prefill" else []
        ran = [density for density in densities if density is not None]
        if rule is None or rule.method.unbounded or not ran or min(ran) < 1:
            continue
        message = plan.skipped_nothing(phase)
        below = max(answer.dense_below for answer in answers)
        if phase == "decode" and below:
            message += (
                f" Here contexts below {below:,} tokens are decoded in full, because that is as fast; --dense-below 0 "
                "sifts them too."
            )
        if strict:
            raise NothingSkipped(message)
        print(f"kvsift: WARNING: {message}", file=sys.stderr)


def _mean(answers: Sequence[Answer], key: str) -> float | None:
    values = [value for answer in answers if (value := answer.decode(key)) is not None]
    return sum(values) / len(values) if values else None


def _time_to_choose(row: dict[str, Any]) -> str:
    num_layers = max(len({layer["layer"] for layer in row["layers"]}), 1)
    steps = sum(phases["decode"]["queries"] for phases in row["phases"]) / num_layers
    return "-" if not steps or not row["select_s"] else f"{1e3 * row['select_s'] / steps:.1f} ms"


def _decoded_by(path: str) -> str:
    return "captured steps" if path == "captured" else "the composed path"


def _index(layers: dict[int, list[dict[str, Any]]]) -> str:
    """Kinds of index, how many layers, or of a choice by head KV heads, have each, and what audits found."""
    built = [part for rows in layers.values() for row in rows for part in row.get("indexes", ())]
    by_head = any("heads" in part for part in built)
    kinds = Counter(kind for part in built for kind in part.get("heads", [part["kind"]]))
    of_each = [f"{kind} in {count} {'KV heads' if by_head else 'layers'}" for kind, count in kinds.items()]
    found = [share for rows in layers.values() for row in rows for share in row.get("audits", {}).get("found", ())]
    if found:
        of_each.append(f"{_percent(sum(found) / len(found))} of a scan's keys found in {len(found)} audits")
    return ", ".join(of_each) or "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _bytes(amount: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if amount >= size:
            return f"{amount / size:.1f} {unit}"
    return f"{amount} B"
