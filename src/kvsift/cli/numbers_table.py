"""The table of numbers of runs: their rows, and how each is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from kvsift.cli.escaping import cell

MAIN_ROWS = 8
LABEL, NARROWEST = 12, 8  # characters of the column of labels, and of each plan's, at least
ENOUGH = 20  # of each plan's, before labels get more
T = TypeVar("T")


def numbers_table(rows: Sequence[dict[str, Any]], verbose: bool = False) -> Any:
    """Return the table of numbers, a column per plan, without empty rows."""
    from rich.table import Table

    table = Table("", *(header(row["plan"]) for row in rows))
    lines: dict[str, list[str]] = {}
    for name, show in {**MAIN, **MORE}.items():
        shown = [show(row) for row in rows]
        if any(shown):
            lines[name] = [text or "-" for text in shown]
    main = [name for name in MAIN if name in lines][:MAIN_ROWS]
    for name in lines if verbose else main:
        table.add_row(name, *lines[name])
    return table


def header(plan: str) -> Any:
    """Return a column header that shows all of a plan, on a terminal of any width."""
    from rich.table import Column as TableColumn

    return TableColumn(cell(plan), overflow="fold", min_width=NARROWEST)


def side_by_side(plans: Sequence[T], width: int) -> Iterator[Sequence[T]]:
    """Yield as many plans as a table of this width has room for, then the next ones."""
    most = max((width - LABEL - 4) // (NARROWEST + 3), 1)  # with lines and spaces between columns
    for start in range(0, len(plans), most):
        yield plans[start : start + most]


def print_fitted(console: Any, table: Any) -> None:
    """Print a table of plans; one that is too wide gets columns of equal width, and no edge is cut off."""
    labels, *plans = table.columns
    if console.measure(table, options=console.options.update(width=10_000)).maximum > console.width:
        longest = max(len(str(label)) for label in [labels.header, *labels.cells])
        labels.width = max(LABEL, min(longest, console.width - 4 - (ENOUGH + 3) * len(plans)))
        table.expand, labels.overflow = True, "fold"
        for column in plans:
            column.ratio, column.min_width = 1, None
    console.print(table)


def _visible(row: dict[str, Any]) -> str:
    tokens, density = row["sparse_layer_visible_tokens"], row["sparse_layer_density"]
    if tokens is None:  # no layer is sparse: every token is visible
        tokens, density = row["visible_tokens"], row["density"]
    return "" if tokens is None else f"{tokens:,.0f} ({_percent(density)})"


def _accepted(exact: dict[str, int]) -> str:
    pairs = (("drafts_accepted", "drafted"), ("repeats_accepted", "repeated"))
    return ", ".join(f"{exact.get(right, 0)} of {exact.get(tried, 0)}" for right, tried in pairs) if exact else ""


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
    """Return how many layers, or KV heads, have each kind of index, and the recall of audits."""
    built = [part for rows in layers.values() for row in rows for part in row.get("indexes", ())]
    unit = "KV heads" if any("heads" in part for part in built) else "layers"
    kinds = Counter(kind for part in built for kind in part.get("heads", [part["kind"]]))
    texts = [f"{kind} in {count} {unit}" for kind, count in kinds.items()]
    shares = [share for rows in layers.values() for row in rows for share in row.get("audits", {}).get("found", ())]
    if shares:
        texts.append(f"{_percent(sum(shares) / len(shares))} of a scan's keys found in {len(shares)} audits")
    return ", ".join(texts)


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

# The first eight that are not empty are shown, all of them under --verbose.
MAIN: dict[str, Show] = {
    "TTFT": lambda r: _seconds(r["ttft_s"]),
    "TTFT (document cached)": lambda r: _seconds(r["ttft_cached_s"] if r["read_s"] else None),
    "prefill density": lambda r: _percent(r["read_density"]) if (r["read_density"] or 1) < 1 else "",
    "TPOT": lambda r: _milliseconds(r["tpot_s"]),
    "exact: accepted drafts, repeats": lambda r: _accepted(r["exact"]),
    "visible tokens (sparse layers)": _visible,
    "density (all layers)": _density,
    "KV bytes read (with index)": _bytes_read,
    "attention mass recovered": lambda r: _percent(r["recovery"]),
    "attention estimated": lambda r: _percent(r["estimated_share"]),
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
