"""How runs are shown: answers side by side, and the proof beneath them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsift.cli.escaping import cell
from kvsift.errors import NothingSkipped

if TYPE_CHECKING:
    from kvsift.engine.llm import LLM, Document
    from kvsift.engine.result import Answer
    from kvsift.methods.base import Phase
    from kvsift.runtime.plan import Plan

PHASES: tuple[Phase, ...] = ("prefill", "decode")  # runtime.plan has them, and imports torch


class Reading(NamedTuple):
    """What reading a document took, and what its tokens saw."""

    seconds: float = 0.0
    density: float | None = None  # of prefill


NOTHING_READ = Reading()
MAIN_ROWS = 8


class Column(NamedTuple):
    """The answers under one plan."""

    plan: Plan
    answers: Sequence[Answer]
    read: Reading = NOTHING_READ

    def summary(self) -> dict[str, Any]:
        """Its numbers, for JSON and tables."""
        return summary(self.answers, self.read)

    def check_skipped(self, strict: bool) -> None:
        """Warn if the plan should have skipped something and did not.

        Raises:
            NothingSkipped: under ``strict``.
        """
        for phase in PHASES:
            rule = self.plan.rule(phase)
            densities = [answer.stats["phases"][phase]["density"] for answer in self.answers]
            densities += [self.read.density] if phase == "prefill" else []
            ran = [density for density in densities if density is not None]
            if rule is None or rule.method.unbounded or not ran or min(ran) < 1:
                continue
            message = self.plan.skipped_nothing(phase)
            below = max(answer.dense_below for answer in self.answers)
            if phase == "decode" and below:
                message += (
                    f" Here contexts below {below:,} tokens are decoded in full, because that is as fast; "
                    "--dense-below 0 sifts them too."
                )
            if strict:
                raise NothingSkipped(message)
            print(f"kvsift: WARNING: {message}", file=sys.stderr)


def summary(answers: Sequence[Answer], read: Reading = NOTHING_READ) -> dict[str, Any]:
    """One plan's numbers over its answers: first-answer TTFT with the document, means, sums of bytes; for JSON."""
    itl = [gap for answer in answers for gap in answer.itl_s]
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
        "ttft_cached_s": sum(answer.ttft_s - answer.build_s for answer in answers) / len(answers),
        "build_s": sum(answer.build_s for answer in answers),
        "tpot_s": sum(itl) / len(itl) if itl else None,
        "visible_tokens": _mean(answers, "visible_tokens"),
        "density": _mean(answers, "density"),
        **_sparse_layers(answers),
        "generated_tokens": sum(len(answer.token_ids) for answer in answers),
        "finish_reasons": dict(Counter(answer.finish_reason for answer in answers)),
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


def print_reading(llm: LLM, document: Document) -> None:
    """What was read, by what."""
    dtype = str(llm.dtype).removeprefix("torch.")
    by = f"{llm.directory.name} on {llm.device} ({dtype})"
    _console().print(cell(f"{document.num_tokens:,} tokens read in {document.read_s:.1f} s by {by}\n"))


def print_bold(text: str) -> None:
    """A heading, such as a question."""
    _console().print(cell(text, "bold"))


def print_answers(questions: Sequence[str], columns: Sequence[Column]) -> None:
    """Questions and answers side by side, a column per plan."""
    from rich.table import Table

    table = Table("question", *(_header(column.answers[0].plan) for column in columns), show_lines=True)
    for index, question in enumerate(questions):
        texts = [column.answers[index] for column in columns]
        table.add_row(cell(question), *(cell((each.text or "(nothing)") + cut_mark(each)) for each in texts))
    _console().print(table)


def print_proof(rows: Sequence[dict[str, Any]], verbose: bool, to_stderr: bool) -> None:
    """What each plan cost and kept."""
    _console(to_stderr).print(proof_table(rows, verbose))


def cut_mark(answer: Answer) -> str:
    """What follows the text of an answer that is not complete."""
    return f" [cut after {len(answer.token_ids)} tokens]" if answer.finish_reason == "length" else ""


def proof_table(rows: Sequence[dict[str, Any]], verbose: bool = False) -> Any:
    """What each plan cost and kept, a column per plan; rows that say nothing are left out."""
    from rich.table import Table

    table = Table("", *(_header(row["plan"]) for row in rows))
    lines: dict[str, list[str]] = {}
    for name, show in {**MAIN, **MORE}.items():
        shown = [show(row) for row in rows]
        if any(shown):
            lines[name] = [each or "-" for each in shown]
    main = [name for name in MAIN if name in lines][:MAIN_ROWS]
    for name in lines if verbose else main:
        table.add_row(name, *lines[name])
    return table


def _header(plan: str) -> Any:
    """A column header that shows all of a plan, however narrow the terminal."""
    from rich.table import Column as TableColumn

    return TableColumn(cell(plan), overflow="fold", min_width=8)


def _console(stderr: bool = False) -> Any:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def _mean(answers: Sequence[Answer], key: str) -> float | None:
    values = [value for answer in answers if (value := answer.decode(key)) is not None]
    return sum(values) / len(values) if values else None


def _sparse_layers(answers: Sequence[Answer]) -> dict[str, Any]:
    """What queries of decode saw in the layers where the plan left something out, and how many layers those are."""
    rows = [row for answer in answers for row in answer.stats["layers"] if row["phase"] == "decode"]
    sparse = [row for row in rows if row["sparse_queries"]]
    means = {
        key: sum(row[key] for row in sparse) / len(sparse) if sparse else None for key in ("visible_tokens", "density")
    }
    return {
        **{f"sparse_layer_{key}": value for key, value in means.items()},
        "num_layers": len({row["layer"] for row in rows}),
        "num_sparse_layers": len({row["layer"] for row in sparse}),
    }


def _visible(row: dict[str, Any]) -> str:
    tokens, density = row["sparse_layer_visible_tokens"], row["sparse_layer_density"]
    if tokens is None:  # no layer is sparse: every token is visible
        tokens, density = row["visible_tokens"], row["density"]
    return "" if tokens is None else f"{tokens:,.0f} ({_percent(density)})"


def _density(row: dict[str, Any]) -> str:
    dense = row["num_layers"] - row["num_sparse_layers"]
    of_layers = f", {dense} of {row['num_layers']} layers dense" if dense and row["num_sparse_layers"] else ""
    return _percent(row["density"]) + of_layers


def _bytes_read(row: dict[str, Any]) -> str:
    read, dense = row["kv_bytes_read"], row["kv_bytes_dense"]
    return f"{_bytes(read)} ({_percent(read / dense)} of dense)" if dense else ""


def _selection_time(row: dict[str, Any]) -> str:
    num_layers = max(len({layer["layer"] for layer in row["layers"]}), 1)
    steps = sum(phases["decode"]["queries"] for phases in row["phases"]) / num_layers
    return _milliseconds(row["select_s"] / steps) if steps and row["select_s"] else ""


def _index(layers: dict[int, list[dict[str, Any]]]) -> str:
    """Kinds of index, how many layers, or of a choice by head KV heads, have each, and what audits found."""
    built = [part for rows in layers.values() for row in rows for part in row.get("indexes", ())]
    by_head = any("heads" in part for part in built)
    kinds = Counter(kind for part in built for kind in part.get("heads", [part["kind"]]))
    of_each = [f"{kind} in {count} {'KV heads' if by_head else 'layers'}" for kind, count in kinds.items()]
    found = [share for rows in layers.values() for row in rows for share in row.get("audits", {}).get("found", ())]
    if found:
        of_each.append(f"{_percent(sum(found) / len(found))} of a scan's keys found in {len(found)} audits")
    return ", ".join(of_each)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _bytes(amount: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if amount >= size:
            return f"{amount / size:.1f} {unit}"
    return f"{amount} B"


Show = Callable[[dict[str, Any]], str]

# The first eight that say something are shown, all of them under --verbose.
MAIN: dict[str, Show] = {
    "TTFT": lambda r: _seconds(r["ttft_s"]),
    "TTFT (document cached)": lambda r: _seconds(r["ttft_cached_s"] if r["read_s"] else None),
    "prefill density": lambda r: _percent(r["read_density"]) if (r["read_density"] or 1) < 1 else "",
    "TPOT": lambda r: _milliseconds(r["tpot_s"]),
    "visible tokens (sparse layers)": _visible,
    "density (all layers)": _density,
    "KV bytes read (with index)": _bytes_read,
    "attention mass recovered": lambda r: _percent(r["recovery"]),
    "KV cache": lambda r: _bytes(r["kv_bytes"]),
}
MORE: dict[str, Show] = {
    "top-10 token recall": lambda r: _percent(r["recall"]),
    "selection time per token": _selection_time,
    "index build time (in TTFT)": lambda r: _seconds(r["build_s"]) if r["build_s"] >= 0.005 else "",
    "prompt tokens": lambda r: f"{r['prompt_tokens']:,}",
    "generated tokens": lambda r: f"{r['generated_tokens']:,}",
    "finish reason": lambda r: ", ".join(f"{count} {reason}" for reason, count in r["finish_reasons"].items()),
    "decode path": lambda r: r["path"],
    "dense below": lambda r: f"{r['dense_below']:,} tokens" if r["dense_below"] else "",
    "host attention": lambda r: r["host"],
    "index": lambda r: _index(r["index"]),
    "peak memory of the process": lambda r: _bytes(r["peak_memory_bytes"]),
}
