"""kvsift methods: what can be named in a plan."""

from __future__ import annotations

import json
from typing import Any

from kvsift.cli import options as o


def methods(as_json: o.JsonOption = False) -> None:
    """List every method with its phases and knobs."""
    rows = method_rows()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "chooses", "phases", "knobs", "source", show_lines=True)
    for row in rows:
        knobs = " ".join(f"{key}={value}" for key, value in row["knobs"].items())
        table.add_row(row["name"], row["summary"], " ".join(row["phases"]), knobs, row["source"])
    console = Console()
    console.print(table)
    console.print("Every method but dense also takes: " + " ".join(f"{k}={v}" for k, v in budget_knobs().items()))


def method_rows() -> list[dict[str, Any]]:
    """The catalogue with what each class says about itself."""
    from dataclasses import fields

    from kvsift.methods import catalogue, method_class

    rows = []
    for name, entry in catalogue().items():
        cls = method_class(name)
        knobs = {f.name: f.default for f in fields(cls)}
        rows.append(
            {"name": name, "summary": entry.summary, "phases": list(cls.phases), "knobs": knobs, "source": cls.source}
        )
    return rows


def budget_knobs() -> dict[str, Any]:
    """Keys of every budget with their defaults, as a plan spells them."""
    from dataclasses import fields

    from kvsift.runtime.budget import Budget
    from kvsift.runtime.spec import BUDGET_KEYS

    defaults = {f.name: getattr(Budget(), f.name) for f in fields(Budget)}
    return {
        key: "+".join(map(str, value)) if isinstance(value := defaults[name], tuple) else value
        for key, name in BUDGET_KEYS.items()
    }
